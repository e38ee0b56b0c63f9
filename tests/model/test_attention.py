"""Attention by hand: rotation, heads that share keys and values, latents, and who sees whom."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from small_model import MLA, MODEL, SETTINGS

from moeclipse.comm.mesh import Mesh
from moeclipse.model.attention import (
    GroupedQueryAttention,
    LatentAttention,
    attend,
    heads,
    rope_table,
    rotate,
)
from moeclipse.model.config import ModelConfig
from moeclipse.tensor.parallel import TensorParallel
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks

CPU = torch.device("cpu")


def test_rotation_depends_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 8, 6, dtype=torch.float64)
    table = rope_table(20, 6, 10000.0, torch.device("cpu"))
    near = rotate(q, table[:, :8]) @ rotate(k, table[:, :8]).transpose(2, 3)
    far = rotate(q, table[:, 9:17]) @ rotate(k, table[:, 9:17]).transpose(2, 3)
    assert difference(far, near) < 1e-13
    assert torch.allclose(rotate(q, table[:, :8]).norm(dim=-1), q.norm(dim=-1))


def test_grouped_attention_by_hand() -> None:
    attention = GroupedQueryAttention(MODEL, SETTINGS)
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    table = rope_table(5, 6, 10000.0, x.device)
    rows = []
    for head in range(4):
        kv = head // 2  # two query heads share a key-value head
        q = rotate((x @ attention.q.weight.T)[..., head * 6 : head * 6 + 6], table)
        k = rotate((x @ attention.k.weight.T)[..., kv * 6 : kv * 6 + 6], table)
        v = (x @ attention.v.weight.T)[..., kv * 6 : kv * 6 + 6]
        score = (q @ k.transpose(1, 2) / 6**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
        rows.append(score.softmax(-1) @ v)
    expected = torch.cat(rows, dim=-1) @ attention.o.weight.T
    assert difference(attention(x[0], table), expected[0]) < 1e-13


def latent_by_hand(attention: LatentAttention, x: torch.Tensor) -> torch.Tensor:
    """One sample [S, D], head by head; the rotary part of keys is one for all heads."""
    nope, rope, value = MLA.qk_nope_head_dim, MLA.qk_rope_head_dim, MLA.v_head_dim
    table = rope_table(len(x), rope, MLA.rope_base, x.device)
    narrow = F.rms_norm(x @ attention.q_down.weight.T, (MLA.q_lora_rank,), attention.q_norm.weight, 1e-5)
    q = (narrow @ attention.q_up.weight.T).unflatten(1, (MLA.num_heads, nope + rope))
    latent, k_rope = (x @ attention.kv_down.weight.T).split([MLA.kv_lora_rank, rope], dim=1)
    latent = F.rms_norm(latent, (MLA.kv_lora_rank,), attention.kv_norm.weight, 1e-5)
    kv = (latent @ attention.kv_up.weight.T).unflatten(1, (MLA.num_heads, nope + value))
    rows = []
    for head in range(MLA.num_heads):
        score = q[:, head, :nope] @ kv[:, head, :nope].T
        score = (score + rotate(q[:, head, nope:], table) @ rotate(k_rope, table).T) / (nope + rope) ** 0.5
        score = score.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
        rows.append(score.softmax(-1) @ kv[:, head, nope:])
    return torch.cat(rows, dim=1) @ attention.o.weight.T


def test_latent_attention_by_hand() -> None:
    attention = LatentAttention(MLA, SETTINGS)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    table = rope_table(5, MLA.rope_width, MLA.rope_base, x.device)
    found = attention(x.flatten(0, 1), table).view(2, 5, 16)
    for sample, result in zip(x, found, strict=True):
        assert difference(result, latent_by_hand(attention, sample)) < 1e-13


def test_keys_before_the_first_query_are_seen_by_all() -> None:
    q, k, v = (torch.randn(1, 2, length, 6, dtype=torch.float64) for length in (3, 5, 5))
    found = attend(q, k, v, 1)
    for position in range(3):
        seen = slice(0, 2 + position + 1)
        weights = (q[:, :, position : position + 1] @ k[:, :, seen].transpose(2, 3) / 6**0.5).softmax(-1)
        assert difference(found[:, :, position : position + 1], weights @ v[:, :, seen]) < 1e-13
    assert difference(attend(q, k[:, :1], v[:, :1], 2), attend(q, *(t[:, [0, 0]] for t in (k, v)), 1)) == 0


def test_positions_may_begin_anywhere_and_low_precision_rounds_once() -> None:
    table = rope_table(8, 6, 10000.0, CPU)
    assert torch.equal(rope_table(5, 6, 10000.0, CPU, first=3), table[:, 3:])
    x = torch.randn(1, 1, 8, 6)
    exact = rotate(x.bfloat16().double(), table)
    assert torch.equal(rotate(x.bfloat16(), table), rotate(x.bfloat16().float(), table).bfloat16())
    assert difference(rotate(x.bfloat16(), table), exact) < 2**-8


def test_heads_of_whole_samples() -> None:
    x = torch.arange(2 * 3 * 4).view(6, 4)  # two samples, three positions, two heads of width two
    assert heads(x, 3, 2).tolist() == [
        [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]],
        [[[12, 13], [16, 17], [20, 21]], [[14, 15], [18, 19], [22, 23]]],
    ]


def cut(mesh: Mesh, config: ModelConfig, sequence_parallel: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, gradient of the input) of two samples, with the heads cut over the tp ranks."""
    tp = TensorParallel.of(mesh, sequence_parallel=sequence_parallel)
    kind = LatentAttention if config.attention == "mla" else GroupedQueryAttention
    attention = kind(config, replace(SETTINGS, tp=tp))
    x, d_y = torch.randn(2, 12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if sequence_parallel:
        x, d_y = x.chunk(mesh.tp)[mesh.tp_index], d_y.chunk(mesh.tp)[mesh.tp_index]
    x = x.clone().requires_grad_()
    y = attention(x, rope_table(6, config.rope_width, config.rope_base, CPU))
    y.backward(d_y)
    return y.detach(), x.grad


@pytest.mark.parametrize("config", [MODEL, MLA], ids=["gqa", "mla"])
def test_heads_may_be_cut_over_ranks(config: ModelConfig) -> None:
    expected = run_alone(cut, config, False)
    for results in run_ranks(2, cut, config, False, tp=2):
        for found, wanted in zip(results, expected, strict=True):
            assert difference(found, wanted) < 1e-12
    parts = run_ranks(2, cut, config, True, tp=2)
    for number, wanted in enumerate(expected):
        assert difference(torch.cat([part[number] for part in parts]), wanted) < 1e-12
