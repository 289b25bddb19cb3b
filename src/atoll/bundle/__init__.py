"""The code bundle: how a working folder travels to the replicas, through the store.

The launcher calls `build` (which files, one archive, one sha256) and `upload`; a replica calls `fetch_and_unpack`.
The digest names the archive everywhere, so equal folders are sent once and a replica runs exactly what was packed.
Nothing heavy is imported until one of the three is called.
"""

from __future__ import annotations

from atoll.bundle.pack import MAX_BYTES, MAX_FILES, Bundle, Manifest, build, upload
from atoll.bundle.unpack import fetch_and_unpack

__all__ = ["MAX_BYTES", "MAX_FILES", "Bundle", "Manifest", "build", "fetch_and_unpack", "upload"]
