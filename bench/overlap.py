"""How much of one MoE layer's exchange hides under its experts, on a slow wire.

    .venv/bin/python bench/overlap.py [--json FILE] [--repeats 9]

Four ranks in a network namespace of their own, whose loopback is a slow wire (bench/shaped_network.py):
there communication costs time but no processor, so that two cores can show what a cluster would. For each
link rate one process group runs, in turn and interleaved: compute alone (nothing travels), communication
alone (nothing is computed), the blocking exchange, and the smart one, with given chunks and with a
granularity chosen from measured costs. A time is that of a whole layer, sizes, forward and backward, of the
slowest rank; the table shows medians. The bound is max(compute, communication): no schedule can beat it.

A second table has skewed routing (Zipf, s = 1.2, 16 experts) and small experts: smart without and with
shadows, and what the policy had predicted.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from shaped_network import set_rate, shaped_network

from moeclipse.comm.exchange import Result
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.moe.layer import MoE
from moeclipse.moe.routed import Routed, RoutedCall
from moeclipse.testing.run_ranks import run_ranks

RANKS, WIDTH, EXPERTS, TOP_K = 4, 512, 16, 2
EVEN = {"tokens": 384, "hidden": 1024}
SKEWED = {"tokens": 1024, "hidden": 64}
ZIPF = 1.2
SKEWED_RATE = 240.0


class NoWire:
    """Rows do not travel: what is computed is what would have arrived."""

    def all_to_all(self, rows: Any, send: Any, receive: Any, label: str, out: Any = None) -> Result:
        if out is None:
            return Result(rows.new_zeros((sum(receive), *rows.shape[1:])))
        return Result(out.fill_(0.01))


class NoExperts:
    """Nothing is computed: rows return as they came."""

    out_width = WIDTH

    def forward(self, x: torch.Tensor, counts: Any) -> tuple[torch.Tensor, None]:
        return x, None

    def dgrad(self, dy: torch.Tensor, saved: None) -> tuple[torch.Tensor, None]:
        return dy, None

    def wgrad(self, pending: Any) -> tuple[None, None]:
        return None, None


def make(mesh: Mesh, hidden: int, **exchange: Any) -> MoE:
    return MoE(WIDTH, hidden, EXPERTS, gate=GateConfig(top_k=TOP_K), mesh=mesh, exchange=exchange)


def layer_step(moe: MoE, ids: torch.Tensor, *, wire: bool = True, compute: bool = True) -> Callable[[], None]:
    """One forward and backward of the routed part with a fixed routing."""
    x = torch.randn(len(ids), WIDTH, requires_grad=True)
    scores = torch.full(ids.shape, 1.0 / TOP_K, requires_grad=True)

    def step() -> None:
        prepared = moe.schedule.prepare(ids, moe.route, moe.experts, moe.mesh, "bench", True)
        plan = prepared.plan
        if not wire:
            plan = replace(plan, route=replace(moe.route, transport=NoWire()))
        call = RoutedCall(
            plan=plan,
            programs=prepared.programs,
            experts=moe.experts if compute else NoExperts(),
            shadowed=prepared.shadowed,
        )
        out = Routed.apply(scores, call, x, *moe.experts.weights)
        out.backward(out.detach())

    return step


def choices(mesh: Mesh, tokens: int, zipf: float = 0.0) -> torch.Tensor:
    """Random experts of each token, the k-th of them with weight k^-zipf."""
    generator = torch.Generator().manual_seed(mesh.rank)
    weight_E = torch.arange(1, EXPERTS + 1, dtype=torch.float64) ** -zipf
    draw = torch.rand(tokens, EXPERTS, generator=generator, dtype=torch.float64)
    return (draw.log() / weight_E).topk(TOP_K).indices


def timed(mesh: Mesh, step: Callable[[], None]) -> float:
    """Seconds of the slowest rank, from a common start."""
    mesh.barrier()
    begun = time.perf_counter()
    step()
    return max(mesh.gather_objects(time.perf_counter() - begun))


def interleaved(
    mesh: Mesh, cases: dict[str, Callable[[], None]], rate: float, repeats: int
) -> dict[str, float]:
    """Median seconds of each case at this rate; the first two rounds measure costs and warm up."""
    if mesh.rank == 0:
        set_rate(rate)
    mesh.barrier()
    times: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(-2, repeats):
        for name, step in cases.items():
            seconds = timed(mesh, step)
            if repeat >= 0:
                times[name].append(seconds)
        if mesh.rank == 0:
            print(f"\r{rate:g} mbit: {max(repeat + 1, 0)}/{repeats} ", end="", file=sys.stderr, flush=True)
    return {name: statistics.median(found) for name, found in times.items()}


def measure_even(mesh: Mesh, rates: list[float], repeats: int) -> list[dict[str, Any]]:
    ids, hidden = choices(mesh, EVEN["tokens"]), EVEN["hidden"]
    rows = []
    for rate in rates:
        blocking = make(mesh, hidden, schedule="blocking")
        chosen = make(mesh, hidden, schedule="smart")
        cases = {
            "compute": layer_step(blocking, ids, wire=False),
            "communication": layer_step(blocking, ids, compute=False),
            "blocking": layer_step(blocking, ids),
        }
        for chunks in (1, 2):
            moe = make(mesh, hidden, schedule="smart", group_size=1, chunks=chunks)
            cases[f"smart/{chunks}"] = layer_step(moe, ids)
        cases["chosen"] = layer_step(chosen, ids)
        use = interleaved(mesh, cases, rate, repeats)
        report = chosen.schedule.report()
        rows.append({"rate_mbit": rate, **use, "cut": f"{report['steps']}x{report['chunks']}"})
    return rows


def measure_skewed(mesh: Mesh, repeats: int) -> dict[str, Any]:
    ids, hidden = choices(mesh, SKEWED["tokens"], ZIPF), SKEWED["hidden"]
    plain = make(mesh, hidden, schedule="smart", group_size=1, chunks=1)
    lent = make(mesh, hidden, schedule="smart", group_size=1, chunks=1, shadow="auto")
    cases = {"smart": layer_step(plain, ids), "smart + shadows": layer_step(lent, ids)}
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


def measure(mesh: Mesh, rates: list[float], repeats: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {"even": measure_even(mesh, rates, repeats), "skewed": measure_skewed(mesh, repeats)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rates", type=float, nargs="+", default=[240.0, 180.0, 120.0])
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside is None:
        with tempfile.TemporaryDirectory() as folder, shaped_network(given.rates[0]) as run:
            out = Path(folder) / "rows.json"
            rates = [str(rate) for rate in given.rates]
            command = [sys.executable, __file__, "--inside", str(out), "--repeats", str(given.repeats)]
            code = run([*command, "--rates", *rates]).returncode
            if code:
                return code
            found = json.loads(out.read_text())
        return report(found, given.json)
    given.inside.write_text(
        json.dumps(run_ranks(RANKS, measure, given.rates, given.repeats, deadline_s=1800)[0])
    )
    return 0


def report(found: dict[str, Any], file: Path | None) -> int:
    rows, skewed = found["even"], found["skewed"]
    names = [name for name in rows[0] if name not in ("rate_mbit", "cut")]
    print("\n\nmedian ms of one layer, forward and backward; even routing\n")
    print(f"{'mbit':>5} " + " ".join(f"{name:>13}" for name in names) + "  cut smart/bound block/smart")
    ratios = []
    for row in rows:
        bound = max(row["compute"], row["communication"])
        smart = row["chosen"]
        ratios.append((row["communication"] / row["compute"], smart / bound, row["blocking"] / smart))
        cells = " ".join(f"{1e3 * row[name]:13.0f}" for name in names)
        ends = f"{smart / bound:11.2f} {row['blocking'] / smart:11.2f}"
        print(f"{row['rate_mbit']:5g} {cells} {row['cut']:>4} {ends}")
    inside = [entry for entry in ratios if 0.5 <= entry[0] <= 2.0] or ratios
    closest = min(ratios, key=lambda entry: abs(entry[0] - 1.0))
    checks = {
        "smart_over_bound": max(entry[1] for entry in inside),
        "blocking_over_smart": closest[2],
        "communication_over_compute": closest[0],
        "shadow_ratio": skewed["smart + shadows"] / skewed["smart"],
        "predicted_over_measured_gain": skewed["predicted_gain"] / skewed["measured_gain"],
    }
    times = {name: 1e3 * skewed[name] for name in ("smart", "smart + shadows", "predicted_gain")}
    print(f"\nskewed routing at {skewed['rate_mbit']:g} mbit: smart {times['smart']:.0f} ms, ", end="")
    print(f"with shadows {times['smart + shadows']:.0f} ms; gain predicted {times['predicted_gain']:.0f} ms")
    print(f"shadows (expert, ranks): {skewed['shadows']}\n")
    print("  ".join(f"{name} {value:.2f}" for name, value in checks.items()))
    if file is not None:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
        file.write_text(json.dumps({"rows": found, "checks": checks, "machine": machine}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
