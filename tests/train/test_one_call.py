"""A run as one call: presets, files, folders and configurations, and all mistakes at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_tiny

import moeclipse
from moeclipse.core.config import to_flat, with_values
from moeclipse.core.errors import ConfigError
from moeclipse.hf.folder import HfFolder
from moeclipse.testing.run_ranks import run_alone
from moeclipse.train.config import TrainConfig
from moeclipse.train.one_call import configured, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "olmoe"
    run_alone(lambda _: write_tiny("olmoe", path, vocab_size=256))
    return path


def test_a_folder_is_enough(folder: Path) -> None:
    """Nobody has to repeat what config.json says."""
    config = with_values(TrainConfig(), {"model.from_hf": str(folder), "run.steps": 3})
    flat = to_flat(config)
    assert {key: flat[key] for key in HfFolder.open(folder).values} == HfFolder.open(folder).values
    assert config.run.steps == 3
    with pytest.raises(ConfigError, match=r"model.d_model \(17\) contradicts .*; leave it out"):
        with_values(TrainConfig(), {"model.from_hf": str(folder), "model.d_model": 17})


def test_a_name_of_the_hub_says_how_it_is_downloaded() -> None:
    wanted = "hf download allenai/OLMoE-1B-7B --local-dir OLMoE-1B-7B"
    for call in (
        lambda: with_values(TrainConfig(), {"model.from_hf": "allenai/OLMoE-1B-7B"}),
        lambda: configured("allenai/OLMoE-1B-7B", {}),
    ):
        with pytest.raises(ConfigError, match=wanted):
            call()


def whole(_: Any, folder: Path, root: Path) -> dict[str, Any]:
    text = root / "text.txt"
    text.write_text("what was read is read again. " * 40)
    run = {"steps": 2, "dir": str(root), "name": "one", "device": "cpu", "sample": 0}
    data = {"files": [str(text)], "seq_len": 8, "batch_size": 2}
    return moeclipse.train(folder, run=run, data=data, model={"dtype": "float32"})  # type: ignore[operator]


def test_one_call_trains(folder: Path, tmp_path: Path) -> None:
    summary = run_alone(whole, str(folder), tmp_path)
    assert summary["directory"] == str(tmp_path / "one")
    assert (tmp_path / "one" / "export" / "config.json").is_file()


def test_sources(tmp_path: Path) -> None:
    assert configured("", {}).run.steps == 300
    assert configured("deepseek-v3-tiny", {"gate": {"top_k": 2}}).gate.top_k == 2
    file = tmp_path / "my.toml"
    file.write_text("[run]\nsteps = 7\n")
    assert configured(file, {"run": {"seed": 3}}).run.seed == 3
    assert configured(TrainConfig(), {"run": {"seed": 4}}).run.seed == 4


def test_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        train("tiny", gates={"top_k": 2}, gate={"top_kk": 2}, run=3)  # type: ignore[arg-type]
    assert len(caught.value.problems) == 3
    assert "did you mean gate.top_k?" in str(caught.value)
    with pytest.raises(ConfigError, match=r"top_k .* must be at most moe.num_experts"):
        train("tiny", gate={"top_k": 99})
    with pytest.raises(ConfigError, match="nor a preset"):
        train("tinyy")


def test_the_room_is_still_a_package() -> None:
    words = "import moeclipse, sys; assert callable(moeclipse.train); import moeclipse.train.presets as p; "
    words += "assert p.preset_names(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", words], check=True)
