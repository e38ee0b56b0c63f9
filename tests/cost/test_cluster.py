"""Which links an axis has, how often rows cross them, and clusters from a file."""

from __future__ import annotations

from itertools import combinations

import pytest

from moeclipse.core.errors import ConfigError
from moeclipse.cost.cluster import CLUSTERS, ExpertChoice, cluster, cluster_at, cluster_from

H100 = CLUSTERS["h100"]


def test_strides_say_how_many_nodes_an_axis_crosses() -> None:
    assert [H100.nodes(size) for size in (1, 8, 9, 16, 64)] == [1, 1, 2, 2, 8]
    assert [H100.nodes(4, stride) for stride in (1, 2, 4, 8, 64)] == [1, 1, 2, 4, 4]
    assert H100.link_of(4) is H100.near
    assert H100.link_of(8) is H100.far
    assert CLUSTERS["gb200"].nodes(64) == 1


def enumerated(experts: ExpertChoice, parts: int) -> float:
    """By listing every choice: groups first, then experts of these."""
    size = experts.num_experts // experts.num_groups
    held = experts.num_experts // parts
    total = count = 0
    for groups in combinations(range(experts.num_groups), experts.top_groups):
        inside = [g * size + e for g in groups for e in range(size)]
        for chosen in combinations(inside, experts.top_k):
            total += len({expert // held for expert in chosen})
            count += 1
    return total / count


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (2, 1), (4, 1)])
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_ranks_and_nodes_that_a_token_visits(groups: tuple[int, int], parts: int) -> None:
    experts = ExpertChoice(num_experts=8, top_k=2, num_groups=groups[0], top_groups=groups[1])
    assert experts.visited(parts) == pytest.approx(enumerated(experts, parts))


def test_more_parts_than_experts_are_not_all_visited() -> None:
    assert ExpertChoice(num_experts=8, top_k=2).visited(16) == 2


def test_two_levels_cross_once_for_each_node() -> None:
    experts = ExpertChoice(num_experts=256, top_k=8, num_groups=8, top_groups=4)
    near, far = H100.exchange_rows(experts, 64, two_level=True)
    assert far == pytest.approx(experts.visited(8) * 7 / 8)
    assert experts.visited(8) <= 4
    direct_near, direct_far = H100.exchange_rows(experts, 64, two_level=False)
    assert direct_near + direct_far == pytest.approx(experts.visited(64) * 63 / 64)
    assert direct_far > 1.5 * far
    assert near > direct_near


def test_inside_a_node_nothing_is_far() -> None:
    experts = ExpertChoice(num_experts=128, top_k=8)
    near, far = H100.exchange_rows(experts, 8, two_level=True)
    assert far == 0
    assert near == pytest.approx(experts.visited(8) * 7 / 8)
    assert H100.exchange(4096, 4096, experts, 1) == 0.0
    seconds = H100.exchange(1000, 4096, experts, 8)
    assert seconds == pytest.approx(3 * 2e-6 + 1000 * near * 4096 / 360e9)


def test_a_node_takes_each_byte_in_once() -> None:
    assert H100.collective(1e9, 1) == 0.0
    assert H100.collective(8e9, 8) == pytest.approx(3 * 2e-6 + 7e9 / 360e9)
    # two nodes: half of it crosses, over eight ports at once; inside, the rest is as fast as the near link
    two = H100.collective(8e9, 16)
    assert two == pytest.approx(max(5e-6 + 4e9 / 8 / 42.5e9, 3 * 2e-6 + 7e9 / 360e9))
    assert H100.collective(8e9, 2, stride=8) == pytest.approx(5e-6 + 4e9 / 42.5e9)


def test_devices_that_were_asked_for() -> None:
    assert {"a100", "h100", "h800", "h200", "b200", "gb200", "mi300x"} <= set(CLUSTERS)
    h800 = cluster("h800")
    assert h800.near.bandwidth * h800.near.efficiency == pytest.approx(160e9)
    assert h800.rate_beside_exchange == pytest.approx(112 / 132)
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        cluster("h10")


def test_a_cluster_from_a_table() -> None:
    table = {"device": "h100", "gpus_per_node": 4, "far": {"bandwidth": 25e9}, "near": "nvlink3"}
    mine = cluster_from({**table, "measured": {"efficiency": 0.5}}, "mine.toml")
    assert (mine.gpus_per_node, mine.far.bandwidth, mine.far.latency) == (4, 25e9, 5e-6)
    assert mine.near.name == "nvlink3"
    assert mine.device.efficiency == 0.5
    assert mine.device.source.startswith("mine.toml")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "c needs a device"),
        ({"device": "h100", "nodes": 4}, "unknown key 'nodes'"),
        ({"device": "h100", "far": 3}, "name of a link, or a table"),
        ({"device": "h100", "far": {"bandwith": 3}}, "unknown key 'bandwith'"),
        ({"device": "h100", "far": {"bandwidth": 0}}, "must be a positive number"),
        ({"device": "h100", "gpus_per_node": 2.5}, "must be a whole number"),
        ({"device": "h100", "gpus_per_node": 0}, "must be at least 1"),
        ({"device": "h100", "comm_processors": 132}, "must leave some"),
    ],
)
def test_a_wrong_table_is_one_sentence(table: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cluster_from(table, "c")


def test_a_file_says_what_the_host_has_room_for() -> None:
    assert cluster_from({"device": "h100"}, "mine").host_memory == cluster("h100").host_memory > 0
    assert cluster_from({"device": "h100", "host_memory": 0}, "mine").host_memory == 0
    for wrong in (-1, True, "much", float("inf")):
        with pytest.raises(ConfigError, match=r"mine: host_memory \(.*\) must be a number of bytes"):
            cluster_from({"device": "h100", "host_memory": wrong}, "mine")
    with pytest.raises(ConfigError, match=r"or give a TOML file, which moeclipse measure -o FILE writes"):
        cluster_at("measured")
