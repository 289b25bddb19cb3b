"""Objects in S3, Google Cloud Storage or Azure Blob Storage, through obstore.

`create` is the difficult method. The service refuses an existing key, but obstore retries by itself, so a refusal may
be about our own first attempt whose response was lost; and S3 may answer 409 because of a concurrent request that then
fails. So `create` writes a unique owner's mark to the object's metadata, and reads it after a refusal or a timeout. Our
mark: `create` succeeded. Another mark: `KeyExists`. No object: try again. Comparing contents is not enough: two writers
may write the same bytes, and only one of them may succeed.
"""

from __future__ import annotations

import logging
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
from atoll.stores.cloud.client import CloudSettings, build_client, is_custom_endpoint
from atoll.stores.cloud.errors import Answer, answer_of, translated, unusable
from atoll.stores.cloud.stream import DirectReader
from atoll.stores.fast import Body, BufferBody
from atoll.stores.probe import probe_create

if TYPE_CHECKING:
    from atoll.stores.cloud.client import Client

log = logging.getLogger("atoll.stores")
_T = TypeVar("_T")
_OWNER = "atollowner"  # Azure allows no dash in the name of a metadata item
_ONE_REQUEST_BYTES = 1 << 31  # larger objects are uploaded in parts; a request has at most 5 GB
_PART_BYTES = 64 << 20
_TRIES = 8
_URL_VALID_FOR = timedelta(minutes=15)  # for the start of a request; a body in progress continues


class CloudStore:
    """`s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`. Threads may share it, forks may not."""

    def __init__(
        self, address: CloudAddress, settings: CloudSettings | None = None, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        require("obstore", extra="cloud")
        self.address, self.uri = address, address.uri
        self._settings = settings or CloudSettings()
        self._clock = clock
        self._lock, self._probing = Lock(), Lock()
        self._clients: dict[float, Client] = {}
        self._is_create_trusted = not is_custom_endpoint(address)
        is_direct = DirectReader.supports(address, self._settings)
        self._direct = DirectReader(self._signed_url, self._settings, clock) if is_direct else None

    @classmethod
    def from_uri(cls, uri: str, **options: Any) -> CloudStore:
        """Options are those of the URI (`region`, `endpoint`, …) and the fields of `CloudSettings`."""
        names = {field.name for field in fields(CloudSettings)}
        settings = CloudSettings(**{name: value for name, value in options.items() if name in names})
        rest = {name: value for name, value in options.items() if name not in names}
        return cls(parse_address(uri).with_options(rest), settings)

    def __repr__(self) -> str:
        return f"CloudStore({self.uri!r})"

    def with_retry_timeout(self, seconds: float) -> CloudStore:
        limited = self._settings.with_retry_timeout(seconds)
        if limited == self._settings:
            return self
        twin = CloudStore(self.address, limited, clock=self._clock)
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
        _check_fork(self.uri)
        body = self._direct.open(self.uri, key, path) if self._direct is not None else None
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
        self._check_create()
        self._create(key, path, parts)

    def list(self, prefix: str = "") -> Iterator[str]:
        # Sorted here, because S3 Express and some clones list in another order.
        return iter(sorted(key for key, _ in self._listed(prefix)))

    def list_sizes(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        return iter(sorted((key, int(entry["size"])) for key, entry in self._listed(prefix)))

    def _listed(self, prefix: str) -> Sequence[tuple[str, Any]]:
        """Each key that starts with `prefix`, with what the service says about the object."""
        folder = check_prefix(prefix).rpartition("/")[0]
        within = "/".join(part for part in (self.address.prefix, folder) if part) or None

        def collect(client: Client) -> Sequence[tuple[str, Any]]:
            pages = client.list(within, chunk_size=1000)
            found = ((self.address.key(entry["path"]), entry) for page in pages for entry in page)
            return [each for each in found if each[0].startswith(prefix)]

        return self._request("list", prefix, collect)

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            self._request("delete", key, lambda client: client.delete(path))
        except FileNotFoundError:
            return

    def _signed_url(self, path: str) -> str:
        """A URL that can read the object for some minutes. It is a secret: never log it or show it in an error."""
        obstore = require("obstore", extra="cloud")
        url: str = obstore.sign(self._client(self._settings.request_timeout_s(0)), "GET", path, _URL_VALID_FOR)
        return url

    def _check_create(self) -> None:
        """Probe `create` once, unless the endpoint is the vendor's: others may ignore the condition."""
        with self._probing:
            if not self._is_create_trusted:
                twin = CloudStore(self.address, self._settings, clock=self._clock)
                twin._is_create_trusted = True
                log.debug("probing create of %s", self.uri)
                probe_create(twin)
                self._is_create_trusted = True

    def _create(self, key: str, path: str, parts: Sequence[memoryview]) -> None:
        size = _size(parts)
        if size > 5 * 10**9:
            raise StoreError(f"cannot create `{key}` in {self.uri}: one request has at most 5 GB", key=key)
        owner_mark = uuid.uuid4().hex

        def send(client: Client) -> None:
            client.put(path, parts, mode="create", attributes={_OWNER: owner_mark})

        for pause in islice(backoff(0.05, factor=2.0, cap_s=2.0, jitter=0.3), _TRIES):
            try:
                return self._request("create", key, send, upload_bytes=size)
            except (KeyExists, StoreUnavailable) as exc:
                owner = self._owner(key, path, or_else=exc)
                log.debug("create of `%s` in %s: %s", key, self.uri, "ours" if owner == owner_mark else exc.message)
                if owner == owner_mark:
                    return None
                if owner is not None or isinstance(exc, StoreUnavailable):
                    raise
                last = exc
            self._clock.sleep(pause)
        message = (
            f"cannot create `{key}` in {self.uri}: every attempt conflicted with another writer, but no object exists"
        )
        raise StoreUnavailable(message, key=key, reason="conflict") from last

    def _owner(self, key: str, path: str, *, or_else: StoreError) -> str | None:
        """The owner's mark of the existing object, empty if it has none; None without an object."""
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
        """Send one request, and repeat it once if new credentials or a retry may help; translate errors. (S11)"""
        _check_fork(self.uri)
        timeout_s = self._settings.request_timeout_s(upload_bytes)
        client = self._client(timeout_s)
        for is_last_try in (False, True):
            try:
                return send(client)
            except _vendor_errors() as exc:
                answer = answer_of(exc)
                if (
                    is_last_try
                    or not (answer.is_expired or answer.is_transient)
                    or (verb == "create" and answer.is_existing)
                ):
                    self._raise(answer, verb, key, exc)
                log.debug("retrying %s of `%s` in %s: %s", verb, key, self.uri, answer.code or answer.kind)
                client = self._client(timeout_s, instead_of=client if answer.is_expired else None)
        raise AssertionError("unreachable")

    def _raise(self, answer: Answer, verb: str, key: str, cause: Exception) -> NoReturn:
        if verb == "get" and answer.is_past_the_end:
            raise _PastTheEnd from cause
        raise translated(answer, verb, self.uri, key) from cause

    def _client(self, timeout_s: float, *, instead_of: Client | None = None) -> Client:
        with self._lock:
            known = self._clients.get(timeout_s)
            if known is None or known is instead_of:
                known = self._clients[timeout_s] = self._new_client(timeout_s)
            return known

    def _new_client(self, timeout_s: float) -> Client:
        try:
            return build_client(self.address, self._settings, timeout_s)
        except require("obstore.exceptions", extra="cloud").BaseError as exc:  # one key of a pair is missing
            raise unusable(answer_of(exc), self.uri) from exc


class _PastTheEnd(Exception):
    """The range begins after the last byte of the object."""


def _vendor_errors() -> tuple[type[Exception], ...]:
    return (require("obstore.exceptions", extra="cloud").BaseError, FileNotFoundError, ValueError, OSError)


def _range_options(start: int, length: int | None) -> dict[str, Any]:
    if length is not None:
        return {"range": (start, start + length)}
    return {"range": {"offset": start}} if start else {}


def _size(parts: Sequence[memoryview]) -> int:
    return sum(part.nbytes for part in parts)


_first_used_in: int | None = None
"""The process that used a cloud store first. obstore's threads do not exist in its forked children."""


def _check_fork(uri: str) -> None:
    """Raise in a forked child of a process that has used a cloud store: a request would hang forever."""
    global _first_used_in
    here = os.getpid()
    if _first_used_in is None:
        _first_used_in = here
    elif _first_used_in != here:
        raise StoreError(
            f"cannot use {uri}: this process was forked from one that had used a cloud store",
            uri=uri,
            hint="start workers with the `spawn` or `forkserver` method (DataLoader: multiprocessing_context='spawn'), "
            "or use the store only in the parent",
        )
