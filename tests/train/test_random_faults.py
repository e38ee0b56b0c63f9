"""Random faults over many layouts: each is named, and each run ends with the losses of the undisturbed one.

A fault is drawn from a seed: what happens, to which rank, at which step. Losses are compared to the last bit,
because no rank is lost for good. A rank whose network is cut lives in a network namespace of its own, at the
end of a cable that is pulled.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_integrity import moment
from test_trainer import Notes, configure, losses, whole

from cables import Host, two_hosts
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import Preempted
from moeclipse.testing.run_ranks import run_ranks, run_ranks_raw
from moeclipse.train.checkpoints.disk import Disk
from moeclipse.train.config import TrainConfig
from moeclipse.train.run.trainer import Run
from moeclipse.train.step.learner import Learner

PIPE: dict[str, Any] = {"parallel.pp": 2, "optim.accumulate": 2, "pipeline.schedule": "1f1b"}
LAYOUTS: list[tuple[int, dict[str, int], dict[str, Any]]] = [
    (1, {}, {}),
    (2, {}, {}),
    (2, {"dp": 2}, {}),
    (3, {}, {}),
    (4, {"dp": 2}, {}),
    (2, {"tp": 2}, {"parallel.tp": 2, "model.num_kv_heads": 2}),
    (2, {"pp": 2}, PIPE),
    (2, {}, {"moe.schedule": "smart", "moe.shadow": "off"}),
    (2, {}, {"placement.slots": ((0, 1, 2), (3, 2, 0))}),
    (2, {}, {"model.dtype": "bfloat16"}),
]
FAULTS = ("kill", "freeze", "nan", "flip", "full disk", "cut", "leave")
NO_CUT = "no namespaces to cut a cable in"
DEADLINE_S = 10.0
"""Of collectives where a rank stands still, or cannot be reached."""


def disturbed(mesh: Mesh, config: TrainConfig, fault: str, victim: int, step: int) -> list[str]:
    """A run that a fault meets; what was said of it."""
    if fault == "kill":
        return whole(mesh, config, "off", victim, step)
    notes, left = Notes(), 1
    if fault == "full disk":
        fill_disk(mesh.rank == victim)
    if fault in ("freeze", "cut", "nan"):
        strike(fault, mesh.rank == victim, step)
    if fault == "flip":
        begin = Learner.__init__

        def harmed(self: Learner, *args: Any) -> None:
            begin(self, *args)
            look = self.integrity.look

            def harmed_look(now: int) -> list[str]:
                nonlocal left
                if now == step and mesh.rank == victim and left:
                    left = 0
                    moment(self)
                return look(now)

            self.integrity.look = harmed_look  # type: ignore[method-assign]

        Learner.__init__ = harmed  # type: ignore[method-assign]
    counted = iter(range(10**6))
    leaves = fault == "leave" and mesh.rank == victim
    try:
        Run(config, mesh, notes, lambda: "SIGTERM" if leaves and next(counted) >= step else "").whole("off")
    except Preempted as error:
        return [*notes.texts, str(error)]
    return notes.texts


cut_off: list[Host] = []
"""Where the others live, and where the victim of a cut does, until its cable is pulled."""


def strike(fault: str, here: bool, step: int) -> None:
    """Once, as a step begins."""
    begin, left = Learner.backward, 1

    def backward(self: Learner, now: int) -> Any:
        nonlocal left
        if now == step and here and left:
            left = 0
            if fault == "freeze":
                freeze()
            elif fault == "cut":
                cut_off[1].pull()
            else:
                spoil_once(self)
        return begin(self, now)

    Learner.backward = backward  # type: ignore[method-assign]


def freeze() -> None:
    """Somebody ends the frozen rank once the others have given up, as the launcher does."""
    seconds = DEADLINE_S + 4
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -KILL {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def spoil_once(learner: Learner) -> None:
    """The output of the first attention on this rank is not finite, the next time it is computed."""
    module = next(one for name, one in learner.model.named_modules() if name.endswith("attention"))

    def spoil(_module: Any, _args: Any, out: Any) -> Any:
        handle.remove()
        return out * math.nan

    handle = module.register_forward_hook(spoil)


def fill_disk(here: bool) -> None:
    """The first checkpoint meets a full disk on one rank; later ones find room."""
    import moeclipse.train.step.checkpointed_state as state

    class Full(Disk):
        def write(self, *args: Any, **kwargs: Any) -> Any:
            raise OSError(28, "No space left on device")

    plain, saves = state.save, iter(range(10**6))

    def save(*args: Any, **kwargs: Any) -> Path:
        if next(saves) == 0 and here:
            kwargs["disk"] = Full()
        return plain(*args, **kwargs)

    state.save = save


def survive(folder: Path, number: int, expected: dict[int, Any]) -> str:
    """One fault, drawn from its number; what happened, for the report of a failure."""
    draw = random.Random(number)
    which = draw.randrange(len(LAYOUTS))
    num_ranks, axes, changes = LAYOUTS[which]
    shared = {**changes, "integrity.every": 1, "integrity.repair": "reload"}
    if which not in expected:
        config = configure(folder, **shared, **{"run.name": f"whole-{which}"})
        run_ranks(num_ranks, whole, config, **axes)
        expected[which] = losses(config)
    alone = ("freeze", "cut")  # of one rank nobody would notice
    faults = [fault for fault in FAULTS if num_ranks > 1 or fault not in alone]
    fault, victim, step = draw.choice(faults), draw.randrange(num_ranks), draw.randrange(2, 5)
    config = configure(folder, **shared, **{"run.name": f"fault-{number}"})
    what = f"fault {number}: {fault} of rank {victim} at step {step} in layout {which}"
    waits = {"collective_deadline_s": DEADLINE_S} if fault in ("freeze", "cut") else {}
    with contextlib.ExitStack() as stack:
        if fault == "cut":
            try:
                cut_off[:] = stack.enter_context(two_hosts())
            except OSError:
                return NO_CUT
            waits["before"] = lambda rank: cut_off[rank == victim].enter()
        told = run_ranks_raw(num_ranks, disturbed, config, fault, victim, step, **axes, **waits)
    check_words(fault, victim, step, told, what)
    if fault in ("kill", "freeze", "cut", "leave"):
        run_ranks(num_ranks, whole, config, "auto", **axes)
    assert losses(config) == expected[which], what
    left = {path.name for path in (folder / "runs" / config.run.name).iterdir()}
    assert not {name for name in left if name.startswith(".") or name == "job.json"}, what
    return fault


def check_words(fault: str, victim: int, step: int, told: list[tuple[bool, Any]], what: str) -> None:
    if fault in ("kill", "freeze", "cut"):
        assert not any(ok for ok, _ in told), what
        others = [text for rank, (_, text) in enumerate(told) if rank != victim]
        # The store (a file here) outlives the cable, so all say that they wait; of two nobody knows whose.
        named = [f"rank {victim}" in text for text in others]
        if fault == "cut" and len(told) > 2:
            named = [f"rank {victim} cannot be reached by the others" in text for text in others]
        assert all(named), (what, others)
        return
    assert all(ok for ok, _ in told), (what, told)
    said = " ".join(told[0][1])
    named = {
        "nan": f"step {step + 1}: transient: ",
        "flip": f"rank {victim}: adam_v/",
        "full disk": f"rank {victim}: the disk is full",
        "leave": "asked to leave",
    }
    assert named[fault] in said, (what, said)


def test_some_faults(tmp_path: Path) -> None:
    expected: dict[int, Any] = {}
    for number in range(3):
        survive(tmp_path, number, expected)


@pytest.mark.root
@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 2])
def test_of_three_ranks_the_one_with_the_pulled_cable_is_named(tmp_path: Path, victim: int) -> None:
    config = configure(tmp_path, **{"run.name": "cut"})
    with contextlib.ExitStack() as stack:
        try:
            cut_off[:] = stack.enter_context(two_hosts())
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        told = run_ranks_raw(
            3,
            disturbed,
            config,
            "cut",
            victim,
            3,
            collective_deadline_s=DEADLINE_S,
            before=lambda rank: cut_off[rank == victim].enter(),
        )
    check_words("cut", victim, 3, told, "three ranks")


@pytest.mark.full
@pytest.mark.long
def test_a_hundred_faults(tmp_path: Path) -> None:
    expected: dict[int, Any] = {}
    met = []
    for number in range(100):
        met.append(survive(tmp_path, number, expected))
        print(number, met[-1])  # which of them a failure came after
    assert set(met) in (set(FAULTS), {*FAULTS, NO_CUT} - {"cut"})
    assert len(expected) == len(LAYOUTS)
