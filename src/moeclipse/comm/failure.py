"""When a rank fails, the others say so, in its words.

A collective that breaks on this rank is usually the symptom of another rank's death. The first rank that
fails publishes its message in the store; whoever's collective breaks afterwards looks there and raises that
message. When nobody failed in words, the first rank that waited too long asks all others where they stand
(`watchdog` answers for those whose host is busy), follows who waits for whom (`culprits`), and publishes
that: all ranks end with the same cause.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from moeclipse.comm.watch.culprits import Stand, describe_wait, reached_from
from moeclipse.comm.watch.op_log import OpLog
from moeclipse.core.errors import CommError, DeadlineError

GRACE_S = 2.0  # how long to wait for the culprit's own words after our collective broke
SIGN_S = 1.0  # how long the others have to say where they stand


@dataclass(frozen=True, kw_only=True)
class Cause:
    """What the first rank that failed left in the store."""

    rank: int
    text: str
    late: bool = False
    """It failed because it waited too long: its text names who is to blame."""
    waited: Mapping[str, Any] = field(default_factory=dict)
    """With `late`: the op, and where every rank stood that gave a sign."""

    def error(self) -> CommError:
        return DeadlineError(self.text) if self.late else CommError(f"rank {self.rank} failed: {self.text}")


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Publishes this rank's failure and explains the failures of others."""

    store: dist.Store | None
    rank: int
    num_ranks: int
    deadline_s: float
    log: OpLog = field(default_factory=OpLog)
    """What this rank launched last."""

    def publish(self, message: str) -> bool:
        """Leave this rank's message for the others; only the first one counts. Whether it was this one."""
        return self._publish(Cause(rank=self.rank, text=message))

    def first_failure(self) -> tuple[int, str] | None:
        cause = self.first_cause()
        return None if cause is None else (cause.rank, cause.text)

    def first_cause(self) -> Cause | None:
        if self.store is None:
            return None
        try:
            if not self.store.check(["failure/first"]):
                return None
            return Cause(**json.loads(self.store.get("failure/first")))
        except RuntimeError:
            return None

    def explain(self, label: str, ranks: tuple[int, ...], error: Exception, lane: str = "") -> CommError:
        """The error to raise when the collective `label` over `ranks` broke with `error`."""
        timed_out = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        if timed_out:
            return self.judge(label, ranks, lane=lane)
        until = time.monotonic() + GRACE_S
        self.sign(self._waits(label, ranks))
        while time.monotonic() < until:
            told = self.told()
            if told is not None:
                return told
            time.sleep(0.05)
        silent = [rank for rank in ranks if rank not in self.stands(ranks)]
        who = " and ".join(f"rank {rank}" for rank in silent) or "a peer"
        reason = str(error).split(" This is typically")[0]
        return CommError(f"rank {self.rank} lost {who} in {label}: {reason}")

    def told(self) -> CommError | None:
        """The error that another rank's words, or anybody's verdict, make of a broken collective."""
        cause = self.first_cause()
        return cause.error() if cause is not None and (cause.late or cause.rank != self.rank) else None

    def judge(self, label: str, ranks: Sequence[int], *, lane: str = "", waited_s: float = 0.0) -> CommError:
        """This rank waited too long in `label`: who is to blame? All ranks get the first answer."""
        waited_s = waited_s or self.deadline_s
        head = f"rank {self.rank} waited {waited_s:.4g} s in {label}"
        if self.store is None:
            return DeadlineError(head)
        told = self.told()
        if told is not None:
            return told
        mine = self._waits(label, ranks, lane=lane, since_s=waited_s)
        self.sign(mine)
        self.alarm()
        until = time.monotonic() + SIGN_S
        while True:
            stands = self.stands(range(self.num_ranks)) | {self.rank: mine}
            reached = reached_from(self.rank, stands)
            if time.monotonic() > until or all(rank in stands for rank in reached):
                break
            time.sleep(0.05)
        return self.verdict(f"{head}: {describe_wait(self.rank, stands)}", mine, stands)

    def verdict(
        self, text: str, mine: Stand | None = None, stands: Mapping[int, Stand] | None = None
    ) -> CommError:
        """Publish why this rank waited in vain; the error is the first verdict, or an earlier cause."""
        waited = {} if mine is None else {**mine.record(), "stands": {}}
        if stands:
            waited["stands"] = {str(rank): stand.record() for rank, stand in sorted(stands.items())}
        cause = Cause(rank=self.rank, text=text, late=True, waited=waited)
        mine_counts = self._publish(cause)
        until = time.monotonic() + SIGN_S
        # Who was first has said so and may not have written its words yet.
        while not mine_counts and self.first_cause() is None and time.monotonic() < until:
            time.sleep(0.01)
        return self.told() or cause.error()

    def _publish(self, cause: Cause) -> bool:
        if self.store is None:
            return True
        try:
            if self.store.add("failure/count", 1) > 1:
                return False
            self.store.set("failure/first", json.dumps(vars(cause)))
            self.alarm()
        except RuntimeError:
            pass  # the store died with its host; the launcher will end us
        return True

    # signs

    def alarm(self) -> None:
        """Ask every rank for a sign."""
        if self.store is not None:
            with suppress(RuntimeError):
                self.store.set("alarm", str(self.rank))

    def alarmed(self) -> bool:
        return self.store is not None and bool(self.store.check(["alarm"]))

    @staticmethod
    def _waits(label: str, ranks: Sequence[int], **more: Any) -> Stand:
        return Stand(waits=True, op=label, ranks=tuple(ranks), host=socket.gethostname(), **more)

    def sign(self, stand: Stand) -> None:
        """Tell the others where this rank stands."""
        if self.store is not None:
            with suppress(RuntimeError):
                self.store.set(f"waiting/{self.rank}", json.dumps(stand.record()))

    def stands(self, ranks: Sequence[int]) -> dict[int, Stand]:
        """Where each rank that gave a sign stands; itself included."""
        places = {self.rank: Stand(waits=False)}
        if self.store is not None:
            with suppress(RuntimeError):
                for rank in ranks:
                    if self.store.check([f"waiting/{rank}"]):
                        places[rank] = Stand.read(json.loads(self.store.get(f"waiting/{rank}")))
        return places
