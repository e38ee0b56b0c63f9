"""Gradients that lie in the host's memory between backward and an update under the next step's forward.

    GRAD_STORE k   the gradient of bucket k, behind its reduction           lane host:store
    GRAD_FETCH k   back to where it was, behind the update of the bucket    lane host:fetch
                   whose gradient lies there now

Idea. The norm of all gradients is known behind the last of them, so all wait for it. But a layer's are read
once more only, by its update: layers take few buffers in turn (`train/optim/buckets`), and what another layer
needs the memory for lies on the host meanwhile. The last layers of backward keep theirs where they are: they
are updated first, and each makes room for the next ones, in the order in which forward comes to them.

    memory    is written by a layer's backward behind the store of what lay there
              is filled by a fetch behind the update that read what lay there

Contract: pure functions of buckets, so that the verifier finds all of it again in any list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import Form
from moeclipse.schedule.launch import BucketShape
from moeclipse.schedule.op import Op


def leaves(buckets: Sequence[BucketShape], number: int) -> bool:
    """Whether the gradient of this bucket makes room for another one."""
    return any(bucket.turn == number for bucket in buckets)


def makes_room_for(buckets: Sequence[BucketShape], number: int) -> int | None:
    """Whose gradient comes back to its memory, once bucket `number` is updated."""
    before = buckets[number].turn
    return None if before < 0 else before


def left_before(buckets: Sequence[BucketShape], op: Op) -> list[int]:
    """Buckets whose gradients must be on the host before this op of a layer writes its own."""
    if op.kind.form not in (Form.B, Form.W) or op.layer is None or op.kind.lane != kinds.COMPUTE:
        return []
    place = (op.stage, op.layer)
    return [bucket.turn for bucket in buckets if bucket.turn >= 0 and place in bucket.places]


def turns_of(keys: Iterable[object], slots: int) -> list[int]:
    """Of buckets in the order of backward, whose gradient lay in the same memory before; below 0: nobody's.

    `keys`: equal ones share `slots` buffers; None: shares with nobody.
    """
    seen: dict[object, list[int]] = {}
    found = []
    for number, key in enumerate(keys):
        earlier = seen.setdefault(key, [])
        found.append(earlier[-slots] if key is not None and len(earlier) >= slots else -1)
        earlier.append(number)
    return found
