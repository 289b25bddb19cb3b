"""Pure: the security contexts of a replica.

The default is as strict as any image can bear. `restricted` also forbids root, as the Pod Security level of that name
does. No user id is set unless the user names one, because OpenShift chooses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

LEVELS = ("default", "restricted")


def pod_context(level: str, run_as_user: int | None, fs_group: int | None) -> dict[str, Any]:
    """The securityContext of the pod."""
    context: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    if level == "restricted":
        context["runAsNonRoot"] = True
    if run_as_user is not None:
        context["runAsUser"] = run_as_user
    if fs_group is not None:
        context["fsGroup"] = fs_group
    return context


def container_context() -> dict[str, Any]:
    """The securityContext of the container."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def security_problems(
    level: str, *, run_as_user: int | None, image_is_non_root: bool, has_host_path: bool
) -> Iterator[str]:
    """Settings that contradict the level."""
    if level != "restricted":
        if image_is_non_root:
            yield 'image_is_non_root: has no effect without pod_security="restricted"'
        return
    if run_as_user == 0:
        yield "run_as_user=0: pod_security=`restricted` forbids root; name another user"
    elif run_as_user is None and not image_is_non_root:
        yield (
            "pod_security=`restricted`: forbids root, and most images run as root; set run_as_user, or "
            "image_is_non_root=true if the image names another user by its number"
        )
    if has_host_path:
        yield "volumes: pod_security=`restricted` forbids host_path; use a pvc"


def level_problems(level: str, pod: Mapping[str, Any]) -> Iterator[str]:
    """Why a namespace that enforces this level admits no such pod of ours. The API server itself says so only where
    the level of its warnings is not a lower one. An overlay may have given the pod any shape."""
    if level not in ("baseline", "restricted"):
        return
    if any("hostPath" in volume for volume in pod.get("volumes") or ()):
        yield "hostPath volumes"
    contexts = [(each.get("securityContext") or {}) for each in (pod, *(pod.get("containers") or ()))]
    if level == "restricted" and not any(context.get("runAsNonRoot") for context in contexts):
        yield "runAsNonRoot is not set"
