"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import dualpipe, interleaved, layer_by_layer, one_f_one_b, zero_bubble
from moeclipse.schedule.budget import zb_m
from moeclipse.schedule.legal import SCHEDULES, default_stages_per_rank, require_legal
from moeclipse.schedule.op import Program

ONE_STAGE: dict[str, Callable[[int, int], Program]] = {
    "gpipe": one_f_one_b.gpipe,
    "1f1b": one_f_one_b.one_f_one_b,
    "1f1b-pairs": one_f_one_b.one_f_one_b_pairs,
    "pp1": one_f_one_b.microbatch_pairs,
    "zb-h1": zero_bubble.zb_h1,
    "zb-h2": zero_bubble.zb_h2,
}
IN_GROUPS: dict[str, Callable[[int, int, int, int], Program]] = {
    "vpp": interleaved.interleaved,
    "vpp+1": interleaved.interleaved_pairs,
}
MANY_STAGES: dict[str, Callable[[int, int, int], Program]] = {
    "zb-v": zero_bubble.zb_v,
    "dualpipe": dualpipe.dualpipe,
    "dualpipev": dualpipe.dualpipev,
    "layers": layer_by_layer.layer_by_layer,
}


def build(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    *,
    group_size: int = 0,
    budget: int = 0,
) -> Program:
    """The program of the named schedule; illegal settings raise with the nearest legal ones.

    `group_size`: of vpp and vpp+1, microbatches that pass a stage before the rank's next one begins.
    `budget`: of zb-m, microbatches that a rank may hold. 0: the usual ones.
    """
    if name not in SCHEDULES:
        close = get_close_matches(name, SCHEDULES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ScheduleError(f"unknown schedule {name!r}; {hint}choose one of {', '.join(SCHEDULES)}")
    if group_size and name not in IN_GROUPS:
        raise ScheduleError(f"{name} has no groups of microbatches; a group size is for vpp and vpp+1")
    if budget and name != "zb-m":
        raise ScheduleError(f"{name} has no budget of activations; that is for zb-m")
    V = default_stages_per_rank(name) if stages_per_rank is None else stages_per_rank
    require_legal(name, num_ranks, num_microbatches, V)
    if name == "zb-m":
        return zb_m(num_ranks, num_microbatches, budget, stages_per_rank=V)
    if name in IN_GROUPS:
        return IN_GROUPS[name](num_ranks, num_microbatches, V, group_size)
    if name in ONE_STAGE:
        return ONE_STAGE[name](num_ranks, num_microbatches)
    return MANY_STAGES[name](num_ranks, num_microbatches, V)
