"""What is wrong with a host is told before a run is recorded: keys, logins, interpreters, versions, secrets, GPUs."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from atoll.cli.main import main
from atoll.context import RunContext
from atoll.errors import AuthError, BackendUnavailable, ConfigError, InvalidSpec, SubmitError
from atoll.executors.base import Diagnoser, HandleResolver, Preflighter, Starter, StoreReader, Sweeper
from atoll.spec import Placement
from atoll.testing.bench import Fault
from services.programs import free_ports

CONTEXT = RunContext("checked", "file:///tmp/no-such-store")


def checked(executor, **placement):
    """Plan and check a run of three replicas."""
    executor.preflight(executor.plan(CONTEXT, Placement(**{"replicas": 3, **placement})))


def test_hosts_that_have_all_that_a_run_needs_pass(executor) -> None:
    made = executor()
    assert isinstance(made, Starter)
    assert isinstance(made, Preflighter)
    assert isinstance(made, Sweeper)
    assert isinstance(made, HandleResolver)
    assert isinstance(made, Diagnoser)
    assert isinstance(made, StoreReader)
    checked(made)


def test_a_host_whose_key_is_not_known_is_refused(executor, tmp_path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(AuthError) as caught:
        checked(executor(options={"UserKnownHostsFile": str(tmp_path / "empty")}))
    assert caught.value.reason == "host_key_unknown"
    assert re.search(r"`ssh -p \d+ 127\.0\.0\.1`", str(caught.value.hint))


def test_a_host_with_another_key_or_that_refuses_the_login_is_told_apart(executor, hosts) -> None:
    for fault, reason in ((Fault.FORBIDDEN, "host_key_changed"), (Fault.UNAUTHORIZED, "login")):
        hosts.faults.fail("check", fault)
        with pytest.raises(AuthError) as caught:
            checked(executor())
        hosts.faults.heal()
        assert (caught.value.reason, bool(caught.value.hint)) == (reason, True)


def test_a_host_without_the_interpreter_or_without_atoll_is_told(executor, hosts) -> None:
    bare = Path(sys.base_prefix, "bin", os.path.basename(os.path.realpath(sys.executable)))
    for python, reason in (("/no/such/python", "no_python"), (str(bare), "no_atoll")):
        with pytest.raises(ConfigError) as caught:
            checked(executor(python=python), replicas=1)
        assert caught.value.reason == reason
        assert hosts.hosts[0] in caught.value.message


def test_a_host_with_another_version_is_told(executor, hosts) -> None:
    hosts.faults.fail("check", Fault.CONFLICT)
    with pytest.raises(ConfigError) as caught:
        checked(executor(), replicas=1)
    assert (caught.value.reason, "99.0.0" in caught.value.message) == ("version", True)


def test_a_host_that_cannot_be_reached_is_named(executor) -> None:
    (port,) = free_ports(1)
    with pytest.raises(BackendUnavailable) as caught:
        checked(executor(hosts=[f"127.0.0.1:{port}"], patience_s=0.1))
    assert f"127.0.0.1:{port}" in caught.value.message


def test_a_start_at_a_host_without_a_connection_has_started_nothing_there(executor, hosts, store) -> None:
    (port,) = free_ports(1)
    made = executor(hosts=[f"127.0.0.1:{port}"], patience_s=0.1)
    with pytest.raises(SubmitError) as caught:
        made.submit(made.plan(RunContext("checked", store), Placement()))
    assert (caught.value.left_running, caught.value.created) == ((), ())
    assert f"127.0.0.1:{port}" in caught.value.message


def test_the_problems_of_all_hosts_come_together(executor, hosts) -> None:
    with pytest.raises(InvalidSpec) as caught:
        checked(executor(), gpu="H100:1", secrets={"TOKEN": "env:NOT_THERE"}, replicas=2)
    assert caught.value.fields == ("gpu", "gpu")
    assert all(host in str(caught.value) for host in hosts.hosts[:2])
    with pytest.raises(InvalidSpec) as caught:
        checked(executor(), secrets={"TOKEN": "env:NOT_THERE", "OTHER": "file:/no/such"}, replicas=2)
    assert caught.value.fields == ("secrets.TOKEN", "secrets.OTHER") * 2


def test_a_store_that_a_host_cannot_open_is_told(executor, hosts) -> None:
    made = executor()
    plan = made.plan(RunContext("checked", "nowhere://bucket/x"), Placement())
    with pytest.raises(ConfigError) as caught:
        made.preflight(plan)
    assert hosts.hosts[0] in str(caught.value)


def test_a_host_that_sees_another_folder_as_the_store_starts_nothing(executor, hosts, tmp_path) -> None:
    """The run is recorded before the start, so a host that does not find it has another store."""
    made = executor()
    plan = made.plan(RunContext("checked", f"file://{tmp_path}/store"), Placement(replicas=2))
    with pytest.raises(ConfigError) as caught:
        made.submit(plan)
    assert (caught.value.reason, hosts.hosts[0] in caught.value.message) == ("other_store", True)
    assert hosts.running() == []


def test_without_the_program_ssh_the_error_says_so(executor, monkeypatch) -> None:
    made = executor()
    plan = made.plan(CONTEXT, Placement())
    monkeypatch.setenv("PATH", "/no/such/folder")
    with pytest.raises(ConfigError) as caught:
        made.preflight(plan)
    assert caught.value.reason == "no_ssh"
    assert [(check.name, check.ok) for check in made.diagnose()] == [("ssh", False)]


def test_doctor_reports_each_host(executor, hosts, capsys) -> None:
    hosts.faults.raise_at("diagnose", hosts.faults.answer("diagnose", Fault.UNAUTHORIZED), name=hosts.hosts[2])
    found = {check.name: check for check in executor(patience_s=0.1).diagnose()}
    assert [found[host].ok for host in hosts.hosts] == [True, True, False]
    assert found[f"{hosts.hosts[0]}: platform"].ok
    assert [check.name for check in executor(hosts=[]).diagnose()] == ["ssh", "hosts"]
    assert main(["doctor", "ssh", "--setting", 'hosts=["-x"]', "--json"]) == 2
    assert "hosts" in capsys.readouterr().out
