"""The experts' kernels in Triton's interpreter, against their references (`in_interpreter` runs it)."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from routings import KINDS, report, routing

from moeclipse.ops import expert_kernels, expert_mlp
from moeclipse.ops.activation import ACTIVATIONS, hidden_width
from moeclipse.ops.grouping import group_few_kernel, group_rows_kernel, group_rows_reference
from moeclipse.ops.tuning import Tile


def check_experts(
    kind: str,
    d: int,
    f: int,
    dtype: torch.dtype,
    *,
    gather: bool,
    flatten: bool,
    activation: str = "swiglu",
    biased: bool = False,
    rank: int = 0,
    pointers: bool = False,
    few: bool = False,
) -> None:
    """`few`: so few rows that the smallest tiles serve, which the table chooses."""
    ids = routing(kind, 16) if few else routing(kind)
    ids = ids.repeat(1, 2) if few and kind == "one takes all" else ids  # by a gate of one's own
    grouping = group_few_kernel(ids, 5) if few else group_rows_kernel(ids, 5)
    used = int(grouping.offsets_E1[-1])
    name = f"{kind} {d}x{f} {'gathered' if gather else 'as they lie'} {activation}{' bias' if biased else ''}"
    name += f" rank {rank}" if rank else ""
    name += " pointers" if pointers else ""
    name += " few" if few else ""
    index = grouping.row_token_M if gather else None
    num_rows, width = len(ids) if gather else grouping.num_rows, hidden_width(activation, f)
    up = (torch.randn(5, width, d) * d**-0.5).to(dtype)
    down = (torch.randn(5, d, f) * f**-0.5).to(dtype)
    up_bias, down_bias = (torch.randn(5, n).to(dtype) if biased else None for n in (width, d))
    x, dy = torch.randn(num_rows, d).to(dtype), torch.randn(num_rows, d).to(dtype)
    scores = torch.rand(grouping.num_rows, 2)[:, 1]  # as they arrive by dispatch: a column
    tile = Tile(n=32, k=16, flatten=flatten, pointers=pointers, per_sm=0 if pointers and not flatten else 1)
    adapters = Adapters(rank, grouping.num_rows, d, f, width, dtype)
    options = {"activation": activation, "bias_EH": up_bias, "more": adapters.up}
    expected_h, expected_a = expert_mlp.up_reference(x, up, grouping, index, **options)
    h, a = expert_mlp.up_kernel(x, up, grouping, index, None if few else tile, **options)
    report(f"h {name}", h[:used], expected_h[:used])
    report(f"a {name}", a[:used], expected_a[:used])
    if torch.are_deterministic_algorithms_enabled():  # what nobody wrote is NaN
        written = sum(int((~each[used:].isnan()).sum()) for each in (h, a))
        print(f"a written past the last row {name}\t{written}", flush=True)
    options = {"bias_ED": down_bias, "more": adapters.down}
    down_tile = None if few else replace(tile, split=2, flatten=False)
    y = expert_mlp.down_kernel(expected_a, down, grouping, down_tile, **options)
    expected_y = expert_mlp.down_reference(expected_a, down, grouping, **options)
    report(f"y {name}", y[:used], expected_y[:used])
    back = (dy, scores, expected_h, down, grouping, index)
    options = {"activation": activation, "more": adapters.d_hidden}
    got = expert_mlp.d_hidden_kernel(*back, tile, **options)
    expected = expert_mlp.d_hidden_reference(*back, **options)
    for part, ours, theirs in zip(("dh", "scaled", "dscore"), got, expected, strict=True):
        report(f"{part} {name}", ours[:used], theirs[:used])
    back = (expected[0], up, grouping)
    dx = expert_mlp.d_rows_kernel(*back, tile, more=adapters.d_rows)
    report(f"dx {name}", dx[:used], expert_mlp.d_rows_reference(*back, more=adapters.d_rows)[:used])
    if rank:
        a, b = torch.randn(5, rank, d).to(dtype), torch.randn(5, d, rank).to(dtype)
        for transposed, weight in ((True, a), (False, b)):
            how = {"scale": 1.5, "transposed": transposed}
            u = expert_mlp.narrow_kernel(
                x, weight, grouping, index, replace(tile, n=16, flatten=False), **how
            )
            expected_u = expert_mlp.narrow_reference(x, weight, grouping, index, **how)
            report(f"u {name} {transposed}", u[:used], expected_u[:used])


def check_few(kind: str, num_tokens: int, num_experts: int) -> None:
    """Also the tiles. "twice": a gate of one's own may name an expert twice for a token."""
    ids = routing(kind.removeprefix("twice "), num_tokens, num_experts)
    ids = ids.repeat(1, 2) if kind.startswith("twice") else ids
    got, expected = group_few_kernel(ids, num_experts), group_rows_reference(ids, num_experts)
    for name in ("counts_E", "offsets_E1", "row_token_M", "row_place_M", "place_row_TK"):
        same = torch.equal(getattr(got, name), getattr(expected, name))
        print(f"few {kind} {num_tokens} {name}\t{0 if same else 1}", flush=True)
    bounds = expected.offsets_E1.tolist()
    tiles = [
        (expert, first, stop)
        for expert, (begin, stop) in enumerate(itertools.pairwise(bounds))
        for first in range(begin, stop, got.tile_rows)
    ]
    count = int(got.num_tiles)
    same = list(map(tuple, got.tiles_3C[:, :count].t().tolist())) == tiles
    print(f"few {kind} {num_tokens} tiles\t{0 if same else 1}", flush=True)


class Adapters:
    """What each product takes into its sum; nothing for rank 0."""

    def __init__(self, rank: int, rows: int, d: int, f: int, width: int, dtype: torch.dtype) -> None:
        shapes = {"up": (width, rank), "down": (d, rank), "d_hidden": (rank, f), "d_rows": (rank, d)}
        for name, shape in shapes.items():
            more = expert_kernels.More(torch.randn(rows, rank).to(dtype), torch.randn(5, *shape).to(dtype))
            setattr(self, name, more if rank else None)


def all_experts() -> None:
    for number, kind in enumerate(KINDS):
        check_experts(kind, 40, 24, torch.float32, gather=number % 2 == 0, flatten=number % 3 == 0)
    check_experts("skewed", 64, 32, torch.float16, gather=True, flatten=True)
    for number, name in enumerate(ACTIVATIONS):
        options = {"gather": number % 2 == 0, "flatten": number > 1, "activation": name}
        check_experts("unused", 40, 24, torch.float32, biased=True, **options)
    for number, rank in enumerate((8, 16, 72)):
        options = {
            "gather": number % 2 == 0,
            "flatten": number > 1,
            "activation": ("gelu", "swiglu")[number % 2],
        }
        check_experts("unused", 40, 24, torch.float32, biased=number == 1, rank=rank, **options)


def all_experts_of_few_rows() -> None:
    for number, kind in enumerate(("skewed", "unused", "one takes all")):
        how = {"gather": number < 2, "flatten": False, "activation": ("swiglu", "gelu")[number % 2]}
        how |= {"biased": number == 1, "rank": (0, 8, 16)[number]}
        check_experts(kind, 40, 24, torch.float32, few=True, **how)


def all_experts_through_pointers() -> None:
    torch.use_deterministic_algorithms(True)
    for number, kind in enumerate(("skewed", "unused", "empty")):
        how = {"gather": number == 1, "flatten": number == 2, "activation": ("swiglu", "gelu")[number % 2]}
        check_experts(
            kind, 40, 24, torch.float32, biased=number == 1, rank=(0, 8, 72)[number], pointers=True, **how
        )
    check_experts("skewed", 64, 32, torch.float16, gather=False, flatten=False, pointers=True)
