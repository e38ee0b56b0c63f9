"""Adapters are those of peft: gradients at every layout, files in and out, and what they come to merged."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from test_compose import values_of
from tiny_models import in_float64, load, peft, write_tiny

from moeclipse.cli.main import main
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import to_toml, with_values
from moeclipse.core.errors import CheckpointError
from moeclipse.hf.families import FAMILIES, Family
from moeclipse.hf.folder import HfFolder
from moeclipse.hf.names import EACH, Names
from moeclipse.hf.peft import CONFIG, WEIGHTS, read_adapter
from moeclipse.model.lora_config import LoraConfig
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.ranks import PatientRanks
from moeclipse.train.step.learner import Learner
from moeclipse.train.weights.base_rules import lora_problems
from moeclipse.train.weights.hugging_face import load_folder

MODULES = [f"{name}_proj" for name in "qkvo"]
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MODEL = "model.safetensors"
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
SHARDED = {"parallel.tp": 2, "moe.expert_tp": "sharded"}
LAYOUTS: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "1": (1, {}, {}),
    "ep2": (2, {}, {}),
    "ep2-shadows": (2, {}, {"moe.schedule": "smart", "moe.shadow": (0, 3)}),
    "tp2": (2, {"tp": 2}, {"parallel.tp": 2, "parallel.sequence_parallel": False}),
    "tp2-sequence": (2, {"tp": 2}, {"parallel.tp": 2, "parallel.sequence_parallel": True}),
    "pp2": (2, {"pp": 2}, {"parallel.pp": 2}),
    "tp2-sharded": (2, {"tp": 2}, {**SHARDED, "parallel.sequence_parallel": False}),
    "dp2-tp2-sharded": (4, {"dp": 2, "tp": 2}, {**SHARDED, "parallel.dp": 2}),
    "ep2-tp2-sharded": (4, {"tp": 2}, {**SHARDED, "moe.schedule": "smart", "moe.shadow": (0, 3)}),
    "pp2-tp2-sharded": (4, {"pp": 2, "tp": 2}, {**SHARDED, "parallel.pp": 2}),
}


def wrapped(path: Path, modules: list[str], parameters: list[str], rslora: bool) -> Any:
    config = peft.LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=modules,
        target_parameters=parameters or None,
        task_type="CAUSAL_LM",
        use_rslora=rslora,
    )
    return peft.get_peft_model(load(path), config)


def write(
    _mesh: Mesh,
    root: Path,
    parameters: list[str] = PARAMETERS,
    rslora: bool = False,
    model_type: str = "qwen3_moe",
    modules: list[str] = MODULES,
    sizes: dict[str, Any] | None = None,
) -> torch.Tensor:
    """A model, an adapter, and the adapter's gradients as another adapter; logits of the batch."""
    write_tiny(model_type, root / "model", vocab_size=256, **(sizes or {}))
    tokens = np.random.default_rng(0).integers(0, 256, 600).astype(np.uint16)
    np.save(root / "tokens.npy", tokens)
    with in_float64():
        model = wrapped(root / "model", modules, parameters, rslora).double()
        generator = torch.Generator().manual_seed(7)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                random = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.data.copy_(0.3 * random)
        model.save_pretrained(root / "adapter")
        config = configuration(root)
        inputs, targets = batch(Learner(config, Mesh.single()))
        logits = model(input_ids=inputs, use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.grad.clone()
        model.save_pretrained(root / "gradients")
    return logits.detach()


def configuration(root: Path, **values: Any) -> TrainConfig:
    given = {
        "model.from_hf": str(root / "model"),
        "model.dtype": "float64",
        "gate.balance_loss": 0.0,
        "parallel.check_launches": True,
        "data.files": (str(root / "tokens.npy"),),
        "data.seq_len": 8,
        "data.batch_size": 4,
        "optim.accumulate": 2,
        "lora.rank": 3,
        "lora.alpha": 6.0,
        "lora.adapter": str(root / "adapter"),
    }
    return with_values(TrainConfig(), {**HfFolder.open(root / "model").values, **given, **values})


def batch(learner: Learner) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [learner.batches.microbatch(0, m, 0, 1) for m in range(2)]
    return torch.cat([part.inputs for part in parts]), torch.cat([part.targets for part in parts])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peft")
    torch.save(run_alone(write, path), path / "logits.pt")
    return path


def begun(mesh: Mesh, config: TrainConfig) -> Learner:
    learner = Learner(config, mesh)
    load_folder(learner, PatientRanks(mesh, 60))
    return learner


def gradients(
    mesh: Mesh, config: TrainConfig, as_kernels: bool = False
) -> list[tuple[str, int, torch.Tensor]]:
    """Of the adapters; then a step, after which the base is what it was.

    `as_kernels`: experts are computed as kernels compute them, by the kernels' references.
    """
    learner = begun(mesh, config)
    for layer in learner.layers:
        layer.fused = as_kernels
    learner.backward(0)
    found = []
    for bucket in learner.buckets:
        shard = bucket.reduced()
        found += [
            (s.entry.name, s.start, shard[s.offset : s.offset + s.length].clone()) for s in bucket.segments()
        ]
    base = {name: p.detach().clone() for name, p in learner.model.named_parameters() if "lora_" not in name}
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters() if "lora_" in name}
    learner.step(0)
    now = dict(learner.model.named_parameters())
    assert all(torch.equal(now[name], value) for name, value in base.items())
    assert all(not torch.equal(now[name], value) for name, value in before.items())
    return found


@pytest.mark.parametrize("as_kernels", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_peft(root: Path, layout: str, as_kernels: bool) -> None:
    num_ranks, axes, values = LAYOUTS[layout]
    config = configuration(root, **values)
    compare(root, config, run_ranks(num_ranks, gradients, config, as_kernels, **axes))


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("latent")
    run_alone(write, path, PARAMETERS, False, "deepseek_v3", LATENT)
    return path


@pytest.mark.parametrize("layout", ["tp2-sequence", "ep2", "tp2", "pp2", "dp2-tp2-sharded"])
def test_gradients_in_latent_attention(latent: Path, layout: str) -> None:
    num_ranks, axes, values = LAYOUTS[layout]
    config = configuration(latent, **values)
    compare(latent, config, run_ranks(num_ranks, gradients, config, **axes))


def test_one_projection_of_latent_attention_and_full_queries(tmp_path: Path) -> None:
    run_alone(write, tmp_path, [], False, "deepseek_v2", ["q_proj", "kv_b_proj"], {"q_lora_rank": None})
    config = configuration(tmp_path, **{"lora.targets": ("q", "kv_up")})
    compare(tmp_path, config, [run_alone(gradients, config)])
    run = str(tmp_path / "run")
    run_alone(saved, config, run)
    assert main(["convert", run, str(tmp_path / "out"), "--adapter"]) == 0
    same_tensors(tmp_path / "out" / WEIGHTS, tmp_path / "adapter" / WEIGHTS, 0)


@pytest.mark.parametrize(("projection", "rslora"), [("up", False), ("down", True)])
def test_one_projection_of_experts_and_its_scale(tmp_path: Path, projection: str, rslora: bool) -> None:
    parameters = [name for name in PARAMETERS if projection in name]
    run_alone(write, tmp_path, parameters, rslora)
    values = {"lora.targets": (*"qkvo", projection), "lora.rslora": rslora}
    config = configuration(tmp_path, **values)
    for as_kernels in (False, True):
        compare(tmp_path, config, [run_alone(gradients, config, as_kernels)])
    other = with_values(config, {"lora.rslora": not rslora}).lora
    with pytest.raises(CheckpointError, match=r"set lora\.rslora to it"):
        read_adapter(tmp_path / "adapter", config.model, config.moe, other)


def compare(
    root: Path, config: TrainConfig, ranks: list[list[tuple[str, int, torch.Tensor]]], names: Names = EACH
) -> None:
    theirs = read_adapter(root / "gradients", config.model, config.moe, config.lora, names)
    seen: dict[str, int] = {}
    for rank in ranks:
        for name, start, values_here in rank:
            key = f"weight/{name.split('[')[0]}"
            whole = theirs[key]
            expected = whole.flatten()
            if "[" in name:
                first, stop = map(int, name.split("[:, ")[1].rstrip("]").split(":"))
                expected = whole[:, first:stop].flatten()
            expected = expected[start : start + values_here.numel()]
            apart = float((values_here - expected).abs().max())
            assert apart <= 1e-12 * float(whole.abs().max()), (name, apart)  # no rows: zero on both sides
            seen[key] = seen.get(key, 0) + values_here.numel()
    assert seen == {name: value.numel() for name, value in theirs.items()}


def saved(mesh: Mesh, config: TrainConfig, folder: str) -> None:
    learner = begun(mesh, config)
    learner.save(Path(folder) / "checkpoints", 1)


def theirs(_mesh: Mesh, model: Path, adapter: Path | None, ids: torch.Tensor) -> torch.Tensor:
    with in_float64(), torch.no_grad():
        loaded = load(model)
        loaded = loaded if adapter is None else peft.PeftModel.from_pretrained(loaded, adapter)
        return loaded.double()(input_ids=ids, use_cache=False).logits


def test_files_go_out_as_they_came_in_and_merged_they_are_one_model(root: Path, tmp_path: Path) -> None:
    config, run = configuration(root), str(tmp_path / "run")
    run_ranks(2, saved, with_values(config, {"parallel.tp": 2}), run, tp=2)
    assert main(["convert", run, str(tmp_path / "out"), "--adapter"]) == 0
    assert main(["convert", run, str(tmp_path / "merged")]) == 0
    given, found = (load_file(path / WEIGHTS) for path in (root / "adapter", tmp_path / "out"))
    assert given.keys() == found.keys()
    assert all(torch.equal(found[key], value) for key, value in given.items())
    ids = torch.randint(0, 256, (2, 8), generator=torch.Generator().manual_seed(2))
    expected = run_alone(theirs, root / "model", root / "adapter", ids)
    assert difference(run_alone(theirs, root / "model", tmp_path / "out", ids), expected) == 0
    assert difference(run_alone(theirs, tmp_path / "merged", None, ids), expected) <= 1e-12
    assert difference(run_alone(theirs, root / "model", None, ids), expected) > 1e-3


def peft_merge(_mesh: Mesh, model: Path, adapter: Path, out: Path) -> None:
    with in_float64():
        peft.PeftModel.from_pretrained(load(model), adapter).merge_and_unload().save_pretrained(out)


BESIDE: dict[str, tuple[str, ...]] = {
    "q, k, v, o; experts": (*MODULES,),
    "q, kv, o of latent attention; experts": (*LATENT,),
    "experts": (),
}
"""What has adapters, as docs/families.md says it, and what PEFT calls the part of attention."""


def beside(family: Family) -> str:
    """The first of `BESIDE` that a run of the family takes; mixers stand where attention would."""
    values = values_of(family.model_type)
    whole = with_values(TrainConfig(), {key: values[key] for key in values if key != "model.from_hf"})
    whole = with_values(whole, {"lora.rank": 3})
    told = [*lora_problems(whole.lora, whole.model, whole.moe, whole.placement, 1)]
    assert all("set lora.targets = experts" in text for text in told)
    names = [*BESIDE]
    return names[2] if told else names[whole.model.attention == "mla"]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_files_gradients_and_merged_weights_of_every_family(tmp_path: Path, family: Family) -> None:
    parameters = [f"{family.names.experts_module}.{name}" for name in ("gate_up_proj", "down_proj")]
    modules = [*BESIDE[beside(family)]]
    run_alone(write, tmp_path, parameters, False, family.model_type, modules)
    values = {} if modules else {"lora.targets": ("experts",)}
    config, run = configuration(tmp_path, **values), str(tmp_path / "run")
    for as_kernels in (False, True):
        compare(tmp_path, config, [run_alone(gradients, config, as_kernels)], family.names)
    run_alone(saved, config, run)
    assert main(["convert", run, str(tmp_path / "out"), "--adapter"]) == 0
    same_tensors(tmp_path / "out" / WEIGHTS, tmp_path / "adapter" / WEIGHTS, 0)
    given, found = (json.loads((tmp_path / name / CONFIG).read_text()) for name in ("adapter", "out"))
    for key in ("target_modules", "target_parameters"):
        assert sorted(found[key]) == sorted(given[key])
    assert main(["convert", run, str(tmp_path / "merged")]) == 0
    run_alone(peft_merge, tmp_path / "model", tmp_path / "out", tmp_path / "theirs")
    words = family.names.others[0].words if family.names.others else ()  # as transformers writes it
    same_tensors(tmp_path / "merged" / MODEL, tmp_path / "theirs" / MODEL, 1e-12, words)


def test_the_page_says_what_of_each_family_has_adapters() -> None:
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
    rows = dict(re.findall(r"^\| adapters beside (.+) \| (.+) \|$", page, re.MULTILINE))
    told = {name: {f.model_type for f in FAMILIES if beside(f) == name} for name in BESIDE}
    assert {name: set(re.findall(r"`(\w+)`", cell)) for name, cell in rows.items()} == told


@pytest.fixture(scope="module")
def behind_a_gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gate")
    run_alone(write, path, PARAMETERS, False, "afmoe")
    return path


@pytest.mark.parametrize("layout", ["ep2", "tp2-sequence", "pp2"])
def test_gradients_beside_attention_behind_a_gate(behind_a_gate: Path, layout: str) -> None:
    num_ranks, axes, values = LAYOUTS[layout]
    config = configuration(behind_a_gate, **values)
    compare(behind_a_gate, config, run_ranks(num_ranks, gradients, config, **axes))


def same_tensors(path: Path, other: Path, bound: float, words: tuple[tuple[str, str], ...] = ()) -> None:
    found, expected = load_file(path), load_file(other)
    for word, theirs_word in words:
        found = {key.replace(word, theirs_word): value for key, value in found.items()}
    assert found.keys() == expected.keys()
    apart = {key: difference(found[key], value) for key, value in expected.items()}
    assert max(apart.values()) <= bound, apart


def test_fresh_adapters_change_nothing(root: Path) -> None:
    def losses(mesh: Mesh) -> list[float]:
        plain = configuration(root, **{"lora.rank": 0, "lora.adapter": ""})
        fresh = configuration(root, **{"lora.adapter": ""})
        return [float(begun(mesh, config).step(0)["loss"]) for config in (plain, fresh)]

    first, second = run_alone(losses)
    assert first == second


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"lora_dropout": 0.1}, "lora_dropout = 0.1 is not supported"),
        ({"r": 4}, "says r = 4 and lora_alpha = 6"),
        ({"peft_type": "LOHA"}, "peft_type = 'LOHA' is not supported"),
    ],
)
def test_adapters_that_are_not_read(root: Path, tmp_path: Path, change: dict[str, Any], text: str) -> None:
    told = json.loads((root / "adapter" / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(told | change))
    (tmp_path / WEIGHTS).write_bytes((root / "adapter" / WEIGHTS).read_bytes())
    config = configuration(root)
    with pytest.raises(CheckpointError) as error:
        read_adapter(tmp_path, config.model, config.moe, config.lora)
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_tensors_of_another_shape_are_refused(root: Path, tmp_path: Path) -> None:
    """A as high as weights are wide: files of older releases of peft, which took [out, in] for [in, out]."""
    tensors = load_file(root / "adapter" / WEIGHTS)
    halves = [f"base_model.model.model.layers.1.mlp.experts.lora_{half}.weight" for half in "AB"]
    a, b = (tensors[key] for key in halves)
    save_file(tensors | {halves[0]: b.T.contiguous(), halves[1]: a.T.contiguous()}, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_bytes((root / "adapter" / CONFIG).read_bytes())
    config = configuration(root)
    with pytest.raises(CheckpointError, match=r"lora_A\.weight has the shape \[12, 16\], .* be \[12, 6\]"):
        read_adapter(tmp_path, config.model, config.moe, config.lora)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda t: {**t, min(t): torch.zeros(3, 5)}, "has the shape [3, 5], which must be"),
        (lambda t: {key: t[key] for key in t if key != min(t)}, "lora.targets and the adapter differ"),
        (lambda t: {**t, "more": torch.zeros(1)}, "holds more, which lora.targets does not name"),
        (lambda t: None, "is no whole adapter"),
    ],
)
def test_an_adapter_that_does_not_fit_is_told_before_a_run_has_a_folder(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Any, text: str
) -> None:
    shutil.copytree(root / "adapter", tmp_path / "adapter")
    tensors = damage(load_file(root / "adapter" / WEIGHTS))
    if tensors is None:
        (tmp_path / "adapter" / WEIGHTS).write_bytes(b"\x07")
    else:
        save_file(tensors, tmp_path / "adapter" / WEIGHTS)
    config = with_values(configuration(root), {"lora.adapter": str(tmp_path / "adapter")})
    file, runs = tmp_path / "my.toml", tmp_path / "runs"
    file.write_text(to_toml(with_values(config, {"run.dir": str(runs), "run.device": "cpu"})))
    assert main(["train", str(file), "--ranks", "1"]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.startswith("error: lora.adapter: ")
    assert error.count("\n") == 1
    assert not runs.exists()


def test_other_targets_and_broken_files(root: Path, tmp_path: Path) -> None:
    config = configuration(root)
    fewer = LoraConfig(rank=3, alpha=6.0, targets=("q", "experts"))
    with pytest.raises(CheckpointError, match=r"which lora\.targets does not name"):
        read_adapter(root / "adapter", config.model, config.moe, fewer)
    with pytest.raises(CheckpointError, match="is no whole adapter"):
        read_adapter(tmp_path, config.model, config.moe, config.lora)
