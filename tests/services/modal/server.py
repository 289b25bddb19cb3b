"""The peer on a socket: the RPCs of Modal's client that Atoll needs, over plaintext HTTP/2, served with grpclib.

Point the real client at it with MODAL_SERVER_URL; `environment()` has all it takes. An RPC that it does not have fails
with UNIMPLEMENTED and its name, which `unknown` keeps. A repeated idempotency key of a spawn gets the first answer
again, and no fault, unless `honours_keys` is false. What it does not model: images (the container's Python is this
one), GPUs, CPU and memory limits, volumes, regions, container reuse between calls, the delay of logs, billing, and rate
limits that it was not told to have. Containers are interrupted with SIGINT and killed 30 s later, as the client's own
simulation of a preemption does; how the real service ends a container on `terminate_containers` was not seen.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from threading import Event, Thread
from typing import Any

from grpclib import GRPCError, Status
from grpclib.protocol import H2Protocol
from grpclib.server import Server, Stream
from modal_proto import api_grpc

from services.modal.blobs import Blobs
from services.modal.call import Zygote
from services.modal.engine import Engine
from services.modal.faults import Faults
from services.modal.rpcs import Rpcs

APP, FUNCTION, MODULE = "atoll", "replica", "atoll.executors.modal.app"
TOKEN = ("ak-peer", "as-peer")


class _Server(Server):
    """Keeps its connections, so that it can cut them."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._protocols: list[H2Protocol] = []

    def _protocol_factory(self) -> H2Protocol:
        self._protocols.append(super()._protocol_factory())
        return self._protocols[-1]

    def cut(self) -> None:
        for protocol in self._protocols:
            if hasattr(protocol, "connection"):
                protocol.connection.close()


class Peer:
    """Serves on a free port of this machine until `close`. The app of Atoll is deployed."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.calls: Counter[str] = Counter()
        """RPC -> how often it was called."""
        self.unknown: list[str] = []
        """RPCs that a client asked for and that the peer does not have."""
        self.honours_keys = True
        """Whether a request with a known idempotency key gets the first answer again."""
        self.graph: str | None = None
        """`empty`, `late`, `truncated` or `refused`: the call graph does not have the calls, shows every call as
        pending, has inputs without their calls, or is not found."""
        self.pipelines = True
        """Whether a new call has its input at once; otherwise the client sends it with a request of its own."""
        self.refused_inputs = 0
        """How many such requests find the queue full."""
        self.blobs = Blobs()
        self.zygote = Zygote()
        self.engine = self._new_engine()
        self._answers: dict[str, Any] = {}
        self._loop = asyncio.new_event_loop()
        self._ready = Event()
        self._thread = Thread(target=self._serve, daemon=True, name="peer-grpc")
        self._thread.start()
        self._ready.wait(30)
        self.endpoint = f"http://127.0.0.1:{self._port}"

    def environment(self) -> dict[str, str]:
        return {
            "MODAL_SERVER_URL": self.endpoint,
            "MODAL_TOKEN_ID": TOKEN[0],
            "MODAL_TOKEN_SECRET": TOKEN[1],
            "MODAL_CONFIG_PATH": "/dev/null",
            "MODAL_ENVIRONMENT": "main",
        }

    def reset(self) -> None:
        """As new: nothing runs, nothing fails, and the app is deployed."""
        self.faults.heal()
        self.engine.close()
        self.engine = self._new_engine()
        self.honours_keys, self.graph = True, None
        self.pipelines, self.refused_inputs = True, 0
        self.calls.clear()
        self.unknown.clear()
        self._answers.clear()

    def close(self) -> None:
        self.faults.close()
        self.engine.close()
        self.zygote.close()
        self.blobs.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _new_engine(self) -> Engine:
        engine = Engine(self.zygote)
        engine.deploy(APP, FUNCTION, MODULE)
        return engine

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = _Server([self._service()])

        async def start() -> None:
            await server.start("127.0.0.1", 0)
            assert server._server is not None
            self._port = server._server.sockets[0].getsockname()[1]
            self._ready.set()

        self._loop.run_until_complete(start())
        self._loop.run_forever()
        server.close()
        self._loop.run_until_complete(server.wait_closed())
        server.cut()
        self._loop.run_until_complete(asyncio.sleep(0.1))  # transports close in the next steps of the loop
        self._loop.close()

    def _service(self) -> Any:
        """The service with every RPC of the protocol: those of `Rpcs`, and a refusal for each other one."""
        names = api_grpc.ModalClientBase.__abstractmethods__
        methods = {name: self._handler(name) for name in names}
        return type("PeerService", (api_grpc.ModalClientBase,), methods)()

    def _handler(self, name: str) -> Callable[[Any, Stream[Any, Any]], Any]:
        async def handle(_: Any, stream: Stream[Any, Any]) -> None:
            self.calls[name] += 1
            answer = getattr(Rpcs(self), name, None)
            if answer is None:
                self.unknown.append(name)
                raise GRPCError(Status.UNIMPLEMENTED, f"the peer of the tests has no RPC {name}")
            request = await stream.recv_message()
            metadata = stream.metadata or {}
            if (metadata.get("x-modal-token-id"), metadata.get("x-modal-token-secret")) != TOKEN:
                raise GRPCError(Status.UNAUTHENTICATED, "Token ID is malformed")
            if hasattr(answer, "streams"):
                await answer(request, stream)
                return
            key = f"{name}/{metadata.get('x-idempotency-key')}"
            if key in self._answers and self.honours_keys:
                await stream.send_message(self._answers[key])
                return
            met = self.faults.met(name, getattr(request, "function_call_id", ""))
            await self.faults.act(met, name, after_effect=False)
            response = await answer(request)
            if "x-idempotency-key" in metadata and name == "FunctionMap":
                self._answers[key] = response
            await self.faults.act(met, name, after_effect=True)
            await stream.send_message(response)

        return handle
