"""Whether a rank could start on a seat: python -m moeclipse.cli.ask_seat SECONDS CUDA

The seat is what the environment says (`cli/seats`). The status is 0 once a tensor was computed on the device;
after SECONDS the process ends itself.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

SIZE = 64


def main(words: Sequence[str]) -> int:
    seconds, cuda = words
    signal.alarm(int(seconds))
    import torch

    ones = torch.ones(SIZE, SIZE, device="cuda" if cuda == "1" else "cpu")
    well = int((ones @ ones).sum().item()) == SIZE**3
    signal.alarm(0)
    return 0 if well else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
