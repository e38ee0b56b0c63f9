"""Mutants of ops/: what is computed."""

from __future__ import annotations

from mutants_of.mutant import Mutant

MUTANTS = (
    Mutant(
        "ops/raw_bytes.py",
        "x.as_strided((x.numel(),), (1,))",
        "x.view(-1)",
        "comm/wires/test_copy_engines.py::test_one_element_travels_whatever_its_stride",
        "bytes taken by `view`",
        '`moe.transport = "pinned"` fails where a rank sends a single pair',
    ),
    Mutant(
        "ops/adam.py",
        "    spread = (v / step.filled).sqrt_().add_(step.eps)",
        "    spread = (v / step.filled).add_(step.eps).sqrt_()",
        "ops/test_adam.py::test_three_updates_are_those_of_torch",
        "eps inside the root",
        "weights with small gradients hardly learn",
    ),
    Mutant(
        "ops/adam.py",
        "torch.stack([part.double().square().sum() for part in parts]).sum()",
        "torch.stack([part.square().sum() for part in parts]).sum().double()",
        "ops/test_adam.py::test_squares_are_added_in_float64",
        "squares added in the type of the gradients",
        "the norm of a large model loses digits, and clipping with it",
    ),
    Mutant(
        "ops/gate_losses.py",
        "    return aux + z * squares if z else aux",
        "    return aux + z * squares",
        "ops/test_gate_losses.py::test_without_a_z_loss_the_logits_may_be_infinite",
        "a z loss of 0 is multiplied",
        "masked experts make the loss nan",
    ),
    Mutant(
        "ops/cross_entropy.py",
        "[:, 0].masked_fill(target_T < 0, 0)",
        "[:, 0]",
        "ops/test_cross_entropy.py::test_a_target_of_another_rank_is_not_here",
        "a target of another rank reads the first column",
        "under tp the loss is too low",
    ),
    Mutant(
        "ops/cross_entropy.py",
        "-(target_T >= 0)[:, None]",
        "-(target_T > 0)[:, None]",
        "ops/test_cross_entropy.py::test_they_are_torchs_cross_entropy",
        "token 0 is no target in backward",
        "one token is never learned",
    ),
    Mutant(
        "ops/rounding.py",
        "place % stretch.columns + stretch.left",
        "place % stretch.columns",
        "ops/test_rounding.py::test_every_part_of_a_matrix_gets_the_bits_of_the_whole",
        "columns counted from the left end of a rank's part",
        'under `optim.master = "none"` a run differs from layout to layout',
    ),
    Mutant(
        "ops/attention.py",
        "        sees = sees & (query_S - key_L < window)",
        "        sees = sees & (query_S - key_L <= window)",
        "ops/test_attention.py::test_who_sees_whom",
        "a window of one key more",
        "a model with windows computes something else than it was trained on",
    ),
    Mutant(
        "ops/attention.py",
        "    window = 0 if window >= keys else window",
        "    window = 0 if window >= queries else window",
        "ops/test_attention.py::test_a_window_shorter_than_the_keys_is_one_though_queries_are_few",
        "a window as long as the queries is none",
        "`attend` with more keys than queries ignores its window",
        survived=True,
    ),
    Mutant(
        "ops/embedding.py",
        "        inside_T = (ids_T >= 0) & (ids_T < len(into_VD))",
        "        inside_T = ids_T < len(into_VD)",
        "ops/test_embedding.py::test_ids_of_other_ranks_add_nothing",
        "ids of the ranks before count from the end",
        "under tp gradients reach the wrong tokens",
    ),
)
