"""The web pages of a backend about replicas, in `status` and `logs`."""

from __future__ import annotations

import pytest

from atoll.cli.render import link_lines
from services.sagemaker.bench import HASTE, SETTINGS


@pytest.fixture
def waiting(inside, peer):
    """A run on SageMaker whose three jobs wait for machines."""
    peer.engine.admits.clear()
    settings = "\n".join(
        f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}"
        for name, value in {**SETTINGS, **HASTE}.items()
    )
    (inside.folder / "atoll.toml").write_text(f"[executors.sagemaker]\n{settings}\n")
    done = inside("run", "job:ok", "--on", "sagemaker", "-n", 3, "--run-id", "linked", "--detach", "--json")
    assert done.code == 0, done.stderr
    yield inside
    assert inside("cancel", "linked").code == 0


def test_status_has_links_of_each_replica(waiting, peer):
    names = sorted(peer.engine.jobs)
    replicas = waiting("status", "linked", "--json").data["replicas"]
    assert [sorted(replica["links"]) for replica in replicas] == [["console", "logs"]] * 3
    assert [replica["links"]["console"].rpartition("/")[2] for replica in replicas] == names
    text = waiting("status", "linked").stdout
    assert all(address in text for replica in replicas for address in replica["links"].values())


def test_logs_has_links_on_stderr_and_not_between_the_lines(waiting, peer):
    done = waiting("logs", "linked", "--rank", "1")
    assert done.stdout == ""
    assert [line.partition(": ")[0] for line in done.stderr.splitlines() if "https://" in line] == [
        "rank 1 console",
        "rank 1 logs",
    ]
    [rank] = waiting("logs", "linked", "--rank", "1", "--json").data["ranks"]
    assert all(address in done.stderr for address in rank["links"].values())


def test_a_backend_without_pages_has_no_links(finished, inside):
    at = inside.at(finished.cli)
    assert [replica["links"] for replica in at("status", finished.ok, "--json").data["replicas"]] == [{}, {}]
    assert "https://" not in at("status", finished.ok).stdout
    assert "https://" not in at("logs", finished.bad).stderr


def test_of_many_replicas_only_the_first_are_listed():
    links = {rank: {"console": f"https://x/{rank}"} for rank in (7, *range(7), 8)}
    lines = list(link_lines(links, "r"))
    assert [line.partition(" ")[2].partition(" ")[0] for line in lines[:4]] == ["7", "0", "1", "2"]
    assert "3-6" in lines[4]
    assert len(lines) == 5
    assert list(link_lines({0: {}, 1: {}}, "r")) == []
