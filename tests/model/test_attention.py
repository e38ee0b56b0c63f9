"""Attention by hand: rotation, heads that share keys and values, latents, and who sees whom."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from small_model import MLA, MODEL, SETTINGS, positions

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.model.attention import GroupedQueryAttention, heads
from moeclipse.model.config import ModelConfig
from moeclipse.model.latent_attention import LatentAttention
from moeclipse.model.layer import mixer_of
from moeclipse.model.lora_config import NO_LORA
from moeclipse.model.rotary import Positions, Rotary, rotate
from moeclipse.ops.attention import attend_reference
from moeclipse.tensor.cut import share_of
from moeclipse.tensor.parallel import TensorParallel
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks


def test_grouped_attention_by_hand() -> None:
    attention = GroupedQueryAttention(MODEL, SETTINGS)
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    table = positions(MODEL, 5).table
    rows = []
    for head in range(4):
        kv = head // 2  # two query heads share a key-value head
        q = rotate((x @ attention.q.weight.T)[..., head * 6 : head * 6 + 6], table)
        k = rotate((x @ attention.k.weight.T)[..., kv * 6 : kv * 6 + 6], table)
        v = (x @ attention.v.weight.T)[..., kv * 6 : kv * 6 + 6]
        score = (q @ k.transpose(1, 2) / 6**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
        rows.append(score.softmax(-1) @ v)
    expected = torch.cat(rows, dim=-1) @ attention.o.weight.T
    assert difference(attention(x[0], positions(MODEL, 5)), expected[0]) < 1e-13


def latent_by_hand(attention: LatentAttention, x: torch.Tensor) -> torch.Tensor:
    """One sample [S, D], head by head; the rotary part of keys is one for all heads."""
    nope, rope, value = MLA.qk_nope_head_dim, MLA.qk_rope_head_dim, MLA.v_head_dim
    table = positions(MLA, len(x)).table
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
    found = attention(x.flatten(0, 1), positions(MLA, 5)).view(2, 5, 16)
    for sample, result in zip(x, found, strict=True):
        assert difference(result, latent_by_hand(attention, sample)) < 1e-13


def test_heads_of_whole_samples() -> None:
    x = torch.arange(2 * 3 * 4).view(6, 4)  # two samples, three positions, two heads of width two
    assert heads(x, 3, 2).tolist() == [
        [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]],
        [[[12, 13], [16, 17], [20, 21]], [[14, 15], [18, 19], [22, 23]]],
    ]


def cut(
    mesh: Mesh, config: ModelConfig, sequence_parallel: bool
) -> tuple[torch.Tensor, torch.Tensor, dict[str, tuple[str, torch.Tensor]]]:
    """(output, gradients of the input and of parameters) of two samples, the heads cut over the tp ranks."""
    tp = TensorParallel.of(mesh, sequence_parallel=sequence_parallel)
    attention = mixer_of(config, replace(SETTINGS, tp=tp), NO_LORA)
    x, d_y = torch.randn(2, 12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if sequence_parallel:
        x, d_y = x.chunk(mesh.tp)[mesh.tp_index], d_y.chunk(mesh.tp)[mesh.tp_index]
    x = x.clone().requires_grad_()
    y = attention(x, positions(config, 6))
    y.backward(d_y)
    grads = dict(attention.named_parameters())
    # Whole parameters whose gradients every rank computed are one rank's; shares and cuts add up or join.
    return y.detach(), x.grad, {name: (share_of(p), p.grad) for name, p in grads.items()}


VARIED = replace(
    MODEL,
    attention_bias="all",
    qk_norm="whole",
    clip_qkv=0.4,
    attention_sinks=True,
    attention_scale=0.7,
    attention_softcap=2.0,
    windows=(3,),
    rope_dim=4,
    rope_pairs="neighbours",
)


GATED = replace(
    MODEL,
    attention_gate="component",
    attention_bias="all",
    qk_norm="head",
    zero_centred_norms=True,
    rope_dim=4,
    chunks=(4,),
)
STATES = replace(
    MODEL, mixers=("gated_delta",), delta_value_heads=4, delta_key_dim=3, delta_value_dim=5, conv_width=3
)


@pytest.mark.parametrize(
    "config",
    [
        *(MODEL, MLA, VARIED, replace(VARIED, qk_norm="head"), replace(MLA, attention_sinks=True)),
        *(
            GATED,
            replace(GATED, attention_gate="head_softplus", rope_layers=(False,), growth=0.3, growth_len=2),
        ),
        *(STATES, replace(STATES, mixers=("kimi_delta",)), replace(MODEL, qk_norm="turned")),
        replace(MLA, index_topk=3, index_heads=2, index_dim=6),
    ],
    ids=[
        "gqa",
        "mla",
        "varied",
        "by-head",
        "mla-sinks",
        "gated",
        "unturned",
        "delta",
        "kimi",
        "turned",
        "indexed",
    ],
)
def test_heads_may_be_cut_over_ranks(config: ModelConfig) -> None:
    *expected, grads = run_alone(cut, config, False)
    for *results, found in run_ranks(2, cut, config, False, tp=2):
        for result, wanted in zip(results, expected, strict=True):
            assert difference(result, wanted) < 1e-12
        assert found.keys() == grads.keys()
    for sequence_parallel in (False, True):
        ranks = run_ranks(2, cut, config, sequence_parallel, tp=2)
        for name, (_, wanted) in grads.items():
            share = ranks[0][2][name][0]
            parts = [rank[2][name][1] for rank in ranks]
            if share == "cut":  # along rows, but for o, whose columns are cut
                together = torch.cat(parts, dim=1 if name in ("o.weight", "out.weight") else 0)
            else:
                together = parts[0] if share == "same" else parts[0] + parts[1]
            assert difference(together, wanted) < 1e-12, (name, share, sequence_parallel)
    for number, wanted in enumerate(expected):
        assert difference(torch.cat([part[number] for part in ranks]), wanted) < 1e-12


def test_what_a_configuration_says_is_what_attention_does() -> None:
    """Each key by itself changes the result, and together they are the definition."""
    x = torch.randn(6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    where = positions(VARIED, 6)
    attention = GroupedQueryAttention(VARIED, SETTINGS)
    for part in (attention.q, attention.k, attention.v, attention.o):
        part.bias.data.normal_(generator=torch.Generator().manual_seed(3))
    found = attention(x, where)

    def normed(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(value, (value.shape[-1],), weight, 1e-5)

    q = normed(F.linear(x, attention.q.weight, attention.q.bias), attention.q_norm.weight)
    k = normed(F.linear(x, attention.k.weight, attention.k.bias), attention.k_norm.weight)
    v = F.linear(x, attention.v.weight, attention.v.bias)
    q, k, v = (heads(value.clamp(-0.4, 0.4), 6, 6) for value in (q, k, v))
    q, k = (rotate(value, where.table, "neighbours") for value in (q, k))
    out = attend_reference(q, k, v, scale=0.7, window=3, softcap=2.0, sinks_H=attention.sinks)
    expected = F.linear(out.transpose(1, 2).flatten(2)[0], attention.o.weight, attention.o.bias)
    assert difference(found, expected) < 1e-13
    usual = ModelConfig()
    for name in ("clip_qkv", "attention_sinks", "attention_scale", "attention_softcap", "windows", "qk_norm"):
        other = GroupedQueryAttention(replace(VARIED, **{name: getattr(usual, name)}), SETTINGS)
        other.load_state_dict(attention.state_dict(), strict=False)
        assert difference(other(x, where), found) > 1e-6, name


def test_documents_in_a_sample_are_samples_of_their_own() -> None:
    for config in (MODEL, VARIED, MLA):
        kind = LatentAttention if config is MLA else GroupedQueryAttention
        attention = kind(config, SETTINGS)
        x = torch.randn(7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        documents = torch.tensor([[5, 5, 5, 5, 9, 9, 9]])
        where = Positions.of(Rotary.of(config), 7, x.device, documents_BS=documents)
        packed = attention(x, where)
        apart = torch.cat([attention(x[:4], positions(config, 4)), attention(x[4:], positions(config, 3))])
        assert difference(packed, apart) < 1e-13
        assert difference(attention(x, positions(config, 7)), apart) > 1e-3
    memory = GroupedQueryAttention(replace(MODEL, memory=2), SETTINGS)
    with pytest.raises(ConfigError, match="documents in a sample"):
        memory(x, where)


def test_pieces_of_documents_are_apart() -> None:
    config = replace(MODEL, chunks=(3,))
    attention = GroupedQueryAttention(config, SETTINGS)
    x = torch.randn(7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    documents = torch.tensor([[5, 5, 9, 9, 9, 9, 9]])
    packed = attention(x, Positions.of(Rotary.of(config), 7, x.device, documents_BS=documents))
    apart = torch.cat([attention(x[:2], positions(config, 2)), attention(x[2:], positions(config, 5))])
    assert difference(packed, apart) < 1e-13
    whole = attention(x, positions(config, 7))
    assert difference(whole[:3], attention(x[:3], positions(config, 3))) < 1e-13
    assert difference(whole, GroupedQueryAttention(MODEL, SETTINGS)(x, positions(MODEL, 7))) > 1e-3
