"""Plans, commands and handles of the ssh executor: pure, and the same in every process."""

from __future__ import annotations

import pytest

from atoll.context import RunContext
from atoll.errors import InvalidSpec, RunNotFound, Unsupported
from atoll.executors.ssh.executor import SshExecutor
from atoll.executors.ssh.hosts import Host
from atoll.executors.ssh.request import blocks_of_handle, ssh_command, stray_of
from atoll.executors.ssh.settings import SshSettings
from atoll.handle import RunHandle
from atoll.spec import Placement

CONTEXT = RunContext("exp", "s3://bucket/x")


def executor(**settings):
    return SshExecutor(**{"hosts": ["gpu1", "me@gpu2:2222"], **settings})


def test_ranks_are_given_out_in_blocks_in_the_order_of_the_hosts() -> None:
    request = executor().plan(CONTEXT, Placement(replicas=5)).request
    assert [(each["host"], each["ranks"]) for each in request["hosts"]] == [
        ("gpu1", [0, 1, 2]),
        ("me@gpu2:2222", [3, 4]),
    ]


def test_a_part_of_a_run_has_its_own_ranks_and_names() -> None:
    context = RunContext("exp", "s3://bucket/x", 1, 4, 9)
    plan = executor().plan(context, Placement(replicas=2))
    assert [each["ranks"] for each in plan.request["hosts"]] == [[4], [5]]
    assert plan.request["world_size"] == 9
    handle = executor().handle(plan)
    assert (handle.first_rank, handle.replicas) == (4, 2)
    assert [block.context.native_name() for block in blocks_of_handle(handle, "test")] == [
        each["name"] for each in plan.request["hosts"]
    ]


def test_a_host_without_a_replica_is_left_out_and_told() -> None:
    plan = executor().plan(CONTEXT, Placement(replicas=1))
    assert [each["host"] for each in plan.request["hosts"]] == ["gpu1"]
    assert "me@gpu2:2222" in plan.notes[0]


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(Unsupported) as caught:
        SshExecutor().plan(RunContext("exp", "file:///x"), Placement(image="x", cpus=2, secrets={"A": "vault:x"}))
    assert set(caught.value.fields) == {"image", "cpus", "secrets.A", "store", "hosts"}
    with pytest.raises(Unsupported) as caught:
        executor().plan(CONTEXT, Placement(replicas=2049))
    assert caught.value.fields == ("replicas",)


@pytest.mark.parametrize("python", ["python3; x", "$(x)", "a b", "-c", "'x'", "~you/x", "x\n", "%s", "a\\b"])
def test_an_interpreter_that_a_shell_would_change_is_refused(python: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        executor(python=python)
    assert caught.value.fields == ("python",)


@pytest.mark.parametrize("option", ["ProxyCommand", "StrictHostKeyChecking", "LocalCommand", "BatchMode", "SendEnv"])
def test_an_option_that_starts_programs_or_checks_less_is_refused(option: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        executor(options={option: "no"})
    assert caught.value.fields == ("options",)


@pytest.mark.parametrize("jumps", ["a;touch x", "$(x)@a", "a,`x`", "-oProxyCommand=x", "a,", "me@-x"])
def test_a_jump_host_that_is_no_address_is_refused(jumps: str) -> None:
    with pytest.raises(InvalidSpec, match=r"options\.ProxyJump="):
        executor(options={"ProxyJump": jumps})
    for fine in ("none", "gate", "me@gate:2222,[fd00::7]:22"):
        executor(options={"ProxyJump": fine})


def test_a_host_that_is_listed_twice_is_refused() -> None:
    with pytest.raises(InvalidSpec) as caught:
        executor(hosts=["gpu1", "gpu1"])
    assert caught.value.fields == ("hosts",)


def test_a_command_has_the_checks_of_ssh_and_nothing_of_a_run() -> None:
    words = ssh_command(Host("gpu2", "me", 2222), SshSettings(python="~/v/bin/python"), "start")
    assert words[0] == "ssh"
    assert {"BatchMode=yes", "StrictHostKeyChecking=yes", "ForwardAgent=no"} <= set(words)
    assert words[words.index("-p") + 1] == "2222"
    assert words[words.index("-l") + 1] == "me"
    assert words[-3:] == ["--", "gpu2", "~/v/bin/python -P -m atoll.executors.ssh.host start"]


def test_a_user_cannot_replace_the_checks_with_an_option() -> None:
    words = ssh_command(Host("a"), SshSettings(options={"ServerAliveInterval": "60"}), "status")
    assert words.index("StrictHostKeyChecking=yes") < words.index("ServerAliveInterval=60")
    assert "ServerAliveInterval=5" not in words


def test_the_handle_has_all_that_later_calls_need() -> None:
    context = RunContext("Ünïcode, 2nd try", "s3://bucket/a b?x=1", 3)
    plan = executor().plan(context, Placement(replicas=3))
    handle = RunHandle.parse(str(executor().handle(plan)))
    found = SshExecutor().origin(handle)  # the hosts of another setting, or none, do not matter
    assert found == context
    assert [(str(b.host), list(b.ranks)) for b in blocks_of_handle(handle, "x")] == [
        ("gpu1", [0, 1]),
        ("me@gpu2:2222", [2]),
    ]


@pytest.mark.parametrize("native", ["x/exp/s3://b", "1/exp", "1//s3://b", "1"])
def test_a_handle_of_something_else_is_not_found(native: str) -> None:
    with pytest.raises(RunNotFound):
        blocks_of_handle(RunHandle("ssh", "gpu1", native, 2), "status")
    with pytest.raises(RunNotFound):
        blocks_of_handle(RunHandle("ssh", "-x", "1/exp/s3://b", 2), "status")


def test_a_stray_has_a_handle_for_its_host_alone() -> None:
    report = {"context": ["exp", "s3://b", 2, 3], "is_supervised": True, "replicas": 2, "native_id": "supervisor 7",
              "message": "run `exp` of this machine"}  # fmt: skip
    stray = stray_of(Host("gpu2", "me"), report)
    (block,) = blocks_of_handle(stray.handle, "cancel")
    assert (str(block.host), block.context) == ("me@gpu2", RunContext("exp", "s3://b", 2, 3, 2))
    assert stray.context == RunContext("exp", "s3://b", 2, 3)
