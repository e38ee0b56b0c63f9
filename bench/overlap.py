"""How much of one MoE layer's exchange hides under its experts, on a slow wire.

    .venv/bin/python bench/overlap.py [--json FILE] [--repeats 9]
    .venv/bin/python bench/overlap.py --device cuda --transport pinned --ranks 2 [--json FILE]

Four ranks in a network namespace of their own, whose loopback is a slow wire (bench/shaped_network.py):
there communication costs time but no processor, so that two cores can show what a cluster would. For several
link rates and widths of experts one process group runs, in turn and interleaved: compute alone (nothing
travels), communication alone (nothing is computed), the blocking exchange in which nothing overlaps, our own
one-unit exchange (weight gradients already hide the last transfer), and the smart one, with given chunks and
with a granularity chosen from measured costs. A time is that of a whole layer, sizes, forward and
backward, of the slowest rank; the table shows medians. The bound is max(compute, communication): no schedule
can beat it.

A second table has skewed routing (Zipf, s = 1.2, 16 experts, top-2) and small experts: smart without and with
shadows, and what the policy had predicted.

With `--device cuda` two to four ranks share one GPU under MPS (nvidia-cuda-mps-control -d), and rows go
through pinned memory of the host: copy engines move them at some 17 GB/s each way, a network's rate, and take
no processor of the device. Experts are as wide as they must be for communication to take 0.5, 1 and 2 times
as long as compute. `neither` is what is left when nothing travels and nothing is computed: sizes are still
exchanged and rows put in order, and no schedule hides that. `hidden` is what smart saves of what could be
saved: (blocking - smart) / (blocking - bound).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
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
from shaped_network import set_rate, shaped_network

from moeclipse.comm.exchange import Result
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.moe.granularity import CALLS, TRIED
from moeclipse.moe.layer import MoE
from moeclipse.moe.routed import Programs, Routed, RoutedCall
from moeclipse.schedule.check import verify
from moeclipse.schedule.smart import smart
from moeclipse.testing.run_ranks import run_ranks

RANKS, WIDTH = 4, 512
POINTS = ((240.0, 4096), (240.0, 2048), (140.0, 2048))
"""(mbit, hidden width of an expert): communication is about 0.5, 1 and 2 times compute."""
SKEWED_TOKENS, SKEWED_HIDDEN, MANY_EXPERTS, TOP_K, ZIPF = 1024, 64, 16, 2, 1.2
SKEWED_RATE = 240.0
WIRE_CPU = "processor time of communication"
RATIOS = (0.5, 1.0, 2.0)
"""Communication over compute, on a device."""


@dataclass(frozen=True)
class Bed:
    """What the layer is made of, and where it runs."""

    device: str = "cpu"
    transport: str = "direct"
    tokens: int = 640
    width: int = WIDTH
    dtype: torch.dtype = torch.float32


ON_DEVICE = Bed("cuda:0", "pinned", 16384, 4096, torch.bfloat16)


class NoWire:
    """Rows do not travel: what is computed is what would have arrived."""

    def all_to_all(self, rows: Any, send: Any, receive: Any, label: str, out: Any = None) -> Result:
        if out is None:
            return Result(rows.new_zeros((sum(receive), *rows.shape[1:])))
        return Result(out.fill_(0.01))


class NoExperts:
    """Nothing is computed: rows return as they came."""

    def __init__(self, width: int) -> None:
        self.out_width = width

    def forward(self, x: torch.Tensor, counts: Any) -> tuple[torch.Tensor, None]:
        return x, None

    def dgrad(self, dy: torch.Tensor, saved: None) -> tuple[torch.Tensor, None]:
        return dy, None

    def wgrad(self, pending: Any) -> tuple[None, None]:
        return None, None


def make(mesh: Mesh, bed: Bed, experts: int, hidden: int, **exchange: Any) -> MoE:
    exchange = {"transport": bed.transport, **exchange}
    gate = GateConfig(top_k=1)
    return MoE(bed.width, hidden, experts, gate=gate, mesh=mesh, exchange=exchange, dtype=bed.dtype)


def serial(moe: MoE) -> Programs:
    """Nothing overlaps: rows out, all compute with the weight gradients, results back."""
    shape = replace(moe.schedule.shape(), blocking=True)
    forward, backward = (verify(smart(replace(shape, backward=back))) for back in (False, True))
    return Programs(forward=forward, backward=backward)


def layer_step(
    moe: MoE,
    bed: Bed,
    ids: torch.Tensor,
    *,
    wire: bool = True,
    compute: bool = True,
    programs: Programs | None = None,
) -> Callable[[], None]:
    """One forward and backward of the routed part with a fixed routing."""
    x = torch.randn(len(ids), bed.width, dtype=bed.dtype, device=ids.device, requires_grad=True)
    scores = torch.full(ids.shape, 1.0 / ids.shape[1], device=ids.device, requires_grad=True)

    def step() -> None:
        prepared = moe.schedule.prepare(ids, moe.route, moe.experts, moe.mesh, "bench", True)
        plan = prepared.plan
        if not wire:
            plan = replace(plan, route=replace(moe.route, transport=NoWire()))
        call = RoutedCall(
            plan=plan,
            programs=programs or prepared.programs,
            experts=moe.experts if compute else NoExperts(bed.width),
            shadowed=prepared.shadowed,
            watch=moe.schedule.watch,
        )
        out = Routed.apply(scores, call, x, *moe.experts.weights)
        out.backward(out.detach())

    return step


def choices(mesh: Mesh, tokens: int, experts: int, top_k: int, zipf: float = 0.0) -> torch.Tensor:
    """Random experts of each token, the k-th of all with weight k^-zipf."""
    generator = torch.Generator().manual_seed(mesh.rank)
    weight_E = torch.arange(1, experts + 1, dtype=torch.float64) ** -zipf
    draw = torch.rand(tokens, experts, generator=generator, dtype=torch.float64)
    return (draw.log() / weight_E).topk(top_k).indices.to(mesh.device)


def timed(mesh: Mesh, step: Callable[[], None]) -> float:
    """Seconds of the slowest rank, from a common start."""
    return timed_with_cpu(mesh, step)[0]


def timed_with_cpu(mesh: Mesh, step: Callable[[], None]) -> tuple[float, float]:
    """(seconds of the slowest rank, processor seconds of all ranks over the number of cores)."""
    mesh.barrier()
    begun, busy = time.perf_counter(), time.process_time()
    step()
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    mine = (time.perf_counter() - begun, time.process_time() - busy)
    everyone = mesh.gather_objects(mine)
    return max(wall for wall, _ in everyone), sum(cpu for _, cpu in everyone) / (os.cpu_count() or 1)


def interleaved(
    mesh: Mesh, cases: dict[str, Callable[[], None]], rate: float | None, repeats: int
) -> dict[str, float]:
    """Median seconds of each case at this rate; the first two rounds measure costs and warm up."""
    if mesh.rank == 0 and rate is not None:
        set_rate(rate)
    mesh.barrier()
    times: dict[str, list[float]] = {name: [] for name in [*cases, WIRE_CPU]}
    for repeat in range(-2, repeats):
        for name, step in cases.items():
            seconds, busy = timed_with_cpu(mesh, step)
            if repeat >= 0:
                times[name].append(seconds)
                if name == "communication":
                    times[WIRE_CPU].append(busy)
        if mesh.rank == 0:
            print(f"\r{max(repeat + 1, 0)}/{repeats} ", end="", file=sys.stderr, flush=True)
    return {name: statistics.median(found) for name, found in times.items() if found}


def tune(mesh: Mesh, step: Callable[[], None], rate: float | None) -> None:
    """Let a layer measure and try until it has chosen how to cut its exchange."""
    if mesh.rank == 0 and rate is not None:
        set_rate(rate)
    for _ in range(2 + CALLS * TRIED):
        timed(mesh, step)


def points_for(mesh: Mesh, bed: Bed, ids: torch.Tensor) -> list[tuple[None, int]]:
    """Hidden widths for which communication takes RATIOS times as long as compute."""
    trial = 2048
    moe = make(mesh, bed, mesh.num_ranks, trial)
    cases = {
        "compute": layer_step(moe, bed, ids, wire=False),
        "communication": layer_step(moe, bed, ids, compute=False),
    }
    found = interleaved(mesh, cases, None, 3)
    per_column = mesh.gather_objects(found["compute"] / trial)[0]
    wire = mesh.gather_objects(found["communication"])[0]
    return [(None, max(256, round(wire / ratio / per_column / 256) * 256)) for ratio in RATIOS]


def measure_even(mesh: Mesh, bed: Bed, repeats: int) -> list[dict[str, Any]]:
    experts = mesh.num_ranks
    ids = choices(mesh, bed.tokens, experts, 1)
    rows = []
    for rate, hidden in POINTS if bed.device == "cpu" else points_for(mesh, bed, ids):
        blocking = make(mesh, bed, experts, hidden, schedule="blocking")
        chosen = make(mesh, bed, experts, hidden, schedule="smart")
        cases = {
            "compute": layer_step(blocking, bed, ids, wire=False),
            "communication": layer_step(blocking, bed, ids, compute=False),
            "blocking": layer_step(blocking, bed, ids, programs=serial(blocking)),
            "one unit": layer_step(blocking, bed, ids),
        }
        if bed.device != "cpu":
            cases["neither"] = layer_step(blocking, bed, ids, wire=False, compute=False)
        for chunks in (1, 2):
            moe = make(mesh, bed, experts, hidden, schedule="smart", group_size=1, chunks=chunks)
            cases[f"smart/{chunks}"] = layer_step(moe, bed, ids)
        cases["chosen"] = layer_step(chosen, bed, ids)
        tune(mesh, cases["chosen"], rate)
        use = interleaved(mesh, cases, rate, repeats)
        report = chosen.schedule.report()
        rows.append(
            {"rate_mbit": rate, "hidden": hidden, **use, "cut": f"{report['steps']}x{report['chunks']}"}
        )
    return rows


def measure_skewed(mesh: Mesh, bed: Bed, repeats: int) -> dict[str, Any]:
    ids = choices(mesh, SKEWED_TOKENS, MANY_EXPERTS, TOP_K, ZIPF)
    settings = {"schedule": "smart", "group_size": 1, "chunks": 1}
    plain = make(mesh, bed, MANY_EXPERTS, SKEWED_HIDDEN, **settings)
    lent = make(mesh, bed, MANY_EXPERTS, SKEWED_HIDDEN, shadow="auto", **settings)
    cases = {"smart": layer_step(plain, bed, ids), "smart + shadows": layer_step(lent, bed, ids)}
    found = interleaved(mesh, cases, SKEWED_RATE, repeats)
    plan = lent.schedule.shadow_plan
    assert plan is not None
    measured = found["smart"] - found["smart + shadows"]
    return {
        "rate_mbit": SKEWED_RATE,
        **found,
        "shadows": [list(entry) for entry in plan.shadows],
        "predicted_gain": plan.gain,
        "measured_gain": measured,
    }


def measure(mesh: Mesh, bed: Bed, repeats: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    if bed.device != "cpu":
        torch.cuda.set_device(mesh.device)
        return {"even": measure_even(mesh, bed, repeats), "skewed": None}
    return {"even": measure_even(mesh, bed, repeats), "skewed": measure_skewed(mesh, bed, repeats)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=2, help="with --device cuda: ranks that share the GPU")
    parser.add_argument(
        "--transport", choices=["pinned", "peer"], default="pinned", help="with --device cuda"
    )
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.device == "cuda":
        if torch.cuda.device_count() == 0:
            print("bench/overlap.py --device cuda: this machine has no CUDA device.")
            return 2
        bed = replace(ON_DEVICE, transport=given.transport)
        options = {"deadline_s": 1800, "device": bed.device}
        return report(run_ranks(given.ranks, measure, bed, given.repeats, **options)[0], given.json)
    if given.inside is None:
        with tempfile.TemporaryDirectory() as folder, shaped_network(POINTS[0][0]) as run:
            out = Path(folder) / "rows.json"
            code = run(
                [sys.executable, __file__, "--inside", str(out), "--repeats", str(given.repeats)]
            ).returncode
            if code:
                return code
            found = json.loads(out.read_text())
        return report(found, given.json)
    given.inside.write_text(json.dumps(run_ranks(RANKS, measure, Bed(), given.repeats, deadline_s=1800)[0]))
    return 0


def report(found: dict[str, Any], file: Path | None) -> int:
    rows, skewed = found["even"], found["skewed"]
    names = [name for name in rows[0] if name not in ("rate_mbit", "hidden", "cut")]
    print("\n\nmedian ms of one layer, forward and backward; even routing\n")
    print(
        f"{'mbit':>5} {'hidden':>6} "
        + " ".join(f"{name:>13}" for name in names)
        + "  cut smart/bound block/smart hidden"
    )
    ratios = []
    for row in rows:
        bound = max(row["compute"], row["communication"])
        chosen = row["chosen"]
        ratios.append((row["communication"] / row["compute"], chosen / bound, row["blocking"] / chosen))
        cells = " ".join(f"{1e3 * row[name]:13.1f}" for name in names)
        hidden = (row["blocking"] - chosen) / max(row["blocking"] - bound, 1e-9)
        ends = f"{chosen / bound:11.2f} {row['blocking'] / chosen:11.2f} {hidden:6.2f}"
        print(f"{row['rate_mbit'] or '':>5} {row['hidden']:6} {cells} {row['cut']:>4} {ends}")
    inside = [entry for entry in ratios if 0.5 <= entry[0] <= 2.0] or ratios
    closest = min(ratios, key=lambda entry: abs(entry[0] - 1.0))
    checks = {
        "smart_over_bound": max(entry[1] for entry in inside),
        "blocking_over_smart": closest[2],
        "communication_over_compute": closest[0],
        "smart_over_bound_of_cores": max(bound_of_cores(row) for row in rows),
    }
    if skewed is not None:
        checks |= show_skewed(skewed)
    print("  ".join(f"{name} {value:.2f}" for name, value in checks.items()))
    if file is not None:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
        file.write_text(json.dumps({"rows": found, "checks": checks, "machine": machine}, indent=1))
    return 0


def bound_of_cores(row: dict[str, Any]) -> float:
    """Chosen over what the cores allow: communication takes some of them, too."""
    return float(row["chosen"] / max(row["compute"] + row[WIRE_CPU], row["communication"]))


def show_skewed(skewed: dict[str, Any]) -> dict[str, float]:
    times = {name: 1e3 * skewed[name] for name in ("smart", "smart + shadows", "predicted_gain")}
    print(f"\nskewed routing at {skewed['rate_mbit']:g} mbit: smart {times['smart']:.0f} ms, ", end="")
    print(f"with shadows {times['smart + shadows']:.0f} ms; gain predicted {times['predicted_gain']:.0f} ms")
    print(f"shadows (expert, ranks): {skewed['shadows']}\n")
    return {
        "shadow_ratio": skewed["smart + shadows"] / skewed["smart"],
        "predicted_over_measured_gain": skewed["predicted_gain"] / skewed["measured_gain"],
    }


if __name__ == "__main__":
    raise SystemExit(main())
