"""Certificates made for one test."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def certificate(folder: Path) -> Path:
    """A certificate for `localhost` that nobody vouches for, with its key, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("`openssl` is not installed")
    (folder / "openssl.cnf").write_text(
        "[req]\ndistinguished_name=name\nx509_extensions=leaf\nprompt=no\n[name]\nCN=localhost\n"
        "[leaf]\nbasicConstraints=critical,CA:FALSE\nsubjectAltName=DNS:localhost\n"
    )
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -config openssl.cnf -keyout key.pem -out tls.pem"
    subprocess.run(command.split(), check=True, capture_output=True, timeout=60, cwd=folder)
    both = folder / "both.pem"
    both.write_text((folder / "key.pem").read_text() + (folder / "tls.pem").read_text())
    return both
