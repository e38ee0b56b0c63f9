"""How fast programs are verified and simulated, and what the simulator says about them.

    .venv/bin/python bench/schedules.py [--json FILE] [--quick | --smoke]

Speed: verify and simulate at action level, P=8 M=32 V=2 in milliseconds and DualPipeV P=256 M=1024 (about a
million actions) in seconds, with sizes in between to see that cost grows about linearly; 1F1B P=1024 M=4096
(eight million) with its memory. Orders: makespans of the drawn example, the exchange of 64 ranks against
its bound, which rule orders an exchange best, events per step against per (step, expert), and schedules
side by side on the costs of a published trace.
"""

from __future__ import annotations

import gc
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import numpy as np
from _smoke import BenchParser, machine, write

from moeclipse.cost.exchange import ExchangeCosts
from moeclipse.cost.model import DEEPSEEK_V3, UNIT
from moeclipse.plan.search import choose_exchange
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.lower import lower
from moeclipse.schedule.op import Program
from moeclipse.schedule.smart import exchange_shape, smart
from moeclipse.schedule.templates import Expansion
from moeclipse.sim.compare import Question, ask
from moeclipse.sim.engine import simulate
from moeclipse.sim.exchange import lower_bound, simulate_exchange

Rows = list[dict[str, Any]]
SIZES = [(8, 32), (16, 64), (32, 128), (64, 256), (128, 512), (256, 1024)]


def say(text: str) -> None:
    print(text, flush=True)


def actions(program: Program) -> int:
    """A pair holds two."""
    return sum(len(op.leaves) for ops in program.ranks for op in ops)


def seconds(work: Callable[[], object], repeats: int) -> float:
    spent = []
    for _ in range(repeats):
        gc.collect()
        begin = time.perf_counter()
        work()
        spent.append(time.perf_counter() - begin)
    return statistics.median(spent)


def speed(rows: Rows, checks: dict[str, float], number: int) -> None:
    """Of so many sizes."""
    say("speed: verify + simulate, whole actions of DualPipeV")
    sizes = SIZES[:number]
    for P, M in sizes:
        begin = time.perf_counter()
        program = build("dualpipev", P, M)
        generated = time.perf_counter() - begin
        repeats = 21 if P == 8 else 5 if P <= 32 else 3
        spent = seconds(lambda program=program: simulate(verify(program), UNIT), repeats)
        count = actions(program)
        rows.append(
            {"what": "speed", "P": P, "M": M, "actions": count, "generate_s": generated, "spent_s": spent}
        )
        say(
            f"  P={P:<4} M={M:<5} {count:>9,} actions  generate {generated:7.3f} s  "
            f"verify + simulate {spent:7.3f} s  {spent / count * 1e6:5.2f} us per action"
        )
        if P == 8:
            checks["p8_ms"] = spent * 1e3
        if P == 256:
            checks["p256_s"] = spent
    first, last = ((r["actions"], r["spent_s"]) for r in (rows[-max(len(sizes) - 1, 2)], rows[-1]))
    checks["growth_exponent"] = math.log(last[1] / first[1]) / math.log(last[0] / first[0])
    P, M = sizes[min(len(sizes), 3) - 1]
    lowered = lower(build("dualpipev", P, M))
    spent = seconds(lambda: simulate(verify(lowered), UNIT), 3)
    rows.append({"what": "speed lowered", "P": P, "M": M, "ops": lowered.num_ops, "spent_s": spent})
    say(f"  P={P:<4} M={M:<5} {lowered.num_ops:>9,} ops with SEND and RECV, op by op: {spent:.3f} s")


def scale(rows: Rows, checks: dict[str, float]) -> None:
    """In a process of its own, whose memory is that of this program alone."""
    P, M = 1024, 4096
    say(f"scale: 1f1b, P={P}, M={M}")
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        spent = pool.submit(one_large, P, M).result()
    rows.append({"what": "scale", "P": P, "M": M, **spent})
    checks["p1024_s"] = spent["generate_s"] + spent["verify_s"] + spent["simulate_s"]
    checks["p1024_gb"] = spent["peak_gb"]
    say(
        f"  {spent['actions']:,} actions: generate {spent['generate_s']:.1f} s, "
        f"verify {spent['verify_s']:.1f} s, "
        f"simulate {spent['simulate_s']:.1f} s, at most {spent['peak_gb']:.1f} GB"
    )


def one_large(P: int, M: int) -> dict[str, float]:
    moments = [time.perf_counter()]
    program = build("1f1b", P, M)
    moments.append(time.perf_counter())
    verified = verify(program)
    moments.append(time.perf_counter())
    result = simulate(verified, UNIT)
    moments.append(time.perf_counter())
    assert result.makespan == (M + P - 1) * 3
    generate_s, verify_s, simulate_s = (b - a for a, b in pairwise(moments))
    return {
        "actions": program.num_ops,
        "generate_s": generate_s,
        "verify_s": verify_s,
        "simulate_s": simulate_s,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def drawn(rows: Rows, checks: dict[str, float]) -> None:
    say("the drawn example: P=8, M=20, F=1, B=2, W=1, FB=3")
    for name, expected in (("1f1b", 81), ("zb-h1", 67), ("dualpipe", 66)):
        makespan = simulate(build(name, 8, 20), UNIT).makespan
        rows.append({"what": "drawn", "schedule": name, "makespan": makespan, "expected": expected})
        checks[f"makespan_{name.replace('-', '_')}"] = makespan
        say(f"  {name:<9} {makespan:g} (expected {expected})")


def exchange(rows: Rows, checks: dict[str, float]) -> None:
    say("exchange of one layer, 64 ranks in groups of 8, communication as long as compute")
    tokens, row_bytes, far = 65536, 4096.0, 25e9
    counts = np.full((64, 64), tokens // 64)
    costs = ExchangeCosts(
        row_bytes=row_bytes,
        near_bandwidth=far,
        far_bandwidth=far,
        row_seconds=2 * row_bytes / far,
        latency=10e-6,
        kernel=10e-6,
        launch=5e-6,
    )
    shape = exchange_shape(64, group_size=8)
    bound = lower_bound(smart(shape), counts, costs)
    choice = choose_exchange(shape, counts, costs, chunks=(1, 2, 4), swaps=0)
    blocking = simulate_exchange(
        smart(exchange_shape(64, group_size=8, blocking=True)), counts, costs
    ).makespan
    checks["smart64_over_bound"] = choice.seconds / bound
    checks["blocking64_over_bound"] = blocking / bound
    for rule, spent in [*choice.tried.items(), ("blocking", blocking)]:
        rows.append({"what": "exchange 64", "rule": rule, "over_bound": spent / bound})
        say(f"  {rule:<10} {spent / bound:.3f} x the bound {'<- chosen' if spent == choice.seconds else ''}")


GROUPS = ((8, 2, 1), (16, 4, 2), (12, 5, 1), (64, 8, 1))
"""Ranks, ranks of a group, experts of a rank."""


def orders(rows: Rows, checks: dict[str, float], groups: Sequence[tuple[int, int, int]] = GROUPS) -> None:
    say("which rule orders an exchange best: forward, communication as long as compute, times the bound")
    rng = np.random.default_rng(1)
    wins: dict[str, int] = {}
    for P, size, experts in groups:
        tokens, row_bytes, far = 4096, 4096.0, 25e9
        for load in (0.0, 0.6, 1.2):
            share = 1 / np.arange(1, P * experts + 1) ** load
            counts = np.array([rng.multinomial(tokens, share / share.sum()) for _ in range(P)])
            for near in (1, 8):
                costs = ExchangeCosts(
                    row_bytes=row_bytes,
                    near_bandwidth=near * far,
                    far_bandwidth=far,
                    row_seconds=2 * row_bytes / far,
                    latency=1e-5,
                    kernel=1e-5,
                )
                shape = exchange_shape(P, group_size=size, experts_per_rank=experts)
                chunks, swaps = ((1, 2, 4), 40) if P < 64 else ((1, 2), 10)
                choice = choose_exchange(shape, counts, costs, chunks=chunks, swaps=swaps)
                wins[choice.rule] = wins.get(choice.rule, 0) + 1
                over = {rule: round(spent / choice.bound, 3) for rule, spent in choice.tried.items()}
                rows.append(
                    {"what": "orders", "P": P, "zipf": load, "near": near, "rule": choice.rule, **over}
                )
                say(
                    f"  P={P:<3} groups of {size}, Zipf {load}, near links {near}x: {choice.rule} with "
                    f"{choice.shape.chunks} chunks, {choice.seconds / choice.bound:.3f}"
                )
    for rule, count in wins.items():
        checks[f"wins_{rule}"] = count


def events(rows: Rows, checks: dict[str, float], numbers: Sequence[int] = (2048, 16384, 65536)) -> None:
    """`numbers`: of tokens."""
    say("events per step (chunks chosen) against per (step, expert); 16 ranks in groups of 4, x the bound")
    worst = 0.0
    for tokens in numbers:
        for experts in (2, 4, 8):
            row_bytes, far = 4096.0, 25e9
            counts = np.full((16, 16 * experts), tokens // (16 * experts))
            costs = ExchangeCosts(
                row_bytes=row_bytes,
                near_bandwidth=4 * far,
                far_bandwidth=far,
                row_seconds=2 * row_bytes / far,
                latency=1e-5,
                kernel=1e-5,
                launch=5e-6,
            )
            shape = exchange_shape(16, group_size=4, experts_per_rank=experts)
            bound = lower_bound(smart(shape), counts, costs)
            chosen = choose_exchange(shape, counts, costs, swaps=0)
            fine = exchange_shape(16, group_size=4, experts_per_rank=experts, per_expert=True)
            each = simulate_exchange(smart(fine), counts, costs).makespan
            worst = max(worst, chosen.seconds / each)
            rows.append(
                {
                    "what": "events",
                    "tokens": tokens,
                    "experts_per_rank": experts,
                    "rule": f"{chosen.rule}/{chosen.shape.chunks}",
                    "per_step": chosen.seconds / bound,
                    "per_expert": each / bound,
                }
            )
            how = f"{chosen.rule}, {chosen.shape.chunks} chunks"
            say(
                f"  {tokens:>6} rows, {experts} experts per rank: per step {chosen.seconds / bound:.3f} "
                f"({how}), per (step, expert) {each / bound:.3f}"
            )
    checks["per_step_over_per_expert"] = worst


COMPARED = ("1f1b", "vpp", "zb-v", "dualpipev", "vpp+1")


def compare(
    rows: Rows, checks: dict[str, float], microbatches: int = 32, names: Sequence[str] = COMPARED
) -> None:
    say(f"schedules on the costs of DeepSeek's trace: P=8, M={microbatches}, 4 layers per rank")
    for name in names:
        for overlap, chunks, split in (("off", 1, "moe"), ("pair+self", 2, "moe"), ("pair+self", 2, "layer")):
            question = Question(
                ranks=8,
                microbatches=microbatches,
                costs=DEEPSEEK_V3,
                expansion=Expansion(overlap=overlap, chunks=chunks, split=split),  # type: ignore[arg-type]
            )
            answer = ask(question, name)
            how = overlap if overlap == "off" else f"{overlap}, {chunks} chunks of {split}"
            row = {
                "what": "compare",
                "schedule": name,
                "overlap": how,
                "makespan_s": answer.summary.makespan,
                "hidden": answer.exchange_hidden,
                "peak": max(answer.summary.peak),
            }
            rows.append(row)
            say(
                f"  {name:<10} {how:<28} {row['makespan_s']:7.3f} s  "
                f"hidden {row['hidden']:4.0%}  peak {row['peak']:.2f}"
            )
    best = {
        r["schedule"]: r["makespan_s"] for r in rows if r["what"] == "compare" and "layer" in r["overlap"]
    }
    off = {r["schedule"]: r["makespan_s"] for r in rows if r["what"] == "compare" and r["overlap"] == "off"}
    checks["dualpipev_off_over_overlap"] = off["dualpipev"] / best["dualpipev"]
    checks["vpp1_over_dualpipev"] = best["vpp+1"] / best["dualpipev"]


def main() -> int:
    parser = BenchParser(__doc__, smoke={"quick": True})
    parser.add_argument("--quick", action="store_true", help="leave out the largest programs")
    options = parser.parse_args()
    rows: Rows = []
    checks: dict[str, float] = {}
    drawn(rows, checks)
    if options.smoke:
        orders(rows, checks, GROUPS[:1])
        events(rows, checks, (2048,))
        compare(rows, checks, 16, COMPARED[-2:])
    else:
        exchange(rows, checks)
        orders(rows, checks)
        events(rows, checks)
        compare(rows, checks)
    speed(rows, checks, 2 if options.smoke else 4 if options.quick else len(SIZES))
    if not options.quick:
        scale(rows, checks)
    say("checks")
    for name, value in checks.items():
        say(f"  {name:<28} {value:.4g}")
    write(options.json, {"rows": rows, "checks": checks, "machine": machine()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
