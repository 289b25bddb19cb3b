"""Fixtures: hosts for a session, as new for each test."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from services.ssh.peer import Peer


def missing_programs() -> str:
    """Programs that the hosts need and this machine lacks."""
    folders = f"{os.environ.get('PATH', '')}:/usr/sbin"
    return " and ".join(name for name in ("ssh", "sshd", "ssh-keygen") if shutil.which(name, path=folders) is None)


@pytest.fixture(scope="session")
def shared_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    from services.ssh.peer import Peer

    if missing := missing_programs():
        pytest.skip(f"needs {missing}: Debian has them in openssh-client and openssh-server")
    peer = Peer(tmp_path_factory.mktemp("ssh"))
    try:
        yield peer
    finally:
        peer.close()


@pytest.fixture
def hosts(shared_hosts: Peer) -> Iterator[Peer]:
    """Three hosts, `127.0.0.1` with three ports; at the end of the test nothing runs on them."""
    yield shared_hosts
    left = shared_hosts.reset()
    assert not left, f"processes left behind: {left}"
