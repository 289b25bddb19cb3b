"""torchft over a store, against torchft itself (Lighthouse and Gloo on this machine) and against a plain manager."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchft_replicas import (
    CASES,
    STREAMING,
    bits,
    history,
    our_managers,
    plain_managers,
    run_diloco,
    run_local_sgd,
    small_model,
    weights,
)

pytestmark = [pytest.mark.process, pytest.mark.training]

SHAPES = {"whole": {}, "fragments": {"is_split": True}, "streaming": STREAMING}


@pytest.fixture(scope="module")
def torchft() -> dict[str, Any]:
    """What torchft itself gives for everything that is compared here."""
    program = Path(__file__).with_name("torchft_reference.py")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("shape", SHAPES)
def test_two_replicas_have_the_bits_that_torchft_gives(torchft, shape):
    with our_managers(2) as make:
        ours = run_diloco(make, 2, **SHAPES[shape])
    assert [bits(found).hex() for found, _, _ in ours] == [found["weights"] for found in torchft[shape]]
    assert [bits(agreed).hex() for _, _, agreed in ours] == [found["globals"] for found in torchft[shape]]
    assert bits(ours[0][2]) != bits(weights(small_model())), "something was trained"


def test_four_replicas_agree_with_torchft_within_float_noise_and_with_each_other_to_the_bit(torchft):
    with our_managers(4) as make:
        ours = run_diloco(make, 4)
    assert len({bits(agreed) for _, _, agreed in ours}) == 1
    for (mine, loss, _), theirs in zip(ours, torchft["four"], strict=True):
        assert loss == pytest.approx(theirs["loss"], rel=1e-4)
        reference = np.frombuffer(bytes.fromhex(theirs["weights"]), np.float32)
        flat = torch.cat([tensor.reshape(-1) for tensor in mine]).numpy()
        np.testing.assert_allclose(flat, reference, rtol=1e-3, atol=1e-3)


def test_two_replicas_of_local_sgd_have_the_bits_that_torchft_gives(torchft):
    with our_managers(2) as make:
        ours = [found.hex() for found in run_local_sgd(make, 2)]
    assert ours == torchft["local_sgd"]
    assert ours[0] == ours[1]


@pytest.mark.parametrize("case", range(len(CASES)), ids=str)
def test_the_cases_of_the_published_fixtures_come_out_as_with_torchft_and_with_a_plain_manager(torchft, case):
    with our_managers(2) as make:
        ours = history(make, *CASES[case])
    assert json.loads(json.dumps(ours)) == torchft["cases"][case]
    with plain_managers(2) as make:
        assert ours == history(make, *CASES[case])


def test_a_case_of_the_published_fixtures_by_hand():
    with our_managers(2) as make:
        live, agreed = history(make, 0, 0.0)[0]
    # Three inner steps of -2, so the pseudo-gradient is 6 and the outer step 2 * 6: from 1 to -11. Step 2 is even:
    # fragment 0 goes first, and fragment 1 after three more steps with a pseudo-gradient of 12.
    assert [live[i] for i in range(4)] == [[1.0, 1.0], [-1.0, -1.0], [-3.0, -3.0], [-11.0, -5.0]]
    assert agreed[3] == [-11.0, 1.0]
    assert agreed[6] == [-11.0, -23.0]


def test_without_an_exchange_the_result_is_another(torchft):
    """The control: replicas that average only with themselves are told apart."""
    with plain_managers(1) as make:
        (alone,) = run_diloco(make, 1)
    assert bits(alone[0]).hex() != torchft["whole"][0]["weights"]
    assert np.abs(torch.cat([t.reshape(-1) for t in alone[0]]).numpy()
                  - np.frombuffer(bytes.fromhex(torchft["four"][0]["weights"]), np.float32)).max() > 1e-2  # fmt: skip
