"""fp8 blocks and mxfp4 are what transformers makes of them, slice by slice, in training and conversion."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import build, load
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moeclipse.cli.main import main
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.core.errors import CheckpointError
from moeclipse.hf.folder import HfFolder
from moeclipse.hf.quantised import Packed, packed_tensors
from moeclipse.ops.block_floats import expand_mxfp4
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.ranks import PatientRanks
from moeclipse.train.step.learner import Learner
from moeclipse.train.weights.hugging_face import load_folder

PARTS = [slice(None), slice(3, 20), slice(31, 33), slice(5, 5)]


def read_from(tensors: dict[str, torch.Tensor]) -> Any:
    return lambda key, index: tensors[key][index]


def random_fp8(rows: int, columns: int, block: int) -> dict[str, torch.Tensor]:
    values = (8 * torch.randn(rows, columns)).to(torch.float8_e4m3fn)
    return {"w": values, "w_scale_inv": torch.rand(-(-rows // block), -(-columns // block)) + 0.1}


def test_fp8_blocks_are_those_of_transformers() -> None:
    torch.manual_seed(0)
    tensors = random_fp8(32, 48, 8)
    theirs = Fp8Dequantize(None)._dequantize_one(*tensors.values(), output_dtype=torch.float32)
    packed = Packed(key="w", kind="fp8", shape=(32, 48), block=(8, 8))
    for rows in PARTS:
        for columns in PARTS:
            found = packed.expand((rows, columns), read_from(tensors))
            assert torch.equal(found, theirs[rows, columns]), (rows, columns)


def test_the_last_blocks_may_be_cut_short() -> None:
    tensors = random_fp8(37, 21, 8)
    found = Packed(key="w", kind="fp8", shape=(37, 21), block=(8, 8)).expand(
        (slice(6, 37), slice(9, 21)), read_from(tensors)
    )
    for i in range(6, 37):
        for j in range(9, 21):
            value = tensors["w"][i, j].float() * tensors["w_scale_inv"][i // 8, j // 8]
            assert found[i - 6, j - 9] == value


def random_mxfp4(experts: int, out: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = torch.randint(0, 256, (experts, out, width // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(110, 140, (experts, out, width // 32), dtype=torch.uint8)


def test_mxfp4_is_that_of_transformers() -> None:
    torch.manual_seed(1)
    blocks, scales = random_mxfp4(3, 40, 64)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(expand_mxfp4(blocks, scales).transpose(1, 2), theirs)
    packed = Packed(key="w", kind="mxfp4", shape=(3, 64, 40))
    read = read_from({"w_blocks": blocks, "w_scales": scales})
    for rows in PARTS:
        for columns in PARTS:
            assert torch.equal(packed.expand((1, rows, columns), read), theirs[1, rows, columns])
    with pytest.raises(ValueError, match="names an entry"):
        packed.expand((slice(None), slice(None)), read)


# --- folders ---------------------------------------------------------------------------------------------

SMALL = {"hidden_size": 32, "vocab_size": 256}
KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**SMALL, "moe_intermediate_size": 12},
    "gpt_oss": {**SMALL, "intermediate_size": 32},
}


def write_quantised(
    _mesh: Mesh, model_type: str, path: Path, block: int = 8, sizes: dict[str, Any] | None = None
) -> None:
    """A folder as it is shipped, and beside it (`plain`) what transformers expands it to, in bfloat16."""
    model = build(model_type, **{**KINDS[model_type], **(sizes or {})}).to(torch.bfloat16)
    model.save_pretrained(path / "plain")
    tensors, quantised = load_file(path / "plain" / "model.safetensors"), {}
    torch.manual_seed(5)
    for key, value in list(tensors.items()):
        if model_type == "deepseek_v3" and re.search(r"layers.*_proj.*weight$", key):
            made = random_fp8(*value.shape, block)
            quantised |= {key: made["w"], f"{key}_scale_inv": made["w_scale_inv"]}
            rows, columns = value.shape
            factors = made["w_scale_inv"].repeat_interleave(block, 0).repeat_interleave(block, 1)
            factors = factors[:rows, :columns]
            tensors[key] = (made["w"].float() * factors).bfloat16()
        elif key.endswith(("gate_up_proj", "experts.down_proj")):
            experts, width, out = value.shape
            blocks, scales = random_mxfp4(experts, out, width)
            quantised |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            tensors[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
        else:
            quantised[key] = value
    assert len(quantised) > len(tensors)
    save_file(tensors, path / "plain" / "model.safetensors", {"format": "pt"})
    (path / "shipped").mkdir()
    half = len(quantised) // 2
    names, files = sorted(quantised), {}
    for number, part in enumerate((names[:half], names[half:])):  # factors may be in another file
        file = f"model-{number}.safetensors"
        save_file({name: quantised[name].contiguous() for name in part}, path / "shipped" / file)
        files |= dict.fromkeys(part, file)
    (path / "shipped" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    config = json.loads((path / "plain" / "config.json").read_text())
    method = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block]}
    config["quantization_config"] = method if model_type == "deepseek_v3" else {"quant_method": "mxfp4"}
    (path / "shipped" / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    run_alone(write_quantised, request.param, path)
    return path


def test_every_tensor_reads_as_if_it_were_plain(folder: Path) -> None:
    plain, shipped = HfFolder.open(folder / "plain"), HfFolder.open(folder / "shipped")
    assert shipped.packed
    assert shipped.stored.keys() == plain.stored.keys()
    for name in plain.names:
        assert torch.equal(shipped.read(name).to(torch.bfloat16), plain.read(name)), name
        part = (5, plain.read(name).numel() - 3)
        assert torch.equal(shipped.read(name, *part).to(torch.bfloat16), plain.read(name, *part)), name
    for key in shipped.packed:
        assert torch.equal(shipped.whole(key).to(torch.bfloat16), plain.whole(key)), key


def begin(mesh: Mesh, path: Path, **values: Any) -> dict[str, torch.Tensor]:
    folder = HfFolder.open(path)
    given = {"model.from_hf": str(path), "model.dtype": "bfloat16", "data.batch_size": 4, **values}
    given["data.files"] = (str(path / "config.json"),)
    learner = Learner(with_values(TrainConfig(), {**folder.values, **given}), mesh)
    load_folder(learner, PatientRanks(mesh, 60))
    return {name: parameter.detach().clone() for name, parameter in learner.model.named_parameters()}


@pytest.mark.parametrize("axes", [{}, {"tp": 2}])
def test_a_run_begins_from_expanded_weights(folder: Path, axes: dict[str, int]) -> None:
    def both(mesh: Mesh) -> list[dict[str, torch.Tensor]]:
        values = {f"parallel.{axis}": size for axis, size in axes.items()}
        return [begin(mesh, folder / which, **values) for which in ("plain", "shipped")]

    for plain, shipped in run_ranks(2, both, **axes):
        assert all(torch.equal(shipped[name], value) for name, value in plain.items())


def logits(_mesh: Mesh, path: Path) -> torch.Tensor:
    with torch.no_grad():
        return load(path, torch.bfloat16)(input_ids=torch.arange(12)[None], use_cache=False).logits


def test_converted_and_back_it_is_a_plain_model(folder: Path, tmp_path: Path) -> None:
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    assert main(["convert", str(folder / "shipped"), ours, "--no-tokenizer"]) == 0
    assert main(["convert", ours, theirs]) == 0
    assert "quantization_config" not in json.loads((tmp_path / "theirs" / "config.json").read_text())
    found, expected = HfFolder.open(theirs), HfFolder.open(folder / "plain")
    for name in expected.names:
        assert torch.equal(found.read(name), expected.read(name)), name
    both = [run_alone(logits, path) for path in (Path(theirs), folder / "plain")]
    assert torch.equal(*both)


# --- blocks that are kept --------------------------------------------------------------------------------


def keep(mesh: Mesh, path: Path, kind: str, **values: Any) -> dict[str, torch.Tensor]:
    """The experts' matrices of a run whose base is kept as the folder has it, in bf16, and their codes."""
    folder = HfFolder.open(path)
    given = {"model.from_hf": str(path), "model.base": kind, "lora.rank": 2, "lora.targets": ("experts",)}
    given |= {"data.batch_size": 4, "data.files": (str(path / "config.json"),), **values}
    learner = Learner(with_values(TrainConfig(), {**folder.values, **given}), mesh)
    load_folder(learner, PatientRanks(mesh, 60))
    found = {}
    for layer in learner.layers:
        for name in ("up", "down"):
            frozen = getattr(layer.experts, name)
            numbers = frozen.numbers(torch.bfloat16).clone()
            for slot, expert in enumerate(layer.experts.ids):
                found[f"weight/layers.{layer.layer}.moe.experts.{expert}.{name}"] = numbers[slot]
    return found


@pytest.fixture(scope="module")
def large_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large")
    run_alone(write_quantised, "deepseek_v3", path, 128, {"moe_intermediate_size": 128})
    return path


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
def test_a_base_keeps_the_blocks_of_its_folder(
    request: pytest.FixtureRequest, kind: str, num_ranks: int, tmp_path: Path
) -> None:
    if kind == "fp8":
        path = request.getfixturevalue("large_blocks")
    else:
        path = tmp_path
        run_alone(write_quantised, "gpt_oss", path)

    def unexpanded(mesh: Mesh) -> dict[str, torch.Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("moeclipse.train.weights.base.encode", None)  # nothing is quantised a second time
            return keep(mesh, path / "shipped", kind)

    plain, seen = HfFolder.open(path / "plain"), set()
    for rank in run_ranks(num_ranks, unexpanded):
        seen |= rank.keys()
        for name, numbers in rank.items():
            assert torch.equal(numbers.flatten(), plain.read(name)), name
    assert seen == {name for name in plain.names if re.search(r"experts\.\d+\.(up|down)$", name)}


@pytest.mark.parametrize(
    ("block", "width", "text"),
    [(8, 128, "its blocks are 8 x 8, not 128 x 128"), (128, 12, "its 12 rows end inside a block of 128")],
)
def test_blocks_that_cannot_be_kept_are_refused(tmp_path: Path, block: int, width: int, text: str) -> None:
    run_alone(write_quantised, "deepseek_v3", tmp_path, block, {"moe_intermediate_size": width})

    def refused(mesh: Mesh) -> str:
        with pytest.raises(CheckpointError) as error:
            keep(mesh, tmp_path / "shipped", "fp8")
        return str(error.value)

    assert text in run_alone(refused)


# --- what is refused -------------------------------------------------------------------------------------

FP8 = {"w": ((16, 16), "F8_E4M3"), "w_scale_inv": ((2, 2), "F32")}
MXFP4 = {"w_blocks": ((2, 8, 1, 16), "U8"), "w_scales": ((2, 8, 1), "U8")}
BLOCK = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}}


@pytest.mark.parametrize(
    ("shapes", "theirs", "text"),
    [
        ({"w": FP8["w"]}, BLOCK, "w is quantised, but w_scale_inv is missing"),
        (
            {"w_scale_inv": FP8["w_scale_inv"]},
            BLOCK,
            "w_scale_inv has the factors of a tensor that is missing",
        ),
        ({"w": ((16, 16), "BF16"), "w_scale_inv": FP8["w_scale_inv"]}, {}, "is not quantised"),
        ({"w": ((17, 16), "F8_E4M3"), "w_scale_inv": ((2, 2), "F32")}, BLOCK, "needs [3, 2]"),
        ({"w": ((2, 8, 8), "F8_E4M3"), "w_scale_inv": ((2, 1, 1), "F32")}, BLOCK, "a stack of fp8 matrices"),
        ({"w_blocks": MXFP4["w_blocks"]}, {}, "w_blocks is quantised, but w_scales is missing"),
        ({"w_scales": MXFP4["w_scales"]}, {}, "w_scales has the factors of a tensor that is missing"),
        ({**MXFP4, "w_scales": ((2, 8, 2), "U8")}, {}, "needs [2, 8, 1]"),
        ({**MXFP4, "w_scales": ((2, 8, 1), "F32")}, {}, "is not laid out as mxfp4"),
        ({}, {"quantization_config": {"quant_method": "awq"}}, "quantised by 'awq', and only fp8 and mxfp4"),
    ],
)
def test_halves_are_refused_in_one_line(shapes: Any, theirs: Any, text: str) -> None:
    with pytest.raises(CheckpointError) as error:
        packed_tensors(shapes, theirs, "model")
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_with_half_a_tensor_is_refused_before_anything_is_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = json.loads((folder / "shipped" / "model.safetensors.index.json").read_text())
    lost = next(key for key in index["weight_map"] if key.endswith(("_scale_inv", "_scales")))
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        tensors |= load_file(folder / "shipped" / file)
    del tensors[lost]
    (tmp_path / "half").mkdir()
    save_file(tensors, tmp_path / "half" / "model.safetensors")
    (tmp_path / "half" / "config.json").write_bytes((folder / "shipped" / "config.json").read_bytes())
    assert main(["convert", str(tmp_path / "half"), str(tmp_path / "out"), "--no-tokenizer"]) == 2
    told = capsys.readouterr().err.strip()
    assert f"{lost} is missing" in told
    assert "\n" not in told
    assert not (tmp_path / "out").exists()
