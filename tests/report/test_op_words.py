"""Codes of ops become words."""

from __future__ import annotations

import pytest

from moeclipse.report.op_words import in_words, kind_of, lane_in_words
from moeclipse.schedule.kinds import KINDS


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("R_F@3", "results of experts, forward, step 3"),
        ("C_F@0", "experts, forward, step 0"),
        ("0.0MLP", "experts, layer 0"),
        ("2.1DISPATCH_F0#0/2", "dispatch, forward, layer 1, microbatch 0, chunk 1 of 2"),
        ("S_B@1#1/2~4", "rows to experts, backward, step 1, expert 4, chunk 2 of 2"),
        ("2F0", "stage 2, forward, microbatch 0"),
        ("3SEND_F1", "send to another stage, forward, stage 3, microbatch 1"),
        ("R_F@3 of layer 2", "results of experts, forward, step 3 of layer 2"),
        ("dispatch of layer 3", "dispatch of layer 3"),
        (
            "dispatch S_F@0#0/2, layer 2, microbatch 1",
            "dispatch, forward, step 0, chunk 1 of 2, layer 2, microbatch 1",
        ),
        ("backward combine R_B@1, layer 0", "combine, backward, step 1, layer 0"),
        ("0BUCKET_GATHER@3", "gather of parameters, stage 0, bucket 3"),
        ("gather of parameters, bucket dense.0", "gather of parameters, bucket 0 (dense)"),
        (
            "activations 1RECV_F3 (stage 1, microbatch 3) on lane p2p:0>1",
            "activations received from rank 0, stage 1, microbatch 3",
        ),
        ("layer 0 F", "layer 0, forward"),
        ("aten::mm", "aten::mm"),
        ("NCCL", "NCCL"),
    ],
)
def test_codes_of_ops_become_words(code: str, words: str) -> None:
    assert in_words(code) == words


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        (("combine 3 of layer 12", "combine 0 of layer 1"), "combine"),
        (
            ("dispatch S_F@0, layer 2, microbatch 1", "dispatch S_F@3#1/2, layer 0, microbatch 0"),
            "dispatch, forward",
        ),
        (
            ("gather of parameters, bucket dense.0", "gather of parameters, bucket dense.11"),
            "gather of parameters (dense)",
        ),
        (
            ("exchange of sizes, layer 0, microbatch 0", "exchange of sizes, layer 3, microbatch 1"),
            "exchange of sizes",
        ),
    ],
)
def test_labels_that_differ_by_numbers_are_one_kind(labels: tuple[str, ...], kind: str) -> None:
    assert {kind_of(label) for label in labels} == {kind}


def test_lanes_have_words() -> None:
    lanes = ("a2a", "compute", "p2p:0>1", "stream 7")
    assert [lane_in_words(lane) for lane in lanes] == [
        "all-to-all",
        "compute",
        "rank 0 to rank 1",
        "stream 7",
    ]


def test_every_op_of_a_program_has_words() -> None:
    """So that a page shows none of the codes that programs are written in."""
    for kind in KINDS:
        if kind not in ("PAIR", "SELF"):
            assert in_words(f"1.2{kind}3") != f"1.2{kind}3", kind
