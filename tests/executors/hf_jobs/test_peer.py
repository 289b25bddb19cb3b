"""The peer answers the real client like the service, as far as that is known."""

from __future__ import annotations

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import BadRequestError, HfHubHTTPError, JobNotFoundError

from services.hf_jobs.server import TOKEN


@pytest.fixture
def api(hub):
    return HfApi(endpoint=hub.endpoint, token=TOKEN)


def test_a_job_runs_with_its_variables_and_its_log_is_kept(api, hub):
    code = "import os; print(os.environ['A'], os.environ['B'], 'JOB_ID' in os.environ, 'HF_TOKEN' in os.environ)"
    job = api.run_job(image="i", command=["python", "-c", code], env={"A": "1"}, secrets={"B": "2"}, namespace="tester")
    assert api.wait_for_job(job.id, namespace="tester", poll_interval=0.05).status.stage == "COMPLETED"
    assert list(api.fetch_job_logs(job_id=job.id, namespace="tester", follow=True)) == ["1 2 True False"]
    assert api.inspect_job(job_id=job.id, namespace="tester").secrets == ["B"]


def test_a_failure_a_limit_and_a_second_attempt(api, hub, tmp_path):
    def run(code: str, **more) -> str:
        job = api.run_job(image="i", command=["python", "-c", code], namespace="tester", **more)
        ended = api.wait_for_job(job.id, namespace="tester", poll_interval=0.05)
        return f"{ended.status.stage}: {ended.status.message}"

    assert run("raise SystemExit(3)") == "ERROR: Job failed with exit code: 3. Reason: Error"
    assert run("import time; time.sleep(60)", timeout=1) == "ERROR: Job timeout"
    once = f"import os; os.mkdir({str(tmp_path / 'tried')!r}) or os._exit(3)"
    assert run(f"try:\n {once}\nexcept OSError: pass", attempts=2) == "COMPLETED: None"


def test_lists_are_paged_and_filtered(api, hub):
    hub.admits.clear()
    hub.page_size = 2
    for number in range(5):
        api.run_job(image="i", command=["true"], labels={"n": str(number), "all": "x"}, namespace="tester")
    assert len(list(api.list_jobs(labels={"all": "x"}, namespace="tester"))) == 5
    assert hub.calls["list"] == 3
    assert len(list(api.list_jobs(labels={"all": "x", "n": "2"}, namespace="tester"))) == 1
    assert list(api.list_jobs(status="RUNNING", namespace="tester")) == []
    assert list(api.list_jobs(namespace="team")) == []


def test_what_the_service_refuses_the_peer_refuses(api, hub):
    with pytest.raises(BadRequestError, match="flavor"):
        api.run_job(image="i", command=["true"], flavor="h1000", namespace="tester")
    with pytest.raises(BadRequestError, match="labels"):
        api.run_job(image="i", command=["true"], labels={"a": "b c"}, namespace="tester")
    with pytest.raises(JobNotFoundError):
        api.inspect_job(job_id="0" * 24, namespace="tester")
    for wrong in (HfApi(endpoint=hub.endpoint, token="hf_other"), api):
        with pytest.raises(HfHubHTTPError) as caught:
            wrong.run_job(image="i", command=["true"], namespace="strangers")
        assert caught.value.response.status_code == (403 if wrong is api else 401)


def test_an_endpoint_that_is_not_implemented_is_named(api, hub):
    with pytest.raises(HfHubHTTPError, match=r"does not implement GET /api/scheduled-jobs/tester"):
        list(api.list_scheduled_jobs(namespace="tester"))
    assert hub.unimplemented == ["GET /api/scheduled-jobs/tester"]
