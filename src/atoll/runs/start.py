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
from atoll.errors import AtollError, BackendError, Conflict, StopFailed, StoreError, SubmitError
from atoll.executors.base import Executor, Plan, Starter
from atoll.executors.undo import has_created_nothing, stop_and_raise
from atoll.handle import RunHandle
from atoll.journal import Launch
from atoll.runs import index
from atoll.status import Reason, ReplicaState, RunStatus

if TYPE_CHECKING:
    from atoll.runs.run import Draft

log = logging.getLogger("atoll.runs")


def start(draft: Draft) -> Launch:
    """Start the run and return its launch, or return the launch that another launcher started."""
    store, run_id = draft.store, draft.spec.run_id
    found = journal.newest_launch(store, run_id)
    if found.handle is None:
        draft.preflight()
        draft.upload()
    is_new_run = journal.record_run(store, draft.spec, executor=draft.executor.name)
    if cancel := journal.read_cancel(store, run_id, launch=found.number):
        raise _cancelled(run_id, cancel.why)
    if found.handle is not None:
        log.info("run %s exists already: adopt it", run_id)
        if _has_cancelled_ranks(draft.executor, found.handle):
            raise _half_cancelled(run_id, draft.executor.status(found.handle))
        if index.find_in(store.uri, run_id) is None:
            index.remember(run_id, store.uri, str(found.handle))
        return found._replace(was_there=True)
    if found.undone is not None:
        _stop_leftovers(draft, found)
        return _Start(draft, found.number + 1).run()
    return _Start(draft, found.number, is_new_run=is_new_run).run()


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

    def __init__(self, draft: Draft, number: int, *, is_new_run: bool = False) -> None:
        self._draft, self._number, self._is_new_run = draft, number, is_new_run
        self._store, self._executor, self._run_id = draft.store, draft.executor, draft.spec.run_id
        self._plan = draft.planned(number)
        self._handle = planned_handle(draft.executor, self._plan)
        self._is_first_launcher = False

    def run(self) -> Launch:
        self._is_first_launcher = journal.record_intent(
            self._store, self._run_id, self._plan.request, self._handle, launch=self._number
        )
        if not (self._is_new_run and self._is_first_launcher):
            # A launcher whose first create was refused may just have withdrawn the record; see `withdraw_run`.
            journal.record_run(self._store, self._draft.spec, executor=self._executor.name)
        if not self._is_first_launcher and self._handle and _has_cancelled_ranks(self._executor, self._handle):
            # An earlier launcher stopped its replicas and could not record that.
            self._record_undone("its launcher stopped it before it was complete")
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
            decided, problem = self._record_undone(_text(why)), ""
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
                index.forget(self._run_id, self._store.uri)
            raise

    def _withdraw(self) -> None:
        """The service refused the first create: leave no record, so that a corrected command can use the run id."""
        index.forget(self._run_id, self._store.uri)
        if self._is_new_run and self._number == 1:
            with suppress(StoreError):
                journal.withdraw_run(self._store, self._draft.spec, executor=self._executor.name)

    def _check_not_cancelled(self, handle: RunHandle) -> None:
        """Raise `Conflict` if the run was cancelled while it started; its replicas are stopped first."""
        cancel = None
        with suppress(StoreError):  # the handle is recorded, so the run can be stopped later
            cancel = journal.read_cancel(self._store, self._run_id, launch=self._number)
        if cancel is None and not _has_cancelled_ranks(self._executor, handle):
            return
        log.info("run %s was cancelled while it started: stop it", self._run_id)
        self._executor.cancel(handle)
        if cancel is not None:
            raise _cancelled(self._run_id, cancel.why)
        if self._is_first_launcher:
            self._withdraw()  # the records say that it was started
        raise _cancelled(self._run_id, "replicas with its names were stopped, earlier or while it started")

    def _record_handle(self, handle: RunHandle) -> Launch:
        return journal.record_handle(self._store, self._run_id, handle, launch=self._number)

    def _record_undone(self, why: str) -> Launch:
        return journal.record_undone(self._store, self._run_id, why, launch=self._number)


def planned_handle(executor: Executor, plan: Plan) -> RunHandle | None:
    """The handle that the plan leads to; None if only the service chooses it."""
    return executor.handle(plan) if isinstance(executor, Starter) else None


def _has_cancelled_ranks(executor: Executor, handle: RunHandle) -> bool:
    """Whether the backend says that a replica was stopped, or is being stopped. False if it does not answer."""
    try:
        replicas = executor.status(handle).replicas
        return any(r.state is ReplicaState.CANCELLED or r.reason is Reason.STOPPING for r in replicas)
    except BackendError as exc:
        log.debug("no status of %s: %s", handle, exc.message)
        return False


def _cancelled(run_id: str, why: str) -> Conflict:
    return Conflict(run_id, what=f"run `{run_id}` was cancelled: {why}", reason="cancelled")


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
