"""`moeclipse measure`: the machine at hand, or a run, as a file of costs for `plan` and `simulate`.

    moeclipse measure -o costs.toml                       # products, memory, launches, wire, a step: a minute
    moeclipse measure --run runs/mine -o costs.toml       # from what the steps of a run took
    moeclipse plan my.toml --gpus 8 --device costs.toml

Of a run two numbers are fitted: how fast it computed and how fast its ranks sent, so that the simulated sums
of its own schedule are the measured ones. CPUs are measured with one thread, as ranks that share one have it.
Hazard: ranks are forked to measure the wire before a device is opened.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from moeclipse.cli.guard import refuse_unwritable
from moeclipse.cli.terminal import terminal
from moeclipse.cli.two_ranks import Answer, ask_two_ranks, mesh_of_two
from moeclipse.cli.words import read
from moeclipse.core.errors import ConfigError
from moeclipse.core.outside import parse_json
from moeclipse.core.program import command
from moeclipse.core.steps import nth_window

PATIENCE_S = 30.0
SHORT, LONG = 1 << 10, 1 << 22
"""Bytes of a message that tells latency, and of one that tells bandwidth."""
ROUNDS = 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """Measure this machine, or fit what a run took, and write costs for plan and simulate."""

    out: Path | None = None
    """Write a file that --device of plan and simulate takes; without it the numbers are printed alone."""
    run: Path | None = None
    """The folder of a run that has ended."""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU where there is one."""


def main(argv: list[str]) -> int:
    options = read(MeasureOptions, argv, "measure", short={"-o": "out"})
    if options.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device ({options.device!r}) must be auto, cpu or cuda")
    if options.run is not None and options.device != "auto":
        raise ConfigError("--device says what to measure; --run brings its own")
    refuse_unwritable({"--out": options.out})
    console = terminal()
    begun = time.monotonic()
    with console.status("measuring ..."):
        tables, told = of_run(options.run) if options.run is not None else of_machine(options.device)
    from moeclipse.train.predict.machine import as_toml

    text = as_toml(tables, told)
    if options.out is None:
        console.print(text, end="")
        return 0
    options.out.write_text(text)
    console.print(f"{told}: {options.out}, in {time.monotonic() - begun:.0f} s")
    model = ("small", "--tokens-per-step", "64k") if options.run is None else (options.run / "config.toml",)
    again = command("plan", *model, "--gpus", 2, "--device", options.out)
    console.print(f"take it with --device, as in: {again}")
    return 0


def of_machine(device: str) -> tuple[dict[str, Any], str]:
    """Tables of a cluster file, and what they are."""
    import torch

    from moeclipse.cli.measured_step import kernels_inside, measured_step, message_inside, shared_step

    devices = 0 if device == "cpu" else torch.cuda.device_count()  # asks the driver, opens nothing
    if device == "cuda" and not devices:
        raise ConfigError("--device cuda: there is no GPU here")
    kind = "cuda" if devices else "cpu"
    wire = measured_wire(kind) if kind == "cpu" or devices > 1 else None
    seconds = measured_step(kind) if kind == "cpu" else None
    shared = shared_step() if kind == "cpu" and wire is not None else None
    from moeclipse.train.predict.machine import measured_machine

    if kind == "cpu":
        torch.set_num_threads(1)
    device_here = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
    tables: dict[str, Any] = measured_machine(device_here, wire)
    seconds = measured_step(kind) if kind == "cuda" else seconds
    if seconds is not None:
        tables["kernels"] |= {"inside": kernels_inside(kind, tables, seconds)}
    if shared is not None:
        latency = message_inside(tables, *shared)
        tables |= {name: {**tables[name], "latency": latency} for name in ("near", "far")}
    name = torch.cuda.get_device_name(0) if kind == "cuda" else "a core of this CPU"
    return tables, f"measured on {name}"


def measured_wire(kind: str) -> tuple[float, float] | None:
    """(bytes a second, seconds a message) between two ranks here; None where they cannot talk."""
    yes, text = ask_two_ranks(_over_cpu if kind == "cpu" else _over_nccl, PATIENCE_S)
    if not yes:
        return None
    short, long = parse_json(text)
    return (LONG - SHORT) / max(long - short, 1e-9), short


def _over_cpu(rank: int, folder: str) -> Answer:
    return _times(rank, folder, "cpu")


def _over_nccl(rank: int, folder: str) -> Answer:
    return _times(rank, folder, "cuda")


def _times(rank: int, folder: str, kind: str) -> Answer:
    """Seconds of an exchange of short and of long messages, as a step's rows travel."""
    import torch

    from moeclipse.comm.async_ops.lane import all_to_all
    from moeclipse.comm.start import stop

    mesh = mesh_of_two(rank, folder, kind, PATIENCE_S)
    found = []
    for size in (SHORT, LONG):
        rows = torch.ones(size // 2, 1, device=mesh.device)  # half of four bytes each crosses
        half = [len(rows) // 2] * 2
        times = []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            all_to_all(mesh.a2a, mesh.experts, rows, half, half, "exchange of rows").get()
            if kind == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
        found.append(sorted(times)[ROUNDS // 2])
    stop()
    return True, json.dumps(found)


def of_run(folder: Path) -> tuple[dict[str, Any], str]:
    """What a run's own steps say of its machine."""
    from moeclipse.cli.simulate_run import RunTerms, load_run
    from moeclipse.sim.cluster_costs import ClusterCosts
    from moeclipse.train.predict.run_step import scales

    run = load_run(folder, RunTerms())
    prices = run.step_costs
    assert isinstance(prices, ClusterCosts)
    if run.measured is None:
        raise ConfigError(
            f"{folder} has no summary of measured steps; give the folder of a run that has ended"
        )
    program = run.verified(run.config.pipeline.schedule)[0].program
    factor = scales(program, prices.durations(program), run.measured)
    cluster, device = prices.cluster, prices.cluster.device
    fast, sends = 1 / factor[True], 1 / factor[False]
    tables: dict[str, Any] = {
        "device": device.name,
        "measured": {"flops": device.flops * fast, "memory_bandwidth": device.memory_bandwidth * fast},
        "kernels": {"launch": cluster.constants.launch / fast},
    }
    if run.measured.communication:
        links = {"near": cluster.near} | ({} if cluster.far != cluster.near else {"far": cluster.far})
        tables |= {
            name: {"bandwidth": link.bandwidth * sends, "latency": link.latency / sends}
            for name, link in links.items()
        }
    return tables, f"fitted to {nth_window(run.measured.window)} of {folder}"
