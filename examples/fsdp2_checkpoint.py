"""FSDP2 around dense weights, experts over ranks, and checkpoints of torch.distributed.checkpoint.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2_checkpoint.py --folder FOLDER --steps 10
    torchrun --standalone --nproc-per-node 4 examples/fsdp2_checkpoint.py --folder FOLDER --steps 20

The second run goes on where the first one stopped, with other ranks holding other experts. Tokens are drawn
by their number in the whole batch, so that losses do not depend on the number of ranks.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import moeclipse

D, EXPERTS, TOKENS = 32, 8, 512
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Net(nn.Module):
    def __init__(self, mesh: moeclipse.Mesh) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)
        self.moe = moeclipse.MoE(D, 2 * D, EXPERTS, mesh=mesh, exchange={"schedule": "smart"})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        return self.last(h + self.moe(h))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = moeclipse.Mesh.of_world(ep=dist.get_world_size())

    torch.manual_seed(0)  # dense weights and the task are the same everywhere; experts know their numbers
    rotation = torch.linalg.qr(torch.randn(D, D)).Q
    model = moeclipse.parallelize(Net(mesh), mesh, dense="fsdp2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    done: Any = {"steps": 0}
    if args.folder.exists():
        weights, state = get_state_dict(model, optimizer, options=FLAT)
        everything = {"model": weights, "optimizer": state, "done": done}
        dcp.load(everything, checkpoint_id=args.folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=FLAT)
        done = everything["done"]

    for step in range(done["steps"], args.steps):
        target = torch.randn(TOKENS, D, generator=torch.Generator().manual_seed(step))
        target = target.chunk(mesh.num_ranks)[mesh.rank]
        loss = (model(target @ rotation) - target).square().mean()
        (loss + moeclipse.aux_loss(model)).backward()
        moeclipse.sync_gradients(model)
        moeclipse.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / mesh.num_ranks
        dist.all_reduce(mean)
        if mesh.rank == 0:
            print(f"step {step} loss {float(mean):.5f}")
    weights, state = get_state_dict(model, optimizer, options=FLAT)
    everything = {"model": weights, "optimizer": state, "done": {"steps": args.steps}}
    dcp.save(everything, checkpoint_id=args.folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
