"""Pure: the page of a Job in the console of EKS, if the context of the kubeconfig names its cluster."""

from __future__ import annotations

import re
from urllib.parse import quote

_CLUSTER = re.compile(r"arn:(aws[\w-]*):eks:([\w-]+):\d*:cluster/([\w-]+)\Z")
"""The name that `aws eks update-kubeconfig` gives to a context."""
_CONSOLES = {
    "aws": "console.aws.amazon.com",
    "aws-cn": "console.amazonaws.cn",
    "aws-us-gov": "console.amazonaws-us-gov.com",
}


def job_links(context: str, namespace: str, job: str) -> dict[str, str]:
    """`console`: the page of the Job with its pods. Empty if the context does not name a cluster of EKS."""
    found = _CLUSTER.match(context)
    if found is None or found[1] not in _CONSOLES:
        return {}
    partition, region, cluster = found.groups()
    page = f"eks/clusters/{cluster}/jobs/{quote(job, safe='')}?namespace={quote(namespace, safe='')}&region={region}"
    return {"console": f"https://{region}.{_CONSOLES[partition]}/{page}"}
