"""`atoll doctor hf-jobs`: checks whether a launch from this machine would work. Each check only reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from atoll.errors import AtollError
from atoll.executors.base import Check
from atoll.executors.hf_jobs.errors import EXECUTOR
from atoll.executors.hf_jobs.machines import CPU_FLAVOR, chosen_machine
from atoll.validation import settings_hint

if TYPE_CHECKING:
    from atoll.executors.hf_jobs.executor import HubJobsExecutor

_WRITE = "job.write"


def setup_checks(executor: HubJobsExecutor) -> list[Check]:
    """Token and its scopes, namespace, image, flavor and price, and the read call that a run makes."""
    settings = executor.settings
    try:
        identity = executor.whoami()
    except AtollError as exc:
        return [Check("token", False, exc.message, exc.hint or "")]
    found = [_token(identity), *_namespace(identity, settings.namespace)]
    if not settings.image:
        hint = settings_hint(EXECUTOR)
        found.append(Check("image", False, "image is not set; a run then has to name one", hint, is_input=True))
    else:
        found.append(Check("image", True, f"{settings.image}; a replica checks its version of Atoll when it starts"))
    return [*found, *_calls(executor, settings.namespace or str(identity.get("name", "")))]


def _token(identity: Mapping[str, Any]) -> Check:
    """Who the token is, and whether it may run jobs, as far as the Hub tells."""
    name = str(identity.get("name", "unknown"))
    token = ((identity.get("auth") or {}).get("accessToken")) or {}
    role = str(token.get("role", ""))
    if role == "read":
        hint = "create a token with the scope `job.write`, or a write token"
        return Check("token", False, f"the token of {name} may only read", hint)
    if role == "fineGrained":
        told = token.get("fineGrained") or {}
        scopes = {word for each in told.get("scoped") or [] for word in each.get("permissions") or []}
        if _WRITE not in scopes | set(told.get("global") or []):
            return Check("token", False, f"the token of {name} has no scope `{_WRITE}`", "add it to the token")
    return Check("token", True, f"{name}{f', {role}' if role else ''}")


def _namespace(identity: Mapping[str, Any], namespace: str | None) -> Iterator[Check]:
    mine = [str(identity.get("name", "")), *(str(each.get("name")) for each in identity.get("orgs") or [])]
    if namespace is None:
        hint = f"set it to one of {', '.join(mine)}"
        yield Check("namespace", False, "namespace is not set", hint, is_input=True)
    elif namespace not in mine:
        yield Check(
            "namespace",
            False,
            f"the token is not of `{namespace}`",
            f"set namespace to one of {', '.join(mine)}, or use a token of `{namespace}`",
        )
    else:
        yield Check("namespace", True, namespace)


def _calls(executor: HubJobsExecutor, namespace: str) -> Iterator[Check]:
    def hardware() -> Check:
        machines = executor.hardware("doctor")
        machine = chosen_machine(None, executor.settings.flavor or CPU_FLAVOR, machines)
        if isinstance(machine, str):
            return Check("flavor", False, machine, is_input=True)
        price = "price unknown" if machine.hourly_usd is None else f"${machine.hourly_usd:,.2f}/h"
        return Check("flavor", True, f"{machine}, {price}; {len(machines)} flavors on offer")

    def jobs() -> Check:
        return Check(
            "jobs",
            True,
            f"can be listed in {namespace}; {executor.count_jobs(namespace)} jobs of Atoll wait or run there",
        )

    yield _checked("flavor", hardware)
    yield _checked("jobs", jobs)


def _checked(name: str, read: Callable[[], Check]) -> Check:
    try:
        return read()
    except AtollError as exc:
        return Check(name, False, exc.message, exc.hint or "")
