"""Pure: what a launch sends to Modal, and the reasons why it cannot. The executor's `plan` calls `spawn_request`.

A request has the options of the deployed function, which are bound once, and the argument of each rank's call.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from atoll.context import GRACE, MAX_RESTARTS, TIMEOUT, RunContext, rank_environment
from atoll.errors import ConfigError
from atoll.executors.base import Capabilities, check, store_problems
from atoll.executors.modal.errors import EXECUTOR
from atoll.executors.modal.machines import GPUS, gpu_option, gpu_problem, price_notes
from atoll.executors.modal.settings import LONGEST_S, ModalSettings
from atoll.handle import RunHandle
from atoll.journal import FORMAT
from atoll.spec import Placement

CAPABILITIES = Capabilities(
    code=frozenset({"image", "bundle"}), gpus=frozenset(GPUS), secret_schemes=frozenset({"modal"})
)
MOST_GRACE_S = 25.0
"""Modal kills a container 30 s after it has interrupted it; the supervisor needs the rest to store the outcome."""
_SLACK_S = 60
"""Modal's time limit comes so much later than the supervisor's, which stores how the replica ended."""
_OPEN_SCHEMES = ("memory", "file", "local", "")


def spawn_request(
    context: RunContext, placement: Placement, settings: ModalSettings, *, environment: str | None, version: str
) -> tuple[dict[str, Any], list[str], list[str]]:
    """The request, every reason why Modal cannot run it, and notes for the user."""
    problems = [*_problems(context, placement, settings)]
    request = {
        "app": settings.app,
        "function": settings.function,
        "environment": environment,
        "run": {
            "run_id": context.run_id,
            "store": context.store_uri,
            "launch": context.launch,
            **({"first_rank": context.first_rank} if context.first_rank else {}),
        },
        "options": _options(placement, settings),
        "calls": [_argument(context, placement, rank, version) for rank in context.ranks(placement.replicas)],
    }
    notes = price_notes(
        placement.gpu,
        cpus=placement.cpus,
        memory_gib=placement.memory_gib,
        replicas=placement.replicas,
        limit_s=placement.timeout_s,
        own=settings.prices,
    )
    return request, problems, [*_notes(placement), *notes]


def run_handle(request: Mapping[str, Any], replicas: int) -> RunHandle:
    """The handle of a request. It names the store, which has the records of the calls."""
    run = request["run"]
    place = "/".join(part for part in (request["environment"], request["app"]) if part)
    native = f"{run['store'].rstrip('/')}/{run['launch']}/{run['run_id']}"
    return RunHandle(EXECUTOR, place, native, replicas, run.get("first_rank", 0))


def context_of(handle: RunHandle) -> RunContext:
    """The run of a handle: the inverse of `run_handle`."""
    store, launch, run_id = ["", "", "", *handle.native_id.rsplit("/", 2)][-3:]
    if not store or not launch.isdecimal() or not run_id or int(launch) < 1:
        raise ConfigError(f"`{handle}` is no handle of a run on Modal: it names no store, launch and run")
    return RunContext(run_id, store, int(launch), handle.first_rank)


def request_token(request: Mapping[str, Any]) -> str:
    """Distinguishes this request from another one of the same run and launch."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def _options(placement: Placement, settings: ModalSettings) -> dict[str, Any]:
    """Arguments of `with_options`. Those that are bound here replace what was deployed."""
    secrets = {name: list[str]() for name in settings.secrets}
    for variable, reference in placement.secrets.items():
        secrets.setdefault(reference.partition(":")[2], []).append(variable)
    return _without_none(
        gpu=gpu_option(placement.gpu),
        cpu=placement.cpus,
        memory=None if placement.memory_gib is None else math.ceil(placement.memory_gib * 1024),
        timeout=min(LONGEST_S, math.ceil(placement.timeout_s + placement.grace_s) + _SLACK_S),
        retries=0,
        secrets={name: sorted(keys) for name, keys in sorted(secrets.items())} or None,
        volumes=dict(settings.volumes) or None,
        region=settings.region,
        cloud=settings.cloud,
    )


def _argument(context: RunContext, placement: Placement, rank: int, version: str) -> dict[str, Any]:
    """The argument of one rank's call: the variables of the replica. The task is in the store."""
    return {
        "format": FORMAT,
        "atoll": version,
        "environment": {
            **context.environment(placement.replicas),
            **rank_environment(rank, placement.rank_env),
            **placement.env,
            TIMEOUT: f"{placement.timeout_s:g}",
            GRACE: f"{placement.grace_s:g}",
            **({MAX_RESTARTS: str(placement.max_restarts)} if placement.max_restarts else {}),
        },
    }


def _problems(context: RunContext, placement: Placement, settings: ModalSettings) -> Iterator[str]:
    yield from (problem for problem in check(placement, CAPABILITIES) if not problem.startswith("gpu="))
    if problem := gpu_problem(placement.gpu):
        yield problem
    if placement.timeout_s > LONGEST_S:
        yield f"timeout_s={placement.timeout_s:g}: Modal ends every call after 24 h, so at most {LONGEST_S}"
    if placement.grace_s > MOST_GRACE_S:
        rule = "Modal kills a container 30 s after it has interrupted it"
        yield f"grace_s={placement.grace_s:g}: {rule}, so at most {MOST_GRACE_S:g} here"
    if placement.image is not None and placement.image != settings.image:
        remedy = f"deploy it: `atoll deploy modal --setting image={placement.image}`, and set `image` for this run too"
        yield f"image=`{placement.image}`: Modal binds the image when the app is deployed; {remedy}"
    for variable, reference in placement.secrets.items():
        if reference.startswith("modal:") and not reference.partition(":")[2]:
            yield f"secrets.{variable}=`{reference}`: write `modal:NAME`, the name of a secret in Modal"
    yield from settings.problems()
    yield from store_problems(context.store_uri, is_mounted=settings.store_is_mounted)
    scheme = context.store_uri.partition(":")[0]
    has_secret = bool(settings.secrets or placement.secrets)
    if scheme not in _OPEN_SCHEMES and not has_secret and not settings.store_needs_no_secret:
        remedy = "name a secret of Modal that has them in `secrets`, or set store_needs_no_secret=true"
        yield f"store=`{context.store_uri}`: the replicas have no credentials to open it; {remedy}"


def _notes(placement: Placement) -> Iterator[str]:
    if placement.max_restarts:
        yield (
            f"restarts: at most {placement.max_restarts} for each replica, by its supervisor in the container; "
            "Modal itself moves a preempted call to another machine"
        )


def _without_none(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
