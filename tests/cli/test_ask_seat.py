"""Whether a rank could start on a seat, in a process as the launcher starts it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from moeclipse.cli.ask_seat import main


def test_a_core_answers() -> None:
    assert main(["100", "0"]) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.full
def test_a_device_that_is_not_there_does_not() -> None:
    words = [sys.executable, "-m", "moeclipse.cli.ask_seat", "100", "1"]
    assert subprocess.run(words, stderr=subprocess.DEVNULL, check=False).returncode == 1
