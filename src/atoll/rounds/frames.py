"""Records and frames: the two self-checking containers of every object that replicas read from the store.

A *record* is one JSON object whose last member, `xxh3`, is the XXH3-64 of the same object without that member.
A *frame* is a 32-byte preamble, a JSON header and raw little-endian bytes; checksums cover every byte of it.
FORMAT.md specifies both. Each `open_…` function raises `CorruptUpdate` unless every check passes. `FrameReader` reads
a frame while it arrives: it checks the front first, then hashes the payload tile by tile.
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
from atoll.rounds.one_pass import TileBuffer
from atoll.stores.base import Buffer, pieces
from atoll.stores.fast import Body, DescriptorBody

MAGIC: Final = b"ATOL"
VERSION: Final = 1
MAX_HEADER_BYTES: Final = 1 << 20
ALIGNMENT: Final = 64
"""Payloads start at a multiple of this, so that numpy can use them without a copy."""

_PREAMBLE = struct.Struct("<4sHHIIQQ")  # magic, version, 0, header bytes, 0, payload bytes, check
PREAMBLE_BYTES: Final = _PREAMBLE.size
_CHECKED_BYTES = PREAMBLE_BYTES - 8
_TAIL = re.compile(rb',"xxh3":"([0-9a-f]{16})"\}\Z')


def checksum(*parts: Buffer) -> str:
    """XXH3-64 of the joined parts, as 16 hex digits."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def digest(*parts: Buffer) -> str:
    """XXH3-128 of the joined parts, as 32 hex digits."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def canonical(value: Mapping[str, Any]) -> bytes:
    """The canonical JSON of `value`: sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def seal_record(value: Mapping[str, Any]) -> bytes:
    """`value` as a record."""
    if not value or "xxh3" in value:
        raise InternalError("a record needs at least one member, and none named `xxh3`")
    body = canonical(value)
    return body[:-1] + b',"xxh3":"' + checksum(body).encode() + b'"}'


def open_record(data: Buffer, *, kind: str) -> dict[str, Any]:
    """Check a record of this kind; its members."""
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
    """A checked header, and the payload as a view of the frame."""

    header: dict[str, Any]
    payload: memoryview


def seal_frame(
    header: Mapping[str, Any], payload: Sequence[Buffer] = (), *, check: str | None = None
) -> list[memoryview]:
    """The buffers of a frame, to be written as one object; the payload is not copied. `check`: its known checksum."""
    parts = [part for part in pieces(list(payload)) if len(part)]
    front = seal_front({**header, "xxh3": check or checksum(*parts)}, sum(map(len, parts)))
    return [memoryview(front), *parts]


def seal_front(header: Mapping[str, Any], payload_bytes: int, *, alignment: int = ALIGNMENT) -> bytes:
    """The preamble and the header, padded with spaces to a multiple of `alignment`. The header has the checksum."""
    text = canonical(header)
    text += b" " * (-(PREAMBLE_BYTES + len(text)) % alignment)
    if len(text) > MAX_HEADER_BYTES:
        raise InternalError(f"a header of {len(text)} bytes is over the limit of {MAX_HEADER_BYTES}")
    front = _PREAMBLE.pack(MAGIC, VERSION, 0, len(text), 0, payload_bytes, 0)[:_CHECKED_BYTES]
    return front + struct.pack("<Q", xxhash.xxh3_64_intdigest(front + text)) + text


def open_preamble(preamble: Buffer, size: int, *, kind: str) -> tuple[int, int]:
    """The bytes of the header and of the payload in a frame of `size` bytes; `open_header` checks the checksum."""
    if size < PREAMBLE_BYTES:
        raise CorruptUpdate(f"{_a(kind)} of {size} bytes is too short", check="length")
    magic, version, zero, header_bytes, zero_too, payload_bytes, _ = _PREAMBLE.unpack(preamble)
    if (magic, version, zero, zero_too) != (MAGIC, VERSION, 0, 0) or header_bytes > MAX_HEADER_BYTES:
        raise CorruptUpdate(f"not {_a(kind)} of format version {VERSION}", check="preamble")
    if size != (expected := PREAMBLE_BYTES + header_bytes + payload_bytes):
        raise CorruptUpdate(f"{_a(kind)} has {size} bytes, not {expected}", check="length")
    return header_bytes, payload_bytes


def open_header(preamble: Buffer, text: bytes, *, kind: str) -> dict[str, Any]:
    """Check the header of a frame of this kind, together with its preamble."""
    front = bytes(preamble)
    if front[_CHECKED_BYTES:] != struct.pack("<Q", xxhash.xxh3_64_intdigest(front[:_CHECKED_BYTES] + text)):
        raise CorruptUpdate(f"the header of {_a(kind)} fails its checksum", check="checksum")
    header = parse_json(text)
    if header.get("kind") != kind:
        raise CorruptUpdate(f"a frame is of kind {header.get('kind')!r}, not {kind!r}", check="kind")
    return header


def open_frame(data: Buffer, *, kind: str) -> Frame:
    """Check every byte of a frame of this kind."""
    view = memoryview(data).cast("B")
    preamble = view[:PREAMBLE_BYTES]
    start = PREAMBLE_BYTES + open_preamble(preamble, len(view), kind=kind)[0]
    header = open_header(preamble, bytes(view[PREAMBLE_BYTES:start]), kind=kind)
    payload = view[start:]
    if checksum(payload) != header.get("xxh3"):
        raise CorruptUpdate(f"the payload of {_a(kind)} fails its checksum", check="checksum")
    return Frame(header, payload)


def parse_json(text: bytes) -> dict[str, Any]:
    """Parse a JSON object, or raise `CorruptUpdate`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise CorruptUpdate(f"not JSON: {exc}", check="json") from exc
    if not isinstance(value, dict):
        raise CorruptUpdate("not a JSON object", check="json")
    return value


class FrameReader:
    """Reads one frame from a store, in order. The payload is also the `HashedPayload` of codec `fp32`.

    Create it and call it inside a `Read` step, because both take bytes from the store.
    """

    def __init__(self, body: Body, clock: Clock, *, kind: str) -> None:
        """Read the front. Raises `CorruptUpdate` if a check fails, `StoreUnavailable` if bytes do not arrive."""
        self._body, self._clock, self._hash = body, clock, Hash()
        self.seconds = 0.0
        """How long the reader waited for bytes of the payload."""
        preamble = bytearray(min(PREAMBLE_BYTES, body.size))
        body.readinto(memoryview(preamble))
        header_bytes, self.payload_bytes = open_preamble(preamble, body.size, kind=kind)
        text = bytearray(header_bytes)
        body.readinto(memoryview(text))
        self.header = open_header(preamble, bytes(text), kind=kind)

    @property
    def check(self) -> str:
        """XXH3-64 of the bytes of the payload that have been read."""
        return self._hash.hexdigest()

    def take(self, out: memoryview) -> None:
        """Fill `out` with the next bytes of the payload, and hash them."""
        self._receive(out)
        self._hash.update(out)

    def whole(self) -> memoryview:
        """The whole payload, in memory of its own."""
        out = aligned(self.payload_bytes, np.uint8).data
        self.take(out)
        return out

    def read(self, start: int, out: F32) -> F32:  # noqa: ARG002 - reads in order
        self.take(as_bytes(out))
        if sys.byteorder == "big":
            out.byteswap(inplace=True)
        return out

    def hash_with(self, kernels: FusedKernels) -> Hash:
        self._hash = Hash(kernels)
        return self._hash

    def tile(self, start: int, count: int, buffer: TileBuffer) -> int:  # noqa: ARG002 - reads in order
        self._receive(buffer.bytes_of(count))
        return buffer.address

    def source(self, count: int) -> Source | None:
        if 4 * count > self.payload_bytes or self._hash.address is None or not isinstance(self._body, DescriptorBody):
            return None
        opened = self._body.descriptor()
        if opened is None:
            return None
        kind = FROM_HUGE_PAGES if opened.is_huge else FROM_SOCKET if opened.is_socket else FROM_FILE
        return Source.from_open(opened.file, opened.ready, kind, self._hash)

    def was_read(self, source: Source, count: int) -> None:
        self.seconds += source.seconds
        assert isinstance(self._body, DescriptorBody)
        self._body.was_read(4 * count)

    def was_cut(self, number: int) -> NoReturn:
        assert isinstance(self._body, DescriptorBody)
        self._body.was_cut(OSError(number, os.strerror(number)) if number else None)

    def close(self) -> None:
        self._body.close()

    def _receive(self, out: memoryview) -> None:
        began = self._clock.monotonic()
        self._body.readinto(out)
        self.seconds += self._clock.monotonic() - began


def _a(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
