"""Entry points that tests launch as replicas."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time


def echo(ctx, **args):
    print(f"rank {ctx.rank} of {ctx.world_size}")
    return {"rank": ctx.rank, "world_size": ctx.world_size, "attempt": ctx.attempt, "args": args}


def environment(names):
    return {name: os.environ.get(name) for name in names}


def fail(ctx):
    print("about to fail")
    raise ValueError("boom")


def exit_with(code):
    print("leaving")
    os._exit(code)


def sys_exit(code):
    sys.exit(code)


def kill_self(number=signal.SIGKILL):
    print("dying", flush=True)
    os.kill(os.getpid(), number)
    time.sleep(60)


def hang(ctx, *, stubborn=False, children=0, escape=False):
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(children):
        subprocess.Popen(["sleep", "600"], start_new_session=escape)
    ctx.log(ready=1.0)
    print("hanging", flush=True)
    time.sleep(600)


def leave_child_behind(escape=False):
    child = subprocess.Popen(["sleep", "600"], start_new_session=escape)
    return child.pid


def shout(megabytes):
    line = b"x" * 1023 + b"\n"
    block = line * 1024
    for _ in range(megabytes):
        sys.stdout.buffer.write(block)
    sys.stdout.flush()


def both_outputs():
    sys.stdout.buffer.write(b"\x00\xff binary\n")
    sys.stdout.flush()
    print("out 1")
    print("err 1", file=sys.stderr)
    print("out 2")
    print("err 2", file=sys.stderr)
    os.write(1, b"raw\n")
    print("no line end", end="")


def large(size):
    return "y" * size


def not_json():
    return {"model": object(), "best": {2, 1}}


def tokens(context=2048, lr=0.1):
    return [context, lr]


def equal_keys():
    return [{1: "number", "1": "text", None: 0}]


def fail_until(ctx, *, attempt):
    print(f"this is attempt {ctx.attempt}")
    if ctx.attempt < attempt:
        raise RuntimeError(f"attempt {ctx.attempt} fails")
    return ctx.attempt


def out_of_memory():
    raise MemoryError


def without_a_store():
    from atoll.errors import StoreUnavailable

    raise StoreUnavailable("the bucket does not answer", uri="s3://b", key="k")


def progress(ctx):
    ctx.log(round_no=3, loss=0.25)
    return ctx.rank


def count_start(ctx, *, folder):
    """Leaves one file for each process that ever ran."""
    with open(os.path.join(folder, f"{ctx.rank}.{os.getpid()}.{time.time_ns()}"), "w"):
        pass
    return ctx.rank


def count_start_and_hang(ctx, *, folder):
    count_start(ctx, folder=folder)
    time.sleep(600)
