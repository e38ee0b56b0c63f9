"""`moeclipse train`: from words on a command line to ranks that train.

Outside torchrun this process checks everything, then either trains itself (one rank) or starts one process
per rank with the merged configuration and waits for them (`cli/launch`). Inside torchrun, or inside the
processes that it started, it joins as the rank that the environment names. Nothing waits for another rank
before the whole configuration, the layout of ranks included, has been checked.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from moeclipse.cli.train_help import full_help, short_help
from moeclipse.core.config import Sourced, build, flag_layer, keys_of, problems_of, to_toml, with_values
from moeclipse.core.errors import CheckpointError, ConfigError, DataError
from moeclipse.core.shown import say
from moeclipse.hf.config_file import is_model_folder
from moeclipse.train.checkpoints.folder import MANIFEST
from moeclipse.train.config import TrainConfig, layout_problems
from moeclipse.train.elastic import EXPECTED, RankRange, layout_for, possible, range_problems
from moeclipse.train.presets import Merged, merge, preset_names
from moeclipse.train.run.run_files import holds_run

CPU_RANKS = 2
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What the command takes besides the configuration."""

    config: str = ""
    """A TOML file (`--config` may be left out); it may name a preset in its first line (preset = "tiny")."""
    preset: str = ""
    """tiny (the default without a file), small, 5b or deepseek-v3-tiny."""
    ranks: str = "auto"
    """Processes to start here; auto: one per CUDA device, or 2 on CPU; 2:4: begin with 4 and go on with as
    few as 2 when some are lost. Under torchrun only such a range is needed."""
    restarts: int = 0
    """So often a failed run starts again from its newest checkpoint."""
    resume: str = "off"
    """off, auto (the newest whole checkpoint of this run, if there is any), or a checkpoint's path."""
    init_from: str = ""
    """A checkpoint's, a run's or a Hugging Face folder: a new run begins from its weights."""
    trace: int = -1
    """From this step on three steps of all ranks are recorded in trace.json (docs/report.md); -1: none."""
    tune: bool = False
    """Try wires and cuts of rows for longer, write choices.json for `run.tuned_from`, and train nothing."""
    print_config: bool = False
    """Show the merged configuration as TOML and stop."""
    print_memory: bool = False
    """Print a memory breakdown, layer by layer, after the first step."""

    def problems(self) -> Iterator[str]:
        ranks = RankRange.read(self.ranks)
        if ranks is None:
            yield f"ranks = {self.ranks!r}: expected {EXPECTED}"
        elif self.ranks != "auto" and not 1 <= ranks.least <= ranks.most:
            yield f'ranks ({self.ranks}) must be at least 1, or "auto"; of two, the smaller comes first'
        if self.restarts < 0:
            yield f"restarts ({self.restarts}) must not be negative"
        if self.resume not in ("off", "auto") and not Path(self.resume).exists():
            yield f"resume ({self.resume!r}): no such path; expected off, auto or a checkpoint's folder"
        elif self.resume not in ("off", "auto") and not (Path(self.resume) / MANIFEST).is_file():
            yield (
                f"resume ({self.resume!r}): no {MANIFEST} there, so it is no checkpoint; a run goes on from "
                "its newest with --resume auto and its own configuration, RUN/config.toml"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainCommand(TrainConfig, Options):
    """Train a Mixture-of-Experts language model.

    Every key of the configuration is a flag; flags win over the file, the file over the preset.
    """


def main(words: list[str]) -> int:
    if "--help-all" in words:
        return show_help(words)
    if "-h" in words or "--help" in words:
        _, merged = read_command([word for word in words if word not in ("-h", "--help")])
        say(short_help(merged.built.config, merged.preset).rstrip())
        return 0
    environment = os.environ
    joined = any(name in environment for name in RANK_VARIABLES)
    options, merged = read_command(words)
    problems = [*merged.built.problems]
    config = name_run(merged, options.resume, environment)
    if joined and not config.run.name and int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        problems.append(
            "run.name is empty: torchrun with --max-restarts needs one, so that attempts find it again"
        )
    if not joined:
        if not any(problems_of(config.run)):
            problems += directory_problems(config, options.resume)
            problems += init_problems(config.run.init_from, options.resume, config.model.from_hf)
        problems += data_problems(config)
    ranks = RankRange.read(options.ranks) or RankRange()
    if joined:
        num_ranks = int(environment.get("WORLD_SIZE", "1"))
        if ranks.changes and ranks.least:
            problems += torchrun_problems(config, ranks, environment)
            config = layout_for(config, num_ranks, ranks.most)
    else:  # what needs torch comes last: who has something to mend already is told at once
        num_ranks = ranks.most
        told = list(layout_problems(config, num_ranks)) if num_ranks >= 1 else []
        if not (problems or told) or config.run.device == "cpu":
            num_ranks = count_ranks(num_ranks or "auto", config.run.device, problems, config.parallel.backend)
    if num_ranks >= 1:
        problems += [*layout_problems(config, num_ranks)] or ([] if joined else range_problems(config, ranks))
    if not joined and not options.print_config:
        problems += folder_problems(config, problems)
        problems += weights_told(config) if not problems else ()
    if problems:
        raise ConfigError(problems)
    if int(environment.get("RANK", "0")) == 0:
        restarts = options.restarts or int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0"))
        for note in (*merged.built.notes, *restart_notes(config, restarts or ranks.changes)):
            say(f"note: {note}", error=True)
    if options.print_config:
        # Without a name a run is named when it starts; one that goes on has its name already.
        shown = config if options.resume == "auto" else merged.built.config
        say(to_toml(shown, comments=True).rstrip())
        return 0
    from moeclipse.cli import launch, prepare

    if not joined:
        prepare.prepare_all(config)
    if joined or num_ranks == 1:
        return launch.run_rank(config, options.resume)
    numbers = possible(config, ranks) if ranks.changes else ()
    how = {"num_ranks": num_ranks, "restarts": options.restarts}
    return launch.launch_ranks(config, options.resume, numbers=numbers, **how)


def read_command(words: Sequence[str]) -> tuple[Options, Merged]:
    """Flags, file and preset, with every problem of all three in `Merged.built.problems`."""
    layer, problems = flag_layer(TrainCommand, words, positional="config")
    own = keys_of(Options)
    options = build(Options, [{key: given for key, given in layer.items() if key in own}], problems)
    flags = {key: given for key, given in layer.items() if key not in own}
    if options.config.init_from:
        flags["run.init_from"] = Sourced(options.config.init_from, "--init-from")
    if options.config.trace != -1:
        flags["metrics.trace"] = Sourced(options.config.trace, "--trace")
    if options.config.tune:
        flags["run.tune"] = Sourced(True, "--tune")
    if options.config.print_memory:
        flags["metrics.memory"] = Sourced(True, "--print-memory")
    file, preset = options.config.config or None, options.config.preset or None
    try:
        return options.config, merge(file, preset, flags, options.problems)
    except ConfigError as error:  # the file cannot be read at all
        meant = f"; did you mean {hint}?" if (hint := meant_by(file)) else ""
        raise ConfigError([*(f"{text}{meant}" for text in error.problems), *options.problems]) from None


def meant_by(word: str | None) -> str:
    """What somebody may want who gives a word that is no file of a configuration."""
    name, is_setting, value = (word or "").partition("=")
    if word in preset_names():
        return f"--preset {word}"
    if word and (Path(word) / "config.toml").is_file():
        return str(Path(word) / "config.toml")
    return f"--{name.lstrip('+-').replace('_', '-')} {value}" if is_setting else ""


def name_run(merged: Merged, resume: str, environment: Mapping[str, str]) -> TrainConfig:
    """The configuration with a run name that all ranks and all attempts share."""
    config = merged.built.config
    if config.run.name:
        return config
    preset = merged.preset or "run"
    job = environment.get("TORCHELASTIC_RUN_ID", "none")
    if "WORLD_SIZE" in environment:
        # Ranks read their clocks apart; without a job id the trainer lets rank 0 choose.
        name = f"{preset}-{job}" if job != "none" else ""
        return with_values(config, {"run.name": name})
    name = f"{preset}-{time.strftime('%Y%m%d-%H%M%S')}"
    if resume == "auto":
        runs = sorted(
            Path(config.run.dir).glob(f"{preset}-*/config.toml"), key=lambda path: path.stat().st_mtime
        )
        name = runs[-1].parent.name if runs else name
    return with_values(config, {"run.name": name})


def count_ranks(
    wanted: int | Literal["auto"], device: str, problems: list[str], backend: str = "auto"
) -> int:
    """How many ranks to start here."""
    if device == "cpu":
        return CPU_RANKS if wanted == "auto" else wanted
    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and devices == 0:
        problems.append("run.device = 'cuda', but torch sees no CUDA device; use --run.device cpu")
    if wanted == "auto":
        return devices or CPU_RANKS
    if devices and wanted > devices and backend == "auto":
        problems.append(
            f"ranks ({wanted}) must be at most the number of CUDA devices ({devices}): one rank per device; "
            "for more ranks on CPU add --run.device cpu; to try a layout on fewer GPUs, over sockets, add "
            "--parallel.backend nccl"
        )
    return wanted


def torchrun_problems(config: TrainConfig, ranks: RankRange, environment: Mapping[str, str]) -> Iterator[str]:
    """Why a run under torchrun could not lose hosts and take them back."""
    yield from range_problems(config, ranks, int(environment.get("LOCAL_WORLD_SIZE", "1")))
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        yield (
            f"ranks ({ranks.least}:{ranks.most}) under torchrun needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "
            "in its environment on all hosts: agents that share a store let nobody in who comes later"
        )


def restart_notes(config: TrainConfig, restarts: int | bool) -> Iterator[str]:
    """A run that may be restarted should have something to go on from."""
    if restarts and not config.checkpoint.every:
        yield (
            "checkpoint.every is 0, so a restart begins again at step 0; "
            "set checkpoint.every to a number of steps"
        )


def init_problems(path: str, resume: str, from_hf: str) -> Iterator[str]:
    """What is wrong with `run.init_from`, as far as it can be told before a rank starts."""
    if not path:
        return
    if from_hf:
        yield f"run.init_from ({path}) and model.from_hf ({from_hf}) both name weights; leave one out"
    elif not Path(path).is_dir():
        yield f"run.init_from ({path}): no such folder; give a checkpoint's, a run's or a model's"
    if resume not in ("off", "auto"):
        yield f"resume ({resume}) continues a run, run.init_from ({path}) begins one; leave one out"


def folder_problems(config: TrainConfig, told: Sequence[str]) -> list[str]:
    """A Hugging Face folder that is not whole is found before a run's folder is made."""
    adapter = config.lora.adapter
    if adapter and not (Path(adapter) / "adapter_config.json").is_file():
        return [f"lora.adapter ({adapter}) has no adapter_config.json; give a folder in PEFT's format"]
    dense = config.init.upcycle != "off"
    path = config.run.init_from if dense else config.model.from_hf
    if not path or told or not is_model_folder(Path(path)):
        return []
    from moeclipse.hf.folder import HfFolder

    try:
        HfFolder.look(path, dense=dense)
    except CheckpointError as error:
        return [str(error)]
    return []


def weights_told(config: TrainConfig) -> list[str]:
    """What names and shapes of weights tell; it needs torch, so only where something is asked of them."""
    if not (config.optim.frozen or config.optim.lr_factors or config.run.init_from or config.lora.adapter):
        return []
    from moeclipse.train.run.before_ranks import weight_problems

    return list(weight_problems(config))


def directory_problems(config: TrainConfig, resume: str) -> Iterator[str]:
    """A new run never writes into an old run's folder."""
    root = Path(config.run.dir)
    directory = root / config.run.name
    if root.exists() and not root.is_dir():
        yield f"run.dir ({root}) is no folder; choose another for runs"
    if resume != "auto" and holds_run(directory):
        yield (
            f"run directory {directory} exists; continue it with --resume auto, or choose another --run.name"
        )


def data_problems(config: TrainConfig) -> Iterator[str]:
    """Files that are not there are found before ranks start; what is in them is the trainer's to judge."""
    data = config.data
    if any(problems_of(data)) or any(problems_of(config.eval)):
        return
    if not (data.files or data.source or data.tokenizer or config.eval.files):
        return
    from moeclipse.train.data.corpus import find_corpus
    from moeclipse.train.data.data_config import all_parts

    for part in all_parts(data, config.eval):
        try:
            find_corpus(part)
        except DataError as error:
            yield str(error)


def show_help(words: Sequence[str]) -> int:
    """Every key with its description and the value it would have now."""
    options, merged = read_command([word for word in words if word not in ("-h", "--help", "--help-all")])
    say(full_help(options, merged.built.config).rstrip())
    return 0
