"""A bit that flips in a weight or in the optimizer's state is found before the update, and named."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer import Notes, configure, losses, whole

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CorruptionError
from moeclipse.ops.digest import digest
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.placement.expert_buckets import ExpertBucket
from moeclipse.train.run.trainer import Run
from moeclipse.train.step.integrity import SHARE
from moeclipse.train.step.learner import Learner

STEP = 2


def flip(values: torch.Tensor, place: int = 0, bit: int = 30) -> None:
    """One bit of one number; bit 30 is the highest of a float's exponent."""
    ints = values.detach().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
    ints[place] ^= 1 << (bit if values.element_size() > 2 else 14)


def bucket_with(learner: Learner, name: str) -> tuple[Any, Any, Any]:
    """(bucket, optimizer state, entry) of a tensor."""
    for bucket, state in zip(learner.optim.buckets, learner.optim.states, strict=True):
        for entry in bucket.entries:
            if entry.name == name:
                return bucket, state, entry
    raise AssertionError(name)


def told(mesh: Mesh, config: TrainConfig, harm: str, victim: int) -> str:
    """What is said of step STEP, in which `victim` is harmed between forward and update."""
    learner = Learner(config, mesh)
    plain = learner.integrity.look

    def look(step: int) -> list[str]:
        if step == STEP and mesh.rank == victim:
            HARM[harm](learner)
        return plain(step)

    learner.integrity.look = look  # type: ignore[method-assign]
    for step in range(STEP + 2):
        before = learner.optim.updates
        try:
            learner.step(step)
        except CorruptionError as error:
            assert step == STEP
            assert learner.optim.updates == before, "the update was not applied"
            return str(error)
    return "unseen"


def copy_of_another(learner: Learner) -> None:
    bucket, _, entry = bucket_with(learner, "norm.weight")
    owner = next(
        i for i in range(bucket.group.size) if bucket.bounds[i] <= entry.offset < bucket.bounds[i + 1]
    )
    assert owner != bucket.group.index, "the test means a copy"
    flip(bucket.params, entry.offset)


def own_weight(learner: Learner) -> None:
    for bucket in learner.optim.buckets:
        if not isinstance(bucket, ExpertBucket) and bucket.group.size > 1:
            flip(bucket.params, bucket.shard.start)
            return


def moment(learner: Learner) -> None:
    flip(learner.optim.states[0].adam_v, bit=3)


def master(learner: Learner) -> None:
    flip(learner.optim.states[0].weight, bit=30)


def low_bits(learner: Learner) -> None:
    learner.optim.states[0].weight.low[0] ^= 1


def published(learner: Learner) -> None:
    bucket = learner.optim.buckets.buckets[0]
    flip(bucket.params, bucket.shard.start)


def buffer(learner: Learner) -> None:
    flip(learner.layers[0].gate.bias_E)


def replica(learner: Learner) -> None:
    bucket = next(b for b in learner.optim.buckets if isinstance(b, ExpertBucket))
    flip(bucket.rows[0])


HARM = {
    f.__name__: f for f in (copy_of_another, own_weight, moment, master, low_bits, published, buffer, replica)
}


def harmed(tmp_path: Path, harm: str, victim: int, num_ranks: int = 2, **changes: Any) -> str:
    config = configure(tmp_path, **{"integrity.every": 1, **changes})
    texts = run_ranks(num_ranks, told, config, harm, victim, dp=changes.get("parallel.dp", 1))
    assert len(set(texts)) == 1, "all ranks say the same"
    return texts[0]


def test_a_copy_of_a_dense_weight(tmp_path: Path) -> None:
    """Of two holders it is known which one is wrong: the owner's own past speaks for it."""
    text = harmed(tmp_path, "copy_of_another", 1)
    assert "rank 1: norm.weight[0:] differs from that of rank 0" in text
    assert text.startswith("weights or optimizer state were corrupted: ")
    assert "resume from the last checkpoint" in text


def test_an_owned_weight_names_its_owner_and_the_tensor(tmp_path: Path) -> None:
    text = harmed(tmp_path, "own_weight", 1)
    assert "rank 1: weight/" in text
    assert "has changed since the last update" in text


@pytest.mark.parametrize("victim", [0, 1])
def test_a_moment_of_the_optimizer_exists_once_and_is_seen(tmp_path: Path, victim: int) -> None:
    assert f"rank {victim}: adam_v/" in harmed(tmp_path, "moment", victim)


@pytest.mark.parametrize("harm", ["master", "published"])
def test_master_weights_round_to_what_was_sent_out(tmp_path: Path, harm: str) -> None:
    text = harmed(tmp_path, harm, 1, **{"model.dtype": "bfloat16"})
    assert "rank 1: " in text
    assert "is not what its master weights round to" in text


@pytest.mark.parametrize("harm", ["low_bits", "published"])
def test_low_bits_and_weights_are_one_number(tmp_path: Path, harm: str) -> None:
    """They round to whatever they lie beside; a digest of the number knows what it was."""
    text = harmed(tmp_path, harm, 1, **{"model.dtype": "bfloat16", "optim.master": "low-bits"})
    assert "rank 1: weight/" in text
    assert "has changed since the last update" in text


def test_a_bias_of_a_gate(tmp_path: Path) -> None:
    text = harmed(tmp_path, "buffer", 2, num_ranks=3)
    assert "rank 2: a buffer of layers.0." in text
    assert "differs from that of ranks 0, 1" in text


def test_replicas_of_experts(tmp_path: Path) -> None:
    text = harmed(tmp_path, "replica", 0, **{"placement.slots": ((0, 1, 2), (3, 2, 0))})
    assert "rank 0: layers.1.moe.experts.0.down is not what its master weights round to" in text
    assert "layer 1, expert 0: ranks [0] and [1] hold other weights" in text


def test_nothing_is_said_of_a_sound_run_in_any_layout(tmp_path: Path) -> None:
    for dp, changes in (
        (1, {}),
        (2, {}),
        (1, {"model.dtype": "bfloat16"}),
        (2, {"model.dtype": "bfloat16", "optim.master": "low-bits"}),
        (1, {"placement.slots": ((0, 1, 2), (3, 2, 0)), "placement.reduce": "fedavg"}),
    ):
        config = configure(tmp_path, **{"integrity.every": 1, **changes})
        assert run_ranks(2, told, config, "moment", -1, dp=dp) == ["unseen"] * 2


def test_steps_between_checks_cost_nothing_and_see_nothing(tmp_path: Path) -> None:
    config = configure(tmp_path, **{"integrity.every": 100, "run.steps": 50})
    assert run_ranks(2, told, config, "moment", 1) == ["unseen"] * 2
    config = configure(tmp_path, **{"integrity.every": STEP + 1})
    assert all("adam_v/" in text for text in run_ranks(2, told, config, "moment", 1))


def run_with_flips(mesh: Mesh, config: TrainConfig, times: int) -> list[str]:
    """A whole run in which rank 1 is harmed in step 3, so many times."""
    left = times
    plain = Learner.__init__

    def harmed_learner(self: Learner, *args: Any) -> None:
        plain(self, *args)
        look = self.integrity.look

        def harmed_look(step: int) -> list[str]:
            nonlocal left
            if step == 3 and mesh.rank == 1 and left:
                left -= 1
                moment(self)
            return look(step)

        self.integrity.look = harmed_look  # type: ignore[method-assign]

    Learner.__init__ = harmed_learner  # type: ignore[method-assign]
    notes = Notes()
    try:
        Run(config, mesh, notes).whole("off")
    except CorruptionError as error:
        return [*notes.texts, f"stopped: {error}"]
    return notes.texts


def test_a_run_reloads_and_ends_with_the_same_losses(tmp_path: Path) -> None:
    config = configure(tmp_path, **{"run.name": "sound"})
    run_ranks(2, whole, config)
    expected = losses(config)
    config = configure(tmp_path, **{"integrity.every": 1, "integrity.repair": "reload"})
    notes = run_ranks(2, run_with_flips, config, 1)[0]
    assert len(notes) == 1
    assert notes[0].startswith("step 4: weights or optimizer state were corrupted: rank 1: adam_v/")
    assert notes[0].endswith("Going on from step-00000002")
    assert losses(config) == expected


@pytest.mark.full
def test_what_comes_again_stops_the_run(tmp_path: Path) -> None:
    config = configure(tmp_path, **{"integrity.every": 1, "integrity.repair": "reload"})
    for notes in run_ranks(2, run_with_flips, config, 2):
        assert notes[-1].startswith("stopped: weights or optimizer state were corrupted: rank 1: adam_v/")
    config = configure(tmp_path, **{"integrity.every": 1, "run.name": "stop"})
    assert all(len(notes) == 1 for notes in run_ranks(2, run_with_flips, config, 1)), "stop is the default"


def test_one_rank_alone_is_checked_too(tmp_path: Path) -> None:
    config = configure(tmp_path, **{"integrity.every": 1})
    assert "rank 0: adam_v/" in run_alone(told, config, "moment", 0)


@pytest.mark.parametrize("every", ["auto", 100])
def test_the_last_step_of_a_short_run_is_checked(tmp_path: Path, every: Any) -> None:
    config = configure(tmp_path, **{"integrity.every": every, "run.steps": STEP + 1})
    assert "adam_v/" in run_alone(told, config, "moment", 0)


def digested(mesh: Mesh, config: TrainConfig) -> tuple[int, int, bool]:
    """(Names, digests of rows that were asked for, whether each name has the digest of its own numbers)."""
    learner, calls = Learner(config, mesh), []
    learner.step(0)
    found: dict[str, int] = {}
    for names, rows in learner.integrity._states():
        calls.append(len(rows))
        found |= {name: int(digest(row.clone())) for name, row in zip(names, rows, strict=True)}
    return len(found), len(calls), learner.integrity._state_digests() == found


def test_a_layer_s_experts_are_digested_together(tmp_path: Path) -> None:
    few_bits = {"lora.rank": 2, "model.base": "fp8", "optim.state": "8bit", "model.dtype": "bfloat16"}
    names, calls, equal = run_alone(digested, configure(tmp_path, **few_bits))
    assert equal
    # 2 layers of 4 experts: A and B of up and down in three states, codes and scales of up and down.
    assert names - calls >= 2 * 3 * (4 * 3 + 4)


def saved(mesh: Mesh, config: TrainConfig, harm: str, victim: int) -> str:
    """What is said of a save of a state that was harmed on one rank."""
    learner = Learner(config, mesh)
    learner.step(0)
    if mesh.rank == victim:
        HARM[harm](learner)
    folder = Path(config.run.dir) / "checkpoints"
    try:
        learner.save(folder, 1)
    except CorruptionError as error:
        return f"{error} {sorted(folder.glob('step-*'))}"
    return "saved"


def test_a_state_with_a_flipped_bit_is_not_saved(tmp_path: Path) -> None:
    texts = run_ranks(2, saved, configure(tmp_path, **{"integrity.every": 100}), "copy_of_another", 1)
    assert len(set(texts)) == 1
    assert "rank 1: norm.weight[0:] differs from that of rank 0; nothing was saved" in texts[0]
    assert texts[0].endswith("[]")


@pytest.mark.parametrize(
    ("harm", "changes", "named"),
    [
        ("master", {"model.dtype": "bfloat16"}, "is not what its master weights round to"),
        ("buffer", {}, "disagree about a buffer of layers.0."),
        ("replica", {"placement.slots": ((0, 1, 2), (3, 2, 0))}, "ranks [0] and [1] hold other weights"),
    ],
)
def test_a_save_looks_at_all_that_exists_twice(
    tmp_path: Path, harm: str, changes: dict[str, Any], named: str
) -> None:
    texts = run_ranks(2, saved, configure(tmp_path, **{"integrity.every": 100, **changes}), harm, 0)
    assert len(set(texts)) == 1
    assert named in texts[0]
    assert texts[0].endswith("[]")


def test_who_asks_for_no_checks_gets_none(tmp_path: Path) -> None:
    config = configure(tmp_path, **{"integrity.every": 0})
    assert run_ranks(2, saved, config, "copy_of_another", 1) == ["saved"] * 2


def paced(_mesh: Mesh, config: TrainConfig) -> list[int]:
    """The steps of a run that are checked, on a clock of its own: a step takes 1 s, a check 3 s."""
    learner = Learner(config, Mesh.single())
    now = [0.0]
    checked = []
    integrity = learner.integrity
    plain = {"_look": integrity._look, "_state_digests": integrity._state_digests}
    integrity._clock, integrity._begun = lambda: now[0], 0.0

    def look(step: int) -> list[str]:
        checked.append(step)
        now[0] += 2.0
        return plain["_look"](step)

    def digests() -> dict[str, int]:
        now[0] += 1.0
        return plain["_state_digests"]()

    integrity._look = look  # type: ignore[method-assign]
    integrity._state_digests = digests  # type: ignore[method-assign]
    for step in range(3000):
        integrity.remember(step)
        integrity.look(step)
        now[0] += 1.0
        integrity.hear(step, [[0.0] * 5 + [float(integrity.signal(0))]])
    assert integrity.spent_s <= SHARE * now[0] + 4.0, "the first one tells what it takes"
    return checked


def test_checks_take_their_share_of_the_time_and_no_more(tmp_path: Path) -> None:
    config = configure(tmp_path, **{"integrity.every": "auto", "run.steps": 5000})
    checked = run_alone(paced, config)
    assert checked[0] == 1
    assert 3 <= len(checked) <= 5, checked
    assert all(later - earlier > 400 for earlier, later in pairwise(checked))
