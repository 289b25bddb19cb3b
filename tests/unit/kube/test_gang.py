"""Gangs: exactly what each scheduler wants."""

from __future__ import annotations

import pytest

from atoll.kube.gang import Gang, gang_notes, gang_parts, gang_problems, is_gang, job_for


@pytest.mark.parametrize("text", ["none", "native", "kueue:team-a", "coscheduling:sched", "volcano:default"])
def test_the_forms(text):
    assert is_gang(text)


@pytest.mark.parametrize("text", ["", "kueue", "kueue:", "kueue:a b", "native:x", "slurm:x", "Kueue:a", None, 3])
def test_other_forms_are_refused(text):
    assert not is_gang(text)


def test_none_adds_nothing():
    assert gang_parts(Gang("none"), "j", 4) == gang_parts(Gang("other"), "j", 4)
    assert not gang_parts(Gang("none"), "j", 4).job_labels


def test_kueue_wants_a_label_and_a_suspended_job():
    parts = gang_parts(Gang.parse("kueue:team-a"), "j", 4)
    assert parts.job_labels == {"kueue.x-k8s.io/queue-name": "team-a"}
    assert parts.job_spec == {"suspend": True}
    assert (parts.objects, parts.pod_spec, parts.pod_labels) == ((), {}, {})


def test_kueue_has_priorities_of_its_own():
    parts = gang_parts(Gang.parse("kueue:q"), "j", 4, queue_priority="high")
    assert parts.job_labels == {"kueue.x-k8s.io/queue-name": "q", "kueue.x-k8s.io/priority-class": "high"}
    assert problems("kueue:q", queue_priority="high") == []
    assert problems("kueue:q", queue_priority="high", marks=parts.job_labels) == []
    other = {"kueue.x-k8s.io/priority-class": "low"}
    assert problems("kueue:q", queue_priority="high", marks=other) == ["queue_priority"]
    assert problems("none", queue_priority="high") == ["queue_priority"]


def test_coscheduling_wants_a_group_a_label_and_a_scheduler():
    parts = gang_parts(Gang.parse("coscheduling:sched"), "j", 4)
    assert parts.pod_labels == {"scheduling.x-k8s.io/pod-group": "j"}
    assert parts.pod_spec == {"schedulerName": "sched"}
    (group,) = parts.objects
    assert (group["apiVersion"], group["kind"]) == ("scheduling.x-k8s.io/v1alpha1", "PodGroup")
    assert group["metadata"]["name"] == "j"
    assert group["spec"]["minMember"] == 4


def test_volcano_wants_annotations_and_its_scheduler():
    parts = gang_parts(Gang.parse("volcano:gpu"), "j", 4)
    assert parts.job_annotations == {"scheduling.volcano.sh/group-min-member": "4"}
    assert parts.pod_annotations == {"scheduling.volcano.sh/queue-name": "gpu"}
    assert parts.pod_spec == {"schedulerName": "volcano"}


def test_native_adds_a_field_on_servers_that_have_it_only():
    (variant,) = gang_parts(Gang.parse("native"), "j", 4).by_version
    assert variant["from"] == [1, 37]
    assert variant["spec"] == {"scheduling": {"schedulingPolicy": {"gang": {"minCount": 4}}}}


def test_the_field_of_a_native_gang_is_sent_to_servers_that_have_it():
    (variant,) = gang_parts(Gang.parse("native"), "j", 4).by_version
    request = {"job": {"metadata": {"name": "j"}, "spec": {"completions": 4}}, "by_version": [variant]}
    assert job_for(request, (1, 36)) == request["job"]
    assert job_for(request, (1, 37))["spec"] == {"completions": 4, **variant["spec"]}
    assert job_for(request, (2, 0))["spec"]["scheduling"] == variant["spec"]["scheduling"]
    assert request["job"]["spec"] == {"completions": 4}
    assert job_for({"job": request["job"]}, (1, 37)) == request["job"]


def problems(text: str, *, has_requests=True, marks=None, max_restarts=0, queue_priority=None):
    found = gang_problems(
        Gang.parse(text),
        has_requests=has_requests,
        marks=marks or {},
        max_restarts=max_restarts,
        queue_priority=queue_priority,
    )
    return [problem.partition(":")[0].partition("=")[0] for problem in found]


def test_kueue_counts_requests_and_starts_no_part_of_a_run():
    assert problems("kueue:q") == []
    assert problems("kueue:q", has_requests=False) == ["gang"]
    assert problems("kueue:q", marks={"kueue.x-k8s.io/job-min-parallelism": "1"}) == ["labels, annotations"]
    assert problems("none", marks={"kueue.x-k8s.io/queue-name": "q"}) == ["labels.kueue.x-k8s.io/queue-name"]


def test_a_native_gang_cannot_restart_a_rank():
    assert problems("native", max_restarts=1) == ["max_restarts"]
    assert problems("coscheduling:s", max_restarts=1) == []


@pytest.mark.parametrize("text", ["none", "native", "kueue:q", "coscheduling:s", "volcano:q"])
def test_the_plan_says_what_the_cluster_gives(text):
    assert len(list(gang_notes(Gang.parse(text), 2))) == 1
    assert list(gang_notes(Gang.parse(text), 1)) == []
