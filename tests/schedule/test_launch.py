"""Who is on an axis with whom: the same ranks as the groups of a mesh."""

from __future__ import annotations

import pytest

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ScheduleError
from moeclipse.schedule.launch import SAME, StepShape, group_name
from moeclipse.testing.run_ranks import run_ranks

MADE_LATER = "expert_grads"
AXES = (*SAME, "world", "line")


def members_of_mesh(mesh: Mesh) -> dict[str, tuple[int, ...]]:
    found = {axis: getattr(mesh, axis).ranks for axis in AXES if axis != MADE_LATER}
    found[MADE_LATER] = mesh.expert_grads().ranks
    return found | ({"ends": mesh.ends().ranks} if mesh.pp > 1 else {})


@pytest.mark.parametrize(
    ("dp", "ep", "tp", "pp", "mirrored"),
    [(2, 1, 2, 1, False), (1, 2, 1, 2, False), (1, 1, 2, 3, False), (1, 1, 2, 2, True), (2, 1, 1, 2, True)],
)
def test_axes_are_the_groups_of_a_mesh(dp: int, ep: int, tp: int, pp: int, mirrored: bool) -> None:
    step, copies = StepShape(dp=dp, ep=ep, tp=tp, mirrored=mirrored), dp * ep * tp
    axes = {"dp": dp, "tp": tp, "pp": pp}
    for rank, found in enumerate(run_ranks(copies * pp, members_of_mesh, **axes, mirrored=mirrored)):
        for axis in AXES:
            assert step.members(axis, rank, pp, copies) == found[axis], (axis, rank)
        if pp > 1 and rank // copies in (0, pp - 1):
            assert step.members("ends", rank, pp, copies) == found["ends"]


def test_one_list_stands_for_all_copies() -> None:
    step = StepShape(dp=2, ep=2, tp=2)
    for axis in SAME:
        assert step.members(axis, 1, 3, 1) == (1,)
    assert step.members("world", 1, 3, 1) == step.members("line", 1, 3, 1) == (0, 1, 2)
    assert step.members("ends", 2, 3, 1) == (0, 2)
    assert step.members("ends", 0, 1, 1) == (0,)
    assert group_name("tensor", (4, 5)) == "tensor@4"


def test_of_two_copies_places_share_parameters_two_by_two() -> None:
    step = StepShape(dp=2, ep=2, mirrored=True)
    assert step.members("dense_grads", 1, 4, 1) == step.members("replicas", 2, 4, 1) == (1, 2)
    assert step.members("experts", 1, 4, 1) == step.members("stage", 1, 4, 1) == (1,)
    assert step.members("replicas", 1, 2, 4) == (1, 3, 5, 7)
    assert (step.size_of("dense_grads"), step.size_of("replicas"), step.size_of("stage")) == (8, 4, 4)


def test_an_axis_that_there_is_not() -> None:
    with pytest.raises(ScheduleError, match="no axis 'rows'; known: cut_grads, data"):
        StepShape().members("rows", 0, 1, 1)
