"""What is found in the user's source before anything starts: wrong names and arguments, and what is no function."""

from __future__ import annotations

import functools
import sys
import types
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from atoll.entry import Entry, object_problem
from atoll.errors import EntryMissing, InvalidSpec
from atoll.runs import entry_check
from atoll.spec import RunSpec, Task

SOURCE = """
import json
from functools import partial
from lib.inner import elsewhere

RATE = 3

def train(ctx, lr: float = 1e-3, steps: int = 1):
    pass

def anything(ctx, *, lr: float, **rest: int):
    pass

def few(ctx, steps=1, *, lr=1e-3):
    pass

def none(ctx):
    pass

class Thing:
    def called(self):
        pass

async def coroutine(ctx):
    pass

def batches(ctx):
    for step in range(3):
        received = yield step

def delegates(ctx):
    return (yield from batches(ctx))

def has_inner_generator(ctx):
    def inner():
        yield 1
    return sum(inner()), list(map(lambda: (yield), ()))

@decorated
def wrapped(ctx, lr: float):
    pass

@decorated
class Wrapped:
    pass

@decorated
async def made_plain(ctx):
    pass

def assigned(ctx, lr: float):
    pass

def imported(ctx, lr: float):
    pass

def chosen(ctx, lr: float):
    pass

def called(ctx, lr: float):
    pass

assigned = partial(assigned, lr=1.0)
instance = Thing()

try:
    from fast import train as imported
except ImportError:
    pass

if FAST:
    def chosen(ctx):
        pass

def make():
    global made_later
    def made_later(ctx):
        pass

make()

if __name__ == "__main__":
    called(None, 1.0)
"""


@pytest.fixture
def root(tmp_path: Path) -> str:
    (tmp_path / "job.py").write_text(SOURCE)
    return str(tmp_path)


def assert_accepted(task: Task, root: str) -> None:
    """The check raises for what it refuses."""
    assert entry_check.check(task, root) is None


def refusal(root: str, entry: str, **args: Any) -> str:
    with pytest.raises(InvalidSpec) as caught:
        entry_check.check(Task(entry, args), root)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("jobb:train", "there is no module `jobb` in `{root}`, did you mean `job`?"),
        ("libs.inner:train", "there is no module `libs.inner` in `{root}`, did you mean `lib`?"),
        ("lib.iner:train", "there is no module `lib.iner` in `{root}`, did you mean `lib.inner`?"),
        ("lib.inner.deep:train", "there is no module `lib.inner.deep` in `{root}`"),
        ("quite_another:train", "there is no module `quite_another` in `{root}`"),
        ("jbo.py", "there is no file `{root}/jbo.py`, did you mean `job.py`?"),
        ("lib/iner.py:train", "there is no file `{root}/lib/iner.py`, did you mean `inner.py`?"),
        ("nowhere/job.py:train", "there is no file `{root}/nowhere/job.py`"),
        ("job:tarin", "no function `tarin` there, did you mean `train`?"),
        ("job:elswhere", "no function `elswhere` there, did you mean `elsewhere`?"),
        ("job:annotation", "no function `annotation` there"),
    ],
)
def test_a_misspelt_entry_point_says_which_one_may_be_meant(root, entry, words):
    (Path(root) / "lib").mkdir()
    (Path(root) / "lib" / "inner.py").touch()
    assert refusal(root, entry) == f"entry=`{entry}`: {words.format(root=root)}"


class Editable:
    """What `pip install -e` puts in `sys.meta_path` for a package whose folder is not on `sys.path`."""

    def __init__(self, folder: Path) -> None:
        self.init = folder / "installed_so" / "__init__.py"
        self.init.parent.mkdir(parents=True)
        self.init.touch()
        (self.init.parent / "loop.py").write_text("def train(ctx):\n    pass\n")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return spec_from_file_location(name, self.init) if name == "installed_so" else None


def test_a_module_that_only_a_finder_knows_is_found(root, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, object(), Editable(tmp_path / "apart")])
    entry_check.check(Task("installed_so.loop:train"), root)
    assert "no function `tarin` there, did you mean `train`?" in refusal(root, "installed_so.loop:tarin")
    assert "there is no module `installed_so.lop`" in refusal(root, "installed_so.lop:train")


def test_a_misspelt_argument_says_which_one_may_be_meant_or_which_there_are(root):
    assert refusal(root, "job:train", stepz=1).endswith("`train` takes no argument `stepz`, did you mean `steps`?")
    assert refusal(root, "job:few", epochs=1).endswith("`few` takes no argument `epochs`; it takes `lr`, `steps`")
    assert refusal(root, "job:none", epochs=1).endswith("`none` takes no argument `epochs`; it takes none")


def test_further_keywords_are_accepted_where_the_function_takes_them(root):
    entry_check.check(Task("job:anything", {"lr": 1.0, "other": "abc"}), root)
    assert refusal(root, "job:anything", other="abc").endswith("`anything` needs an argument `lr`")


def test_every_argument_that_does_not_fit_is_named_at_once(root):
    with pytest.raises(InvalidSpec) as caught:
        entry_check.check(Task("job:called", {"rate": 1, "epochs": 2}), root)
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(("name", "kind"), [("Thing", "a class"), ("coroutine", "`async`")])
def test_a_class_and_a_coroutine_are_refused(root, name, kind):
    for entry in (f"job:{name}", f"job.py:{name}"):
        assert refusal(root, entry).startswith(f"entry=`{entry}`: `{name}` is {kind}")


@pytest.mark.parametrize("name", ["batches", "delegates"])
def test_a_generator_function_is_refused(root, name):
    assert refusal(root, f"job:{name}").startswith(f"entry=`job:{name}`: `{name}` has a `yield`")


def test_a_function_that_defines_a_generator_is_accepted(root):
    assert_accepted(Task("job:has_inner_generator", {}), root)


@pytest.mark.parametrize(
    "function",
    ["wrapped", "Wrapped", "made_plain", "assigned", "imported", "chosen", "instance", "elsewhere", "json", "RATE",
     "made_later"],
)  # fmt: skip
def test_what_the_source_does_not_decide_is_left_to_the_replica(root, function):
    assert_accepted(Task(f"job:{function}", {"other": "text"}), root)


@pytest.mark.parametrize(
    "text",
    [
        "globals().update(train=print)\n",
        "exec('def train(ctx): pass')\n",
        "import sys\nsetattr(sys.modules[__name__], 'train', print)\n",
        "from loops import *\n",
        "def __getattr__(name): return print\n",
        "import lazy_loader\n__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, [], {'loop': ['train']})\n",
    ],
)
def test_a_name_that_may_be_bound_at_run_time_is_accepted(root, text):
    (Path(root) / "dynamic.py").write_text(text)
    assert_accepted(Task("dynamic:train"), root)


def test_a_method_does_not_bind_a_name_of_the_module(root):
    assert "needs an argument `lr`" in refusal(root, "job:called")


def test_source_that_is_nested_too_deep_to_read_is_accepted(root):
    chain = "if x == 0:\n    y = 0\n" + "".join(f"elif x == {n}:\n    y = {n}\n" for n in range(1, 700))
    (Path(root) / "deep.py").write_text(f"x = 1\ndef train(ctx):\n    pass\n{chain}\n")
    assert_accepted(Task("deep:train"), root)
    assert entry_check.check_sent(Task("deep:train"), root) is None


def script(root: str, text: str) -> str:
    (Path(root) / "script.py").write_text(text)
    return "script.py"


@pytest.mark.parametrize(
    "text",
    [
        "def train(ctx):\n    print(1)\n",
        '"""Doc."""\nimport os\nLR = 1\nclass A:\n    pass\ndef helper(x):\n    pass\ndef train(ctx):\n    helper(1)\n',
    ],
)
def test_a_script_that_only_defines_functions_is_refused_with_one_to_name(root, text):
    assert refusal(root, script(root, text)).endswith("it would do nothing; name one: `script.py:train`")


@pytest.mark.parametrize(
    "text",
    [
        "def train(ctx):\n    pass\nif __name__ == '__main__':\n    import atoll\n    train(atoll.current())\n",
        "def train(ctx):\n    pass\nresult = train(None)\n",
        "@app.command()\ndef train(ctx):\n    pass\n",
        "import train_on_import\ndef helper():\n    pass\n",
        "print(1)\n",
        "",
    ],
)
def test_a_script_that_may_do_something_is_accepted(root, text):
    assert_accepted(Task(script(root, text)), root)


def test_a_script_with_a_syntax_error_is_refused_with_its_line(root):
    assert refusal(root, script(root, "x = 1\ndef train(:\n")).endswith("script.py:2: invalid syntax")


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
    assert_accepted(Task(entry, args={first.partition(":")[0]: 3}), root)


def test_code_that_is_sent_elsewhere_is_checked_as_far_as_it_is_here(root):
    for entry, words in (("job:Thing", "is a class"), ("job.py:trian", "did you mean `train`?")):
        with pytest.raises(InvalidSpec) as caught:
            entry_check.check_sent(Task(entry), root)
        assert words in caught.value.problems[0]
    (Path(root) / "newer.py").write_text("type X = int; def train(:\n")
    for entry in ("job:train", "of_the_image:train", "/of/the/image.py", "newer:train", "json:JSONEncoder"):
        entry_check.check_sent(Task(entry), root)


def test_a_script_that_is_not_in_the_folder_that_is_sent_is_refused(root):
    """Its path begins at that folder, and not at the working folder of the command."""
    for entry in ("code/job.py:train", "code/job.py", "jbo.py:train"):
        with pytest.raises(InvalidSpec, match="a script is named by its path in the folder that is sent"):
            entry_check.check_sent(Task(entry), root)


@pytest.fixture
def package(tmp_path: Path) -> str:
    """A package `pkg` whose function `both` has the name of a module, and a module without `main`."""
    files = {
        "pkg/__init__.py": "def both(lr): pass\ndef train(lr): pass\n",
        "pkg/both.py": "def main(lr=1): pass\n",
        "pkg/data.py": "def load(): pass\n",
        "pkg/folder/inner.py": "def load(): pass\n",
        "solo.py": "def main(): pass\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("solo", "solo:main"),
        ("solo.main", "solo:main"),
        ("pkg.both", "pkg.both:main"),
        ("pkg.both.main", "pkg.both:main"),
        ("pkg.train", "pkg:train"),
        ("pkg.data", "pkg.data:main"),
        ("pkg.data.load", "pkg.data:load"),
        ("pkg.folder", "pkg:folder"),
        ("pkg.folder.inner.load", "pkg.folder.inner:load"),
    ],
)
def test_a_dotted_name_is_a_module_if_there_is_one_else_a_function(package, name, function):
    for decide in (entry_check.decided, entry_check.decided_sent):
        assert str(decide(Entry(dotted=name), package)) == function
    assert entry_check.decided(Entry.parse("any:function"), package) == Entry.parse("any:function")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("pkg.data", None), ("pkg.folder", None), ("pkg.boht", "both"), ("pkg.dta", "data"), ("pkg.data.laod", "load")],
)
def test_a_module_without_the_function_is_named(package, name, meant):
    for check in (entry_check.check, entry_check.check_sent):
        with pytest.raises(EntryMissing) as caught:
            check(Task(name), package)
        assert isinstance(caught.value, RuntimeError)
        assert caught.value.fields == ("entry",)
        assert (f"did you mean `{meant}`?" in caught.value.problems[0]) == (meant is not None)


@pytest.mark.parametrize(
    ("name", "meant"), [("sollo", "solo"), ("pkg.dta.load", "pkg.data"), ("elsewhere.train", None)]
)
def test_a_dotted_name_without_a_module_is_refused_here_and_left_to_a_replica_elsewhere(package, name, meant):
    problem = refusal(package, name)
    assert (f"did you mean `{meant}`?" in problem) == (meant is not None)
    entry_check.check_sent(Task(name), package)
    assert entry_check.decided_sent(Entry(dotted=name), package) == Entry(dotted=name)


def test_the_arguments_of_a_dotted_name_are_checked(package):
    assert refusal(package, "pkg.both", rate=1).endswith("`main` takes no argument `rate`; it takes `lr`")
    assert refusal(package, "pkg.train").endswith("`train` needs an argument `lr`")


def test_an_optional_argument_fits_every_function(root):
    assert_accepted(Task("job:none", {"rank_env": "RANK"}, optional_args=("rank_env",)), root)
    assert_accepted(Task("job:called", {"lr": 1.0}, optional_args=("lr",)), root)
    assert "takes no argument `epochs`" in refusal(root, "job:none", epochs=1)


def test_the_folder_of_a_dotted_name_is_found_on_our_path(package, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, package])
    elsewhere = str(tmp_path / "elsewhere")
    assert entry_check.extra_path(Entry(dotted="pkg.both.main"), elsewhere) == package
    assert entry_check.extra_path(Entry(dotted="pkg.both.main"), package) is None


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
