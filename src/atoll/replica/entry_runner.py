"""Runs one replica: read `run.json`, load the user's code, call the entry point, and always write an outcome.

Tracebacks show what users would see in a script of their own. Of an error in user code, the frames of Atoll that led
to the user's code are left out. Of an error that Atoll raised, the frames of Atoll below the user's call are left out
too, because its message says what was wrong. `ATOLL_DEBUG=1` shows all frames.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from traceback import FrameSummary, TracebackException
from types import ModuleType
from typing import Any

import atoll
from atoll.context import TOO_OLD, ReplicaContext, make_current
from atoll.entry import Entry, loading, object_problem, playing
from atoll.errors import (
    AtollError,
    ConfigError,
    CorruptUpdate,
    InternalError,
    KeyNotFound,
    QuorumLost,
    StoreUnavailable,
    did_you_mean,
)
from atoll.journal import version_problem
from atoll.json_values import to_json
from atoll.keys import RunKeys
from atoll.log_lines import log_to_stderr_of_replica
from atoll.replica.spool import Attempt
from atoll.status import Reason, ReplicaState
from atoll.validation import plain

_TERMINATED = 128 + signal.SIGTERM
_RESULT_DEPTH = 900
"""Recursion limit while a result is written: a reader with the default limit can parse what fits in it."""
_MAX_TEXT, _HEAD = 100_000, 20_000
"""Characters of a traceback that are kept, and how many of them from its beginning."""
_TOO_OLD = "too_old"
_LEADING = ("atoll/replica/", "importlib/", "<frozen ")
_OURS = os.path.dirname(os.path.abspath(atoll.__file__)) + os.sep
_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))

log = logging.getLogger("atoll.replica")


def run(attempt: Attempt) -> int:
    """Run the replica that the environment describes. Returns the exit code, after the outcome is in the spool."""
    started_at, pid = time.time(), os.getpid()
    signal.signal(signal.SIGTERM, _terminate)
    log_to_stderr_of_replica(os.environ)  # the run may have its own ATOLL_LOG
    try:
        context = ReplicaContext.from_environment(os.environ)
        record = _read_record(context)
        task = record["spec"]["task"]
        origin = task.get("origin") or {}
        context = replace(
            context, args=dict(task["args"]), rounds_of=record.get("rounds_of"), from_run=origin.get("run")
        )
        make_current(context)
        value = _run_entry(task, context, attempt)
        # A child that user code forked and did not end gets here too; it is not the replica.
        report = _success(value, attempt) if os.getpid() == pid else {"exit_code": 0}
    except BaseException as exc:  # noqa: BLE001  every error is recorded
        report = _failure(exc)
    finally:
        # A late request to stop must not interrupt the writing of the outcome.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.getpid() == pid:
        _write_outcome(report, attempt, started_at)
    return int(report["exit_code"])


def _read_record(context: ReplicaContext) -> dict[str, Any]:
    """`run.json`, or the record of the launch if this is a launch that continues an earlier one."""
    keys = RunKeys(context.run_id, context.launch)
    record = None
    if context.launch > 1:
        with suppress(KeyNotFound):
            record = json.loads(bytes(context.store.get(keys.resume())))
    record = record or json.loads(bytes(context.store.get(keys.run())))
    if problem := version_problem(record):
        error = ConfigError(problem, reason=_TOO_OLD, hint="install the launcher's version of Atoll in the image")
        error.exit_code = TOO_OLD
        raise error
    return record  # type: ignore[no-any-return]


def _run_entry(task: dict[str, Any], context: ReplicaContext, attempt: Attempt) -> Any:
    if task.get("program"):
        raise ConfigError("this run has a program of its image in place of an entry point; start that program")
    root = _code_root(task, context)
    entry = Entry.of_record(task["entry"])
    sys.argv = [entry.place, *task["argv"]]
    if entry.script is not None:
        path = os.path.join(root, entry.script)
        sys.path.insert(0, os.path.dirname(path))
        if entry.function is None:
            playing(path)
            import runpy

            _mark_called(attempt)
            runpy.run_path(path, run_name="__main__")
            return None
    with loading():
        function = _load_function(_decided(entry), root)
    context = _without_unknown(context, function, task.get("optional_args", ()))
    log.debug("rank %d: call %s", context.rank, task["entry"])
    _mark_called(attempt)
    return _call(function, context, context.args)


def _without_unknown(context: ReplicaContext, function: Callable[..., Any], optional: Sequence[str]) -> ReplicaContext:
    """The context without the optional arguments for which the function has no parameter."""
    if not optional:
        return context
    by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    try:
        takes = {name for name, each in signature(function).parameters.items() if each.kind in by_name}
    except ValueError:  # compiled code may have no signature
        takes = set()
    args = {name: value for name, value in context.args.items() if name in takes or name not in optional}
    context = replace(context, args=args)
    make_current(context)
    return context


def _mark_called(attempt: Attempt) -> None:
    """End the phase `loading`: what follows is the user's own code."""
    with suppress(OSError):  # a full disk; `status` says so
        attempt.called.touch()


def _code_root(task: dict[str, Any], context: ReplicaContext) -> str:
    """Change to the folder with the user's code, and make it importable."""
    code = task["code"]
    if code["kind"] == "bundle":
        from atoll.bundle import fetch_and_unpack

        assert context.spool is not None
        folder = Path(context.spool).parents[1] / "code"
        root = str(fetch_and_unpack(context.store, code["digest"], folder))
    else:
        root = code["root"] or os.getcwd()
    os.chdir(root)
    sys.path[:0] = [root, *filter(None, [code["path"]])]
    return root


def _decided(entry: Entry) -> Entry:
    """The function that a dotted name names: `main` of that module, or the function of the module before it."""
    if entry.dotted is None:
        return entry
    module, _, function = entry.dotted.rpartition(".")
    if _is_module(entry.dotted):
        return Entry(module=entry.dotted, function="main")
    if not module:
        raise ConfigError(f"there is no module `{entry.dotted}`")
    return Entry(module=module, function=function)


def _is_module(name: str) -> bool:
    """Whether a module has this name. Imports the packages before the last dot. A folder without code is no module."""
    try:
        found = find_spec(name)
    except ModuleNotFoundError as exc:
        if exc.name is not None and f"{name}.".startswith(f"{exc.name}."):
            return False  # a part of the name does not exist, or is no package
        raise
    return found is not None and found.origin is not None


def _load_function(entry: Entry, root: str) -> Callable[..., Any]:
    if entry.script is None:
        module = importlib.import_module(entry.module or "")
        where = entry.module
    else:
        where = os.path.join(root, entry.script)
        module = _load_script(where)
    name = entry.function or ""
    if not hasattr(module, name):
        meant = did_you_mean(name, [n for n in vars(module) if not n.startswith("_")])
        raise ConfigError(f"`{where}` has no function `{name}`{meant}")
    found = getattr(module, name)
    if problem := object_problem(found, name):
        raise ConfigError(f"`{where}`: {problem}")
    return found  # type: ignore[no-any-return]


def _load_script(path: str) -> ModuleType:
    from importlib.util import module_from_spec, spec_from_file_location

    name = Path(path).stem
    if name in sys.modules or not name.isidentifier():
        name = "__atoll_main__"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"cannot load `{path}`")
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _call(function: Callable[..., Any], context: ReplicaContext, args: Mapping[str, Any]) -> Any:
    """Call with the context first if the function asks for it, and with every argument by name."""
    try:
        takes = signature(function)
    except ValueError:  # compiled code may have no signature; then it cannot ask for the context
        return function(**args)
    parameters = list(takes.parameters.values())
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    first = parameters[0] if parameters and parameters[0].kind in positional else None
    wants_context = first is not None and first.name not in args and _is_context(first)
    leading = (context,) if wants_context else ()
    try:
        takes.bind(*leading, **args)
    except TypeError as exc:
        name = getattr(function, "__name__", type(function).__name__)
        raise ConfigError(f"arguments do not fit `{name}{takes}`: {exc}") from exc
    return function(*leading, **args)


def _is_context(first: Parameter) -> bool:
    """Whether the first parameter is the context. One with a default of its own, such as `context=2048`, is not."""
    if first.annotation is ReplicaContext or str(first.annotation).endswith("ReplicaContext"):
        return True
    has_value = first.default is not Parameter.empty and first.default is not None
    return first.name in ("ctx", "context") and not has_value


def _success(value: Any, attempt: Attempt) -> dict[str, Any]:
    sys.setrecursionlimit(_RESULT_DEPTH)
    try:
        return _write_result(value, attempt)
    except OSError:  # the disk is full: free the reserve
        attempt.spool.reserve.unlink(missing_ok=True)
        return _write_result(value, attempt)


def _write_result(value: Any, attempt: Attempt) -> dict[str, Any]:
    """Write the value as JSON. What is not JSON does not fail a replica whose work is done: see `json_values`."""
    warnings: tuple[str, ...] = ()
    try:
        is_json = _has_text_keys(value)
        if is_json:
            _write_json(value, attempt)
    except OSError:
        raise
    except Exception:  # noqa: BLE001  classes of the value can raise anything
        is_json = False
    if not is_json:
        value, warnings = to_json(value)
        _write_json(value, attempt)
    if warnings:
        more = f" (and {len(warnings) - 1} more)" if warnings[1:] else ""
        _print_error(f"warning: {warnings[0]}{more}\n")
    report = {"state": ReplicaState.SUCCEEDED, "reason": Reason.OK, "message": "", "exit_code": 0}
    return {**report, "warnings": list(warnings)} if warnings else report


def _has_text_keys(value: Any) -> bool:
    """Whether all keys are texts. The `json` module writes the keys `1` and `"1"` alike, and a reader loses one."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _has_text_keys(item) for key, item in value.items())
    return not isinstance(value, list | tuple) or all(map(_has_text_keys, value))


def _write_json(value: Any, attempt: Attempt) -> None:
    with open(attempt.result, "w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, default=_plain_number)


def _plain_number(value: Any) -> Any:
    """Convert a scalar of numpy or torch to a Python number."""
    found = plain(value)
    if found is value:
        raise TypeError(f"a `{type(value).__name__}` is not JSON")
    return found


def _failure(exc: BaseException) -> dict[str, Any]:
    if isinstance(exc, SystemExit):
        return _exit(exc)
    name = type(exc).__qualname__
    module = type(exc).__module__
    error = _error(name if module == "builtins" else f"{module}.{name}", _text(exc), exc)
    _print_error(error["traceback"])
    return {
        "state": ReplicaState.FAILED,
        "reason": _reason(exc),
        "message": f"{name}: {error['message']}".strip(": "),
        "exit_code": exc.exit_code if isinstance(exc, AtollError) else 1,
        "error": error,
        **({"is_final": True} if (isinstance(exc, QuorumLost) and exc.dead) or _is_too_old(exc) else {}),
    }


def _reason(exc: BaseException) -> Reason:
    if isinstance(exc, MemoryError):
        return Reason.OOM
    if isinstance(exc, StoreUnavailable):
        return Reason.BACKEND
    if _is_too_old(exc):
        return Reason.IMAGE
    if isinstance(exc, QuorumLost):
        return Reason.TIMEOUT if exc.timed_out or exc.dead else Reason.USER_ERROR
    is_missing = (
        isinstance(exc, CorruptUpdate) and exc.check == "missing"
    )  # the replica waited for it until the deadline
    return Reason.TIMEOUT if is_missing else Reason.USER_ERROR


def _is_too_old(exc: BaseException) -> bool:
    """Whether another image is needed, so that a restart would not help."""
    return isinstance(exc, ConfigError) and exc.reason == _TOO_OLD


def _exit(exc: SystemExit) -> dict[str, Any]:
    if exc.code is None or (isinstance(exc.code, int) and exc.code == 0):
        return {"state": ReplicaState.SUCCEEDED, "reason": Reason.OK, "message": "", "exit_code": 0}
    if isinstance(exc.code, int):
        message = "stopped by SIGTERM" if exc.code == _TERMINATED else f"sys.exit({exc.code})"
        error = _error("SystemExit", message, exc)
        return {
            "state": ReplicaState.FAILED,
            "reason": Reason.USER_ERROR,
            "message": message,
            "exit_code": exc.code & 0xFF or 1,
            "error": error,
        }
    message = _text(exc.code)[:2000]
    _print_error(f"{message}\n")
    return {"state": ReplicaState.FAILED, "reason": Reason.USER_ERROR, "message": message, "exit_code": 1}


def _error(name: str, message: str, exc: BaseException) -> dict[str, Any]:
    """The fields of an `ErrorReport`."""
    return {"type": name, "message": message, "traceback": _traceback(exc), "ranks": _ranks_of(exc)}


def _ranks_of(exc: BaseException) -> list[int]:
    if isinstance(exc, CorruptUpdate):
        return [exc.rank] if exc.rank >= 0 else []
    return list(exc.dead or exc.missing) if isinstance(exc, QuorumLost) else []


def _print_error(text: str) -> None:
    with suppress(Exception):  # user code may have closed or replaced it; the outcome record has the same text
        print(text, end="", file=sys.stderr, flush=True)


def _storable(text: str) -> str:
    """Escape what UTF-8 cannot encode, such as parts of file names."""
    return text.encode("utf-8", "backslashreplace").decode()


def _text(value: object) -> str:
    try:
        return _storable(str(value)[:10_000])
    except Exception as inner:  # noqa: BLE001  a broken __str__ must not hide the failure
        return f"<no text: {type(inner).__name__}>"


def _traceback(exc: BaseException) -> str:
    try:
        text = traceback_text(exc)
        return _storable(text if len(text) <= _MAX_TEXT else f"{text[:_HEAD]}\n… cut …\n{text[_HEAD - _MAX_TEXT :]}")
    except Exception:  # noqa: BLE001  a broken __str__ or a lack of memory must not hide the failure
        return f"{type(exc).__name__} (its traceback cannot be shown)"


def _write_outcome(report: dict[str, Any], attempt: Attempt, started_at: float) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # user code may have closed or replaced it
            stream.flush()
    record = {"error": None, **report, "started_at": started_at, "ended_at": time.time()}
    attempt.spool.write_json(attempt.outcome, record)


def _terminate(_signal: int, _frame: Any) -> None:
    raise SystemExit(_TERMINATED)


def traceback_text(exc: BaseException) -> str:
    """What `traceback.format_exception` gives, without the frames of Atoll."""
    shown = TracebackException(type(exc), exc, exc.__traceback__)
    if not os.environ.get("ATOLL_DEBUG"):
        while len(shown.stack) > 1 and any(mark in shown.stack[0].filename for mark in _LEADING):
            del shown.stack[0]
        _shorten(shown, exc)
    return "".join(shown.format())


def _shorten(shown: TracebackException, exc: BaseException) -> None:
    """Remove the frames of Atoll from an error that Atoll raised, and from its causes."""
    if isinstance(exc, AtollError) and not isinstance(exc, InternalError):
        entered = next((at for at, frame in enumerate(shown.stack) if _is_atolls(frame)), len(shown.stack))
        if entered:  # otherwise there is no frame of the user to keep
            del shown.stack[entered:]
        if shown.__cause__ is not None and not _has_users_frames(shown.__cause__):
            shown.__cause__ = None
        if shown.__context__ is not None and not _has_users_frames(shown.__context__):
            shown.__context__ = None
    if shown.__cause__ is not None and exc.__cause__ is not None:
        _shorten(shown.__cause__, exc.__cause__)
    if shown.__context__ is not None and exc.__context__ is not None:
        _shorten(shown.__context__, exc.__context__)


def _has_users_frames(shown: TracebackException) -> bool:
    return any(not (_is_atolls(frame) or _is_installed(frame)) for frame in shown.stack)


def _is_atolls(frame: FrameSummary) -> bool:
    return frame.filename.startswith(_OURS)


def _is_installed(frame: FrameSummary) -> bool:
    return frame.filename.startswith((*_INSTALLED, "<frozen "))
