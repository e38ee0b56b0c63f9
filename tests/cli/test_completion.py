"""Completion: shells complete commands, flags and values that parsers know."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from moeclipse.cli.completion import SCHEMAS, bash, fish, table, zsh
from moeclipse.cli.main import COMMANDS, main


def completed(script: Path, *words: str) -> list[str]:
    """What bash offers for the last word."""
    code = f"source {script}; COMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}; "
    code += '_moeclipse; printf "%s\\n" "${COMPREPLY[@]}"'
    return subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_bash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    assert completed(script, "moeclipse", "si") == ["simulate"]
    flags = ["--gate.top-k", "--gate.top-p", "--gate.top-groups"]
    assert completed(script, "moeclipse", "train", "--gate.top") == flags
    assert completed(script, "moeclipse", "train", "--gate.kind", "si") == ["sigmoid"]
    assert completed(script, "moeclipse", "convert", "--dtype", "bf") == ["bfloat16"]
    assert completed(script, "moeclipse", "completion", "z") == ["zsh"]
    assert completed(script, "moeclipse", "report", str(tmp_path / "scr")) == [str(script)], "files, too"


def test_other_shells() -> None:
    found = table()
    assert bash(found) in zsh(found)
    told = fish(found)
    assert "-n '__fish_seen_subcommand_from plan' -l 'dtype' -x -a 'bf16 fp8'" in told
    for shell, text in (("zsh", zsh(found)), ("fish", told)):
        if shutil.which(shell):
            subprocess.run([shell, "-n"], input=text, text=True, check=True)


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish (Debian: fish)")
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("moeclipse simu", ["simulate"]),
        ("moeclipse train --gate.kin", ["--gate.kind"]),
        ("moeclipse train --gate.kind so", ["softmax"]),
    ],
)
def test_fish_completes(tmp_path: Path, line: str, found: list[str]) -> None:
    script = tmp_path / "moeclipse.fish"
    script.write_text(fish(table()))
    command = ["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert [word.split("\t")[0] for word in done.stdout.splitlines()] == found


def test_every_command_is_there() -> None:
    assert SCHEMAS.keys() == COMMANDS.keys()
    assert all(table().values())
