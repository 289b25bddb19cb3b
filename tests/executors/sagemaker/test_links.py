"""Web pages about jobs: the console of the region's partition, escaped as the console expects it."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

import pytest
from given_clients import Service, executor

from atoll.executors.base import Linker
from atoll.executors.sagemaker.links import job_links
from atoll.handle import RunHandle

JOB = "exp-0123456789ab-00002"


@pytest.mark.parametrize(
    ("region", "host"),
    [
        ("eu-west-1", "eu-west-1.console.aws.amazon.com"),
        ("us-east-1", "us-east-1.console.aws.amazon.com"),
        ("cn-north-1", "cn-north-1.console.amazonaws.cn"),
        ("us-gov-west-1", "us-gov-west-1.console.amazonaws-us-gov.com"),
        ("eusc-de-east-1", "eusc-de-east-1.console.amazonaws-eusc.eu"),
        ("", "console.aws.amazon.com"),
    ],
)
def test_each_partition_has_its_console(region, host):
    links = job_links(region, JOB)
    assert list(links) == ["console", "logs"]
    for link in links.values():
        parts = urlsplit(link)
        assert (parts.scheme, parts.netloc, parts.query) == ("https", host, f"region={region}" if region else "")
    assert urlsplit(links["console"]).fragment == f"/jobs/{JOB}"


def test_the_log_page_shows_the_streams_of_the_job_alone():
    fragment = urlsplit(job_links("us-east-1", JOB)["logs"]).fragment
    assert fragment == (
        f"logsV2:log-groups/log-group/$252Faws$252Fsagemaker$252FTrainingJobs$3FlogStreamNameFilter$3D{JOB}"
    )
    assert unquote(unquote(fragment.replace("$", "%"))).endswith(
        f"/aws/sagemaker/TrainingJobs?logStreamNameFilter={JOB}"
    )


def test_a_region_without_a_public_console_has_no_links():
    assert job_links("us-iso-east-1", JOB) == job_links("eu-isoe-west-1", JOB) == {}


def test_what_is_no_name_is_escaped():
    links = job_links("a/b@c", "x y/#?")
    assert {urlsplit(link).netloc for link in links.values()} == {"a%2Fb%40c.console.aws.amazon.com"}
    assert not any(set(" @") & set(link) for link in links.values())


def test_the_executor_knows_them_from_the_handle_alone():
    service = Service()
    made = executor(service, region="eu-west-1")
    assert isinstance(made, Linker)
    links = made.links(RunHandle("sagemaker", "cn-north-1", "exp-0123456789ab", 4), 2)
    assert links == job_links("cn-north-1", JOB)
    assert service.calls == []
