"""Whether tokens visit as many experts as `gate.mean_experts` asks for.

A controller moves the limit of each layer (`moe/gate/dynamic_gates`), and there are gates that no limit
helps: one that is sure of its first expert to the last bit leaves nothing for the others to be chosen by.
Then the mean stays off, and whoever reads it in the metrics would have to know what it should be. So it is
said, once.

Contract: a pure function of the records of a run, the same on every rank.
"""

from __future__ import annotations

SETTLED = 100
"""Steps that a controller may take to get there, and about as many that then count in the mean."""
OFF = 0.05
"""Of the goal: a controller that works is nearer."""


class ExpertsHeld:
    """The mean of experts that a token visits, by layer, over about the last `SETTLED` steps."""

    def __init__(self, goal: float) -> None:
        self.goal, self.steps, self.told = goal, 0, False
        self.means: list[float] = []

    def after_step(self, load: list[list[int]], num_tokens: int) -> list[str]:
        """What is to be said after a step that moved limits; `load`: rows by layer and expert."""
        self.steps += bool(self.goal)
        if self.steps <= SETTLED:
            return []
        now = [sum(load_E) / num_tokens for load_E in load]
        weight, before = 1 / min(self.steps - SETTLED, SETTLED), self.means or now
        self.means = [mean + weight * (new - mean) for mean, new in zip(before, now, strict=True)]
        if self.told or self.steps < 2 * SETTLED:
            return []
        off = [f"{i} ({mean:.2f})" for i, mean in enumerate(self.means) if abs(mean / self.goal - 1) > OFF]
        if not off:
            return []
        self.told = True
        return [
            f"gate.mean_experts ({self.goal:g}) is out of reach in layers with experts {', '.join(off)}: no "
            "limit on probabilities makes tokens visit so many on average; choose a goal nearer to these, or "
            "make gates less sure (gate.z_loss)"
        ]
