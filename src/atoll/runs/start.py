"""Start one launch of a run: record the intent, submit, record the handle, and undo the launch if that fails.

The order of the records makes every interruption safe. The intent, with the handle it leads to, is in the store and in
the local index before the first replica is created, so `cancel` can stop a half-finished launch by its names. Before
replicas of a failed launch are stopped, the store records that the launch is undone; a racing launcher then fails too,
and the next launch gets a new number and new names.
"""

from __future__ import annotations

import logging
import shlex
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from atoll import journal
from atoll.errors import AtollError, BackendError, ConfigError, Conflict, StopFailed, StoreError, SubmitError
from atoll.executors.base import CancelTeller, Composite, Executor, PartHandle, Plan, Starter
from atoll.executors.undo import has_created_nothing, stop_and_raise
from atoll.handle import RunHandle
from atoll.journal import Launch
from atoll.runs import index
from atoll.runs.code_files import named_files
from atoll.status import Reason, ReplicaState, RunStatus

if TYPE_CHECKING:
    from atoll.runs.prepare import Draft
    from atoll.stores.base import Store

log = logging.getLogger("atoll.runs")


def start(draft: Draft) -> Launch:
    """Start the run and return its launch, or return the launch that another launcher started."""
    store, run_id = draft.store, draft.spec.run_id
    check_not_deleted(store, run_id)
    found = journal.newest_launch(store, run_id)
    if found.is_resume:
        return _adopt_resumed(draft, found)
    if found.handle is None:
        draft.preflight()
        draft.upload()
    is_new_run = _record_run(draft)
    if not is_new_run and found.handle is None:
        check_not_deleted(store, run_id)
    if cancel := journal.read_cancel(store, run_id, launch=found.number):
        raise _cancelled(run_id, cancel.why)
    if found.handle is not None:
        log.info("run %s exists already: adopt it", run_id)
        if _has_stopped_ranks(draft.executor, found.handle, draft, found.number):
            raise _half_cancelled(run_id, draft.executor.status(found.handle))
        if index.find_in(store.uri, run_id) is None:
            index.remember(run_id, store.uri, str(found.handle))
        return found._replace(was_there=True)
    if found.undone is not None:
        _stop_leftovers(draft, found)
        return _Start(draft, found.number + 1).run()
    return _Start(draft, found.number, is_new_run=is_new_run).run()


def _record_run(draft: Draft) -> bool:
    """Record the run, as `journal.record_run`; a `Conflict` about a bundle names the files that differ."""
    store, spec = draft.store, draft.spec
    try:
        return journal.record_run(store, spec, executor=draft.executor.name)
    except Conflict as exc:
        present = journal.read_run(store, spec.run_id)["spec"]["task"]["code"]
        if draft.bundle is None or present.get("kind") != "bundle" or present.get("digest") == draft.bundle.digest:
            raise
        others = [line for line in exc.differences if not line.startswith("task.code.digest:")]
        files = named_files(store, present.get("digest"), draft.bundle)
        raise Conflict(spec.run_id, [*others, *files], hint=exc.hint) from exc


def check_not_deleted(store: Store, run_id: str) -> None:
    """Raise `Conflict` if the deletion of the run was begun and not finished."""
    if journal.is_deleted(store, run_id):
        what = f"run `{run_id}` is being deleted"
        raise Conflict(run_id, what=what, reason="deleted", hint=f"`atoll rm {shlex.quote(run_id)}` finishes that")


def check_not_pruned(store: Store, run_id: str) -> None:
    """Raise `ConfigError` if only the weights of the run are kept, so that no launch can continue it."""
    if journal.is_pruned(store, run_id):
        hint = f"`atoll run ENTRY --from {shlex.quote(run_id)}` starts a new run from its weights"
        raise ConfigError(f"the checkpoints of run `{run_id}` were deleted", reason="pruned", hint=hint)


def _adopt_resumed(draft: Draft, found: Launch) -> Launch:
    """The newest launch of a run that was resumed. Only a resume starts another one."""
    store, run_id = draft.store, draft.spec.run_id
    _record_run(draft)
    if cancel := journal.read_cancel(store, run_id, launch=found.number):
        raise _cancelled(run_id, cancel.why)
    if found.handle is None:
        what = f"run `{run_id}` was resumed as launch {found.number}, which was not started"
        raise Conflict(run_id, what=what, reason="resumed", hint=f"`atoll resume {shlex.quote(run_id)}` continues it")
    return found._replace(was_there=True)


def start_resume(draft: Draft, number: int, *, rounds_of: int) -> Launch:
    """Start launch `number`, which continues the rounds of launch `rounds_of`; or return it if it was started."""
    draft.preflight()
    draft.upload()
    journal.record_resume(draft.store, draft.spec, executor=draft.executor.name, launch=number, rounds_of=rounds_of)
    check_not_deleted(draft.store, draft.spec.run_id)  # again: a deletion that began meanwhile looks for this record
    check_not_pruned(draft.store, draft.spec.run_id)
    found = journal.newest_launch(draft.store, draft.spec.run_id)
    if found.number == number and found.handle is not None:
        return found._replace(was_there=True)
    return _Start(draft, number, resumes=True).run()._replace(is_resume=True)


def _stop_leftovers(draft: Draft, undone: Launch) -> None:
    """Stop what an undone launch may have left, so that the next launch starts no twins."""
    run_id, executor = draft.spec.run_id, draft.executor
    handle = journal.intended_handle(draft.store, run_id, undone.number)
    handle = handle or planned_handle(executor, draft.planned(undone.number))
    if handle is None:
        return
    try:
        executor.cancel(handle)
    except StopFailed as exc:
        what = f"run `{run_id}` is not launched again, because launch {undone.number} was undone but not stopped"
        raise StopFailed(what, exc.refusals, executor=executor.name, hint=exc.hint) from exc


class _Start:
    """One launcher's try to start one launch."""

    def __init__(
        self,
        draft: Draft,
        number: int,
        *,
        is_new_run: bool = False,
        resumes: bool = False,
    ) -> None:
        self._draft, self._number, self._is_new_run = draft, number, is_new_run
        self._resumes = resumes
        self._known = index.find_in(draft.store.uri, draft.spec.run_id) if resumes else None
        self._store, self._executor, self._run_id = draft.store, draft.executor, draft.spec.run_id
        self._plan = draft.planned(number)
        self._handle = planned_handle(draft.executor, self._plan)
        self._is_first_launcher = False

    def run(self) -> Launch:
        self._is_first_launcher = journal.record_intent(
            self._store,
            self._run_id,
            self._plan.request,
            self._handle,
            launch=self._number,
            **self._draft.prices(),
        )
        if not self._resumes and not (self._is_new_run and self._is_first_launcher):
            # A launcher whose first create was refused may just have withdrawn the record; see `withdraw_run`.
            journal.record_run(self._store, self._draft.spec, executor=self._executor.name)
        if not self._is_first_launcher and self._handle and self._has_stopped_ranks(self._handle):
            # An earlier launcher stopped its replicas and could not record that.
            self._record_undone("its launcher stopped it before it was complete")
            if self._resumes:
                raise SubmitError(
                    "another command stopped this launch before it was complete", executor=self._executor.name
                )
            return start(self._draft)
        if self._handle is not None:
            index.remember(self._run_id, self._store.uri, str(self._handle))
        log.debug("run %s: submit launch %d to %s", self._run_id, self._number, self._executor.name)
        try:
            decided = self._record_handle(self._submit())
        except BaseException as why:  # noqa: BLE001  an interrupt must not leave replicas behind either
            decided = self._after_failure(why)
        if decided.handle is None:
            # This launcher may have created replicas after the other one stopped them.
            message = f"another launcher undid this launch: {decided.undone}"
            self._stop_and_raise(SubmitError(message, executor=self._executor.name))
        try:
            log.info("run %s: started on %s as %s", self._run_id, self._executor.name, decided.handle)
            self._check_not_cancelled(decided.handle)
        except KeyboardInterrupt as exc:
            exc.add_note(f"run `{self._run_id}` was started and continues: {decided.handle}")
            raise
        return decided

    def _submit(self) -> RunHandle:
        if self._handle is not None and isinstance(self._executor, Starter):
            self._executor.start(self._plan)
            return self._handle
        handle = self._executor.submit(self._plan)
        index.remember(self._run_id, self._store.uri, str(handle))
        return handle

    # ── after a failure ─────────────────────────────────────────────────────────────────────────────────────────

    def _after_failure(self, why: BaseException) -> Launch:
        """Undo the launch and raise. Returns the launch if it was started after all, here or by another launcher."""
        try:
            decided, record_problem = self._decide_after(why)
            if decided.handle is None:
                self._stop_and_raise(why, record_problem)
        except BaseException as error:
            if error is why or isinstance(error, AtollError) or self._handle is None:
                raise
            # An interrupt, or a bug, while the failure was handled: name what may run.
            message = f"run `{self._run_id}`: {_text(why)}, then {_text(error)}"
            hint = f"`atoll cancel '{self._handle}'` stops them"
            left = [str(self._handle)]
            raise SubmitError(message, left_running=left, executor=self._executor.name, hint=hint) from error
        return decided

    def _decide_after(self, why: BaseException) -> tuple[Launch, str]:
        """Record that the launch is undone, unless it was started after all, here or by another launcher.

        Returns what is recorded, and why nothing could be recorded. Raises `why` if no replica has to be stopped.
        """
        is_refused = has_created_nothing(why)
        if is_refused and not self._is_first_launcher:
            raise why  # another launcher may still complete the launch
        try:
            decided, problem = self._record_undone(_text(why), is_refused=is_refused), ""
        except (StoreError, KeyboardInterrupt) as exc:
            decided, problem = Launch(self._number), _text(exc)
        if decided.handle is not None and not isinstance(why, Exception):
            why.add_note(f"run `{self._run_id}` was started and continues: {decided.handle}")
            raise why
        if decided.handle is None and is_refused:
            self._withdraw()
            raise why
        return decided, problem

    def _stop_and_raise(self, why: BaseException, record_problem: str = "") -> NoReturn:
        if self._handle is None:
            raise why  # the executor has undone the launch itself
        note = f"; the store could not record that the launch is undone: {record_problem}" if record_problem else ""
        try:
            stop_and_raise(self._executor, self._handle, self._run_id, why, note=note)
        except BaseException as error:
            if not record_problem and not getattr(error, "left_running", ()):
                self._forget()
            raise

    def _withdraw(self) -> None:
        """The service refused the first create: leave no record, so that a corrected command can use the run id."""
        self._forget()
        if self._is_new_run and self._number == 1:
            with suppress(StoreError):
                journal.withdraw_run(self._store, self._draft.spec, executor=self._executor.name)

    def _forget(self) -> None:
        """Remove what this launcher added to the local index."""
        if self._known is not None:
            index.remember(self._run_id, self._store.uri, self._known.handle)
        else:
            index.forget(self._run_id, self._store.uri)

    def _check_not_cancelled(self, handle: RunHandle) -> None:
        """Raise `Conflict` if the run was cancelled while it started; its replicas are stopped first."""
        cancel, ranks = None, list[int]()
        with suppress(StoreError):  # the handle is recorded, so the run can be stopped later
            cancel = journal.read_cancel(self._store, self._run_id, launch=self._number)
            ranks = sorted(journal.read_rank_cancels(self._store, self._run_id, launch=self._number))
        if cancel is None and ranks:
            log.info("run %s: %s cancelled while it started: stop", self._run_id, ranks)
            self._executor.cancel(handle, ranks)
        if cancel is None and not self._has_stopped_ranks(handle):
            return
        log.info("run %s was cancelled while it started: stop it", self._run_id)
        self._executor.cancel(handle)
        if cancel is not None:
            raise _cancelled(self._run_id, cancel.why)
        if self._is_first_launcher:
            self._withdraw()  # the records say that it was started
        raise _cancelled(self._run_id, "replicas with its names were stopped, earlier or while it started")

    def _has_stopped_ranks(self, handle: RunHandle) -> bool:
        return _has_stopped_ranks(self._executor, handle, self._draft, self._number)

    def _record_handle(self, handle: RunHandle) -> Launch:
        return journal.record_handle(self._store, self._run_id, handle, launch=self._number)

    def _record_undone(self, why: str, *, is_refused: bool = False) -> Launch:
        return journal.record_undone(self._store, self._run_id, why, launch=self._number, is_refused=is_refused)


def planned_handle(executor: Executor, plan: Plan) -> RunHandle | None:
    """The handle that the plan leads to; None if only the service chooses it."""
    return executor.handle(plan) if isinstance(executor, Starter) else None


def _has_stopped_ranks(executor: Executor, handle: RunHandle, draft: Draft, launch: int) -> bool:
    """Whether the backend says that a replica was cancelled, or is being stopped. False if it does not answer.

    A rank whose own cancellation is recorded does not count, unless that holds for all: then the run was cancelled.
    """
    parts = executor.parts_of(handle) if isinstance(executor, Composite) else [PartHandle(executor, handle, 0)]
    stopped: set[int] = set()
    for part in parts:
        try:
            stopped |= {part.first_rank + rank for rank in _stopped(part)}
        except BackendError as exc:
            log.debug("no status of %s: %s", part.handle, exc.message)
    if not stopped:
        return False
    alone = journal.read_rank_cancels(draft.store, draft.spec.run_id, launch=launch).keys()
    return bool(stopped - alone) or len(stopped) == handle.replicas


def _stopped(part: PartHandle) -> set[int]:
    """The replicas of a part, from 0, that were cancelled or are being stopped: all, where it tells that itself."""
    if isinstance(part.executor, CancelTeller):
        return set(range(part.handle.replicas)) if part.executor.is_cancelled(part.handle) else set()
    replicas = part.executor.status(part.handle).replicas
    return {r.rank for r in replicas if r.state is ReplicaState.CANCELLED or r.reason is Reason.STOPPING}


def _cancelled(run_id: str, why: str) -> Conflict:
    hint = (
        f"`atoll resume {shlex.quote(run_id)}` continues it; or choose another run id, or leave it out to get a new one"
    )
    return Conflict(run_id, what=f"run `{run_id}` was cancelled: {why}", reason="cancelled", hint=hint)


def _half_cancelled(run_id: str, status: RunStatus) -> Conflict:
    """The error for a run that was stopped, but whose stop is not recorded: perhaps not every replica is stopped."""
    left = [r.native_id or f"rank {r.rank}" for r in status.replicas if not r.state.is_terminal]
    if not left:
        return _cancelled(run_id, "its replicas were stopped")
    error = _cancelled(run_id, f"some of its replicas were stopped, and these still run: {', '.join(left)}")
    error.hint = f"`atoll cancel {shlex.quote(run_id)}` stops them; then choose another run id"
    return error


def _text(why: BaseException) -> str:
    return why.message if isinstance(why, AtollError) else f"interrupted by {type(why).__name__}"
