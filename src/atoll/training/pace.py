"""How far a replica is between two exchanges: optimizer steps, and what they weigh for each fragment."""

from __future__ import annotations

from typing import Any


class Pace:
    """Counts. A fragment's update weighs all that was trained since the fragment was exchanged last."""

    def __init__(self, fragments: int) -> None:
        self.since = 0
        """Optimizer steps since the last exchange began."""
        self.loose = 0
        """Optimizer steps since training was last at a boundary."""
        self.idle = 0
        """Boundaries in a row before which there was none."""
        self._weights = [0.0] * fragments
        self._steps = [0] * fragments
        self._taken = (0, 0, 0.0, 0)

    def count(self) -> None:
        """One optimizer step."""
        self.since += 1
        self.loose += 1

    def boundary(self, weight: float) -> None:
        """The end of a pass of the training loop, which weighs this much."""
        self._weights = [sum_ + weight for sum_ in self._weights]
        self._steps = [steps + self.loose for steps in self._steps]
        self.idle = 0 if self.loose else self.idle + 1
        self.loose = 0

    def weight(self, fragment: int) -> float:
        """What the update of a fragment counts in the mean: what was given, or else its optimizer steps."""
        return self._weights[fragment] or float(self._steps[fragment])

    def begin(self, fragment: int) -> None:
        """The exchange of a fragment begins."""
        self._taken = (fragment, self.since, self._weights[fragment], self._steps[fragment])
        self._weights[fragment], self._steps[fragment] = 0.0, 0
        self.since = 0

    def undo(self) -> None:
        """The exchange that began last came to nothing; it is due again."""
        fragment, since, weight, steps = self._taken
        self.since += since
        self._weights[fragment] += weight
        self._steps[fragment] += steps

    def forget(self, stride: int) -> None:
        """What was trained is lost. The next exchange is due when it would have been, but not at once."""
        self.since %= stride
        self._weights, self._steps = [0.0] * len(self._weights), [0] * len(self._steps)

    def restart(self) -> None:
        """Nothing was trained since the last exchange."""
        self.forget(1)

    def state_dict(self) -> dict[str, Any]:
        return {"since": self.since, "weights": self._weights, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.since, self.loose = state["since"], 0
        self._weights, self._steps = list(state["weights"]), list(state["steps"])
