"""Adapters on a base in few bits: merged as peft merges decoded weights, and several that take turns."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny_models import in_float64, load, peft, write_tiny

from moeclipse.cli.main import main
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import to_toml, with_values
from moeclipse.core.errors import CheckpointError, ConfigError
from moeclipse.hf.folder import HfFolder
from moeclipse.hf.peft import adapter_lora
from moeclipse.ops.frozen import decode, encode
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.checkpoints.checkpoint import Checkpoint, OneRank
from moeclipse.train.config import TrainConfig
from moeclipse.train.data.vocabulary import ByteVocabulary
from moeclipse.train.generate.text import Adapters, load_model
from moeclipse.train.ranks import PatientRanks
from moeclipse.train.step.learner import Learner
from moeclipse.train.weights.convert import to_hf
from moeclipse.train.weights.hugging_face import load_folder
from moeclipse.train.weights.open_model import FoundModel, find_model

SIZES = {"vocab_size": 256, "hidden_size": 32, "head_dim": 16, "moe_intermediate_size": 32}
NF4: dict[str, Any] = {"base": "nf4", "dense_base": "nf4"}
TEXT = "of all that was written"
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MODEL = "model.safetensors"


def wrapped(model: Any, **changes: Any) -> Any:
    given: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}
    given |= {"target_parameters": PARAMETERS, "task_type": "CAUSAL_LM", **changes}
    return peft.get_peft_model(model, peft.LoraConfig(**given))


def write_adapter(path: Path, out: Path, seed: int, **changes: Any) -> None:
    model = wrapped(load(path), **changes).double()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    model.save_pretrained(out)


def run(mesh: Mesh, root: Path, name: str, adapter: str) -> None:
    """A run that saved what it began with, and what that comes to as a Hugging Face model."""
    values = {
        "model.from_hf": str(root / "model"),
        "model.dtype": "float64",
        "lora.rank": 4,
        "lora.alpha": 6.0,
    }
    values |= {"lora.targets": ("q", "v", "experts"), "lora.adapter": adapter, "data.files": (__file__,)}
    values |= {"data.batch_size": 1, **{f"model.{key}": kind for key, kind in NF4.items()}}
    config = with_values(TrainConfig(), {**HfFolder.open(root / "model").values, **values})
    learner = Learner(config, mesh)
    load_folder(learner, PatientRanks(mesh, 60))
    learner.save(root / name / "checkpoints", 0)
    (root / name / "config.toml").write_text(to_toml(config))
    to_hf(Checkpoint.open(root / name / "checkpoints" / "step-00000000", OneRank()), root / f"{name}-merged")


def their_loss(model: Any) -> float:
    ids = torch.tensor([list(TEXT.encode())])
    with torch.no_grad():
        logits = model.double()(input_ids=ids, use_cache=False).logits
    return float(F.cross_entropy(logits[0, :-1], ids[0, 1:]))


def write(mesh: Mesh, root: Path) -> dict[str, float]:
    """All folders; what peft makes of the decoded weights, and its losses."""
    write_tiny("qwen3_moe", root / "model", **SIZES)
    losses = {}
    with in_float64():
        for seed, name in enumerate("ab"):
            write_adapter(root / "model", root / name, seed)
        write_adapter(root / "model", root / "narrow", 5, r=2)
        write_adapter(root / "model", root / "dora", 5, use_dora=True, target_parameters=None)
    run(mesh, root, "fresh", "")
    run(mesh, root, "run", str(root / "a"))
    with in_float64():
        losses[""] = their_loss(load(root / "fresh-merged"))
        for name in "ab":
            merged = peft.PeftModel.from_pretrained(
                load(root / "fresh-merged"), root / name
            ).merge_and_unload()
            losses[name] = their_loss(merged)
            merged.save_pretrained(root / f"{name}-theirs")
    return losses


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    root = tmp_path_factory.mktemp("adapters")
    return root, run_alone(write, root)


def test_merged_into_a_base_in_few_bits_it_is_what_peft_makes_of_the_decoded_weights(
    written: tuple[Path, dict[str, float]],
) -> None:
    root, _ = written
    plain, decoded, found, theirs = (
        load_file(root / name / MODEL) for name in ("model", "fresh-merged", "run-merged", "a-theirs")
    )
    assert found.keys() == theirs.keys()
    assert max(difference(found[name], value) for name, value in theirs.items()) <= 1e-12
    name = "model.layers.1.self_attn.k_proj.weight"
    expected = decode("nf4", tuple(plain[name].shape), encode("nf4", plain[name]))
    assert torch.equal(decoded[name], expected.double())
    assert torch.equal(decoded["model.norm.weight"], plain["model.norm.weight"])
    assert difference(found[name], plain[name]) > 0.01


def losses(mesh: Mesh, root: Path) -> dict[str, float]:
    """Of one model in memory with both adapters in turn; and of the run with its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FoundModel, "vocabulary", lambda _, _tokenizer: ByteVocabulary())
        given: dict[str, Any] = {"mesh": mesh, "dtype": "float64", "peer": "off"}
        both = {"a": str(root / "a"), "b": str(root / "b")}
        model = load_model(str(root / "model"), adapters=both, **NF4, **given)
        found = {"first": model.loss(TEXT)}
        for name in ("b", "", "a"):
            model.use(name)
            found[name] = model.loss(TEXT)
        assert model.generate("of", max_tokens=3, temperature=0)
        found["run"] = load_model(str(root / "run"), **given).loss(TEXT)
        found["decoded run"] = load_model(str(root / "run"), base="", dense_base="", **given).loss(TEXT)
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_several_take_turns_on_one_base(written: tuple[Path, dict[str, float]], num_ranks: int) -> None:
    root, expected = written
    for found in run_ranks(num_ranks, losses, root):
        names = {"first": "a", "run": "a", "decoded run": "a"}
        for name, loss in found.items():
            assert loss == pytest.approx(expected[names.get(name, name)], rel=1e-12), name
    assert len(set(expected.values())) == 3


def shown(_mesh: Mesh, root: Path) -> str:
    out = io.StringIO()
    words = ["generate", str(root / "model"), "--adapter", str(root / "a"), str(root / "b"), "--base", "nf4"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(FoundModel, "vocabulary", lambda _, _tokenizer: ByteVocabulary())
        assert main([*words, "--prompt", "of", "--max-tokens", "4", "--device", "cpu"]) == 0
    return out.getvalue()


def test_the_command_shows_the_text_of_each(written: tuple[Path, dict[str, float]]) -> None:
    root, _ = written
    first, second = run_alone(shown, root).removeprefix(f"=== {root / 'a'}\n").split(f"=== {root / 'b'}\n")
    assert first.startswith("of")
    assert second.startswith("of")
    assert first != second


def test_what_is_refused(written: tuple[Path, dict[str, float]], tmp_path: Path) -> None:
    root, _ = written
    found = find_model(root / "model")
    with pytest.raises(ConfigError, match="'a' and 'n' differ in rank, scale or targets"):
        Adapters(found, {"a": str(root / "a"), "n": str(root / "narrow")})
    with pytest.raises(ConfigError, match="has adapters of its own"):
        Adapters(find_model(root / "run"), {"a": str(root / "a")})
    with pytest.raises(CheckpointError, match=r"an adapter with use_dora = True is not supported"):
        adapter_lora(root / "dora", found.shapes.model)
    with pytest.raises(ConfigError, match="there is no adapter 'c'; there are a"):
        Adapters(found, {"a": str(root / "a")}).put("c", torch.nn.Linear(1, 1))
    other = tmp_path / "other"  # tests share the folders of `root`
    other.mkdir()
    (other / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "target_modules": ["lm_head"]}')
    with pytest.raises(CheckpointError, match="targets lm_head; ours are q_proj"):
        adapter_lora(other, found.shapes.model)
