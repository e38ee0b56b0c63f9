"""When a rank fails, the others say so, in its words.

A collective that breaks on this rank is usually the symptom of another rank's death. The first rank
that fails publishes its message in the store; whoever's collective breaks afterwards looks there and
raises that message. When nobody failed in words, every rank that is still there says where it stands, and
the ranks that stay silent, or stand elsewhere, are named.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
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
        self._sign(label)
        while time.monotonic() < until:
            first = self.first_failure()
            if first is not None and first[0] != self.rank:
                return CommError(f"rank {first[0]} failed: {first[1]}")
            time.sleep(0.05)
        silent = [rank for rank in ranks if rank not in self._signs(ranks)]
        who = " and ".join(f"rank {rank}" for rank in silent) or "a peer"
        reason = str(error).split(" This is typically")[0]
        return CommError(f"rank {self.rank} lost {who} in {label}: {reason}")

    def _sign(self, label: str) -> None:
        """Tell the others where this rank stands."""
        if self.store is not None:
            with suppress(RuntimeError):
                self.store.set(f"waiting/{self.rank}", label)

    def _signs(self, ranks: tuple[int, ...]) -> dict[int, str]:
        """Where each rank that gave a sign stands; itself included."""
        places = {self.rank: ""}
        if self.store is not None:
            with suppress(RuntimeError):
                for rank in ranks:
                    if self.store.check([f"waiting/{rank}"]):
                        places[rank] = self.store.get(f"waiting/{rank}").decode()
        return places

    def _missing(self, label: str, ranks: tuple[int, ...]) -> str:
        head = f"rank {self.rank} waited {self.deadline_s:g} s in {label}"
        if self.store is None:
            return head
        self._sign(label)
        until = time.monotonic() + GRACE_S
        places = self._signs(ranks)
        while time.monotonic() < until and len(places) < len(ranks):
            time.sleep(0.05)
            places = self._signs(ranks)
        places[self.rank] = label
        absent = [f"rank {rank} did not arrive" for rank in ranks if rank not in places]
        elsewhere = [f"rank {rank} waits in {place}" for rank, place in places.items() if place != label]
        named = "; ".join(absent + elsewhere)
        return f"{head}: {named}" if named else f"{head}: all ranks arrived, so the network stalled"
