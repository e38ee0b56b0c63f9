"""What a run says of how its rows travel: one line, when that is chosen and has been seen for a few steps.

    exchange: 2 steps x 2 chunks: 31 % of communication hidden in 4 steps; 9.3 ms, blocking took 1.18 ...
    exchange: one go: 3 cuts were tried, none was faster

The first: all forward exchanges of a microbatch take 9.3 ms. Nothing is said where nothing was chosen: on one
rank, where the schedule is named with its cuts, in a run that goes on with what it had, and in one too short
for trials.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from moeclipse.moe.layer import MoE
from moeclipse.moe.tune.granularity import CutReport, against_blocking, cut_in_words
from moeclipse.train.observe.run_figures import StepRecord

SEEN_STEPS = 4
"""Steps with the chosen cut, before it is told what it hides."""


class ExchangeNote:
    """Of one run; asked after every step."""

    def __init__(self) -> None:
        self.told = False
        self._steps, self._hidden_ms, self._comm_ms = 0, 0.0, 0.0

    def after_step(self, layers: Sequence[MoE], record: StepRecord) -> list[str]:
        """The line, once; nothing before it is known and after it was told."""
        if self.told or not layers or not all(layer.schedule.cuts.has_chosen for layer in layers):
            return []
        self._steps += 1
        self._hidden_ms += record["hidden_ms"]
        self._comm_ms += record["comm_ms"]
        if self._steps < SEEN_STEPS:
            return []
        self.told = True
        hidden = self._hidden_ms / self._comm_ms if self._comm_ms > 0 else 0.0
        return in_words([layer.schedule.cuts.report() for layer in layers], hidden)


def in_words(reports: Sequence[CutReport], hidden: float) -> list[str]:
    """`reports` of all layers, and the share of communication that was hidden."""
    seen = [report for report in reports if report["measured_ms"] is not None]
    if not seen:
        return []
    cuts = Counter(cut_in_words(report["steps"], report["chunks"]) for report in seen)
    chosen = ", ".join(
        f"{cut} in {count} layers" if len(cuts) > 1 else cut for cut, count in cuts.most_common()
    )
    tried = max(report["tried"] for report in seen)
    if list(cuts) == [cut_in_words(1, 1)]:
        others = (
            f"{tried - 1} cuts were tried, none was faster"
            if tried > 1
            else "no cut is predicted to be faster"
        )
        return [f"exchange: {chosen}: {others}"]
    measured = sum(report["measured_ms"] or 0.0 for report in seen)
    predicted = sum(report["predicted_ms"] for report in seen)
    blocking = sum(report["blocking_ms"] for report in seen)
    against = against_blocking(seen) or f", predicted {predicted:.1f} ms, blocking {blocking:.1f} ms"
    share = f"{100 * hidden:.0f} % of communication hidden in {SEEN_STEPS} steps"
    return [f"exchange: {chosen}: {share}; {measured:.1f} ms{against}"]
