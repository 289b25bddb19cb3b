"""Apps of the official `torchx` command line on the real AppWrapper, Kueue and MCAD controllers."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from services.torchx import VERSIONS, Environment, environment

SUM = """
    import torch.distributed as dist, torch, os
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} has {int(total)}")
    dist.barrier()
    dist.destroy_process_group()  # else its threads may abort the process when it exits
"""


COMPONENT = """
    from torchx import specs

    def shell(command: str, replicas: int = 1, roles: int = 1, cpu: int = 1, max_retries: int = 0) -> specs.AppDef:
        \'\'\'Runs a command of the shell in each replica.

        Args:
            command: what runs
            replicas: of each role
            roles: how many
            cpu: of each replica
            max_retries: restarts of the app
        \'\'\'
        resource = specs.Resource(cpu=cpu, gpu=0, memMB=100)
        made = [
            specs.Role(name=f"r{i}", image="busybox", entrypoint="sh", args=["-c", command, specs.macros.rank0_env],
                       num_replicas=replicas, resource=resource, max_retries=max_retries)
            for i in range(roles)
        ]
        return specs.AppDef("shell", roles=made)
"""


class Shell:
    """`torchx` of one version, with the kubeconfig of one namespace."""

    def __init__(self, torchx: Environment, namespace, folder: Path) -> None:
        self.environment, self.namespace, self.folder = torchx, namespace, folder
        (folder / "component.py").write_text(textwrap.dedent(COMPONENT))

    def __call__(self, *words: str, **variables: str) -> CompletedProcess[str]:
        config = {"KUBECONFIG": str(self.namespace.kubeconfig), "TORCHX_LOG_TIMESTAMPS": "0"}
        return self.environment.torchx(*words, folder=self.folder, **{**config, **variables})

    def run(self, *component: str, wait: bool = True, scheduler: str = "kubernetes_mcad", **cfg: str) -> str:
        """Run a component and return the handle of its app."""
        pairs = ",".join(f"{name}={value}" for name, value in {"namespace": self.namespace.name, **cfg}.items())
        words = ["run", "-s", scheduler, "-cfg", pairs, "--workspace", "", *(["--wait"] if wait else [])]
        result = self(*words, *component)
        handle = next((line for line in result.stdout.splitlines() if "://" in line), "")
        assert handle.startswith(f"{scheduler}://torchx/{self.namespace.name}:"), result.stderr
        return handle

    def state(self, handle: str) -> str:
        return self.status(handle)[0]

    def status(self, handle: str) -> tuple[str, str]:
        """The state of the app, and the whole text."""
        text = self("status", handle).stdout
        return text.partition("State: ")[2].partition("\n")[0], text

    def wrapper(self, handle: str) -> dict:
        return self.namespace.get("appwrappers", handle.rpartition(":")[2])

    def until(self, handle: str, is_so) -> None:
        self.namespace.until("appwrappers", handle.rpartition(":")[2], lambda found: found is not None and is_so(found))


@pytest.fixture(params=VERSIONS)
def torchx(request: pytest.FixtureRequest, queue_namespace, tmp_path: Path) -> Shell:
    return Shell(environment(request.param), queue_namespace, tmp_path)


@pytest.fixture(params=VERSIONS)
def mcad_torchx(request: pytest.FixtureRequest, mcad_namespace, tmp_path: Path) -> Shell:
    return Shell(environment(request.param), mcad_namespace, tmp_path)


def script(folder: Path) -> str:
    path = folder / "sum.py"
    path.write_text(textwrap.dedent(SUM))
    return str(path)


def shell(command: str, **options: object) -> list[str]:
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return ["component.py:shell", *words, "--command", command]


def skip_without_host_names() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can route the addresses of pods")


@pytest.mark.slow
def test_two_nodes_of_dist_ddp_meet_by_their_host_names(torchx, tmp_path):
    skip_without_host_names()
    # The addresses of pods lead to this machine, but no interface has them, and gloo looks for one.
    ddp = ["dist.ddp", "-j", "2x1", "--cpu", "1", "--image", "atoll-test", "--env", "GLOO_SOCKET_IFNAME=lo"]
    ddp += ["--script", script(tmp_path)]
    handle = torchx.run(*ddp)
    logs = torchx("log", handle).stdout
    assert torchx.state(handle) == "SUCCEEDED", f"{torchx('status', handle).stdout}\n{logs}"
    assert "rank 0 of 2 has 2" in logs
    assert "rank 1 of 2 has 2" in logs
    listed = torchx("list", "-s", "kubernetes_mcad").stdout
    assert handle in listed
    assert "SUCCEEDED" in listed
    described = torchx("describe", handle)
    assert described.returncode == 0
    assert "'num_replicas': 2" in described.stdout
    torchx("cancel", handle)
    assert torchx.state(handle) == "SUCCEEDED"


def test_a_failed_app_says_which_replica_and_why(torchx):
    command = 'echo "replica $TORCHX_REPLICA_ID"; exit $((3 * $TORCHX_REPLICA_ID))'
    handle = torchx.run(*shell(command, replicas=2))
    state, text = torchx.status(handle)
    assert state == "FAILED"
    assert "r0[1]: exit code 3" in text
    assert "replica 1" in torchx("log", f"{handle}/r0/1").stdout


def test_every_role_of_an_app_knows_the_first_replica(torchx):
    reach = 'echo "goes to $(printenv "$0")"'
    handle = torchx.run(*shell(reach, replicas=2, roles=2))
    assert torchx.state(handle) == "SUCCEEDED"
    logs = torchx("log", handle).stdout
    name = handle.rpartition(":")[2]
    assert logs.count(f"goes to {name}-0-0.{name}") == 3
    assert logs.count("goes to localhost") == 1


def test_restarts_end_at_their_limit(torchx):
    handle = torchx.run(*shell("exit 3", max_retries=1), retry_pause="1s", failure_grace="1s", keep_failed="0s")
    state, text = torchx.status(handle)
    assert state == "FAILED"
    assert "Num Restarts: 1" in text


def test_cancel_keeps_the_wrapper_and_delete_removes_it(torchx):
    handle = torchx.run(*shell("sleep 1000"), wait=False, scheduler="appwrapper")
    torchx.until(handle, lambda found: found.get("status", {}).get("phase") == "Running")
    assert torchx("cancel", handle).returncode == 0
    assert torchx.wrapper(handle)["spec"]["suspend"] is True
    assert torchx.state(handle) == "CANCELLED"
    torchx.until(handle, lambda found: found["status"]["phase"] == "Suspended")
    if torchx.environment.version != "0.7.0":  # it has no such command
        assert torchx("delete", handle).returncode == 0
        torchx.namespace.until("appwrappers", handle.rpartition(":")[2], lambda found: found is None)
        assert torchx("status", handle).returncode != 0


def test_a_full_queue_says_how_much_is_missing(torchx):
    queue = torchx.namespace.queue(cpu="1")
    handle = torchx.run(*shell("true", cpu=2), wait=False, queue=queue.name, reserved_millicpu="0")
    uid = torchx.wrapper(handle)["metadata"]["uid"]
    torchx.namespace.until_workload(uid, "QuotaReserved", "False")
    state, text = torchx.status(handle)
    assert state == "PENDING"
    assert queue.name in text
    queue.set_quota(cpu="4")
    torchx.until(handle, lambda found: found.get("status", {}).get("phase") == "Succeeded")
    assert torchx.state(handle) == "SUCCEEDED"


@pytest.mark.parametrize("layout", ["jobs", "pods"])
def test_an_app_on_mcad_ends(mcad_torchx, layout):
    handle = mcad_torchx.run(*shell("echo it runs", replicas=2, roles=2), layout=layout)
    assert mcad_torchx.state(handle) == "SUCCEEDED"
    assert mcad_torchx("log", handle).stdout.count("it runs") == 4
    listed = mcad_torchx("list", "-s", "kubernetes_mcad").stdout.splitlines()
    assert [line.split()[-1] for line in listed if handle in line] == ["SUCCEEDED"]
    failed = mcad_torchx.run(*shell("exit 4", replicas=2), layout=layout)
    state, text = mcad_torchx.status(failed)
    assert state == "FAILED"
    assert "exit code 4" in text
    running = mcad_torchx.run(*shell("sleep 1000"), wait=False, layout=layout)
    assert mcad_torchx("cancel", running).returncode == 0
    mcad_torchx.namespace.until("appwrappers", running.rpartition(":")[2], lambda found: found is None)
