"""Objects in S3, Google Cloud Storage or Azure Blob Storage, through obstore.

`create` is the one hard verb. The service refuses a taken key, but obstore tries again by itself, so a refusal may be
about our own first try whose answer was lost; and S3 may answer 409 while another request that never lands is under
way. So every object we create carries an owner's mark in its metadata, never used twice: after a refusal or a silence
we look whose object it is. Ours: we won. Another's: `KeyExists`. None there: try again. Comparing contents would not
do, for two writers may offer the same bytes and only one of them may win.

obstore runs threads that a forked child does not have: used in a child, it would hang for ever. Refuse instead.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from datetime import timedelta
from itertools import islice
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from atoll._time import SYSTEM_CLOCK, Clock, backoff
from atoll.errors import KeyExists, StoreError, StoreUnavailable
from atoll.registry import require
from atoll.stores.base import Buffer, Data, check_key, check_prefix, check_range, pieces
from atoll.stores.cloud.address import CloudAddress, parse_address
from atoll.stores.cloud.client import CloudSettings, build_client, is_own_endpoint
from atoll.stores.cloud.errors import Answer, answer_of, translated
from atoll.stores.cloud.stream import StraightReader
from atoll.stores.fast import Body, BufferBody
from atoll.stores.probe import probe_create

if TYPE_CHECKING:
    from atoll.stores.cloud.client import Client

_first_used_in: int | None = None


def guard_against_fork(uri: str) -> None:
    """Raise in a child that was forked from a process which had already used a cloud store."""
    global _first_used_in
    here = os.getpid()
    if _first_used_in is None:
        _first_used_in = here
    elif _first_used_in != here:
        raise StoreError(
            f"this process was forked from one that had used a cloud store, so it cannot use {uri}",
            uri=uri,
            hint="start workers with the `spawn` or `forkserver` method (DataLoader: multiprocessing_context='spawn'), "
            "or touch the store only in the parent",
        )


_T = TypeVar("_T")
_OWNER = "atollowner"  # Azure allows no dash in the name of a metadata item
_ONE_REQUEST_BYTES = 1 << 31  # larger objects go up in parts; the services take at most 5 GB at once
_PART_BYTES = 64 << 20
_TRIES = 8
_SIGNED_FOR = timedelta(minutes=15)  # to begin with; a body that is on its way then goes on


class CloudStore:
    """`s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`. Safe to share between threads, not forks."""

    def __init__(
        self, address: CloudAddress, settings: CloudSettings | None = None, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        require("obstore", extra="cloud")
        self.address, self.uri = address, address.uri
        self._settings = settings or CloudSettings()
        self._clock = clock
        self._lock, self._probing = Lock(), Lock()
        self._clients: dict[float, Client] = {}
        self._is_create_trusted = not is_own_endpoint(address)
        fits = StraightReader.fits(address, self._settings)
        self._straight = StraightReader(self._signed, self._settings, clock) if fits else None

    @classmethod
    def from_uri(cls, uri: str, **options: Any) -> CloudStore:
        """Options are those of the URI (`region`, `endpoint`, …), and the fields of `CloudSettings`."""
        names = {field.name for field in fields(CloudSettings)}
        settings = CloudSettings(**{name: value for name, value in options.items() if name in names})
        rest = {name: value for name, value in options.items() if name not in names}
        return cls(parse_address(uri).with_options(rest), settings)

    def __repr__(self) -> str:
        return f"CloudStore({self.uri!r})"

    def with_retry_timeout(self, seconds: float) -> CloudStore:
        short_timeout = self._settings.with_retry_timeout(seconds)
        if short_timeout == self._settings:
            return self
        twin = CloudStore(self.address, short_timeout, clock=self._clock)
        twin._is_create_trusted = self._is_create_trusted
        return twin

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> Buffer:
        check_range(start, length)
        path = self._path(key)
        if length == 0:
            self._request("get", key, lambda client: client.head(path))
            return b""
        options: Any = _range_options(start, length)
        try:
            return self._request("get", key, lambda client: memoryview(client.get(path, options=options).bytes()))
        except _PastTheEnd:
            return b""

    def open(self, key: str) -> Body:
        path = self._path(key)
        guard_against_fork(self.uri)
        body = self._straight.open(self.uri, key, path) if self._straight is not None else None
        return body if body is not None else BufferBody(self.get(key))

    def put(self, key: str, data: Data) -> None:
        path, parts = self._path(key), pieces(data)
        size = _size(parts)
        is_large = size > _ONE_REQUEST_BYTES

        def send(client: Client) -> None:
            client.put(path, parts, use_multipart=is_large, chunk_size=_PART_BYTES)

        self._request("put", key, send, upload_bytes=_PART_BYTES if is_large else size)

    def create(self, key: str, data: Data) -> None:
        path, parts = self._path(key), pieces(data)
        self._see_that_create_is_atomic()
        self._create(key, path, parts)

    def list(self, prefix: str = "") -> Iterator[str]:
        folder = check_prefix(prefix).rpartition("/")[0]
        within = "/".join(part for part in (self.address.prefix, folder) if part) or None

        def collect(client: Client) -> Sequence[str]:
            found = (self.address.key(entry["path"]) for page in client.list(within, chunk_size=1000) for entry in page)
            return sorted(key for key in found if key.startswith(prefix))

        # Sorted here: S3 Express and some clones list in an order of their own.
        return iter(self._request("list", prefix, collect))

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            self._request("delete", key, lambda client: client.delete(path))
        except FileNotFoundError:
            return

    def _signed(self, path: str) -> str:
        """An address by which an object can be read for a while. It is as good as a key: never shown to anybody."""
        obstore = require("obstore", extra="cloud")
        url: str = obstore.sign(self._client(self._settings.patience_s(0)), "GET", path, _SIGNED_FOR)
        return url

    def _see_that_create_is_atomic(self) -> None:
        """Once for each store that is not a cloud vendor's own: some accept the condition and ignore it."""
        with self._probing:
            if not self._is_create_trusted:
                twin = CloudStore(self.address, self._settings, clock=self._clock)
                twin._is_create_trusted = True
                probe_create(twin)
                self._is_create_trusted = True

    def _create(self, key: str, path: str, parts: Sequence[memoryview]) -> None:
        size = _size(parts)
        if size > 5 * 10**9:
            raise StoreError(f"cannot create `{key}` in {self.uri}: one request carries at most 5 GB", key=key)
        mark = uuid.uuid4().hex

        def send(client: Client) -> None:
            client.put(path, parts, mode="create", attributes={_OWNER: mark})

        for pause in islice(backoff(0.05, factor=2.0, cap_s=2.0, jitter=0.3), _TRIES):
            try:
                return self._request("create", key, send, upload_bytes=size)
            except (KeyExists, StoreUnavailable) as exc:
                owner = self._owner(key, path, or_else=exc)
                if owner == mark:
                    return None
                if owner is not None or isinstance(exc, StoreUnavailable):
                    raise
                last = exc
            self._clock.sleep(pause)
        message = f"cannot create `{key}` in {self.uri}: conflict without a winner"
        raise StoreUnavailable(message, key=key, reason="conflict") from last

    def _owner(self, key: str, path: str, *, or_else: StoreError) -> str | None:
        """Whose object is there: its mark, an empty text if it has none, or None if there is no object."""
        try:
            found = self._request("get", key, lambda client: client.get(path, options={"head": True}).attributes)
        except FileNotFoundError:
            return None
        except StoreUnavailable:
            raise or_else from or_else.__cause__
        return str(found.get(_OWNER, ""))

    def _path(self, key: str) -> str:
        return self.address.path(check_key(key))

    def _request(self, verb: str, key: str, send: Callable[[Client], _T], *, upload_bytes: int = 0) -> _T:
        """Send one request; once more if fresh credentials or plain patience may help; errors become ours. (S11)"""
        guard_against_fork(self.uri)
        patience_s = self._settings.patience_s(upload_bytes)
        client = self._client(patience_s)
        for is_last_try in (False, True):
            try:
                return send(client)
            except _vendor_errors() as exc:
                answer = answer_of(exc)
                if is_last_try or not (answer.is_stale or answer.is_passing) or (verb == "create" and answer.is_taken):
                    self._give_up(answer, verb, key, exc)
                client = self._client(patience_s, instead_of=client if answer.is_stale else None)
        raise AssertionError("unreachable")

    def _give_up(self, answer: Answer, verb: str, key: str, cause: Exception) -> NoReturn:
        if verb == "get" and answer.is_past_the_end:
            raise _PastTheEnd from cause
        raise translated(answer, verb, self.uri, key) from cause

    def _client(self, patience_s: float, *, instead_of: Client | None = None) -> Client:
        with self._lock:
            known = self._clients.get(patience_s)
            if known is None or known is instead_of:
                known = self._clients[patience_s] = build_client(self.address, self._settings, patience_s)
            return known


class _PastTheEnd(Exception):
    """The range starts after the object's last byte."""


def _vendor_errors() -> tuple[type[Exception], ...]:
    return (require("obstore.exceptions", extra="cloud").BaseError, FileNotFoundError, ValueError, OSError)


def _range_options(start: int, length: int | None) -> dict[str, Any]:
    if length is not None:
        return {"range": (start, start + length)}
    return {"range": {"offset": start}} if start else {}


def _size(parts: Sequence[memoryview]) -> int:
    return sum(part.nbytes for part in parts)
