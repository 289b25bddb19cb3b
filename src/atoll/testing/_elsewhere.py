"""Use a store from other, real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

_READ = """
import json, sys
from atoll.registry import open_store
store = open_store(sys.argv[1])
print(json.dumps({key: bytes(store.get(key)).hex() for key in store.list()}))
"""

_WRITE = """
import sys
from atoll.registry import open_store
store = open_store(sys.argv[1])
store.put(sys.argv[2], bytes.fromhex(sys.argv[4]))
store.create(sys.argv[3], bytes.fromhex(sys.argv[4]))
"""

_RACE = """
import sys, threading
from atoll.errors import KeyExists
from atoll.registry import open_store
store, key, count = open_store(sys.argv[1]), sys.argv[2], int(sys.argv[4])
try:
    store.get("warm-up")
except FileNotFoundError:
    pass
gate = threading.Barrier(count + 1)
def write(i):
    mine = f"process {sys.argv[3]} writer {i}" * 100
    gate.wait()
    try:
        store.create(key, mine.encode())
    except KeyExists:
        return
    print(mine, flush=True)
threads = [threading.Thread(target=write, args=(i,)) for i in range(count)]
for thread in threads: thread.start()
print("ready", flush=True)
sys.stdin.readline()
gate.wait()
for thread in threads: thread.join()
"""


def read_elsewhere(uri: str, *, environment: Mapping[str, str]) -> dict[str, bytes]:
    """Every object of the store, as another process sees it."""
    answer = _finish(_start(_READ, [uri], environment))
    return {key: bytes.fromhex(value) for key, value in json.loads(answer).items()}


def write_elsewhere(uri: str, put: str, create: str, data: bytes, *, environment: Mapping[str, str]) -> None:
    """`put` one object and `create` another from another process."""
    _finish(_start(_WRITE, [uri, put, create, data.hex()], environment))


def race_of_processes(
    uri: str, key: str, *, processes: int, threads: int, environment: Mapping[str, str]
) -> list[bytes]:
    """Processes of several threads each `create` one key at the same moment; what the winners wrote."""
    racers = [_start(_RACE, [uri, key, str(i), str(threads)], environment) for i in range(processes)]
    try:
        for racer in racers:
            assert racer.stdout is not None
            racer.stdout.readline()
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        return [line.encode() for racer in racers for line in _finish(racer).splitlines()]
    finally:
        for racer in racers:
            racer.kill()


def _start(code: str, arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, f"the other process failed:\n{err}"
    return out
