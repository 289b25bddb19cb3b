"""Apps of TorchX and answers of clusters that several test files share. It needs no fixture of ours."""

from __future__ import annotations

from typing import Any

from torchx import specs


def role(name: str = "trainer", replicas: int = 1, **changes: Any) -> specs.Role:
    given: dict[str, Any] = {
        "name": name,
        "image": "example.com/train:1",
        "entrypoint": "python",
        "args": ["train.py", "--id", specs.macros.app_id, "--rank0", specs.macros.rank0_env],
        "env": {"LEVEL": "info"},
        "resource": specs.Resource(cpu=2, memMB=3000, gpu=1),
        "port_map": {"c10d": 29501},
        "num_replicas": replicas,
    }
    return specs.Role(**{**given, **changes})


def app(*roles: specs.Role, name: str = "fit") -> specs.AppDef:
    return specs.AppDef(name, roles=list(roles) or [role()])


def pod(
    role_name: str,
    replica: int,
    phase: str = "Running",
    *,
    app_id: str = "fit-x",
    exit_code: int | None = None,
    is_job: bool = False,
    created: str = "2026-11-18T00:00:00Z",
    **status: Any,
) -> dict[str, Any]:
    """A pod as the API server answers."""
    name = f"{app_id}-{replica}"
    index = "batch.kubernetes.io/job-completion-index"
    container = "replica" if is_job else name
    own = {"index": index} if is_job else {"index": "torchx.pytorch.org/replica-id"}
    state: dict[str, Any] = {"running": {"startedAt": created}} if phase == "Running" else {}
    if exit_code is not None:
        state = {"terminated": {"exitCode": exit_code, "reason": "Error", "finishedAt": created}}
    return {
        "metadata": {
            "name": f"{name}-abcde" if is_job else name,
            "namespace": "ns",
            "creationTimestamp": created,
            "labels": {
                "app.kubernetes.io/instance": app_id,
                "torchx.pytorch.org/role-name": role_name,
                own["index"]: str(replica),
            },
            "annotations": {},
        },
        "spec": {"hostname": name, "subdomain": app_id, "containers": [{"name": container}]},
        "status": {"phase": phase, "containerStatuses": [{"name": container, "state": state}], **status},
    }
