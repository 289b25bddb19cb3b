"""`benchmarks/exchange.py` runs, checks what it averages, and its server is a store. How fast it is, no test says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from wire.arms import Seat
from wire.fitting import groups, needed_bytes
from wire.report import Row
from wire.server import INSTALL, WireServer, missing_parts
from wire.team import _turn, whole_numbers
from wire.walls import request_bound

from atoll.testing.store_contract import NewStore, StoreContract
from repository import BENCHMARKS

needs_nginx = pytest.mark.skipif(missing_parts() is not None, reason=f"{missing_parts()}; {INSTALL}")


def run(tmp_path: Path, *words: str) -> tuple[list[dict[str, object]], str]:
    report = tmp_path / "rows.json"
    given = ["--replicas", "2", "--mib", "2", "--repeat", "1", "--folder", str(tmp_path), "--json", str(report)]
    command = [sys.executable, str(BENCHMARKS / "exchange.py"), *given, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(report.read_text())["rows"], done.stdout


ARMS = ("gloo", "file", "recycled", "wire", "naive")
GIB = 1 << 30


@pytest.mark.parametrize(
    ("available_gib", "wanted"),
    [
        (64, [ARMS]),
        (32, [("gloo", "file", "recycled", "wire")]),
        (18, [("gloo", "file"), ("gloo", "recycled"), ("gloo", "wire")]),
        (8, []),
    ],
)
def test_ways_to_average_share_what_memory_there_is(available_gib, wanted):
    assert groups(ARMS, 8, GIB // 2, available_gib * GIB) == wanted


def test_what_a_round_left_goes_right_before_the_next_one(tmp_path):
    asked: list[str] = []

    class Alone:
        is_sum = True
        facts = dict

        def __getattr__(self, name: str) -> Callable[[int], None]:
            return lambda round_no: asked.append(f"{name} {round_no}")

    update = whole_numbers(1000, 0)
    seat = Seat(0, 1, update, update.copy(), tmp_path)
    for round_no in range(2):
        _turn(Alone(), seat, round_no, Barrier(1), 1)
    assert asked == ["prepare 0", "run 0", "tidy 0", "prepare 1", "run 1"]


def test_every_way_to_average_but_gloo_takes_memory():
    alone = needed_bytes(("gloo",), 4, GIB)
    for arm in ARMS[1:]:
        assert needed_bytes(("gloo", arm), 4, GIB) >= alone + 4 * GIB


@pytest.mark.slow
@pytest.mark.process
@needs_nginx
def test_a_tiny_setting_gives_every_number_of_the_report(tmp_path):
    rows, printed = run(tmp_path)
    found = {str(row["what"]): row for row in rows}
    for what in (
        "file, new files / gloo", "file, recycled files / gloo", "HTTP / gloo", "naive / HTTP, wall",
        "naive / HTTP, CPU", "HTTP: bytes up / S", "HTTP: bytes down / ideal", "HTTP: requests / bound",
        "HTTP: up / S at the server",
        "HTTP: extra MiB", "CPU of PUT / raw socket", "CPU of GET / raw socket", "100 ms, 100 MB/s: wall / model",
        "100 ms: wasted GETs per rank",
    ):  # fmt: skip
        assert what in found
        assert what in printed
    for kind in ("file, new files", "HTTP"):
        assert 1.0 <= found[f"{kind}: bytes up / S"]["value"] < 1.02  # two MiB are little next to the records
        assert 1.0 <= found[f"{kind}: bytes down / ideal"]["value"] < 1.02
    assert ("file, new files, 4 KiB pages / gloo" in found) is not ("could not be mounted" in printed)
    counted, at_server = found["HTTP: bytes up / S"]["value"], found["HTTP: up / S at the server"]["value"]
    assert at_server == pytest.approx(counted, rel=0.01)
    assert list(tmp_path.iterdir()) == [tmp_path / "rows.json"]


@pytest.mark.process
def test_an_unknown_section_is_refused(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "exchange.py"), "--only", "wals"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "walls, memory, cpu, latency" in done.stderr


def test_a_wrong_result_is_found(tmp_path):
    from wire.arms import Seat
    from wire.team import check, whole_numbers

    updates = [whole_numbers(3000, rank) for rank in range(3)]
    total = sum(updates, np.zeros(3000, dtype=np.float32))
    seat = Seat(1, 3, updates[1], total.copy(), tmp_path)
    check(seat, 1, is_sum=True)
    check(Seat(1, 3, updates[1], total / np.float32(3), tmp_path), 1, is_sum=False)
    seat.out[2999] += 1
    with pytest.raises(AssertionError, match="rank 1"):
        check(seat, 1, is_sum=True)


def test_a_row_says_whether_it_is_what_it_must_be():
    assert [Row("x", 2, 64, value, 3.0, 2.2).verdict for value in (2.2, 3.0, 3.01)] == ["PASS, aim", "PASS", "FAIL"]
    assert [Row("x", 2, 64, value, 2.5, 3, True).verdict for value in (3.0, 2.5, 2.49)] == ["PASS, aim", "PASS", "FAIL"]
    assert Row("x", 2, 64, 1.0).verdict == ""


@pytest.mark.parametrize(("replicas", "chunks"), [(2, 8), (4, 32), (8, 32)])
def test_the_bound_on_requests_is_linear_in_chunks(replicas, chunks):
    grown = request_bound(replicas, 2 * chunks) - request_bound(replicas, chunks)
    assert grown <= 3 * chunks
    assert request_bound(replicas, chunks) >= 3 * chunks - 2 * chunks // replicas


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[WireServer]:
    with WireServer(tmp_path_factory.mktemp("wire") / "server") as server:
        yield server


@pytest.mark.process
@pytest.mark.server
@needs_nginx
class TestWireServer(StoreContract):
    """The server the benchmark measures against keeps what a store promises."""

    why_no_faults = "it is for speed; faults are tested on SeaweedFS"

    @pytest.fixture
    def new_store(self, server: WireServer, tmp_path: Path, monkeypatch) -> NewStore:
        from atoll.stores.cloud.store import CloudStore

        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wire")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wire")
        return lambda name: CloudStore.from_uri(server.uri(f"{tmp_path.name}/{name}"))


PAGES_IN_USE = """
import subprocess, sys
from pathlib import Path
from wire.pages import large_pages
with large_pages(folder := Path(sys.argv[1])):
    child = subprocess.Popen(["cat"], cwd=folder, stdin=subprocess.PIPE)
folder.rmdir()
child.communicate()
"""


@pytest.mark.process
def test_a_folder_in_memory_can_be_removed_while_somebody_is_still_in_it(tmp_path):
    folder = tmp_path / "large"
    subprocess.run([sys.executable, "-c", PAGES_IN_USE, str(folder)], cwd=BENCHMARKS, check=True)
    assert not folder.exists()
