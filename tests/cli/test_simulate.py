"""`moeclipse simulate` as a reader meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moeclipse.cli.simulate import main
from moeclipse.core.errors import ConfigError, ScheduleError


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 0
    return capsys.readouterr().out


def test_one_schedule_prints_timeline_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--schedule", "dualpipev", "--ranks", "4", "--microbatches", "8", "--layers", "2")
    assert "rank 0 F" in out
    assert "peak activations" in out
    assert "DISPATCH_F" in out
    assert "makespan" in out


def test_unit_costs_give_the_drawn_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    for schedule, makespan in (("1f1b", 81), ("zb-h1", 67), ("dualpipe", 66)):
        out = run(capsys, "--schedule", schedule, "--microbatches", "20", "--costs", "unit")
        assert f"makespan {makespan}:" in out


def test_compare_ranks_schedules_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--compare", "--ranks", "8", "--microbatches", "20", "--costs", "unit")
    names = [line.split()[0] for line in out.splitlines()[2:12]]
    assert names[:3] == ["zb-v", "dualpipe", "zb-h1"]
    assert "zb-v is fastest" in out
    assert "pp1 left out: needs one rank" in out
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert " 66 " in rows["dualpipe"]
    assert "2x" in rows["dualpipe"]


def test_compare_with_names_and_layers(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(
        capsys,
        "--compare",
        "vpp",
        "vpp+1",
        "dualpipev",
        "--ranks",
        "4",
        "--microbatches",
        "8",
        "--layers",
        "2",
    )
    assert "vpp+1 is fastest" in out
    assert "exposed communication" in out
    assert "holds" in out  # what the leaner one saves


def test_a_memory_limit_leaves_out_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--ranks", "4", "--microbatches", "12", "--costs", "unit", "--memory-limit", "4")
    out = run(capsys, "--compare", "gpipe", "1f1b", "1f1b-pairs", *common)
    assert "gpipe left out: rank 0 holds 12 at its peak, more than the 4 allowed" in out
    assert "1f1b-pairs left out" in out
    with pytest.raises(ScheduleError, match="rank 0 holds 12"):
        main(["--schedule", "gpipe", *common])


def test_overlap_off_is_slower(capsys: pytest.CaptureFixture[str]) -> None:
    def makespan(*argv: str) -> float:
        out = run(capsys, "--ranks", "2", "--microbatches", "6", "--layers", "2", *argv)
        word = next(line for line in out.splitlines() if line.startswith("makespan")).split()[1:3]
        return float(word[0]) * (1e-3 if word[1].startswith("ms") else 1.0)

    times = [makespan("--overlap", overlap) for overlap in ("off", "pair", "pair+self")]
    assert times[0] > 1.3 * times[1] > 1.3 * times[2]
    assert makespan("--recompute", "full") > times[2]


def test_files_go_out_and_come_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace, order = tmp_path / "t.json", tmp_path / "o.csv"
    common = ("--ranks", "4", "--microbatches", "8", "--costs", "unit")
    first = run(capsys, *common, "--trace", str(trace), "--csv", str(order), "--grid")
    assert json.loads(trace.read_text())["traceEvents"]
    assert "(0F7;7B3)OVERLAP_F_B" in order.read_text()
    assert "(0F7;7B3)" in first
    second = run(capsys, "--from-csv", str(order), "--costs", "unit")
    assert "o.csv: 4 ranks, 8 microbatches" in second
    assert [line for line in first.splitlines() if line.startswith("makespan")] == [
        line for line in second.splitlines() if line.startswith("makespan")
    ]


def test_costs_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "costs.toml"
    path.write_text('device = "h200"\nlink = "infiniband"\nnum_ranks = 64\ncomm_processors = 20\n')
    out = run(capsys, "--costs", str(path), "--ranks", "2", "--microbatches", "4", "--layers", "2")
    assert "costs h200 over infiniband" in out


def test_bad_input_is_told_before_anything_is_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ScheduleError, match="nearest legal: ranks=8, microbatches=16"):
        main(["--schedule", "dualpipev", "--ranks", "8", "--microbatches", "10"])
    with pytest.raises(ScheduleError, match="unknown schedule 'dualpip'; did you mean 'dualpipe'"):
        main(["--schedule", "dualpip"])
    with pytest.raises(ConfigError, match="unknown schedule 'nothing'"):
        main(["--compare", "nothing"])
    with pytest.raises(ConfigError, match="--trace shows one schedule; leave it out with --compare"):
        main(["--compare", "--trace", str(tmp_path / "t.json")])
    with pytest.raises(ConfigError, match="neither a file nor one of"):
        main(["--costs", "missing.toml"])
    with pytest.raises(ScheduleError, match="choose a number of layers that 2 divides"):
        main(["--schedule", "dualpipev", "--layers", "3"])
    with pytest.raises(ConfigError, match="no file"):
        main(["--from-csv", str(tmp_path / "none.csv")])
    with pytest.raises(ConfigError, match=r"--trace: there is no folder .*nowhere"):
        main(["--trace", str(tmp_path / "nowhere" / "t.json")])
    assert capsys.readouterr().out == ""


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from moeclipse.cli.simulate import main; "
        "main(['--ranks', '2', '--microbatches', '4', '--layers', '2']); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compare", "--schedule", "1f1b"], "--schedule names one schedule; leave it out with --compare"),
        (["--compare", "--width", "80"], "--width shows one schedule"),
        (["--from-csv", "o.csv", "--ranks", "4"], "--ranks would choose an order; --from-csv brings its own"),
        (["--from-csv", "o.csv", "--microbatches", "4"], "--microbatches would choose an order"),
        (["--from-csv", "o.csv", "--schedule", "vpp"], "--schedule would choose an order"),
        (["--costs", "unit", "--layers", "2"], "--layers speaks of layers; costs unit are of whole actions"),
        (["--costs", "unit", "--recompute", "full"], "--recompute speaks of layers"),
        (["--costs", "unit", "--overlap", "pair"], "--overlap speaks of layers"),
        (["--costs", "unit", "--chunks", "2"], "--chunks speaks of layers"),
        (["--overlap", "pair", "--schedule", "1f1b"], "--overlap pair changes nothing: 1f1b has no pairs"),
        (["--overlap", "pair", "--chunks", "2"], "--chunks cuts what overlaps with itself"),
        (["--overlap", "off", "--split", "layer"], "--split cuts what overlaps with itself"),
        (["--memory-limit", "0"], r"--memory-limit \(0.0\) must be a positive number"),
        (["--imbalance", "0.5"], r"--imbalance \(0.5\) must be at least 1"),
    ],
)
def test_options_that_would_change_nothing_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(words)


def test_a_file_speaks_of_seconds_and_unit_costs_of_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, trace = tmp_path / "costs.toml", tmp_path / "t.json"
    path.write_text("[seconds]\nF = 0.01\nI = 0.01\nW = 0.01\n")
    common = ("--schedule", "1f1b", "--ranks", "2", "--microbatches", "4")
    assert "makespan 150.0 ms:" in run(capsys, *common, "--costs", str(path), "--trace", str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    assert max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") == pytest.approx(150e3)
    assert "makespan 15:" in run(capsys, *common, "--costs", "unit")
