"""What the faults of all peers share: faults and actions on cue, and which requests they meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Lock
from typing import ClassVar

from atoll.testing.bench import Call, Fault


@dataclass
class Rule:
    """A fault or an action, and the requests that it meets."""

    operation: Call | str
    nth: int
    times: int | None
    after_effect: bool
    act: Callable[[str], None]
    name: str = ""
    """Only requests about something whose name has this part."""
    seen: int = 0

    def meets(self, operation: str, kind: Call | None, name: str) -> bool:
        if self.operation not in (operation, kind, "*") or self.name not in name:
            return False
        self.seen += 1
        return self.seen >= self.nth and (self.times is None or self.seen < self.nth + self.times)


class PeerFaults:
    """The `Faults` of the executor contract. A request is named as there, by its operation, or `*`."""

    calls: frozenset[Call] = frozenset(Call)
    kinds: ClassVar[Mapping[str, Call]]
    """Operation of the service -> the contract's name."""

    def __init__(self) -> None:
        self._rules: list[Rule] = []
        self._lock = Lock()
        self._healed = Event()

    def answer(self, operation: str, fault: Fault) -> Exception:
        """What the service answers instead, as an exception that its server turns into an answer."""
        raise NotImplementedError

    def fail(
        self, call: Call | str, fault: Fault, *, nth: int = 1, times: int | None = None, after_effect: bool = False
    ) -> None:
        def act(operation: str) -> None:
            if fault is Fault.SILENT:
                self._healed.wait(60)
            raise self.answer(operation, Fault.BROKEN if fault is Fault.SILENT else fault)

        self._add(Rule(call, nth, times, after_effect, act))

    def on(
        self,
        call: Call | str,
        act: Callable[[], None],
        *,
        nth: int = 1,
        times: int | None = 1,
        after_effect: bool = False,
        name: str = "",
    ) -> None:
        """Call `act` at such requests."""
        self._add(Rule(call, nth, times, after_effect, lambda _: act(), name))

    def raise_at(
        self,
        call: Call | str,
        error: Exception,
        *,
        nth: int = 1,
        times: int | None = None,
        after_effect: bool = False,
        name: str = "",
    ) -> None:
        """Answer such requests with this error, before the effect or in place of the answer."""

        def act(_: str) -> None:
            raise error

        self._add(Rule(call, nth, times, after_effect, act, name))

    def heal(self) -> None:
        with self._lock:
            self._rules.clear()
            self._healed.set()
            self._healed = Event()

    def met(self, operation: str, name: str = "") -> list[Rule]:
        """The rules that this request meets."""
        with self._lock:
            return [rule for rule in self._rules if rule.meets(operation, self.kinds.get(operation), name)]

    @contextmanager
    def around(self, operation: str, name: str = "") -> Iterator[None]:
        """Apply the rules that this request meets before its effect, or after it."""
        met = self.met(operation, name)
        for rule in met:
            if not rule.after_effect:
                rule.act(operation)
        yield
        for rule in met:
            if rule.after_effect:
                rule.act(operation)

    def _add(self, rule: Rule) -> None:
        with self._lock:
            self._rules.append(rule)
