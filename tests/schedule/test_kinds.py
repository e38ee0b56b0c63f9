"""Kinds of ops: which there are, under which names, on which lanes; and that each exists once."""

from __future__ import annotations

import copy

import pytest

from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import A2A, COMPUTE, DP, KIND_OF, KINDS, P2P, TP, TRANSFERS, Form, Part
from moeclipse.schedule.op import forward

ON_LANE = {
    COMPUTE: "F B I W PAIR SELF ATTN_F ATTN_B ATTN_W ATTN_R ROUTE_F ROUTE_B ROUTE_W ROUTE_R SHARED_F "
    "SHARED_B SHARED_W SHARED_R MLP_F MLP_B MLP_W MLP_R HEAD_F HEAD_B HEAD_W HEAD_R C_F C_B C_W SHADOW_F "
    "SHADOW_B SHADOW_W SHADOW_ADD BUCKET_UPDATE",
    A2A: "DISPATCH_F DISPATCH_B DISPATCH_R COMBINE_F COMBINE_B S_F S_B R_F R_B SHADOW_SEND SHADOW_REDUCE "
    "COUNTS_F COUNTS_R LOADS_F SIZES_F SCORES_F SCORES_B",
    TP: "TENSOR_F TENSOR_B TENSOR_R",
    P2P: "SEND_F SEND_B RECV_F RECV_B",
    DP: "REDUCE UNSHARD RESHARD TIED_SUM BUCKET_REDUCE BUCKET_GATHER RESULTS_GATHER LOADS_GATHER LOADS_SUM",
}
"""Files and traces hold these names: none may change."""


@pytest.mark.parametrize("lane", ON_LANE)
def test_names_and_lanes(lane: str) -> None:
    assert {name for name, kind in KINDS.items() if kind.lane == lane} == set(ON_LANE[lane].split())


def test_every_kind_has_a_constant_of_its_name() -> None:
    for name, kind in KINDS.items():
        assert vars(kinds)[name] is kind
        assert str(kind) == name
        assert repr(kind) == f"kinds.{name}"


def test_a_kind_is_a_part_in_a_form() -> None:
    assert (kinds.ATTN_R.part, kinds.ATTN_R.form) == (Part.ATTN, Form.R)
    assert (kinds.R_B.part, kinds.R_B.form) == (Part.R, Form.B)
    assert (kinds.SHADOW_SEND.part, kinds.SHADOW_SEND.form) == (Part.SHADOW, Form.SEND)
    assert (kinds.SEND_F.part, kinds.SEND_F.form) == (Part.SEND, Form.F)
    assert kinds.PAIR.part is kinds.REDUCE.part is Part.STAGE
    for (part, form), kind in KIND_OF.items():
        assert (kind.part, kind.form) == (part, form)
    assert (Part.COMBINE, Form.R) not in KIND_OF
    assert (Part.DISPATCH, Form.W) not in KIND_OF
    assert {kind.lane for kind in TRANSFERS} == {P2P}


def test_each_kind_exists_once() -> None:
    """They are compared by identity, so a copy of a program must hold the same ones."""
    assert len(set(KINDS.values())) == len(KINDS)
    assert copy.copy(kinds.MLP_W) is kinds.MLP_W
    assert copy.deepcopy([forward(0, 1)])[0].kind is kinds.F
    with pytest.raises(AttributeError):
        kinds.F.lane = A2A  # type: ignore[misc]
