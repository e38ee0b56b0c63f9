"""How many slots a rank has, where that is left to us: as many as may help and memory has room for.

Idea. One slot beyond its share of the experts lets a rank take part in evening out loads. More of them keep
rows at home: a rank that holds a copy of what its tokens want sends nothing, which is what wins most on a
slow wire (docs/measured.md#placement-steps). An empty slot costs memory alone, for weights and a gradient.
So a rank gets up to twice its share, as long as

    all spare slots take no more than PART of the memory that its fullest rank has left, and
    the table stays one that planners search through (`planner.SMALL`)

and never fewer than `balance.config.usual_slots`, which count where nothing is measured.

Contract: all ranks find the same number. It is kept in `choices.json` (`train/run/resolve_auto`): memory that
is left differs from run to run, and what planners do depends on slots. Runs that promise equal bits count the
memory of the host instead, and on devices have the usual slots.
"""

from __future__ import annotations

from moeclipse.balance.config import usual_slots
from moeclipse.balance.planner import SMALL
from moeclipse.comm.mesh import Mesh
from moeclipse.core.auto import Auto, Chosen
from moeclipse.model.count import expert_parameters
from moeclipse.moe.validate import expert_group
from moeclipse.train.config import TrainConfig
from moeclipse.train.optim.buckets import summed_type
from moeclipse.train.placement.may_move import why_experts_stay
from moeclipse.train.step.dtype import choose_dtype, repeats
from moeclipse.train.step.memory_bytes import memory_given, memory_left, readable

KEY = "placement.slots_per_rank"
PART = 0.1
SPARING = ("auto", "incremental", "exact")
"""Planners that leave slots empty where that is faster."""


def left_open(config: TrainConfig) -> bool:
    """Whether the number is left to us, and somebody plans who makes good use of it."""
    placement = config.placement
    sparing = placement.planner in SPARING and not placement.policy and not placement.slots
    return sparing and placement.slots_per_rank == "auto"


def choose_slots(config: TrainConfig, mesh: Mesh) -> Chosen:
    """Where experts may move. Collective."""
    num_ranks, num_experts = expert_group(mesh, config.moe).size, config.moe.num_experts
    if not left_open(config) or why_experts_stay(config, num_ranks) is not None:
        return {}, []
    room_of = memory_given if repeats(config.run.deterministic, mesh.device) else memory_left
    room = min(mesh.gather_objects(room_of(mesh)))
    size = slot_bytes(config, mesh)
    slots = slots_for(num_experts, num_ranks, int(PART * room / size))
    share = -(-num_experts // num_ranks)
    more = f"{slots - share} slots to spare on each rank and layer, {readable((slots - share) * size)}"
    return {KEY: slots}, [f"placement: {more}"]


def slots_for(num_experts: int, num_ranks: int, affordable: int) -> int:
    """Of each rank, where there is memory for so many spare ones."""
    share, usual = -(-num_experts // num_ranks), usual_slots(num_experts, num_ranks)
    more = range(usual + 1, min(2 * share, SMALL // num_ranks, num_experts) + 1)
    fits = Auto(costs={slots: -slots for slots in more}, plain=usual, wins=lambda n: n <= share + affordable)
    return fits.choice


def slot_bytes(config: TrainConfig, mesh: Mesh) -> int:
    """Of one slot in each layer of a rank: weights, and a gradient that is added up."""
    width = expert_parameters(config.model.d_model, config.moe, config.moe.d_ff)
    if config.moe.expert_tp == "sharded":
        width = -(-width // mesh.tp)
    held = choose_dtype(config.model.dtype, mesh.device)
    summed = summed_type(config.optim.main_grad, held)
    return -(-config.num_expert_layers // mesh.pp) * width * (held.itemsize + summed.itemsize)
