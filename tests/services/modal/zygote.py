"""A warm process that forks one container for each request: it has imported `modal` and the app, which takes a second.

The peer sends the path of a JSON file and three descriptors over a Unix socket: stdout, stderr and the pipe for the
result. The child calls the deployed function as the runtime of Modal does: in its main thread, with `SIGUSR1` as the
cancellation of the input, and with the ids of the call in its context. It sends one tuple, as Modal serializes it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from modal._runtime.execution_context import _set_current_context_ids
from modal._serialization import deserialize_data_format, serialize
from modal.exception import InputCancellation


def main(path: str) -> None:
    """Fork a container for each request, until the peer closes the socket."""
    importlib.import_module("atoll.executors.modal.app")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.connect(path)
        while True:
            data, descriptors, _, _ = socket.recv_fds(link, 4096, 3)
            if not data:
                return
            pid = os.fork()
            if pid == 0:
                link.close()
                _contain(json.loads(Path(data.decode()).read_text()), *descriptors)
            for each in descriptors:
                os.close(each)
            link.send(str(pid).encode())


def _contain(request: dict[str, Any], out: int, err: int, result: int) -> NoReturn:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.environ.update(request["environment"])
    os.chdir("/")
    try:
        answer = _answer(request)
        with open(result, "wb") as pipe:
            pipe.write(serialize(answer))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _answer(request: dict[str, Any]) -> tuple[str, Any]:
    """(`returned`, value), (`raised`, exception), (`cancelled`, None) or (`interrupted`, None)."""

    def cancel(*_: Any) -> None:
        raise InputCancellation("Input was cancelled by user")

    try:
        signal.signal(signal.SIGUSR1, cancel)
        with open(request["input"], "rb") as file:
            args, kwargs = deserialize_data_format(file.read(), request["data_format"], None)
        module = importlib.import_module(request["module"])
        function = getattr(module, request["function"])
        _set_current_context_ids([request["input_id"]], [request["call_id"]], ["token"])
        return "returned", getattr(function, "local", function)(*args, **kwargs)
    except InputCancellation:
        return "cancelled", None
    except KeyboardInterrupt:
        return "interrupted", None
    except BaseException as exc:
        traceback.print_exc()
        return "raised", exc


if __name__ == "__main__":
    main(sys.argv[1])
