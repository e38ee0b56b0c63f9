"""A run, from its configuration to its summary.

    summary = train(config)        # on every rank; one rank alone needs no set-up at all

Join the ranks, open the run directory, train, save, report. Whatever fails on one rank is published before
that rank leaves, so that the others, whose collectives break, fail with its words and not with their own
symptoms.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from moeclipse.comm.failure import Watch
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.start import RankPlace, choose_device, open_stacks, start, stop
from moeclipse.comm.watch.watchdog import Watchdog
from moeclipse.core.config import problems_of, to_toml, with_values
from moeclipse.core.errors import (
    CheckpointError,
    CommError,
    ConfigError,
    CorruptionError,
    MoEclipseError,
    Preempted,
)
from moeclipse.core.program import command
from moeclipse.core.shown import say
from moeclipse.core.steps import nth
from moeclipse.model.count import count_parameters
from moeclipse.model.flops import device_of
from moeclipse.train.checkpoints.async_save import AsyncSave
from moeclipse.train.checkpoints.checkpoint import Checkpoint, newest
from moeclipse.train.config import TrainConfig, layout_problems
from moeclipse.train.generate.sample import write_sample
from moeclipse.train.observe.memory_table import by_kind, watched
from moeclipse.train.observe.run_figures import RunInfo, RunSummary, StepRecord
from moeclipse.train.observe.step_trace import StepTrace
from moeclipse.train.observe.weight_table import weights_told
from moeclipse.train.predict.state_bytes import least_work
from moeclipse.train.ranks import PatientRanks
from moeclipse.train.run.choices import FILE, Choices, trial_calls
from moeclipse.train.run.incidents import Incidents
from moeclipse.train.run.metrics import Metrics
from moeclipse.train.run.observers import Observer as Observer
from moeclipse.train.run.observers import Silence as Silence
from moeclipse.train.run.observers import tell_phase
from moeclipse.train.run.records import Records
from moeclipse.train.run.resolve_auto import settle
from moeclipse.train.run.run_directory import RunDirectory
from moeclipse.train.run.saving import BestCheckpoint, Saving
from moeclipse.train.run.tune import Tuning
from moeclipse.train.step.learner import Learner
from moeclipse.train.weights.hugging_face import export, load_folder
from moeclipse.train.weights.init_from import load_weights_of

LEAVE_S = 2.0
"""How long a rank that lost a peer takes its connections apart."""


def leave_process(error: CommError) -> None:
    say(f"error: {error}", error=True)
    os._exit(error.code)


def train(
    config: TrainConfig,
    *,
    resume: str = "off",
    observer: Observer | None = None,
    leave: Callable[[], str] = lambda: "",
    leave_at_save: Callable[[], bool] = lambda: False,
    stuck: Callable[[CommError], None] = leave_process,
) -> RunSummary:
    """Train as this rank; returns the summary. `resume`: off, auto, or a checkpoint's path.

    `leave` is asked at every step: once it answers on any rank, with a signal's name, all ranks save and
    raise Preempted; `leave_at_save` likewise, at the next save. `stuck` is called on another thread with the
    cause of a failure that this rank's main thread cannot hear of, because a call of CUDA or NCCL holds it;
    it must end the process.
    """
    place = RankPlace.read()
    problems = [*problems_of(config), *layout_problems(config, place.num_ranks)]
    if problems:
        raise ConfigError(problems)
    dp, ep = config.parallel.sizes(place.num_ranks, config.expert_ranks, config.moe.expert_tp)
    device = choose_device(config.run.device, place.local_rank)
    if place.num_ranks > 1 and place.rank == 0:
        tell_phase(observer, f"connecting {place.num_ranks} ranks")
    watch = start(
        place,
        device=device,
        deadline_s=config.parallel.deadline_s,
        start_deadline_s=config.parallel.start_deadline_s,
        backend=config.parallel.backend,
    )
    on_device = device.type == "cuda"
    if on_device:  # a first step compiles and loads kernels, one rank later than another
        watch.log.patience_s = config.parallel.start_deadline_s
    incidents = Incidents(watch, stuck)
    # On CPU every wait ends by itself at the deadline, but those for a disk.
    end, stacks = (incidents.end, open_stacks()) if on_device else (None, None)
    with Watchdog(watch, end=end, lost=incidents.end, stacks=stacks):
        try:
            mesh = Mesh(
                dp=dp,
                ep=ep,
                tp=config.parallel.tp,
                pp=config.parallel.pp,
                rank=place.rank,
                device=device,
                watch=watch,
                comm_sms=config.pipeline.comm_sms,
                mirrored=config.pipeline.mirrored,
            )
            watching = observer if observer is not None and place.rank == 0 else Silence()
            return Run(config, mesh, watching, leave, leave_at_save).whole(resume, incidents.begin)
        except Preempted:
            raise
        except BaseException as error:
            tell_failure(error, watch, incidents)
            raise
        finally:
            stop(LEAVE_S if isinstance(sys.exc_info()[1], CommError) else None)


def tell_failure(error: BaseException, watch: Watch, incidents: Incidents) -> None:
    """To the other ranks, and to the run's directory."""
    text = str(error) if isinstance(error, MoEclipseError) else f"{type(error).__name__}: {error}"
    watch.publish(text)
    if isinstance(error, Exception) and not isinstance(error, ConfigError):
        incidents.keep(text)


class Run:
    """A run directory and the steps that fill it."""

    def __init__(
        self,
        config: TrainConfig,
        mesh: Mesh,
        observer: Observer,
        leave: Callable[[], str] = lambda: "",
        leave_at_save: Callable[[], bool] = lambda: False,
    ) -> None:
        self.mesh, self.observer, self.leave, self.leave_at_save = mesh, observer, leave, leave_at_save
        # Ranks read their clocks apart: rank 0 chooses the name.
        name = mesh.gather_objects(config.run.name or f"run-{time.strftime('%Y%m%d-%H%M%S')}")[0]
        self.config = with_values(config, {"run.name": name})
        self.directory = Path(config.run.dir) / name
        self.files = RunDirectory(self.directory, mesh, config.run.wait_s, shared=config.run.shared)
        cuda = mesh.device.type == "cuda"
        self.device = device_of(torch.cuda.get_device_name(mesh.device)) if cuda else None
        self.work = None if self.device is None else least_work(config, mesh.device)
        self.exported: Path | None = None
        """The checkpoint that export/ was made of."""
        self.repaired: set[int] = set()
        """Steps at which corruption was seen and a checkpoint read: a second time is no accident."""

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    def whole(self, resume: str, opened: Callable[[Path], None] = lambda _: None) -> RunSummary:
        """`opened` is called with the directory, once it is this run's."""
        with self.files.held(resume, self.observer.note):
            opened(self.directory)
            return self._train(resume)

    def _train(self, resume: str) -> RunSummary:
        config = self.config
        tell_phase(self.observer, "loading data and model")
        found = self._find(resume)
        choices = Choices(self.mesh, self.directory)
        if config.run.tune:
            return self._tune(choices)
        choices.read(config.run.tuned_from, resumed=resume == "auto")
        settled, chosen = settle(config, self.mesh, choices)
        learner = Learner(settled, self.mesh)
        choices.bind(learner.layers, trial_calls(config) if learner.pipelined is None else 0)
        learner.placement.choices, choices.experts = choices, learner.experts_do
        start = self._begin(learner, found)
        self.files.accept(to_toml(config, comments=True))
        choices.write()
        metrics = Metrics(
            self.directory,
            writes=self.mesh.rank == 0,
            warmup_steps=config.metrics.warmup_steps,
            tensorboard=config.metrics.tensorboard,
            mean_experts=config.gate.mean_experts,
            scribe=self.files.scribe,
        )
        if resume == "auto" and found is None:
            self.observer.note(f"there is no checkpoint in {self.checkpoints}: the run begins at step 0")
        if (note := metrics.continue_from(start)) is not None:
            self.observer.note(note)
        learner.loads.continue_from(self.directory, start)
        self.observer.start(self._info(learner, start))
        chosen += [*learner.experts_do, *weights_told(learner.model, config.lora)]
        chosen += [] if learner.evaluation is None else learner.evaluation.notes
        for note in (*chosen, *learner.samples.notes, *learner.optim.notes, *learner.sequential.notes):
            self.observer.note(note)
        best = BestCheckpoint(self.checkpoints, self.mesh, start)
        self.records = Records(learner, metrics, self.observer.note, self._speed)
        with self.records.to_the_end():
            saving = self._steps(learner, metrics, start, best)
        path = saving.path or (found.path if found is not None else None)
        for note in choices.price_skew(learner.layers, metrics.window.means().get("balance")):
            self.observer.note(note)
        extra = {
            "unigram_entropy": learner.corpus.unigram_entropy(),
            "checkpoint": str(path) if path else None,
            "saves": {"begun": saving.begun, "stall_ms": 1e3 * saving.stall_s / max(saving.begun, 1)},
            "clock_error_ms": 1e3 * learner.times.clock_error_s,
            "slowdown": learner.pipelined.slowdown.ratio() if learner.pipelined is not None else None,
            "exchange": [layer.schedule.cuts.report() for layer in learner.layers],
            "load_by_layer": learner.loads.average_by_layer(),
            "placement": learner.placement.summary() if learner.placement.in_use else None,
            "memory": by_kind(learner),
            **({"data": list(learner.samples.notes)} if learner.samples.notes else {}),
            **learner.evaluated,
            **best.told(),
        }
        if config.run.sample:
            extra["sample"] = write_sample(learner, config.run.sample)
        mean_ms = metrics.window.means().get("step_ms")
        summary = metrics.summary(extra | (self._speed(mean_ms) if mean_ms else {}))
        self.observer.end(summary)
        return summary

    def _tune(self, choices: Choices) -> RunSummary:
        """Trials alone; there is no summary of a run that was not begun."""
        tuning = Tuning(self.config, self.mesh)
        tuning.run(self.observer.note)
        tuning.write(choices)
        for line in tuning.table():
            self.observer.note(line)
        self.observer.note(f"take it with --run.tuned_from {self.directory}: {self.directory / FILE}")
        return cast(RunSummary, {})

    def _speed(self, step_ms: float) -> dict[str, float]:
        """Of the device's peak, and of what the work allows; nothing on devices that the table lacks."""
        if self.device is None or self.work is None:
            return {}
        return self.work.speed(1e-3 * step_ms, self.device, self.mesh.num_ranks)

    def _begin(self, learner: Learner, found: Checkpoint | None) -> int:
        """Continue a checkpoint, begin from weights, or from nothing; returns the step to run next."""
        if found is not None:
            return learner.load(found)
        ranks = PatientRanks(self.mesh, self.config.checkpoint.deadline_s)
        if self.config.model.from_hf:
            load_folder(learner, ranks)
        elif self.config.run.init_from:
            load_weights_of(self.config.run.init_from, learner, ranks)
        return 0

    def _steps(self, learner: Learner, metrics: Metrics, start: int, best: BestCheckpoint) -> Saving:
        config, scribe = self.config, self.files.scribe
        saving = Saving(
            learner.checkpointing,
            lambda done, async_save: self._save(learner, done, async_save),
            self.observer.note,
            asked_to_leave=lambda: bool(self.leave()),
            leave_at_save=self.leave_at_save,
            make_ready=learner.make_save_ready,
        )
        learner.signals = saving.signals
        trace = StepTrace(config, self.mesh, learner.model)
        memory = watched(learner) if config.metrics.memory else None
        step = start
        while step < config.run.steps:
            trace.begin(step)
            try:
                record = learner.step(step)
            except CorruptionError as error:
                saving.finish()
                step = self._go_back(learner, metrics, step, error)
                continue
            trace.end(step, learner.times, self.directory, learner.program)
            self.mesh.watch.log.patience_s = None
            signals = record.pop("signals")
            record |= cast(StepRecord, self._speed(record["step_ms"]) | learner.evaluate(step + 1))
            eval_loss = record.get("eval_loss", math.nan)
            better = self.config.eval.keep_best and best.is_better(eval_loss)
            self.observer.step(record)
            told = memory.lines() if memory is not None else []
            for note in (*record.get("notes", ()), *scribe.take_notes(), *told):
                self.observer.note(note)
            self.records.after_step(record)
            if record["skipped"]:
                scale = f", loss scale {record['loss_scale']:g}" if "loss_scale" in record else ""
                self.observer.note(
                    f"step {nth(step)} skipped on all ranks: loss {record['loss']}, "
                    f"gradient norm {record['grad_norm']}{scale}"
                )
            done = step + 1
            last = done == config.run.steps or saving.leaving(done, signals)
            if self.mesh.rank == 0:
                now = last or saving.is_due(done, signals)
                learner.loads.write(self.directory, done, scribe, now=now)
            saving.after_step(done, signals, last=last, best=better)
            if better:
                best.keep(saving.path, done, eval_loss)
            if last and done < config.run.steps:
                raise Preempted(
                    f"asked to leave ({self.leave() or 'by another rank'}): step {done} is saved in "
                    f"{saving.path}; "
                    f"go on with: {command('train', self.directory / 'config.toml', '--resume', 'auto')}"
                )
            self._export(learner, saving.path, last=done == config.run.steps)
            step = done
        return saving

    def _export(self, learner: Learner, path: Path | None, *, last: bool) -> None:
        """The newest checkpoint as a Hugging Face model, where the run began from one."""
        wanted = self.config.checkpoint.export
        if learner.hf is None or path in (None, self.exported) or wanted == "off":
            return
        if last or wanted == "always":
            ranks = PatientRanks(self.mesh, self.config.checkpoint.deadline_s)
            assert path is not None
            source = Path(self.config.model.from_hf or self.config.run.init_from)
            export(path, self.directory / "export", source, ranks)
            self.exported = path

    def _go_back(self, learner: Learner, metrics: Metrics, step: int, error: CorruptionError) -> int:
        """After corruption: the step to go on with, from the newest checkpoint, or the error again."""
        found = None
        if self.config.integrity.repair == "reload" and step not in self.repaired:
            found = self._find("auto")
        if found is None:
            raise error
        self.repaired.add(step)
        self.records.settle()
        back = learner.load(found)
        self.files.scribe.flush()
        metrics.continue_from(back)
        learner.loads.continue_from(self.directory, back)
        self.observer.note(f"step {nth(step)}: {error}. Going on from {found.path.name}")
        return back

    def _save(self, learner: Learner, done: int, async_save: AsyncSave | None) -> Path:
        """A checkpoint, after all that is known of the steps before it is on the disk."""
        self.records.settle()
        self.files.scribe.flush()
        self.files.check_job()
        return learner.save(self.checkpoints, done, async_save)

    def _find(self, resume: str) -> Checkpoint | None:
        """The checkpoint to continue, verified whole, or None to begin."""
        if resume == "off":
            return None
        ranks = PatientRanks(self.mesh, self.config.checkpoint.deadline_s)
        if resume != "auto":
            return Checkpoint.open(resume, ranks)
        search = newest(self.checkpoints, ranks)
        if search.checkpoint is None and search.passed_over:
            # To begin anew here would throw away what may still be mended.
            raise CheckpointError(
                f"no checkpoint in {self.checkpoints} is whole: {'; '.join(search.passed_over)}; "
                "restore one from a copy, or start a new run with another --run.name"
            )
        for damaged in search.passed_over:
            self.observer.note(f"passed over a damaged checkpoint, {damaged}")
        return search.checkpoint

    def _info(self, learner: Learner, start: int) -> RunInfo:
        config, mesh = self.config, self.mesh
        everything, active = count_parameters(config.model, config.moe, config.gate)
        return {
            "name": config.run.name,
            "directory": str(self.directory),
            "num_ranks": mesh.num_ranks,
            "dp": mesh.dp,
            "ep": mesh.ep,
            "tp": mesh.tp,
            "pp": mesh.pp,
            "device": str(mesh.device),
            "dtype": str(learner.dtype).removeprefix("torch."),
            "num_parameters": everything,
            "num_active_parameters": active,
            "experts_vary": config.gate.choose != "top_k" or config.gate.kind == "gshard",
            "corpus": learner.corpus.what,
            "unigram_entropy": learner.corpus.unigram_entropy(),
            "steps": config.run.steps,
            "start_step": start,
            "tokens_per_step": learner.tokens_per_step,
        }
