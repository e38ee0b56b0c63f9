"""Memory against definitions: one long segment, attention written down by hand, and parts of tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.model.config import ModelConfig
from moeclipse.model.rotary import Rotary, rotate
from moeclipse.model.segment_memory import LayerMemory, memories
from moeclipse.model.transformer import Transformer
from moeclipse.moe.config import GateConfig, MoEConfig
from moeclipse.moe.tokens import Tokens
from moeclipse.tensor.parallel import TensorParallel
from moeclipse.testing.run_ranks import run_alone, run_ranks

KINDS: dict[str, dict[str, Any]] = {
    "gqa": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6},
    "mla": {
        "attention": "mla",
        "num_heads": 3,
        "q_lora_rank": 5,
        "kv_lora_rank": 7,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
    },
}
B, S = 3, 4


def build(mesh: Mesh, kind: str, memory: int) -> Transformer:
    config = ModelConfig(
        vocab_size=11,
        num_layers=3,
        num_dense_layers=1,
        d_model=12,
        d_ff=16,
        init_std=0.3,
        memory=memory,
        **KINDS[kind],
    )
    moe, gate = MoEConfig(num_experts=4, d_ff=8), GateConfig(top_k=2, balance_loss=0.0)
    return Transformer(config, moe, gate, mesh=mesh, dtype=torch.float64)


def text(segments: int) -> torch.Tensor:
    count = B * (segments * S + 1)
    return (torch.arange(count) * 7919 % 104729 % 11).view(B, -1)


def segment_loss(model: Transformer, ids: torch.Tensor, number: int, length: int = S) -> torch.Tensor:
    part = ids[:, number * length : (number + 1) * length + 1]
    tokens = Tokens(mesh=model.mesh, first=0, total=B * length)
    return model(part[:, :-1], part[:, 1:], tokens).loss_sum


def segments_and_whole(mesh: Mesh, kind: str, memory: int) -> tuple[list[float], float]:
    """Losses of four short segments, and of one that is as long as all of them."""
    model, ids, losses = build(mesh, kind, memory), text(4), []
    for number in range(4):
        losses.append(float(segment_loss(model, ids, number)))
        for layer_memory in memories(model):
            layer_memory.turn()
    return losses, float(segment_loss(build(mesh, kind, 0), ids, 0, 4 * S))


@pytest.mark.parametrize("kind", KINDS)
def test_with_all_of_the_past_segments_are_one_long_segment(kind: str) -> None:
    losses, whole = run_alone(segments_and_whole, kind, 3 * S)
    assert math.isclose(sum(losses), whole, rel_tol=1e-13)
    for short in (S, S // 2, 0):
        losses, whole = run_alone(segments_and_whole, kind, short)
        assert not math.isclose(sum(losses), whole, rel_tol=1e-3), "what is forgotten must be missing"


def slow_attention(model: Transformer, x: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
    """Grouped-query attention of layer 0, query by query; positions count from the memory's first."""
    attention, config = model.layers["0"].attention, model.config
    joined = torch.cat([past, x], dim=1)
    before, total = past.shape[1], joined.shape[1]
    table = Rotary.of(config).table(torch.arange(total), total)

    def split(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (value @ weight.T).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)

    q = rotate(split(x, attention.q.weight), table[:, before:])
    k, v = rotate(split(joined, attention.k.weight), table), split(joined, attention.v.weight)
    outputs = []
    for position in range(x.shape[1]):
        heads = []
        for head in range(config.num_heads):
            seen = before + position + 1
            keys, values = k[:, head // 2, :seen], v[:, head // 2, :seen]
            weights = (keys @ q[:, head, position, :, None]).squeeze(-1) / math.sqrt(config.head_dim)
            heads.append((weights.softmax(-1)[:, None] @ values).squeeze(1))
        outputs.append(torch.cat(heads, dim=-1))
    return torch.stack(outputs, dim=1) @ attention.o.weight.T


def test_gradients_are_those_of_attention_written_down() -> None:
    run_alone(compare_with_slow, 3)
    run_alone(compare_with_slow, S)


def compare_with_slow(mesh: Mesh, memory: int) -> None:
    model = build(mesh, "gqa", memory)
    attention = model.layers["0"].attention
    generator = torch.Generator().manual_seed(1)
    first, second = torch.randn(2, B, S, 12, dtype=torch.float64, generator=generator)
    table = model.positions(torch.zeros(B, S))
    first.requires_grad_()
    second.requires_grad_()
    attention(first.flatten(0, 1), table)
    attention.memory.turn()
    found = attention(second.flatten(0, 1), table).view(B, S, 12)
    expected = slow_attention(model, second, first[:, -memory:].detach())
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14)
    probe = torch.randn(B, S, 12, dtype=torch.float64, generator=generator)
    wanted = [second, attention.q.weight, attention.k.weight, attention.v.weight, attention.o.weight]
    slow = torch.autograd.grad((expected * probe).sum(), wanted)
    fast = torch.autograd.grad((found * probe).sum(), [*wanted, first], allow_unused=True)
    assert fast[-1] is None, "no gradient flows into memory"
    for a, b in zip(fast, slow, strict=False):
        assert (a - b).abs().max() <= 1e-12 * b.abs().max()


def test_reading_again_reads_the_same_and_evaluation_writes_nothing() -> None:
    run_alone(read_again)


def read_again(mesh: Mesh) -> None:
    model, ids = build(mesh, "gqa", S), text(3)
    segment_loss(model, ids, 0)
    for memory in memories(model):
        memory.turn()
    losses = {float(segment_loss(model, ids, 1)) for _ in range(3)}
    assert len(losses) == 1, "a forward that is recomputed must not see what it wrote"
    model.eval()
    segment_loss(model, ids, 0)
    model.train()
    for memory in memories(model):
        memory.turn()
    after = float(segment_loss(model, ids, 2))
    for memory in memories(model):
        memory.turn(keep=False)
    assert float(segment_loss(model, ids, 2)) != after, "without a past another loss"


def three_steps(mesh: Mesh) -> list[torch.Tensor]:
    """What memories of several sizes hold after three segments: all rows, in order, whoever holds them."""
    tp, found = TensorParallel.of(mesh, sequence_parallel=True), []
    for size in (S - 2, S, S + 2, 3 * S):
        memory = LayerMemory(size, 0, tp)
        for step in range(3):
            x = torch.arange(B * S * step, B * S * (step + 1)).view(B * S, 1).double()
            part = x.chunk(tp.size)[tp.index]
            memory.write((0, 0), part, S, memory.read((0, 0), B))
            assert memory.read((0, 0), B) is None or step > 0, "a step does not read what it writes"
            memory.turn()
        past = memory.read((0, 0), B)
        assert past.positions == min(size, 3 * S)
        whole = tp.gather_rows(past.x_TD, "test").get()
        ((place, kept, first),) = memory.kept()
        assert (place, first) == ((0, 0), tp.index * len(past.x_TD))
        assert torch.equal(kept.x_TD, past.x_TD)
        again = LayerMemory(size, 0, tp)
        again.put((0, 0), whole.unflatten(0, (B, -1)))
        assert torch.equal(again.read((0, 0), B).x_TD, past.x_TD), "a checkpoint gives it back"
        found.append(whole)
    return found


def test_memory_is_the_last_positions_of_each_sample_however_tokens_are_held() -> None:
    segments = torch.arange(3 * B * S).view(3, B, S).double()
    text = segments.transpose(0, 1).flatten(1)
    for found in (run_alone(three_steps), *run_ranks(2, three_steps, tp=2)):
        for size, whole in zip((S - 2, S, S + 2, 3 * S), found, strict=True):
            assert torch.equal(whole.view(B, -1), text[:, -size:]), size


def test_a_checkpoint_does_not_know_into_which_pieces_samples_are_cut() -> None:
    memory = LayerMemory(2, 0, TensorParallel.of(Mesh.single()))
    held = torch.arange(4 * 2 * 3).view(4, 2, 3).double()
    memory.put((1, 10), held)
    past = memory.read((1, 12), 1)
    assert past.positions == 2
    assert torch.equal(past.x_TD, held[2])
    assert memory.read((0, 10), 1) is None, "of another microbatch nothing is known"
    ((place, kept, first),) = memory.kept()
    assert (place, first) == ((1, 10), 0)
    assert torch.equal(kept.x_TD, held.flatten(0, 1))
    memory.forget()
    assert memory.read((1, 10), 1) is None
