"""Replicas in virtual time: every request takes a trip to the store, and each replica's network moves so much a second.

The protocol is the real one, request by request; only its driver is replaced. Uploads of one replica share its uplink
and downloads its downlink, one after the other; what is uploaded is there for others once the last byte has arrived.
Computing takes no time.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator
from typing import Any

from atoll.rounds.io import Create, Discard, Gather, Get, Op, Open, Put, Read, Request, Sleep, answer
from atoll.stores.base import pieces
from atoll.stores.memory import MemoryStore


class Emulator:
    """A store, a clock that jumps from one event to the next, and the replicas that run on it."""

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self.store, self.now = MemoryStore(), 0.0
        self._latency_s, self._bytes_per_s = latency_s, bytes_per_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._free: dict[tuple[str, str], float] = {}

    # ---- a clock

    def time(self) -> float:
        return 1_700_000_000.0 + self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        raise AssertionError("protocols sleep by asking for it")

    # ---- running

    def run(self, replicas: dict[str, Generator[Op, Any, Any]]) -> dict[str, Any]:
        """Every replica to its end; what each returned."""
        results: dict[str, Any] = {}
        errors: list[BaseException] = []

        def ended(name: str) -> Callable[[Any, BaseException | None], None]:
            def end(value: Any, error: BaseException | None) -> None:
                results[name] = value
                if error is not None:
                    errors.append(error)

            return end

        for name, steps in replicas.items():
            self._go(name, steps, ended(name), lambda steps=steps: next(steps))
        while self._events and not errors:
            self.now, _, action = heapq.heappop(self._events)
            action()
        if errors:
            raise errors[0]
        assert set(results) == set(replicas), "some never came to an end"
        return results

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), action))

    def _go(self, name: str, steps: Any, end: Callable[[Any, BaseException | None], None], resume: Any) -> None:
        try:
            op = resume()
        except StopIteration as over:
            end(over.value, None)
            return
        except BaseException as exc:
            end(None, exc)
            return

        def reply(value: Any, error: BaseException | None) -> None:
            again = (lambda: steps.send(value)) if error is None else (lambda: steps.throw(error))
            self._go(name, steps, end, again)

        if isinstance(op, Sleep | Discard):  # this store recycles nothing, so discarding asks it for nothing
            self._at(self.now + (op.seconds if isinstance(op, Sleep) else 0.0), lambda: reply(None, None))
        elif isinstance(op, Gather):
            self._gather(name, op, reply)
        else:
            self._request(name, op, reply)

    def _gather(self, name: str, op: Gather, reply: Callable[[Any, BaseException | None], None]) -> None:
        values: list[Any] = [None] * len(op.children)
        waiting = iter(enumerate(op.children))
        failed: list[BaseException] = []
        open_children = 0

        def start() -> None:
            nonlocal open_children
            while open_children < op.width and not failed:
                following = next(waiting, None)
                if following is None:
                    break
                open_children += 1
                number, child = following
                self._at(self.now, lambda n=number, c=child: self._go(name, c, child_ended(n), lambda: next(c)))
            if open_children == 0:
                reply(values, failed[0] if failed else None)

        def child_ended(number: int) -> Callable[[Any, BaseException | None], None]:
            def end(value: Any, error: BaseException | None) -> None:
                nonlocal open_children
                open_children -= 1
                values[number] = value
                if error is not None:
                    failed.append(error)
                start()

            return end

        start()

    def _request(self, name: str, op: Request, reply: Callable[[Any, BaseException | None], None]) -> None:
        sent = self.now
        if isinstance(op, Put | Create):
            sent = self._through(name, "up", self.now, sum(part.nbytes for part in pieces(op.data)))

        def arrive() -> None:
            try:
                value, error = answer(self.store, op), None
            except Exception as exc:
                value, error = None, exc
            back = self.now
            if isinstance(op, Get | Open) and error is None:
                size = value.size if isinstance(op, Open) else memoryview(value).nbytes
                back = self._through(name, "down", self.now, size)
            self._at(back, lambda: reply(value, error))

        # The bytes that a `Read` takes have come with the answer to the `Open`.
        self._at(sent + (0.0 if isinstance(op, Read) else self._latency_s), arrive)

    def _through(self, name: str, way: str, ready: float, amount: int) -> float:
        """When the last byte is through the replica's network."""
        done = max(ready, self._free.get((name, way), 0.0)) + amount / self._bytes_per_s
        self._free[name, way] = done
        return done
