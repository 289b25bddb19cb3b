"""Values of user code as JSON: what is converted, and what is kept as a repr with a warning."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import types
from collections import OrderedDict, namedtuple
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.json_values import convert, problems, to_json


@dataclasses.dataclass
class Metrics:
    loss: Any
    best: tuple[int, ...] = (1, 2)


class Colour(enum.Enum):
    RED = "red"
    POINT = (1, 2)


class Level(enum.IntEnum):
    LOW = 1


class Name(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "another text"


class Module:
    def __repr__(self) -> str:
        return "Module()"


class Mute:
    def __repr__(self) -> NoReturn:
        raise RuntimeError("no text")


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "converted"),
    [
        ((1, (2, 3)), [1, [2, 3]]),
        ({3, 1, 2}, [1, 2, 3]),
        (frozenset({"b", "a"}), ["a", "b"]),
        ({"b", 1}, ["b", 1]),
        ({frozenset({2, 1}), frozenset({0})}, [[0], [1, 2]]),
        (Metrics(0.5), {"loss": 0.5, "best": [1, 2]}),
        ([Metrics({"a": (1,)})], [{"loss": {"a": [1]}, "best": [1, 2]}]),
        (PurePosixPath("/a/b"), "/a/b"),
        ({"path": Path("x")}, {"path": "x"}),
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array(7), 7),
        (np.str_("text"), "text"),
        (torch.tensor(2.5), 2.5),
        (torch.tensor(3, requires_grad=False), 3),
        (Colour.RED, "red"),
        (Colour.POINT, [1, 2]),
        (Level.LOW, 1),
        (Name("own"), "own"),
        (Point(1, 2), [1, 2]),
        (OrderedDict(b=(1,)), {"b": [1]}),
        (types.MappingProxyType({"a": 1}), {"a": 1}),
        ({1: "a", 2.5: "b"}, {"1": "a", "2.5": "b"}),
        ({None: 1, False: 2}, {"null": 1, "false": 2}),
        ({np.int64(3): 1, Path("x"): 2, Colour.RED: 3}, {"3": 1, "x": 2, "red": 3}),
        ([10**4000], [10**4000]),
        ("é ☃", "é ☃"),
    ],
)
def test_a_value_that_has_a_form_in_json_is_converted(value: Any, converted: Any) -> None:
    found, left = convert(value, "result")
    assert (found, left) == (converted, [])
    assert type(found) is type(converted)


@pytest.mark.parametrize(
    ("value", "kept", "where"),
    [
        (Module(), "Module()", "result"),
        ({"model": Module()}, {"model": "Module()"}, "result.model"),
        ([1, (2, Module())], [1, [2, "Module()"]], "result[1][1]"),
        (Metrics(Module(), ()), {"loss": "Module()", "best": []}, "result.loss"),
        ({Module: 1}, {repr(Module): 1}, "result"),
        ({(1, 2): "a"}, {"(1, 2)": "a"}, "result"),
        ({1: "a", "1": "b"}, {"1": "a", "'1'": "b"}, "result"),
        (b"\xff", "b'\\xff'", "result"),
        (1j, "1j", "result"),
        (np.array([1, 2]), "array([1, 2])", "result"),
        (torch.zeros(2), "tensor([0., 0.])", "result"),
        (np.datetime64("2020-01-01"), repr(np.datetime64("2020-01-01")), "result"),
        ("no file \udcff", "'no file \\udcff'", "result"),
        (Metrics, repr(Metrics), "result"),
        (Mute(), "<a `Mute` whose repr raised RuntimeError>", "result"),
        ([10**5000], ["<a `int` whose repr raised ValueError>"], "result[0]"),
    ],
)
def test_anything_else_is_kept_as_its_repr_and_named(value: Any, kept: Any, where: str) -> None:
    found, warnings = to_json(value)
    assert found == kept
    assert [line.partition(": ")[0] for line in warnings] == [where]
    assert [line.partition(": ")[0] for line in problems(value, "result")] == [where]
    assert json.loads(json.dumps(found, ensure_ascii=False).encode()) == found


def test_the_warning_names_the_place_and_the_type() -> None:
    assert to_json({"model": Module()})[1] == ("result.model: a `Module` is not JSON; its repr is kept",)


def test_not_a_number_stays_a_number() -> None:
    (found, infinite), warnings = to_json((math.nan, math.inf))
    assert math.isnan(found)
    assert (infinite, warnings) == (math.inf, ())


@pytest.mark.parametrize("make", [list, dict])
def test_a_value_that_contains_itself_ends(make: Any) -> None:
    value = make()
    if isinstance(value, list):
        value += [value, value]
    else:
        value |= {"a": value, "b": value}
    found, left = convert(value, "result")
    assert len(found) == len(left) == 2


@pytest.mark.parametrize("depth", [201, 900, 100_000])
def test_only_the_deep_part_of_a_deep_value_becomes_text(depth: int) -> None:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    found, left = convert(value, "result")
    assert len(left) == 1
    assert isinstance(found, list)
    assert json.loads(json.dumps(found)) == found


def test_a_long_repr_and_many_warnings_are_cut() -> None:
    (first, *_), warnings = to_json([b"x" * 20_000] * 1000)
    assert len(first) == 10_000
    assert len(warnings) == 21
    assert " 980 " in warnings[-1]


class Trap(dict[str, int]):
    def items(self) -> Any:
        raise RuntimeError("no items")


def test_code_of_the_value_that_raises_leaves_only_its_part() -> None:
    found, warnings = to_json({"trap": Trap(a=1), "tensor": torch.empty((), device="meta"), "rest": 1})
    assert found["rest"] == 1
    assert found["trap"] == "{'a': 1}"
    assert [line.partition(": ")[0] for line in warnings] == ["result.trap", "result.tensor"]


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
)


@given(PLAIN)
def test_what_is_json_already_stays_as_it_is(value: Any) -> None:
    assert convert(value, "result") == (value, [])
