"""Mutants of testing/: how results are compared."""

from __future__ import annotations

from mutants_of.mutant import Mutant

MUTANTS = (
    Mutant(
        "testing/run_ranks.py",
        "            if not (outcomes[rank][0] or met):",
        "            if False:",
        "testing/test_run_ranks.py::test_nobody_waits_for_a_rank_that_failed_before_it_met_the_others",
        "ranks wait for one that failed before it met them",
        "a test waits for its deadline, and the reason is not in what it then prints",
        survived=True,
    ),
    Mutant(
        "testing/compare.py",
        '    return apart / scale if scale else float("inf")',
        "    return apart / scale if scale else apart",
        "testing/test_compare.py::test_difference_is_relative_to_the_largest_reference",
        "beside zeros a difference is absolute",
        "a gradient that must be zero passes at 1e-13",
    ),
    Mutant(
        "testing/compare.py",
        "(value - reference).abs().max().item()",
        "(value - reference).abs().nan_to_num().max().item()",
        "testing/test_compare.py::test_difference_is_relative_to_the_largest_reference",
        "NaN is no difference",
        "NaN passes every test of parity",
    ),
    Mutant(
        "testing/compare.py",
        "value.detach().double(), reference.detach().double()",
        "value.detach().float(), reference.detach().float()",
        "testing/test_compare.py::test_gradients_and_low_precision_are_compared_in_float64",
        "compared in float32",
        "1e-12 is promised, and 1e-7 seen",
    ),
    Mutant(
        "testing/compare.py",
        "    scale = reference.abs().max().item()",
        "    scale = value.abs().max().item()",
        "testing/test_compare.py::test_difference_is_relative_to_the_largest_reference",
        "relative to the value",
        "a gradient that is far too large is off by 1 at most",
    ),
    Mutant(
        "testing/compare.py",
        """\
    assert value.shape == reference.shape, f"shapes differ: {tuple(value.shape)}, {tuple(reference.shape)}"
""",
        "",
        "testing/test_compare.py::test_shapes_must_agree_also_where_there_is_nothing",
        "shapes are broadcast",
        "a bias summed over the wrong dimension passes",
    ),
    Mutant(
        "testing/compare.py",
        "(value - reference).abs().max()",
        "(value - reference).max().abs()",
        "testing/test_compare.py::test_zeros_are_no_result",
        "only what is too large is apart",
        "values that are too small pass",
    ),
    Mutant(
        "testing/compare.py",
        "isinstance(given, torch.Tensor) else torch.float64",
        "isinstance(given, torch.Tensor) else torch.float32",
        "testing/test_compare.py::test_plain_numbers_are_compared_in_float64",
        "plain numbers compared in float32",
        "losses that differ pass as equal",
    ),
    Mutant(
        "testing/compare.py",
        """\
    if value.numel() == 0:
        return 0.0
""",
        """\
    if not value.any():
        return 0.0
""",
        "testing/test_compare.py::test_zeros_are_no_result",
        "zeros equal everything",
        "a gradient that nobody computed passes every test of parity",
        survived=True,
    ),
)
