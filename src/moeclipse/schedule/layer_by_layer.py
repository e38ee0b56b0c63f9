"""All microbatches of a step through one layer before the next: what is kept of a layer is needed once.

One rank, V stages (of one layer each, as a run lays them out), M microbatches:

    1  for each stage but the last: M x F
    2  the last stage, with the head: M x [F B], so that logits of one microbatch are there at a time
    3  for each stage but the last, backwards: M x B

Idea. Weights, gradients and optimizer state of a layer are used in one stretch of time in forward and in one
in backward, however many microbatches there are. So gradients of one layer are complete, and may be used and
forgotten, before those of the next begin (`optim.clip = "layer"`), and state that travels has all of backward
to do so, not the backward of the last microbatch alone.

Hazard: what layers keep of all microbatches is there at once, as in GPipe: it is meant for recompute, under
which that is their inputs.
"""

from __future__ import annotations

from moeclipse.schedule.legal import require_legal
from moeclipse.schedule.op import Op, Program, backward, forward, pipeline_program
from moeclipse.schedule.shape import StagePlacement


def layer_by_layer(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Program:
    require_legal("layers", num_ranks, num_microbatches, stages_per_rank)
    M, last = range(num_microbatches), stages_per_rank - 1
    ops: list[Op] = [forward(stage, m) for stage in range(last) for m in M]  # 1
    ops += [op for m in M for op in (forward(last, m), backward(last, m))]  # 2
    ops += [backward(stage, m) for stage in reversed(range(last)) for m in M]  # 3
    return pipeline_program("layers", [ops], StagePlacement.loop(1, stages_per_rank), num_microbatches)
