"""RunSpec = Task (for the replicas) + Placement (for the executor): frozen, and checked when built.

Every problem is reported at once, each with the field, the value and the rule. `Gpu` is a name and a count: `"H100:8"`,
`"any:2"`. `Entry` is the code that a replica runs, as text that another process can import: `package.module:function`,
`path/to/script.py` or `path/to/script.py:function`.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any

from atoll.context import RANK, RESERVED
from atoll.errors import InvalidSpec, UnknownName, did_you_mean
from atoll.names import new_run_id, run_id_problem

DAY_S = 86_400.0
ON_DEAD = ("fail", "wait")
"""What the replicas of a run do when a round needs a rank that is dead."""
ON_DEAD_AFTER_S = 300.0
KNOWN = [
    "any",
    "A10",
    "A10G",
    "A100",
    "A100-80GB",
    "A30",
    "A40",
    "A6000",
    "B200",
    "B300",
    "GB200",
    "GH200",
    "H100",
    "H200",
    "H20",
    "L4",
    "L40",
    "L40S",
    "MI300X",
    "MI325X",
    "P100",
    "RTX3090",
    "RTX4090",
    "RTX5090",
    "RTX6000",
    "T4",
    "V100",
]
_LAUNCH_TAKES = ("on", "store", "args", "argv", "run_id", "workspace", "settings", "on_dead", "on_dead_after_s")
_NEWER = ("on_dead", "on_dead_after_s")
"""Fields of a task that the records of older runs do not have."""
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SECRET_LIKE = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_KEY|ACCESS_KEY|PRIVATE_KEY|CREDENTIALS)\Z", re.I)
_SECRET_REF = re.compile(r"[a-z][a-z0-9_-]*:.+\Z", re.S)
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*\Z")


@dataclass(frozen=True)
class Code:
    """Where replicas find the user's code: in a shared folder, in a bundle, or in their image."""

    kind: str
    """`in_place`, `bundle` or `image`."""
    root: str | None = None
    """The working folder of replicas, for code in place."""
    path: str | None = None
    """An additional folder to import from, if the entry point's module is not in `root`."""
    digest: str | None = None

    @classmethod
    def in_place(cls, root: str, path: str | None = None) -> Code:
        return cls("in_place", root=root, path=path)

    @classmethod
    def bundle(cls, digest: str) -> Code:
        return cls("bundle", digest=digest)

    @classmethod
    def image(cls) -> Code:
        return cls("image")


@dataclass(frozen=True)
class Task:
    """What replicas do. They read it from the store, so no backend can lose or change it."""

    entry: str
    args: Mapping[str, Any] = field(default_factory=dict)
    argv: Sequence[str] = ()
    """`sys.argv[1:]` of a script; a function has `args` instead."""
    code: Code = Code("image")
    on_dead: str = "fail"
    """`fail`: replicas end with `QuorumLost` when a round needs a rank that has been dead for `on_dead_after_s`.
    `wait`: they wait for it until the deadline of the round."""
    on_dead_after_s: float = ON_DEAD_AFTER_S

    def __post_init__(self) -> None:
        problems = list(_task_problems(self))
        if problems:
            raise InvalidSpec("task", problems)

    def to_json(self) -> dict[str, Any]:
        """The task as JSON. Newer fields are left out if they have their default, so that older runs compare equal."""
        record = dict(asdict(self), args=dict(self.args), argv=list(self.argv))
        return {name: value for name, value in record.items() if name not in _NEWER or value != getattr(Task, name)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Task:
        newer = {name: data[name] for name in _NEWER if name in data}
        return cls(data["entry"], data["args"], tuple(data["argv"]), Code(**data["code"]), **newer)


@dataclass(frozen=True)
class Placement:
    """Where and how replicas run. The backend applies every field or refuses it. (E2)"""

    replicas: int = 1
    gpu: Gpu | None = None
    cpus: float | None = None
    memory_gib: float | None = None
    image: str | None = None
    timeout_s: float = DAY_S
    """The time limit of a replica, restarts included. After it the replica is stopped and counts as failed."""
    grace_s: float = 10.0
    """The time between SIGTERM and SIGKILL when a replica is stopped."""
    max_restarts: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Variable name -> reference such as `env:HF_TOKEN`; never the value."""
    rank_env: str = RANK
    """An additional variable that holds the rank, for code that expects another name."""

    def __post_init__(self) -> None:
        if isinstance(self.gpu, str):
            try:
                object.__setattr__(self, "gpu", Gpu.parse(self.gpu))
            except (ValueError, UnknownName) as exc:
                others = [p for p in _placement_problems(self) if not p.startswith("gpu=")]
                raise InvalidSpec("placement", [f"gpu=`{self.gpu}`: {_words(exc)}", *others]) from exc
        problems = list(_placement_problems(self))
        if problems:
            raise InvalidSpec("placement", problems)

    def to_json(self) -> dict[str, Any]:
        return dict(
            asdict(self), gpu=str(self.gpu) if self.gpu else None, env=dict(self.env), secrets=dict(self.secrets)
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Placement:
        return cls(**dict(data, gpu=Gpu.parse(data["gpu"]) if data["gpu"] else None))


@dataclass(frozen=True)
class RunSpec:
    """One run: its id, its task and its placement."""

    run_id: str
    task: Task
    placement: Placement

    @classmethod
    def build(
        cls,
        entry: str | Callable[..., Any],
        *,
        run_id: str | None = None,
        args: Mapping[str, Any] | None = None,
        argv: Sequence[str] = (),
        code: Code | None = None,
        on_dead: str = "fail",
        on_dead_after_s: float = ON_DEAD_AFTER_S,
        **placement: Any,
    ) -> RunSpec:
        """Check everything, then raise every problem together or return the spec."""
        problems: list[str] = []
        run_id = new_run_id() if run_id is None else run_id
        if problem := run_id_problem(run_id):
            problems.append(_problem("run_id", run_id, problem))
        text = _collect(problems, lambda: _entry_text(entry)) or "unknown.py"  # so that the rest is checked, too
        task = _collect(
            problems, lambda: Task(text, args or {}, tuple(argv), code or Code.image(), on_dead, on_dead_after_s)
        )
        known = [each.name for each in fields(Placement)]
        problems += [_unknown(name, known) for name in placement if name not in known]
        place = _collect(problems, lambda: Placement(**{name: placement[name] for name in known if name in placement}))
        if problems or task is None or place is None:
            raise InvalidSpec(f"run `{run_id}`", problems)
        return cls(run_id, task, place)

    def to_json(self) -> dict[str, Any]:
        return {"run_id": self.run_id, "task": self.task.to_json(), "placement": self.placement.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunSpec:
        return cls(data["run_id"], Task.from_json(data["task"]), Placement.from_json(data["placement"]))


@dataclass(frozen=True)
class Gpu:
    """`count` devices of one kind for each replica. `any` is any device that the machine has."""

    name: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.name}:{self.count}"

    @classmethod
    def parse(cls, text: str) -> Gpu:
        """Parse `"H100:8"`. An unknown name raises `UnknownName`, a bad count `ValueError`."""
        name, _, count = text.partition(":")
        spelled = {known.lower().replace("-", ""): known for known in KNOWN}
        plain = name.strip().lower().replace("-", "").replace("_", "").replace(" ", "")
        if plain not in spelled:
            raise UnknownName("GPU", name, KNOWN, hint="write a name and a count, such as `H100:8`")
        if count and not (count.isdecimal() and int(count) > 0):
            raise ValueError(f"the count after `:` is a whole number from 1, got `{count}`")
        return cls(spelled[plain], int(count) if count else 1)


@dataclass(frozen=True)
class Entry:
    """A parsed entry point. Exactly one of `module` and `script` is set; only a script may have no function."""

    module: str | None
    script: str | None
    function: str | None

    def __str__(self) -> str:
        place = self.module or self.script or ""
        return f"{place}:{self.function}" if self.function else place

    @classmethod
    def parse(cls, text: str) -> Entry:
        """Parse one of the three forms; `ValueError` shows them."""
        place, colon, function = text.rpartition(":") if ":" in text else (text, "", "")
        if colon and not function.isidentifier():
            raise ValueError(f"`{function}` after the last `:` is not a function name")
        if place.endswith(".py"):
            return cls(None, place, function or None)
        if not _MODULE.match(place):
            raise ValueError("write `package.module:function`, `script.py` or `script.py:function`")
        if not function:
            raise ValueError(f"which function of `{place}`? write `{place}:function`")
        return cls(place, None, function)

    @classmethod
    def of(cls, target: str | Callable[..., Any]) -> Entry:
        """The entry point for a text or a callable; `ValueError` if another process could not import it."""
        return cls.parse(target) if isinstance(target, str) else _of_callable(target)


def unfit(name: str, kind: str, module: str = "") -> str:
    """Why `name`, which is a `class`, `async`, … or an object of the type `kind`, cannot be an entry point."""
    match kind:
        case "class":
            return f"`{name}` is a class; an entry point is a function: define one that makes and uses `{name}(…)`"
        case "async":
            return f"`{name}` is `async`; an entry point is a plain function: define one with `asyncio.run({name}(…))`"
        case "generator function":
            return f"`{name}` has a `yield`, so calling it runs nothing; an entry point returns its result"
        case "module":
            return f"`{name}` is a module; name a function of it: `{module or name}:function`"
        case _:
            return f"`{name}` is of type `{kind}`; an entry point is a function"


def object_problem(found: object, name: str) -> str | None:
    """Why this object cannot be an entry point; None if it can: it is called like a function."""
    import inspect

    if isinstance(found, type):
        return unfit(name, "class")
    if inspect.ismodule(found):
        return unfit(name, "module", found.__name__)
    if not callable(found):
        return unfit(name, type(found).__name__)
    called = (found, type(found).__call__)
    if any(inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in called):
        return unfit(name, "async")
    return unfit(name, "generator function") if any(map(inspect.isgeneratorfunction, called)) else None


def _of_callable(function: Callable[..., Any]) -> Entry:
    if problem := object_problem(function, getattr(function, "__name__", "entry")):
        raise ValueError(problem)
    if isinstance(function, partial):
        raise ValueError("a `partial` has no name to import it by; give the function, and its arguments as `args`")
    name = getattr(function, "__qualname__", None)
    module_name = getattr(function, "__module__", None)
    if name is None or module_name is None or hasattr(function, "__self__"):
        raise ValueError("only a plain function can be imported by another process; define one at module level")
    if name == "<lambda>":
        raise ValueError("a lambda has no name to import it by; define a function at module level")
    if "<locals>" in name or "." in name:
        raise ValueError(f"`{name}` is defined inside a function or class; move it to module level")
    module = sys.modules.get(module_name)
    if module is None or getattr(module, name, None) is not function:
        raise ValueError(f"`{module_name}.{name}` is not this function, so another process could not find it")
    if module_name != "__main__":
        return Entry(module_name, None, name)
    if (spec := getattr(module, "__spec__", None)) is not None:
        return Entry(spec.name, None, name)  # `python -m package.module`: its imports may be relative
    script = getattr(module, "__file__", None)
    if script is None:
        raise ValueError(f"`{name}` is defined in an interactive session; put it in a file")
    return Entry(None, os.path.abspath(script), name)


_is_loading = False
_script: str | None = None


@contextmanager
def loading() -> Iterator[None]:
    """A replica imports user code inside this block."""
    global _is_loading
    _is_loading = True
    try:
        yield
    finally:
        _is_loading = False


def playing(script: str) -> None:
    """Record that this replica runs this script as its main program."""
    global _script
    _script = os.path.realpath(script)


def own_script(entry: str | Callable[..., Any]) -> str | None:
    """The script that this replica runs, if it is about to launch itself or one of its own functions."""
    if _script is None:
        return None
    from importlib.util import find_spec

    try:
        found = Entry.of(entry)
        file = found.script or getattr(find_spec(found.module or ""), "origin", None)
    except (ValueError, TypeError, ImportError):
        return None  # the launch refuses it with a better message
    return _script if file is not None and os.path.realpath(file) == _script else None


def is_loading() -> bool:
    """Whether a replica is importing user code. A launch during the import would repeat in each new replica."""
    return _is_loading


def json_problems(value: object, where: str) -> Iterator[str]:
    """The parts of `value` that JSON would change or cannot hold."""
    if value is None or isinstance(value, bool | int | str):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            yield _problem(where, value, "JSON has no infinities and no NaN; pass a text or leave it out")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from json_problems(item, f"{where}[{index}]")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, str):
                yield from json_problems(item, f"{where}.{key}")
            else:
                yield _problem(where, key, "keys are texts")
    else:
        rule = "pass a list" if isinstance(value, tuple | set) else f"a `{type(value).__name__}` is not JSON"
        yield _problem(where, value, rule)


def _entry_text(entry: str | Callable[..., Any]) -> str:
    try:
        return str(Entry.of(entry))
    except ValueError as exc:
        raise InvalidSpec("task", [_problem("entry", entry, str(exc))]) from exc


def _task_problems(task: Task) -> Iterator[str]:
    if task.on_dead not in ON_DEAD:
        yield _problem("on_dead", task.on_dead, f"one of {', '.join(f'`{word}`' for word in ON_DEAD)}")
    if not (_is_number(task.on_dead_after_s) and task.on_dead_after_s >= 0):
        yield _problem("on_dead_after_s", task.on_dead_after_s, "a number of seconds, 0 or more")
    try:
        entry = Entry.parse(task.entry)
    except (ValueError, TypeError) as exc:
        yield _problem("entry", task.entry, str(exc))
        return
    if not isinstance(task.args, Mapping):
        yield _problem("args", task.args, "arguments are a mapping of names to JSON values")
        return
    yield from json_problems(task.args, "args")
    if entry.function and task.argv:
        yield _problem("argv", list(task.argv), "a function takes `args`; words after `--` are for a script")
    if entry.function:
        for name in task.args:
            if isinstance(name, str) and not name.isidentifier():
                yield _problem("args", name, "not a Python name, so it cannot be an argument")
    if not all(isinstance(word, str) for word in task.argv):
        yield _problem("argv", list(task.argv), "every word is a text")


def _placement_problems(p: Placement) -> Iterator[str]:
    if not isinstance(p.replicas, int) or isinstance(p.replicas, bool) or not 1 <= p.replicas <= 100_000:
        yield _problem("replicas", p.replicas, "a whole number from 1 to 100000")
    if p.gpu is not None and not isinstance(p.gpu, Gpu):
        yield _problem("gpu", p.gpu, "a name and a count, such as `H100:8`")
    for name in ("cpus", "memory_gib"):
        if (amount := getattr(p, name)) is not None and not _is_positive(amount):
            yield _problem(name, amount, "a number above 0")
    if not _is_positive(p.timeout_s):
        yield _problem("timeout_s", p.timeout_s, "a number of seconds above 0")
    if not (_is_number(p.grace_s) and p.grace_s >= 0):
        yield _problem("grace_s", p.grace_s, "a number of seconds, 0 or more")
    if not isinstance(p.max_restarts, int) or isinstance(p.max_restarts, bool) or p.max_restarts < 0:
        yield _problem("max_restarts", p.max_restarts, "a whole number, 0 or more")
    if p.image is not None and (not isinstance(p.image, str) or not p.image.strip() or p.image != p.image.strip()):
        yield _problem("image", p.image, "a non-empty image name")
    if not isinstance(p.rank_env, str) or not _ENV_NAME.match(p.rank_env) or p.rank_env in RESERVED[1:]:
        yield _problem("rank_env", p.rank_env, "a variable name that Atoll does not use for something else")
    yield from _environment_problems(p)


def _environment_problems(p: Placement) -> Iterator[str]:
    for field_name, variables in (("env", p.env), ("secrets", p.secrets)):
        if not isinstance(variables, Mapping):
            yield _problem(field_name, variables, "a mapping of variable names to texts")
            return
        for name, value in variables.items():
            where = f"{field_name}.{name}"
            if not isinstance(name, str) or not _ENV_NAME.match(name):
                yield f"{where}: a variable name is letters, digits and `_`, not starting with a digit"
            elif name in RESERVED or name == p.rank_env:
                yield f"{where}: this variable is set by Atoll"
            elif not isinstance(value, str) or "\0" in value:
                yield f"{where}: the value is a text without NUL"
            elif field_name == "secrets" and not _SECRET_REF.match(value):
                yield f"{where}: a secret is a reference such as `env:{name}`, never the value"
            elif field_name == "env" and _SECRET_LIKE.search(name):
                yield f"{where}: looks like a secret; pass it by reference: secrets={{`{name}`: `env:{name}`}}"
    if isinstance(p.env, Mapping) and isinstance(p.secrets, Mapping):
        for name in sorted(set(p.env) & set(p.secrets)):
            yield f"env.{name}: also in secrets; remove one of them"


def _collect(problems: list[str], build: Callable[[], Any]) -> Any:
    try:
        return build()
    except InvalidSpec as exc:
        problems.extend(exc.problems)
    return None


def _unknown(name: str, placement: Sequence[str]) -> str:
    """The problem with an unknown keyword of `launch`; suggests other keywords of `launch`, too."""
    meant = did_you_mean(name, [*placement, *_LAUNCH_TAKES])
    listed = f"; a placement has {', '.join(placement)}"
    return f"{name}: there is no such argument{meant or listed}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _problem(where: str, value: object, rule: str) -> str:
    shown = value if isinstance(value, str) else repr(value)
    return f"{where}=`{shown if len(shown) <= 80 else shown[:77] + '…'}`: {rule}"


def _words(exc: Exception) -> str:
    return exc.message if isinstance(exc, UnknownName) else str(exc)
