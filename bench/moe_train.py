"""Tokens per second of a whole training step, with our kernels and in plain torch.

    .venv/bin/python bench/moe_train.py [--preset 5b] [--repeats 6] [--json FILE]
    .venv/bin/python bench/moe_train.py --smoke

One model, one run: steps with and without kernels alternate, and medians are compared. Needs a CUDA device:
`--smoke` runs without one, where both are plain torch.
"""

from __future__ import annotations

import statistics
import sys

from _smoke import BenchParser, device, left_without_gpu, machine, write

from moeclipse.comm.mesh import Mesh
from moeclipse.train.presets import load
from moeclipse.train.step.learner import Learner


def use_kernels(learner: Learner, kernels: bool) -> None:
    for layer in learner.layers:
        layer.fused = None if kernels else False
        layer.experts.kernels = kernels


def main() -> int:
    parser = BenchParser(__doc__, smoke={"preset": "tiny", "repeats": 1})
    parser.add_argument("--preset", default="5b")
    parser.add_argument("--repeats", type=int, default=6)
    given = parser.parse_args()
    if left_without_gpu(__file__, given):
        return 2
    learner = Learner(load(preset=given.preset), Mesh.single(device()))
    times: dict[str, list[float]] = {"kernels": [], "plain torch": []}
    step = 0
    for repeat in range(given.repeats + 1):
        for name, found in times.items():
            use_kernels(learner, name == "kernels")
            record = learner.step(step)
            step += 1
            if repeat:
                found.append(record["step_ms"])
            print(
                f"step {step}: {name}, {record['step_ms']:.0f} ms, loss {record['loss']:.3f}", file=sys.stderr
            )
    rows = [
        {"name": name, "step_ms": ms, "tokens_per_s": 1e3 * learner.tokens_per_step / ms}
        for name, ms in ((name, statistics.median(found)) for name, found in times.items())
    ]
    for row in rows:
        print(f"{row['name']:>12}: {row['step_ms']:8.1f} ms per step, {row['tokens_per_s']:9.0f} tokens/s")
    ratio = rows[0]["tokens_per_s"] / rows[1]["tokens_per_s"]
    print(f"kernels over plain torch: {ratio:.2f}")
    write(given.json, {"rows": rows, "checks": {"train_speedup": ratio}, "machine": machine()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
