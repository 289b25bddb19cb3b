"""A frame that is still arriving: its front has been checked; its payload is read tile by tile and hashed as it comes.

So bytes are added up, or come to rest, while they are in the nearest cache, and none of them needs memory of its own.

Two self-checking containers for everything that is read back from the store; no pickle, no trust.

A *record* is one JSON object whose last member, `xxh3`, is the XXH3-64 of the same object without that member.
A *frame* is a 32-byte preamble, a JSON header and raw little-endian bytes; every byte of it is covered by a checksum.
FORMAT.md states both. Anything that does not check out raises `CorruptUpdate`.
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import numpy as np
import xxhash

from atoll._time import Clock
from atoll.errors import CorruptUpdate, InternalError
from atoll.kernels import aligned
from atoll.kernels.fused import FROM_FILE, FROM_HUGE_PAGES, FROM_SOCKET, FusedKernels, Hash, Source
from atoll.rounds.codecs.base import F32, as_bytes
from atoll.rounds.one_pass import Room
from atoll.stores.base import Buffer, pieces
from atoll.stores.fast import Body, DescriptorBody

MAGIC: Final = b"ATOL"
VERSION: Final = 1
MAX_HEADER_BYTES: Final = 1 << 20
ALIGNMENT: Final = 64
"""Payloads start at a multiple of this, so that they can be used where they lie."""

_PREAMBLE = struct.Struct("<4sHHIIQQ")  # magic, version, 0, header bytes, 0, payload bytes, check
PREAMBLE_BYTES: Final = _PREAMBLE.size
_CHECKED_BYTES = PREAMBLE_BYTES - 8
_TAIL = re.compile(rb',"xxh3":"([0-9a-f]{16})"\}\Z')


def checksum(*parts: Buffer) -> str:
    """XXH3-64 of the parts as if joined, as 16 hex digits."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def digest(*parts: Buffer) -> str:
    """XXH3-128 of the parts as if joined, as 32 hex digits."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def canonical(value: Mapping[str, Any]) -> bytes:
    """The one JSON text of `value`: sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def seal_record(value: Mapping[str, Any]) -> bytes:
    """`value` as a record."""
    if not value or "xxh3" in value:
        raise InternalError("a record has at least one member, and none named `xxh3`")
    body = canonical(value)
    return body[:-1] + b',"xxh3":"' + checksum(body).encode() + b'"}'


def open_record(data: Buffer, *, kind: str) -> dict[str, Any]:
    """The members of a record of this kind, checked."""
    raw = bytes(data)
    tail = _TAIL.search(raw)
    if tail is None or checksum(body := raw[: tail.start()] + b"}") != tail[1].decode():
        raise CorruptUpdate(f"{_a(kind)} record of {len(raw)} bytes fails its checksum", check="checksum")
    value = parse_json(body)
    if value.get("kind") != kind:
        raise CorruptUpdate(f"a record is of kind {value.get('kind')!r}, not {kind!r}", check="kind")
    return value


@dataclass(frozen=True)
class Frame:
    """A checked header, and the payload where it lies."""

    header: dict[str, Any]
    payload: memoryview


def seal_frame(
    header: Mapping[str, Any], payload: Sequence[Buffer] = (), *, check: str | None = None
) -> list[memoryview]:
    """A frame as buffers to be written as one object; the payload is not copied. `check`: its checksum, if known."""
    parts = [part for part in pieces(list(payload)) if len(part)]
    front = seal_front({**header, "xxh3": check or checksum(*parts)}, sum(map(len, parts)))
    return [memoryview(front), *parts]


def seal_front(header: Mapping[str, Any], payload_bytes: int, *, alignment: int = ALIGNMENT) -> bytes:
    """What is before the payload, whose checksum is in the header. Spaces fill it up to a multiple of `alignment`."""
    text = canonical(header)
    text += b" " * (-(PREAMBLE_BYTES + len(text)) % alignment)
    if len(text) > MAX_HEADER_BYTES:
        raise InternalError(f"a header of {len(text)} bytes is over the limit of {MAX_HEADER_BYTES}")
    front = _PREAMBLE.pack(MAGIC, VERSION, 0, len(text), 0, payload_bytes, 0)[:_CHECKED_BYTES]
    seal = xxhash.xxh3_64_intdigest(front + text)
    return front + struct.pack("<Q", seal) + text


@dataclass(frozen=True)
class Front:
    """How the bytes of a frame are divided."""

    header_bytes: int
    payload_bytes: int


def open_front(preamble: Buffer, size: int, *, kind: str) -> Front:
    """What the first bytes of a frame of `size` bytes say; `open_header` checks their checksum."""
    if size < PREAMBLE_BYTES:
        raise CorruptUpdate(f"{_a(kind)} of {size} bytes is too short", check="length")
    magic, version, zero, header_bytes, zero_too, payload_bytes, _ = _PREAMBLE.unpack(preamble)
    if (magic, version, zero, zero_too) != (MAGIC, VERSION, 0, 0) or header_bytes > MAX_HEADER_BYTES:
        raise CorruptUpdate(f"not {_a(kind)} of format version {VERSION}", check="preamble")
    if size != (told := PREAMBLE_BYTES + header_bytes + payload_bytes):
        raise CorruptUpdate(f"{_a(kind)} has {size} bytes, not {told}", check="length")
    return Front(header_bytes, payload_bytes)


def open_header(preamble: Buffer, text: bytes, *, kind: str) -> dict[str, Any]:
    """The header of a frame of this kind, checked together with its preamble."""
    front = bytes(preamble)
    if front[_CHECKED_BYTES:] != struct.pack("<Q", xxhash.xxh3_64_intdigest(front[:_CHECKED_BYTES] + text)):
        raise CorruptUpdate(f"the header of {_a(kind)} fails its checksum", check="checksum")
    header = parse_json(text)
    if header.get("kind") != kind:
        raise CorruptUpdate(f"a frame is of kind {header.get('kind')!r}, not {kind!r}", check="kind")
    return header


def open_frame(data: Buffer, *, kind: str) -> Frame:
    """A frame of this kind with every byte checked."""
    view = memoryview(data).cast("B")
    preamble = view[:PREAMBLE_BYTES]
    front = open_front(preamble, len(view), kind=kind)
    start = PREAMBLE_BYTES + front.header_bytes
    header = open_header(preamble, bytes(view[PREAMBLE_BYTES:start]), kind=kind)
    payload = view[start:]
    if checksum(payload) != header.get("xxh3"):
        raise CorruptUpdate(f"the payload of {_a(kind)} fails its checksum", check="checksum")
    return Frame(header, payload)


def parse_json(text: bytes) -> dict[str, Any]:
    """A JSON object, or `CorruptUpdate`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise CorruptUpdate(f"not JSON: {exc}", check="json") from exc
    if not isinstance(value, dict):
        raise CorruptUpdate("not a JSON object", check="json")
    return value


def _a(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


class FrameReader:
    """Made and read within a `Read`, because both take bytes from the store.

    Also an `Opened` payload of `fp32`, if it is read from its beginning to its end.
    """

    def __init__(self, body: Body, clock: Clock, *, kind: str) -> None:
        """Reads the front. Raises `CorruptUpdate` when it does not check out, `StoreUnavailable` when it stays out."""
        self._body, self._clock = body, clock
        self._state: xxhash.xxh3_64 | Hash = xxhash.xxh3_64()
        self.seconds = 0.0
        """How long its reader waited for bytes."""
        preamble = bytearray(min(PREAMBLE_BYTES, body.size))
        body.readinto(memoryview(preamble))
        front = open_front(preamble, body.size, kind=kind)
        text = bytearray(front.header_bytes)
        body.readinto(memoryview(text))
        self.header = open_header(preamble, bytes(text), kind=kind)
        self.payload_bytes = front.payload_bytes

    @property
    def check(self) -> str:
        """XXH3-64 of what has been read of the payload."""
        return self._state.hexdigest()

    def take(self, room: memoryview) -> None:
        """The next bytes of the payload."""
        self._receive(room)
        if isinstance(self._state, xxhash.xxh3_64):
            self._state.update(room)

    def _receive(self, room: memoryview) -> None:
        began = self._clock.monotonic()
        self._body.readinto(room)
        self.seconds += self._clock.monotonic() - began

    def hashed_by(self, passes: FusedKernels) -> Hash:
        self._state = Hash(passes)
        return self._state

    def tile(self, start: int, count: int, room: Room) -> int:  # noqa: ARG002 - one after the other
        self._receive(room.bytes_of(count))
        return room.address

    def source(self, count: int) -> Source | None:
        if (
            not (isinstance(self._body, DescriptorBody) and isinstance(self._state, Hash))
            or 4 * count > self.payload_bytes
        ):
            return None
        where = self._body.descriptor()
        if where is None:
            return None
        kind = FROM_HUGE_PAGES if where.is_huge else FROM_SOCKET if where.is_socket else FROM_FILE
        return Source.from_open(where.file, where.ready, kind, self._state)

    def was_read(self, source: Source, count: int) -> None:
        self.seconds += source.seconds
        assert isinstance(self._body, DescriptorBody)
        self._body.was_read(4 * count)

    def was_cut(self, number: int) -> NoReturn:
        assert isinstance(self._body, DescriptorBody)
        self._body.was_cut(OSError(number, os.strerror(number)) if number else None)

    def read(self, start: int, room: F32) -> F32:  # noqa: ARG002 - one after the other
        self.take(as_bytes(room))
        if sys.byteorder == "big":
            room.byteswap(inplace=True)
        return room

    def whole(self) -> memoryview:
        """All of the payload, in memory of its own."""
        room = aligned(self.payload_bytes, np.uint8).data
        self.take(room)
        return room

    def close(self) -> None:
        self._body.close()
