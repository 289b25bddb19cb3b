"""Pure: the pages of the AWS console about a training job."""

from __future__ import annotations

from urllib.parse import quote

from atoll.executors.sagemaker.logs import GROUP

# The console of each partition by the beginning of its regions; the first match applies.
_CONSOLES = {
    "cn-": "console.amazonaws.cn",
    "us-gov-": "console.amazonaws-us-gov.com",
    "eusc-": "console.amazonaws-eusc.eu",
    "us-iso": "",
    "eu-iso": "",
    "": "console.aws.amazon.com",
}


def job_links(region: str, job: str) -> dict[str, str]:
    """`console`: the page of the job. `logs`: its streams in CloudWatch, and those of the jobs that replaced it.

    Empty for a region whose console is not public. Without a region, the console shows the one that the user chose
    last.
    """
    domain = next(domain for prefix, domain in _CONSOLES.items() if region.startswith(prefix))
    if not domain:
        return {}
    name = quote(region, safe="")
    host, query = (f"{name}.{domain}", f"?region={name}") if region else (domain, "")
    log_group = f"{_in_fragment(GROUP)}$3FlogStreamNameFilter$3D{_in_fragment(job)}"
    return {
        "console": f"https://{host}/sagemaker/home{query}#/jobs/{quote(job, safe='')}",
        "logs": f"https://{host}/cloudwatch/home{query}#logsV2:log-groups/log-group/{log_group}",
    }


def _in_fragment(text: str) -> str:
    """The text as a part of CloudWatch's addresses: escaped twice, with `$` in place of the first `%`."""
    return quote(quote(text, safe=""), safe="").replace("%", "$")
