"""What a plan of Modal refuses, and what it costs."""

from __future__ import annotations

import pytest

from atoll.context import RunContext
from atoll.errors import ConfigError, Unsupported
from atoll.executors.modal.executor import ModalExecutor
from atoll.executors.modal.request import context_of
from atoll.handle import RunHandle
from atoll.spec import Placement

S3 = RunContext("run", "s3://bucket/exp")


@pytest.fixture(autouse=True)
def _main(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODAL_ENVIRONMENT", "main")


def plan(placement: Placement, context: RunContext = S3, **settings: object):
    return ModalExecutor(**{"secrets": ["keys"], **settings}).plan(context, placement)


def test_every_refusal_is_told_at_once():
    with pytest.raises(Unsupported) as caught:
        plan(
            Placement(gpu="MI300X", timeout_s=90_000, grace_s=60, image="x:1", secrets={"A": "env:A"}, replicas=2),
            secrets=[],
        )
    assert set(caught.value.fields) >= {"gpu", "timeout_s", "grace_s", "image", "secrets.A"}


@pytest.mark.parametrize(
    ("gpu", "option"),
    [("H100:2", "H100:2"), ("any", "any"), ("A10G", "A10"), ("A100-80GB:8", "A100-80GB:8"), (None, None)],
)
def test_gpus_have_the_names_of_modal(gpu, option):
    assert plan(Placement(gpu=gpu)).request["options"].get("gpu") == option


@pytest.mark.parametrize("gpu", ["V100", "H100:16", "A10G:8"])
def test_gpus_that_modal_does_not_have_are_refused(gpu):
    with pytest.raises(Unsupported) as caught:
        plan(Placement(gpu=gpu))
    assert caught.value.fields == ("gpu",)


def test_the_time_limit_is_always_bound_and_at_most_a_day():
    assert plan(Placement(timeout_s=60.0, grace_s=10.0)).request["options"]["timeout"] == 130
    assert plan(Placement(timeout_s=86_400)).request["options"]["timeout"] == 86_400
    with pytest.raises(Unsupported) as caught:
        plan(Placement(timeout_s=86_401))
    assert caught.value.fields == ("timeout_s",)


def test_a_store_that_replicas_cannot_open_is_refused():
    with pytest.raises(Unsupported) as caught:
        plan(Placement(), secrets=[])
    assert caught.value.fields == ("store",)
    assert plan(Placement(), secrets=[], store_needs_no_secret=True).replicas == 1
    assert plan(Placement(secrets={"AWS_ACCESS_KEY_ID": "modal:keys"}), secrets=[]).replicas == 1


def test_the_price_is_in_the_plan():
    [note] = plan(Placement(gpu="H100:2", replicas=4, timeout_s=7200)).notes
    assert "$31.6" in note
    [own] = plan(Placement(gpu="H100", timeout_s=3600), prices={"H100": 1.0}).notes
    assert "$1.01/h" in own


def test_a_handle_names_the_store_the_launch_and_the_run():
    executor = ModalExecutor(secrets=["keys"])
    handle = executor.handle(executor.plan(RunContext("my run", "s3://bucket/a?region=x", 2), Placement(replicas=3)))
    assert executor.origin(RunHandle.parse(str(handle))) == RunContext("my run", "s3://bucket/a?region=x", 2)
    with pytest.raises(ConfigError):
        context_of(RunHandle("modal", "main/atoll", "fc-123", 1))


def test_the_environment_of_the_profile_is_used(tmp_path, monkeypatch):
    monkeypatch.delenv("MODAL_ENVIRONMENT")
    config = tmp_path / "modal.toml"
    config.write_text('[work]\nactive = true\nenvironment = "dev"\n[home]\nenvironment = "play"\n')
    monkeypatch.setenv("MODAL_CONFIG_PATH", str(config))
    assert plan(Placement()).request["environment"] == "dev"
    monkeypatch.setenv("MODAL_PROFILE", "home")
    assert plan(Placement()).request["environment"] == "play"
    monkeypatch.setenv("MODAL_CONFIG_PATH", str(tmp_path / "none"))
    assert plan(Placement()).request["environment"] is None


def test_threads_can_tell_the_calls_of_several_ranks_at_once():
    """As a program does that cancels its handles in a pool of threads."""
    executor, handle = ModalExecutor(), RunHandle("modal", "main/atoll", "s3://bucket/exp/1/run", 2)
    blocks = [executor.knowing_call(handle, rank, f"fc-{rank}") for rank in range(2)]
    for block in blocks:
        block.__enter__()
    for block in blocks:
        block.__exit__(None, None, None)
    assert not any(executor._noted.values())
