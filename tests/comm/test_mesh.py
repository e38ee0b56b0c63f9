"""Axes and groups, what ranks tell each other, and clocks."""

from __future__ import annotations

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CommError, ConfigError
from moeclipse.testing.run_ranks import run_ranks

CPU = torch.device("cpu")


def axes(mesh: Mesh) -> tuple:
    return (mesh.dp_index, mesh.ep_index, mesh.experts.ranks, mesh.replicas.ranks, mesh.world.ranks)


def test_ep_runs_fastest() -> None:
    assert run_ranks(4, axes, dp=2) == [
        (0, 0, (0, 1), (0, 2), (0, 1, 2, 3)),
        (0, 1, (0, 1), (1, 3), (0, 1, 2, 3)),
        (1, 0, (2, 3), (0, 2), (0, 1, 2, 3)),
        (1, 1, (2, 3), (1, 3), (0, 1, 2, 3)),
    ]


def test_objects_of_every_rank() -> None:
    def speak(mesh: Mesh) -> list:
        return mesh.gather_objects({"rank": mesh.rank, "text": "ä" * mesh.rank})

    expected = [{"rank": 0, "text": ""}, {"rank": 1, "text": "ä"}, {"rank": 2, "text": "ää"}]
    assert run_ranks(3, speak) == [expected] * 3
    assert Mesh.single().gather_objects({"a": (1, 2)}) == [{"a": [1, 2]}]


def test_one_host_has_one_clock() -> None:
    assert run_ranks(2, lambda mesh: mesh.clock_offset()) == [(0.0, 0.0)] * 2


def offset_between_hosts(mesh: Mesh) -> tuple[float, float]:
    mesh.hosts = (0, 1)  # two hosts, as far as the mesh knows
    return mesh.clock_offset()


def test_clocks_of_two_hosts_are_compared() -> None:
    for offset, error in run_ranks(2, offset_between_hosts):
        assert abs(offset) < 0.5, "in truth both read one clock"
        assert 0 <= error < 0.5
    assert run_ranks(2, offset_between_hosts)[0][0] == 0.0, "rank 0 is the one that all speak in"


def test_a_mesh_over_nothing_says_what_to_do() -> None:
    assert Mesh.of_world(ep=1).num_ranks == 1
    with pytest.raises(CommError, match="call init_process_group first"):
        Mesh.of_world(ep=2)


def tensor_axes(mesh: Mesh) -> tuple:
    groups = (mesh.tensor, mesh.experts, mesh.shard_experts, mesh.data, mesh.replicas)
    return (mesh.dp_index, mesh.ep_index, mesh.tp_index, *(group.ranks for group in groups))


@pytest.mark.parametrize(("dp", "ep"), [(1, 2), (2, 1)])
def test_tp_runs_fastest(dp: int, ep: int) -> None:
    for rank, found in enumerate(run_ranks(4, tensor_axes, dp=dp, tp=2)):
        block, t = rank // 2, rank % 2
        tensor, data = (2 * block, 2 * block + 1), (t, t + 2)
        if ep == 2:
            assert found == (0, block, t, tensor, (0, 1, 2, 3), data, data, (rank,))
        else:
            assert found == (block, 0, t, tensor, tensor, (rank,), data, data)


def stages(mesh: Mesh) -> tuple:
    """Two stages of two ranks."""
    ends = mesh.ends()
    assert mesh.ends() is ends, "made once"
    names = {mesh.pipe(letter, *way).name for letter in "FB" for way in ((0, 1), (1, 0))}
    assert names == {"pipe.F.up", "pipe.F.down", "pipe.B.up", "pipe.B.down"}
    assert {mesh.pipe(letter, 0, 1).ranks for letter in "FB"} == {mesh.line.ranks}
    groups = {"world", "stage", "experts", "dense_grads", "replicas", "tensor"}
    assert {group.name for group in mesh.groups} == groups, "each once"
    return (mesh.pp_index, mesh.stage.ranks, mesh.line.ranks, ends.ranks)


def test_pipelines_hold_their_stages_one_after_the_other() -> None:
    assert run_ranks(4, stages, pp=2) == [
        (0, (0, 1), (0, 2), (0, 2)),
        (0, (0, 1), (1, 3), (1, 3)),
        (1, (2, 3), (0, 2), (0, 2)),
        (1, (2, 3), (1, 3), (1, 3)),
    ]
    assert Mesh.single().line.ranks == (0,)


def sharing(mesh: Mesh) -> tuple:
    groups = (mesh.stage, mesh.dense_grads, mesh.replicas, mesh.expert_grads(), mesh.experts)
    return tuple(group.ranks for group in groups)


def test_two_copies_of_a_model_share_parameters_and_no_tokens() -> None:
    """Place p and the last but p hold the same layers: gradients meet there, rows do not."""
    both = (0, 1, 2, 3)
    assert run_ranks(4, sharing, pp=2, mirrored=True) == [
        ((0, 1), both, (0, 2), (0, 2), (0, 1)),
        ((0, 1), both, (1, 3), (1, 3), (0, 1)),
        ((2, 3), both, (0, 2), (0, 2), (2, 3)),
        ((2, 3), both, (1, 3), (1, 3), (2, 3)),
    ]
    found = run_ranks(4, sharing, pp=4, mirrored=True)
    assert [groups[1] for groups in found] == [(0, 3), (1, 2), (1, 2), (0, 3)]


def middle(mesh: Mesh) -> tuple:
    return mesh.ends().ranks


def test_the_ends_of_a_pipeline_meet_without_its_middle() -> None:
    assert run_ranks(4, middle, pp=4) == [(0, 3), (1,), (2,), (0, 3)]


def of_world(mesh: Mesh) -> tuple:
    """In a user's own set-up: over the groups that are there."""
    own = Mesh.of_world(ep=2, hosts=["a", "b"])
    with pytest.raises(ConfigError, match=r"x pp \(1\) must equal the number of ranks \(2\)"):
        Mesh.of_world(ep=3)
    own.watch.publish("out of memory")
    own.barrier()
    return own.experts.ranks, own.hosts, own.gather_objects(own.rank), own.watch.first_cause().text


def test_a_mesh_over_groups_of_a_user() -> None:
    assert run_ranks(2, of_world) == [((0, 1), (0, 1), [0, 1], "out of memory")] * 2


def test_what_is_made_together_is_made_once() -> None:
    mesh, made = Mesh.single(), []
    for key in ("a", "b", "a"):
        mesh.once(key, lambda key=key: made.append(key))
    assert made == ["a", "b"]


def test_a_lane_is_made_once() -> None:
    """A device hands out few streams; two lanes on one would wait for each other."""
    mesh = Mesh.single()
    assert mesh.lane("p2p") is mesh.lane("p2p")
    assert mesh.lane("p2p") is not mesh.lane("other")
