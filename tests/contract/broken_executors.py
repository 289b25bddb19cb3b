"""Adapters that each break one promise of the Executor contract, in a way that adapters do break it."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from threading import Event, Thread
from typing import Any, ClassVar

from atoll.context import GRACE, RunContext
from atoll.errors import BackendError, BackendUnavailable, RunNotFound, StopFailed, SubmitError, Unsupported
from atoll.executors.base import Plan
from atoll.executors.local.executor import LocalExecutor
from atoll.handle import RunHandle
from atoll.keys import RunKeys
from atoll.names import native_name
from atoll.registry import open_store
from atoll.spec import Placement
from atoll.status import Reason, ReplicaState, ReplicaStatus, RunStatus
from atoll.testing.scripted.executor import ScriptedExecutor, creates, replica_status, task_name


class Rebuilding(ScriptedExecutor):
    """Builds its request anew from a label of its own, or changes each body."""

    def label(self, context: RunContext) -> str:
        return native_name(context.run_id, context.store_uri, reserve=6)

    def body(self, body: dict[str, Any]) -> dict[str, Any]:
        return body

    def plan(self, context: RunContext, placement: Placement) -> Plan:
        plan = super().plan(context, placement)
        label = self.label(context)
        bodies = [self.body(body) for body in creates(context, placement, label, self._group)]
        return replace(plan, request={"label": label, "creates": bodies})


# E1


class NamesByChance(Rebuilding):
    def label(self, context: RunContext) -> str:
        return f"run-{uuid.uuid4().hex}"


class PlansWithTuples(Rebuilding):
    def body(self, body: dict[str, Any]) -> dict[str, Any]:
        return {**body, "command": tuple(body["command"])}


class PlansInAnyOrder(Rebuilding):
    def body(self, body: dict[str, Any]) -> dict[str, Any]:
        return {
            **body,
            "environment": dict.fromkeys([]),
            "pairs": list({f"{k}={v}" for k, v in body["environment"].items()}),
        }


class WritesWhilePlanning(ScriptedExecutor):
    def plan(self, context: RunContext, placement: Placement) -> Plan:
        open_store(context.store_uri).put("planned", b"")
        return super().plan(context, placement)


class AsksWhilePlanning(ScriptedExecutor):
    def plan(self, context: RunContext, placement: Placement) -> Plan:
        self._described("is-the-name-free")
        return super().plan(context, placement)


class PlansWithTheSecret(LocalExecutor):
    def plan(self, context: RunContext, placement: Placement) -> Plan:
        plan = super().plan(context, placement)
        values = {name: os.environ[where.partition(":")[2]] for name, where in placement.secrets.items()}
        return replace(plan, request={**plan.request, "environment": {**plan.request["environment"], **values}})


# E2


class DropsAField(ScriptedExecutor):
    def __init__(self, *, drops: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._drops = drops

    def plan(self, context: RunContext, placement: Placement) -> Plan:
        usual = {field.name: getattr(Placement(), field.name) for field in fields(Placement)}
        return super().plan(context, replace(placement, **{self._drops: usual[self._drops]}))


class TrimsValues(Rebuilding):
    def body(self, body: dict[str, Any]) -> dict[str, Any]:
        return {**body, "environment": {name: value.strip() for name, value in body["environment"].items()}}


class PromisesRestarts(Rebuilding):
    def body(self, body: dict[str, Any]) -> dict[str, Any]:
        return {**body, "max_restarts": 0, "restarts_wanted": body["max_restarts"]}


# E3


class GivesOneReason(ScriptedExecutor):
    def plan(self, context: RunContext, placement: Placement) -> Plan:
        try:
            return super().plan(context, placement)
        except Unsupported as exc:
            raise Unsupported(self.name, context.run_id, exc.problems[:1]) from None


class AcceptsAnyStore(ScriptedExecutor):
    def plan(self, context: RunContext, placement: Placement) -> Plan:
        return super().plan(replace(context, store_uri="s3://bucket/reachable"), placement)


# E4


class CountsWrong(ScriptedExecutor):
    def handle(self, plan: Plan) -> RunHandle:
        return replace(super().handle(plan), replicas=1)


class Remembers(ScriptedExecutor):
    """Keeps its runs in memory."""

    runs: ClassVar[set[str]] = set()

    def start(self, plan: Plan) -> RunHandle:
        handle = super().start(plan)
        self.runs.add(handle.native_id)
        return handle

    def cancel(self, handle: RunHandle, ranks: Sequence[int] | None = None) -> None:
        if handle.native_id in self.runs:
            super().cancel(handle, ranks)


# E5 E6


class ShowsOnlyWhatRuns(ScriptedExecutor):
    def status(self, handle: RunHandle) -> RunStatus:
        found = super().status(handle).replicas
        return RunStatus(tuple(r for r in found if r.state is not ReplicaState.PENDING)[: len(found) - 1])


class TakesOverForSuccess(ScriptedExecutor):
    def status(self, handle: RunHandle) -> RunStatus:
        return _each(super().status(handle), ReplicaState.FAILED, state=ReplicaState.SUCCEEDED, reason=Reason.OK)


class LosesExitCodes(ScriptedExecutor):
    def status(self, handle: RunHandle) -> RunStatus:
        return _each(super().status(handle), ReplicaState.FAILED, exit_code=1)


class TakesAKillForACancel(ScriptedExecutor):
    def status(self, handle: RunHandle) -> RunStatus:
        found = super().status(handle)
        return found.with_replicas(_cancelled(r) if r.exit_code == 137 else r for r in found.replicas)


# E7


class NeedsItToRun(ScriptedExecutor):
    def cancel(self, handle: RunHandle, ranks: Sequence[int] | None = None) -> None:
        if self.status(handle).state is ReplicaState.PENDING:
            raise BackendError("the job has not started")
        super().cancel(handle, ranks)


class AsksAndLeaves(ScriptedExecutor):
    def _wait_until_over(self, *_: Any) -> None:
        return None


class KillsWithoutGrace(Rebuilding):
    def body(self, body: dict[str, Any]) -> dict[str, Any]:
        return {**body, "stop_grace_s": 0.0, "environment": {**body["environment"], GRACE: "0"}}


class CannotCancelTwice(ScriptedExecutor):
    def cancel(self, handle: RunHandle, ranks: Sequence[int] | None = None) -> None:
        if self.status(handle).is_terminal:
            raise BackendError("the job is over and cannot be cancelled")
        super().cancel(handle, ranks)


# E8


class CancelsWhatIsOver(ScriptedExecutor):
    cancelled: ClassVar[set[str]] = set()

    def cancel(self, handle: RunHandle, ranks: Sequence[int] | None = None) -> None:
        super().cancel(handle, ranks)
        self.cancelled.add(handle.native_id)

    def status(self, handle: RunHandle) -> RunStatus:
        found = super().status(handle)
        return found.with_replicas(_cancelled(r) if handle.native_id in self.cancelled else r for r in found.replicas)


class TakesForgottenForCancelled(ScriptedExecutor):
    """404 means cancelled: what most launchers do."""

    def status(self, handle: RunHandle) -> RunStatus:
        return _each(super().status(handle), ReplicaState.LOST, state=ReplicaState.CANCELLED, reason=Reason.CANCELLED)


# E9


class LabelsByFirstWord(Rebuilding):
    def label(self, context: RunContext) -> str:
        return native_name(context.run_id.partition("-")[0], context.store_uri, reserve=6)

    def body(self, body: dict[str, Any]) -> dict[str, Any]:
        return {**body, "name": f"{body['name'][:40]}-{abs(hash(str(body['environment']))) % 10**8}"}

    def _names(self, handle: RunHandle, ranks: Iterable[int] | None = None) -> list[str]:
        return [job["name"] for job in self._jobs(handle)]


class IgnoresTheStore(Rebuilding):
    def label(self, context: RunContext) -> str:
        return native_name(context.run_id, "", reserve=6)


# E10


class UndoesNothing(ScriptedExecutor):
    """Reports every failure of a start as if nothing had been created."""

    def start(self, plan: Plan) -> RunHandle:
        try:
            return super().start(plan)
        except (SubmitError, KeyboardInterrupt) as exc:
            raise BackendError("the run cannot be started") from exc


# E11


class CutsLongArguments(ScriptedExecutor):
    """Moves arguments to where 256 characters fit."""

    def start(self, plan: Plan) -> RunHandle:
        body = plan.request["creates"][0]
        store, key = open_store(body["environment"]["ATOLL_STORE"]), RunKeys(plan.run_id).run()
        record = json.loads(bytes(store.get(key)))
        args = record["spec"]["task"]["args"]
        args |= {name: value[:256] for name, value in args.items() if isinstance(value, str)}
        store.put(key, json.dumps(record).encode())
        return super().start(plan)


# E12


class HasNoLimit(Rebuilding):
    def body(self, body: dict[str, Any]) -> dict[str, Any]:
        return {**body, "max_runtime_s": 1e6, "limit_wanted": body["max_runtime_s"]}


class TakesATimeoutForACancel(ScriptedExecutor):
    def status(self, handle: RunHandle) -> RunStatus:
        found = super().status(handle)
        return found.with_replicas(_cancelled(r) if r.reason is Reason.TIMEOUT else r for r in found.replicas)


# E13


class KeepsLineEnds(ScriptedExecutor):
    def logs(self, handle: RunHandle, rank: int, **options: Any) -> Iterator[str]:
        return (f"{line}\n" for line in super().logs(handle, rank, **options))


class IgnoresTheTail(ScriptedExecutor):
    def logs(self, handle: RunHandle, rank: int, *, tail: int | None = None, follow: bool = False) -> Iterator[str]:
        return super().logs(handle, rank, follow=follow)


class FollowsNothing(ScriptedExecutor):
    def logs(self, handle: RunHandle, rank: int, *, tail: int | None = None, follow: bool = False) -> Iterator[str]:
        return super().logs(handle, rank, tail=tail)


class SpeaksForItself(ScriptedExecutor):
    def logs(self, handle: RunHandle, rank: int, **options: Any) -> Iterator[str]:
        found = list(super().logs(handle, rank, **options))
        return iter(found or ["[no output yet]"])


class KnowsEveryRun(ScriptedExecutor):
    def logs(self, handle: RunHandle, rank: int, **options: Any) -> Iterator[str]:
        try:
            yield from super().logs(handle, rank, **options)
        except RunNotFound:
            return


# E14


class LeaksVendorErrors(ScriptedExecutor):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._errors = {}


class LeaksSilence(ScriptedExecutor):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        del self._errors[self._sdk.NoAnswer]


class LosesTheCause(ScriptedExecutor):
    def _call(self, verb: str, operation: str, **body: Any) -> dict[str, Any]:
        try:
            return super()._call(verb, operation, **body)
        except BackendError as exc:
            raise exc from None


class SwallowsRefusals(ScriptedExecutor):
    def cancel(self, handle: RunHandle, ranks: Sequence[int] | None = None) -> None:
        try:
            super().cancel(handle, ranks)
        except BackendError:
            pass


class NeverTriesAgain(ScriptedExecutor):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._errors = dict.fromkeys(self._errors, BackendError)


# E16 E17


class CutsNames(Rebuilding):
    def label(self, context: RunContext) -> str:
        return "r" + re.sub(r"[^a-z0-9]+", "-", context.run_id.lower())[:50].strip("-")


class AsksOneByOne(ScriptedExecutor):
    def _jobs(self, handle: RunHandle) -> list[dict[str, Any]]:
        names = [task_name(handle.native_id, rank) for rank in range(handle.replicas)]
        return [job for name in names if (job := self._described(name)) is not None]


# E18 E19


class StartsAnew(ScriptedExecutor):
    """Every start is another run."""

    def start(self, plan: Plan) -> RunHandle:
        mark = uuid.uuid4().hex[:4]
        label = f"{plan.request['label'][:50]}-{mark}"
        bodies = [
            {**body, "label": label, "name": task_name(label, rank)}
            for rank, body in enumerate(plan.request["creates"])
        ]
        return super().start(replace(plan, request={"label": label, "creates": bodies}))


class AdoptsAnything(ScriptedExecutor):
    def _create(self, run_id: str, body: dict[str, Any], made: list[str]) -> bool:
        present = self._described(body["name"])
        return super()._create(run_id, body, made) if present is None else False


class TriesAgainUnderAnotherName(ScriptedExecutor):
    def _create(self, run_id: str, body: dict[str, Any], made: list[str]) -> bool:
        try:
            self._call("create", "submit", **body)
        except BackendError:
            self._call("create", "submit", **{**body, "name": f"{body['name'][:60]}-x"})
        return True


class StopsTheWholeName(ScriptedExecutor):
    """Undoes a failed start by name, before anyone knows whether another launcher has finished it."""

    def start(self, plan: Plan) -> RunHandle:
        try:
            return super().start(plan)
        except BackendError:
            self.cancel(self.handle(plan))
            raise


class AdoptsTheFirstForAll(ScriptedExecutor):
    """Where the first name is taken, believes that all were started."""

    def start(self, plan: Plan) -> RunHandle:
        if self._described(plan.request["creates"][0]["name"]) is not None:
            return self.handle(plan)
        return super().start(plan)


# E20 to E28


class AsksTheStoreFirst(ScriptedExecutor):
    """Reads the record of a run before it stops the run."""

    records: ClassVar[dict[str, tuple[str, str]]] = {}

    def start(self, plan: Plan) -> RunHandle:
        store = plan.request["creates"][0]["environment"]["ATOLL_STORE"]
        self.records[plan.request["label"]] = store, plan.run_id
        return super().start(plan)

    def cancel(self, handle: RunHandle, ranks: Sequence[int] | None = None) -> None:
        store, run_id = self.records[handle.native_id]
        assert bytes(open_store(store).get(RunKeys(run_id).run()))
        super().cancel(handle, ranks)


class TrustsTheLastAnswer(ScriptedExecutor):
    """Takes the refusal of a retry for a proof that the first try created nothing."""

    def _create(self, run_id: str, body: dict[str, Any], made: list[str]) -> bool:
        try:
            self._call("create", "submit", **body)
        except BackendUnavailable:
            made.remove(body["name"])
            self._call("create", "submit", **body)
            made.append(body["name"])
        return True


class NamesTheFirst(ScriptedExecutor):
    def cancel(self, handle: RunHandle, ranks: Sequence[int] | None = None) -> None:
        try:
            super().cancel(handle, ranks)
        except StopFailed as exc:
            raise StopFailed("run", dict([*exc.refusals.items()][:1])) from exc


class StopsWhatIsListed(ScriptedExecutor):
    def _names(self, handle: RunHandle, ranks: Iterable[int] | None = None) -> list[str]:
        return [job["name"] for job in self._jobs(handle)]


class NamesTheRunWhenItStarts(ScriptedExecutor):
    """Has another handle before the start than after it."""

    started: ClassVar[set[str]] = set()

    def handle(self, plan: Plan) -> RunHandle:
        handle = super().handle(plan)
        return handle if handle.native_id in self.started else replace(handle, native_id=f"{handle.native_id}-soon")

    def start(self, plan: Plan) -> RunHandle:
        self.started.add(plan.request["label"])
        return super().start(plan)


class FinishesTheLaunchFirst(ScriptedExecutor):
    """Starts what is missing, so that it can stop everything."""

    plans: ClassVar[dict[str, Plan]] = {}

    def start(self, plan: Plan) -> RunHandle:
        self.plans[plan.request["label"]] = plan
        return super().start(plan)

    def cancel(self, handle: RunHandle, ranks: Sequence[int] | None = None) -> None:
        super().start(self.plans[handle.native_id])
        super().cancel(handle, ranks)


class NumbersNoLaunch(Rebuilding):
    def label(self, context: RunContext) -> str:
        return native_name(context.run_id, context.store_uri, reserve=6)


class TakesSilenceForLost(ScriptedExecutor):
    def status(self, handle: RunHandle) -> RunStatus:
        try:
            return super().status(handle)
        except BackendUnavailable as exc:
            return RunStatus.lost(handle.replicas, exc.message)


class BelievesTheList(ScriptedExecutor):
    def status(self, handle: RunHandle) -> RunStatus:
        found = {task["rank"]: (job, task) for job in self._jobs(handle) for task in job["tasks"]}
        return RunStatus(tuple(replica_status(rank, found.get(rank)) for rank in range(handle.replicas)))


class StopsAllRanks(ScriptedExecutor):
    def cancel(self, handle: RunHandle, ranks: Sequence[int] | None = None) -> None:
        super().cancel(handle)


class StopsNoSingleRank(ScriptedExecutor):
    def cancel(self, handle: RunHandle, ranks: Sequence[int] | None = None) -> None:
        if ranks is None:
            super().cancel(handle)


class StopsOneOfAGroup(ScriptedExecutor):
    """Says that it can only stop all replicas together, and then stops one."""

    capabilities = replace(ScriptedExecutor.capabilities, cancels_together=True)

    def cancel(self, handle: RunHandle, ranks: Sequence[int] | None = None) -> None:
        for name in self._names(handle, ranks):
            self._stop(name)


class LeavesOutUnknownRanks(ScriptedExecutor):
    def cancel(self, handle: RunHandle, ranks: Sequence[int] | None = None) -> None:
        if known := [rank for rank in ranks or () if 0 <= rank < handle.replicas]:
            super().cancel(handle, known)


class NamesEveryRank(ScriptedExecutor):
    def cancel(self, handle: RunHandle, ranks: Sequence[int] | None = None) -> None:
        try:
            super().cancel(handle, ranks)
        except StopFailed as exc:
            raise StopFailed("run", dict.fromkeys(self._names(handle), "refused")) from exc


# E29


class Watches(ScriptedExecutor):
    """Watches a run by reading its status; the methods of its watch can be broken one by one."""

    def watch(self, handle: RunHandle) -> Watches:
        self._watched, self._is_over = handle, Event()
        self._first = super().status(handle)
        return self

    def __enter__(self) -> Watches:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def status(self, handle: RunHandle | None = None) -> RunStatus:
        return super().status(handle or self._watched)

    def wait(self, seconds: float) -> None:
        self._is_over.wait(min(seconds, 0.1))


class SleepsThroughTheEnd(Watches):
    def wait(self, seconds: float) -> None:
        self._is_over.wait(seconds)


class ShowsTheFirstStatus(Watches):
    def status(self, handle: RunHandle | None = None) -> RunStatus:
        return super().status(handle) if handle is not None else self._first


class LeavesAThread(Watches):
    def __exit__(self, *_: object) -> None:
        Thread(target=Event().wait, args=(5.0,), daemon=True).start()
        super().__exit__()


# E30


class StartsPartsAtRankZero(ScriptedExecutor):
    def plan(self, context: RunContext, placement: Placement) -> Plan:
        return super().plan(replace(context, first_rank=0), placement)


class CountsRanksSoFar(ScriptedExecutor):
    def plan(self, context: RunContext, placement: Placement) -> Plan:
        return super().plan(replace(context, world_size=context.first_rank + placement.replicas), placement)


class NumbersNoPart(Rebuilding):
    def label(self, context: RunContext) -> str:
        return native_name(context.run_id, context.store_uri, reserve=6)


def _each(status: RunStatus, where: ReplicaState, **change: Any) -> RunStatus:
    return status.with_replicas(replace(r, **change) if r.state is where else r for r in status.replicas)


def _cancelled(replica: ReplicaStatus) -> ReplicaStatus:
    return replace(replica, state=ReplicaState.CANCELLED, reason=Reason.CANCELLED)
