"""Types by name, and what two equal runs have in common."""

from __future__ import annotations

import torch

from moeclipse.train.numbers import choose_dtype, repeat_bits


def test_types_by_name() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_dtype("auto", cpu) == torch.float32
    assert choose_dtype("auto", cuda) == torch.bfloat16
    assert choose_dtype("float16", cuda) == torch.float16


def test_on_a_cpu_there_is_nothing_to_do() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    repeat_bits(True, torch.device("cpu"))
    assert torch.are_deterministic_algorithms_enabled() == before
