"""Doctor: what it looks at, what it advises, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeclipse.cli.checks import Finding
from moeclipse.cli.doctor import main, render
from moeclipse.core.program import program


@pytest.mark.peer_memory
def test_json_covers_every_section_and_training_can_run(
    capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    assert main(["--json", "--dir", str(tmp_path / "not" / "yet")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["can_train"] is True
    sections = {item["section"] for item in report["items"]}
    assert sections == {
        "versions", "back ends", "devices", "kernels", "peer memory", "machine", "network", "environment",
    }  # fmt: skip
    lines = [item["value"] for item in report["items"] if item["name"] == "cpu"]
    assert lines[0].startswith("2 ranks: any size, two stages never")
    reduced = next(item for item in report["items"] if item["name"] == "all-reduce")
    assert reduced["state"] == "works"
    assert "ranks share memory; two of them reduced 64 KB in " in reduced["value"]
    gloo = next(item for item in report["items"] if item["name"] == "gloo")
    assert gloo["state"] == "works"
    assert all(item["advice"] for item in report["items"] if item["state"] in ("limited", "broken"))


def test_rendering_in_ascii_and_verdict() -> None:
    items = [
        Finding(section="a", name="x", state="works", value="1"),
        Finding(section="a", name="y", state="broken", value="0", advice="mend it"),
    ]
    lines = list(render(items, unicode=False, coloured=False))
    assert lines == [
        "a",
        "  ok x  1",
        "  XX y  0",
        "       -> mend it",
        "",
        "Training cannot run here yet: mend y.",
    ]
    assert (
        list(render(items[:1], unicode=True, coloured=False))[-1]
        == f"Training can run here: {program()} train"
    )


def test_help_and_typos(capsys: pytest.CaptureFixture) -> None:
    from moeclipse.cli.main import main as command_line

    with pytest.raises(SystemExit):
        main(["--help"])
    assert "--json" in capsys.readouterr().out
    assert command_line(["doctor", "--jsno"]) == 2
    assert "did you mean --json?" in capsys.readouterr().err
