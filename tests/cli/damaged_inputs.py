"""More sound files of which one is damaged at a time: what commands are given, and what is kept for later."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from moeclipse.balance.config import PlacementConfig
from moeclipse.balance.placement import Placement
from moeclipse.balance.policy import policy_problems
from moeclipse.cli.failures import read_failures
from moeclipse.cli.main import main
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import to_toml, with_values
from moeclipse.core.errors import ConfigError
from moeclipse.hf.names import tensor_table
from moeclipse.moe.config import ExchangeConfig, GateConfig
from moeclipse.moe.layer import MoE
from moeclipse.moe.tune.granularity import Granularity
from moeclipse.ops import tuning
from moeclipse.train.checkpoints.checkpoint import OneRank, Piece, save
from moeclipse.train.config import DataConfig, TrainConfig
from moeclipse.train.data.corpus import open_corpus
from moeclipse.train.presets import load
from moeclipse.train.run.before_ranks import start_problems
from moeclipse.train.run.choices import Choices
from moeclipse.train.run.incidents import copy_ops, step_of
from moeclipse.train.run.resolve_auto import settle
from moeclipse.train.run.saving import read_best
from moeclipse.train.weights import staging
from moeclipse.train.weights.convert import from_hf, to_hf
from moeclipse.train.weights.open_model import find_model, open_weights_of, tokenizer_parts
from probed import PROBE

sys.path.append(str(Path(__file__).parent.parent / "report"))
from made_runs import CHOICES, make_run, write_loads

Reader = Callable[[Path], Any]
Readers = dict[str, tuple[Path, Reader]]
CPU = torch.device("cpu")
PRICES = {**CHOICES["placement"], "parameter_bytes": 10.0, "gradient_bytes": 20.0, "doubt": 0.1}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def command(*words: object) -> None:
    """As on a terminal; what it refuses is an error of ours."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as told:
        code = main([str(word) for word in words])
    if code:
        raise ConfigError(told.getvalue() or f"it left with {code}")


def make_plans(folder: Path) -> Readers:
    """Placements, policies, tiles, and what commands are pointed at."""
    folder.mkdir()
    run = make_run(folder / "run", steps=6, exposed_ms=1e4)
    counts = torch.tensor([[[3000, 3000, 1000, 1000]]]).expand(6, 1, 4).numpy()
    write_loads(run, counts, 2)
    (run / "choices.json").write_text(json.dumps({**CHOICES, "placement": PRICES}))
    names = ("slots.json", "current.json", "policy.py", "tiles.json", "my.toml")
    files = {name: folder / name for name in names}
    files["slots.json"].write_text(Placement(((0, 1), (1, 2))).to_json())
    files["current.json"].write_text(Placement(((0, 1), (2, 3))).to_json())
    files["policy.py"].write_text("from math import *\n\ndef mine(problem):\n    return problem.current\n")
    tile = asdict(tuning.HOPPER["up"])
    files["tiles.json"].write_text(json.dumps({tuning.key_of("up", CPU, 64, 32): tile}))
    files["my.toml"].write_text(to_toml(load(preset="tiny")))

    def tiles(path: Path) -> None:
        tuning._read.cache_clear()
        tuning.tile_for("up", CPU, 64, 32, file=path)

    def policy(path: Path) -> None:
        if problems := list(policy_problems(f"{path}:mine", "static")):
            raise ConfigError(problems)

    quick = ("--planner", "greedy", "--time-limit", 0)
    small = ("--steps", 4, "--device", "cpu", "--ranks", 2, "--workloads", "even")
    return {
        "slots": (files["slots.json"], lambda path: PlacementConfig(slots=str(path)).placements(3, 2)),
        "policy": (files["policy.py"], policy),
        "tiles": (files["tiles.json"], tiles),
        "place --current": (
            files["current.json"],
            lambda path: command("place", run / "load.npz", "--slots", 2, "--current", path, *quick),
        ),
        "place load.npz": (run / "load.npz", lambda path: command("place", path, *quick)),
        "place config.toml": (run / "config.toml", lambda path: command("place", path.parent, *quick)),
        "skew load.npz": (run / "load.npz", lambda path: command("skew", path.parent, "--steps", 4)),
        "skew choices.json": (run / "choices.json", lambda path: command("skew", path.parent, "--steps", 4)),
        "skew my.toml": (files["my.toml"], lambda path: command("skew", path, *small)),
    }


def make_model(folder: Path, plain: Path) -> Readers:
    """A Hugging Face folder with a tokenizer, and a checkpoint of it: planned, converted, generated from."""
    shutil.copytree(plain, folder / "hf")
    tokenizer = json.loads((plain.parent / "tokenizer.json").read_text())
    (folder / "hf" / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "hf" / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "hf" / "moeclipse.json").unlink()
    from_hf(folder / "hf", folder / "checkpoint")
    (folder / "half").mkdir()
    out = folder / "half" / "out"

    def converts(path: Path) -> None:
        shutil.rmtree(folder / "half")
        (folder / "half").mkdir()
        source = find_model(path.parent)
        tokenizer_parts(source)
        if path.parent.name == "hf":
            from_hf(path.parent, out)
        else:
            to_hf(open_weights_of(source, OneRank()), out)  # type: ignore[arg-type]

    def plans(path: Path) -> None:
        command("plan", path, "--gpus", 2, "--seq-len", 64, "--tokens-per-step", "256")

    def begins(path: Path) -> None:
        list(start_problems(TrainConfig(), path.parent))

    found: Readers = {"plan config.json": (folder / "hf" / "config.json", plans)}
    for name in ("hf", "checkpoint"):
        for file in sorted((folder / name).iterdir()):
            found[f"convert {name} {file.name}"] = (file, converts)
    found["init_from index.json"] = (folder / "checkpoint" / "index.json", begins)
    return found | journal(folder, folder / "hf")


def journal(folder: Path, source: Path) -> Readers:
    """What a conversion that was cut off has left."""
    whole, out = folder / "whole", folder / "cut" / "out"
    partial = out.with_name(".out.partial")
    from_hf(source, whole)
    out.parent.mkdir()

    cut = patch.object(staging.StagedFolder, "commit", side_effect=KeyboardInterrupt)
    with cut, contextlib.suppress(KeyboardInterrupt):
        from_hf(source, out)
    kept = folder / "kept"
    partial.rename(kept)

    def goes_on(path: Path) -> None:
        for left in (partial, out):
            shutil.rmtree(left, ignore_errors=True)
        shutil.copytree(path.parent, partial)
        from_hf(source, out)

    (file,) = [file for file in kept.iterdir() if file.name == staging.JOURNAL]
    return {"journal": (file, goes_on)}


def make_started(folder: Path) -> Readers:
    """A run's folder as training, `generate` and a second job find it."""
    config = with_values(load(preset="tiny"), {"placement.planner": "auto"})
    checkpoints = folder / "checkpoints"
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(config))
    piece = Piece(name="x", shape=(3, 4), start=0, data=torch.arange(12.0))
    save(checkpoints, 1, [piece], {"step": 1}, OneRank(), keep=1)
    (checkpoints / "best.json").write_text(json.dumps({"step": 1, "eval_loss": 2.0}))
    cut = replace(Granularity(groups=((0,),), chunks=2, units=((0, 0), (0, 1))), predicted_s=0.1)
    layer = {"probe": asdict(PROBE), "tried": [asdict(cut)], "calls": 6, "chosen": asdict(cut)}
    choices = {"ranks": [1, 1, 1, 1], "hosts": [0], "placement": asdict(PROBE)}
    choices |= {"layers": {"0": {**layer, "over_plain": 1.1, "scatter": 0.01}}}
    choices |= {"settled": {"moe.transport": "direct", "pipeline.overlap": "off", "parallel.peer": "off"}}
    choices |= {"search": {"search_s": 0.5, "step_s": 2.0}}
    (folder / "choices.json").write_text(json.dumps(choices))
    ranks = folder / "ranks" / "0"
    ranks.mkdir(parents=True)
    (ranks / "ops.txt").write_text("rank 0 on here, process 3, step 7; seconds since 1970\nlaunched\n")
    failure = {"rank": 0, "text": "x", "stack": "", "code": 1, "victim": False, "late": False, "time": 5.0}
    (ranks / "error.json").write_text(json.dumps({"moeclipse": failure}))

    def take_over(path: Path) -> None:
        mesh = Mesh.single()
        found = Choices(mesh, None)
        found.read(str(path.parent), resumed=False)
        settle(config, mesh, found)
        exchange = ExchangeConfig(schedule="smart", chunks="auto")
        moe = MoE(4, 8, 4, gate=GateConfig(top_k=1), mesh=mesh, exchange=exchange)
        found.bind([moe], calls=12)
        found.costs_for_planners(moe)
        for _ in range(3):
            moe(torch.ones(6, 4)).sum().backward()

    def last_words(path: Path) -> None:
        read_failures(path.parent.parent)
        step_of(path.parent.parent)
        copy_ops(path.parent.parent, folder)

    found: Readers = {
        "started config.toml": (folder / "config.toml", lambda path: find_model(path.parent)),
        "started best.json": (checkpoints / "best.json", lambda path: read_best(path.parent)),
        "choices of layers": (folder / "choices.json", take_over),
        "last ops": (ranks / "ops.txt", last_words),
        "last words": (ranks / "error.json", last_words),
    }
    return found


def make_chats(folder: Path, tokenizer: Path) -> Readers:
    """Conversations, the template that renders them, and the cache of their tokens."""
    folder.mkdir()
    shutil.copy(tokenizer, folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "one"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    says = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "two one " * 9}]
    (folder / "chat.jsonl").write_text(
        "".join(json.dumps({"messages": says, "n": n}) + "\n" for n in range(9))
    )
    (folder / "long.txt").write_text("one two one two\n" * 270_000)
    talk = DataConfig(files=(str(folder / "chat.jsonl"),), kind="chat", tokenizer=str(folder))
    cached = DataConfig(files=(str(folder / "long.txt"),), tokenizer=str(folder), cache=str(folder / "cache"))

    def reads(path: Path, config: DataConfig) -> None:
        open_corpus(config, 300).read(0, 1)

    reads(folder, cached)
    names = ("tokenizer_config.json", "chat_template.jinja", "chat.jsonl")
    found: Readers = {f"chat {name}": (folder / name, lambda path: reads(path, talk)) for name in names}
    for file in sorted((folder / "cache").rglob("*")):
        if file.is_file() and file.stat().st_size:
            found[f"cache {'digest' if file.parent.name == 'digests' else file.name}"] = (
                file,
                lambda path: reads(path, cached),
            )
    return found


def make_families(folder: Path) -> Readers:
    """A config.json of every family, as transformers writes it."""
    sys.path.append(str(Path(__file__).parent.parent / "hf"))
    import transformers
    from tiny_models import COMMON, TINY

    folder.mkdir()
    found: Readers = {}
    for name, changes in TINY.items():
        config = transformers.AutoConfig.for_model(name, **{**COMMON, **changes})
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(config.to_json_string())
        found[f"family {name}"] = (folder / name / "config.json", model_of)
    return found


def model_of(path: Path) -> None:
    found = find_model(path.parent)
    tensor_table(found.names, found.shapes.model, found.shapes.moe, found.shapes.gate)


def make_inputs(folder: Path) -> Readers:
    """`folder` holds a sound model in `hf`, and a tokenizer."""
    return {
        **make_plans(folder / "plans"),
        **make_model(folder / "model", folder / "hf"),
        **make_started(folder / "started"),
        **make_chats(folder / "chats", folder / "tokenizer.json"),
    }
