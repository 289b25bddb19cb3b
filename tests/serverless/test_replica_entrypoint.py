"""The module that other tools name as the command of a container."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from atoll.serverless import replica_entrypoint


def test_it_takes_the_flags_of_the_replica(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    refused = ["--trainer-fn", "train"]
    with pytest.raises(SystemExit) as given:
        replica_entrypoint.main(refused)
    monkeypatch.setattr(sys, "argv", ["replica_entrypoint", *refused])
    with pytest.raises(SystemExit) as read:
        replica_entrypoint.main()
    assert given.value.code == read.value.code == 2
    assert capsys.readouterr().err.count("--trainer-module") == 2


def test_it_imports_the_replica_and_no_facade() -> None:
    source = ast.parse(Path(replica_entrypoint.__file__).read_text())
    places = {node.module for node in ast.walk(source) if isinstance(node, ast.ImportFrom)}
    assert {place for place in places if (place or "").startswith("atoll")} == {"atoll.replica"}
