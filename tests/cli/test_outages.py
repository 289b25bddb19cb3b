"""A store that does not answer: what `run`, `wait` and the others say meanwhile, and at the end."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Iterator

import pytest
from cli_process import Cli

from atoll.cli.output import Output
from atoll.cli.watch import OutageReporter, watch
from atoll.errors import BackendUnavailable, StoreUnavailable
from atoll.registry import open_store
from atoll.runs.prepare import prepare
from atoll.runs.run import Run
from atoll.testing.fakes import FakeClock, FaultyStore
from services.fault_proxy import Fault, FaultProxy
from services.stores import Service

DEAD = "s3://bucket/x?endpoint=http://127.0.0.1:9"


@pytest.fixture
def far(cli: Cli, seaweed: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Cli, FaultProxy, str]]:
    """The command line, and a real S3 server behind a proxy that can fall silent."""
    cli.env.update(seaweed.environment)
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    open_store(seaweed.uri(seaweed.new_place())).put("bucket", b"is made by the first write")
    with FaultProxy(seaweed.endpoint) as proxy:
        yield cli, proxy, seaweed.uri(seaweed.new_place(), endpoint=proxy.url)


def test_a_wait_lives_through_an_outage_and_says_since_when_it_goes_on(far):
    cli, proxy, store = far
    gate = cli.folder / "gate"
    run = cli.detached("job:until", "--store", store, "--arg", f"gate={gate}")
    while cli("status", run, "--json").data["replicas"][0]["progress"]["round_no"] != 7:
        pass  # until then the replica itself still needs the store
    waiting = cli.start("wait", run, "--json", stdout=subprocess.PIPE)
    assert waiting.stdout is not None
    events = (json.loads(line) for line in waiting.stdout)
    assert next(events)["event"] == "status"
    proxy.faults.append(Fault(times=math.inf, status=None))
    said = next(event["data"]["message"] for event in events if event["event"] == "no_answer")
    assert re.search(r"\bstore\b.*\d\d:\d\d", said), "what does not answer, and since when"
    assert "retry_timeout" not in said
    proxy.faults.clear()
    said = next(event["data"]["message"] for event in events if event["event"] == "answer")
    assert re.search(r"\bstore\b.*\d+s$", said), "what answers again, and after how long"
    gate.touch()
    assert waiting.wait(60) == 0
    waiting.stdout.close()


def test_a_wait_with_a_timeout_ends_at_it_while_the_store_is_silent(far):
    """The store answers no read for longer than a test may take; replicas only write."""
    cli, proxy, store = far
    gate = cli.folder / "gate"
    run = cli.detached("job:until", "-n", 6, "--store", store, "--arg", f"gate={gate}")
    while cli("status", run, "--json").data["replicas"][0]["progress"]["round_no"] != 7:
        pass
    silent = Fault(lambda method, *_: method == "GET", times=math.inf, silence_s=300.0)
    waiting = cli.start("wait", run, "--timeout", "2s", "--json", stdout=subprocess.PIPE)
    assert waiting.stdout is not None
    events = (json.loads(line) for line in waiting.stdout)
    assert next(events)["event"] == "status"
    proxy.faults.append(silent)
    assert waiting.wait(60) == 124
    waiting.stdout.close()
    assert cli("wait", run, "--timeout", "1s").code == 124
    proxy.faults.clear()
    gate.touch()
    assert cli("wait", run).code == 0


def test_a_watch_that_gives_up_says_that_the_run_goes_on_and_how_to_look_again(inside, capsys):
    draft = prepare("job:until", args={"gate": str(inside.folder / "gate")}, run_id="far-away")
    run = draft.submit()
    store, clock = FaultyStore(run.store), FakeClock()
    store.fail("get", times=None, error=lambda text: StoreUnavailable(text, uri="s3://b/x"))
    with pytest.raises(StoreUnavailable) as caught:
        watch(Run(run.spec, run.executor, store, run.handle, clock), Output("wait"))
    assert sum(clock.slept) >= 300, "replicas live through shorter outages"
    assert re.search(r"\bstore\b.*\d\d:\d\d", capsys.readouterr().err)
    for command in ("`atoll wait far-away`", "`atoll status far-away`", "`atoll doctor --store s3://b/x`"):
        assert command in (caught.value.hint or "")
    run.cancel()


@pytest.mark.parametrize("command", ["status", "wait", "verify"])
def test_a_dead_address_has_the_same_hint_everywhere(inside, monkeypatch, command):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    done = inside(command, "some-run", "--store", DEAD)
    assert done.code == 4
    assert "retry_timeout" not in done.stderr
    hint = done.stderr.splitlines()[-1]
    assert hint.startswith("hint: ")
    assert f"`atoll doctor --store '{DEAD}'`" in hint


def test_doctor_and_run_say_what_they_can_about_a_dead_address(inside, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    shown = inside("doctor", "--store", DEAD).stdout
    assert "hint: " in shown
    assert "`atoll doctor" not in shown, "that was tried just now"
    done = inside("run", "job:ok", "--store", DEAD, "--run-id", "again")
    assert done.code == 4
    assert "`--run-id again`" in done.stderr.splitlines()[-1]


def test_an_outage_is_told_at_once_and_then_now_and_then():
    clock = FakeClock()
    outage, trouble = OutageReporter(clock), BackendUnavailable("throttled")
    first = outage.report(trouble)
    assert re.search(r"\bbackend\b.*\d\d:\d\d.*: throttled", first)
    assert outage.report(trouble) == ""
    clock.advance(20)
    assert outage.report(trouble) == first == outage.text
    outage.report(BackendUnavailable("still throttled"))
    assert "still throttled" in outage.text
    assert re.search(r"\bbackend\b.*\b20s$", outage.report(None))
    assert outage.report(None) == outage.text == ""
