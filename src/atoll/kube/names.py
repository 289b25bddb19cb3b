"""Pure: the names, labels and annotations that Atoll gives to Kubernetes objects, and their inverse.

Every label and annotation of Atoll begins with `PREFIX`. A label has a safe form of the run id, for people and for
`kubectl -l`; the exact run id, the store and the launch are annotations, because a label cannot hold every text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from atoll.context import RunContext

PREFIX = "atoll.dev/"
MANAGED_BY, MANAGER = "app.kubernetes.io/managed-by", "atoll"
"""The label by which `sweep` finds every Job of Atoll."""
RUN = f"{PREFIX}run"
RUN_ID, STORE, LAUNCH = f"{PREFIX}run-id", f"{PREFIX}store", f"{PREFIX}launch"
FIRST_RANK = f"{PREFIX}first-rank"
"""The annotation of a later part of a run: the rank of its first pod."""
TOKEN = f"{PREFIX}token"
"""The annotation with the digest of the request: tells a Job of this request from another Job of the same name."""
QUEUE_TIMEOUT = f"{PREFIX}queue-timeout-s"
TIMEOUT = f"{PREFIX}timeout-s"
COMMAND = f"{PREFIX}command"
"""What the container runs: `replica`, `pip` (installs Atoll first) or `own` (the image's program)."""
MAX_RESTARTS, ATTEMPT = f"{PREFIX}max-restarts", f"{PREFIX}attempt"
"""On an AppWrapper: how often a run may be restarted, and how often Atoll itself has restarted it."""
ENDED, POKE = f"{PREFIX}ended-", f"{PREFIX}failed-job"
"""On an AppWrapper: how attempt N ended, as `ended-N`; and the Job that has failed, whose note wakes the controller."""

BATCH = "batch.kubernetes.io/"
INDEX = f"{BATCH}job-completion-index"
CONTROLLER_UID = f"{BATCH}controller-uid"
FAILURES, IGNORED_FAILURES = f"{BATCH}job-index-failure-count", f"{BATCH}job-index-ignored-failure-count"
CONTAINER = "replica"

_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?\Z")
_DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")
_KEY_NAME = _LABEL_VALUE


def job_name(context: RunContext, replicas: int) -> str:
    """The name of the Job. `NAME-RANK` of every rank must be one DNS label of at most 63 characters."""
    return context.native_name(limit=62 - len(str(replicas - 1)))


def wrapper_name(context: RunContext, namespace: str, replicas: int) -> str:
    """The name of an AppWrapper and of its Job: unique in the cluster, because MCAD mixes up two of one name."""
    scoped = replace(context, store_uri=f"{context.store_uri}\0{namespace}")
    return job_name(scoped, replicas)


def run_label(run_id: str) -> str:
    """The run id if it is a label value, else a name made from it."""
    return run_id if is_label_value(run_id) else RunContext(run_id, "").native_name()


def job_labels(context: RunContext) -> dict[str, str]:
    """The labels of Atoll on the Job and on its pods."""
    return {MANAGED_BY: MANAGER, RUN: run_label(context.run_id)}


def job_annotations(context: RunContext) -> dict[str, str]:
    """What a handle needs to be attached without a record: run, store and launch."""
    first = {FIRST_RANK: str(context.first_rank)} if context.first_rank else {}
    return {RUN_ID: context.run_id, STORE: context.store_uri, LAUNCH: str(context.launch), **first}


def context_of(job: Mapping[str, Any]) -> RunContext | None:
    """The inverse of `job_annotations`; None if this is not a Job of Atoll."""
    found = job.get("metadata", {}).get("annotations") or {}
    if not {RUN_ID, STORE} <= found.keys():
        return None
    launch, first = found.get(LAUNCH, "1"), found.get(FIRST_RANK, "0")
    return RunContext(
        found[RUN_ID],
        found[STORE],
        int(launch) if launch.isdecimal() else 1,
        int(first) if first.isdecimal() else 0,
    )


def first_rank_of(job: Mapping[str, Any]) -> int:
    """The rank of the first pod of a Job, or of the Job in an AppWrapper."""
    found = context_of(job)
    return 0 if found is None else found.first_rank


def is_dns_label(text: object) -> bool:
    """Whether this can be the name of a namespace, a Service or a container."""
    return isinstance(text, str) and _DNS_LABEL.match(text) is not None


def is_dns_name(text: object) -> bool:
    """Whether this can be the name of most objects: DNS labels joined by dots."""
    return isinstance(text, str) and len(text) <= 253 and all(map(is_dns_label, text.split(".")))


def is_label_value(text: object) -> bool:
    return isinstance(text, str) and _LABEL_VALUE.match(text) is not None


def is_label_key(text: object) -> bool:
    """Whether this is `name` or `prefix/name`: the key of a label, an annotation, a taint or a resource."""
    if not isinstance(text, str):
        return False
    prefix, slash, name = text.rpartition("/")
    return _KEY_NAME.match(name) is not None and (not slash or is_dns_name(prefix))


def is_ours(key: str) -> bool:
    """Whether only Atoll or the Job controller may set this label or annotation."""
    return key.startswith((PREFIX, BATCH)) or key in (MANAGED_BY, "job-name", "controller-uid")
