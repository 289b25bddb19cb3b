"""Which RPCs the contract's calls are here, and what the service answers instead."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from grpclib import GRPCError, Status

from atoll.testing.bench import Call, Fault
from services.peer_faults import PeerFaults, Rule

CALLS = {
    "FunctionMap": Call.CREATE,
    "FunctionGetCallGraph": Call.DESCRIBE,
    "FunctionGetOutputs": Call.DESCRIBE,
    "FunctionCallCancel": Call.STOP,
    "FunctionCallFromId": Call.LOG,
    "FunctionCallGetInfo": Call.LOG,
    "AppCountLogs": Call.LOG,
    "AppFetchLogs": Call.LOG,
}
ANSWERS = {
    Fault.UNAUTHORIZED: (Status.UNAUTHENTICATED, "Token missing. Could not authenticate client."),
    Fault.FORBIDDEN: (Status.PERMISSION_DENIED, "This token may not do this."),
    Fault.NOT_FOUND: (Status.NOT_FOUND, "No such object."),
    Fault.CONFLICT: (Status.ALREADY_EXISTS, "It exists already."),
    Fault.THROTTLED: (Status.RESOURCE_EXHAUSTED, "Rate limit exceeded."),
    Fault.BROKEN: (Status.INTERNAL, "Internal error."),
}


class Faults(PeerFaults):
    """Faults of this service, by its RPCs."""

    kinds = CALLS

    def __init__(self) -> None:
        super().__init__()
        self._pool = ThreadPoolExecutor(32, "peer-fault")

    def answer(self, operation: str, fault: Fault) -> Exception:
        return GRPCError(*ANSWERS[fault])

    async def act(self, rules: list[Rule], rpc: str, *, after_effect: bool) -> None:
        """Let the rules act, in a thread: what they do may take long, or send requests to this peer."""
        for rule in rules:
            if rule.after_effect == after_effect:
                await asyncio.get_running_loop().run_in_executor(self._pool, rule.act, rpc)

    def close(self) -> None:
        self.heal()
        self._pool.shutdown(wait=False, cancel_futures=True)
