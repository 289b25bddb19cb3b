"""Which files differ between two code bundles."""

from __future__ import annotations

import hashlib
import io
import tarfile

from atoll.bundle.pack import MAX_BYTES, Bundle
from atoll.errors import StoreError
from atoll.journal import changed_files
from atoll.keys import bundle as bundle_key
from atoll.stores.base import Buffer, Store

_PIECE = 1 << 20


def bundle_differences(store: Store, before: str, now: Bundle) -> list[str]:
    """One line for each file that differs from the bundle with the digest `before`; only that, if it is unreadable."""
    if before == now.digest:
        return []
    try:
        lines = changed_files(file_digests(store.get(bundle_key(before))), file_digests(now.data))
    except (StoreError, tarfile.TarError, EOFError, OSError, ValueError):
        lines = []
    return lines or [f"code: there the bundle `{before}`, here `{now.digest}`"]


def file_digests(archive: Buffer) -> dict[str, str]:
    """Name -> the first digits of the SHA-256 of each file in a bundle, or the target of a link."""
    found: dict[str, str] = {}
    left = MAX_BYTES
    with tarfile.open(fileobj=io.BytesIO(bytes(archive)), mode="r:gz") as tar:
        for member in tar:
            source = tar.extractfile(member) if member.isfile() else None
            if source is None:
                found[member.name] = f"-> {member.linkname}"
                continue
            left -= member.size
            if left < 0:
                raise ValueError("the archive is larger than a bundle may be")
            digest = hashlib.sha256(b"x" if member.mode & 0o100 else b"")
            while piece := source.read(_PIECE):
                digest.update(piece)
            found[member.name] = digest.hexdigest()[:16]
    return found
