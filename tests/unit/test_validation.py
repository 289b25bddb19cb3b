"""Wrong things given to the small classes of the library: each is named with what was given and what is wanted."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

import atoll
from atoll.errors import InvalidSpec
from atoll.rounds.context import Tuning

CONTEXT = {"run_id": "r", "rank": 0, "world_size": 2, "store_uri": "memory://x"}


def refusal(make: Any, *given: Any, **named: Any) -> InvalidSpec:
    with pytest.raises(InvalidSpec) as caught:
        make(*given, **named)
    return caught.value


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (atoll.Quorum, {"least": 0}, "least=0: a whole number from 1, or None for every member"),
        (atoll.Quorum, {"least": 2.5}, "least=2.5: a whole number from 1, or None for every member"),
        (atoll.Quorum, {"least": True}, "least=True: a whole number from 1, or None for every member"),
        (atoll.Quorum, {"least": "2"}, "least='2': a whole number from 1, or None for every member"),
        (atoll.Quorum, {"grace_s": -1}, "grace_s=-1: seconds, 0 or more"),
        (atoll.Quorum, {"grace_s": None}, "grace_s=None: seconds, 0 or more"),
        (atoll.Quorum, {"deadline_s": 0}, "deadline_s=0: seconds above 0"),
        (atoll.Quorum, {"deadline_s": math.inf}, "deadline_s=inf: seconds above 0"),
        (atoll.Quorum, {"deadline_s": 10**400}, f"deadline_s=1{'0' * 58}…: seconds above 0"),
        (atoll.Quorum, {"on_rejected": np.ones(2)}, "on_rejected=ndarray(…): `continue` or `stop`"),
        (atoll.Quorum, {"spread": "4"}, "spread='4': a number, 0 or more, or None"),
        (atoll.Quorum, {"on_rejected": "halt"}, "on_rejected='halt': `continue` or `stop`"),
        (atoll.Quorum, {"grace_s": 90, "deadline_s": 60},
         "grace_s=90: at most deadline_s=60"),
        (atoll.Quorum, {"grace_s": 3600}, "grace_s=3600: at most deadline_s=1800"),
        (atoll.Nesterov, {"lr": 0}, "lr=0: a number above 0"),
        (atoll.Nesterov, {"lr": "0.7"}, "lr='0.7': a number above 0"),
        (atoll.Nesterov, {"lr": math.nan}, "lr=nan: a number above 0"),
        (atoll.Nesterov, {"lr": 10**400}, f"lr=1{'0' * 58}…: a number above 0"),
        (atoll.Nesterov, {"momentum": 1.0}, "momentum=1.0: a number from 0 to below 1"),
        (atoll.Nesterov, {"momentum": None}, "momentum=None: a number from 0 to below 1"),
        (Tuning, {"connections": -1}, "connections=-1: a whole number from 1, or None"),
        (Tuning, {"skip_upload": 1}, "skip_upload=1: true or false"),
        (Tuning, {"poll_first_s": 0}, "poll_first_s=0: seconds above 0"),
        (Tuning, {"inline_bytes": 1.5}, "inline_bytes=1.5: a whole number from 0"),
        (Tuning, {"bandwidth_bytes_s": 0}, "bandwidth_bytes_s=0: bytes a second, above 0"),
        (Tuning, {"outlier_factor": 0.5}, "outlier_factor=0.5: a number above 1, or None for no limit"),
    ],
)  # fmt: skip
def test_an_argument_that_is_something_else_is_named(make, options, words):
    refused = refusal(make, **options)
    (problem,) = refused.problems
    assert problem.startswith(words)
    assert refused.message.startswith(f"{make.__name__} is not valid: 1 problem\n")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": -1}, "rank=-1: a whole number from 0"),
        ({"rank": "0"}, "rank='0': a whole number from 0"),
        ({"rank": 2}, "rank=2: below world_size=2, for ranks count from 0"),
        ({"world_size": 0}, "world_size=0: a whole number from 1"),
        ({"run_id": ""}, "run_id='': 1 to 128 printable characters without `/`, and not `.` or `..`"),
        ({"run_id": "a/b"}, "run_id='a/b': 1 to 128 printable characters without `/`, and not `.` or `..`"),
        ({"store_uri": None}, "store_uri=None: an address or a path of a store"),
        ({"store_uri": np.ones(2)}, "store_uri=ndarray(…): an address or a path of a store"),
        ({"store_uri": ""}, "store_uri='': an address or a path of a store"),
        ({"attempt": -1}, "attempt=-1: a whole number from 0"),
        ({"args": ["lr"]}, "args=['lr']: a mapping of names to values"),
        ({"spool": 1}, "spool=1: a folder, or None"),
    ],
)
def test_a_context_made_by_hand_is_checked(options, words):
    assert refusal(atoll.ReplicaContext, **{**CONTEXT, **options}).problems == (words,)


@pytest.mark.parametrize("make", [atoll.Quorum, atoll.Nesterov, atoll.Average, Tuning])
def test_an_unknown_name_is_a_type_error(make):
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        make(momentun=0.5)


def test_every_problem_is_told_at_once():
    assert refusal(atoll.ReplicaContext, "", -1, 0, "x").problems[1:] == (
        "rank=-1: a whole number from 0",
        "world_size=0: a whole number from 1",
    )
    assert len(refusal(atoll.Quorum, 0, -1, -1, -1, "x").problems) == 5


@pytest.mark.parametrize("make", [np.int64, np.uint8, torch.tensor])
def test_numbers_of_numpy_and_torch_become_those_of_python(make):
    quorum = atoll.Quorum(make(2), grace_s=make(3))
    assert (type(quorum.least), type(quorum.grace_s)) == (int, int)
    context = atoll.ReplicaContext("r", make(1), make(2), "memory://x")
    assert (type(context.rank), type(context.world_size)) == (int, int)
    assert type(Tuning(connections=make(4)).connections) is int
    assert atoll.Nesterov(lr=np.float32(0.5), momentum=np.float64(0.25)) == atoll.Nesterov(0.5, 0.25)


class Attributes(dict[str, Any]):
    """A common way to write `args.lr` for `args["lr"]`; what it lacks is a `KeyError`."""

    __getattr__ = dict.__getitem__


def test_a_mapping_whose_keys_are_attributes_is_a_mapping():
    assert atoll.ReplicaContext(**CONTEXT, args=Attributes(lr=0.1)).args["lr"] == 0.1


def test_a_folder_for_progress_may_be_a_path(tmp_path):
    assert atoll.ReplicaContext(**CONTEXT, spool=tmp_path).spool == str(tmp_path)


@dataclasses.dataclass(frozen=True)
class OwnQuorum(atoll.Quorum):
    name: str = ""


@dataclasses.dataclass(frozen=True)
class OwnContext(atoll.ReplicaContext):
    node: int = 0


@dataclasses.dataclass(frozen=True)
class OwnTuning(Tuning):
    name: str = ""


def test_dataclasses_made_of_ours_are_checked_too():
    assert OwnQuorum(np.int64(2), name="x") == OwnQuorum(2, name="x")
    assert type(OwnQuorum(np.int64(2)).least) is int
    assert OwnContext(**CONTEXT, node=3).node == 3
    assert refusal(OwnQuorum, 0, -1).problems == (
        "least=0: a whole number from 1, or None for every member",
        "grace_s=-1: seconds, 0 or more",
    )
    assert refusal(OwnQuorum, grace_s=90, deadline_s=60).problems[0].startswith("grace_s=90: at most")
    assert refusal(OwnContext, **{**CONTEXT, "rank": "0"}).problems == ("rank='0': a whole number from 0",)
    assert refusal(OwnTuning, list_from=0).message.startswith("OwnTuning is not valid: 1 problem\n")


def test_a_grace_that_nobody_chose_ends_with_the_deadline():
    quorum = atoll.Quorum(2, deadline_s=5)
    assert quorum.grace_s > quorum.deadline_s
    assert dataclasses.replace(quorum, on_rejected="stop").deadline_s == 5


def test_what_is_checked_is_otherwise_a_dataclass_as_before():
    for one in (atoll.Quorum(2), atoll.Nesterov(0.5), atoll.Average(), Tuning(connections=2)):
        assert copy.deepcopy(one) == one
        assert dataclasses.replace(one) == one
    assert repr(atoll.Nesterov(0.5)) == "Nesterov(kind='nesterov', lr=0.5, momentum=0.9)"
