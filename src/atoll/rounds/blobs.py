"""Bulk bytes that are not averaged (initial weights, snapshots), cut into pieces named by the digest of the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from atoll.errors import CorruptUpdate
from atoll.rounds.frames import checksum, digest
from atoll.rounds.io import Gather, Steps, StoreIO
from atoll.rounds.keys import RoundKeys
from atoll.rounds.records import Blob
from atoll.stores.base import Buffer, pieces

PIECE_BYTES = 16 << 20
_WIDTH = 4


def describe(round_no: int, buffers: Sequence[Buffer], piece_bytes: int = PIECE_BYTES) -> Blob:
    """What the blob of these bytes is called and how its pieces check; nothing is written."""
    parts = pieces(list(buffers))
    table = tuple((sum(map(len, piece)), checksum(*piece)) for piece in _cut(parts, piece_bytes))
    return Blob(round_no, digest(*parts), sum(map(len, parts)), table)


def write_blob(
    io: StoreIO, keys: RoundKeys, blob: Blob, buffers: Sequence[Buffer], piece_bytes: int = PIECE_BYTES
) -> Steps[None]:
    """Write the pieces. Equal bytes have equal names, so several writers do no harm."""
    cut = _cut(pieces(list(buffers)), piece_bytes)
    children = [io.put(keys.blob(blob.round_no, blob.digest, i), piece) for i, piece in enumerate(cut)]
    yield Gather(children, _WIDTH)


def read_blob(io: StoreIO, keys: RoundKeys, blob: Blob) -> Steps[bytearray]:
    """All the bytes, checked piece by piece."""
    whole = bytearray(blob.size_bytes)
    view = memoryview(whole)
    children, start = [], 0
    for i, (size, check) in enumerate(blob.pieces):
        children.append(_read_piece(io, keys.blob(blob.round_no, blob.digest, i), view[start : start + size], check))
        start += size
    yield Gather(children, _WIDTH)
    return whole


def delete_blob(io: StoreIO, keys: RoundKeys, blob: Blob) -> Steps[None]:
    for i in range(len(blob.pieces)):
        yield from io.delete(keys.blob(blob.round_no, blob.digest, i))


def sections(whole: bytearray, sizes: Sequence[int]) -> list[memoryview]:
    """The buffers a blob was made of, as views of it."""
    view, start, found = memoryview(whole), 0, []
    for size in sizes:
        found.append(view[start : start + size])
        start += size
    if start != len(view):
        raise CorruptUpdate(f"a blob of {len(view)} bytes is not {start} bytes of sections", check="length")
    return found


def _read_piece(io: StoreIO, key: str, target: memoryview, check: str) -> Steps[None]:
    def checked(data: Buffer) -> Buffer:
        if len(view := memoryview(data).cast("B")) != len(target) or checksum(view) != check:
            raise CorruptUpdate("a piece of a blob fails its checksum", check="checksum")
        return view

    target[:] = yield from io.read(key, checked)


def _cut(parts: Sequence[memoryview], piece_bytes: int) -> Iterator[list[memoryview]]:
    """The same bytes as lists of views of `piece_bytes` each; the last may be shorter."""
    piece: list[memoryview] = []
    room = piece_bytes
    for part in parts:
        while len(part):
            piece.append(part[:room])
            part = part[room:]
            room -= len(piece[-1])
            if room == 0:
                yield piece
                piece, room = [], piece_bytes
    if piece:
        yield piece
