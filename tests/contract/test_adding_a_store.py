"""What `docs/adding-a-store.md` says is true: its stores keep the contract, as a package of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from atoll.stores import fast
from atoll.testing.store_contract import StoreContract
from repository import DOCS

pytestmark = [pytest.mark.docs, pytest.mark.process]

PAGE = (DOCS / "adding-a-store.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package of the page, as pip would install it, and the tests beside it."""
    store, contract, streaming = blocks("python")
    points = tomllib.loads(blocks("toml")[0])["project"]["entry-points"]["atoll.stores"]
    assert points == {"sqlite": "my_package.sqlite:SqliteStore"}
    files = {
        "my_package/__init__.py": "",
        "my_package/sqlite.py": store,
        "my_package/streaming.py": streaming,
        "my_package-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: my-package\nVersion: 1\n",
        "my_package-1.dist-info/entry_points.txt": f"[atoll.stores]\nsqlite = {points['sqlite']}\n",
        "tests/test_sqlite.py": contract,
        "tests/test_streaming.py": contract.replace(
            "my_package.sqlite import SqliteStore", "my_package.streaming import StreamingSqliteStore as SqliteStore"
        ),
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def run(package: Path, *command: str) -> str:
    path = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH", "")]))
    environ = {**os.environ, "PYTHONPATH": path, "ATOLL_HOME": str(package / "home")}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=package, env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_sqlite.py", "test_streaming.py"])
def test_the_stores_of_the_page_keep_the_contract(package: Path, name: str) -> None:
    words = run(package, "pytest", "-q", "-rs", "-p", "no:cacheprovider", f"tests/{name}")
    skipped = re.findall(r"^SKIPPED \[(\d+)\] .*?: (.*)$", words, re.M)
    assert [reason for _, reason in skipped] == [
        "a file denies no access, answers no `conflict` and loses no answers"
    ] * len(skipped)
    assert sum(int(count) for count, _ in skipped) == 3, words


def test_a_replica_finds_the_store_by_its_scheme(package: Path) -> None:
    (package / "jobs.py").write_text("def rank(ctx): return [ctx.rank, type(ctx.store).__name__]\n")
    store = f"sqlite://{package}/runs.db"
    assert "sqlite" in run(package, "atoll", "backends")
    words = run(package, "atoll", "run", "jobs:rank", "-n", "2", "--store", store, "--wait")
    assert re.findall(r"\[(\d), \"SqliteStore\"\]", words) == ["0", "1"]


def test_every_hook_of_the_page_exists_and_none_is_missing() -> None:
    table = PAGE[PAGE.index("| what you give |") : PAGE.index("A skip says why")]
    rows = [row for row in table.splitlines() if row.startswith("|")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    own = {name for name in vars(StoreContract) if not name.startswith(("_", "test_"))}
    assert named == own - {"store"}


def test_every_ability_of_the_page_exists() -> None:
    table = PAGE[PAGE.index("| method | ability |") : PAGE.index("A body is of **one** object")]
    named = dict(re.findall(r"^\| `(\w+).*?` \| `(\w+)` \|", table, re.M))
    assert set(named.values()) == {"Streaming", "RetryLimited", "Recycling"}
    for method, ability in named.items():
        assert hasattr(getattr(fast, ability), method)
    assert "`DescriptorBody`" in table
    assert hasattr(fast, "DescriptorBody")
