"""Pages of a Job in the console of EKS."""

from __future__ import annotations

import pytest

from atoll.executors.base import Linker
from atoll.executors.kubernetes.executor import KubernetesExecutor
from atoll.handle import RunHandle
from atoll.kube.links import job_links

ARN = "arn:aws:eks:eu-west-1:123456789012:cluster/prod"


def test_a_context_of_eks_names_the_page_of_the_job():
    page = "https://eu-west-1.console.aws.amazon.com/eks/clusters/prod/jobs/exp?namespace=team-a&region=eu-west-1"
    assert job_links(ARN, "team-a", "exp") == {"console": page}
    executor = KubernetesExecutor(image="i")
    assert isinstance(executor, Linker)
    assert executor.links(RunHandle("kubernetes", f"{ARN}/team-a", "exp", 2), 1) == {"console": page}
    assert executor.links(RunHandle("kubernetes", "team-a", "exp", 2), 1) == {}


@pytest.mark.parametrize("context", ["", "kind-kind", "arn:aws-iso:eks:us-iso-east-1:1:cluster/x", f"{ARN}/x"])
def test_other_contexts_have_no_page(context):
    assert job_links(context, "team-a", "exp") == {}


def test_other_partitions_have_their_own_console():
    (page,) = job_links("arn:aws-cn:eks:cn-north-1:1:cluster/x", "n", "j").values()
    assert page.startswith("https://cn-north-1.console.amazonaws.cn/eks/")
