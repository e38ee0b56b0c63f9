"""Weights without a run: a model on this rank takes what it holds out of a checkpoint or a folder.

Training loads through its optimizer, which owns master weights (`train/optim/adamw`). Whoever only reads a
model has none; each rank reads the slices that its layout asks for, and nothing has to be sent.
"""

from __future__ import annotations

from math import prod

import torch
from torch import nn

from moeclipse.moe.own_loop.standalone import moe_layers
from moeclipse.tensor.cut import cut_of
from moeclipse.train.optim.adamw import Readable
from moeclipse.train.optim.bucket_contents import BucketEntry, entries_of


def load_into(model: nn.Module, source: Readable) -> None:
    """All parameters, and the buffers that `source` has."""
    with torch.no_grad():
        for parameter, entries in parameters_by_name(model):
            flat = parameter.view(-1)
            for entry in entries:
                stop = entry.start + entry.numel
                data = source.read(f"weight/{entry.name}", entry.start, stop)
                if data is not None:  # a new part of a model begins as it was made
                    flat[entry.offset : entry.offset + entry.numel] = data.to(flat.device, flat.dtype)
        kept = set(model.state_dict())
        for name, buffer in model.named_buffers():
            data = source.read(f"buffer/{name}") if name in kept and f"buffer/{name}" in source else None
            if data is not None:
                buffer.copy_(data.view(buffer.shape))


def parameters_by_name(model: nn.Module) -> list[tuple[nn.Parameter, list[BucketEntry]]]:
    """Each parameter, and the parts of logical tensors that it is made of."""
    stacked = {
        id(parameter): (f"{name}." if name else "", layer, key)
        for name, layer in moe_layers(model)
        for key, parameter in layer.experts.named_parameters()
    }
    found = []
    for name, parameter in model.named_parameters():
        if id(parameter) in stacked:
            prefix, layer, key = stacked[id(parameter)]
            shape = tuple(parameter.shape[1:])
            entries = [
                entry
                for slot, expert in enumerate(layer.experts.ids)
                for entry in entries_of(
                    f"{prefix}experts.{expert}.{key}", shape, slot * prod(shape), cut_of(parameter)
                )
            ]
        else:
            entries = list(entries_of(name, tuple(parameter.shape), 0, cut_of(parameter)))
        found.append((parameter, entries))
    return found
