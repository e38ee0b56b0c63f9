"""How long a step takes, as the simulator says it of the whole program, and as it is.

    .venv/bin/python bench/predicted.py [--json FILE] [--steps 12] [--case pp tp ...]
    .venv/bin/python bench/predicted.py --smoke

Six layouts on two ranks of this machine. Steps are watched and left alone in turn. From the watched ones come
the seconds of every op of every rank: what the host did from the end of one op of compute to the end of the
next, waits left out, and each transfer from its last launch, or the end of the one before it on its lane, to
its end; of those between stages, the mean of those that somebody waited for. The simulator puts them
together: who waits for whom is all that it adds. Its step is compared with those that nobody watched.

Times of single ops are noisy on a machine that others use: quiet ones say more.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

from _smoke import BenchParser, machine, write

from moeclipse.comm.async_ops.record import StepStamps, TransferStamps
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.cost.model import Costs
from moeclipse.report.intervals import Span, TransferInterval, clip, length, subtract
from moeclipse.schedule.check import verify
from moeclipse.schedule.kinds import COMPUTE, ENDS, TRANSFERS, Part
from moeclipse.schedule.op import Op
from moeclipse.schedule.templates import replicate
from moeclipse.sim.engine import simulate
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.observe.step_times import transfers_of
from moeclipse.train.step.learner import Learner

WARM = 4
SOON = 1e-4
MODEL: dict[str, Any] = {
    "parallel.check_launches": True,
    "parallel.peer": "off",
    "pipeline.schedule": "1f1b",
    "model.num_layers": 4,
    "model.vocab_size": 512,
    "model.d_model": 256,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.head_dim": 64,
    "model.dtype": "float32",
    "moe.num_experts": 8,
    "moe.d_ff": 512,
    "moe.num_shared_experts": 1,
    "gate.top_k": 2,
    "data.seq_len": 64,
    "data.batch_size": 8,
    "data.files": (__file__,),
    "optim.accumulate": 4,
}
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "pp 1, ep": ({}, {}),
    "pp 2": ({"pp": 2}, {}),
    "tp": ({"tp": 2}, {}),
    "dp": ({"dp": 2}, {}),
    "shadows": ({}, {"moe.shadow": (0, 1)}),
    "recompute": ({"pp": 2}, {"pipeline.recompute": "full"}),
}
Positions = dict[int, float]
"""Seconds by place in a rank's list."""


class Watched:
    """Steps of one rank, with an eye on every op where it is asked for."""

    def __init__(self, mesh: Mesh, config: TrainConfig) -> None:
        self.mesh, self.learner = mesh, Learner(config, mesh)
        assert self.learner.pipelined is not None
        self.runtime = self.learner.pipelined.runtime
        self.place_of = {self._name(op): at for at, op in enumerate(self.runtime.ops)}
        self.stamps: StepStamps | None = None
        self._spans: list[tuple[Op, Any, Any]] = []
        self._launched: list[Op | None] = []
        self.moves: dict[str, tuple[bool, float, float, float | None]] = {}
        self._end, self._launch = mesh.recorder.end_step, mesh.recorder.launch
        mesh.recorder.end_step = self._keep  # type: ignore[method-assign]

    @staticmethod
    def _name(op: Op) -> tuple[str, Any]:
        return str(op), op.stage

    def _saw(self, op: Op, begun: Any, ended: Any) -> None:
        self._spans.append((op, begun, ended))

    def _keep(self) -> StepStamps:
        self.stamps = self._end()
        return self.stamps

    def _note(self, lane: str, group: str, label: str) -> TransferStamps:
        ledger, recorder = self.mesh.recorder.ledger, self.mesh.recorder
        assert ledger is not None
        real, recorder.ledger = ledger, None
        op = real.launch(lane, group, label)
        stamps = self._launch(lane, group, label)
        recorder.ledger = real
        if recorder.active:
            self._launched.append(op)
        return stamps

    def step(self, step: int, *, watch: bool) -> float:
        """Seconds, from the first rank's begin to its end."""
        recorder = self.mesh.recorder
        self._spans, self._launched = [], []
        recorder.launch = self._note if watch else self._launch  # type: ignore[method-assign]
        self.runtime.observe = self._saw if watch else _ignore
        self.learner.step(step)
        assert self.stamps is not None
        return self.stamps.window[1] - self.stamps.window[0]

    def seconds(self) -> Positions:
        """Of every op of the step that was watched."""
        assert self.stamps is not None
        recorder, found = self.mesh.recorder, defaultdict(float)
        window, waits = self.stamps.window, self.stamps.waits
        until: dict[str, float] = {}
        before = window[0]
        for op, _, ended in self._spans:
            if op.lane == COMPUTE:
                end = recorder.seconds(ended)
                found[self.place_of[self._name(op)]] = busy((before, end), waits)
                before = end
        updates = [at for at, op in enumerate(self.runtime.ops) if op.kind in ENDS and op.lane == COMPUTE]
        for at in updates:
            found[at] = busy((before, window[1]), waits) / len(updates)
        for op, transfer in zip(self._launched, transfers_of(self.stamps, self.mesh), strict=True):
            if op is not None:
                at = self.place_of[self._name(op)]
                if op.kind in TRANSFERS:
                    self._moved(op, transfer)
                elif (lane := self.runtime.ops[at].lane) != COMPUTE:
                    # What was launched while another of its lane was under way stood behind it.
                    begun = max(transfer.launched, transfer.last_launched, until.get(lane, 0.0))
                    found[at] += max(transfer.done - begun, 0.0)
                    until[lane] = max(transfer.done, until.get(lane, 0.0))
        return dict(found)

    def _moved(self, op: Op, transfer: TransferInterval) -> None:
        """Between stages only who waits knows when something came: note since when this rank did."""
        assert self.stamps is not None
        assert op.comm is not None
        since = [a for a, b in self.stamps.waits if a <= transfer.done <= b + SOON]
        key = f"{op.comm[0]}:{op.comm[1]}"
        self.moves[key] = (
            op.kind.part is Part.RECV,
            transfer.launched,
            transfer.done,
            max(since, default=None),
        )

    def moved(self) -> list[float]:
        """Seconds of the transfers of this step whose receiver waited before they left. Collective."""
        sent: dict[str, float] = {}
        came: list[tuple[str, float, float]] = []
        for rank in self.mesh.gather_objects(self.moves):
            for key, (receives, launched, done, since) in rank.items():
                if not receives:
                    sent[key] = launched
                elif since is not None:
                    came.append((key, done, since))
        self.moves = {}
        return [done - sent[key] for key, done, since in came if key in sent and since <= sent[key] <= done]


def _ignore(_op: Op, _begun: Any, _ended: Any) -> None:
    """So that the learner does not watch, either."""


def busy(span: Span, waits: list[Span]) -> float:
    return length(subtract([span], clip(waits, span)))


def compare(mesh: Mesh, config: TrainConfig, steps: int) -> dict[str, float]:
    """Milliseconds, predicted and measured."""
    watched = Watched(mesh, config)
    sums: dict[int, list[float]] = defaultdict(list)
    alone: list[float] = []
    moved: list[float] = []
    for step in range(WARM + 2 * steps):
        watch = step >= WARM and step % 2 == 0
        took = watched.step(step, watch=watch)
        if watch:
            for at, value in watched.seconds().items():
                sums[at].append(value)
            moved += watched.moved()
        elif step >= WARM:
            alone.append(took)
    mine = [statistics.mean(sums[at]) if at in sums else 0.0 for at in range(len(watched.runtime.ops))]
    for at, op in enumerate(watched.runtime.ops):
        if op.kind in TRANSFERS and moved:
            mine[at] = statistics.mean(moved)
    everyone = mesh.gather_objects({"ops": mine, "step": statistics.mean(alone)})
    program = verify(replicate(watched.runtime.verified.program))
    costs = Costs(name="measured", seconds={}, inline_compute=True)
    predicted = simulate(program, costs, [rank["ops"] for rank in everyone]).makespan
    measured = statistics.mean(rank["step"] for rank in everyone)
    return {"predicted_ms": 1e3 * predicted, "measured_ms": 1e3 * measured, "ratio": predicted / measured}


def main() -> int:
    parser = BenchParser(__doc__, smoke={"steps": 1, "case": ["pp 1, ep", "pp 2"]})
    parser.add_argument("--steps", type=int, default=12, help="watched, and as many that are not")
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    found: dict[str, Any] = {"machine": machine(), "cases": {}}
    print(f"{'layout':12} {'predicted':>10} {'measured':>10} {'ratio':>6}")
    for name in args.case:
        axes, changes = CASES[name]
        config = with_values(TrainConfig(), {**MODEL, **changes})
        times = run_ranks(2, compare, config, args.steps, deadline_s=600.0, **axes)[0]
        found["cases"][name] = times
        print(
            f"{name:12} {times['predicted_ms']:7.1f} ms {times['measured_ms']:7.1f} ms {times['ratio']:6.2f}"
        )
    write(args.json, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
