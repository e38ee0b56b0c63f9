"""How long a step of a layout takes: its actions are priced, its schedule is simulated.

    layers     parts in seconds (`cost/layer_seconds`)
    actions    F, B, I, W of a stage are sums over its layers; in a PAIR each exchange stands beside the parts
               that the template puts there (`schedule/templates`), and the longer of the two counts
    schedule   the actions as the schedule orders them, on the simulator, at two numbers of microbatches
    end        gradients summed, weights updated and gathered
    copies     state that lies on the host travels to each update and back (`plan/state_place`); of inputs of
               layers and experts there: no layer is shorter than the way of its own

What a program of a whole step would show layer by layer is inside the prices: a plan takes milliseconds.
Stages whose host cannot launch as fast as the device computes take the host's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from moeclipse.cost.cluster import Cluster
from moeclipse.cost.kernels import Type
from moeclipse.cost.layer_seconds import OURS, MicrobatchWork, Seconds, Software, slower
from moeclipse.cost.model import Costs
from moeclipse.cost.sizes import ModelSizes
from moeclipse.cost.step_bytes import StateBytes
from moeclipse.plan.layout import Layout, even_stages
from moeclipse.plan.state_place import StatePlace
from moeclipse.schedule import kinds
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.op import Op, Program
from moeclipse.sim.engine import Simulation, simulate

FEW, MORE = 2, 3
"""Microbatches, in ranks of the pipeline, at which a schedule is simulated; then it repeats itself."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    seconds: float
    compute: float
    """Of the busiest rank ..."""
    exposed: float
    """... and what of its communication nothing hides, or the host takes."""
    bubble: float
    """What it waits for others."""
    end: float
    """Sums, update and gathers behind the last microbatch."""
    copies: float = 0.0
    """Of state between the host's memory and the device, as far as nothing hides them."""

    @property
    def bound(self) -> str:
        """What takes most, compute apart, where it takes a tenth of the step."""
        rest = {"exchange and host": self.exposed, "bubble": self.bubble, "end of step": self.end}
        rest["copies of state"] = self.copies
        name = max(rest, key=lambda each: rest[each])
        return name if rest[name] > 0.1 * self.seconds else "compute"


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Of one layer, or one stage: actions in seconds, and the compute in them."""

    F: float = 0.0
    B: float = 0.0
    W: float = 0.0
    """Part of B."""
    pair: float = 0.0
    compute_F: float = 0.0
    compute_B: float = 0.0

    def __add__(self, other: Prices) -> Prices:
        names = ("F", "B", "W", "pair", "compute_F", "compute_B")
        return Prices(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a step is priced on, whatever its layout."""

    model: ModelSizes
    cluster: Cluster
    sequence: int
    dtype: Type = "bf16"
    software: Software = OURS
    imbalance: float = 1.0
    state: StateBytes = field(default_factory=StateBytes)
    place: StatePlace = field(default_factory=StatePlace)

    @property
    def value_bytes(self) -> float:
        """Of an activation."""
        return 4.0 if self.cluster.device.name == "cpu" else 2.0

    def input_bytes(self, layout: Layout) -> float:
        """Of a layer and a microbatch, on each of the tp ranks."""
        return self.value_bytes * self.model.d_model * layout.samples * self.sequence / layout.tp


class Step:
    """One layout of a model on a cluster."""

    def __init__(self, terms: Terms, layout: Layout, stages: Sequence[int] | None = None) -> None:
        """`stages`: layers of each stage of one copy; None: as even as seconds allow."""
        self.terms, self.layout = terms, layout
        self.model, self.cluster, self.software = terms.model, terms.cluster, terms.software
        self.work = MicrobatchWork(
            model=terms.model,
            cluster=terms.cluster,
            tokens=layout.samples * terms.sequence,
            sequence=terms.sequence,
            tp=layout.tp,
            ep=layout.ep,
            dtype=terms.dtype,
            imbalance=terms.imbalance,
        )
        self.given = stages

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """Layers of each stage of one copy of the model."""
        if self.given is not None:
            return tuple(self.given)
        seconds = [prices.F + prices.B for prices in self.layers]
        return even_stages(seconds, sum(self.parts["head"]), self.layout.num_stages)

    @cached_property
    def parts(self) -> dict[str, Seconds]:
        """Of the last layer with experts and of the first without; attention apart."""
        work, moe = self.work, self.model.moe_layers
        experts, dense = len(moe) - 1 - moe[::-1].index(True) if any(moe) else -1, 0
        if not all(moe):
            dense = moe.index(False)
        found = {
            "route": work.route(experts) if any(moe) else Seconds(),
            "shared": work.shared(experts) if any(moe) else Seconds(),
            "experts": work.experts(experts) if any(moe) else Seconds(),
            "dense": work.dense(dense) if not all(moe) else Seconds(),
            "head": work.head(),
        }
        return {name: self._inside(part) for name, part in found.items()}

    @cached_property
    def layers(self) -> tuple[Prices, ...]:
        """Prices of each layer, without head."""
        known: dict[tuple[object, ...], Prices] = {}
        found = []
        for layer, moe in enumerate(self.model.moe_layers):
            key = (moe, self.model.window_of(layer), self.model.training(layer))
            if key not in known:
                known[key] = self._host(self._moe(layer) if moe else self._dense(layer))
            found.append(self._with_copies(known[key], layer))
        return tuple(found)

    @cached_property
    def input_way(self) -> float:
        """Seconds of a layer's input, each way."""
        return self.cluster.host.seconds(self.terms.input_bytes(self.layout)) if self.layout.inputs else 0.0

    @cached_property
    def weight_way(self) -> float:
        """Seconds of a layer's experts, each way of a microbatch; those in the ring at the ends stay."""
        layout, place = self.layout, self.terms.place
        if not layout.weights:
            return 0.0
        on_host, travel = place.away(self.model)
        once = layout.microbatches if layout.schedule == "layers" else 1
        return self.cluster.host.seconds(place.weight_bytes) * travel / on_host / once

    @property
    def ways(self) -> float:
        """Of inputs and weights of all layers, each way of one microbatch."""
        return self.input_way * max(self.model.num_layers - 2, 0) + self.weight_way * sum(
            self.model.moe_layers
        )

    def _with_copies(self, prices: Prices, layer: int) -> Prices:
        """No faster than its input leaves, or comes back, and its experts come; in a pair one does while the
        other does."""
        way = self.input_way * (0 < layer < self.model.num_layers - 1)
        way += self.weight_way * self.model.moe_layers[layer]
        longest = (max(seconds, way) for seconds in (prices.F, prices.B, prices.pair))
        return replace(prices, **dict(zip(("F", "B", "pair"), longest, strict=True)))

    def _inside(self, alone: Seconds) -> Seconds:
        return slower(alone, self.software.inside(self.cluster))

    def _dense(self, layer: int) -> Prices:
        attn, block = self._inside(self.work.attention(layer)), self._inside(self.work.dense(layer))
        again = self.layout.recompute
        more = (attn.F if again in ("attn", "full") else 0) + (
            block.F if again in ("mlp", "moe", "full") else 0
        )
        F, W = attn.F + block.F, attn.W + block.W
        B = attn.B + block.B + W + more
        return Prices(F=F, B=B, W=W, pair=F + B, compute_F=F, compute_B=B)

    def _moe(self, layer: int) -> Prices:
        work = self.work
        alone = (work.attention(layer), work.route(layer), work.shared(layer), work.experts(layer))
        attn, route, shared, mlp = map(self._inside, alone)
        dispatch, combine = self.work.dispatch(), self.work.combine()
        F, W = (sum(part[form] for part in (attn, route, shared, mlp)) for form in (0, 2))
        again, experts = self.layout.recompute, self.software.again_on(self.cluster) * mlp.F
        more = {
            "off": 0.0,
            "attn": attn.F,
            "mlp": shared.F + experts,
            "moe": route.F + shared.F + experts,
            "full": attn.F + route.F + shared.F + experts,
        }[again]
        resent = dispatch if again in ("moe", "full") else 0.0
        B = attn.B + route.B + shared.B + mlp.B + W + more
        # gradients of combine's rows leave as dispatch's do, and the other way round
        slots = (
            (dispatch + resent, attn.F + route.F + shared.B + more),  # combine of B
            (dispatch, mlp.B),  # dispatch of F
            (combine, mlp.W + mlp.F + shared.F),  # dispatch of B
            (combine, attn.B + route.B + attn.W + route.W + shared.W),  # combine of F
        )
        serial = sum(moved + beside for moved, beside in slots)
        pair = serial
        if self.layout.overlap != "off":
            slowed = 1 - self.cluster.rate_beside_exchange
            hidden = sum(max(moved, beside + slowed * moved) for moved, beside in slots)
            pair = hidden + (1 - self.software.hides) * (serial - hidden)
        moved = dispatch + combine
        return Prices(F=F + moved, B=B + moved + resent, W=W, pair=pair, compute_F=F, compute_B=B)

    def _host(self, prices: Prices) -> Prices:
        """No faster than the host launches."""
        host = self.software.host_s
        return replace(
            prices,
            F=max(prices.F, host / 3),
            B=max(prices.B, 2 * host / 3),
            pair=max(prices.pair, host),
        )

    @cached_property
    def stage_prices(self) -> tuple[Prices, ...]:
        """Of the stages of one copy of the model."""
        found, first = [], 0
        for number, count in enumerate(self.stages):
            total = sum(self.layers[first : first + count], Prices())
            first += count
            if number == len(self.stages) - 1:
                head = self.parts["head"]
                back = head.B + head.W
                total += Prices(F=head.F, B=back, W=head.W, pair=sum(head), compute_F=head.F, compute_B=back)
            found.append(total)
        return tuple(found)

    def time(self) -> StepTime:
        layout, end = self.layout, self.end()
        few, more = FEW * layout.pp, MORE * layout.pp
        if layout.microbatches <= more:
            numbers, weights = [layout.microbatches], [1.0]
        else:  # the schedule goes on as between these two
            share = (layout.microbatches - more) / (more - few)
            numbers, weights = [few, more], [-share, 1 + share]
        rank = self.busiest(numbers, weights)  # the same for both: a line through two ranks is none of them
        found = sum(
            weight * np.array(self._simulated(number, rank))
            for number, weight in zip(numbers, weights, strict=True)
        )
        makespan, compute, exposed = np.asarray(found).tolist()
        copies = self.copies(makespan + end)
        return StepTime(
            seconds=makespan + end + copies,
            copies=copies,
            compute=compute,
            exposed=exposed,
            bubble=max(makespan - compute - exposed, 0.0),
            end=end,
        )

    def busiest(self, microbatches: Sequence[int], weights: Sequence[float] = (1.0,)) -> int:
        """Of the whole step: with few microbatches another rank may be."""
        of_ranks = [[sum(row) for row in self.durations(self.program(number))[0]] for number in microbatches]
        return int(np.argmax(np.asarray(weights) @ np.asarray(of_ranks)))

    def _simulated(self, microbatches: int, rank: int) -> tuple[float, float, float]:
        """(makespan, compute and exposed of a rank)."""
        seconds, compute = self.durations(self.program(microbatches))
        worked = sum(compute[rank])
        return self.simulation(microbatches).makespan, worked, sum(seconds[rank]) - worked

    def simulation(self, microbatches: int) -> Simulation:
        """Of the first so many."""
        program, layout = self.program(microbatches), self.layout
        wire = self.work.transfer(layout.dp * layout.ep * layout.tp) if layout.pp > 1 else 0.0
        return simulate(verify(program), Costs(seconds={}, wire=wire), self.durations(program)[0])

    def program(self, microbatches: int) -> Program:
        layout = self.layout
        each = layout.stages_per_rank
        return build(layout.schedule, layout.pp, microbatches, each, budget=layout.budget)

    def durations(self, program: Program) -> tuple[list[list[float]], list[list[float]]]:
        """(seconds, compute in them) of every action, rank by rank."""
        known: dict[tuple[object, ...], tuple[float, float]] = {}
        seconds: list[list[float]] = []
        compute: list[list[float]] = []
        for ops in program.ranks:
            row = []
            for op in ops:
                key = (op.kind, op.stage, *(part.stage for part in op.parts))
                if key not in known:
                    known[key] = self._action(op)
                row.append(known[key])
            seconds.append([each for each, _ in row])
            compute.append([each for _, each in row])
        return seconds, compute

    def _action(self, op: Op) -> tuple[float, float]:
        if op.kind is kinds.PAIR:
            f, b = (self._price_of(part) for part in op.parts)
            # stages of a pair may differ: each brings half of what it saves beside its equal
            saved = sum(each.F + each.B - each.pair for each in (f, b)) / 2
            return f.F + b.B - saved, f.compute_F + b.compute_B
        price = self._price_of(op)
        return {
            kinds.F: (price.F, price.compute_F),
            kinds.B: (price.B, price.compute_B),
            kinds.I: (price.B - price.W, price.compute_B - price.W),
            kinds.W: (price.W, price.W),
        }[op.kind]

    def _price_of(self, op: Op) -> Prices:
        assert op.stage is not None
        return self.stage_prices[op.stage % len(self.stages)]

    def end(self) -> float:
        """Gradients summed, as far as backward of one microbatch does not hide it; update; gather."""
        layout, cluster, state = self.layout, self.cluster, self.terms.state
        longest, first = 0.0, 0
        for number, count in enumerate(self.stages):
            dense, experts = self._trained(number, range(first, first + count))
            first += count
            replicas = layout.dp * layout.copies  # two copies share parameters as data parallelism does
            everyone = replicas * layout.ep
            summed = cluster.collective(state.gradient * dense, everyone, layout.tp)
            summed += cluster.collective(state.gradient * experts, replicas, layout.ep * layout.tp)
            update = self.work.kernels.stream(state.update * (dense / everyone + experts / replicas))
            gathered = summed * state.weight / state.gradient
            hidden = self.stage_prices[number].compute_B
            longest = max(longest, max(summed - hidden, 0.0) + update + gathered)
        return longest * layout.stages_per_rank

    def _trained(self, number: int, held: range) -> tuple[float, float]:
        """Parameters of a stage on a rank, (dense, of experts)."""
        layout, model = self.layout, self.model
        ends = (number == 0, number == len(self.stages) - 1)
        tables = sum(map(all, zip(ends, model.trained_tables, strict=True)))
        dense = sum(map(model.trained_dense, held)) + tables * model.table_parameters
        return dense / layout.tp, sum(map(model.trained_experts, held)) / (layout.ep * layout.tp)

    def copies(self, rest: float) -> float:
        """Of state that travels, what nothing hides; all else takes `rest`, and a step is no shorter than
        the way."""
        layout, place = self.layout, self.terms.place
        if not layout.host:
            return 0.0
        seconds, first = [], 0
        for number, count in enumerate(self.stages):
            dense, experts = self._trained(number, range(first, first + count))
            first += count
            owned = dense / (layout.dp * layout.ep) + experts / layout.dp
            update = self.work.kernels.stream(self.terms.state.update * owned)
            seconds.append((self.cluster.host.seconds(layout.host * place.each * owned), update))
        if layout.pp == 1:
            way, update = (sum(each) for each in zip(*seconds, strict=True))
        else:
            way, update = (layout.stages_per_rank * each for each in max(seconds))
        rest -= layout.microbatches * self.ways / layout.pp  # the wire is theirs meanwhile
        ring = self.cluster.host.seconds(place.ring(self.model, layout.num_ranks // layout.pp))
        return max(place.left(way, ring, update + self.window(layout)), way - rest)

    def window(self, layout: Layout) -> float:
        """Seconds of other work that updates stand in: of one rank the last backward (layer by layer all of
        it); where one norm clips all, the next step's first forward. Less what else takes of the wire."""
        if layout.num_ranks > 1:
            return 0.0
        if not self.terms.place.by_layer:
            return sum(prices.F for prices in self.layers) - self.ways
        times = layout.microbatches if layout.schedule == "layers" else 1
        return times * (sum(prices.B for prices in self.layers) - self.ways)
