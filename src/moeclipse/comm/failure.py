"""When a rank fails, the others say so, in its words.

A collective that breaks on this rank is usually the symptom of another rank's death. The first rank
that fails publishes its message in the store; whoever's collective breaks afterwards looks there and
raises that message. When nobody failed and the deadline passed, every rank publishes where it stands,
and the ranks that stand elsewhere are named.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import torch.distributed as dist

from moeclipse.core.errors import CommError

GRACE_S = 2.0  # how long to wait for the culprit's own words after our collective broke


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Publishes this rank's failure and explains the failures of others."""

    store: dist.Store | None
    rank: int
    num_ranks: int
    deadline_s: float

    def publish(self, message: str) -> None:
        """Leave this rank's message for the others; only the first one counts."""
        if self.store is None:
            return
        try:
            if self.store.add("failure/count", 1) == 1:
                self.store.set("failure/first", json.dumps([self.rank, message]))
        except RuntimeError:
            pass  # the store died with its host; the launcher will end us

    def first_failure(self) -> tuple[int, str] | None:
        if self.store is None:
            return None
        try:
            if not self.store.check(["failure/first"]):
                return None
            rank, message = json.loads(self.store.get("failure/first"))
        except RuntimeError:
            return None
        return rank, message

    def explain(self, label: str, ranks: tuple[int, ...], error: Exception) -> CommError:
        """The error to raise when the collective `label` over `ranks` broke with `error`."""
        timed_out = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        if timed_out:
            return CommError(self._missing(label, ranks))
        until = time.monotonic() + GRACE_S
        while time.monotonic() < until:
            first = self.first_failure()
            if first is not None and first[0] != self.rank:
                return CommError(f"rank {first[0]} failed: {first[1]}")
            time.sleep(0.05)
        others = ", ".join(str(rank) for rank in ranks if rank != self.rank)
        return CommError(f"rank {self.rank} lost a peer in {label} (ranks {others} take part): {error}")

    def _missing(self, label: str, ranks: tuple[int, ...]) -> str:
        head = f"rank {self.rank} waited {self.deadline_s:g} s in {label}"
        if self.store is None:
            return head
        try:
            self.store.set(f"waiting/{self.rank}", label)
            until = time.monotonic() + GRACE_S
            places: dict[int, str] = {}
            while time.monotonic() < until and len(places) < len(ranks):
                for rank in ranks:
                    if rank not in places and self.store.check([f"waiting/{rank}"]):
                        places[rank] = self.store.get(f"waiting/{rank}").decode()
                time.sleep(0.05)
        except RuntimeError:
            return head
        absent = [f"rank {rank} did not arrive" for rank in ranks if rank not in places]
        elsewhere = [f"rank {rank} waits in {place}" for rank, place in places.items() if place != label]
        named = "; ".join(absent + elsewhere)
        return f"{head}: {named}" if named else f"{head}: all ranks arrived, so the network stalled"
