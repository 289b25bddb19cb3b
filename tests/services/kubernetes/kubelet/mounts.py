"""Runs as a script: mounts folders where only this process and its children see them, then becomes the command.

A mount point need not exist on this machine. The nearest folder above it that does exist is replaced, in this
process's view, by a temporary one that holds the same entries and the mount point. With a host name the process is on a
host of that name. Without the rights of root the script makes a user namespace first.
"""

import ctypes
import json
import os
import socket
import sys

_NEW_MOUNTS, _NEW_NAMES, _NEW_USERS = 0x00020000, 0x04000000, 0x10000000
_BIND, _RECURSIVE, _PRIVATE, _REMOUNT, _READ_ONLY = 4096, 16384, 1 << 18, 32, 1
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    spec = json.loads(sys.argv[1])
    os.set_inheritable(spec["problem"], False)
    try:
        _leave_the_namespaces_of_the_parent(_NEW_MOUNTS | (_NEW_NAMES if spec["hostname"] else 0))
        if spec["hostname"]:
            socket.sethostname(spec["hostname"])
        root = ""
        for source, target, is_read_only in spec["mounts"]:
            root = _make_mount_point(root, target, spec["root"], os.path.isdir(source))
            _mount(source, root + target, _BIND | _RECURSIVE)
            if is_read_only:
                _mount(None, root + target, _BIND | _REMOUNT | _READ_ONLY)
        if root:
            folder = os.getcwd()
            os.chroot(root)
            os.chdir(folder)
        os.execvp(spec["command"][0], spec["command"])
    except OSError as exc:
        os.write(spec["problem"], f"{exc.strerror}: {exc.filename or spec['command'][0]}".encode())
        sys.exit(128)


def _leave_the_namespaces_of_the_parent(flags: int) -> None:
    user, group = os.getuid(), os.getgid()
    if _libc.unshare(flags) != 0:
        _check(_libc.unshare(flags | _NEW_USERS), "a new user namespace")
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _mount(None, "/", _RECURSIVE | _PRIVATE)


def _make_mount_point(root: str, target: str, spare: str, is_folder: bool) -> str:
    """Make the target exist. Returns the root under which it does: a new one if an entry of `/` is missing."""
    if os.path.exists(root + target):
        return root
    parent = os.path.dirname(target)
    while not os.path.isdir(root + parent):
        parent = os.path.dirname(parent)
    if parent not in _copied:
        _copied.add(parent)
        root = _copy(root, parent, f"{spare}/{parent.replace('/', '_')}")
    place = root + target
    os.makedirs(place if is_folder else os.path.dirname(place), exist_ok=True)
    if not is_folder:
        open(place, "w").close()
    return root


_copied: "set[str]" = set()


def _copy(root: str, parent: str, copy: str) -> str:
    """Put a temporary folder with the same entries in the place of a folder; returns the root."""
    os.makedirs(copy, exist_ok=True)
    _mount("tmpfs", copy, 0, kind="tmpfs")
    for entry in os.scandir(root + parent):
        _repeat(entry, f"{copy}/{entry.name}")
    if parent == "/":
        return copy
    _mount(copy, root + parent, _BIND | _RECURSIVE)
    return root


def _repeat(entry: "os.DirEntry[str]", place: str) -> None:
    if entry.is_symlink():
        os.symlink(os.readlink(entry.path), place)
    elif entry.is_dir():
        os.mkdir(place)
        _mount(entry.path, place, _BIND | _RECURSIVE)
    else:
        open(place, "w").close()
        _mount(entry.path, place, _BIND)


def _mount(source: "str | None", target: str, flags: int, *, kind: "str | None" = None) -> None:
    encoded = [text.encode() if text is not None else None for text in (source, target, kind)]
    _check(_libc.mount(*encoded, ctypes.c_ulong(flags), None), target)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


main()
