"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import dualpipe, interleaved, layer_by_layer, one_f_one_b, zero_bubble
from moeclipse.schedule.legal import SCHEDULES, default_stages_per_rank, require_legal
from moeclipse.schedule.op import Program

ONE_STAGE: dict[str, Callable[[int, int], Program]] = {
    "gpipe": one_f_one_b.gpipe,
    "1f1b": one_f_one_b.one_f_one_b,
    "1f1b-pairs": one_f_one_b.one_f_one_b_pairs,
    "pp1": one_f_one_b.microbatch_pairs,
    "zb-h1": zero_bubble.zb_h1,
}
MANY_STAGES: dict[str, Callable[[int, int, int], Program]] = {
    "vpp": interleaved.interleaved,
    "vpp+1": interleaved.interleaved_pairs,
    "zb-v": zero_bubble.zb_v,
    "dualpipe": dualpipe.dualpipe,
    "dualpipev": dualpipe.dualpipev,
    "layers": layer_by_layer.layer_by_layer,
}


def build(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None) -> Program:
    """The program of the named schedule; illegal settings raise with the nearest legal ones."""
    if name not in SCHEDULES:
        close = get_close_matches(name, SCHEDULES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ScheduleError(f"unknown schedule {name!r}; {hint}choose one of {', '.join(SCHEDULES)}")
    V = default_stages_per_rank(name) if stages_per_rank is None else stages_per_rank
    require_legal(name, num_ranks, num_microbatches, V)
    if name in ONE_STAGE:
        return ONE_STAGE[name](num_ranks, num_microbatches)
    return MANY_STAGES[name](num_ranks, num_microbatches, V)
