"""How much of one MoE layer's exchange hides under its experts, on a slow wire.

    .venv/bin/python bench/overlap.py [--json FILE] [--repeats 9] [--wire cables | shared]
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

Forward (with the exchange of sizes) and backward are timed each from a common start, of the slowest rank:
nothing of backward can begin before forward has ended, so each has its own bound, max(compute,
communication), and no schedule can beat their sum. Backward computes twice as much for the same rows, so the
two never are at the same ratio.

A second table has skewed routing (Zipf, s = 1.2, 16 experts, top-2) and small experts: smart without and with
shadows, and what the policy had predicted.

With `--device cuda` two to four ranks share one GPU under MPS (nvidia-cuda-mps-control -d), and rows go
through pinned memory of the host: copy engines move them at some 17 GB/s each way, a network's rate, and take
no processor of the device; or, with `--backend nccl`, through NCCL over sockets. `neither` is what is left
when nothing travels and nothing is computed: sizes are still exchanged and rows put in order, and no schedule
hides that. `hidden` is what smart saves of what could be saved: (blocking - smart) / (blocking - bound).
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import platform
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
from shaped_network import join_switch, shaped_network, switched_network

from moeclipse.comm.flight.in_flight import InFlight, Ready
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.wires.transport import Transport
from moeclipse.moe.config import GateConfig
from moeclipse.moe.dispatch_combine import DispatchCombine, LayerCall, Programs
from moeclipse.moe.granularity import CALLS, TRIED
from moeclipse.moe.layer import MoE
from moeclipse.moe.pairwise import PairwiseExperts
from moeclipse.moe.structure import Structure
from moeclipse.schedule.check import verify
from moeclipse.schedule.smart import smart
from moeclipse.testing.run_ranks import run_ranks

RANKS = 4
SKEWED_TOKENS, SKEWED_WIDTH, SKEWED_HIDDEN, MANY_EXPERTS, TOP_K, ZIPF = 1024, 512, 64, 16, 2, 1.2
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


BEDS = {"cables": Bed(), "shared": Bed(tokens=1280, rate_mbit=240.0)}
ON_DEVICE = Bed("cuda:0", "pinned", 16384, 4096, torch.bfloat16)


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


class NoExperts:
    """Nothing is computed: rows return as they came."""

    def __init__(self, width: int) -> None:
        self.out_width = width

    def forward(self, x: torch.Tensor, counts: Any) -> tuple[torch.Tensor, None]:
        return x, None

    def dgrad(self, dy: torch.Tensor, saved: None) -> tuple[torch.Tensor, None]:
        return dy, None

    def wgrad(self, pending: Any, begun: Any, wanted: Any = None) -> tuple[None, None]:
        return None, None


def make(mesh: Mesh, bed: Bed, experts: int, hidden: int, **exchange: Any) -> MoE:
    exchange = {"transport": bed.transport, **exchange}
    gate = GateConfig(top_k=1)
    return MoE(bed.width, hidden, experts, gate=gate, mesh=mesh, exchange=exchange, dtype=bed.dtype)


def serial(moe: MoE) -> Programs:
    """Nothing overlaps: rows out, all compute with the weight gradients, results back."""
    shape = replace(moe.schedule.shape(), blocking=True)
    forward, backward = (verify(smart(replace(shape, backward=back))) for back in (False, True))
    return Programs(forward=forward, backward=backward, pieces=backward)


class LayerStep:
    """One forward and backward of the routed part with a fixed routing."""

    def __init__(
        self,
        moe: MoE,
        bed: Bed,
        ids: torch.Tensor,
        *,
        wire: bool = True,
        compute: bool = True,
        programs: Programs | None = None,
    ) -> None:
        self.moe, self.bed, self.ids, self.compute = moe, bed, ids, compute
        self.transport = moe.dispatcher.transport if wire else NoWire(moe.dispatcher.transport)
        self.programs = programs
        shape = len(ids), bed.width
        self.x = torch.randn(shape, dtype=bed.dtype, device=ids.device, requires_grad=True)
        self.scores = torch.full(ids.shape, 1.0 / ids.shape[1], device=ids.device, requires_grad=True)

    def forward(self) -> None:
        moe = self.moe
        experts = PairwiseExperts(experts=moe.experts, structure=Structure(), like=[self.x.detach()[:0]])
        prepared = moe.schedule.prepare(self.ids, moe.dispatcher, experts, moe.mesh, "bench", True)
        if not self.compute:
            experts = replace(experts, experts=NoExperts(self.bed.width))
        call = LayerCall(
            plan=replace(prepared.plan, dispatcher=replace(moe.dispatcher, transport=self.transport)),
            programs=self.programs or prepared.programs,
            experts=experts,
            shadows=prepared.shadows,
            watch=moe.schedule.watch,
        )
        self.out = DispatchCombine.apply(self.scores, call, self.x, *moe.experts.weights)

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
        direction: {name: statistics.median(found) for name, found in cases.items()}
        for direction, cases in times.items()
    }


def tune(mesh: Mesh, step: LayerStep) -> None:
    """Let a layer measure and try until it has chosen how to cut its exchange."""
    for _ in range(2 + CALLS * TRIED):
        timed(mesh, step.forward)
        timed(mesh, step.backward)


def widths_for(mesh: Mesh, bed: Bed, ids: torch.Tensor) -> list[int]:
    """Hidden widths for which communication takes RATIOS times as long as compute."""
    found: list[tuple[int, float]] = []
    wire = 0.0
    for trial in (4096, 8192):  # two of them: what does not depend on the width is not divided by it
        moe = make(mesh, bed, mesh.num_ranks, trial)
        cases = {"compute": LayerStep(moe, bed, ids, wire=False)}
        if not found:
            cases["communication"] = LayerStep(moe, bed, ids, compute=False)
        times = interleaved(mesh, cases, 5)
        total = {name: times["forward"][name] + times["backward"][name] for name in cases}
        found.append((trial, total["compute"]))
        wire = total.get("communication", wire)
    (narrow, less), (wide, more) = found
    per_column = (more - less) / (wide - narrow)
    fixed = less - per_column * narrow
    wanted = [(wire / ratio - fixed) / per_column for ratio in RATIOS]
    return [max(256, round(width / 256) * 256) for width in mesh.gather_objects(wanted)[0]]


def measure_even(mesh: Mesh, bed: Bed, repeats: int) -> list[dict[str, Any]]:
    experts = mesh.num_ranks
    ids = choices(mesh, bed.tokens, experts, 1)
    rows = []
    for hidden in widths_for(mesh, bed, ids):
        blocking = make(mesh, bed, experts, hidden, schedule="blocking")
        chosen = make(mesh, bed, experts, hidden, schedule="smart")
        chosen.experts = blocking.experts  # all cases use the same memory: how its pages lie matters
        cases = {
            "compute": LayerStep(blocking, bed, ids, wire=False),
            "communication": LayerStep(blocking, bed, ids, compute=False),
            "blocking": LayerStep(blocking, bed, ids, programs=serial(blocking)),
            "one unit": LayerStep(blocking, bed, ids),
        }
        if bed.device != "cpu":
            cases["neither"] = LayerStep(blocking, bed, ids, wire=False, compute=False)
        for chunks in (1, 2):
            moe = make(mesh, bed, experts, hidden, schedule="smart", group_size=1, chunks=chunks)
            moe.experts = blocking.experts
            cases[f"smart/{chunks}"] = LayerStep(moe, bed, ids)
            if chunks == 1:
                cases[CUT] = LayerStep(moe, bed, ids, compute=False)
        cases["chosen"] = LayerStep(chosen, bed, ids)
        tune(mesh, cases["chosen"])
        times = interleaved(mesh, cases, repeats)
        report = chosen.schedule.report()
        cut = f"{report['steps']}x{report['chunks']} {report['rule'].split(',')[0]}"
        rows += [
            {"hidden": hidden, "direction": direction, **found, "cut": cut}
            for direction, found in times.items()
        ]
    return rows


def measure_skewed(mesh: Mesh, bed: Bed, repeats: int) -> dict[str, Any]:
    bed = replace(bed, width=SKEWED_WIDTH)
    ids = choices(mesh, SKEWED_TOKENS, MANY_EXPERTS, TOP_K, ZIPF)
    settings = {"schedule": "smart", "group_size": 1, "chunks": 1}
    plain = make(mesh, bed, MANY_EXPERTS, SKEWED_HIDDEN, **settings)
    shadowed = make(mesh, bed, MANY_EXPERTS, SKEWED_HIDDEN, shadow="auto", **settings)
    cases = {"smart": LayerStep(plain, bed, ids), "smart + shadows": LayerStep(shadowed, bed, ids)}
    times = interleaved(mesh, cases, repeats)
    found = {name: times["forward"][name] + times["backward"][name] for name in cases}
    plan = shadowed.schedule.shadow_plan
    assert plan is not None
    measured = found["smart"] - found["smart + shadows"]
    return {
        **found,
        "shadows": [list(entry) for entry in plan.shadows],
        "predicted_gain": plan.gain,
        "measured_gain": measured,
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
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
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.device == "cuda":
        if torch.cuda.device_count() == 0:
            print("bench/overlap.py --device cuda: this machine has no CUDA device.")
            return 2
        bed = replace(ON_DEVICE, transport="direct" if given.backend == "nccl" else given.transport)
        options = {"deadline_s": 1800, "device": bed.device, "backend": given.backend}
        return report(run_ranks(given.ranks, measure, bed, given.repeats, **options)[0], given.json)
    bed = BEDS[given.wire]
    if given.inside is None:
        network = shaped_network(bed.rate_mbit) if given.wire == "shared" else switched_network()
        with tempfile.TemporaryDirectory() as folder, network as run:
            out = Path(folder) / "rows.json"
            again = ["--inside", str(out), "--wire", given.wire, "--repeats", str(given.repeats)]
            code = run([sys.executable, __file__, *again]).returncode
            if code:
                return code
            found = json.loads(out.read_text())
        return report(found, given.json)
    os.environ[HUGE_PAGES] = "1"  # before the ranks start: torch looks once
    cable = functools.partial(join_switch, rate_mbit=bed.rate_mbit)
    before = None if given.wire == "shared" else cable
    found = run_ranks(RANKS, measure, bed, given.repeats, deadline_s=5400, before=before)[0]
    given.inside.write_text(json.dumps(found))
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
    if file is not None:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
        file.write_text(json.dumps({"rows": found, "checks": checks, "machine": machine}, indent=1))
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
