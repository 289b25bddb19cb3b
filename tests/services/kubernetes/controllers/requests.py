"""Requests of tests to the controllers, without any executor: Jobs, AppWrappers, and what to wait for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Object = dict[str, Any]
QUEUE = "kueue.x-k8s.io/queue-name"


def job(
    name: str,
    script: str = "true",
    *,
    count: int = 2,
    cpu: str = "100m",
    queue: str = "",
    labels: Mapping[str, str] | None = None,
) -> Object:
    container = {"name": "main", "image": "busybox", "command": ["sh", "-c", script],
                 "resources": {"requests": {"cpu": cpu}, "limits": {"cpu": cpu}}}  # fmt: skip
    template = {"spec": {"restartPolicy": "Never", "containers": [container], "terminationGracePeriodSeconds": 1}}
    behaviour = {"completionMode": "Indexed", "completions": count, "parallelism": count, "backoffLimit": 0}
    chosen = {**(labels or {}), **({QUEUE: queue} if queue else {})}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "labels": chosen},
            "spec": {**behaviour, "suspend": bool(queue), "template": template}}  # fmt: skip


def appwrapper(name: str, *components: Object, queue: str = "") -> Object:
    annotations = {"workload.codeflare.dev.appwrapper/retryLimit": "0"}
    metadata = {"name": name, "annotations": annotations, "labels": {QUEUE: queue} if queue else {}}
    spec = {"suspend": bool(queue), "components": [{"template": each} for each in components]}
    return {"apiVersion": "workload.codeflare.dev/v1beta2", "kind": "AppWrapper", "metadata": metadata, "spec": spec}


def is_true(condition: str) -> Callable[[Object | None], bool]:
    def holds(found: Object | None) -> bool:
        conditions = (found or {}).get("status", {}).get("conditions", [])
        return any((one["type"], one["status"]) == (condition, "True") for one in conditions)

    return holds


def in_phase(*phases: str) -> Callable[[Object | None], bool]:
    return lambda found: (found or {}).get("status", {}).get("phase") in phases


def mcad_appwrapper(name: str, inner: Object, namespace: str) -> Object:
    """Version v1beta1. The name must be unique in the whole cluster."""
    inner = {**inner, "metadata": {**inner["metadata"], "namespace": namespace}}
    pods = {"replicas": inner["spec"]["completions"], "requests": {"cpu": "100m"}, "limits": {"cpu": "100m"}}
    item = {
        "replicas": 1,
        "completionstatus": "Complete,Failed",
        "custompodresources": [pods],
        "generictemplate": inner,
    }
    return {"apiVersion": "workload.codeflare.dev/v1beta1", "kind": "AppWrapper", "metadata": {"name": name},
            "spec": {"resources": {"GenericItems": [item]}}}  # fmt: skip
