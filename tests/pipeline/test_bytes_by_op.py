"""What each op of a real step takes and gives back, in bytes, against what a program says of it."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from test_learner import configure

from moeclipse.comm.mesh import Mesh
from moeclipse.schedule.kinds import KINDS, Form, Part
from moeclipse.schedule.memory import layer_memory
from moeclipse.schedule.op import Op
from moeclipse.schedule.shape import Activation, LayerShape
from moeclipse.schedule.text import parse_op
from moeclipse.testing.run_ranks import run_alone
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner

LAYER = 1
"""Neither the first, which has the embedding before it, nor the last, which has the head behind it."""
MEASURED = Activation(
    input=0.04, attn=0.23, shared=0.16, mlp=0.57, attn_grad=-0.13, shared_grad=0.1, mlp_grad=0.28
)
"""Parts of what one layer keeps, of the model below."""
WIDE: dict[str, Any] = {
    "model.num_layers": 3,
    "model.d_model": 64,
    "model.head_dim": 16,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.dtype": "float32",
    "moe.d_ff": 96,
    "moe.num_shared_experts": 1,
    "data.seq_len": 64,
    "data.batch_size": 16,
    "optim.accumulate": 4,
    "pipeline.schedule": "zb-h1",
}


def change_by_op(mesh: Mesh, config: TrainConfig, folder: str) -> dict[str, float]:
    """Bytes that torch's allocator gave out while an op ran, less those it got back, by the op's name."""
    learner = Learner(config, mesh)
    assert learner.pipelined is not None
    runtime = learner.pipelined.runtime
    run = runtime._run

    def named(op: Op) -> Any:
        with torch.profiler.record_function(f"op {op}"):
            return run(op)

    runtime._run = named  # type: ignore[method-assign]
    learner.backward(0)
    path = Path(folder) / "trace.json"
    with torch.profiler.profile(profile_memory=True) as profile:
        learner.backward(1)
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    ops = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix("op "))
        for event in events
        if event.get("name", "").startswith("op ") and event.get("cat") == "user_annotation"
    )
    starts = [op[0] for op in ops]
    found: dict[str, float] = defaultdict(float)
    for event in events:
        if event.get("name") == "[memory]":
            at = bisect_right(starts, event["ts"]) - 1
            if at >= 0 and event["ts"] <= ops[at][1]:
                found[ops[at][2]] += event["args"]["Bytes"]
    return dict(found)


def test_a_layer_holds_more_between_dx_and_dw_than_forward_kept(tmp_path: Path) -> None:
    """Gradients wait for dW, and most of what forward kept waits with them."""
    text = tmp_path / "text.txt"
    text.write_text(Path(__file__).read_text()[:4000])
    found: dict[str, float] = run_alone(change_by_op, configure(str(text), **WIDE), str(tmp_path))
    held: dict[Form, float] = defaultdict(float)
    by_part: dict[tuple[Part, Form], float] = defaultdict(float)
    for name, change in found.items():
        op = parse_op(name)
        if op.layer == LAYER and op.microbatch == 2:
            part = {Part.DISPATCH: Part.MLP, Part.COMBINE: Part.MLP, Part.ROUTE: Part.ATTN}
            held[op.kind.form] += change
            by_part[part.get(op.kind.part, op.kind.part), op.kind.form] += change
    kept = held[Form.F]
    assert kept > 0
    assert 1.1 * kept < kept + held[Form.B] < 1.3 * kept
    assert kept + held[Form.B] + held[Form.W] == pytest.approx(0.0, abs=0.12 * kept)
    layer = LayerShape(activation=MEASURED)
    for (part, form), change in by_part.items():
        if form in (Form.F, Form.B):
            taken, given = layer_memory(layer, KINDS[f"{part.name}_{form.name}"])
            assert change / kept == pytest.approx(taken - given, abs=0.05), (part, form)


def peaks(changes: dict[str, float], program: str) -> tuple[float, float]:
    """Most that is held at once, in bytes as they were and as ops say it, counted in what one layer keeps."""
    held = most = said = highest = 0.0
    shape = LayerShape(activation=MEASURED)
    for name in program.split():
        op = parse_op(name)
        if op.layer == LAYER:
            held += changes.get(name, 0.0)
            most = max(most, held)
            taken, given = layer_memory(shape, op.kind)
            said += taken
            highest = max(highest, said)
            said -= given
    return most, highest


def test_the_peak_of_a_step_is_what_its_ops_say(tmp_path: Path) -> None:
    """Of the layer in the middle, over all microbatches, in the order in which the step ran."""
    text = tmp_path / "text.txt"
    text.write_text(Path(__file__).read_text()[:4000])
    for schedule in ("zb-h1", "gpipe"):
        changes = {**WIDE, "pipeline.schedule": schedule}
        found: dict[str, float] = run_alone(change_by_op, configure(str(text), **changes), str(tmp_path))
        kept = sum(
            change
            for name, change in found.items()
            if (op := parse_op(name)).layer == LAYER and op.microbatch == 2 and op.kind.form is Form.F
        )
        most, highest = peaks(found, " ".join(found))
        assert most / kept == pytest.approx(highest, rel=0.1), schedule
