"""How much of a tensor-parallel linear's backward communication hides under its own products, on a slow wire.

    .venv/bin/python bench/tensor_parallel.py [--json FILE] [--repeats 9] [--ratio 0.7]
    .venv/bin/python bench/tensor_parallel.py --smoke

Two ranks in a network namespace of their own, whose loopback is a slow wire (bench/shaped_network.py). The
linear is as wide as it must be for its transfers to take `--ratio` of the product they can hide under: the
weight gradient for the all-reduce and the reduce-scatter, the input gradient for the gather. Each repeat
runs, interleaved, backward with and without overlap:

    all-reduce   replicated tokens: d_x is all-reduced
    sequence     sequence parallel: x is gathered, d_x is reduce-scattered

Communication, exposed and hidden time come from the library's own interval record; a transfer counts from
the moment its last rank launched it, so nothing that a rank waits for another is sold as communication.
Without overlap hidden is 0 by this definition. The table shows medians of both ranks' means.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from _smoke import BenchParser, machine, write
from shaped_network import set_rate, shaped_network

from moeclipse.comm.mesh import Mesh
from moeclipse.tensor.linear import ColumnParallelLinear
from moeclipse.tensor.parallel import TensorParallel
from moeclipse.tensor.weight_grad import attach, weight_grad
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.observe.step_times import gather_splits, mean_times, split_of

RANKS, TOKENS, WIDTH = 2, 512, 512
RATE_MBIT = 200.0
# Both ranks send at once through one queue: an all-reduce sends all of d_x both ways, the others half of it.
MODES = {"all-reduce": RATE_MBIT, "sequence": RATE_MBIT / 2}


class Case:
    """A linear's backward in one mode, ready to run."""

    def __init__(self, mesh: Mesh, mode: str, overlap: bool, d_out: int) -> None:
        self.mesh = mesh
        tp = TensorParallel.of(mesh, sequence_parallel=mode == "sequence", overlap=overlap)
        self.layer = ColumnParallelLinear(WIDTH, RANKS * d_out, tp=tp)
        attach(self.layer.weight, torch.zeros_like(self.layer.weight), lambda: None)
        rows = TOKENS // RANKS if mode == "sequence" else TOKENS
        self.x = torch.randn(rows, WIDTH, requires_grad=True)
        self.d_y = torch.randn(TOKENS, d_out)

    def run(self) -> dict[str, float]:
        """Milliseconds of one backward, means of the ranks."""
        mesh, recorder = self.mesh, self.mesh.recorder
        y = self.layer(self.x)
        mesh.barrier()
        recorder.begin_step()
        with recorder.compute():
            y.backward(self.d_y)
        stamps = recorder.end_step()
        return mean_times(gather_splits(split_of(stamps, mesh), mesh))


def product_seconds(mesh: Mesh, d_out: int, repeats: int = 15) -> float:
    """Of one weight gradient, the slower rank's, while both compute; the best of several.

    The machine may be busy with other things: a product measured too slow would make the linear too narrow
    to hide its transfers, whatever their order.
    """
    weight = torch.nn.Parameter(torch.zeros(d_out, WIDTH))
    weight.main_grad = torch.zeros(d_out, WIDTH)  # type: ignore[attr-defined]
    dy, x = torch.randn(TOKENS, d_out), torch.randn(TOKENS, WIDTH)
    times = []
    for _ in range(repeats):
        mesh.barrier()
        begun = time.perf_counter()
        weight_grad(weight, dy, x)
        times.append(max(mesh.gather_objects(time.perf_counter() - begun)))
    return min(times)


def measure(mesh: Mesh, ratio: float, repeats: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    trial = 2048
    set_rate_once(mesh, MODES["all-reduce"])
    narrow = Case(mesh, "all-reduce", False, 64)
    transfer_ms = statistics.median(narrow.run()["comm_ms"] for _ in range(5))
    wanted = 1e-3 * transfer_ms / ratio
    d_out = max(64, round(trial * wanted / product_seconds(mesh, trial) / 64) * 64)
    d_out = mesh.gather_objects(d_out)[0]
    product = product_seconds(mesh, d_out)
    cases = {(mode, overlap): Case(mesh, mode, overlap, d_out) for mode in MODES for overlap in (False, True)}
    found: dict[tuple[str, bool], list[dict[str, float]]] = {key: [] for key in cases}
    for repeat in range(repeats + 1):
        for mode, rate in MODES.items():
            set_rate_once(mesh, rate)
            for overlap in (False, True) if repeat % 2 else (True, False):
                times = cases[mode, overlap].run()
                if repeat:  # the first one warms up
                    found[mode, overlap].append(times)
        if mesh.rank == 0:
            print(f"\r{repeat}/{repeats}", end="", file=sys.stderr, flush=True)
    rows = []
    for (mode, overlap), times in found.items():
        row = {name: statistics.median(t[name] for t in times) for name in times[0]}
        rows.append({"mode": mode, "overlap": overlap, "rate_mbit": MODES[mode], **row})
    return {"rows": rows, "d_out": d_out, "product_ms": 1e3 * product}


def set_rate_once(mesh: Mesh, rate: float) -> None:
    mesh.barrier()
    if mesh.rank == 0:
        set_rate(rate)
    mesh.barrier()


def checks_of(result: dict[str, Any]) -> dict[str, float]:
    row = {(row["mode"], row["overlap"]): row for row in result["rows"]}
    transfers = {"all-reduce": 1, "sequence": 2}
    return {
        "all_reduce_hidden": row["all-reduce", True]["hidden_fraction"],
        "sequence_hidden": row["sequence", True]["hidden_fraction"],
        "off_over_on": min(row[mode, False]["step_ms"] / row[mode, True]["step_ms"] for mode in MODES),
        "hidden_without_overlap": max(row[mode, False]["hidden_fraction"] for mode in MODES),
        "communication_over_product": max(
            row[mode, False]["comm_ms"] / number / result["product_ms"] for mode, number in transfers.items()
        ),
    }


def report(result: dict[str, Any], file: Path | None) -> None:
    checks = checks_of(result)
    print(
        f"\n\n{TOKENS} tokens, {WIDTH} inputs, {result['d_out']} outputs on each of {RANKS} ranks, fp32; "
        f"one product takes {result['product_ms']:.0f} ms\n"
    )
    names = ("step_ms", "compute_ms", "comm_ms", "exposed_ms", "hidden_ms", "straggle_ms")
    print(f"{'backward':<12} {'overlap':>7} " + " ".join(f"{name:>11}" for name in names) + f" {'hidden':>7}")
    for row in result["rows"]:
        cells = " ".join(f"{row[name]:11.1f}" for name in names)
        print(
            f"{row['mode']:<12} {'on' if row['overlap'] else 'off':>7} {cells} {row['hidden_fraction']:7.2f}"
        )
    print("\n" + "  ".join(f"{name} {value:.2f}" for name, value in checks.items()))
    write(file, {**result, "checks": checks, "machine": machine()})


def main() -> int:
    parser = BenchParser(__doc__, smoke={"repeats": 1, "ratio": 20.0})
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--ratio", type=float, default=0.7, help="communication over the product it hides under"
    )
    parser.add_argument("--inside", type=Path, help="in the namespace; write what was measured here")
    given = parser.parse_args()
    if given.inside is not None:
        options = {"tp": RANKS, "deadline_s": 1800.0, "collective_deadline_s": 60.0}
        result = run_ranks(RANKS, measure, given.ratio, given.repeats, **options)[0]
        given.inside.write_text(json.dumps(result))
        return 0
    with tempfile.TemporaryDirectory() as folder, shaped_network(RATE_MBIT, given.smoke) as run:
        out = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--inside", str(out)]
        code = run([*command, "--repeats", str(given.repeats), "--ratio", str(given.ratio)]).returncode
        if code == 0:
            report(json.loads(out.read_text()), given.json)
        return code


if __name__ == "__main__":
    raise SystemExit(main())
