"""Families whose layers differ: what their files may leave out, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_families import read

from moeclipse.cli.main import main
from moeclipse.core.errors import CheckpointError


def test_every_fourth_layer_has_attention(tmp_path: Path) -> None:
    found = read("qwen3_next", tmp_path, num_hidden_layers=8, layer_types=None)
    assert found["model.mixers"] == (("gated_delta",) * 3 + ("attention",)) * 2
    assert found["model.zero_centred_norms"]


def test_kimi_names_layers_from_one_on(tmp_path: Path) -> None:
    table = {"full_attn_layers": [2, 4], "kda_layers": [1, 3], "head_dim": 8, "num_heads": 3}
    given: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": None, "mlp_layer_types": None}
    found = read("kimi_linear", tmp_path, linear_attn_config={**table, "short_conv_kernel_size": 5}, **given)
    assert found["model.mixers"] == ("kimi_delta", "attention") * 2
    assert (found["model.delta_key_heads"], found["model.delta_key_dim"], found["model.conv_width"]) == (
        3,
        8,
        5,
    )
    assert found["model.dense_layers"] == (0,)


def test_llama_4_turns_and_cuts_the_same_layers(tmp_path: Path) -> None:
    given = {"no_rope_layers": None, "moe_layers": None, "num_hidden_layers": 4}
    found = read("llama4_text", tmp_path, interleave_moe_layer_step=2, layer_types=None, **given)
    assert found["model.rope_layers"] == (True, True, True, False)
    assert found["model.chunks"] == (3, 3, 3, 0)
    assert found["model.dense_layers"] == (0, 2)


def test_hunyuan_turns_by_another_base(tmp_path: Path) -> None:
    found = read("hunyuan_v1_moe", tmp_path)
    assert found["model.rope_scaling"] == "none"
    assert found["model.rope_base"] == pytest.approx(10000 * 50 ** (6 / 4))
    with pytest.raises(CheckpointError, match="moe_topk that differs from layer to layer"):
        read("hunyuan_v1_moe", tmp_path, moe_topk=[1, 2])


def test_choices_of_layers_below_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="take over the choice of an indexer below"):
        read("glm_moe_dsa", tmp_path, indexer_types=["full", "shared"])
    assert read("glm_moe_dsa", tmp_path)["model.index_pairs"] == "neighbours"


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("--model.mixers", ["gated_delta", "attention"], "mixers of tokens other than attention"),
        ("--model.chunks", ["64"], "attention in pieces of a text"),
    ],
)
def test_plans_refuse_what_they_have_no_price_for(
    key: str, value: list[str], why: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    listed = ", ".join(one if one.isdigit() else f'"{one}"' for one in value)
    path.write_text(f"[model]\n{key.rpartition('.')[2]} = [{listed}]\n")
    assert main(["plan", str(path), "--gpus", "8"]) == 2
    told = capsys.readouterr().err
    assert f"plan and simulate have no price for {why}" in told
