"""`experts_implementation="moeclipse"` in every family of transformers, and the table that says so."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import transformers
from every_family import Row, families, row_of

import moeclipse.hf
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CheckpointError
from moeclipse.hf.families import FAMILIES
from moeclipse.hf.missing_families import MISSING
from moeclipse.hf.read import read_config
from moeclipse.testing.run_ranks import run_alone, run_ranks

QUICK = ("hunyuan_v1_moe", "minimax_m3_vl", "qwen3_next")
PAGE = Path(__file__).parents[2] / "docs" / "families.md"


def listed() -> dict[str, str]:
    """What the page says of each family; those of which it says the same share a row."""
    table = PAGE.read_text().split("<!-- families -->")[1].split("<!-- end of families -->")[0]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.+) \|$", table, re.MULTILINE)
    return {name: cells for names, cells in rows for name in re.findall(r"\w+", names)}


def rows(mesh: Mesh, name: str) -> dict[str, Any]:
    return vars(row_of(mesh, name))


def checked(name: str) -> Row:
    ranks = [Row(**row) for row in run_ranks(2, rows, name)]
    for row in ranks:
        assert row.layers > 0
        assert row.alone < 1e-12
        for value in (row.shared, row.adapted):
            assert isinstance(value, str) or value < 1e-12
        assert (row.ours == row.layers) == isinstance(row.shared, float), "what is ours can be shared out"
    return ranks[0]


@pytest.mark.parametrize("name", QUICK)
def test_a_few_families(name: str) -> None:
    assert checked(name).ours > 0


@pytest.mark.full
@pytest.mark.parametrize("name", families())
def test_output_and_gradients_are_those_of_eager(name: str) -> None:
    """Alone, on two ranks that share experts, and with adapters of peft; the page says what was found."""
    assert listed()[name] == checked(name).cells()


def test_the_table_names_every_family_and_no_other() -> None:
    assert sorted(listed()) == families()
    read = {family.model_type for family in FAMILIES}
    here = {name for name in families() if name not in read}
    assert {name for name in here if not {name, f"{name}_text"} & MISSING.keys()} <= {"openai_privacy_filter"}


def told(_: Mesh, name: str, given: dict[str, Any]) -> list[str]:
    moeclipse.hf.register()
    small = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(name, **small, **given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        transformers.AutoModelForCausalLM.from_config(config, experts_implementation="moeclipse")
    return [str(one.message) for one in caught if "lets nobody choose" in str(one.message)]


@pytest.mark.parametrize(
    ("name", "given", "count"),
    [
        ("llama4_text", {"intermediate_size": 8, "intermediate_size_mlp": 8, "num_local_experts": 2}, 1),
        ("doge", {"is_moe": True, "num_experts": 4}, 1),
        ("doge", {}, 0),
        ("llama", {}, 0),
        ("mixtral", {"intermediate_size": 8}, 0),
    ],
)
def test_a_family_without_a_choice_is_told_when_its_model_is_made(name: str, given: Any, count: int) -> None:
    messages = run_alone(told, name, given)
    assert len(set(messages)) == count, "one text, which Python shows once, however many parts a model has"
    assert all("experts_implementation='moeclipse' changes nothing" in message for message in messages)


def test_families_that_we_do_not_read_say_what_they_need() -> None:
    for name, needs in MISSING.items():
        with pytest.raises(CheckpointError) as caught:
            read_config({"model_type": name}, "here")
        assert needs in str(caught.value)
        assert "\n" not in str(caught.value)
