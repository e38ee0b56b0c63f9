"""When a rank fails, the others say so, in its words.

A collective that breaks on this rank is usually the symptom of another rank's death. The first rank that
fails publishes its message in the store; whoever's collective breaks afterwards looks there and raises that
message. When nobody failed in words, the first rank that waited too long asks all others where they stand
(`watchdog` answers for those whose host is busy), follows who waits for whom (`culprits`), and publishes
that: all ranks end with the same cause.

Any process that reaches the store's port can write there. So ranks sign what they say with the run's secret
(`comm/start`), each word for its own key; what is not signed is no word of a rank: it is ignored, which is
told once, and gives way to one that is.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from moeclipse.comm.watch.culprits import Stand, all_wait, describe_cut, describe_wait, reached_from
from moeclipse.comm.watch.op_log import OpLog
from moeclipse.comm.watch.reach import unreachable
from moeclipse.core.errors import CommError, DeadlineError
from moeclipse.core.shown import say

FIRST = "failure/first"
GRACE_S = 2.0  # how long to wait for the culprit's own words after our collective broke
SIGN_S = 1.0  # how long the others have to say where they stand
TRIES = 10  # to take the place of words that are nobody's


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
    secret: bytes = b""
    """Of the run: ranks know it, and nobody else."""
    address: str = ""
    """By which others reach this rank; empty: nobody asks whether they do."""
    ignored: set[str] = field(default_factory=set)
    """Keys under which words stood that no rank had signed."""

    def publish(self, message: str) -> bool:
        """Leave this rank's message for the others; only the first one counts. Whether it was this one."""
        return self._publish(Cause(rank=self.rank, text=message))

    def first_cause(self) -> Cause | None:
        try:
            found = self.hear(FIRST)
            return Cause(**found) if isinstance(found, dict) else None
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
        return self.verdict(f"{head}: {self._why(stands)}", mine, stands)

    def _why(self, stands: Mapping[int, Stand]) -> str:
        if all_wait(self.rank, stands):
            others = {rank: stand.address for rank, stand in stands.items() if rank != self.rank}
            if cut_off := unreachable(others):
                return describe_cut(cut_off, stands)
        return describe_wait(self.rank, stands)

    def verdict(
        self, text: str, mine: Stand | None = None, stands: Mapping[int, Stand] | None = None
    ) -> CommError:
        """Publish why this rank waited in vain; the error is the first verdict, or an earlier cause."""
        waited = {} if mine is None else {**mine.record(), "stands": {}}
        if stands:
            waited["stands"] = {str(rank): stand.record() for rank, stand in sorted(stands.items())}
        cause = Cause(rank=self.rank, text=text, late=True, waited=waited)
        self._publish(cause)
        return self.told() or cause.error()

    def _publish(self, cause: Cause) -> bool:
        if self.store is None:
            return True
        try:
            mine = self._signed(FIRST, vars(cause))
            for _ in range(TRIES):
                found = bytes(self.store.compare_set(FIRST, "", mine))
                if found == mine.encode():
                    break
                if self._read(FIRST, found) is not None:
                    return False
                self.store.set(FIRST, "")  # nobody's words give way
            self.alarm()
        except RuntimeError:
            pass  # the store died with its host; the launcher will end us
        return True

    # signatures

    def _signed(self, key: str, value: object) -> str:
        text = json.dumps(value)
        return f"{self._signature(key, text.encode())} {text}"

    def _signature(self, key: str, text: bytes) -> str:
        return hmac.new(self.secret, key.encode() + b"\0" + text, hashlib.sha256).hexdigest()

    def _read(self, key: str, words: bytes) -> object:
        """What a rank said under this key; None where no rank did."""
        signature, _, text = words.partition(b" ")
        if not hmac.compare_digest(signature, self._signature(key, text).encode()):
            if key not in self.ignored:
                self.ignored.add(key)
                say(
                    f"rank {self.rank}: the run's store holds words ({key}) that no rank of this run has "
                    "signed; they are ignored. Another process on this network writes there",
                    error=True,
                )
            return None
        return json.loads(text)

    def say(self, key: str, value: object) -> None:
        """A word of this rank, for all."""
        if self.store is not None:
            self.store.set(key, self._signed(key, value))

    def hear(self, key: str) -> object:
        """What a rank said; None where none did."""
        if self.store is None or not self.store.check([key]):
            return None
        return self._read(key, bytes(self.store.get(key)))

    # signs

    def alarm(self) -> None:
        """Ask every rank for a sign."""
        if self.store is not None:
            with suppress(RuntimeError):
                self.store.set("alarm", self._signed("alarm", self.rank))

    def alarmed(self) -> bool:
        return self.hear("alarm") is not None

    def _waits(self, label: str, ranks: Sequence[int], lane: str = "", since_s: float = 0.0) -> Stand:
        host = socket.gethostname()
        return Stand(
            waits=True,
            op=label,
            ranks=tuple(ranks),
            host=host,
            address=self.address,
            lane=lane,
            since_s=since_s,
        )

    def sign(self, stand: Stand) -> None:
        """Tell the others where this rank stands."""
        if self.store is not None:
            with suppress(RuntimeError):
                key = f"waiting/{self.rank}"
                self.store.set(key, self._signed(key, stand.record()))

    def stands(self, ranks: Sequence[int]) -> dict[int, Stand]:
        """Where each rank that gave a sign stands; itself included."""
        places = {self.rank: Stand(waits=False)}
        with suppress(RuntimeError):
            for rank in ranks:
                found = self.hear(f"waiting/{rank}")
                if isinstance(found, dict):
                    places[rank] = Stand.read(found)
        return places
