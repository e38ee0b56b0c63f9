"""How long the search for a layout takes, with how much memory, and predicted steps over published ones.

    .venv/bin/python bench/plan.py [--json FILE] [--gpus 8 256 2048]
    .venv/bin/python bench/plan.py --smoke

Each search runs in a process of its own, so that its memory is its own: DeepSeek-V3 on H800 where it fits,
Qwen3-30B on H200 for fewer than 256 GPUs. Predictions are arithmetic and the same everywhere.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from _smoke import BenchParser, machine, write

from moeclipse.cost.cluster import cluster
from moeclipse.plan.layouts import LADDER, plan_of, search
from moeclipse.plan.published import QWEN3_30B, ROWS, V3
from moeclipse.plan.question import Request
from moeclipse.plan.state_place import StatePlace
from moeclipse.plan.step import Terms

SEQUENCE = 4096


def searched(num_gpus: int) -> dict[str, Any]:
    model, device, batch = (V3, "h800", 15 * num_gpus // 2) if num_gpus >= 256 else (QWEN3_30B, "h200", 512)
    there = cluster(device)
    place = StatePlace(host_room=there.host_memory)
    terms = Terms(model=model, cluster=there, sequence=SEQUENCE, place=place)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.process_time()
    found = search(Request(terms=terms, num_gpus=num_gpus, batch=batch))
    spent = time.process_time() - begin
    best = found.plans[0]
    return {
        "gpus": num_gpus,
        "device": device,
        "considered": found.considered,
        "simulated": len(found.plans),
        "search_s": spent,
        "before_mb": before / 1024,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "best": best.layout.title,
        "best_step_s": best.time.seconds,
    }


def published_axes() -> list[dict[str, Any]]:
    """DeepSeek-V3 in bf16 on the axes of its report, in the nearest schedule that we run."""
    terms = Terms(model=V3, cluster=cluster("h800"), sequence=SEQUENCE)
    request = Request(terms=terms, num_gpus=2048, batch=15360)
    layout = replace(ROWS[0].layout, schedule="dualpipev")
    plans = {again: plan_of(request, replace(layout, recompute=again)) for again in LADDER}
    return [
        {"recompute": again, "step_s": plan.time.seconds, "peak_gib": plan.peak / 2**30}
        for again, plan in plans.items()
    ]


def main() -> None:
    parser = BenchParser(__doc__, smoke={"gpus": [8]})
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 256, 2048])
    given = parser.parse_args()
    searches = []
    for num_gpus in given.gpus:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            searches.append(pool.submit(searched, num_gpus).result())
        row = searches[-1]
        print(
            f"{num_gpus:5} GPUs: {row['considered']:,} layouts in {row['search_s']:.1f} s, "
            f"{row['peak_mb']:.0f} MB; best {row['best_step_s']:.2f} s: {row['best']}",
            flush=True,
        )
    axes = published_axes()
    for row in axes:
        print(
            f"published axes, recompute {row['recompute']}: {row['step_s']:.2f} s, {row['peak_gib']:.0f} GiB"
        )
    rows = []
    for row in ROWS:
        ratio = row.predicted() / row.seconds
        rows.append({"name": row.name, "published_s": row.seconds, "ratio": ratio, "fitted": row.fitted})
        print(
            f"{ratio:.3f} of {row.seconds:5.1f} s  {row.name}"
            + (f"  (fitted: {row.fitted})" if row.fitted else "")
        )
    error = statistics.median(abs(row["ratio"] - 1) for row in rows)
    print(f"median error {error:.1%}")
    found = {
        "machine": machine(),
        "searches": searches,
        "published_axes": axes,
        "published": rows,
        "median_error": error,
    }
    write(given.json, found)


if __name__ == "__main__":
    main()
