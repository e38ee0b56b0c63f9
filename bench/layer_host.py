"""What the host needs for one layer at ep 2, beside an expert-parallel layer written by hand.

    .venv/bin/python bench/layer_host.py [--rounds 40] [--json FILE] [--smoke]

Sixteen tokens of width 32 on each of two CPU ranks: products take nothing, so what is timed is Python,
torch's own calls and small messages. `PlainLayer` is what a person writes in an afternoon: counts, rows,
experts one by one, rows back, all by autograd. The layers do forward and backward in turns, in a drawn order,
each from a common start; the table shows medians of the slowest rank, and the median ratio of pairs.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # ranks are forked

import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _smoke import BenchParser, machine, write
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from moeclipse import MoE
from moeclipse.comm.mesh import Mesh
from moeclipse.testing.run_ranks import run_ranks

TOKENS, WIDTH, HIDDEN, EXPERTS, TOP_K = 16, 32, 64, 8, 2


class PlainLayer(nn.Module):
    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.mine = ranks, EXPERTS // ranks
        self.gate = nn.Parameter(torch.randn(EXPERTS, WIDTH) * 0.02)
        self.up = nn.ParameterList(torch.randn(2 * HIDDEN, WIDTH) * 0.02 for _ in range(self.mine))
        self.down = nn.ParameterList(torch.randn(WIDTH, HIDDEN) * 0.02 for _ in range(self.mine))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        probs_TE = F.softmax(x_TD @ self.gate.t(), dim=-1)
        scores_TK, ids_TK = probs_TE.topk(TOP_K)
        scores_TK = scores_TK / scores_TK.sum(-1, keepdim=True)
        order = ids_TK.flatten().argsort(stable=True)
        counts_E = torch.bincount(ids_TK.flatten(), minlength=EXPERTS)
        arriving_PE = torch.empty_like(counts_E)
        dist.all_to_all_single(arriving_PE, counts_E)
        table = arriving_PE.view(self.ranks, self.mine)
        send = counts_E.view(self.ranks, self.mine).sum(1).tolist()
        receive = table.sum(1).tolist()
        rows = x_TD[order // TOP_K]
        rows = all_to_all_single_autograd(rows, receive, send, dist.group.WORLD)
        by_expert = torch.arange(self.mine).repeat(self.ranks).repeat_interleave(table.flatten())
        grouped = by_expert.argsort(stable=True)
        parts = rows[grouped].split(table.sum(0).tolist())
        outs = []
        for part, up, down in zip(parts, self.up, self.down, strict=True):
            one, two = F.linear(part, up).chunk(2, dim=-1)
            outs.append(F.linear(F.silu(one) * two, down))
        results = torch.empty_like(rows).index_copy(0, grouped, torch.cat(outs))
        back = all_to_all_single_autograd(results, send, receive, dist.group.WORLD)
        weighted = back * scores_TK.flatten()[order, None]
        load_E = counts_E.clone()
        dist.all_reduce(load_E)
        self.loss = EXPERTS * (load_E / load_E.sum() * probs_TE.mean(0)).sum()
        return torch.zeros_like(x_TD).index_add(0, order // TOP_K, weighted)


def measure(mesh: Mesh, rounds: int) -> dict[str, list[float]]:
    torch.manual_seed(mesh.rank)
    options = {"d_model": WIDTH, "d_ff": HIDDEN, "num_experts": EXPERTS, "top_k": TOP_K, "mesh": mesh}
    ours = MoE(**options, exchange={"schedule": "blocking", "transport": "direct"})  # type: ignore[arg-type]
    smart = MoE(**options, exchange={"schedule": "smart", "chunks": 1, "transport": "direct"})  # type: ignore[arg-type]
    plain = PlainLayer(mesh.num_ranks)
    x_TD = torch.randn(TOKENS, WIDTH, requires_grad=True)

    def loss_of(layer: MoE) -> torch.Tensor:
        y_TD = layer(x_TD)
        assert layer.last is not None
        return y_TD.sum() + 0.01 * layer.last.aux_loss

    runs: dict[str, Callable[[], torch.Tensor]] = {
        "plain": lambda: plain(x_TD).sum() + 0.01 * plain.loss,
        "blocking": lambda: loss_of(ours),
        "smart": lambda: loss_of(smart),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    drawn = random.Random(0)  # the same order on all ranks
    for round_ in range(rounds + 5):
        for name in drawn.sample(sorted(runs), len(runs)):
            dist.barrier()
            began = time.perf_counter()
            runs[name]().backward()
            took = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if round_ >= 5:
                times[name].append(float(took))
    return times


def main() -> int:
    parser = BenchParser(__doc__, smoke={"rounds": 2})
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    times = run_ranks(2, measure, given.rounds, deadline_s=300)[0]
    rows = {}
    print(f"{'layer':10}{'ms':>8}{'over plain':>12}")
    for name, took in times.items():
        over = statistics.median(a / b for a, b in zip(took, times["plain"], strict=True))
        rows[name] = {"ms": 1e3 * statistics.median(took), "over_plain": over}
        print(f"{name:10}{rows[name]['ms']:8.2f}{over:12.2f}")
    write(given.json, {"machine": machine(), "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
