"""All microbatches through a layer before the next: the order, that it is proved, and where updates stand."""

from __future__ import annotations

import pytest

from moeclipse.core.errors import ScheduleError
from moeclipse.cost.model import UNIT
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.launch import BucketShape, StepShape
from moeclipse.schedule.layer_by_layer import layer_by_layer
from moeclipse.schedule.shape import LayerShape
from moeclipse.schedule.templates import Expansion, expand
from moeclipse.sim.engine import simulate
from moeclipse.sim.measure import summarise


def test_the_order() -> None:
    program = layer_by_layer(1, 2, 3)
    assert [str(op) for op in program.ranks[0]] == [
        *("0F0", "0F1", "1F0", "1F1"),
        *("2F0", "2B0", "2F1", "2B1"),
        *("1B0", "1B1", "0B0", "0B1"),
    ]
    verify(program)


@pytest.mark.parametrize(("microbatches", "stages"), [(1, 1), (1, 5), (7, 1), (4, 6)])
def test_any_numbers_are_proved(microbatches: int, stages: int) -> None:
    """With what is kept at most, in stages of one microbatch, and without a bubble."""
    found = summarise(simulate(build("layers", 1, microbatches, stages), UNIT))
    assert found.peak == (microbatches * (stages - 1) + 1,)
    assert found.bubble == 0
    assert verify(build("layers", 1, microbatches, stages)).peak == found.peak


def test_several_ranks_are_refused() -> None:
    with pytest.raises(ScheduleError, match="layers needs one rank"):
        build("layers", 2, 4, 3)


def test_a_layer_is_updated_before_the_next_ones_gradients_begin() -> None:
    buckets = tuple(
        BucketShape(str(stage), "dense_grads", ((stage, 0),), host_bytes=1.0, layer=str(stage))
        for stage in reversed(range(4))
    )
    step = StepShape(buckets=(buckets,), slots=2, by_layer=True, loads=False)
    layers = [[LayerShape(recompute="full", head=stage == 3)] for stage in range(4)]
    program = expand(build("layers", 1, 3, 4), layers, Expansion(overlap="off", split="layer"), step=step)
    verify(program)
    found = [str(op) for op in program.ranks[0]]
    for number, stage in enumerate(reversed(range(1, 4))):
        update = found.index(f"0BUCKET_UPDATE@{number}")
        below = [at for at, name in enumerate(found) if name.startswith(f"{stage - 1}.0") and "_W" in name]
        assert update < min(below)
    assert sum(name.endswith("_W2") for name in found[: found.index("0BUCKET_UPDATE@0")]) > 0
