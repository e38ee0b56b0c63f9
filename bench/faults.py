"""How soon a fault is named, and how soon a run has made up for it: a table by kind of fault.

    .venv/bin/python bench/faults.py [--repeats 3] [--deadline-s 10] [--json FILE] [KIND ...]
    .venv/bin/python bench/faults.py --smoke              a kill alone, in a run of few steps

Two ranks of preset `tiny` on this machine, saved after every step, with `--restarts 1`; rank 1 is struck as
step 4 begins. Seconds from the fault to its record (`named`), and to the end of the struck step on all ranks
(`back`): ending, starting, connecting and loading are in it, most of which is importing torch.

All runs end with the losses of the undisturbed one, to the last bit, or this says in which step they part and
fails. Each run chooses for itself: on CPUs equal runs have equal bits (`run.deterministic`), so that nothing
has to be taken over from another.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _smoke import BenchParser, write
from _strike import STRIKES
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Bed:
    """What all runs share; `step` is struck."""

    deadline_s: float
    step: int = 4
    steps: int = 7


SITE = """
import os, sys
if "STRIKE" in os.environ and "RANK" in os.environ:
    sys.path.insert(0, {bench!r})
    import _strike
    _strike.put_in()
"""


def train(folder: Path, bed: Bed, kind: str = "", attempt: int = 0) -> subprocess.CompletedProcess[str]:
    """One command, struck or not; `attempt` counts commands."""
    (folder / "sitecustomize.py").write_text(SITE.format(bench=str(Path(__file__).parent)))
    source = Path(__file__).parent.parent / "src"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{folder}{os.pathsep}{source}",
        "STRIKE_LOG": str(folder / "log"),
    }
    environment |= {"STRIKE_ATTEMPT": str(attempt)} | ({"STRIKE": f"{kind} 1 {bed.step}"} if kind else {})
    words = ["--preset", "tiny", "--ranks", "2", "--run.device", "cpu", "--run.name", "r", "--restarts", "1"]
    words += ["--run.steps", str(bed.steps), "--checkpoint.every", "1", "--integrity.every", "1"]
    words += ["--integrity.repair", "reload", "--parallel.deadline-s", str(bed.deadline_s)]
    words += ["--resume", "auto"] if attempt else []
    command = [sys.executable, "-m", "moeclipse", "train", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def losses(run: Path) -> list[str]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"].hex() for line in lines]


def ended(done: subprocess.CompletedProcess[str], code: int = 0) -> None:
    if done.returncode != code:
        raise SystemExit(f"a run ended with status {done.returncode}, not {code}:\n{done.stderr}")


def compare(kind: str, run: Path, undisturbed: Path) -> None:
    """Ends the bench where the losses of two runs differ in a bit."""
    mine, theirs = losses(run), losses(undisturbed)
    if mine != theirs:
        pairs = [pair for pair in zip(mine, theirs, strict=False) if pair[0] != pair[1]]
        step = next((n for n, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), len(pairs))
        raise SystemExit(
            f"{kind}: the run parts from the undisturbed one in step {step} "
            f"({len(mine)} and {len(theirs)} steps): {pairs[:1]}"
        )


def strike(kind: str, bed: Bed, undisturbed: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="moeclipse-faults-") as name:
        folder = Path(name)
        run = folder / "runs" / "r"
        done = train(folder, bed, kind)
        if kind == "leave":
            ended(done, 75)
            done = train(folder, bed, kind, attempt=1)
        ended(done)
        compare(kind, run, undisturbed)
        lines = [line.split() for line in (folder / "log").read_text().splitlines()]
        (struck,) = [float(when) for word, when, *_ in lines if word == "struck"]
        named = [float(when) for word, when, *_ in lines if word == "noticed"]
        record = run / "incidents.jsonl"
        if record.exists():
            named += [json.loads(line)["time"] for line in record.read_text().splitlines()]
        # Where a run is asked to leave, the step it was asked in is finished and saved.
        awaited = bed.step + (kind == "leave")
        behind = [float(when) for word, when, *more in lines if word == "step" and int(more[2]) == awaited]
        return {"named": min(named) - struck if named else None, "back": max(behind) - struck}


def main() -> int:
    parser = BenchParser(__doc__, smoke={"repeats": 1, "kinds": ["kill"], "step": 1, "steps": 3})
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(STRIKES)}; all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--deadline-s", type=float, default=10.0)
    parser.add_argument("--step", type=int, default=4, help="that is struck")
    parser.add_argument("--steps", type=int, default=7, help="of a run")
    given = parser.parse_args()
    if not 0 < given.step < given.steps - 1:
        parser.error(
            f"--step ({given.step}) must lie between the first and the last of --steps ({given.steps})"
        )
    if unknown := set(given.kinds) - STRIKES.keys():
        parser.error(f"no such fault: {', '.join(unknown)}; there are {', '.join(STRIKES)}")
    bed = Bed(deadline_s=given.deadline_s, step=given.step, steps=given.steps)
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="moeclipse-faults-") as name:
        ended(train(Path(name), bed))
        undisturbed = Path(name) / "runs" / "r"
        for _ in range(given.repeats):
            for kind in given.kinds or STRIKES:
                found.setdefault(kind, []).append(strike(kind, bed, undisturbed))
    table = Table("fault", "named after s", "back after s", title=f"medians of {given.repeats}")
    for kind, rows in found.items():
        named = [row["named"] for row in rows if row["named"] is not None]
        words = f"{statistics.median(named):.2f}" if named else "-"
        table.add_row(kind, words, f"{statistics.median(row['back'] for row in rows):.2f}")
    Console().print(table)
    write(given.json, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
