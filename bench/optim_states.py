"""Loss curves of the optimizer's narrow forms beside fp32: preset `small`, the same seed and tokens.

    .venv/bin/python bench/optim_states.py --steps 500 --json curves.json          some minutes for each
    .venv/bin/python bench/optim_states.py --steps 500 --device cuda --only fp32 --only "moments 8bit"
    .venv/bin/python bench/optim_states.py --smoke

Prints one line for each: the mean loss of the last 20 steps, how far that is from fp32, and bytes of a
parameter. How far another seed is says what such a difference is worth; runs are deterministic, so the first
two are one. Model and weights are bfloat16, so the machine may be a CPU.
"""

from __future__ import annotations

import os

from _smoke import BenchParser, write

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.train.presets import load
from moeclipse.train.step.learner import Learner

WAYS = {
    "fp32": {},
    "fp32, once more": {},
    "fp32, seed 1": {"run.seed": 1},
    "moments bf16": {"optim.state": "bf16"},
    "gradients bf16": {"optim.main_grad": "bf16"},
    "moments 8bit": {"optim.state": "8bit"},
    "low bits": {"optim.master": "low-bits"},
    "no master": {"optim.master": "none"},
    "all bf16": {"optim.state": "bf16", "optim.master": "none", "optim.main_grad": "bf16"},
    "low bits, 8bit": {"optim.state": "8bit", "optim.master": "low-bits"},
    "narrowest": {"optim.state": "8bit", "optim.master": "none", "optim.main_grad": "bf16"},
}


def bytes_of_a_parameter(learner: Learner) -> float:
    """Weights, main_grad and optimizer state of the whole model, by its parameters."""
    kept = [tensor for state in learner.optim.states for tensor in state.tensors().values()]
    kept += [tensor for bucket in learner.buckets for tensor in (bucket.params, bucket.grads)]
    return sum(tensor.nbytes for tensor in kept) / sum(len(bucket.params) for bucket in learner.buckets)


def curve(way: str, preset: str, steps: int, device: str) -> tuple[list[float], float]:
    changes = {"model.dtype": "bfloat16", "run.steps": steps, "run.deterministic": True, **WAYS[way]}
    learner = Learner(with_values(load(preset=preset), changes), Mesh.single(device))
    return [learner.step(step)["loss"] for step in range(steps)], bytes_of_a_parameter(learner)


def main() -> int:
    # One order of sums, as `moeclipse train` has it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    smallest = {"preset": "tiny", "steps": 2, "only": ["fp32", "narrowest"]}
    parser = BenchParser(__doc__, smoke=smallest)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", choices=WAYS, action="append")
    options = parser.parse_args()
    curves: dict[str, list[float]] = {}
    for way in options.only or WAYS:
        curves[way], size = curve(way, options.preset, options.steps, options.device)
        last = sum(curves[way][-20:]) / len(curves[way][-20:])
        first = curves.get("fp32", curves[way])
        beside = last - sum(first[-20:]) / len(first[-20:])
        print(f"{way}: {size:.2f} B a parameter, loss {last:.4f}, {beside:+.4f} beside fp32", flush=True)
        write(options.json, curves)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
