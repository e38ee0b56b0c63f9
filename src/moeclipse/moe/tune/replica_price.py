"""What replicas take in every step, measured with the costs of the layer.

The gradients of a replica go to those who own its expert, and new weights come back: over communicators of
the backend, while rows may travel through memory that ranks share. With small experts the way is longer than
their bytes say: stretches are cut out, added and laid into place, and every parameter is exchanged twice
(`train/placement/expert_buckets`). So each rank goes it with nothing, and with one expert for the next rank.

    fixed        with nothing, all experts of the rank copied on the way: what a layer with replicas pays
    bandwidth    bytes of one copy, gradients and weights, over the seconds that it adds

Contract: collective over the ranks of a stage; no weight and no gradient is touched.
"""

from __future__ import annotations

from functools import partial

import torch

from moeclipse.comm.async_ops.lane import all_to_all
from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.tune.stopwatch import MORE, slope_of, slowest
from moeclipse.ops.precision import WIDE
from moeclipse.ops.raw_bytes import as_bytes

WHERE = "probe of replicas"
PARAMETERS = 2
"""That an expert has: what leads in, and what leads out."""


@torch.no_grad()
def sync_price(
    size: int, dtype: torch.dtype, held: int, group: Group, mesh: Mesh
) -> tuple[float, float | None]:
    """(fixed, bandwidth) of experts with `size` parameters, at most `held` of them on a rank; 0 on one rank.

    A copy that takes no time that can be seen, however often it is tried, has no bandwidth: None.
    """
    if group.size == 1:
        return 0.0, 0.0
    each = -(-size // PARAMETERS)
    weights = [torch.zeros(each, dtype=dtype, device=mesh.device) for _ in range(PARAMETERS)]
    grads = [torch.zeros(each, dtype=WIDE[dtype], device=mesh.device) for _ in range(PARAMETERS)]
    works = [partial(sync, weights, grads, count, group, mesh) for count in (0, each)]
    moved = sum(tensor.nbytes for tensor in (*weights, *grads))
    for _ in MORE[mesh.device.type]:
        nothing, one, copied = slowest([*works, partial(copy, weights, grads)], mesh)
        slope = slope_of(nothing, one, moved)
        if slope.each is not None:
            break
    return nothing.seconds + max(held - 1, 0) * copied.seconds, slope.rate


def sync(
    weights: list[torch.Tensor], grads: list[torch.Tensor], count: int, group: Group, mesh: Mesh
) -> None:
    """Gradients of so many elements of each parameter to the next rank, and weights back from it."""
    to, source = [0] * group.size, [0] * group.size
    to[(group.index + 1) % group.size] = source[(group.index - 1) % group.size] = count
    under_way = [all_to_all(mesh.a2a, group, grad[:count].clone(), to, source, WHERE) for grad in grads]
    totals = copy(weights, grads)
    for arriving, total in zip(under_way, totals, strict=True):
        total[:count] += arriving.get()
    counts = ([count * weights[0].element_size() for count in counts] for counts in (source, to))
    back, forth = map(list, counts)
    returning = [
        all_to_all(mesh.a2a, group, as_bytes(weight[:count].clone()), back, forth, WHERE)
        for weight in weights
    ]
    for arriving, weight in zip(returning, weights, strict=True):
        weight[:count] = arriving.get().clone().view(weight.dtype)


def copy(weights: list[torch.Tensor], grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """What an expert costs whose layer has replicas, even if it has none."""
    totals = []
    for weight, grad in zip(weights, grads, strict=True):
        total = torch.zeros_like(grad)
        total += grad.clone()
        weight.copy_(total)
        totals.append(total)
    return totals
