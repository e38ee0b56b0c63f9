"""Two hosts with a slow link between them: links as measured, and plans as predicted and as measured.

    .venv/bin/python bench/placement.py --part nodes [--json FILE] [--short]

Four ranks in two network namespaces, two in each, as on two hosts whose ranks share a card: inside they talk
over a loopback, between them over a cable that is several times slower (bench/shaped_network.py). The gate
chooses with Zipf frequencies, as in the part `end_to_end`. Cases take turns, step by step:

    static       experts in order, four on each rank
    one host     planned (incremental) as if all ranks were on one host: every link is like the mean of all
    two hosts    planned with links inside hosts and between them measured apart

A link is held against the rate that it was shaped to, a plan against the steps of `static`: predicted is the
difference of seconds by the objective of planners (told part by part), measured that of median steps. Four
ranks share two cores, so what differs is mostly what travels, and from where to where.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from _placement_steps import MODEL, PLANNED, RANKS, ZIPF, Bed, in_turn, make, skew
from shaped_network import join_host, switched_network

from moeclipse.balance.objective import PlacementCosts, score
from moeclipse.comm.mesh import Mesh
from moeclipse.testing.run_ranks import run_ranks

HOSTS = (0, 0, 1, 1)
FAR_MBIT, NEAR_MBIT = 40.0, 200.0
WARMUP = 8  # the plan is taken behind step 4
SMALL = {"data.batch_size": 48, "moe.schedule": "blocking", "moe.chunks": "auto", "moe.group_size": "auto"}
PARTS = ("fullest", "near", "cross", "sync", "total")
CASES: dict[str, dict[str, Any]] = {"static": {}, "one host": PLANNED, "two hosts": PLANNED}


BEDS = {
    "long": Bed(repeats=9, warmup=WARMUP),
    "short": Bed(repeats=2, warmup=6, values={"data.batch_size": 16}),
    "smoke": Bed(repeats=1, warmup=3, values={"data.batch_size": 16, "data.seq_len": 16}),
}


def measure(mesh: Mesh, bed: Bed) -> dict[str, Any]:
    mesh.hosts = HOSTS
    learners = {
        name: make(mesh, {**MODEL, **SMALL, **changes, **bed.values}) for name, changes in CASES.items()
    }
    for name, learner in learners.items():
        for layer in learner.layers:
            skew(layer)
            layer.schedule.hosts = (0,) * RANKS if name == "one host" else HOSTS

    def before(name: str) -> None:
        mesh.hosts = (0,) * RANKS if name == "one host" else HOSTS

    found = in_turn(mesh, learners, bed.repeats, warmup=bed.warmup, before=before)
    found["probe"] = learners["two hosts"].placement.choices.placement
    costs = learners["two hosts"].placement.costs
    assert costs is not None
    for row, learner in zip(found["rows"], learners.values(), strict=True):
        counts_PE = np.rint(learner.loads.average.rows_LPE[0]).astype(np.int64)
        seconds = score(learner.layers[0].dispatcher.placement, counts_PE, costs, node_P=HOSTS)
        row |= {f"{part}_ms": 1e3 * getattr(seconds, part) for part in PARTS}
    return found


def run_here(size: str) -> dict[str, Any]:
    """All cases on two hosts; ends the program with status 2 where they cannot be made."""
    with tempfile.TemporaryDirectory() as folder, switched_network() as run:
        out = Path(folder) / "rows.json"
        done = run([sys.executable, __file__, "--inside", str(out), "--size", size])
        if done.returncode:
            raise SystemExit(done.returncode)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def report(found: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Print the tables; rows and checks."""
    rows, probe = found["rows"], found["probe"]
    costs = PlacementCosts.from_measured(probe, 50, RANKS // 2)
    mbit = {name: 8e-6 * probe[name] for name in ("bandwidth", "link", "far_bandwidth", "far_link")}
    print(
        f"\n\n{RANKS} ranks on two hosts, {NEAR_MBIT:g} mbit inside, {FAR_MBIT:g} between; mbit as measured:"
    )
    print(f"inside: each while all send {mbit['bandwidth']:.0f}, one alone {mbit['link']:.0f}")
    print(f"between: each while all send {mbit['far_bandwidth']:.0f}, one alone {mbit['far_link']:.0f}")
    print(f"so ranks {'have cards of their own' if costs.card_per_rank else 'share the card of their host'}")
    static = rows[0]["step_ms"]
    print(f"\nZipf {ZIPF}: median step, and what it is less than that of static\n")
    heads = "".join(f"{part:>9}" for part in PARTS)
    print(f"{'case':<12}{'ms':>7}{'won':>7}{'predicted':>10}  by parts{heads}{'balance':>9}{'sent':>6}")
    for row in rows:
        parts = "".join(f"{row[f'{part}_ms']:>9.0f}" for part in PARTS)
        won, predicted = static - row["step_ms"], rows[0]["total_ms"] - row["total_ms"]
        print(
            f"{row['case']:<12}{row['step_ms']:>7.0f}{won:>7.0f}{predicted:>10.0f}{'':>10}{parts}"
            f"{row['balance']:>9.3f}{row['sent']:>6.0%}"
        )
    print(f"\nlosses of the cases differ by {found['same_loss']:.1e} at most (fp32)\n")
    by_name = {row["case"]: row for row in rows}
    won, said = (by_name["static"][key] - by_name["two hosts"][key] for key in ("step_ms", "total_ms"))
    checks = {
        "nodes_far_link_of_shaped": mbit["far_link"] / FAR_MBIT,
        "nodes_card_shared": float(not costs.card_per_rank),
        "nodes_gain": static / by_name["two hosts"]["step_ms"],
        "nodes_gain_as_one_host": static / by_name["one host"]["step_ms"],
        "nodes_predicted_of_measured": said / max(won, 1e-9),
    }
    return rows, checks


def main() -> int:
    """The part that runs inside the namespace with the switch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=BEDS, required=True)
    parser.add_argument("--inside", type=Path, required=True)
    given = parser.parse_args()
    rates = {"far_mbit": FAR_MBIT, "near_mbit": NEAR_MBIT}
    with tempfile.TemporaryDirectory() as folder:
        cable = functools.partial(join_host, hosts=HOSTS, folder=folder, **rates)
        options = {"deadline_s": 1800, "collective_deadline_s": 60, "before": cable}
        found = run_ranks(RANKS, measure, BEDS[given.size], **options)[0]
    given.inside.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
