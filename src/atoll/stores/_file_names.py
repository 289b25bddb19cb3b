"""How a key becomes a path under the root of a file store, and back.

Unlike a file system, a store may hold `a` and `a/b` at once. So the names of objects and the names of folders are two
sets that never meet: a name with a dot is an object, one without is a folder, and the odd ones out carry a mark
(`a` the object is `a~f`, `v1.2` the folder is `v1.2~d`). Usual keys, `exp/run.json`, stay as they are.
No key can name `..`, nor anything outside the root, nor the folder of unfinished files.
"""

from __future__ import annotations

from functools import lru_cache

from atoll.errors import BadKey
from atoll.stores.base import check_key

_FILE_MARK, _FOLDER_MARK = "~f", "~d"

TEMP_FOLDER = ".atoll-tmp~f"
"""Where unfinished files live. No key leads here: the object `.atoll-tmp` has a dot, so it never gets this mark."""


def path_of(root: str, key: str, *, is_folder: bool) -> str:
    """The path of an object, or of the folder that holds the keys below `key`."""
    above, _, last = key.rpartition("/")
    folder = _folder_of(root, above) if above else root
    return f"{folder}/{_folder_name(last) if is_folder else _file_name(last)}"


@lru_cache(maxsize=256)
def _folder_of(root: str, key: str) -> str:
    return "/".join((root, *map(_folder_name, key.split("/"))))


def key_of_file(name: str) -> str | None:
    """The last part of the key whose object has this file name, or None if no object has it."""
    part = name.removesuffix(_FILE_MARK)
    return part if _file_name(part) == name and _is_key(part) else None


def key_of_folder(name: str) -> str | None:
    """The part of a key that this folder stands for, or None if it is not one of ours."""
    part = name.removesuffix(_FOLDER_MARK)
    return part if _folder_name(part) == name and _is_key(part) else None


def _file_name(part: str) -> str:
    return part if "." in part and not _is_marked(part) else part + _FILE_MARK


def _folder_name(part: str) -> str:
    return part if "." not in part and not _is_marked(part) else part + _FOLDER_MARK


def _is_marked(part: str) -> bool:
    return part.endswith((_FILE_MARK, _FOLDER_MARK))


def _is_key(part: str) -> bool:
    """False for what other programs may have put here under names no key can have."""
    try:
        check_key(part)
    except BadKey:
        return False
    return True
