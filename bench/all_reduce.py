"""All-reduce and all-to-all over peer memory against torch.distributed, on the ranks of one machine.

    .venv/bin/python bench/all_reduce.py [--ranks 2 4] [--device cpu|cuda] [--json FILE] [--tune] [--pin]
    .venv/bin/python bench/all_reduce.py --smoke [--device cpu|cuda]

On the CPU: ours in one and in two stages, and gloo. On CUDA (several ranks on one GPU need MPS and
TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1): ours beside torch's symmetric-memory operators, like with like.
Those need their input where peers can read it, so they stand beside ours on tensors that were shared, and
with a copy into such memory beside ours on any tensor. In a graph ours shares its inputs by itself.

| ours | reads | writes to | torch's |
|---|---|---|---|
| shared | a shared tensor | a given one | the faster of one shot and two shot |
| shared, new | a shared tensor | a new one | one shot, which does so |
| shared, in place | a shared tensor | itself | two shot, which does so |
| given | any tensor | a given one | the faster one, with copies |
| in place | any tensor | itself | two shot with copies |
| given, graph | any tensor | a given one | the faster one in a graph, without a copy |

Microseconds per call, medians of repeats that take turns, on CUDA in shuffled order; GB/s is the size of the
tensor over that time.
Checks are, on the CPU, the factor over gloo with two ranks; on CUDA the worst factor over torch's of all
sizes, and the worst of bf16 over fp16, which torch's lack. `--tune` writes the table that is read at open.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import torch
import torch.distributed as dist
from _smoke import BenchParser, machine, write

from moeclipse.comm.async_ops.lane import all_to_all
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.reduce.all_reduce import PeerAllReduce
from moeclipse.comm.reduce.table import (
    DEFAULT_FILE,
    Algorithm,
    default_algorithm,
    key_of,
    table_lines,
    write_algorithm,
)
from moeclipse.comm.transports.host_ring import PeerExchange
from moeclipse.testing.run_ranks import run_ranks

KIB = 1 << 10
SIZES = [KIB << shift for shift in (0, 2, 4, 6, 8, 10, 11, 12, 14, 16)]
QUICK = [KIB, 64 * KIB, 1024 * KIB, 16384 * KIB]
SMALLEST = [KIB, 64 * KIB]
WARM_UP = 3  # rounds on a device that do not count
CHUNKS = (256 * KIB, 512 * KIB, 1024 * KIB, 2048 * KIB)
Calls = dict[str, Callable[[], Any]]


def size_name(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"


def measure(calls: Calls, meet: Callable[[], Any], size: int, repeats: int) -> dict[str, float]:
    """Median microseconds per call. Variants take turns, so that a slow moment of the machine hits all."""
    inner = max(1, min(20, (1 << 21) // size))
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            meet()
            for _ in range(inner):
                begun = time.perf_counter()
                call()
                if repeat:  # the first round warms up
                    spent[name].append((time.perf_counter() - begun) * 1e6)
    return {name: statistics.median(values) for name, values in spent.items()}


def on_cpu(mesh: Mesh, sizes: list[int], repeats: int, pin: bool) -> list[str]:
    n, group, rows = mesh.num_ranks, mesh.world, []
    if pin:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[mesh.rank % len(cores)]})
    with (
        PeerAllReduce.open(group, mesh.watch) as reduce,
        PeerExchange.open(group, mesh.watch) as exchange,
        PeerAllReduce.open(group, mesh.watch, area_bytes=4096) as gate,
    ):
        token = torch.zeros(1)
        for size in sizes:
            x = torch.ones(size // 4)
            y = torch.empty_like(x)
            counts = [x.numel() // n] * n
            sent = x[: sum(counts)]

            def gloo(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
                y.copy_(x)
                dist.all_reduce(y, group=group.handle)

            calls: Calls = {
                "one stage": lambda x=x, y=y: reduce.all_reduce(x, out=y, stages=1),
                "two stages": lambda x=x, y=y: reduce.all_reduce(x, out=y, stages=2),
                "as the table says": lambda x=x, y=y: reduce.all_reduce(x, out=y),
                "gloo": gloo,
                "all-to-all": lambda s=sent, c=counts: exchange.all_to_all(
                    mesh.a2a, group, s, c, c, "bench"
                ).get(),
                "all-to-all gloo": lambda s=sent, c=counts: all_to_all(
                    mesh.a2a, group, s, c, c, "bench"
                ).get(),
            }
            times = measure(calls, lambda: gate.all_reduce(token), size, repeats)
            rows.append({"ranks": n, "size": size, "device": "cpu", **times})
            if mesh.rank == 0:
                show(rows[-1])
    return [json.dumps(rows)]


def show(row: dict[str, Any]) -> None:
    times = {key: value for key, value in row.items() if isinstance(value, float)}
    cells = "  ".join(f"{name} {us:8.1f} us {row['size'] / us / 1e3:6.2f} GB/s" for name, us in times.items())
    kind = row.get("dtype", "float32")
    print(f"{row['ranks']} ranks {size_name(row['size']):>6} {kind:9} {cells}", flush=True)


def graph_of(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    return graph


def device_calls(mesh: Mesh, reduce: PeerAllReduce, size: int, dtype: torch.dtype) -> tuple[Calls, Calls]:
    """(ours and torch's, in a graph as outside; what there is only outside), see the table above."""
    x, own, shared, shared_own = (
        torch.zeros(size // dtype.itemsize, device=mesh.device, dtype=dtype) for _ in range(4)
    )
    y = torch.empty_like(x)
    calls: Calls = {
        "one stage": lambda: reduce.all_reduce(x, out=y, stages=1),
        "two stages": lambda: reduce.all_reduce(x, out=y, stages=2),
        "given": lambda: reduce.all_reduce(x, out=y),
        "in place": lambda: reduce.all_reduce(own, out=own),
    }
    reduce.share(shared)
    reduce.share(shared_own)
    eager: Calls = {
        "shared": lambda: reduce.all_reduce(shared, out=y),
        "shared, new": lambda: reduce.all_reduce(shared),
        "shared, in place": lambda: reduce.all_reduce(shared_own, out=shared_own),
    }
    if dtype == torch.float16:
        return calls, eager  # torch's operators do not know it
    from torch.distributed import _symmetric_memory

    assert mesh.world.handle is not None
    name = mesh.world.handle.group_name
    t = _symmetric_memory.empty(x.numel(), device=mesh.device, dtype=dtype)
    t.zero_()
    _symmetric_memory.rendezvous(t, mesh.world.handle)
    ops = torch.ops.symm_mem

    def two_with_copies() -> None:
        t.copy_(x)
        ops.two_shot_all_reduce_(t, "sum", name)
        y.copy_(t)

    def one_with_copy() -> None:
        t.copy_(x)
        ops.one_shot_all_reduce(t, "sum", name)

    calls |= {
        "torch one": lambda: ops.one_shot_all_reduce(t, "sum", name),
        "torch two": lambda: ops.two_shot_all_reduce_(t, "sum", name),
    }
    return calls, eager | {"torch one + copy": one_with_copy, "torch two + copies": two_with_copies}


def on_cuda(mesh: Mesh, sizes: list[int], repeats: int) -> list[str]:
    torch.cuda.set_device(mesh.device)
    reduce = PeerAllReduce.open(mesh.world, mesh.watch, mesh.device, area_bytes=64 << 20)
    if mesh.rank == 0:
        print(reduce.algorithm, flush=True)
    why = reduce.should_use(torch.ones(1, device=mesh.device))
    assert why, why
    rows = []
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    for size in sizes:
        medians = timed_on_device(mesh, reduce, size, dtypes, repeats)
        for dtype in dtypes:
            kind = str(dtype).removeprefix("torch.")
            where = {"device": "cuda", "name": torch.cuda.get_device_name(mesh.device), "dtype": kind}
            rows.append({"ranks": mesh.num_ranks, "size": size, **where, **medians[dtype]})
            if mesh.rank == 0:
                show(rows[-1])
    reduce.check()
    mesh.barrier()  # shared tensors outlive their readers
    reduce.close()
    return [json.dumps(rows)]


def timed_on_device(
    mesh: Mesh, reduce: PeerAllReduce, size: int, dtypes: Sequence[torch.dtype], repeats: int
) -> dict[torch.dtype, dict[str, float]]:
    """Types take turns, too: they are compared with each other."""
    calls: dict[tuple[torch.dtype, str], tuple[Callable[[], Any], int]] = {}
    for dtype in dtypes:
        both, eager = device_calls(mesh, reduce, size, dtype)
        for call in [*both.values(), *eager.values()] * 3:  # plans are made by the second call
            call()
        torch.cuda.synchronize()
        mesh.barrier()
        with reduce.capture(dtype):
            graphs = {f"{name}, graph": graph_of(call).replay for name, call in both.items()}
        calls |= {(dtype, name): (call, 1) for name, call in (both | eager).items()}
        calls |= {(dtype, name): (replay, 10) for name, replay in graphs.items()}
    # Ranks start some microseconds apart: many calls make that disappear.
    count = 100 if size <= 4 << 20 else 30
    times: dict[tuple[torch.dtype, str], list[float]] = {key: [] for key in calls}
    order, lots = list(calls), random.Random(size)  # the same on all ranks
    # Small ones take as long as the host, whose speed changes more from one moment to the next.
    for repeat in range(WARM_UP + (repeats if size > 16 << 20 else 3 * repeats)):
        lots.shuffle(order)
        for key in order:
            call, number = calls[key]
            mesh.barrier()
            us = device_time(call, count if number == 1 else count // 5) / number
            if repeat >= WARM_UP:
                times[key].append(us)
    found: dict[torch.dtype, dict[str, float]] = {dtype: {} for dtype in dtypes}
    for (dtype, name), values in times.items():
        found[dtype][name] = statistics.median(values)
    return found


def device_time(call: Callable[[], Any], count: int) -> float:
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begun.record()
    for _ in range(count):
        call()
    ended.record()
    torch.cuda.synchronize()
    return begun.elapsed_time(ended) * 1e3 / count


def tuned(mesh: Mesh, sizes: list[int], repeats: int) -> list[str]:
    """The best chunk for large tensors, then the size from which two stages win and keep winning."""
    best: dict[int, dict[str, float]] = {}
    opened = {
        chunk: PeerAllReduce.open(mesh.world, mesh.watch, choice=Algorithm(chunk_bytes=chunk))
        for chunk in CHUNKS
    }
    gate, token = opened[CHUNKS[0]], torch.zeros(1)
    for size in sizes:
        x = torch.ones(size // 4)
        y = torch.empty_like(x)
        calls: Calls = {}
        for chunk, reduce in opened.items():
            for stages in (1, 2):
                calls[f"{chunk} {stages}"] = partial(reduce.all_reduce, x, out=y, stages=stages)
        best[size] = measure(calls, lambda: gate.all_reduce(token), size, repeats)
    # Every rank must come to the same algorithm, so rank 0's times count.
    large = [size for size in sizes if size >= 1 << 20]
    cost = {c: sum(min(best[s][f"{c} 1"], best[s][f"{c} 2"]) / s for s in large) for c in CHUNKS}
    chunk = min(CHUNKS, key=cost.__getitem__)
    pairs = {size: (times[f"{chunk} 1"], times[f"{chunk} 2"]) for size, times in best.items()}
    return [json.dumps({"two_stages_from": border(pairs), "chunk_bytes": chunk})]


def border(pairs: dict[int, tuple[float, float]]) -> int | None:
    """The size from which two stages win and keep winning, given the times of one and of two."""
    start = None
    for size, (one, two) in sorted(pairs.items(), reverse=True):
        if two >= one:
            break
        start = size
    return start


def span(pairs: dict[int, tuple[float, float]]) -> tuple[int | None, int | None]:
    """The size from which two stages win, and the one at which they stop; None: never."""
    sizes = sorted(pairs)
    wins = [size for size in sizes if pairs[size][1] < pairs[size][0]]
    if not wins:
        return None, None
    behind = [size for size in sizes if size > wins[0] and size not in wins]
    return wins[0], behind[0] if behind else None


def tune_device(rows: list[dict[str, Any]]) -> None:
    """Write what the times of one number of ranks say about stages: of inputs that peers read where they lie,
    as in graphs, and of those that are copied. bf16 and fp32 count alike."""
    ranks, name = rows[0]["ranks"], rows[0]["name"]
    shared = ranks > torch.cuda.device_count()
    timed = [row for row in rows if row["dtype"] in ("bfloat16", "float32")]

    def pairs(where: str) -> dict[int, tuple[float, float]]:
        found: dict[int, tuple[float, float]] = {}
        for row in timed:
            one, two = found.get(row["size"], (0.0, 0.0))
            found[row["size"]] = one + row["one stage" + where], two + row["two stages" + where]
        return found

    default = default_algorithm(name, ranks, True, shared)
    there = {size: pair for size, pair in pairs(", graph").items() if size >= (default.in_place_from or 0)}
    start, until = span(there)
    algorithm = replace(
        default,
        two_stages_from=start,
        two_stages_until=until,
        copied_two_stages_from=border(pairs("")),
    )
    write_algorithm(key_of(name, ranks, True, shared), algorithm)


LIKE = {
    "eager": ("shared", ["torch one", "torch two"]),
    "eager_new": ("shared, new", ["torch one"]),
    "eager_in_place": ("shared, in place", ["torch two"]),
    "eager_copied": ("given", ["torch one + copy", "torch two + copies"]),
    "graph": ("given, graph", ["torch one, graph", "torch two, graph"]),
}


def checks_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """How many times as fast as gloo, two ranks; on devices as torch's operators, the worst row."""
    checks: dict[str, float] = {}

    def least(name: str, factor: float) -> None:
        checks[name] = min(factor, checks.get(name, factor))

    for row in rows:
        if row["device"] == "cuda":
            half = [other for other in rows if other["dtype"] == "bfloat16"]
            for where, (ours, theirs) in LIKE.items():
                name = f"{row['ranks']}_ranks_{where}"
                if "torch one" in row:
                    least(f"{name}_{row['dtype']}", min(row[their] for their in theirs) / row[ours])
                else:
                    beside = next(o for o in half if (o["ranks"], o["size"]) == (row["ranks"], row["size"]))
                    least(f"{name}_float16_to_bfloat16", beside[ours] / row[ours])
        elif row["ranks"] == 2:
            name = size_name(row["size"]).replace(" ", "")
            checks[f"all_reduce_{name}"] = row["gloo"] / row["as the table says"]
            checks[f"all_to_all_{name}"] = row["all-to-all gloo"] / row["all-to-all"]
    return checks


def main() -> int:
    parser = BenchParser(__doc__, smoke={"ranks": [2], "repeats": 1})
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--pin", action="store_true", help="each rank on a core of its own, gloo's threads too"
    )
    parser.add_argument("--quick", action="store_true", help="four sizes only")
    parser.add_argument("--tune", action="store_true", help=f"write what was measured to {DEFAULT_FILE}")
    args = parser.parse_args()
    if args.smoke and args.tune:
        parser.error("--smoke measures nothing that --tune could write down")
    sizes = SMALLEST if args.smoke else QUICK if args.quick else SIZES
    if args.device == "cuda" and torch.cuda.device_count() == 0:
        print("bench/all_reduce.py --device cuda: this machine has no CUDA device.")
        return 2
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for ranks in args.ranks:
        if args.tune and args.device == "cpu":
            best = json.loads(run_ranks(ranks, tuned, SIZES, args.repeats, deadline_s=600)[0][0])
            write_algorithm(key_of("cpu", ranks, True), Algorithm(**best))
        if args.device == "cpu":
            found = run_ranks(ranks, on_cpu, sizes, args.repeats, args.pin, deadline_s=600)
        else:
            found = run_ranks(ranks, on_cuda, sizes, args.repeats, deadline_s=600, device="cuda:0")
        rows += json.loads(found[0][0])
        if args.tune and args.device == "cuda":
            tune_device([row for row in rows if row["ranks"] == ranks])
    if args.device == "cpu":
        print("table:", *table_lines("cpu", True), sep="\n  ")
    checks = checks_of(rows)
    for name, factor in checks.items():
        print(f"{name:44} {factor:5.2f} x as fast{' as gloo' if args.device == 'cpu' else ', at worst'}")
    write(args.json, {"rows": rows, "checks": checks, "machine": machine()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
