"""Each clause of the Store contract rejects a store built to break it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path

import broken_bodies as bodies
import pytest

from atoll.errors import KeyExists, KeyNotFound, StoreError, StoreUnavailable
from atoll.stores.base import Buffer, Data, Store, check_key
from atoll.stores.fast import HashedWhileWritten
from atoll.stores.file.store import FileStore
from atoll.stores.memory import MemoryStore
from atoll.testing.fakes import FaultyStore
from atoll.testing.store_contract import StoreContract

CLAUSE = StoreContract()
REJECTED = (AssertionError, pytest.fail.Exception, StoreError)


class DropsTheLastByte(MemoryStore):
    def put(self, key: str, data: Data) -> None:
        super().put(key, bytes(data)[:4096])  # type: ignore[arg-type]


class WritesTheFirstBuffer(MemoryStore):
    def put(self, key: str, data: Data) -> None:
        super().put(key, data[0])  # type: ignore[arg-type]


class AsksForTheFrontTooEarly(MemoryStore):
    """Sees the first half of a payload, and then the front."""

    def put(self, key: str, data: Data) -> None:
        assert isinstance(data, HashedWhileWritten)
        data.hash_and_norm(0, len(data.payload) // 2 + 1)
        super().put(key, [data.front(), data.payload])

    create = put


class KeepsTheCallersBuffer(MemoryStore):
    def put(self, key: str, data: Data) -> None:
        self.kept = data

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> Buffer:
        return self.kept  # type: ignore[return-value]


class ForgetsWhichKey(MemoryStore):
    def get(self, key: str, *, start: int = 0, length: int | None = None) -> Buffer:
        try:
            return super().get(key, start=start, length=length)
        except KeyNotFound:
            raise KeyNotFound("something") from None


class WritesInTwoSteps(MemoryStore):
    def put(self, key: str, data: Data) -> None:
        super().put(key, bytes(data)[:100])  # type: ignore[arg-type]
        time.sleep(0.001)
        super().put(key, data)


class WritesPieceByPiece(MemoryStore):
    def put(self, key: str, data: Data) -> None:
        super().put(key, b"")
        super().put(key, data)


class LooksThenWrites(FileStore):
    """The usual mistake: ask whether the key is free, then put."""

    def create(self, key: str, data: Data) -> None:
        if key in self.list(key):
            raise KeyExists(key, uri=self.uri)
        time.sleep(0.001)
        self.put(key, data)


class IgnoresTheCondition(MemoryStore):
    def create(self, key: str, data: Data) -> None:
        self.put(key, data)


class TakesEqualBytesForItsOwn(MemoryStore):
    """Reads back after a refusal and believes that equal bytes are its own."""

    def create(self, key: str, data: Data) -> None:
        try:
            super().create(key, data)
        except KeyExists:
            if self.get(key) != data:
                raise


class LeavesATombstone(MemoryStore):
    def delete(self, key: str) -> None:
        self.put(key, b"deleted")


class MissesWhatIsNotThere(MemoryStore):
    def delete(self, key: str) -> None:
        self.get(key)
        super().delete(key)


class ListsOnePage(MemoryStore):
    def list(self, prefix: str = "") -> Iterator[str]:
        return islice(super().list(prefix), 1000)


class ListsInAnyOrder(MemoryStore):
    def list(self, prefix: str = "") -> Iterator[str]:
        return reversed(sorted(super().list(prefix)))  # type: ignore[return-value]  # noqa: C413


class ListsByFolder(MemoryStore):
    def list(self, prefix: str = "") -> Iterator[str]:
        return (k for k in super().list() if not prefix or k.startswith(prefix.rstrip("/") + "/"))


class ListsTheDeleted(MemoryStore):
    def delete(self, key: str) -> None:
        self.put(key, b"")


class WritesBehind(FileStore):
    """Keeps what was written in memory, and means to write it later."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.put = self.create = self.later.put  # type: ignore[method-assign]

    later = MemoryStore()


class ReadsFromACache(FileStore):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.cache: dict[str, Buffer] = {}

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> Buffer:
        return self.cache.setdefault(key, super().get(key, start=start, length=length))


class AsciiOnly(MemoryStore):
    def put(self, key: str, data: Data) -> None:
        super().put(key.encode("ascii", "replace").decode(), data)


class TakesAnyKey(MemoryStore):
    def delete(self, key: str) -> None:
        self._objects.by_key.pop(key, None)


class TakesAnyPrefix(MemoryStore):
    def list(self, prefix: str = "") -> Iterator[str]:
        return (key for key in super().list() if key.startswith(prefix))


class SharesOneShelf(MemoryStore):
    """Two names, one set of objects: the prefix is lost on the way."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._objects = SHARED._objects


SHARED = MemoryStore()


class HasAnotherAddress(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.uri = "memory://somewhere-else"


class PretendsAllIsWell(MemoryStore):
    """Swallows every failure."""


class LeaksVendorErrors(MemoryStore):
    def get(self, key: str, *, start: int = 0, length: int | None = None) -> Buffer:
        raise ConnectionRefusedError(key)


class TakesAConflictForALoss(MemoryStore):
    def create(self, key: str, data: Data) -> None:
        raise KeyExists(key, uri=self.uri)


class TakesALostAnswerForALoss(MemoryStore):
    def create(self, key: str, data: Data) -> None:
        super().create(key, data)
        raise KeyExists(key, uri=self.uri)


class IgnoresRanges(MemoryStore):
    def get(self, key: str, *, start: int = 0, length: int | None = None) -> Buffer:
        return super().get(key)


class RefusesToReadPastTheEnd(MemoryStore):
    def get(self, key: str, *, start: int = 0, length: int | None = None) -> Buffer:
        found = super().get(key)
        if start > len(found):
            raise StoreError("range not satisfiable")
        return super().get(key, start=start, length=length)


class CountsFromTheEnd(MemoryStore):
    def get(self, key: str, *, start: int = 0, length: int | None = None) -> Buffer:
        return bytes(super().get(check_key(key)))[start:][:length]


class Unpickles(MemoryStore):
    def get(self, key: str, *, start: int = 0, length: int | None = None) -> Buffer:
        found = super().get(key, start=start, length=length)
        import_module("pickle").loads(found)
        return found


class UnpicklesByAnotherName(MemoryStore):
    loads = staticmethod(import_module("pickle").loads)

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> Buffer:
        found = super().get(key, start=start, length=length)
        if not start:
            self.loads(found)
        return found


def _unavailable_without_cause() -> Store:
    store = FaultyStore(MemoryStore())
    store.fail(times=None, error=StoreUnavailable)
    return store


IN_MEMORY: list[tuple[Callable[[], Store], Callable[[Store], None]]] = [
    (DropsTheLastByte, lambda s: CLAUSE.test_s1_bytes_come_back(s, 8 * 1024 * 1024 + 1)),
    (WritesTheFirstBuffer, CLAUSE.test_s1_several_buffers_become_one_object),
    (AsksForTheFrontTooEarly, lambda s: CLAUSE.test_s1_a_front_that_is_known_last_comes_first(s, 700_001)),
    (KeepsTheCallersBuffer, CLAUSE.test_s1_an_object_does_not_change_with_the_buffer_it_came_from),
    (ForgetsWhichKey, CLAUSE.test_s2_a_missing_key_names_itself),
    (WritesInTwoSteps, CLAUSE.test_s3_a_reader_sees_old_or_new),
    (WritesPieceByPiece, CLAUSE.test_s3_a_put_that_fails_leaves_the_old_object),
    (IgnoresTheCondition, CLAUSE.test_s4_create_refuses_a_taken_key),
    (IgnoresTheCondition, lambda s: CLAUSE.test_s4_one_of_sixteen_threads_wins(s, False)),
    (TakesEqualBytesForItsOwn, lambda s: CLAUSE.test_s4_one_of_sixteen_threads_wins(s, True)),
    (LeavesATombstone, CLAUSE.test_s5_create_works_again_after_delete),
    (MissesWhatIsNotThere, CLAUSE.test_s5_delete_is_quiet_if_there_is_nothing),
    (ListsOnePage, CLAUSE.test_s6_list_is_complete_and_sorted_past_a_thousand_keys),
    (ListsInAnyOrder, CLAUSE.test_s6_list_is_complete_and_sorted_past_a_thousand_keys),
    (ListsByFolder, CLAUSE.test_s6_the_prefix_is_exact),
    (ListsTheDeleted, CLAUSE.test_s6_what_was_deleted_is_not_listed),
    (AsciiOnly, lambda s: CLAUSE.test_s8_unusual_keys_work(s, "日本語/文.json")),
    (TakesAnyKey, lambda s: CLAUSE.test_s8_bad_keys_are_refused_by_every_verb(s, "a/../b")),
    (TakesAnyPrefix, lambda s: CLAUSE.test_s8_a_prefix_no_key_can_have_is_refused(s, "../")),
    (HasAnotherAddress, CLAUSE.test_s10_the_uri_opens_the_same_store),
    (PretendsAllIsWell, CLAUSE.test_s11_refusal_is_typed),
    (PretendsAllIsWell, CLAUSE.test_s11_throttling_is_typed),
    (_unavailable_without_cause, CLAUSE.test_s11_silence_is_typed),
    (TakesAConflictForALoss, CLAUSE.test_s11_a_racing_conflict_is_retried),
    (TakesALostAnswerForALoss, CLAUSE.test_s12_a_create_whose_answer_was_lost_has_won),
    (IgnoresTheCondition, CLAUSE.test_s12_a_create_whose_answer_was_lost_has_won),
    (IgnoresRanges, CLAUSE.test_s13_get_takes_a_range),
    (RefusesToReadPastTheEnd, CLAUSE.test_s13_a_range_past_the_end_gives_what_there_is),
    (CountsFromTheEnd, CLAUSE.test_s13_bad_ranges_and_missing_keys_are_errors),
    (Unpickles, CLAUSE.test_s14_nothing_on_the_read_path_unpickles),
    (UnpicklesByAnotherName, CLAUSE.test_s14_nothing_on_the_read_path_unpickles),
    (bodies.GivesTheFirstMegabyte, lambda s: CLAUSE.test_s15_a_body_is_what_get_gives(s, 8 * 1024 * 1024 + 1)),
    (bodies.GivesTheNextPieceTwice, lambda s: CLAUSE.test_s15_a_body_is_what_get_gives(s, 4097)),
    (bodies.TakesTheSizeForGranted, lambda s: CLAUSE.test_s15_a_body_is_what_get_gives(s, 0)),
    (bodies.UnquotesKeys, lambda s: CLAUSE.test_s15_unusual_keys_are_opened(s, "a b+c%20d&e=f?g#h")),
    (ForgetsWhichKey, CLAUSE.test_s15_a_missing_key_names_itself),
    (bodies.OpensWhatIsNotThere, CLAUSE.test_s15_a_missing_key_names_itself),
    (bodies.OpensAnyKey, lambda s: CLAUSE.test_s15_bad_keys_are_not_opened(s, "a/../b")),
    (bodies.FillsUpWithZeros, lambda s: CLAUSE.test_s15_nothing_is_read_past_the_end(s, 1)),
    (bodies.StaysOpen, lambda s: CLAUSE.test_s15_a_body_may_be_closed_at_any_time_and_twice(s, 5)),
    (bodies.AsksForEachPiece, lambda s: CLAUSE.test_s15_a_body_is_of_one_object_though_it_is_replaced(s, 100_000)),
    (bodies.AsksForEachPiece, CLAUSE.test_s15_a_body_is_of_one_object_though_it_is_deleted),
    (bodies.HasOneBodyAtATime, CLAUSE.test_s15_bodies_do_not_mix),
]

ON_DISK: list[tuple[Callable[[Path], Store], Callable[[Store], None]]] = [
    (LooksThenWrites, lambda s: CLAUSE.test_s4_one_of_sixteen_threads_wins(s, False)),
    (WritesBehind, CLAUSE.test_s7_another_process_sees_it_at_once),
    (ReadsFromACache, CLAUSE.test_s7_what_another_process_wrote_is_seen_at_once),
]


@pytest.mark.parametrize(("broken", "clause"), IN_MEMORY, ids=lambda value: getattr(value, "__name__", None))
def test_the_clause_rejects_the_store(broken: Callable[[], Store], clause: Callable[[Store], None]) -> None:
    with pytest.raises(REJECTED):
        clause(broken())


@pytest.mark.process
@pytest.mark.parametrize(("broken", "clause"), ON_DISK, ids=lambda value: getattr(value, "__name__", None))
def test_the_clause_rejects_the_store_on_disk(
    broken: Callable[[Path], Store], clause: Callable[[Store], None], tmp_path: Path
) -> None:
    with pytest.raises(REJECTED):
        clause(broken(tmp_path))


@pytest.mark.process
def test_a_create_that_only_looks_first_loses_the_race_of_processes(tmp_path: Path) -> None:
    """The broken store is installed as a plug-in, so that the racing processes open it by its URI."""
    plugin = tmp_path / "plugin"
    (plugin / "looks-1.dist-info").mkdir(parents=True)
    (plugin / "looks-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: looks\nVersion: 1\n")
    (plugin / "looks-1.dist-info" / "entry_points.txt").write_text("[atoll.stores]\nlooks = looks:Looks\n")
    (plugin / "looks.py").write_text(LOOKS)
    contract = StoreContract()
    contract.environment = {"PYTHONPATH": str(plugin)}
    store = FileStore(tmp_path / "objects")
    store.uri = f"looks://{store.root}"
    with pytest.raises(AssertionError, match=r"\b16\b"):
        contract.test_s4_one_of_sixteen_writers_in_four_processes_wins(store)


LOOKS = """
import time
from atoll.errors import KeyExists
from atoll.stores.file.store import FileStore

class Looks(FileStore):
    @classmethod
    def from_uri(cls, uri):
        return cls(uri.removeprefix("looks://"))

    def create(self, key, data):
        if key in self.list(key):
            raise KeyExists(key)
        time.sleep(0.01)
        self.put(key, data)
"""


def test_a_vendor_error_is_not_a_typed_one() -> None:
    with pytest.raises(ConnectionRefusedError):
        CLAUSE.test_s11_silence_is_typed(LeaksVendorErrors())


def test_stores_that_share_everything_leak() -> None:
    with pytest.raises(REJECTED):
        CLAUSE.test_s9_stores_side_by_side_do_not_leak(SharesOneShelf)


def test_every_clause_is_bitten() -> None:
    """Each method of the contract is called above, so a new one needs its own broken store."""
    written = Path(__file__).read_text()
    clauses = [name for name in dir(StoreContract) if name.startswith("test_")]
    assert {name.split("_")[1] for name in clauses} == {f"s{i}" for i in range(1, 16)}
    bitten = {name for name in clauses if f".{name}" in written}
    assert set(clauses) <= bitten
