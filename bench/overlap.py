"""How much of one MoE layer's exchange hides under its experts, on a slow wire.

    .venv/bin/python bench/overlap.py [--json FILE] [--repeats 9] [--wire cables | shared]    twenty minutes
    .venv/bin/python bench/overlap.py --smoke                                                  seconds
    .venv/bin/python bench/overlap.py --device cuda --transport pinned --ranks 2 [--json FILE]
    .venv/bin/python bench/overlap.py --device cuda --backend nccl --ranks 2 [--json FILE]

Four ranks, each in a network namespace of its own with a slow cable to a common switch
(bench/shaped_network.py): there communication costs time but no processor, so that two cores can show what a
cluster would. With `--wire shared` all ranks share one slow loopback instead. Experts are as wide as they
must be for communication to take RATIOS times as long as compute. In turn and interleaved there run: compute
alone (nothing travels), communication alone (nothing is computed; whole and in units, the faster one counts),
the blocking exchange in which nothing overlaps, our own one-unit exchange (weight gradients already hide the
last transfer), and the smart one, with given chunks and with a granularity chosen from measured costs. The
table shows medians.

Every case is a `moeclipse.MoE` whose gate always chooses the same experts, called and differentiated as a
model does. Forward (with the exchanges of token counts, loads and sizes) and backward are timed each from a
common start, of the slowest rank: nothing of backward can begin before forward has ended, so each has its own
bound, max(compute, communication), and no schedule can beat their sum. Backward computes twice as much for
the same rows, so the two never are at the same ratio.

A second table has skewed routing (Zipf, s = 1.2, 16 experts, top-2) and small experts: smart without and with
shadows, and what the policy had predicted.

With `--device cuda` two to four ranks share one GPU under MPS (nvidia-cuda-mps-control -d), and rows go
through pinned memory of the host: copy engines move them at some 17 GB/s each way, a network's rate, and take
no processor of the device; or, with `--backend nccl`, through NCCL over sockets. `neither` is what is left
when nothing travels and nothing is computed: sizes are still exchanged and rows put in order, and no schedule
hides that. `hidden` is what smart saves of what could be saved: (blocking - smart) / (blocking - bound).

`--smoke` runs all cases on two ranks in sizes that measure nothing, on the loopback where there is no root.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from _smoke import BenchParser, machine, write
from shaped_network import is_plain, join_switch, shaped_network, switched_network
from torch import nn

from moeclipse import MoE, Routing, joint, routing_of
from moeclipse.comm.async_ops.lane import InFlight, Ready
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.transports.transport import Transport
from moeclipse.moe.exchange.dispatch_combine import Programs
from moeclipse.moe.tune.cut_choice import CALLS, TRIED
from moeclipse.schedule.check import verify
from moeclipse.schedule.smart import smart
from moeclipse.testing.run_ranks import run_ranks

RANKS = 4
MANY_EXPERTS, TOP_K, ZIPF = 16, 2, 1.2
WIRE_CPU = "processor time of communication"
CUT = "in units"
"""Communication alone, rank by rank as the smart exchange sends it. Gloo's all-to-all may be slower: then the
bound is what the wire can do, not what one call of it does."""
RATIOS = (2 / 3, 1.0, 4 / 3)
"""Communication over compute of both directions: 1, 1.5 and 2 in forward, 0.5, 0.75 and 1 in backward."""
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
Times = dict[str, dict[str, float]]
"""Median seconds of each direction and case."""


@dataclass(frozen=True)
class Bed:
    """What the layer is made of, and where it runs."""

    device: str = "cpu"
    transport: str = "direct"
    tokens: int = 2560
    width: int = 256
    dtype: torch.dtype = torch.float32
    rate_mbit: float = 30.0
    """Of a rank's cable, or of the loopback that all share."""
    trials: tuple[int, int] = (4096, 8192)
    """Hidden widths that are measured to find those of the table, ..."""
    trial_repeats: int = 5
    widest: int = 65536
    ratios: tuple[float, ...] = RATIOS
    """... in which communication takes so many times as long as compute."""
    skewed: tuple[int, int, int] = (1024, 512, 64)
    """Tokens, width and hidden width of the second table."""


BEDS = {"cables": Bed(), "shared": Bed(tokens=1280, rate_mbit=240.0)}
ON_DEVICE = Bed("cuda:0", "pinned", 16384, 4096, torch.bfloat16)
SMALLEST: dict[str, Any] = {
    "tokens": 64,
    "width": 64,
    "trials": (256, 512),
    "trial_repeats": 1,
    "widest": 512,
    "ratios": (1.0,),
    "skewed": (64, 64, 16),
}
"""Of `--smoke`."""


class NoWire:
    """Rows do not travel: what is computed is what would have arrived.

    Places and scores, a number or two for each row, have travelled once and are remembered: with others the
    same work would be done on fewer rows, or on zeros.
    """

    def __init__(self, real: Transport) -> None:
        self.real = real
        self.known: dict[str, torch.Tensor] = {}

    def all_to_all(self, rows: Any, send: Any, receive: Any, label: str, out: Any = None) -> InFlight[Any]:
        if rows.shape[1:].numel() <= 2:
            if label not in self.known:
                self.known[label] = self.real.all_to_all(rows, send, receive, label, out).get().clone()
            return Ready(self.known[label].clone() if out is None else out.copy_(self.known[label]))
        if out is None:
            return Ready(rows.new_zeros((sum(receive), *rows.shape[1:])))
        return Ready(out.fill_(0.01))


class NoExperts(nn.Module):
    """Nothing is computed: rows return as they came."""

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        return rows


class FixedGate(nn.Module):
    """Always the same choices; gradients of the scores travel as those of any gate do."""

    def __init__(self, ids_TK: torch.Tensor, num_experts: int) -> None:
        super().__init__()
        scores = torch.full(ids_TK.shape, 1.0 / ids_TK.shape[1], device=ids_TK.device, requires_grad=True)
        self.routing = routing_of(ids_TK, scores, num_experts)

    def forward(self, x_TD: torch.Tensor, tokens: Any) -> Routing:
        return self.routing


def serial(moe: MoE) -> Programs:
    """Nothing overlaps: rows out, all compute with the weight gradients, results back."""
    shape = replace(moe.schedule.shape(), blocking=True)
    forward, backward = (verify(smart(replace(shape, backward=back))) for back in (False, True))
    return Programs(forward=forward, backward=backward, pieces=backward)


class LayerStep:
    """One forward and backward of a layer with a fixed routing.

    `like`: a case whose weights this one takes, because how their pages lie matters. What no call of the
    library leaves out is taken out here: the wire, and the overlap that a blocking exchange has in backward.
    """

    def __init__(
        self,
        mesh: Mesh,
        bed: Bed,
        ids: torch.Tensor,
        experts: int,
        hidden: int,
        *,
        like: LayerStep | None = None,
        wire: bool = True,
        compute: bool = True,
        in_series: bool = False,
        **exchange: Any,
    ) -> None:
        exchange = {"transport": bed.transport, **exchange}
        nothing = None if compute else joint(lambda _: NoExperts())
        layer = {"gate": FixedGate(ids, experts), "experts": nothing, "mesh": mesh, "exchange": exchange}
        self.moe = moe = MoE(bed.width, hidden, experts, dtype=bed.dtype, **layer)
        if like is not None and compute:
            moe.experts = like.moe.experts
        if not wire:
            moe.dispatcher = replace(moe.dispatcher, transport=NoWire(moe.dispatcher.transport))
        if in_series:
            programs = serial(moe)
            moe.schedule.programs = lambda shape: programs  # type: ignore[method-assign]
        shape = len(ids), bed.width
        self.x = torch.randn(shape, dtype=bed.dtype, device=ids.device, requires_grad=True)

    def forward(self) -> None:
        self.out = self.moe(self.x)

    def backward(self) -> None:
        self.out.backward(self.out.detach())
        del self.out


def choices(mesh: Mesh, tokens: int, experts: int, top_k: int, zipf: float = 0.0) -> torch.Tensor:
    """Random experts of each token, the k-th of all with weight k^-zipf."""
    generator = torch.Generator().manual_seed(mesh.rank)
    weight_E = torch.arange(1, experts + 1, dtype=torch.float64) ** -zipf
    draw = torch.rand(tokens, experts, generator=generator, dtype=torch.float64)
    return (draw.log() / weight_E).topk(top_k).indices.to(mesh.device)


def timed(mesh: Mesh, work: Callable[[], None]) -> tuple[float, float]:
    """From a common start: (seconds of the slowest rank, processor seconds of all ranks over the cores)."""
    mesh.barrier()
    begun, busy = time.perf_counter(), time.process_time()
    work()
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    mine = (time.perf_counter() - begun, time.process_time() - busy)
    everyone = mesh.gather_objects(mine)
    return max(wall for wall, _ in everyone), sum(cpu for _, cpu in everyone) / (os.cpu_count() or 1)


def interleaved(mesh: Mesh, cases: dict[str, LayerStep], repeats: int) -> Times:
    """Median seconds of each case; the first two rounds measure costs and warm up.

    How memory lies depends on what ran before, and equal programs differ by a fifth through it: the order is
    shuffled in every round, alike on all ranks.
    """
    times: dict[str, dict[str, list[float]]] = {"forward": {}, "backward": {}}
    for repeat in range(-2, repeats):
        order = list(cases.items())
        random.Random(repeat).shuffle(order)
        for name, step in order:
            for direction, work in (("forward", step.forward), ("backward", step.backward)):
                seconds, busy = timed(mesh, work)
                if repeat >= 0:
                    times[direction].setdefault(name, []).append(seconds)
                    if name == "communication":
                        times[direction].setdefault(WIRE_CPU, []).append(busy)
        if mesh.rank == 0:
            print(f"\r{max(repeat + 1, 0)}/{repeats} ", end="", file=sys.stderr, flush=True)
    return {
        direction: {name: statistics.median(taken[name]) for name in (*cases, WIRE_CPU) if name in taken}
        for direction, taken in times.items()
    }


def tune(mesh: Mesh, step: LayerStep) -> None:
    """Let a layer measure and try until it has chosen how to cut its exchange."""
    for _ in range(2 + CALLS * TRIED):
        timed(mesh, step.forward)
        timed(mesh, step.backward)


def widths_for(mesh: Mesh, bed: Bed, ids: torch.Tensor) -> list[int]:
    """Hidden widths for which communication takes `bed.ratios` times as long as compute."""
    found: list[tuple[int, float]] = []
    wire = 0.0
    for trial in bed.trials:  # two of them: what does not depend on the width is not divided by it
        layer = (mesh, bed, ids, mesh.num_ranks, trial)
        cases = {"compute": LayerStep(*layer, wire=False)}
        if not found:
            cases["communication"] = LayerStep(*layer, compute=False)
        times = interleaved(mesh, cases, bed.trial_repeats)
        total = {name: times["forward"][name] + times["backward"][name] for name in cases}
        found.append((trial, total["compute"]))
        wire = total.get("communication", wire)
    (narrow, less), (wide, more) = found
    per_column = max((more - less) / (wide - narrow), 1e-9)
    fixed = less - per_column * narrow
    wanted = [(wire / ratio - fixed) / per_column for ratio in bed.ratios]
    return [min(max(256, round(width / 256) * 256), bed.widest) for width in mesh.gather_objects(wanted)[0]]


def measure_even(mesh: Mesh, bed: Bed, repeats: int) -> list[dict[str, Any]]:
    experts = mesh.num_ranks
    ids = choices(mesh, bed.tokens, experts, 1)
    rows = []
    for hidden in widths_for(mesh, bed, ids):
        layer = (mesh, bed, ids, experts, hidden)
        first = LayerStep(*layer, schedule="blocking", wire=False)
        blocking = functools.partial(LayerStep, *layer, schedule="blocking", like=first)
        by_units = functools.partial(LayerStep, *layer, schedule="smart", like=first)
        cases = {
            "compute": first,
            "communication": blocking(compute=False),
            "blocking": blocking(in_series=True),
            "one unit": blocking(),
        }
        if bed.device != "cpu":
            cases["neither"] = blocking(wire=False, compute=False)
        for chunks in (1, 2):
            cases[f"smart/{chunks}"] = by_units(group_size=1, chunks=chunks)
        cases[CUT] = by_units(group_size=1, chunks=1, compute=False)
        cases["chosen"] = by_units()
        tune(mesh, cases["chosen"])
        times = interleaved(mesh, cases, repeats)
        report = cases["chosen"].moe.schedule.cuts.report()
        cut = f"{report['steps']}x{report['chunks']} {report['rule'].split(',')[0]}"
        rows += [
            {"hidden": hidden, "direction": direction, **found, "cut": cut}
            for direction, found in times.items()
        ]
    return rows


def measure_skewed(mesh: Mesh, bed: Bed, repeats: int) -> dict[str, Any]:
    tokens, width, hidden = bed.skewed
    ids = choices(mesh, tokens, MANY_EXPERTS, TOP_K, ZIPF)
    layer = (mesh, replace(bed, width=width), ids, MANY_EXPERTS, hidden)
    settings: dict[str, Any] = {"schedule": "smart", "group_size": 1, "chunks": 1}
    cases = {
        "smart": LayerStep(*layer, **settings),
        "smart + shadows": LayerStep(*layer, shadow="auto", **settings),
    }
    times = interleaved(mesh, cases, repeats)
    found = {name: times["forward"][name] + times["backward"][name] for name in cases}
    plan = cases["smart + shadows"].moe.schedule.shadow_plan
    return {
        **found,
        # A layer does not ask in calls where shadows could not pay.
        "shadows": [] if plan is None else [list(entry) for entry in plan.shadows],
        "predicted_gain": 0.0 if plan is None else plan.gain,
        "measured_gain": found["smart"] - found["smart + shadows"],
    }


HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""torch asks for huge pages where this is set: else equal layers differ by a fifth, as their pages lie."""


def keep_memory() -> None:
    """Freed blocks stay with the process: else every large tensor costs as many page faults as it has pages.

    A device's allocator does the same; without it a third of "compute" would be the kernel clearing pages.
    """
    change = ctypes.CDLL(None).mallopt
    for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 64 << 20)):
        if not change(option, value):
            raise SystemExit("bench/overlap.py wants the allocator of glibc; this C library has another one.")


def measure(mesh: Mesh, bed: Bed, repeats: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    if bed.device != "cpu":
        torch.cuda.set_device(mesh.device)
        return {"even": measure_even(mesh, bed, repeats), "skewed": None}
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        mesh.hosts = tuple(range(mesh.num_ranks))  # each rank has a cable of its own, as hosts have
    keep_memory()
    return {"even": measure_even(mesh, bed, repeats), "skewed": measure_skewed(mesh, bed, repeats)}


def main() -> int:
    parser = BenchParser(__doc__, smoke={"repeats": 1})
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--wire", choices=["cables", "shared"], default="cables", help="each rank its own, or one for all"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=2, help="with --device cuda: ranks that share the GPU")
    parser.add_argument(
        "--transport", choices=["pinned", "peer"], default="pinned", help="with --device cuda"
    )
    parser.add_argument("--backend", choices=["auto", "nccl"], default="auto", help="with --device cuda")
    parser.add_argument("--inside", type=Path, help="in the namespace; write what was measured here")
    given = parser.parse_args()
    smallest = SMALLEST if given.smoke else {}
    if given.device == "cuda":
        if torch.cuda.device_count() == 0:
            print("bench/overlap.py --device cuda: this machine has no CUDA device.")
            return 2
        bed = replace(ON_DEVICE, transport="direct" if given.backend == "nccl" else given.transport)
        options = {"deadline_s": 1800, "device": bed.device, "backend": given.backend}
        bed = replace(bed, **smallest)
        return report(run_ranks(given.ranks, measure, bed, given.repeats, **options)[0], given.json)
    bed = replace(BEDS[given.wire], **smallest)
    if given.inside is None:
        shared = given.wire == "shared"
        network = shaped_network(bed.rate_mbit, given.smoke) if shared else switched_network(given.smoke)
        with tempfile.TemporaryDirectory() as folder, network as run:
            out = Path(folder) / "rows.json"
            code = run([sys.executable, __file__, *sys.argv[1:], "--inside", str(out)]).returncode
            if code:
                return code
            found = json.loads(out.read_text())
        return report(found, given.json)
    os.environ[HUGE_PAGES] = "1"  # before the ranks start: torch looks once
    cable = functools.partial(join_switch, rate_mbit=bed.rate_mbit)
    before = None if given.wire == "shared" or is_plain() else cable
    ranks = 2 if given.smoke else RANKS
    found = run_ranks(ranks, measure, bed, given.repeats, deadline_s=5400, before=before)[0]
    write(given.inside, found)
    return 0


def report(found: dict[str, Any], file: Path | None) -> int:
    rows, skewed = found["even"], found["skewed"]
    names = [name for name in rows[0] if name not in ("hidden", "direction", "cut", WIRE_CPU)]
    print("\n\nmedian ms of one layer; even routing\n")
    heads = " ".join(f"{name:>13}" for name in names)
    print(f"hidden {'direction':>9} {heads}  {'cut':<12} smart/bound block/smart hidden")
    for row in rows:
        cells = " ".join(f"{1e3 * row[name]:13.1f}" for name in names)
        hidden = (row["blocking"] - row["chosen"]) / max(row["blocking"] - bound(row), 1e-9)
        ends = f"{over_bound(row):11.2f} {row['blocking'] / row['chosen']:11.2f} {hidden:6.2f}"
        print(f"{row['hidden']:6} {row['direction']:>9} {cells}  {row['cut']:<12} {ends}")
    checks = even_checks(rows)
    if skewed is not None:
        checks |= show_skewed(skewed)
    print("\n" + "  ".join(f"{name} {value:.2f}" for name, value in checks.items()))
    write(file, {"rows": found, "checks": checks, "machine": machine()})
    return 0


def wire(row: dict[str, Any]) -> float:
    return float(min(row["communication"], row[CUT]))


def bound(row: dict[str, Any]) -> float:
    return float(max(row["compute"], wire(row)))


def over_bound(row: dict[str, Any]) -> float:
    return float(row["chosen"] / bound(row))


def even_checks(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The worst where communication takes 0.5 to 2 times compute; speed-ups where that is nearest 1."""

    def ratio(row: dict[str, Any]) -> float:
        return float(wire(row) / row["compute"])

    checks = {}
    for direction in ("forward", "backward"):
        mine = [row for row in rows if row["direction"] == direction]
        nearest = min(mine, key=lambda row: abs(ratio(row) - 1.0))
        checks[f"{direction}_ratio"] = ratio(nearest)
        checks[f"{direction}_over_bound"] = over_bound(nearest)
        checks[f"{direction}_blocking_over_smart"] = nearest["blocking"] / nearest["chosen"]
    inside = [row for row in rows if 0.5 <= ratio(row) <= 2.0] or rows
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    whole = [sum(row["chosen"] for row in pair) / sum(map(bound, pair)) for pair in pairs]
    return {
        "smart_over_bound": max(map(over_bound, inside)),
        "blocking_over_smart": min(
            checks["forward_blocking_over_smart"], checks["backward_blocking_over_smart"]
        ),
        "layer_over_bounds": max(whole),
        "smart_over_bound_of_cores": max(
            row["chosen"] / max(row["compute"] + row[WIRE_CPU], wire(row)) for row in inside
        ),
        **checks,
    }


def show_skewed(skewed: dict[str, Any]) -> dict[str, float]:
    times = {name: 1e3 * skewed[name] for name in ("smart", "smart + shadows", "predicted_gain")}
    print(f"\nskewed routing: smart {times['smart']:.0f} ms, ", end="")
    print(f"with shadows {times['smart + shadows']:.0f} ms; gain predicted {times['predicted_gain']:.0f} ms")
    print(f"shadows (expert, ranks): {skewed['shadows']}")
    return {
        "shadow_ratio": skewed["smart + shadows"] / skewed["smart"],
        "predicted_over_measured_gain": skewed["predicted_gain"] / skewed["measured_gain"],
    }


if __name__ == "__main__":
    raise SystemExit(main())
