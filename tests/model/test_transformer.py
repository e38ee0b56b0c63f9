"""The model from its definition: shapes, counts, causality, attention, and weights that ignore layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from moeclipse.comm.mesh import Mesh
from moeclipse.model.attention import GroupedQueryAttention, rope_table, rotate
from moeclipse.model.blocks import RMSNorm, Settings
from moeclipse.model.config import ModelConfig
from moeclipse.model.transformer import Transformer, count_parameters
from moeclipse.moe.config import GateConfig, MoEConfig
from moeclipse.moe.tokens import Tokens
from moeclipse.tensor.cut import cut_of
from moeclipse.tensor.parallel import TensorParallel
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks

MODEL = ModelConfig(num_layers=2, d_model=16, num_heads=4, num_kv_heads=2, head_dim=6, d_ff=20, vocab_size=40)
MLA = replace(
    MODEL,
    attention="mla",
    num_dense_layers=1,
    q_lora_rank=7,
    kv_lora_rank=9,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=5,
    tie_embeddings=True,
)
MOE = MoEConfig(num_experts=6, d_ff=10, num_shared_experts=2)
GATE = GateConfig(top_k=2)
SETTINGS = Settings(
    layer=0,
    num_layers=1,
    seed=0,
    init_std=0.3,
    device=torch.device("cpu"),
    dtype=torch.float64,
    tp=TensorParallel.of(Mesh.single()),
)


def build(config: ModelConfig, gate: GateConfig = GATE, mesh: Mesh | None = None) -> Transformer:
    return Transformer(config, MOE, gate, mesh=mesh or Mesh.single(), seed=3, dtype=torch.float64)


@pytest.mark.parametrize(
    "config", [MODEL, MLA, replace(MLA, q_lora_rank=0)], ids=["gqa", "mla", "mla-full-q"]
)
@pytest.mark.parametrize("gate", [GATE, GateConfig(kind="noisy")], ids=["softmax", "noisy"])
def test_parameter_count_by_formula(config: ModelConfig, gate: GateConfig) -> None:
    everything, active = count_parameters(config, MOE, gate)
    model = build(config, gate)
    assert everything == sum(p.numel() for p in model.parameters())
    idle = (6 - 2) * 3 * 16 * 10 * (config.num_layers - config.num_dense_layers)
    assert active == everything - idle


def losses(config: ModelConfig, ids: torch.Tensor) -> torch.Tensor:
    """Cross-entropy at each position, one position at a time."""
    model = build(config).eval()
    values = []
    for stop in range(1, ids.shape[1]):
        window = ids[:, :stop]
        out = model(window, ids[:, 1 : stop + 1], Tokens(mesh=model.mesh, first=0, total=window.numel()))
        values.append(out.loss_sum.detach())
    return torch.stack(values)


@pytest.mark.parametrize("config", [MODEL, MLA], ids=["gqa", "mla"])
def test_no_position_sees_its_future(config: ModelConfig) -> None:
    ids = torch.randint(0, 40, (1, 9), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[:, 6:] = (other[:, 6:] + 1) % 40
    a, b = losses(config, ids), losses(config, other)
    assert torch.equal(a[:5], b[:5])
    assert not torch.equal(a[6:], b[6:])


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


def test_norm_by_its_formula() -> None:
    norm = RMSNorm(16, SETTINGS, 1e-5)
    x = torch.randn(3, 16, dtype=torch.float64)
    assert torch.allclose(norm(x), F.rms_norm(x, (16,), norm.weight, 1e-5), rtol=1e-13)


def weights(mesh: Mesh) -> dict[str, torch.Tensor]:
    model = build(MODEL, mesh=mesh)
    found = {}
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            head, key = name.rsplit(".", 1)
            ids = model.get_submodule(head).ids
            found |= {f"{head}.{e}.{key}": parameter.data[slot].clone() for slot, e in enumerate(ids)}
        else:
            found[name] = parameter.data.clone()
    return found


def test_initial_weights_ignore_the_layout() -> None:
    expected = run_alone(weights)
    seen: set[str] = set()
    for found in run_ranks(4, weights):
        assert all(torch.equal(value, expected[name]) for name, value in found.items())
        seen |= found.keys()
    assert seen == expected.keys()
    values = [value.flatten()[0].item() for name, value in expected.items() if "norm" not in name]
    assert len(set(values)) == len(values), "no two tensors are alike"


def parts(mesh: Mesh, config: ModelConfig, expert_tp: str) -> list[tuple[str, dict, torch.Tensor]]:
    """(logical name, how it is cut, this rank's part) of every parameter."""
    moe = replace(MOE, expert_tp=expert_tp)
    model = Transformer(config, moe, GATE, mesh=mesh, seed=3, dtype=torch.float64)
    found = []
    for name, parameter in model.named_parameters():
        cut = cut_of(parameter)
        facts = {} if cut is None else {"dim": cut.dim, "at": [cut.start, cut.stop], "blocks": cut.blocks}
        if ".experts." in name:
            head, key = name.rsplit(".", 1)
            ids = model.get_submodule(head).ids
            found += [(f"{head}.{e}.{key}", facts, parameter.data[s].clone()) for s, e in enumerate(ids)]
        else:
            found.append((name, facts, parameter.data.clone()))
    return found


@pytest.mark.parametrize("expert_tp", ["folded", "sharded"])
@pytest.mark.parametrize("config", [MODEL, MLA], ids=["gqa", "mla"])
def test_initial_weights_of_parts_are_those_of_the_whole(config: ModelConfig, expert_tp: str) -> None:
    expected = {name: value for name, _, value in run_alone(parts, config, expert_tp)}
    covered = dict.fromkeys(expected, 0)
    for found in run_ranks(2, parts, config, expert_tp, tp=2):
        for name, facts, value in found:
            whole = expected[name]
            value = value.view(-1, *whole.shape[-1:]) if whole.dim() == 2 and not facts else value
            if facts and facts["dim"] == 1:
                whole = whole[..., facts["at"][0] : facts["at"][1]]
            elif facts:
                whole = whole.unflatten(-2, (facts["blocks"], -1))[..., facts["at"][0] : facts["at"][1], :]
                whole = whole.flatten(-3, -2)
            assert torch.equal(value, whole), name
            covered[name] += value.numel()
    folded = expert_tp == "folded"
    whole_on_both = [n for n, count in covered.items() if count == 2 * expected[n].numel()]
    assert all(count in (1, 2) for count in (covered[n] // expected[n].numel() for n in covered))
    for name in whole_on_both:
        narrow = any(word in name for word in ("norm", "gate", "q_down", "kv_down"))
        assert narrow or (folded and "shared" in name), f"{name} is whole on both ranks"


def test_a_rank_without_samples_runs() -> None:
    def empty(mesh: Mesh) -> float:
        model = build(MODEL, mesh=mesh)
        ids = torch.zeros(0 if mesh.rank else 2, 5, dtype=torch.int64)
        out = model(ids, ids, Tokens(mesh=mesh, first=0 if mesh.rank == 0 else 10, total=10))
        (out.loss_sum + out.aux_loss).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        return float(out.loss_sum)

    assert run_ranks(2, empty)[1] == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, "model.num_kv_heads (3) must divide model.num_heads (4)"),
        ({"head_dim": 5}, "model.head_dim (5) must be even"),
        ({"num_dense_layers": 3}, "model.num_dense_layers (3) must be between 0 and model.num_layers (2)"),
        ({"attention": "mla", "qk_rope_head_dim": 3}, "model.qk_rope_head_dim (3) must be even"),
        ({"d_model": 0}, "model.d_model (0) must be at least 1"),
    ],
)
def test_shapes_that_cannot_be(change: dict, message: str) -> None:
    assert any(message in problem for problem in replace(MODEL, **change).problems())
