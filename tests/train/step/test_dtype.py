"""Types by name, and what two equal runs have in common."""

from __future__ import annotations

import torch

from moeclipse.train.step.dtype import choose_dtype, repeat_bits, repeats


def test_types_by_name() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_dtype("auto", cpu) == torch.float32
    assert choose_dtype("auto", cuda) == torch.bfloat16
    assert choose_dtype("float16", cuda) == torch.float16


def test_torch_is_told_to_refuse_and_not_to_warn() -> None:
    """With a warning flash attention goes on adding up in any order, from some hundred positions on."""
    before = torch.get_deterministic_debug_mode()
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        torch.set_deterministic_debug_mode("default")
        repeat_bits(False, torch.device("cuda"))
        assert not torch.are_deterministic_algorithms_enabled()
        repeat_bits(True, torch.device("cuda"))
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.set_deterministic_debug_mode(before)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def test_on_a_cpu_there_is_nothing_to_do() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    repeat_bits(True, torch.device("cpu"))
    assert torch.are_deterministic_algorithms_enabled() == before


def test_bits_repeat_on_cpus_unless_told_otherwise_and_on_devices_where_asked() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [repeats(asked, cpu) for asked in ("auto", True, False)] == [True, True, False]
    assert [repeats(asked, cuda) for asked in ("auto", True, False)] == [False, True, False]
