"""Programs as text, without loss: what is printed can be read back, compared and kept in a file.

an op       2F0   3SEND_F1   (0F7;7B3)   (2F0)        PAIR, and SELF as a pair of one
            2.1DISPATCH_F0#0/2      stage 2, layer 1, microbatch 0, chunk 0 of 2
            S_F@3#1/2~0             step 3, chunk 1 of 2, local expert 0
a program   a line of header per shape and group (and `communicator GROUP NAME` where groups share one), then
            `rank 0` and one op per line with what is not implied by its kind:
            2.1MLP_F0 lane=compute deps=3,7 comm=ep0:4 peers=0,1 +0.45 -0.1
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from moeclipse.core.errors import ScheduleError
from moeclipse.core.outside import parse_json
from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import KINDS, TRANSFERS
from moeclipse.schedule.launch import BucketShape, HostedLaunch, StepShape
from moeclipse.schedule.op import Op, Program, pair, self_overlap
from moeclipse.schedule.shape import (
    Activation,
    ExchangeShape,
    LayerShape,
    PipelineShape,
    Shadow,
    StagePlacement,
)

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


def format_program(program: Program) -> str:
    """The whole program; `parse_program` gives it back."""
    return "\n".join(_lines(program)) + "\n"


def _lines(program: Program) -> Iterator[str]:
    yield f"program {json.dumps(program.name)}"
    word = "exchange" if isinstance(program.shape, ExchangeShape) else "pipeline"
    yield f"{word} {json.dumps(_shape_dict(program.shape), separators=(',', ':'))}"
    for group, members in program.groups.items():
        yield f"group {group} {','.join(map(str, members))}"
    for group, name in program.communicators.items():
        yield f"communicator {group} {name}"
    for rank, ops in enumerate(program.ranks):
        yield f"rank {rank}"
        for op in ops:
            yield _op_line(op)


def _op_line(op: Op) -> str:
    implied = parse_op(str(op))
    words = [str(op)]
    if op.lane != implied.lane:
        words.append(f"lane={op.lane}")
    if op.deps:
        words.append(f"deps={','.join(map(str, op.deps))}")
    if op.comm is not None:
        words.append(f"comm={op.comm[0]}:{op.comm[1]}")
    if op.peers:
        words.append(f"peers={','.join(map(str, op.peers))}")
    if op.alloc != implied.alloc:
        words.append(f"+{op.alloc!r}")
    if op.free != implied.free:
        words.append(f"-{op.free!r}")
    return " ".join(words)


def parse_program(text: str) -> Program:
    """Read what `format_program` wrote; errors name the line."""
    name, shape = "", None
    groups: dict[str, tuple[int, ...]] = {}
    communicators: dict[str, str] = {}
    ranks: list[list[Op]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        head, _, rest = line.strip().partition(" ")
        try:
            if head == "program":
                name = parse_json(rest)
            elif head in ("pipeline", "exchange"):
                shape = _shape_from(head, parse_json(rest))
            elif head == "group":
                group, _, members = rest.partition(" ")
                groups[group] = _numbers(members)
            elif head == "communicator":
                group, _, communicators[group] = rest.partition(" ")
            elif head == "rank":
                if int(rest) != len(ranks):
                    raise ScheduleError(f"rank {rest} follows rank {len(ranks) - 1}")
                ranks.append([])
            elif head:
                if not ranks:
                    raise ScheduleError("an op stands before the first `rank`")
                ranks[-1].append(_parse_line(line))
        except (ScheduleError, ValueError, TypeError, KeyError) as error:
            raise ScheduleError(f"line {number} ({line.strip()!r}): {error}") from None
    if shape is None:
        raise ScheduleError("the text has no line `pipeline {...}` or `exchange {...}`")
    return Program(
        name=name, ranks=tuple(map(tuple, ranks)), shape=shape, groups=groups, communicators=communicators
    )


def _parse_line(line: str) -> Op:
    token, *words = line.split()
    op = parse_op(token)
    change: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key == "lane":
            change["lane"] = value
        elif key in ("deps", "peers"):
            change[key] = _numbers(value)
        elif key == "comm":
            group, _, seq = value.rpartition(":")
            change["comm"] = (group, int(seq))
        elif word[0] in "+-":
            change["alloc" if word[0] == "+" else "free"] = float(word[1:])
        else:
            raise ScheduleError(f"unknown word {word!r}")
    if op.kind in TRANSFERS and "lane" not in change:
        raise ScheduleError("a transfer needs lane=p2p:source>destination")
    return op._replace(**change)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _shape_dict(shape: PipelineShape | ExchangeShape) -> dict[str, Any]:
    data = asdict(shape)
    if isinstance(shape, PipelineShape):
        for stage, layers in zip(data["layers"], shape.layers, strict=True):
            for layer, known in zip(stage, layers, strict=True):
                layer["launches"] = [[each.kind.name, each.host.name, *each[2:]] for each in known.launches]
    if isinstance(shape, PipelineShape) and len(set(shape.layers)) == 1:
        data["layers"] = [data["layers"][0]]  # the same list for every stage
    return data


def _shape_from(word: str, data: dict[str, Any]) -> PipelineShape | ExchangeShape:
    if word == "exchange":
        data["groups"] = tuple(map(tuple, data["groups"]))
        data["units"] = tuple((step, chunk) for step, chunk in data["units"])
        data["shadows"] = tuple(Shadow(**{**s, "ranks": tuple(s["ranks"])}) for s in data["shadows"])
        return ExchangeShape(**data)
    place = data["placement"]
    data["placement"] = StagePlacement(**{**place, "rank_of": tuple(place["rank_of"])})
    layers = tuple(tuple(map(_layer_from, stage)) for stage in data["layers"])
    if len(layers) == 1:
        layers *= data["placement"].num_stages
    return PipelineShape(**{**data, "layers": layers, "step": _step_from(data.get("step"))})


def _layer_from(data: dict[str, Any]) -> LayerShape:
    launches = (
        HostedLaunch(KINDS[kind], KINDS[host], *rest) for kind, host, *rest in data.get("launches", ())
    )
    activation = Activation(**data["activation"])
    return LayerShape(**{**data, "activation": activation, "launches": tuple(launches)})


def _step_from(data: dict[str, Any] | None) -> StepShape | None:
    if data is None:
        return None
    buckets = tuple(
        tuple(
            BucketShape(name, axis, tuple((stage, layer) for stage, layer in places), *rest)
            for name, axis, places, *rest in place
        )
        for place in data["buckets"]
    )
    return StepShape(**{**data, "buckets": buckets})
