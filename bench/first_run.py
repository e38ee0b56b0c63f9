"""What a first run shows: step time and hidden share with everything at `auto`, against the plain choices.

    .venv/bin/python bench/first_run.py [--json FILE] [--rate 100]    loopback, and a slow wire (needs root)
    .venv/bin/python bench/first_run.py --smoke                       loopback, one preset, few steps
    .venv/bin/python bench/first_run.py --bar                         loopback: auto / plain is at most 1.02
    .venv/bin/python bench/first_run.py --device cuda --repeats 40    two ranks on the GPUs at hand, over NCCL
    .venv/bin/python bench/first_run.py --bar --auto moe.shadow=auto placement.planner=auto   with these, too

Two ranks train a preset as `moeclipse train` does on two cores: with the defaults, and with exchanges that
block, over the direct wire and without overlap. Two learners of each live in the same processes and take
their steps in turns, in an order that is drawn anew each time, so that they see the same weather; first those
with the defaults settle and make their trials, which are not counted here (a run spends at most a tenth of
its steps on them). The table has medians, and of each step the longer rank's time; "of all" is the ratio of
both sums, in which a step with a plan counts for what it took, and "plain / plain" that of two learners that
are alike: what is nearer to one than that is not known.

On the slow wire (`bench/shaped_network.py`) both take the direct wire: ranks of one host would find the
memory that they share, and nothing would travel.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from _smoke import BenchParser, write
from shaped_network import shaped_network, why_not

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.moe.tune.cut_choice import CALLS, TRIED
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.presets import load
from moeclipse.train.run.choices import Choices, trial_calls
from moeclipse.train.run.resolve_auto import settle
from moeclipse.train.step.learner import Learner

PRESETS = ("tiny", "deepseek-v3-tiny")
"""Those that two cores train."""
PLAIN = {
    "moe.schedule": "blocking",
    "moe.transport": "direct",
    "moe.shadow": "off",
    "pipeline.overlap": "off",
    "placement.planner": "static",
}
MICROBATCHES = (1, 4)
"""Of a step: as the preset has it, and with some that could overlap."""
BUILT = ("plain", "auto", "auto", "plain")
"""The learners, in the order in which they are built: on a GPU two that are alike were 6 % apart."""
WARM = 3
MOST = WARM + TRIED * CALLS
"""Steps before those that count, at least and at most."""
BAR = 1.02
HEAD = (
    "preset",
    "microbatches",
    "wire",
    "plain ms",
    "auto ms",
    "auto / plain",
    "of all",
    "plain / plain",
    "hidden plain",
    "hidden auto",
)


def ready(mesh: Mesh, config: TrainConfig, tries: bool, most: int) -> tuple[Learner, int, Choices]:
    """A learner behind its trials, or `most` steps, the step that it takes next, and what it chose."""
    choices = Choices(mesh)
    learner = Learner(settle(config, mesh, choices)[0] if tries else config, mesh)
    if tries:
        choices.bind(learner.layers, trial_calls(config) if learner.pipelined is None else 0)
    done = 0
    while done < min(WARM, most) or (
        any(layer.schedule.cuts.trials for layer in learner.layers) and done < most
    ):
        learner.step(done)
        done += 1
    return learner, done, choices


def race(mesh: Mesh, config: TrainConfig, repeats: int, most: int) -> dict[str, Any]:
    """Steps of all in turns, after trials: median times, hidden shares, and what was chosen."""
    plain = with_values(config, PLAIN)
    configs = {"plain": plain, "auto": config}
    all_ready = [(name, *ready(mesh, configs[name], name == "auto", most)) for name in BUILT]
    records: list[list[dict[str, Any]]] = [[] for _ in all_ready]
    shuffled = random.Random(0)  # the same order on all ranks
    for turn in range(repeats):
        for number in shuffled.sample(range(len(all_ready)), len(all_ready)):
            _, learner, first, _ = all_ready[number]
            learner.step(first + turn)
            learner.times.settle()
            records[number].append(learner.times.take()[-1].times)
    times = [[max(one["ranks"]["step_ms"]) for one in found] for found in records]
    by_name = {name: [n for n, built in enumerate(BUILT) if built == name] for name in ("plain", "auto")}
    step_ms = {name: middle([t for n in numbers for t in times[n]]) for name, numbers in by_name.items()}
    sums = {name: sum(sum(times[n]) for n in numbers) for name, numbers in by_name.items()}
    one_plain, other = (middle(times[n]) for n in by_name["plain"])
    _, auto, _, choices = all_ready[by_name["auto"][0]]
    cuts = [layer.schedule.cuts.report() for layer in auto.layers]
    return {
        "step_ms": step_ms,
        "of_all": sums["auto"] / sums["plain"],
        "alike": other / one_plain,
        "hidden": {
            name: middle([one["hidden_fraction"] for n in numbers for one in records[n]])
            for name, numbers in by_name.items()
        },
        "settled": choices.settled,
        "cuts": [f"{one['steps']} x {one['chunks']}" for one in cuts],
    }


def middle(values: list[float]) -> float:
    return statistics.median(values)


def measure(args: argparse.Namespace, wire: str, repeats: int) -> list[dict[str, Any]]:
    found = []
    for preset in args.presets:
        for microbatches in args.microbatches:
            values: dict[str, Any] = {"optim.accumulate": microbatches, "run.device": args.device}
            values |= dict(word.split("=", 1) for word in args.auto)
            values |= {"moe.transport": "direct"} if wire.endswith("mbit") else {}
            config = with_values(load(preset=preset), values)
            ways: dict[str, Any] = {"deadline_s": 560.0, "collective_deadline_s": 120.0}
            if args.device == "cuda":
                ways |= {"device": "cuda", "backend": "nccl"}
            most = 2 if args.smoke else MOST  # costs are measured in the second
            result = run_ranks(2, race, config, repeats, most, **ways)[0]
            found.append({"preset": preset, "microbatches": microbatches, "wire": wire, **result})
            show(found[-1])
    return found


def show(row: dict[str, Any]) -> None:
    times, hidden = row["step_ms"], row["hidden"]
    cells = (
        *(row["preset"], str(row["microbatches"]), row["wire"]),
        *(f"{times['plain']:.1f}", f"{times['auto']:.1f}", f"{times['auto'] / times['plain']:.3f}"),
        *(f"{row['of_all']:.3f}", f"{row['alike']:.3f}"),
        *(f"{100 * hidden[name]:.0f} %" for name in ("plain", "auto")),
    )
    print("| " + " | ".join(cells) + " |", flush=True)
    print(
        f"    chosen: {row['settled']}, rows in steps x chunks {', '.join(row['cuts'])}",
        file=sys.stderr,
        flush=True,
    )


def on_slow_wire(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The same in a network namespace whose loopback is that wire."""
    with tempfile.TemporaryDirectory() as folder, shaped_network(rate_mbit=args.rate) as run:
        told = Path(folder) / "rows.json"
        words = ["--inside", str(told), "--rate", f"{args.rate:g}", "--repeats", str(args.repeats)]
        words += ["--presets", *args.presets, "--auto", *args.auto]
        words += ["--microbatches", *map(str, args.microbatches)]
        if run([sys.executable, __file__, *words]).returncode:
            raise SystemExit("the part on the slow wire failed")
        rows: list[dict[str, Any]] = json.loads(told.read_text())
        return rows


def main() -> int:
    parser = BenchParser(__doc__, smoke={"presets": ["tiny"], "microbatches": [1], "repeats": 1})
    parser.add_argument("--presets", nargs="+", default=list(PRESETS))
    parser.add_argument("--microbatches", type=int, nargs="+", default=list(MICROBATCHES))
    parser.add_argument("--auto", nargs="*", default=[], metavar="KEY=VALUE", help="of the run with defaults")
    parser.add_argument("--repeats", type=int, default=16, help="steps of each, in turns")
    parser.add_argument("--rate", type=float, default=100.0, help="megabits per second of the slow wire")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--bar", action="store_true", help="loopback alone; exit status 1 over the bar")
    parser.add_argument("--inside", type=Path, help="in the namespace; write what was measured here")
    args = parser.parse_args()
    if args.inside is not None:
        args.inside.write_text(json.dumps(measure(args, f"{args.rate:g} mbit", args.repeats)))
        return 0
    print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|", flush=True)
    wire = "loopback" if args.device == "cpu" else "nccl"
    rows = measure(args, wire, args.repeats * (2 if args.bar else 1))
    if not args.bar and not args.smoke and args.device == "cpu":
        reason = why_not()
        rows += on_slow_wire(args) if reason is None else []
        print(f"no slow wire: {reason}" if reason else "", end="\n" if reason else "")
    write(args.json, rows)
    worst = max(row["step_ms"]["auto"] / row["step_ms"]["plain"] for row in rows)
    print(f"worst auto / plain: {worst:.3f} (at most {BAR})")
    return int(args.bar and worst > BAR)


if __name__ == "__main__":
    sys.exit(main())
