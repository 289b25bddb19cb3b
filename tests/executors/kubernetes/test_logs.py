"""The log of a rank on the real control plane: followed from the first line, over the end of its pod and restarts."""

from __future__ import annotations

import pytest

from atoll.errors import AuthError, RunNotFound
from atoll.status import Reason
from services.kubernetes.fault_proxy import Fault
from services.kubernetes.scenario import HOLD, Scenario

LOG = r"/api/v1/namespaces/[^/]+/pods/[^/]+/log"


def test_a_log_is_followed_over_the_end_of_a_pod_and_a_restart(scenario: Scenario, tmp_path):
    flag = tmp_path / "flag"
    script = f"echo one; [ -e {flag} ] && {{ echo three; exit 0; }}; touch {flag}; echo two; exit 1"
    run = scenario.program(script, 1, max_restarts=1)
    assert scenario.logs(run, 0, follow=True) == ["one", "two", "one", "three"]
    assert scenario.logs(run, 0) == ["one", "three"]
    assert scenario.logs(run, 0, tail=1) == ["three"]
    assert scenario.status(run).is_terminal


def test_a_log_that_is_followed_before_the_pod_has_started(scenario: Scenario):
    number = scenario.namespace.fault("slow-start", seconds=3600)
    run = scenario.program("echo one", 1)
    scenario.with_reason(run, Reason.STARTING)
    assert scenario.logs(run, 0) == []
    answer = Fault("GET", LOG, action=lambda: scenario.namespace.cluster.kubelet("remove_fault", number=number))
    scenario.proxy.faults.append(answer)
    assert scenario.logs(run, 0, follow=True) == ["one"]
    assert answer.used == 1


def test_a_log_that_is_cut_goes_on_behind_the_last_line(scenario: Scenario):
    run = scenario.program("for i in $(seq 20); do echo $i; done", 1)
    scenario.ended(run)
    scenario.proxy.faults.append(Fault("GET", LOG, cut_after=5, is_half_line=True))
    assert list(run.executor.logs(run.handle, 0, follow=True)) == [str(number) for number in range(1, 21)]


def test_the_log_of_a_run_that_is_gone_comes_from_the_store(scenario: Scenario):
    run = scenario.entry("say", 1, args={"lines": ["a", "b"]})
    scenario.ended(run)
    scenario.namespace.api.delete(scenario.namespace.path("jobs", run.handle.native_id), propagationPolicy="Foreground")
    scenario.namespace.until("jobs", run.handle.native_id, lambda job: job is None)
    with pytest.raises(RunNotFound):
        run.executor.logs(run.handle, 0)
    assert list(run.logs(0)) == ["a", "b"]


def test_a_log_that_a_user_may_not_read_is_not_called_missing(scenario: Scenario):
    run = scenario.program(HOLD, 1)
    scenario.running(run)
    rules = [{"apiGroups": ["batch", ""], "resources": ["jobs", "pods"], "verbs": ["get", "list"]}]
    reader = scenario.executor(kubeconfig=str(scenario.namespace.user("reader", rules)))
    with pytest.raises(AuthError):
        list(reader.logs(run.handle, 0))
    run.cancel()
