"""Fetching and unpacking: the digest first, then an archive that may lie about everything."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.bundle import build, fetch_and_unpack, upload
from atoll.bundle.unpack import Refused, _ForwardReader
from atoll.errors import ConfigError, KeyNotFound, StoreError
from atoll.stores.file.store import FileStore
from atoll.stores.memory import MemoryStore

MIB = 1024**2
RoundContext = tuple[tarfile.TarInfo, bytes]


def file(name: str, content: bytes = b"x", **fields: object) -> RoundContext:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def link(name: str, target: str, **fields: object) -> RoundContext:
    return file(name, b"", type=tarfile.SYMTYPE, linkname=target, **fields)


def archive(*members: RoundContext, **options: object) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT, **options) as tar:  # type: ignore[call-overload]
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return gzip.compress(raw.getvalue(), mtime=0)


def header(name: str, *, size: bytes | None = None, kind: bytes = b"0", content: bytes = b"") -> bytes:
    """One raw tar header with a right checksum, whatever else is wrong with it."""
    size = b"%011o\0" % len(content) if size is None else size
    block = bytearray(512)
    block[0 : len(name)] = name.encode()
    block[100:108], block[108:116], block[116:124] = b"0000644\0", b"0000000\0", b"0000000\0"
    block[124:136], block[136:148], block[148:156], block[156:157] = size, b"00000000000\0", b" " * 8, kind
    block[257:265] = b"ustar\x0000"
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + content + bytes(-len(content) % 512)


def binary_size(number: int) -> bytes:
    """A size field in the base-256 form, which also has negative numbers."""
    return struct.pack(">Bxxxq", 0x80, number) if number >= 0 else b"\xff\xff\xff\xff" + struct.pack(">q", number)


def pax(*records: tuple[str, str], kind: bytes = b"x") -> bytes:
    body = b""
    for name, value in records:
        line = f" {name}={value}\n".encode()
        length = len(line) + 1
        while len(str(length)) + len(line) != length:
            length = len(str(length)) + len(line)
        body += str(length).encode() + line
    return header("pax", kind=kind, content=body)


END = bytes(1024)


def raw(*blocks: bytes, end: bytes = END) -> bytes:
    return gzip.compress(b"".join(blocks) + end, mtime=0)


def put(data: bytes) -> tuple[MemoryStore, str]:
    store, digest = MemoryStore(), hashlib.sha256(data).hexdigest()
    store.create(f"bundles/{digest}.tar.gz", data)
    return store, digest


A = file("a")

HOSTILE: dict[str, Callable[[], bytes]] = {
    "absolute path": lambda: archive(A, file("/etc/evil")),
    "path up": lambda: archive(A, file("../evil")),
    "path up in the middle": lambda: archive(A, file("d/../../evil")),
    "path up and back": lambda: archive(A, file("d/../e")),
    "only dots": lambda: archive(A, file("..")),
    "the folder itself": lambda: archive(A, file(".")),
    "dot part": lambda: archive(A, file("./b")),
    "empty part": lambda: archive(A, file("d//b")),
    "empty name": lambda: raw(header("")),
    "path up in a pax header": lambda: raw(pax(("path", "../evil")), header("fine")),
    "absolute in a pax header": lambda: raw(pax(("path", "/evil")), header("fine")),
    "nul in a pax header": lambda: raw(pax(("path", "a\0b")), header("fine")),
    "path up in a gnu long name": lambda: raw(header("././@LongLink", kind=b"L", content=b"../evil\0"), header("fine")),
    "name that is not utf-8": lambda: archive(A, file("caf\udce9")),
    "name of 300 bytes": lambda: archive(A, file("n" * 300)),
    "path of 2000 bytes": lambda: archive(A, file("/".join(["d" * 99] * 20))),
    "path of 400 folders": lambda: archive(A, file("d/" * 400 + "a")),
    "same file twice": lambda: archive(A, file("a", b"y")),
    "file inside a file": lambda: archive(A, file("a/b")),
    "file where a folder is": lambda: archive(file("a/b"), A),
    "absolute link": lambda: archive(A, link("b", "/etc")),
    "link up": lambda: archive(A, link("b", "..")),
    "link up from below": lambda: archive(A, link("d/b", "../../evil")),
    "link up by a detour": lambda: archive(A, link("b", "d/../../evil")),
    "link up through a link": lambda: archive(A, link("in", "d/e"), file("d/e/f"), link("out", "in/../../../evil")),
    "link that only seems to stay": lambda: archive(A, link("in", "d"), link("out", "in/../..")),
    "link in circles": lambda: archive(A, link("b", "c"), link("c", "b")),
    "link to nowhere": lambda: archive(A, link("b", "")),
    "link with a nul": lambda: raw(pax(("linkpath", "a\0b")), header("fine", kind=b"2")),
    "link of 5000 bytes": lambda: archive(A, link("b", "x/" * 2500)),
    "link with a size": lambda: raw(pax(("linkpath", "a")), header("b", kind=b"2", size=b"%011o\0" % 10)),
    "link with content": lambda: raw(header("b", kind=b"2", content=b"x" * 10)),
    "file written through a link": lambda: archive(link("d", "/tmp"), file("d/evil")),
    "file written through an inner link": lambda: archive(link("d", "e"), file("d/evil"), file("e/a")),
    "file before the link that moves it": lambda: archive(file("d/evil"), link("d", "e")),
    "link written through a link": lambda: archive(file("e/a"), link("d", "e"), link("d/l", "a")),
    "link over a file": lambda: archive(A, link("a", "b")),
    "file over a link": lambda: archive(link("a", "b"), file("b"), A),
    "same link twice": lambda: archive(file("b"), link("a", "b"), link("a", "c")),
    "hard link": lambda: archive(A, file("b", b"", type=tarfile.LNKTYPE, linkname="a")),
    "hard link outside": lambda: archive(A, file("b", b"", type=tarfile.LNKTYPE, linkname="../../etc/passwd")),
    "folder": lambda: archive(A, file("d", b"", type=tarfile.DIRTYPE)),
    "named pipe": lambda: archive(A, file("p", b"", type=tarfile.FIFOTYPE)),
    "character device": lambda: archive(A, file("null", b"", type=tarfile.CHRTYPE, devmajor=1, devminor=3)),
    "block device": lambda: archive(A, file("sda", b"", type=tarfile.BLKTYPE, devmajor=8)),
    "contiguous file": lambda: archive(A, file("c", b"", type=tarfile.CONTTYPE)),
    "unknown kind": lambda: raw(header("odd", kind=b"Z")),
    "gnu sparse file": lambda: raw(header("s", kind=b"S")),
    "pax sparse file": lambda: raw(
        pax(("GNU.sparse.map", "0,1"), ("GNU.sparse.size", "1000")), header("s", content=b"x")
    ),
    "headers for the whole archive": lambda: raw(pax(("path", "a"), kind=b"g"), header("b")),
    "more files than the limit": lambda: archive(*(file(str(n), b"") for n in range(101))),
    "more content than the limit": lambda: archive(*(file(str(n), bytes(MIB // 4)) for n in range(5))),
    "huge declared size": lambda: raw(header("a", size=b"77777777777\0")),
    "huge size in base 256": lambda: raw(header("a", size=binary_size(2**62))),
    "huge size in a pax header": lambda: raw(pax(("size", str(10**18))), header("a")),
    "negative size": lambda: raw(header("a", size=binary_size(-512)), header("b")),
    "negative size in a pax header": lambda: raw(pax(("size", "-1024")), header("a")),
    "negative size of a header": lambda: raw(header("pax", kind=b"x", size=binary_size(-1024)), header("a")),
    "bomb in a file": lambda: raw(header("a", content=bytes(8 * MIB))),
    "bomb in a pax header": lambda: raw(header("pax", kind=b"x", content=bytes(4 * MIB)), header("a")),
    "bomb in a gnu long name": lambda: raw(header("l", kind=b"L", content=b"a" * (4 * MIB)), header("a")),
    "bomb of headers": lambda: raw(*[pax(("comment", "c" * 900_000))] * 5, header("a")),
    "pax header without length": lambda: raw(header("pax", kind=b"x", content=b"0 a=b\n" * 3), header("a")),
    "cut in the middle of a file": lambda: raw(header("a", size=b"%011o\0" % 2000), end=b"x" * 100),
    "cut after a file": lambda: raw(header("a", content=b"x"), end=b""),
    "cut gzip": lambda: archive(file("a", os.urandom(10_000)))[:-500],
    "wrong gzip checksum": lambda: archive(A)[:-8] + bytes(8),
    "wrong header in the middle": lambda: raw(header("a", content=b"x"), b"garbage!" * 64, header("b")),
    "a second archive behind the first": lambda: archive(A) + archive(file("b")),
    "a bomb behind the end": lambda: raw(header("a"), end=bytes(8 * MIB)),
    "no archive at all": lambda: raw(end=b""),
    "an empty archive of zeros cut short": lambda: raw(end=bytes(100)),
    "plain text": lambda: b"hello",
    "empty object": lambda: b"",
    "tar without gzip": lambda: gzip.decompress(archive(A)),
    "gzip of text": lambda: gzip.compress(b"hello" * 1000),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_archives_are_refused_and_leave_nothing(tmp_path: Path, make: Callable[[], bytes]) -> None:
    store, digest = put(make())
    shelf = tmp_path / "one" / "two" / "shelf"
    with pytest.raises(StoreError, match="not an archive that Atoll makes") as caught:
        fetch_and_unpack(store, digest, shelf, max_bytes=MIB, max_files=100)
    assert caught.value.key == f"bundles/{digest}.tar.gz"
    assert [path for path in tmp_path.rglob("*") if path not in (shelf, *shelf.parents)] == []


def test_the_hostile_archives_are_refused_for_what_they_are(tmp_path: Path) -> None:
    """The same makers, with nothing wrong: were these refused too, the test above would prove little."""
    harmless = [
        archive(A, file("d/b", b"y" * 1000), link("l", "d/b"), link("d/up", "../a")),
        archive(*(file(str(n), b"") for n in range(100))),
        archive(file("big", bytes(MIB))),
        archive(file("n" * 255), file("/".join(["d" * 99] * 10)), file("d/" * 99 + "a")),
        archive(link("in", "d/e"), file("d/e/f"), link("out", "in/../../a"), A),
        raw(header("a", content=b"x"), header("b")),
        raw(pax(("path", "long name")), header("fine", content=b"x")),
        raw(header("a", size=binary_size(1), content=b"x")),
    ]
    for number, data in enumerate(harmless):
        store, digest = put(data)
        assert fetch_and_unpack(store, digest, tmp_path / str(number), max_bytes=MIB, max_files=100).is_dir()


def test_the_reader_goes_neither_back_nor_beyond_nor_in_leaps() -> None:
    """tarfile in older Pythons follows negative sizes for ever, and reads a header of any size into memory."""
    with gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(bytes(4 * MIB)))) as content:
        reader = _ForwardReader(content, limit_bytes=2 * MIB)
        reader.seek(1000)
        assert (reader.read(24), reader.tell()) == (bytes(24), 1024)
        for position in (1023, 2 * MIB + 1):
            with pytest.raises(Refused, match="points out of the archive"):
                reader.seek(position)
        for size in (-1, MIB + 1):
            with pytest.raises(Refused, match="header of more than"):
                reader.read(size)
        reader.read(MIB)
        with pytest.raises(Refused, match="unpacked"):
            reader.read(MIB)


def test_dangerous_modes_do_not_survive(tmp_path: Path) -> None:
    store, digest = put(archive(file("run", mode=0o6777), file("plain", mode=0o0066)))
    root = fetch_and_unpack(store, digest, tmp_path)
    mask = os.umask(0)
    os.umask(mask)
    assert {path.name: path.stat().st_mode & 0o7777 for path in root.iterdir()} == {
        "run": 0o777 & ~mask,
        "plain": 0o666 & ~mask,
    }


def test_another_content_under_the_name_is_noticed_before_unpacking(tmp_path: Path) -> None:
    good, evil = archive(A), archive(file("a", b"evil"))
    digest, got = hashlib.sha256(good).hexdigest(), hashlib.sha256(evil).hexdigest()
    store = MemoryStore()
    store.create(f"bundles/{digest}.tar.gz", evil)
    with pytest.raises(StoreError, match=f"expected sha256 {digest}, got {got}"):
        fetch_and_unpack(store, digest, tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("damage", ["flip", "cut", "longer"])
def test_any_damage_is_noticed(tmp_path: Path, damage: str) -> None:
    data = bytearray(archive(A))
    digest = hashlib.sha256(data).hexdigest()
    if damage == "flip":
        data[len(data) // 2] ^= 1
    elif damage == "cut":
        del data[-1]
    else:
        data += b"\0"
    store = MemoryStore()
    store.create(f"bundles/{digest}.tar.gz", data)
    with pytest.raises(StoreError, match="is damaged"):
        fetch_and_unpack(store, digest, tmp_path)


def test_a_missing_bundle_names_its_key(tmp_path: Path) -> None:
    with pytest.raises(KeyNotFound, match=f"bundles/{'0' * 64}.tar.gz"):
        fetch_and_unpack(MemoryStore(), "0" * 64, tmp_path)


@pytest.mark.parametrize("digest", ["", "abc", "../" * 20 + "etc", "A" * 64, "0" * 63 + "/", "0" * 63 + "\n"])
def test_a_digest_is_checked_before_it_becomes_a_path(tmp_path: Path, digest: str) -> None:
    with pytest.raises(StoreError, match="is not the digest of a bundle"):
        fetch_and_unpack(MemoryStore(), digest, tmp_path / "shelf")
    assert os.listdir(tmp_path) == []


def test_an_object_far_too_long_is_not_read_to_its_end(tmp_path: Path) -> None:
    class Endless(MemoryStore):
        served = 0

        def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
            self.served += length or 0
            return bytes(length or 0)

    store = Endless()
    with pytest.raises(StoreError, match="is longer than"):
        fetch_and_unpack(store, "0" * 64, tmp_path, max_bytes=10 * MIB, max_files=10)
    assert store.served <= 24 * MIB


def test_a_bundle_of_several_pieces_arrives_whole(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    content = os.urandom(17 * MIB)
    (tmp_path / "from" / "big").write_bytes(content)
    bundle, store = build(tmp_path / "from"), FileStore(tmp_path / "store")
    upload(bundle, store)
    assert (fetch_and_unpack(store, bundle.digest, tmp_path / "to") / "big").read_bytes() == content


def test_the_folder_is_named_by_the_digest_and_used_again(tmp_path: Path) -> None:
    store, digest = put(archive(A))
    root = fetch_and_unpack(store, digest, tmp_path)
    assert root == tmp_path / digest
    store.delete(f"bundles/{digest}.tar.gz")
    assert fetch_and_unpack(store, digest, tmp_path) == root


def test_an_empty_folder_in_its_place_is_filled(tmp_path: Path) -> None:
    store, digest = put(archive(A))
    (tmp_path / digest).mkdir()
    assert (fetch_and_unpack(store, digest, tmp_path) / "a").read_bytes() == b"x"


@pytest.mark.parametrize("kind", ["file", "link", "someone else's"])
def test_something_else_in_its_place_is_not_trusted(tmp_path: Path, kind: str) -> None:
    store, digest = put(archive(A))
    place = tmp_path / digest
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "a").write_text("evil")
    if kind == "file":
        place.write_text("evil")
    elif kind == "link":
        place.symlink_to("planted")
    elif os.geteuid() == 0:
        os.chown((tmp_path / "planted").rename(place), 65534, -1)
    else:
        pytest.skip("only root can make a folder of someone else")
    with pytest.raises(ConfigError, match="is in the way"):
        fetch_and_unpack(store, digest, tmp_path)


def test_a_destination_that_cannot_be_made_is_an_error_about_it(tmp_path: Path) -> None:
    store, digest = put(archive(A))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot unpack bundle .*file"):
        fetch_and_unpack(store, digest, tmp_path / "file" / "shelf")


def test_many_threads_at_once_share_one_folder(tmp_path: Path) -> None:
    store, digest = put(archive(*(file(f"d/{n}", os.urandom(5000)) for n in range(50))))
    barrier, roots, errors = threading.Barrier(8), [], []

    def rank() -> None:
        barrier.wait()
        try:
            root = fetch_and_unpack(store, digest, tmp_path)
            roots.append((root, len(os.listdir(root / "d"))))
        except Exception as exc:
            errors.append(exc)

    threads = [threading.Thread(target=rank) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert roots == [(tmp_path / digest, 50)] * 8
    assert os.listdir(tmp_path) == [digest]


_RANK = """
import sys
from pathlib import Path
from atoll.stores.file.store import FileStore
from atoll.bundle import fetch_and_unpack
sys.stdin.readline()
root = fetch_and_unpack(FileStore(Path(sys.argv[1])), sys.argv[2], Path(sys.argv[3]))
print(sum(len(path.read_bytes()) for path in root.rglob("*") if path.is_file()))
"""


@pytest.mark.process
def test_many_processes_at_once_share_one_folder(tmp_path: Path) -> None:
    data = archive(*(file(f"d/{n}", os.urandom(20_000)) for n in range(100)))
    digest = hashlib.sha256(data).hexdigest()
    FileStore(tmp_path / "store").create(f"bundles/{digest}.tar.gz", data)
    command = [sys.executable, "-c", _RANK, str(tmp_path / "store"), digest, str(tmp_path / "shelf")]
    ranks = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    try:
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("go\n")
            rank.stdin.flush()
        assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["2000000\n"] * 4
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert os.listdir(tmp_path / "shelf") == [digest]


def test_a_relative_destination_gives_an_absolute_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, digest = put(archive(A))
    monkeypatch.chdir(tmp_path)
    assert fetch_and_unpack(store, digest, Path("shelf")) == tmp_path / "shelf" / digest
