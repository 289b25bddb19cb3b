"""RunSpec = Task (for the replicas) + Placement (for the executor): frozen, and checked when built.

Every problem is reported at once, each with the field, the value and the rule. `Gpu` is a name and a count: `"H100:8"`,
`"any:2"`.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from atoll.context import RANK, RESERVED
from atoll.entry import Entry as Entry
from atoll.errors import InvalidSpec, UnknownName, did_you_mean
from atoll.names import new_run_id, run_id_problem
from atoll.validation import is_number

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
PART_FIELDS = ("gpu", "cpus", "memory_gib", "image", "env", "secrets")
"""Fields of a placement that a part of a run may have its own values of."""
_LAUNCH_TAKES = (
    "on", "store", "args", "argv", "run_id", "workspace", "settings", "on_dead", "on_dead_after_s", "from_run",
    "from_round", "max_cost",
)  # fmt: skip
_MOST_BITS = 1000
"""A longer number is not shown; Python refuses to print very long ones."""
_NEWER = ("on_dead", "on_dead_after_s", "optional_args", "program", "origin")
"""Fields of a task that the records of older runs do not have."""
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
SECRET_LIKE = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_KEY|ACCESS_KEY|PRIVATE_KEY|CREDENTIALS)\Z", re.I)
"""Names of variables whose values are taken for secrets."""
_SECRET_REF = re.compile(r"[a-z][a-z0-9_-]*:.+\Z", re.S)


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
    files: Mapping[str, str] | None = field(default=None, hash=False)
    """For code in place: the digest of each file that the entry point uses; None if they are not known."""

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
    optional_args: tuple[str, ...] = ()
    """Names in `args` that are left out if the function has no parameter of that name."""
    program: tuple[str, ...] = ()
    """The command of the image that runs instead of an entry point. It calls no function, so `entry` may be empty and
    `args` are only a record. Its replicas write no outcomes."""
    origin: Mapping[str, Any] | None = None
    """The run, the round and the digest of the weights that the run starts from; None for those of the code."""

    def __post_init__(self) -> None:
        problems = list(_task_problems(self))
        if problems:
            raise InvalidSpec("task", problems)

    @property
    def title(self) -> str:
        """What runs, in one line: the program or the entry point."""
        return shlex.join(self.program) or self.entry

    def to_json(self) -> dict[str, Any]:
        """The task as JSON. Newer fields are left out if they have their default, so that older runs compare equal."""
        record = dict(asdict(self), args=dict(self.args), argv=list(self.argv))
        if self.code.files is None:
            del record["code"]["files"]
        shown = {name: value for name, value in record.items() if name not in _NEWER or value != getattr(Task, name)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in shown.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Task:
        newer = {name: data[name] for name in _NEWER if name in data}
        newer |= {name: tuple(value) for name, value in newer.items() if isinstance(value, list)}
        return cls(data["entry"], data["args"], tuple(data["argv"]), Code(**data["code"]), **newer)


@dataclass(frozen=True)
class Part:
    """Some replicas of a run, all on one backend. The ranks are given out in the order of the parts."""

    on: str
    replicas: int
    overrides: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Fields of the placement that this part has its own values of; see `PART_FIELDS`."""

    def to_json(self) -> dict[str, Any]:
        own = {"overrides": dict(self.overrides)} if self.overrides else {}
        return {"on": self.on, "replicas": self.replicas, **own}


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
    parts: tuple[Part, ...] = ()
    """The parts of a run on several backends; empty if one backend has all replicas."""

    def __post_init__(self) -> None:
        if isinstance(self.parts, list | tuple):
            given: Sequence[Any] = self.parts
            made = tuple(Part(**part) if _is_part_record(part) else part for part in given)
            object.__setattr__(self, "parts", made)
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
        """The placement as JSON. `parts` is left out if there are none, as in the records of older runs."""
        record = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "parts"}
        record |= {"gpu": str(self.gpu) if self.gpu else None, "env": dict(self.env), "secrets": dict(self.secrets)}
        return {**record, **({"parts": [part.to_json() for part in self.parts]} if self.parts else {})}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Placement:
        return cls(**dict(data, gpu=Gpu.parse(data["gpu"]) if data["gpu"] else None))

    def of_parts(self) -> list[tuple[int, Placement]]:
        """The first rank and the placement of each part."""
        found, first = [], 0
        for part in self.parts:
            found.append((first, replace(self, parts=(), replicas=part.replicas, **self._of_part(part))))
            first += part.replicas
        return found

    def _of_part(self, part: Part) -> dict[str, Any]:
        """The fields of which the part has its own values; variables and secrets are merged with those of all."""
        tables = {"env": self.env, "secrets": self.secrets}
        return {name: {**tables[name], **value} if name in tables else value for name, value in part.overrides.items()}


@dataclass(frozen=True)
class RunSpec:
    """One run: its id, its task and its placement."""

    run_id: str
    task: Task
    placement: Placement

    @classmethod
    def build(
        cls,
        entry: str | Callable[..., Any] | Entry,
        *,
        run_id: str | None = None,
        args: Mapping[str, Any] | None = None,
        argv: Sequence[str] = (),
        code: Code | None = None,
        on_dead: str = "fail",
        on_dead_after_s: float = ON_DEAD_AFTER_S,
        optional_args: Sequence[str] = (),
        program: Sequence[str] = (),
        **placement: Any,
    ) -> RunSpec:
        """Check everything, then raise every problem together or return the spec."""
        problems: list[str] = []
        run_id = new_run_id() if run_id is None else run_id
        if problem := run_id_problem(run_id):
            problems.append(_problem("run_id", run_id, problem))
        is_parsed = not (program and isinstance(entry, str))
        text = _collect(problems, lambda: _entry_text(entry)) if is_parsed else str(entry)
        task = _collect(
            problems,
            lambda: Task(
                "unknown.py" if text is None else text,  # so that the rest is checked, too
                args or {},
                tuple(argv),
                code or Code.image(),
                on_dead,
                on_dead_after_s,
                tuple(optional_args),
                tuple(program),
            ),
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


def _entry_text(entry: str | Callable[..., Any] | Entry) -> str:
    try:
        return str(Entry.of(entry))
    except ValueError as exc:
        shown = str(entry) if isinstance(entry, Entry) else entry
        raise InvalidSpec("task", [_problem("entry", shown, str(exc))]) from exc


def _task_problems(task: Task) -> Iterator[str]:
    if task.on_dead not in ON_DEAD:
        yield _problem("on_dead", task.on_dead, f"one of {', '.join(f'`{word}`' for word in ON_DEAD)}")
    if not (_is_number(task.on_dead_after_s) and task.on_dead_after_s >= 0):
        yield _problem("on_dead_after_s", task.on_dead_after_s, "a number of seconds, 0 or more")
    if task.program:
        yield from _program_problems(task)
        return
    try:
        entry = Entry.of_record(task.entry)
    except (ValueError, TypeError) as exc:
        yield _problem("entry", task.entry, str(exc))
        return
    if not isinstance(task.args, Mapping):
        yield _problem("args", task.args, "arguments are a mapping of names to JSON values")
        return
    yield from json_problems(task.args, "args")
    if task.argv and not entry.is_program:
        yield _problem("argv", list(task.argv), "a function takes `args`; words after `--` are for a script")
    if not entry.is_program:
        for name in task.args:
            if isinstance(name, str) and not name.isidentifier():
                yield _problem("args", name, "not a Python name, so it cannot be an argument")
    for name, words in (("argv", task.argv), ("optional_args", task.optional_args)):
        if not all(isinstance(word, str) for word in words):
            yield _problem(name, list(words), "every word is a text")


def _program_problems(task: Task) -> Iterator[str]:
    words = list(task.program)
    if not all(isinstance(word, str) and "\0" not in word for word in words) or not words[0]:
        yield _problem("program", words, "a command: the name of a program, then its arguments, as texts without NUL")
    elif task.code.kind != "image":
        yield _problem(
            "program", words, "only an image has a program of its own, and these replicas run no image's code"
        )
    if task.argv:
        yield _problem("argv", list(task.argv), "words are for a script; write them in `program`")
    if isinstance(task.args, Mapping):
        yield from json_problems(task.args, "args")
    else:
        yield _problem("args", task.args, "arguments are a mapping of names to JSON values")


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
    yield from _part_problems(p)


def _is_part_record(part: Any) -> bool:
    """Whether this is a part as JSON."""
    return isinstance(part, Mapping) and {"on", "replicas"} <= part.keys() <= {"on", "replicas", "overrides"}


def _part_problems(p: Placement) -> Iterator[str]:
    if not isinstance(p.parts, tuple) or not all(isinstance(part, Part) for part in p.parts):
        yield _problem("parts", p.parts, "a list of parts, each with `on` and `replicas`")
        return
    for part in p.parts:
        if not isinstance(part.on, str) or not part.on:
            yield _problem("parts", part.on, "the name of a backend")
        if not isinstance(part.replicas, int) or isinstance(part.replicas, bool) or part.replicas < 1:
            yield _problem("parts", f"{part.on}:{part.replicas}", "the number of replicas of a part is at least 1")
            return
        if not isinstance(part.overrides, Mapping) or not set(part.overrides) <= set(PART_FIELDS):
            yield _problem("parts", part.overrides, f"a part can have its own {', '.join(PART_FIELDS)}")
            continue
        try:
            Placement(**part.overrides)
        except InvalidSpec as exc:
            yield from (f"{part.on}.{problem}" for problem in exc.problems)
    count = sum(part.replicas for part in p.parts)
    if p.parts and count != p.replicas:
        yield _problem("replicas", p.replicas, f"the parts have {count} together; leave it out, or change a part")


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
            elif field_name == "env" and SECRET_LIKE.search(name):
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
    return is_number(value)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _problem(where: str, value: object, rule: str) -> str:
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"{where}: {rule}, not a number of {value.bit_length()} bits"
    is_wrong_kind = isinstance(value, str) and rule.startswith(("a whole number", "a number"))
    shown = value if isinstance(value, str) and not is_wrong_kind else repr(value)
    return f"{where}=`{shown if len(shown) <= 80 else shown[:77] + '…'}`: {rule}"


def _words(exc: Exception) -> str:
    return exc.message if isinstance(exc, UnknownName) else str(exc)
