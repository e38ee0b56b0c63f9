"""What a program must add up to: where stages live, what a layer holds, who exchanges rows with whom.

A shape carries no order. Generators read it to know what to place, the verifier reads it to know what
has to be there, the executor reads it to find its peers. Stages are numbered along the model, so
stage s feeds stage s + 1, except at the end of a chain (two chains run in opposite directions in
DualPipe, which is why a stage index alone never names a rank).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, islice
from typing import Literal

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule.kinds import Kind, Part
from moeclipse.schedule.launch import HostedLaunch, StepShape

Recompute = Literal["off", "attn", "mlp", "moe", "full"]
RECOMPUTED: dict[str, tuple[Part, ...]] = {
    "off": (),
    "attn": (Part.ATTN,),
    "mlp": (Part.SHARED, Part.MLP),
    "moe": (Part.ROUTE, Part.DISPATCH, Part.SHARED, Part.MLP),
    "full": (Part.ATTN, Part.ROUTE, Part.DISPATCH, Part.SHARED, Part.MLP),
}
"""Recomputed parts of a layer; `mlp` keeps the dispatched rows, `moe` sends them again."""


@dataclass(frozen=True, kw_only=True)
class StagePlacement:
    """rank_of[stage]; the stages form `num_chains` chains of equal length."""

    num_ranks: int
    rank_of: tuple[int, ...]
    num_chains: int = 1

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)

    @property
    def stages_per_chain(self) -> int:
        return len(self.rank_of) // self.num_chains

    def next_stage(self, stage: int) -> int | None:
        return stage + 1 if (stage + 1) % self.stages_per_chain else None

    def previous_stage(self, stage: int) -> int | None:
        return stage - 1 if stage % self.stages_per_chain else None

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

    @staticmethod
    def loop(num_ranks: int, stages_per_rank: int = 1) -> StagePlacement:
        """Stage s on rank s mod P."""
        stages = range(num_ranks * stages_per_rank)
        return StagePlacement(num_ranks=num_ranks, rank_of=tuple(stage % num_ranks for stage in stages))

    @staticmethod
    def vee(num_ranks: int) -> StagePlacement:
        """Two stages per rank: down the ranks and back up, so the last stage sits on rank 0."""
        return StagePlacement.folded(num_ranks, 2)

    @staticmethod
    def folded(num_ranks: int, stages_per_rank: int) -> StagePlacement:
        """Down the ranks, back up, down again."""
        down = tuple(range(num_ranks))
        ways = (down if way % 2 == 0 else down[::-1] for way in range(stages_per_rank))
        return StagePlacement(num_ranks=num_ranks, rank_of=tuple(chain.from_iterable(ways)))

    @staticmethod
    def dual(num_ranks: int) -> StagePlacement:
        """Two copies of the model in opposite directions; stages P..2P-1 are the second copy."""
        down = tuple(range(num_ranks))
        return StagePlacement(num_ranks=num_ranks, rank_of=down + down[::-1], num_chains=2)


@dataclass(frozen=True, kw_only=True)
class Activation:
    """What one layer keeps for one microbatch, in any unit; the default makes a layer's sum 1."""

    input: float = 0.1
    attn: float = 0.35
    shared: float = 0.1
    mlp: float = 0.45
    head: float = 0.0
    """Logits, where the model's head follows this layer."""
    attn_grad: float = 0.0
    """What dX of attention takes for its dW, less what it releases of the above: may be negative."""
    shared_grad: float = 0.0
    mlp_grad: float = 0.0
    """The same of shared and routed experts, or of a dense block."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One transformer layer as a schedule sees it."""

    moe: bool = True
    shared: bool = True
    """Shared experts beside the routed ones (a dense layer has none)."""
    recompute: Recompute = "off"
    activation: Activation = Activation()
    head: bool = False
    """The model's head and loss follow: the last layer of the last stage."""
    launches: tuple[HostedLaunch, ...] = ()
    """What its ops launch beside rows, in the order in which they do."""
    host_bytes: float = 0.0
    """Of its input for one microbatch, if that lies in the host's memory between forward and backward
    (`schedule/input_travel`)."""
    weight_bytes: float = 0.0
    """Of its experts' weights, if these lie in the host's memory (`schedule/weight_travel`) ..."""
    stored_bytes: float = 0.0
    """... and of those that its update writes."""

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTED:
            raise ScheduleError(
                f"recompute ({self.recompute!r}) must be one of {', '.join(map(repr, RECOMPUTED))}"
            )

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """In forward order."""
        head = (Part.HEAD,) if self.head else ()
        if not self.moe:
            return (Part.ATTN, Part.MLP, *head)
        shared = (Part.SHARED,) if self.shared else ()
        return (Part.ATTN, Part.ROUTE, *shared, Part.DISPATCH, Part.MLP, Part.COMBINE, *head)

    @cached_property
    def recomputed(self) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part in RECOMPUTED[self.recompute])

    @cached_property
    def launches_of(self) -> dict[Kind, tuple[tuple[int, HostedLaunch], ...]]:
        """By the op that launches them, each with its number."""
        found: dict[Kind, tuple[tuple[int, HostedLaunch], ...]] = {}
        for number, launch in enumerate(self.launches):
            found[launch.host] = (*found.get(launch.host, ()), (number, launch))
        return found

    @cached_property
    def kept(self) -> dict[Part, float]:
        """What backward needs of each part, the layer's input apart; of parts that are not named, nothing."""
        size = self.activation
        return {
            Part.ATTN: size.attn,
            Part.SHARED: size.shared,
            Part.MLP: size.mlp if self.moe else size.mlp + size.shared,
            Part.HEAD: size.head,
        }

    @cached_property
    def pending(self) -> dict[Part, float]:
        """What dX of a part holds for its dW beside what forward kept."""
        size = self.activation
        return {Part.ATTN: size.attn_grad, Part.SHARED: size.shared_grad, Part.MLP: size.mlp_grad}


Layer = LayerShape  # its name in version 0.1, whose pages showed it


@dataclass(frozen=True, kw_only=True)
class PipelineShape:
    """Every stage runs forward and backward once for each of its microbatches."""

    placement: StagePlacement
    num_microbatches: int
    layers: tuple[tuple[LayerShape, ...], ...] = ()
    """Layers of each stage; empty while the program speaks of whole actions."""
    reduce: bool = False
    """Every stage ends with one gradient reduction on the dp lane."""
    copies: int = 1
    """Ranks that stand side by side at each place of the pipeline and share its experts."""
    unit: float = 1.0
    """What a stage keeps of one microbatch, where the program speaks of whole actions."""
    step: StepShape | None = None
    """The program holds all that travels, and the end of the step."""

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks * self.copies

    def place_of(self, rank: int) -> tuple[int, int]:
        """(place in the pipeline, which of the copies there)."""
        return divmod(rank, self.copies)

    @property
    def first_layers(self) -> list[int]:
        """Of each stage, which layer of the model it begins with."""
        per_copy = self.placement.stages_per_chain
        begins = accumulate(map(len, self.layers[:per_copy]), initial=0)
        return list(islice(begins, per_copy)) * self.placement.num_chains

    def microbatches_of(self, stage: int) -> range:
        """Chains share the microbatches evenly; one chain takes them all."""
        placement = self.placement
        share = self.num_microbatches // placement.num_chains
        chain = stage // placement.stages_per_chain
        return range(chain * share, (chain + 1) * share)


@dataclass(frozen=True, kw_only=True)
class Shadow:
    """Copies of one expert on `ranks` for one step: its owner sends them the parameters."""

    expert: int
    owner: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ExchangeShape:
    """The rows of one MoE layer travel in steps: at step s, group g sends to group g + s."""

    groups: tuple[tuple[int, ...], ...]
    units: tuple[tuple[int, int], ...]
    """(step, chunk) in the order all ranks share."""
    chunks: int = 1
    """Of every step but the first: the rows of the own group may be cut into another number of them."""
    experts_per_rank: int = 1
    per_expert: bool = False
    """One event per (step, expert) instead of one per step."""
    shadows: tuple[Shadow, ...] = ()
    serving: bool = False
    """Shadows compute rows of other ranks, too: parameters come before all rows, and all rows need them."""
    backward: bool = False
    blocking: bool = False
    own_weights: int = 0
    """After so many units backward computes the weight gradients of the own group's rows; 0: with all."""

    @property
    def num_ranks(self) -> int:
        return sum(map(len, self.groups))

    @property
    def num_steps(self) -> int:
        return len(self.groups)

    @cached_property
    def own_chunks(self) -> int:
        """Into how many chunks the rows that stay in the own group are cut."""
        return sum(step == 0 for step, _ in self.units)

    @property
    def keeps_own_rows(self) -> bool:
        """Every rank is a group of its own, so what belongs to step 0 stays where it is."""
        return max(map(len, self.groups)) == 1

    @property
    def num_events(self) -> int:
        """Times that rows leave a rank: once a unit, or once for each expert of it."""
        return len(self.units) * (self.experts_per_rank if self.per_expert else 1)

    @property
    def most_chunks(self) -> int:
        return max(self.own_chunks, self.chunks)

    def chunks_of(self, step: int) -> int:
        return self.chunks if step else self.own_chunks

    def group_of(self, rank: int) -> int:
        for index, members in enumerate(self.groups):
            if rank in members:
                return index
        raise ScheduleError(
            f"rank {rank} is in none of the {self.num_steps} groups; expected 0..{self.num_ranks - 1}"
        )

    def send_to(self, rank: int, step: int) -> tuple[int, ...]:
        """Ranks that get this rank's rows at `step` (and whose results come back from there)."""
        return self.groups[(self.group_of(rank) + step) % self.num_steps]

    def receive_from(self, rank: int, step: int) -> tuple[int, ...]:
        """Ranks whose rows arrive here at `step`."""
        return self.groups[(self.group_of(rank) - step) % self.num_steps]

    def partners(self, rank: int, step: int) -> tuple[int, ...]:
        """Everyone whom a rank meets at `step`, itself among them."""
        return tuple(sorted({rank, *self.send_to(rank, step), *self.receive_from(rank, step)}))


def even_groups(num_ranks: int, group_size: int) -> tuple[tuple[int, ...], ...]:
    """Consecutive ranks; the last group holds what is left over."""
    if num_ranks < 1 or group_size < 1:
        raise ScheduleError(f"num_ranks ({num_ranks}) and group_size ({group_size}) must be at least 1")
    return tuple(
        tuple(range(first, min(first + group_size, num_ranks))) for first in range(0, num_ranks, group_size)
    )
