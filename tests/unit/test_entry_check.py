"""What is found in the user's source before anything starts: names that are not there, arguments that do not fit."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from atoll import entry_check
from atoll.errors import InvalidSpec
from atoll.spec import Task

SOURCE = """
from __future__ import annotations
import typing
from lib.inner import elsewhere
from typing import Optional, Union

def train(
    ctx, lr: float = 1e-3, steps: int = 1, loud: bool = False, *, plain=None, quoted: "float" = 1.0,
    maybe: Optional[float] = None, either: float | None = None, hidden: int = None, number: Union[int, float] = 1,
    counted: bool | int = 0,
    text: str = "", mixed: float | str = 1.0, mixed_too: typing.Optional[Union[str, int]] = None,
    several: list[float] = (), own: Settings = None, automatic: int = "auto", many: int = 1e3, switch: bool = 0,
):
    pass

def anything(ctx, *, lr: float, **rest: int):
    pass

def few(ctx, steps=1, *, lr=1e-3):
    pass

def none(ctx):
    pass

@decorated
def wrapped(ctx, lr: float):
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

try:
    from fast import train as imported
except ImportError:
    pass

if FAST:
    def chosen(ctx):
        pass

class Trainer:
    def called(self):
        pass

if __name__ == "__main__":
    called(None, 1.0)
"""


@pytest.fixture
def root(tmp_path: Path) -> str:
    (tmp_path / "job.py").write_text(SOURCE)
    return str(tmp_path)


def check(root: str, function: str = "train", **args: Any) -> None:
    entry_check.check(Task(f"job:{function}", args), root)


def refusal(root: str, entry: str, **args: Any) -> str:
    with pytest.raises(InvalidSpec) as caught:
        entry_check.check(Task(entry, args), root)
    return caught.value.problems[0]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("jobb:train", "there is no module `jobb` in `{root}`, did you mean `job`?"),
        ("libs.inner:train", "there is no module `libs.inner` in `{root}`, did you mean `lib`?"),
        ("lib.iner:train", "there is no module `lib.iner` in `{root}`, did you mean `lib.inner`?"),
        ("lib.inner.deep:train", "there is no module `lib.inner.deep` in `{root}`"),
        ("pycache:train", "there is no module `pycache` in `{root}`"),
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
    (Path(root) / "__pycache__").mkdir()
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
    assert entry_check.check(Task("installed_so.loop:train"), root) == []
    assert "no function `tarin` there, did you mean `train`?" in refusal(root, "installed_so.loop:tarin")
    assert "there is no module `installed_so.lop`" in refusal(root, "installed_so.lop:train")


def test_a_misspelt_argument_says_which_one_may_be_meant_or_which_there_are(root):
    assert refusal(root, "job:train", stepz=1).endswith("`train` takes no argument `stepz`, did you mean `steps`?")
    assert refusal(root, "job:few", epochs=1).endswith("`few` takes no argument `epochs`; it takes `lr`, `steps`")
    assert refusal(root, "job:none", epochs=1).endswith("`none` takes no argument `epochs`; it takes none")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"lr": "abc"}, "`lr: float` wants a number, not the text 'abc'"),
        ({"quoted": "abc"}, "`quoted: 'float'` wants a number, not the text 'abc'"),
        ({"steps": "many"}, "`steps: int` wants a whole number, not the text 'many'"),
        ({"steps": 1e3}, "`steps: int` wants a whole number, not the float 1000.0"),
        ({"steps": True}, "`steps: int` wants a whole number, not true; for a number write `1`"),
        ({"lr": False}, "`lr: float` wants a number, not false; for a number write `0`"),
        ({"maybe": True}, "`maybe: Optional[float]` wants a number or null, not true; for a number write `1`"),
        ({"loud": 1}, "`loud: bool` wants true or false, not the number 1; write `true`"),
        ({"loud": 0}, "`loud: bool` wants true or false, not the number 0; write `false`"),
        ({"loud": 2}, "`loud: bool` wants true or false, not the number 2"),
        ({"loud": "yes"}, "`loud: bool` wants true or false, not the text 'yes'; write `true`"),
        ({"loud": "False"}, "`loud: bool` wants true or false, not the text 'False'; write `false`"),
        ({"loud": "loud"}, "`loud: bool` wants true or false, not the text 'loud'"),
        ({"lr": [1e-3]}, "wants a number, not the list [0.001]"),
        ({"lr": {"first": 1}}, "wants a number, not the object {'first': 1}"),
        ({"lr": None}, "wants a number, not null"),
        ({"maybe": "abc"}, "`maybe: Optional[float]` wants a number or null, not the text 'abc'"),
        ({"either": "abc"}, "wants a number or null, not the text 'abc'"),
        ({"number": "abc"}, "wants a whole number or a number, not the text 'abc'"),
    ],
)
def test_an_argument_of_another_type_than_annotated_is_refused(root, args, words):
    with pytest.raises(InvalidSpec) as caught:
        check(root, **args)
    assert len(caught.value.problems) == 1
    assert "`train`: " in caught.value.problems[0]
    assert caught.value.problems[0].endswith(words)


@pytest.mark.parametrize(
    "args",
    [
        {"lr": 1, "steps": 3, "loud": True},
        {"lr": 0.5, "loud": False, "steps": 0},
        {"counted": True, "number": 1},
        {"maybe": None, "either": None, "hidden": None},
        {"plain": "abc"},
        {"text": "abc", "mixed": "abc", "mixed_too": "abc"},
        {"several": "abc", "own": "abc"},
        {"automatic": "auto", "many": 2e3, "switch": 1},
    ],
)
def test_an_argument_that_fits_or_may_fit_is_let_through(root, args):
    check(root, **args)


def test_further_keywords_are_the_functions_own_affair(root):
    check(root, "anything", lr=1.0, other="abc")
    with pytest.raises(InvalidSpec, match="`lr: float` wants a number"):
        check(root, "anything", lr="abc", other="abc")


def test_a_decorator_may_change_what_is_wanted(root):
    check(root, "wrapped", lr="abc")


@pytest.mark.parametrize("function", ["assigned", "imported", "chosen"])
def test_a_name_that_is_given_again_may_want_something_else(root, function):
    check(root, function, other="text")


def test_a_method_or_a_call_gives_a_name_to_nothing(root):
    assert "needs an argument `lr`" in refusal(root, "job:called")


def test_every_argument_that_does_not_fit_is_named_at_once(root):
    with pytest.raises(InvalidSpec) as caught:
        check(root, lr="abc", steps="many", lrr=1)
    assert len(caught.value.problems) == 3
