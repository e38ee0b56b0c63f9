"""Parts of a layer: DeepSeek-V3's as in its published trace, and who shares what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moeclipse.cost.cluster import cluster
from moeclipse.cost.layer_seconds import MicrobatchWork
from moeclipse.cost.model import DEEPSEEK_V3
from moeclipse.plan.published import QWEN3_235B, V3

WORK = MicrobatchWork(model=V3, cluster=cluster("h800"), tokens=4096, sequence=4096, ep=64, dtype="fp8")


def test_deepseek_as_in_their_trace() -> None:
    """Products were traced beside exchanges, on 112 of 132 processors, router and shared expert inside."""
    trace = DEEPSEEK_V3.seconds
    attention, experts, shared, route = WORK.attention(60), WORK.experts(), WORK.shared(), WORK.route()
    slow = 132 / 112
    for form, index in (("F", 0), ("B", 1), ("W", 2)):
        ours = slow * (attention[index] + experts[index] + shared[index] + route[index])
        assert ours == pytest.approx(trace[f"ATTN_{form}"] + trace[f"MLP_{form}"], rel=0.15)
    whole = slow * sum(map(sum, (attention, experts, shared, route)))
    computed = sum(trace[f"{part}_{form}"] for part in ("ATTN", "MLP") for form in "FBW")
    assert whole == pytest.approx(computed, rel=0.05)


def test_dispatch_is_in_eight_bits_and_combine_is_not() -> None:
    near, far = WORK.cluster.exchange_rows(V3.experts, 64, two_level=True)
    slowest = max(near / 160e9, far / 42.5e9)
    assert WORK.dispatch() == pytest.approx(4096 * 7168 * slowest, rel=0.02)
    assert WORK.combine() == pytest.approx(2 * 4096 * 7168 * slowest, rel=0.02)
    wide = replace(WORK, dtype="bf16")
    assert wide.dispatch() == wide.combine() == WORK.combine()


def test_ranks_on_cpus_send_four_bytes_a_value() -> None:
    cpu = replace(WORK, cluster=cluster("cpu"), dtype="bf16", ep=2)
    wide = replace(cpu, cluster=replace(cpu.cluster, device=replace(cpu.cluster.device, name="h100")))
    for sent in (MicrobatchWork.dispatch, MicrobatchWork.combine, lambda work: work.transfer(1)):
        assert sent(cpu) == pytest.approx(2 * sent(wide), rel=0.02)
    gathered = [replace(work, tp=2, ep=1).dense(0).F for work in (cpu, wide)]
    apart = [replace(work, tp=2, ep=1, tensor_inside=False).dense(0).F for work in (cpu, wide)]
    moved = [whole - rest for whole, rest in zip(gathered, apart, strict=True)]
    assert moved[0] == pytest.approx(2 * moved[1], rel=0.02)


def test_ranks_of_tp_share_products_and_gather_tokens() -> None:
    alone = MicrobatchWork(model=QWEN3_235B, cluster=cluster("h100"), tokens=4096, sequence=4096, ep=8)
    half = replace(alone, tp=2, ep=4)
    assert pytest.approx(alone.experts().F / 2, rel=0.05) == half.experts().F
    assert half.combine() == pytest.approx(alone.combine() / 2, rel=0.05)
    moved = half.cluster.collective(2.0 * 4096 * 4096, 2)
    assert pytest.approx(alone.attention(0).F / 2 + 2 * moved, rel=0.1) == half.attention(0).F
    assert alone.attention(0).F / 2 + 2 * moved - 1e-5 < half.attention(0).F


def test_the_busiest_rank_counts() -> None:
    busy = replace(WORK, imbalance=1.5)
    assert pytest.approx(1.5 * WORK.experts().F, rel=0.1) == busy.experts().F
    assert busy.dispatch() == pytest.approx(1.5 * WORK.dispatch(), rel=0.02)
    assert busy.attention(60) == WORK.attention(60)


def test_windows_see_less() -> None:
    windowed = replace(WORK, model=replace(V3, windows=(128,) * 61))
    assert windowed.attention(0).F < 0.7 * WORK.attention(0).F


def test_what_is_not_there_costs_nothing() -> None:
    assert sum(replace(WORK, model=QWEN3_235B).shared()) == 0.0
    assert replace(WORK, ep=1).dispatch() == 0.0
    head = WORK.head()
    assert sum(replace(WORK, model=replace(V3, losses=2)).head()) == pytest.approx(2 * sum(head))
    dense = WORK.dense()
    assert pytest.approx(9 * WORK.shared().F, rel=0.15) == dense.F


def test_stages_of_far_nodes_are_far() -> None:
    assert WORK.transfer(64) == pytest.approx(5e-6 + 2 * 4096 * 7168 / 42.5e9)
    assert WORK.transfer(4) == pytest.approx(2e-6 + 2 * 4096 * 7168 / 160e9)
