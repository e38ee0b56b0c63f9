"""Completion: shells complete commands, flags and values that parsers know."""

from __future__ import annotations

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


def test_every_command_is_there() -> None:
    assert SCHEMAS.keys() == COMMANDS.keys()
    assert all(table().values())
