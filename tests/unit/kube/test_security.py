"""What a Pod Security level forbids of our pods."""

from __future__ import annotations

import pytest

from atoll.kube.security import container_context, level_problems, pod_context

HOST = [{"name": "v", "hostPath": {"path": "/data"}}]


def pod(level: str, **more: object) -> dict[str, object]:
    return {"securityContext": pod_context(level, None, None), **more}


@pytest.mark.parametrize(
    ("enforced", "given", "problems"),
    [
        ("privileged", pod("default", volumes=HOST), 0),
        ("baseline", pod("default"), 0),
        ("baseline", pod("default", volumes=HOST), 1),
        ("restricted", pod("default", containers=[{"securityContext": container_context()}]), 1),
        ("restricted", pod("default", volumes=HOST), 2),
        ("restricted", pod("restricted"), 0),
        ("restricted", {"containers": [{"securityContext": {"runAsNonRoot": True}}]}, 0),
        ("restricted", {"securityContext": None, "containers": None, "volumes": None}, 1),
    ],
)
def test_what_a_level_forbids(enforced, given, problems):
    assert len(list(level_problems(enforced, given))) == problems
