"""`moeclipse.overlap`: one microbatch's rows travel while another one computes, in a loop of one's own.

    outputs = moeclipse.overlap(model, [first, second])
    (sum(map(task_loss, outputs)) / 2 + moeclipse.aux_loss(model)).backward()

Any module whose MoE layers are ours: where a layer has launched a transfer, the other microbatch goes on
(`moe/own_loop/microbatch_threads`). Backward hides in the same way, so call it once, over all microbatches.
Gradients are those of the plain loop; after it, a layer's loss is the mean over the microbatches, and counts
are sums.

A layer of two microbatches A and B, in the order of launches; what stands under a transfer hides it:

    A: rows leave | B: sum, attention, gate, rows leave | A: experts, results leave | B: experts, ... | A: sum

FSDP2 gathers and drops the weights of a block around one call of it, and would drop them under the other
microbatch: it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from moeclipse.core.errors import ConfigError
from moeclipse.moe.layer import MoE
from moeclipse.moe.losses import MoEReport
from moeclipse.moe.own_loop.microbatch_threads import Turns
from moeclipse.moe.own_loop.standalone import moe_layers

T = TypeVar("T")
Result = TypeVar("Result")


def overlap(
    model: nn.Module, microbatches: Sequence[T], call: Callable[[T], Result] | None = None
) -> list[Result]:
    """What the model returns for each microbatch, in order. All ranks have as many of them.

    A tuple or list is given to the model as arguments, a dict as named ones, all else as its only argument;
    `call(microbatch)` does it otherwise, and may compute a loss: `aux_loss(model)` is then that microbatch's.
    """
    layers = [layer for _, layer in moe_layers(model)]
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigError(
            "overlap cannot go with fully_shard, which drops the weights of a block under the other "
            "microbatch; use moeclipse.parallelize(model, mesh, dense='ddp')"
        )
    if not layers or not len(microbatches):
        raise ConfigError("overlap needs a model with MoE layers, and at least one microbatch")
    turns = Turns(layers, layers[0].mesh.device)
    for layer in layers:
        layer.turns = turns
    try:
        results = turns.run([partial(call or partial(_call, model), given) for given in microbatches])
    finally:
        for layer in layers:
            layer.turns = None
    _join_reports(layers, [turns.reports[number] for number in range(len(microbatches))])
    return results


def _call(model: Callable[..., Result], given: object) -> Result:
    if isinstance(given, Mapping):
        return model(**given)
    return model(*given) if isinstance(given, (tuple, list)) else model(given)


def _join_reports(layers: Sequence[MoE], reports: Sequence[Sequence[MoEReport | None]]) -> None:
    for layer, several in zip(layers, zip(*reports, strict=True), strict=True):
        told = [report for report in several if report is not None]
        if len(told) == len(several):
            layer.last = MoEReport(
                aux_loss=torch.stack([report.aux_loss for report in told]).mean(),
                load_E=torch.stack([report.load_E for report in told]).sum(0),
                num_dropped=torch.stack([report.num_dropped for report in told]).sum(),
            )
