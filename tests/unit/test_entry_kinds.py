"""What cannot be an entry point is refused before anything starts: classes, coroutines, modules, constants, and scripts
that only define functions."""

from __future__ import annotations

import functools
import types
from pathlib import Path
from typing import Any

import pytest

from atoll import entry_check
from atoll.entry import object_problem
from atoll.errors import InvalidSpec
from atoll.spec import RunSpec, Task

SOURCE = """
import json, os.path as paths, xml.dom
from dataclasses import dataclass
from functools import partial, wraps
from elsewhere import anything, Anything

RATE = 3
LOW: float = -0.5
NAMES = ["a", "b"]
TEXT = f"{RATE}"

class Thing:
    def train(self, ctx):
        pass

@dataclass(frozen=True)
class Settings:
    lr: float = 0.1

@registered
class Wrapped:
    pass

async def coroutine(ctx):
    pass

@synchronous
async def made_plain(ctx):
    pass

def generator(ctx):
    for step in range(3):
        yield step

def with_a_generator_inside(ctx):
    def batches():
        yield 1
    return sum(batches())

@contextmanager
def decorated(ctx):
    yield

def train(ctx):
    pass

class Trainer:
    def __call__(self, ctx):
        pass

instance = Trainer()
slower = partial(train, 1)
short = lambda ctx: 1
alias = train
later = None
if RATE:
    later = train

def fold(ctx):
    pass

FOLDS = [fold for fold in range(3)]
BY_FOLD = {fold: [fold for _ in range(3)] for fold in range(3)}
MADE = [(in_a_list := train)]

made_later = None

def make():
    global made_later
    def made_later(ctx):
        pass

make()
"""


class Thing:
    pass


class Waiting:
    async def __call__(self) -> None:
        pass


class Trainer:
    def __call__(self) -> None:
        pass


async def coroutine() -> None:
    pass


async def stream() -> Any:
    yield 1


def generator() -> Any:
    yield 1


def plain() -> None:
    pass


@pytest.fixture
def root(tmp_path: Path) -> str:
    (tmp_path / "job.py").write_text(SOURCE)
    return str(tmp_path)


def refusal(root: str, entry: str) -> str:
    with pytest.raises(InvalidSpec) as caught:
        entry_check.check(Task(entry), root)
    (problem,) = caught.value.problems
    return problem.removeprefix(f"entry=`{entry}`: ")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Thing", "`Thing` is a class; an entry point is a function: define one that makes and uses `Thing(…)`"),
        ("Settings", "`Settings` is a class; an entry point is a function: define one that makes and uses `Set"),
        ("coroutine", "`coroutine` is `async`; an entry point is a plain function: define one with `asyncio.run(c"),
        ("generator", "`generator` has a `yield`, so a call of it runs nothing; an entry point returns its result"),
        ("json", "`json` is a module; name a function of it: `json:function`"),
        ("paths", "`paths` is a module; name a function of it: `os.path:function`"),
        ("xml", "`xml` is a module; name a function of it: `xml.dom:function`"),
        ("RATE", "`RATE` is of type `int`; an entry point is a function"),
        ("LOW", "`LOW` is of type `float`; an entry point is a function"),
        ("NAMES", "`NAMES` is of type `list`; an entry point is a function"),
        ("TEXT", "`TEXT` is of type `str`; an entry point is a function"),
    ],
)
def test_what_is_no_plain_function_is_refused_by_what_it_is(root, name, words):
    for entry in (f"job:{name}", f"job.py:{name}"):
        assert refusal(root, entry).startswith(words)


@pytest.mark.parametrize(
    "name",
    ["train", "instance", "slower", "short", "alias", "later", "anything", "Anything", "Wrapped", "made_plain",
     "decorated", "with_a_generator_inside", "fold", "in_a_list", "made_later"],
)  # fmt: skip
def test_what_is_or_may_be_called_like_a_function_is_let_through(root, name):
    assert entry_check.check(Task(f"job:{name}"), root) == []


@pytest.mark.parametrize(
    "text",
    [
        "train = None\nglobals()['train'] = print\n",
        "globals().update(train=print)\n",
        "exec('def train(ctx): pass')\n",
        "import sys\nsetattr(sys.modules[__name__], 'train', print)\n",
        "import lazy_loader\n__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, [], {'loop': ['train']})\n",
        "if True:\n    def __getattr__(name): return print\n",
    ],
)
def test_a_name_that_may_be_set_behind_our_back_is_let_through(root, text):
    (Path(root) / "dynamic.py").write_text(text)
    assert entry_check.check(Task("dynamic:train"), root) == []


LONG_CHAIN = "if x == 0:\n    y = 0\n" + "".join(f"elif x == {n}:\n    y = {n}\n" for n in range(1, 700))


@pytest.mark.parametrize("text", [LONG_CHAIN, "X = " + " + ".join(["'a'"] * 900), "X = x" + ".then()" * 900])
def test_source_that_is_nested_too_deep_to_look_through_is_let_through(root, text):
    (Path(root) / "deep.py").write_text(f"x = 1\ndef train(ctx):\n    pass\n{text}\ntrain(1)\n")
    for check in (entry_check.check, entry_check.check_sent):
        assert [check(Task(entry), root) for entry in ("deep:train", "deep.py")] == [[], []]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Thing, "`name` is a class"),
        (coroutine, "`name` is `async`"),
        (stream, "`name` is `async`"),
        (Waiting(), "`name` is `async`"),
        (functools.partial(coroutine), "`name` is `async`"),
        (generator, "`name` has a `yield`"),
        (types, "`name` is a module; name a function of it: `types:function`"),
        (0.5, "`name` is of type `float`"),
        (None, "`name` is of type `NoneType`"),
        (Thing(), "`name` is of type `Thing`"),
    ],
)
def test_an_object_that_cannot_be_an_entry_point_says_what_it_is(found, words):
    assert (object_problem(found, "name") or "").startswith(words)


@pytest.mark.parametrize("found", [plain, Trainer(), Trainer().__call__, functools.partial(plain), len, lambda: 1])
def test_an_object_that_can_be_called_like_a_function_can_be_one(found):
    assert object_problem(found, "name") is None


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (Thing, "`Thing` is a class"),
        (coroutine, "`coroutine` is `async`"),
        (generator, "`generator` has a `yield`"),
        (functools.partial(plain), "a `partial` has no name to import it by; give the function, and .* as `args`"),
        (Trainer(), "only a plain function can be imported by another process"),
        (functools, "`functools` is a module; name a function of it: `functools:function`"),
        (7, "`entry` is of type `int`"),
    ],
)
def test_an_object_given_to_launch_is_refused_for_the_same_reasons(entry, words):
    with pytest.raises(InvalidSpec, match=words):
        RunSpec.build(entry)


def script(root: str, text: str) -> str:
    (Path(root) / "script.py").write_text(text)
    return "script.py"


@pytest.mark.parametrize(
    ("text", "ways"),
    [
        ("def train(ctx):\n    print(1)\n", "`script.py:train`"),
        ('"""Doc."""\nimport os\nLR = 1\nclass A:\n    pass\ndef helper(x):\n    pass\ndef run(ctx):\n    helper(1)\n',
         "`script.py:run`"),
        ("def one():\n    pass\ndef two():\n    pass\ndef _three():\n    pass\n", "`script.py:one` or `script.py:two`"),
        ("try:\n    import fast\nexcept ImportError:\n    fast = None\nif fast:\n    X = 1\ndef go(): pass\n",
         "`script.py:go`"),
        ("from __future__ import annotations\nimport torch\nfrom atoll import DiLoCo as D\ndef go(): D(torch.ones)\n",
         "`script.py:go`"),
    ],
)  # fmt: skip
def test_a_script_that_only_defines_functions_is_refused_and_told_how_to_name_one(root, text, ways):
    words = f"the script only defines functions, so it would do nothing; name one: {ways}"
    assert refusal(root, script(root, text)) == words


@pytest.mark.parametrize(
    "text",
    [
        "def train():\n    pass\ntrain()\n",
        "def train(ctx):\n    pass\nif __name__ == '__main__':\n    import atoll\n    train(atoll.current())\n",
        "def train(ctx):\n    pass\nresult = train(None)\n",
        "def train(ctx):\n    pass\nfor seed in range(3):\n    train(seed)\n",
        "def helper():\n    pass\n@app.command()\ndef train(rate):\n    pass\n",
        "import train_on_import\n",
        "import train_on_import\ndef helper():\n    pass\n",
        "def helper():\n    pass\nif __name__ == '__main__':\n    from package import train_on_import\n",
        "def train():\n    return 1\nif train():\n    IS_DONE = True\n",
        "import sys\ndef train():\n    return 1\nif sys.argv:\n    X = 1\nelif (code := train()) != 0:\n    X = code\n",
        "print(1)\n",
        "",
    ],
)
def test_a_script_that_does_something_or_may_is_let_through(root, text):
    assert entry_check.check(Task(script(root, text)), root) == []


def test_a_script_that_never_calls_what_only_a_replica_could_is_let_through_with_a_note(root):
    setup = "import torch\nfrom atoll import ReplicaContext\ndevice = torch.device('cpu')\ntorch.manual_seed(1)\n"
    text = f"{setup}def helper(x):\n    pass\ndef train(context: ReplicaContext):\n    helper(1)\n"
    words = "the script never calls `train`; if that is what should run: `script.py:train`"
    assert entry_check.check(Task(script(root, text)), root) == [words]
    assert entry_check.check(Task("script.py:train"), root) == []


@pytest.mark.parametrize("first", ["ctx", "c: ReplicaContext", "ctx: 'atoll.ReplicaContext'"])
def test_no_argument_takes_the_place_of_the_context(root, first):
    entry = script(root, f"def train({first}, lr=1):\n    pass\n") + ":train"
    name = first.partition(":")[0]
    with pytest.raises(InvalidSpec) as caught:
        entry_check.check(Task(entry, args={name: 3}), root)
    assert f"`train` gets `{name}`, its context, from Atoll" in caught.value.problems[0]


@pytest.mark.parametrize("first", ["context", "context: int", "ctx: int"])
def test_a_number_that_is_called_like_the_context_can_be_given(root, first):
    entry = script(root, f"def train({first}, lr=1):\n    pass\n") + ":train"
    assert entry_check.check(Task(entry, args={first.partition(":")[0]: 3}), root) == []


def test_code_that_is_sent_elsewhere_is_checked_as_far_as_it_is_here(root):
    for entry, words in (
        ("job:Thing", "is a class"),
        ("job.py:trian", "did you mean `train`?"),
        (script(root, "def go(ctx):\n    pass\n"), "name one: `script.py:go`"),
    ):
        with pytest.raises(InvalidSpec) as caught:
            entry_check.check_sent(Task(entry), root)
        assert words in caught.value.problems[0]
    (Path(root) / "newer.py").write_text("type X = int; def train(:\n")
    for entry in ("job:train", "of_the_image:train", "of_the_image.py", "newer:train", "json:JSONEncoder"):
        assert entry_check.check_sent(Task(entry), root) == []


def test_a_script_that_python_cannot_read_is_refused_where_it_is_wrong(root):
    assert refusal(root, script(root, "x = 1\ndef train(:\n")).endswith("script.py:2: invalid syntax")
