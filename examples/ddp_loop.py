"""A loop of one's own under DDP: experts over ranks, all other weights shared, one norm for all gradients.

    torchrun --standalone --nproc-per-node 2 examples/ddp_loop.py [--dense fsdp2] [--device cuda]

A small network learns to undo a fixed rotation. All ranks print the same losses: dense weights are equal on
all of them, and each rank's experts have the gradients of all ranks' tokens.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import moeclipse

D, EXPERTS, TOKENS = 32, 8, 256


class Net(nn.Module):
    def __init__(self, mesh: moeclipse.Mesh, device: torch.device) -> None:
        super().__init__()
        self.first = nn.Linear(D, D, device=device)
        self.moe = moeclipse.MoE(
            D, 2 * D, EXPERTS, top_k=2, mesh=mesh, device=device, exchange={"schedule": "smart"}
        )
        self.last = nn.Linear(D, D, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        return self.last(h + self.moe(h))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dense", default="ddp", choices=["ddp", "fsdp2"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    device = (
        torch.device(args.device, int(os.environ["LOCAL_RANK"]))
        if args.device == "cuda"
        else torch.device("cpu")
    )
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    mesh = moeclipse.Mesh.of_world(ep=dist.get_world_size(), device=device)

    torch.manual_seed(0)  # dense weights and the task are the same everywhere; experts know their numbers
    rotation = torch.linalg.qr(torch.randn(D, D)).Q.to(device)
    model = moeclipse.parallelize(Net(mesh, device), mesh, dense=args.dense)
    experts = moeclipse.expert_parameters(model)
    groups = [list(experts), [p for p in model.parameters() if p not in experts]]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-2)

    torch.manual_seed(1 + dist.get_rank())  # tokens are not
    for step in range(args.steps):
        target = torch.randn(TOKENS, D, device=device)
        loss = (model(target @ rotation) - target).square().mean()
        (loss + moeclipse.aux_loss(model)).backward()
        moeclipse.sync_gradients(model)
        norm = moeclipse.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        if step in (0, args.steps - 1):
            print(f"rank {mesh.rank} step {step} loss {float(mean):.6f} norm {float(norm):.6f}\n", end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
