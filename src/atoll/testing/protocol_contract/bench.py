"""The bench of a facade: what the suite of the replica protocol must know about one facade and its backend.

A subclass has the hooks that its backend allows. `LocalFacadeBench` is the bench of `LocalProcessExecutor`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest

from atoll._time import Deadline, backoff
from atoll.handle import RunHandle
from atoll.replica import processes
from atoll.replica.spool import Spool
from atoll.serverless.protocol import ReplicaHandle, ServerlessExecutor
from atoll.testing import protocol_jobs

JOBS = protocol_jobs.__name__
T = TypeVar("T")


@dataclass
class FacadeBench:
    """A facade, and hooks into the backend behind it. One bench serves all tests of a class."""

    path: str
    """`module:Class` of the facade."""
    folder: Path
    """A folder that replicas can read: it has the suite's own modules, and by default the stores."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Constructor arguments, as JSON: another process builds the facade from them. No `store`, no `run_id`."""
    is_local: bool = False
    """Replicas are processes of this machine: the facade has a default store, `pid` and `start_ts`."""
    runs_callables: bool = False
    runs_commands: bool = False
    """The constructor takes `command`, the program of an image of the user."""
    mounts_arguments: bool = False
    """With an own `command`, all arguments are in the JSON file named by `ATOLL_ARGS`."""
    cancels_together: bool = False
    """`cancel` of one replica stops them all."""
    fails_together: bool = False
    """One replica that fails ends the others."""
    native_ids: Sequence[str] = ()
    """The backend's own identifiers of a replica, in the metadata of its handle and in its row."""
    run_ids: Sequence[str] = ()
    """The same for identifiers that all replicas of one launch share."""
    row_ids: Sequence[str] = ()
    """Further keys of the row of a replica that succeeded."""
    link_names: Sequence[str] = ()
    """The keys of `links`."""
    extra: str | None = None
    """The extra of `pyproject.toml` that installs the SDK."""
    sdk: Sequence[str] = ()
    """The modules of the SDK."""
    clients: str | None = None
    """`module:function` that returns constructor arguments: working clients that are not the SDK's."""
    client_calls: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Constructor argument -> the calls of the service that the facade may make with this client."""
    import_path: Sequence[str] = ()
    """Folders that another process needs on its path to import `clients`."""
    prelude: str = ""
    """Code that another process runs first, such as shorter pauses between calls."""
    patience_s: float = 60.0
    """How long the suite waits for what must happen."""

    @property
    def facade_class(self) -> Any:
        return _loaded(self.path)

    def facade(self, **overrides: Any) -> ServerlessExecutor:
        """The facade with the bench's settings and these constructor arguments. No store unless one is given."""
        made: ServerlessExecutor = self.facade_class(**{**self.settings, **overrides})
        return made

    def usual(self, **overrides: Any) -> ServerlessExecutor:
        """The facade with the store that most tests use."""
        return self.facade(**{"store": self.store("store"), **overrides})

    def store(self, name: str) -> str:
        """The URI of a store that this facade can use; another name is another store."""
        return (self.folder / name).as_uri()

    def lose_store(self, name: str) -> None:
        """Delete a store with all its objects."""
        shutil.rmtree(self.folder / name)

    def injected(self) -> dict[str, Any]:
        """Working clients that are not the SDK's, as constructor arguments."""
        if self.clients is None:
            pytest.skip("this facade takes no clients")
        made: dict[str, Any] = _loaded(self.clients)()
        return made

    # ── hooks into the backend ──────────────────────────────────────────────────────────────────────────────────

    def queue_held(self) -> AbstractContextManager[None]:
        """While this is open, the backend starts no replica. By default it may."""
        return nullcontext()

    def rank_broken(self, rank: int) -> AbstractContextManager[None]:
        """While this is open, the backend cannot start this rank."""
        pytest.skip("this bench cannot keep one rank from starting")

    def forget(self, handle: ReplicaHandle) -> None:
        """Make the backend forget the run of this handle, which is over."""
        pytest.skip("this bench cannot make its backend forget a run")

    def running(self) -> list[str]:
        """What runs or is queued at the backend now, without asking the facade. Every bench has to say it."""
        raise NotImplementedError(f"{type(self).__name__} needs a method `running`: what the backend still runs")

    # ── another process ─────────────────────────────────────────────────────────────────────────────────────────

    def elsewhere(self, code: str, *, blocked: Sequence[str] = (), **values: Any) -> Any:
        """Run the code in another process, where the modules `blocked` cannot be imported. Its `answer` as JSON.

        The code has `Facade`, `settings`, `loaded`, `ReplicaHandle`, and the values.
        """
        given = {"path": self.path, "settings": self.settings, "blocked": list(blocked), **values}
        path = os.pathsep.join([*self.import_path, str(self.folder), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-c", _ELSEWHERE + self.prelude + code + "\nprint(json.dumps(answer))"],
            input=json.dumps(given),
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"the other process failed: {done.stderr}"
        return json.loads(done.stdout)


_ELSEWHERE = """
import importlib, json, sys
globals().update(json.load(sys.stdin))
for name in blocked:
    sys.modules[name] = None
def loaded(path):
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
from atoll.serverless import ReplicaHandle
Facade = loaded(path)
"""


def until(bench: FacadeBench, what: str, condition: Callable[[], T]) -> T:
    """Wait until the condition is true, and return its value. Fails the test after `patience_s`."""
    deadline, pauses = Deadline(bench.patience_s), backoff(0.01, cap_s=0.1)
    while not (found := condition()):
        assert not deadline.is_past, f"not within {bench.patience_s:g} s: {what}"
        deadline.sleep(next(pauses))
    return found


def _loaded(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


@dataclass
class LocalFacadeBench(FacadeBench):
    """Local processes, with spools and stores in a folder of the tests."""

    @classmethod
    def below(cls, folder: Path) -> LocalFacadeBench:
        return cls(
            "atoll.serverless.local:LocalProcessExecutor",
            folder,
            {"root": str(folder / "spools")},
            is_local=True,
            runs_callables=True,
            native_ids=["pid"],
        )

    @contextmanager
    def rank_broken(self, rank: int) -> Iterator[None]:
        """Put a file where the supervisor creates the folder of this rank, right before the supervisor starts."""

        class Popen(subprocess.Popen):  # type: ignore[type-arg]
            def __init__(self, args: Any, *more: Any, **options: Any) -> None:
                if "--spool" in args:
                    Spool(args[args.index("--spool") + 1]).attempt(rank, 0).root.parent.touch()
                super().__init__(args, *more, **options)

        with mock.patch.object(subprocess, "Popen", Popen):
            yield

    def forget(self, handle: ReplicaHandle) -> None:
        shutil.rmtree(f"/{RunHandle.parse(handle.metadata['run']).native_id}")

    def running(self) -> list[str]:
        return [str(pid) for pid, label in processes.labelled() if label.startswith(f"{self.folder}{os.sep}")]
