"""How much of one MoE layer's exchange hides under its experts, on a slow wire.

    .venv/bin/python bench/overlap.py [--json FILE] [--repeats 9]

Four ranks in a network namespace of their own, whose loopback is a slow wire (bench/shaped_network.py):
there communication costs time but no processor, so that two cores can show what a cluster would. For each
link rate one process group runs, in turn and interleaved: compute alone (nothing travels), communication
alone (nothing is computed), the blocking exchange, and the smart one. A time is that of a whole layer,
sizes, forward and backward, of the slowest rank; the table shows medians. The bound is
max(compute, communication): no schedule can beat it.
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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from shaped_network import set_rate, shaped_network

from moeclipse.comm.exchange import Result
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.moe.dispatch import plan_dispatch
from moeclipse.moe.layer import MoE
from moeclipse.moe.routed import Routed, RoutedCall
from moeclipse.testing.run_ranks import run_ranks

RANKS, WIDTH, HIDDEN, EXPERTS, TOP_K = 4, 512, 1024, 16, 2
TOKENS = 384


class NoWire:
    """Rows do not travel: what is computed is what would have arrived."""

    def all_to_all(self, rows: Any, send: Any, receive: Any, label: str, out: Any = None) -> Result:
        if out is None:
            out = rows.new_zeros((sum(receive), *rows.shape[1:]))
        else:
            out.fill_(0.01)
        return Result(out)


class NoExperts:
    """Nothing is computed: rows return as they came."""

    out_width = WIDTH

    def forward(self, x: torch.Tensor, counts: Any) -> tuple[torch.Tensor, None]:
        return x, None

    def dgrad(self, dy: torch.Tensor, saved: None) -> tuple[torch.Tensor, None]:
        return dy, None

    def wgrad(self, pending: Any) -> tuple[None, None]:
        return None, None


def make(mesh: Mesh, **exchange: Any) -> MoE:
    return MoE(WIDTH, HIDDEN, EXPERTS, gate=GateConfig(top_k=TOP_K), mesh=mesh, exchange=exchange)


def layer_step(moe: MoE, ids: torch.Tensor, *, wire: bool = True, compute: bool = True) -> Callable[[], None]:
    """One forward and backward of the routed part with a fixed routing."""
    x = torch.randn(len(ids), WIDTH, requires_grad=True)
    scores = torch.full(ids.shape, 1.0 / TOP_K, requires_grad=True)
    experts: Any = moe.experts if compute else NoExperts()

    def step() -> None:
        from dataclasses import replace

        shape = moe.schedule.shape()
        plan = plan_dispatch(ids, moe.route, shape, "bench")
        if not wire:
            plan = replace(plan, route=replace(moe.route, transport=NoWire()))
            arrived = torch.zeros(len(plan.regroup_M), 2)
        del_pairs = () if wire else (arrived,)
        programs = moe.schedule.programs(shape)
        call = RoutedCall(plan=plan, programs=programs, experts=experts)
        out = Routed.apply(scores, call, x, *moe.experts.weights)
        out.backward(out.detach())
        del del_pairs

    return step


def uniform(mesh: Mesh) -> torch.Tensor:
    generator = torch.Generator().manual_seed(mesh.rank)
    return torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices


def timed(mesh: Mesh, step: Callable[[], None]) -> float:
    """Seconds of the slowest rank, from a common start."""
    mesh.barrier()
    begun = time.perf_counter()
    step()
    return max(mesh.gather_objects(time.perf_counter() - begun))


def measure(mesh: Mesh, rates: list[float], repeats: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    ids = uniform(mesh)
    blocking, smart = make(mesh, schedule="blocking"), {}
    for chunks in (1, 2, 4):
        smart[f"smart/{chunks}"] = make(mesh, schedule="smart", group_size=1, chunks=chunks)
    cases = {
        "compute": layer_step(blocking, ids, wire=False),
        "communication": layer_step(blocking, ids, compute=False),
        "blocking": layer_step(blocking, ids),
        **{name: layer_step(moe, ids) for name, moe in smart.items()},
    }
    rows = []
    for rate in rates:
        if mesh.rank == 0:
            set_rate(rate)
        mesh.barrier()
        times: dict[str, list[float]] = {name: [] for name in cases}
        for repeat in range(repeats + 1):
            for name, step in cases.items():
                seconds = timed(mesh, step)
                if repeat:
                    times[name].append(seconds)
            if mesh.rank == 0:
                print(f"\r{rate:g} mbit: {repeat}/{repeats}", end="", file=sys.stderr, flush=True)
        rows.append({"rate_mbit": rate, **{name: statistics.median(found) for name, found in times.items()}})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rates", type=float, nargs="+", default=[240.0, 120.0, 60.0])
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
            rows = json.loads(out.read_text())
        return report(rows, given.json)
    rows = run_ranks(RANKS, measure, given.rates, given.repeats, deadline_s=1800, collective_deadline_s=60)[0]
    given.inside.write_text(json.dumps(rows))
    return 0


def report(rows: list[dict[str, Any]], file: Path | None) -> int:
    names = [name for name in rows[0] if name != "rate_mbit"]
    print("\nmedian ms of one layer, forward and backward\n")
    print(
        f"{'mbit':>6} "
        + " ".join(f"{name:>13}" for name in names)
        + f" {'smart/bound':>12} {'block/smart':>12}"
    )
    ratios = []
    for row in rows:
        bound = max(row["compute"], row["communication"])
        smart = min(row[name] for name in names if name.startswith("smart"))
        near = row["communication"] / row["compute"]
        ratios.append((near, smart / bound, row["blocking"] / smart))
        cells = " ".join(f"{1e3 * row[name]:13.0f}" for name in names)
        print(f"{row['rate_mbit']:6g} {cells} {smart / bound:12.2f} {row['blocking'] / smart:12.2f}")
    inside = [entry for entry in ratios if 0.5 <= entry[0] <= 2.0] or ratios
    closest = min(ratios, key=lambda entry: abs(entry[0] - 1.0))
    checks = {
        "smart_over_bound": max(entry[1] for entry in inside),
        "blocking_over_smart": closest[2],
        "communication_over_compute": closest[0],
    }
    print("\n" + "  ".join(f"{name} {value:.2f}" for name, value in checks.items()))
    if file is not None:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
        file.write_text(json.dumps({"rows": rows, "checks": checks, "machine": machine}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
