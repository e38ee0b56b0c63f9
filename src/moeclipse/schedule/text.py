"""Ops as text: what is printed of one can be read back.

an action       2F0   3SEND_F1   (0F7;7B3)   (2F0)        PAIR, and SELF as a pair of one
an op           2.1DISPATCH_F0#0/2                        stage 2, layer 1, microbatch 0, chunk 0 of 2
of an exchange  S_F@3#1/2~0                               step 3, chunk 1 of 2, local expert 0
"""

from __future__ import annotations

import re

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import KINDS
from moeclipse.schedule.op import Op, pair, self_overlap

KIND_PATTERN = "|".join(sorted(KINDS.keys() - {"PAIR", "SELF"}, key=len, reverse=True))
OP_PATTERN = re.compile(
    rf"(?P<stage>\d+)?(?:\.(?P<layer>\d+))?(?P<kind>{KIND_PATTERN})(?P<microbatch>\d+)?"
    r"(?:@(?P<step>\d+))?(?:#(?P<chunk>\d+)/(?P<chunks>\d+))?(?:~(?P<expert>\d+))?"
)
MAX_DIGITS = 18


def parse_op(text: str) -> Op:
    """The op a token names; whole actions get the memory they always have."""
    token = text.strip()
    if token.startswith("(") and token.endswith(")"):
        inner = [parse_op(part) for part in token[1:-1].split(";")]
        if len(inner) == 1:
            return self_overlap(inner[0])
        if len(inner) == 2:
            return pair(*inner)
        raise ScheduleError(f"{text!r} holds {len(inner)} actions; expected (F;B) or (F)")
    found = OP_PATTERN.fullmatch(token)
    if found is None:
        raise ScheduleError(
            f"cannot read {text[:80]!r} as an op; expected something like 2F0, (0F7;7B3) or 2.0MLP_F1#0/2"
        )
    texts = {name: value for name, value in found.groupdict().items() if name != "kind"}
    if any(len(value or "") > MAX_DIGITS for value in texts.values()):
        raise ScheduleError(
            f"cannot read {text[:40]!r}... as an op: a number has more than {MAX_DIGITS} digits"
        )
    number = {name: None if value is None else int(value) for name, value in texts.items()}
    kind = KINDS[found["kind"]]
    return Op(
        kind=kind,
        lane=kind.lane,
        stage=number["stage"],
        layer=number["layer"],
        microbatch=number["microbatch"],
        step=number["step"],
        chunk=number["chunk"],
        chunks=number["chunks"] or 1,
        expert=number["expert"],
        alloc=1.0 if kind is kinds.F else 0.0,
        free=1.0 if kind in (kinds.B, kinds.W) else 0.0,
    )
