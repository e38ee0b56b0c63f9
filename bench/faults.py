"""How soon a fault is named, and how soon a run has made up for it: a table by kind of fault.

    .venv/bin/python bench/faults.py [--repeats 3] [--deadline-s 10] [--json FILE] [KIND ...]

Two ranks of preset `tiny` on this machine, saved after every step, with `--restarts 1`; rank 1 is struck as
step 4 begins. Seconds from the fault to its record (`named`), and to the end of the struck step on all ranks
(`back`): ending, starting, connecting and loading are in it, most of which is importing torch. All runs end
with the losses of the undisturbed one, to the last bit, or this says so and fails.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _strike import STRIKES
from rich.console import Console
from rich.table import Table

STEP, STEPS = 4, 7
SITE = """
import os, sys
if "STRIKE" in os.environ and "RANK" in os.environ:
    sys.path.insert(0, {bench!r})
    import _strike
    _strike.put_in()
"""


def train(
    folder: Path, deadline_s: float, kind: str = "", attempt: int = 0
) -> subprocess.CompletedProcess[str]:
    """One command, struck or not; `attempt` counts commands."""
    (folder / "sitecustomize.py").write_text(SITE.format(bench=str(Path(__file__).parent)))
    source = Path(__file__).parent.parent / "src"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{folder}{os.pathsep}{source}",
        "STRIKE_LOG": str(folder / "log"),
    }
    environment |= {"STRIKE_ATTEMPT": str(attempt)} | ({"STRIKE": f"{kind} 1 {STEP}"} if kind else {})
    words = ["--preset", "tiny", "--ranks", "2", "--run.device", "cpu", "--run.name", "r", "--restarts", "1"]
    words += ["--run.steps", str(STEPS), "--checkpoint.every", "1", "--integrity.every", "1"]
    words += ["--integrity.repair", "reload", "--parallel.deadline-s", str(deadline_s)]
    words += ["--resume", "auto"] if attempt else []
    command = [sys.executable, "-m", "moeclipse", "train", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def losses(folder: Path) -> list[str]:
    lines = (folder / "runs" / "r" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"].hex() for line in lines]


def strike(kind: str, deadline_s: float, expected: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="moeclipse-faults-") as name:
        folder = Path(name)
        done = train(folder, deadline_s, kind)
        if kind == "leave":
            assert done.returncode == 75, done.stderr
            done = train(folder, deadline_s, kind, attempt=1)
        assert done.returncode == 0, done.stderr
        assert losses(folder) == expected, f"{kind}: another run than the undisturbed one"
        lines = [line.split() for line in (folder / "log").read_text().splitlines()]
        (struck,) = [float(when) for word, when, *_ in lines if word == "struck"]
        behind = [float(when) for word, when, *more in lines if word == "step" and int(more[2]) == STEP]
        named = [float(when) for word, when, *_ in lines if word == "noticed"]
        record = folder / "runs" / "r" / "incidents.jsonl"
        if record.exists():
            named += [json.loads(line)["time"] for line in record.read_text().splitlines()]
        if kind == "leave":  # the step it was asked in is finished and saved
            behind = [float(w) for word, w, *more in lines if word == "step" and int(more[2]) == STEP + 1]
        return {"named": min(named) - struck if named else None, "back": max(behind) - struck}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(STRIKES)}; all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--deadline-s", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moeclipse-faults-") as name:
        done = train(Path(name), given.deadline_s)
        assert done.returncode == 0, done.stderr
        expected = losses(Path(name))
    table = Table("fault", "named after s", "back after s", title=f"medians of {given.repeats}")
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(given.repeats):
        for kind in given.kinds or STRIKES:
            found.setdefault(kind, []).append(strike(kind, given.deadline_s, expected))
    for kind, rows in found.items():
        named = [row["named"] for row in rows if row["named"] is not None]
        words = f"{statistics.median(named):.2f}" if named else "-"
        table.add_row(kind, words, f"{statistics.median(row['back'] for row in rows):.2f}")
    Console().print(table)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
