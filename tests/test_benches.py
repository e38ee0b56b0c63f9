"""Every bench has a smallest size (`--smoke`) that runs through and writes figures, whatever they say.

A bench stands in FIGURES with the keys of its JSON that must hold positive numbers. Where a machine lacks
what a bench needs, it says so in one line and ends with status 2: GPU_ALONE and ROOT_ALONE name those that
may.
"""

from __future__ import annotations

import ast
import importlib
import json
import math
import runpy
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from code_blocks import imports_of

BENCH = Path(__file__).parent.parent / "bench"
FIGURES: dict[str, tuple[str, ...]] = {
    "all_reduce": ("gloo", "one stage", "all-to-all"),
    "base_loss": ("first_loss", "bf16", "nf4"),
    "data": ("ours_s", "library_s", "read_ms", "step_ms"),
    "decode": ("tokens_per_s", "ms_a_token", "first_s", "first_call_s"),
    "faults": ("named", "back"),
    "fb_overlap": ("step_ms", "comm_ms", "speedup"),
    "first_run": ("of_all", "alike"),
    "hf_experts": ("ms", "block", "step"),
    "hf_load": ("seconds", "peak"),
    "integrity_cost": ("step_s", "check_s", "save_s", "share"),
    "host_time": ("step_ms", "host_ms", "launches"),
    "device_wire": ("step_ms", "launches"),
    "layer_host": ("ms", "over_plain"),
    "lora": ("step_ms", "over_peft_qv", "over_peft_experts"),
    "moe_layer": ("forward_ms", "both_ms"),
    "moe_train": ("step_ms", "tokens_per_s", "train_speedup"),
    "one_gpu": ("step_ms", "tokens_per_s", "predicted_ms"),
    "optim_states": ("fp32", "narrowest"),
    "overlap": ("compute", "communication", "blocking", "chosen", "in units", "smart + shadows"),
    "placebo": ("places", "step_ms"),
    "placement": ("balance", "ms", "step_ms", "first", "weights", "memory_loss_difference"),
    "plan": ("search_s", "peak_mb", "ratio"),
    "plan_local": ("predicted_ms", "measured_ms", "ratio"),
    "predicted": ("predicted_ms", "measured_ms", "ratio"),
    "report": ("read_s", "page_s", "page_mb", "name_us", "traced_ms"),
    "saving": ("step_ms", "stall_ms", "whole_ms", "check_ms"),
    "schedules": ("makespan", "spent_s", "makespan_s"),
    "shaped_network": ("got_mbit",),
    "skew": ("static", "shadows", "replicas", "planned", "auto", "plan_s"),
    "skew_steps": ("step_ms", "throughput", "mb", "fullest"),
    "tensor_parallel": ("step_ms", "comm_ms", "product_ms"),
    "wgrad": ("ms", "tflops"),
    "wire_layer": ("one", "blocking", "smart", "gathered"),
    "whole_step": ("step_ms", "tokens_per_s"),
}
GPU_ALONE = ("host_time", "device_wire", "wire_layer")
ROOT_ALONE = ("shaped_network",)
MAY_BE_ZERO = ("memory_loss_difference",)
LONGEST_S = 1200.0
"""On a machine that others use; a quiet one needs seconds."""


def figures(found: Any, key: str) -> Iterator[float]:
    """All numbers of a JSON value that stand under this key, in lists as well."""
    if isinstance(found, dict):
        for name, value in found.items():
            values = value if isinstance(value, list) else [value]
            if name == key:
                yield from (float(one) for one in values if isinstance(one, int | float))
            yield from figures(value, key)
    elif isinstance(found, list):
        for value in found:
            yield from figures(value, key)


def missing(found: Any, keys: tuple[str, ...]) -> list[str]:
    """Keys without a figure, or with one that is none."""
    wrong = []
    for key in keys:
        numbers = list(figures(found, key))
        least = 0.0 if key in MAY_BE_ZERO else math.ulp(0.0)
        if not numbers or not all(math.isfinite(one) and one >= least for one in numbers):
            wrong.append(f"{key}: {numbers}")
    return wrong


def smoke(name: str, folder: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    """The command as anybody types it, and what it wrote."""
    file = folder / f"{name}.json"
    command = [sys.executable, str(BENCH / f"{name}.py"), "--smoke", "--json", str(file), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, cwd=folder)
    return done, json.loads(file.read_text()) if file.exists() else None


def excuse(name: str) -> str | None:
    """Why this bench cannot run on this machine."""
    if name in GPU_ALONE and not torch.cuda.device_count():
        return "no CUDA device"
    if name in ROOT_ALONE:
        why: str | None = runpy.run_path(str(BENCH / "shaped_network.py"))["why_not"]()
        return why
    return None


@pytest.mark.full
@pytest.mark.parametrize("name", FIGURES)
def test_a_bench_runs_in_its_smallest_size(name: str, tmp_path: Path) -> None:
    reason = excuse(name)
    done, found = smoke(name, tmp_path)
    if reason is not None:
        assert done.returncode == 2, done.stderr
        assert reason in done.stderr
        assert len(done.stderr.splitlines()) == 1
        return
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert not missing(found, FIGURES[name]), found
    assert any(character.isdigit() for character in done.stdout), "a table"


def test_what_benches_and_examples_import_is_there() -> None:
    """They run in the long part alone; a name that has changed is seen at once."""
    missing = [
        f"{path.name}: {module} has no {name}"
        for folder in (BENCH, BENCH.parent / "examples")
        for path in folder.glob("*.py")
        for module, name in imports_of(path.read_text())
        if not hasattr(importlib.import_module(module), name) and find_spec(f"{module}.{name}") is None
    ]
    assert not missing


def test_every_bench_is_in_the_list() -> None:
    assert set(FIGURES) == {path.stem for path in BENCH.glob("[a-z]*.py")}
    assert set(GPU_ALONE) | set(ROOT_ALONE) < set(FIGURES)


def smallest_of(tree: ast.Module) -> tuple[set[str], set[str]]:
    """(what `--smoke` sets, the options there are), read from the source of a bench."""
    assigned = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    parsers = [call for call in calls if ast.unparse(call.func).endswith("BenchParser")]
    assert len(parsers) == 1, "one BenchParser, which knows --smoke and --json"
    (value,) = [keyword.value for keyword in parsers[0].keywords if keyword.arg == "smoke"]
    value = assigned[value.id] if isinstance(value, ast.Name) else value
    assert isinstance(value, ast.Dict)
    added = [
        ast.literal_eval(call.args[0]) for call in calls if ast.unparse(call.func) == "parser.add_argument"
    ]
    options = {name.removeprefix("--").replace("-", "_") for name in added}
    return {ast.literal_eval(key) for key in value.keys if key is not None}, options


@pytest.mark.parametrize("name", FIGURES)
def test_a_bench_knows_its_smallest_size(name: str) -> None:
    text = (BENCH / f"{name}.py").read_text()
    sets, options = smallest_of(ast.parse(text))
    assert sets <= options, "a smallest size of an option that is not there"
    assert "argparse.ArgumentParser(" not in text
    assert "--smoke" in (ast.get_docstring(ast.parse(text)) or ""), "the first lines say so"


def test_a_missing_option_is_seen() -> None:
    source = 'parser = BenchParser(__doc__, smoke={"repeats": 1})\nparser.add_argument("--steps-long")'
    assert smallest_of(ast.parse(source)) == ({"repeats"}, {"steps_long"})


def test_what_is_said_counts_beside_smoke(capsys: pytest.CaptureFixture[str]) -> None:
    shared = runpy.run_path(str(BENCH / "_smoke.py"))
    parser = shared["BenchParser"]("What it is.\n\nMore.", smoke={"repeats": 1, "steps": 2})
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, default=8)
    assert vars(parser.parse_args(["--steps", "5", "--smoke"])) == {
        "smoke": True,
        "json": None,
        "repeats": 1,
        "steps": 5,
    }
    wrong = shared["BenchParser"]("", smoke={"nobody": 1})
    with pytest.raises(AssertionError, match="nobody"):
        wrong.parse_args(["--smoke"])
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    assert "What it is." in capsys.readouterr().out


def test_figures_that_are_none_are_seen() -> None:
    found = {"rows": [{"ms": 1.5, "name": "a"}, {"ms": math.nan}], "loss": [2.0, 3], "zero": 0.0}
    assert missing(found, ("loss",)) == []
    assert [line.partition(":")[0] for line in missing(found, ("ms", "zero", "nothing"))] == [
        "ms",
        "zero",
        "nothing",
    ]


def test_a_forced_gate_scatters_a_tokens_experts_as_chance_does() -> None:
    """Four ranks of four experts: the other one of a token stands on its rank in three cases of fifteen."""
    bench = runpy.run_path(str(BENCH / "skew_steps.py"))
    ids_TK = bench["dealt"](np.arange(15 * 16))
    assert np.bincount(ids_TK.ravel()).tolist() == [30] * 16
    assert (ids_TK[:, 0] // 4 == ids_TK[:, 1] // 4).mean() == pytest.approx(3 / 15)
    assert (ids_TK[:, 0] != ids_TK[:, 1]).all()
