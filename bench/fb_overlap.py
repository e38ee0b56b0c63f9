"""How much of the all-to-all of one microbatch hides under another's compute, on a slow wire.

    .venv/bin/python bench/fb_overlap.py [--json FILE] [--repeats 9] [--pp 1 2] [--ratio 0.5] [--trace FILE]
    .venv/bin/python bench/fb_overlap.py --smoke [--device cuda]
    .venv/bin/python bench/fb_overlap.py --device cuda [--ranks 2] [--json FILE]
    .venv/bin/python bench/fb_overlap.py --device cuda --backend nccl [--ranks 2] [--comm-sms 0 2 4 8]

Two ranks share the experts (and with --pp 2 two such pairs share the layers), in a network namespace of their
own whose loopback is a slow wire (bench/shaped_network.py). Its rate is set so that, without overlap, the
exchanges of a step take `--ratio` of its compute. Interleaved in each repeat:

    off         microbatch by microbatch, every op waits for the one before
    smart       the same, the rows of a layer cut into units (moe.schedule = "smart")
    pair        the forward of one microbatch beside the backward of another
    pair+self   and warm-up and cool-down cut into halves that hide each other's exchanges

Times come from the library's own record. A transfer counts from the moment its last rank launched it; hidden
is what of it lies under this rank's compute, so `off` scores 0 by definition. Steady is the time between the
start of the first pair and the end of the last; warm-up and cool-down are the edges. Gradients are not
reduced: that is another wire's business. The prediction is the simulator's, from the mean times of the ops
of `off`, whole and in halves (bench/_fb_prediction.py).

With `--device cuda` the ranks share one GPU under MPS (nvidia-cuda-mps-control -d), and rows go through
pinned memory of the host: copy engines move them at a network's rate. There the rate is what it is. With
`--backend nccl` rows go through NCCL over sockets, whose kernels take multiprocessors of the GPU:
`--comm-sms` bounds how many, in turn, and experts are as wide as they must be for `--ratio`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from _fb_prediction import Prediction
from _smoke import BenchParser, machine, write
from shaped_network import MAX_MBIT, set_rate, shaped_network

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.pipeline.runtime import Runtime
from moeclipse.report.intervals import Span, TransferInterval, split_step
from moeclipse.schedule.kinds import A2A, COMPUTE, Form
from moeclipse.schedule.op import Op
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.observe.step_times import transfers_of
from moeclipse.train.step.learner import Learner

RATE_MBIT = 200.0
MODES: dict[str, dict[str, Any]] = {
    "off": {"pipeline.schedule": "1f1b"},
    "smart": {"pipeline.schedule": "1f1b", "moe.schedule": "smart", "moe.group_size": 1, "moe.chunks": 2},
    "pair": {"pipeline.overlap": "pair"},
    "pair+self": {"pipeline.overlap": "pair+self"},
}
MODEL: dict[str, Any] = {
    "model.d_model": 256,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.head_dim": 64,
    "model.dtype": "float32",
    "moe.num_experts": 8,
    "moe.d_ff": 1024,
    "moe.num_shared_experts": 1,
    "gate.top_k": 2,
    "data.seq_len": 128,
}


ON_DEVICE: dict[str, Any] = {
    "model.d_model": 2048,
    "model.num_heads": 16,
    "model.num_kv_heads": 16,
    "model.head_dim": 128,
    "model.dtype": "bfloat16",
    "moe.d_ff": 3072,
    "moe.transport": "pinned",
    "data.files": (),
    "data.seq_len": 4096,
}
NARROW = {"optim.main_grad": "bf16", "optim.master": "none", "optim.state": "bf16"}


class Case:
    """A model in one mode, ready to run steps."""

    def __init__(
        self, mesh: Mesh, mode: str, microbatches: int, layers: int, samples: int = 2, **sizes: int
    ) -> None:
        """Two samples of each microbatch on each rank, so that it can be cut. `sizes`: d_ff, seq_len; 0 is
        the usual one."""
        batch = samples * mesh.num_data * microbatches
        values = {**MODEL, **MODES[mode], "optim.accumulate": microbatches, "data.batch_size": batch}
        values |= {"model.num_layers": layers, "data.files": (__file__,), "parallel.pp": mesh.pp}
        if mesh.device.type == "cuda":
            values |= ON_DEVICE
            if mesh.experts.backend == "nccl":  # few experts, because they must be wide: see `fitting_width`
                values |= {"moe.transport": "direct", "moe.num_experts": 2 * mesh.ep}
                if mesh.num_ranks > 2:  # a third of the bytes: ranks share the memory of one GPU
                    values |= NARROW
        names = {"d_ff": "moe.d_ff", "seq_len": "data.seq_len"}
        values |= {names[key]: size for key, size in sizes.items() if size}
        self.mesh, self.mode = mesh, mode
        self.learner = Learner(with_values(TrainConfig(), values), mesh)
        assert self.learner.pipelined is not None
        self.learner.optim.states.clear()  # nothing is updated, and six models share the memory
        self.runtime: Runtime = self.learner.pipelined.runtime
        self.runtime.ends = {}  # gradients stay where they are
        self.stamps: list[tuple[Op, Any, Any]] = []
        self.runtime.observe = lambda op, begun, ended: self.stamps.append((op, begun, ended))
        self.steps = 0

    def run(self) -> dict[str, Any]:
        """Seconds of one step on this rank, and where they went."""
        mesh, recorder, pipelined = self.mesh, self.mesh.recorder, self.learner.pipelined
        assert pipelined is not None
        self.learner.buckets.zero()
        self.stamps.clear()
        mesh.barrier()
        busy = time.process_time()
        recorder.begin_step()
        with recorder.compute():
            pipelined.run(self.steps)
        stamps = recorder.end_step()
        busy = time.process_time() - busy
        self.steps += 1
        transfers = [t for t in transfers_of(stamps, mesh) if is_exchange(t)]
        spans = [(op, recorder.seconds(a), recorder.seconds(b)) for op, a, b in self.stamps]
        found: dict[str, Any] = {"window": stamps.window, "waits": stamps.waits, "spans": spans}
        found |= {"transfers": transfers, "compute": stamps.compute, "busy": busy}
        return found


def is_exchange(transfer: TransferInterval) -> bool:
    return "dispatch" in transfer.label or "combine" in transfer.label


def steady_window(spans: list[tuple[Op, float, float]]) -> Span:
    """From the first op of the first pair to the last op of the last; without pairs, nothing."""
    ops = [op for op, _, _ in spans]
    both = [i for i in range(1, len(ops)) if is_forward(ops[i - 1]) != is_forward(ops[i]) and near(ops, i)]
    if not both:
        return (0.0, 0.0)
    return spans[both[0] - 1][1], spans[both[-1]][2]


def is_forward(op: Op) -> bool:
    return op.kind.form is Form.F


def near(ops: list[Op], i: int) -> bool:
    """Two ops side by side, a forward and a backward of two microbatches, neither at the end of its pass."""
    a, b = ops[i - 1], ops[i]
    return a.microbatch != b.microbatch and a.lane in (COMPUTE, A2A) and b.lane in (COMPUTE, A2A)


def phases(case: Case, found: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of exchanges, all and exposed, in warm-up, steady state and cool-down."""
    window = found["window"]
    whole = split_step(window, compute=found["compute"], waits=found["waits"], transfers=found["transfers"])
    steady = (0.0, 0.0)
    if case.mode.startswith("pair"):
        steady = steady_window(found["spans"])
    spans = {"compute": found["compute"], "waits": found["waits"], "transfers": found["transfers"]}
    middle = split_step(steady, **spans)
    before = split_step((window[0], steady[0] or window[0]), **spans)
    times = {
        "step_ms": whole.step,
        "compute_ms": whole.compute,
        "comm_ms": whole.comm,
        "exposed_ms": whole.exposed,
        "straggle_ms": whole.straggle,
        "idle_ms": whole.idle,
        "steady_comm_ms": middle.comm,
        "steady_exposed_ms": middle.exposed,
        "warm_comm_ms": before.comm,
        "warm_exposed_ms": before.exposed,
        "cool_comm_ms": whole.comm - middle.comm - before.comm,
        "cool_exposed_ms": whole.exposed - middle.exposed - before.exposed,
    }
    return {name: 1e3 * seconds for name, seconds in times.items()}


def set_rate_once(mesh: Mesh, rate: float) -> None:
    mesh.barrier()
    if mesh.rank == 0:
        set_rate(rate)
    mesh.barrier()


def means(mesh: Mesh, times: dict[str, float]) -> dict[str, float]:
    everyone = mesh.gather_objects(times)
    return {name: sum(rank[name] for rank in everyone) / len(everyone) for name in times}


def fitting_width(mesh: Mesh, given: dict[str, Any], layers: int) -> int:
    """Experts so wide that exchanges take `ratio` of compute, where the wire's rate is what it is."""
    width = int(ON_DEVICE["moe.d_ff"])
    for _ in range(3):
        case = Case(mesh, "off", given["microbatches"], layers, d_ff=width, seq_len=given["seq_len"])
        case.run()
        trial = [means(mesh, phases(case, case.run())) for _ in range(3)]
        ratio = statistics.median(t["comm_ms"] / t["compute_ms"] for t in trial)
        del case
        torch.cuda.empty_cache()
        if 0.9 < ratio / given["ratio"] < 1.1:
            break
        width = min(max(round(width * ratio / given["ratio"] / 256), 1) * 256, 65536)
    return width


def sweep(mesh: Mesh, given: dict[str, Any]) -> list[dict[str, Any]]:
    """One result for each bound on NCCL's multiprocessors; the widths are those of the first."""
    results, axes = [], {"dp": mesh.dp, "ep": mesh.ep, "tp": mesh.tp, "pp": mesh.pp}
    for comm_sms in given["comm_sms"]:
        place: dict[str, Any] = {"rank": mesh.rank, "device": mesh.device, "watch": mesh.watch}
        bounded = mesh if comm_sms == 0 else Mesh(**axes, **place, comm_sms=comm_sms)
        if mesh.experts.backend == "nccl" and "d_ff" not in given:
            given["d_ff"] = fitting_width(mesh, given, given["layers"] * mesh.pp)
        results.append({**measure(bounded, given), "comm_sms": comm_sms, "d_ff": given.get("d_ff", 0)})
        torch.cuda.empty_cache()
    return results


def measure(mesh: Mesh, given: dict[str, Any]) -> dict[str, Any]:
    on_device = mesh.device.type == "cuda"
    wide = {"d_ff": given.get("d_ff", 0), "seq_len": given["seq_len"]}
    if on_device:
        torch.cuda.set_device(mesh.device)
    elif (os.cpu_count() or 1) >= 2:
        os.sched_setaffinity(0, {mesh.stage.index % (os.cpu_count() or 1)})
    torch.set_num_threads(1)
    layers, microbatches = given["layers"] * mesh.pp, given["microbatches"]
    cases = {mode: Case(mesh, mode, microbatches, layers, **wide) for mode in MODES}
    if not on_device:
        set_rate_once(mesh, RATE_MBIT)
    for case in cases.values():
        case.run()
    trial = [means(mesh, phases(cases["off"], cases["off"].run())) for _ in range(3)]
    ratio = statistics.median(t["comm_ms"] / t["compute_ms"] for t in trial)
    rate = 0.0
    if not on_device:
        rate = min(RATE_MBIT * ratio / given["ratio"], MAX_MBIT)
        set_rate_once(mesh, rate)
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in cases}
    whole: list[dict[str, Any]] = []
    for repeat in range(given["repeats"] + 1):
        for mode in cases if repeat % 2 else reversed(cases):
            seen = cases[mode].run()
            times = means(mesh, phases(cases[mode], seen))
            if repeat:
                found[mode].append(times)
                if mode == "off":
                    whole.append(seen)
                elif mode == "pair+self" and given["trace"] and repeat == given["repeats"]:
                    write_trace(mesh, seen, f"{given['trace']}.pp{mesh.pp}.json")
        if mesh.rank == 0:
            print(f"\rpp {mesh.pp}: {repeat}/{given['repeats']}", end="", file=sys.stderr, flush=True)
    halves = Case(mesh, "off", 2 * microbatches, layers, samples=1, **wide)
    halves.run()
    off = statistics.median(times["step_ms"] - times["straggle_ms"] for times in found["off"])
    prediction = Prediction(
        mesh, whole, [halves.run() for _ in range(3)], cases["off"].runtime.verified, 1e-3 * off
    )
    fewer = Case(mesh, "pair+self", max(microbatches // 2, 2), layers, **wide)
    fewer.run()
    few = 1 if given["smoke"] else 3
    half = [means(mesh, phases(fewer, fewer.run())) for _ in range(max(given["repeats"] // 2, few))]
    rows = []
    for mode, times in found.items():
        row: dict[str, Any] = {name: statistics.median(t[name] for t in times) for name in times[0]}
        verified = cases[mode].runtime.verified
        predicted = 1e3 * prediction.seconds(verified) if mode != "smart" else None
        rows.append(
            {"pp": mesh.pp, "mode": mode, "microbatches": microbatches, **row} | {"predicted_ms": predicted}
        )
    row = {name: statistics.median(t[name] for t in half) for name in half[0]}
    row |= {"predicted_ms": 1e3 * prediction.seconds(fewer.runtime.verified)}
    rows.append({"pp": mesh.pp, "mode": "pair+self", "microbatches": max(microbatches // 2, 2), **row})
    return {"rows": rows, "rate_mbit": rate, "costs_ms": {k: 1e3 * v for k, v in prediction.whole.items()}}


def write_trace(mesh: Mesh, seen: dict[str, Any], file: str) -> None:
    """The lanes of all ranks as they were, for ui.perfetto.dev."""
    first = seen["window"][0]
    mine = [("compute", str(op), begun, ended) for op, begun, ended in seen["spans"] if op.lane == COMPUTE]
    mine += [("a2a", t.label, max(t.launched, t.last_launched), t.done) for t in seen["transfers"]]
    everyone = mesh.gather_objects([(lane, name, a, b) for lane, name, a, b in mine])
    first = min(mesh.gather_objects(first))
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(everyone):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for lane, name, a, b in spans:
            slot = {"ph": "X", "name": name, "pid": rank, "tid": lane, "ts": 1e6 * (a - first)}
            events.append(slot | {"dur": 1e6 * (b - a)})
    if mesh.rank == 0:
        Path(file).write_text(json.dumps({"traceEvents": events}))


def checks_of(results: list[dict[str, Any]]) -> dict[str, float]:
    checks: dict[str, float] = {}
    for result in results:
        first = {}
        for row in result["rows"]:
            first.setdefault(row["mode"], row)
        best, off = first["pair+self"], first["off"]
        suffix = "" if off["pp"] == 1 else f"_pp{off['pp']}"
        suffix += f"_sms{result['comm_sms']}" if result.get("comm_sms") else ""
        edge = {name: best[f"warm_{name}_ms"] + best[f"cool_{name}_ms"] for name in ("comm", "exposed")}
        share = {
            "steady_hidden": 1 - best["steady_exposed_ms"] / max(best["steady_comm_ms"], 1e-9),
            "edge_hidden": 1 - edge["exposed"] / max(edge["comm"], 1e-9),
        }
        checks |= {f"{name}{suffix}": value for name, value in share.items()}
        checks[f"hidden_when_off{suffix}"] = 1 - off["exposed_ms"] / off["comm_ms"]
        checks[f"speedup{suffix}"] = off["step_ms"] / best["step_ms"]
        checks[f"over_smart{suffix}"] = first["smart"]["step_ms"] / best["step_ms"]
        checks[f"comm_over_compute{suffix}"] = off["comm_ms"] / off["compute_ms"]
        checks[f"compute_slowdown{suffix}"] = best["compute_ms"] / off["compute_ms"]
        both = off["comm_ms"] + off["compute_ms"]
        checks[f"of_possible{suffix}"] = checks[f"speedup{suffix}"] / (both / best["compute_ms"])
        checks[f"prediction_error{suffix}"] = max(
            abs(row["predicted_ms"] / row["step_ms"] - 1)
            for row in result["rows"]
            if row["mode"] == "pair+self"
        )
    return checks


def report(results: list[dict[str, Any]], file: Path | None) -> None:
    names = ("step_ms", "compute_ms", "comm_ms", "exposed_ms", "straggle_ms", "idle_ms")
    for result in results:
        wire = f"wire of {result['rate_mbit']:.0f} mbit" if result["rate_mbit"] else "pinned host memory"
        if result.get("d_ff"):
            bound = f"at most {result['comm_sms']} multiprocessors" if result["comm_sms"] else "unbounded"
            wire = f"NCCL over sockets, {bound}, experts of width {result['d_ff']}"
        print(f"\n\n{wire}\n")
        head = " ".join(f"{name:>11}" for name in names) + f" {'predicted':>10}"
        print(f"{'pp':>2} {'M':>3} {'overlap':<10} {head} {'warm':>5} {'steady':>5} {'cool':>5}")
        for row in result["rows"]:
            cells = " ".join(f"{row[name]:11.1f}" for name in names)
            predicted = "" if row["predicted_ms"] is None else f"{row['predicted_ms']:.1f}"
            parts = ("warm", "steady", "cool") if row["mode"].startswith("pair") else ()
            shares = " ".join(f"{hidden(row, part):>5}" for part in parts)
            print(
                f"{row['pp']:>2} {row['microbatches']:>3} {row['mode']:<10} {cells} {predicted:>10} {shares}"
            )
    checks = checks_of(results)
    print("\nlast columns: hidden share of the exchanges of each phase\n")
    print("  ".join(f"{name} {value:.2f}" for name, value in checks.items()))
    rows = [row for result in results for row in result["rows"]]
    write(file, {"rows": rows, "checks": checks, "machine": machine()})


def hidden(row: dict[str, Any], part: str) -> str:
    comm = row[f"{part}_comm_ms"]
    return f"{1 - row[f'{part}_exposed_ms'] / comm:.2f}" if comm > 1 else ""


def main() -> int:
    smallest = {"repeats": 1, "pp": [1], "layers": 1, "microbatches": 2, "seq_len": 16}
    parser = BenchParser(__doc__, smoke=smallest)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--pp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, default=3, help="of each rank")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=0, help="four ranks that share 140 GB need 2048")
    parser.add_argument("--ratio", type=float, default=0.5, help="exchanges over compute, without overlap")
    parser.add_argument("--trace", type=str, default="", help="write measured lanes to FILE.ppN.json")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=2, help="with --device cuda: ranks that share the GPU")
    parser.add_argument("--backend", choices=["auto", "nccl"], default="auto", help="with --device cuda")
    parser.add_argument(
        "--comm-sms", type=int, nargs="+", default=[0], help="with --backend nccl; 0: unbounded"
    )
    parser.add_argument("--inside", type=Path, help="in the namespace; write what was measured here")
    given = parser.parse_args()
    if given.device == "cuda":
        if torch.cuda.device_count() == 0:
            print("bench/fb_overlap.py --device cuda: this machine has no CUDA device.")
            return 2
        asked = {k: v for k, v in vars(given).items() if k not in ("json", "inside", "pp")}
        options = {"deadline_s": 900.0, "collective_deadline_s": 60.0, "device": "cuda:0"}
        results = []
        for pp in given.pp if given.backend == "nccl" else [1]:
            results += run_ranks(given.ranks * pp, sweep, asked, pp=pp, backend=given.backend, **options)[0]
        report(results, given.json)
        return 0
    if given.inside is not None:
        options = {"deadline_s": 1800.0, "collective_deadline_s": 60.0}
        asked = {k: v for k, v in vars(given).items() if k not in ("json", "inside", "pp")}
        results = [run_ranks(2 * pp, measure, asked, pp=pp, **options)[0] for pp in given.pp]
        given.inside.write_text(json.dumps(results))
        return 0
    with tempfile.TemporaryDirectory() as folder, shaped_network(RATE_MBIT, given.smoke) as run:
        out = Path(folder) / "result.json"
        code = run([sys.executable, __file__, "--inside", str(out), *sys.argv[1:]]).returncode
        if code == 0:
            report(json.loads(out.read_text()), given.json)
        return code


if __name__ == "__main__":
    raise SystemExit(main())
