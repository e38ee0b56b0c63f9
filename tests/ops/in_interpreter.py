"""Compares kernels with their references through Triton's interpreter; run by `interpreted.py`.

    python in_interpreter.py experts          one of GROUPS

The interpreter must be chosen before Triton is imported, so this runs in a process of its own. It prints one
line for each comparison, the relative error, and one for each function of a kernel that ran. fp32 and fp16:
bf16 products are wrong in the interpreter.
"""

from __future__ import annotations

import dataclasses
import sys
from math import prod

import torch
from experts_in_interpreter import (
    all_experts,
    all_experts_of_few_rows,
    all_experts_through_pointers,
    check_few,
)
from routings import KINDS, report, routing
from what_ran import print_what_ran

from moeclipse.ops import (
    activation,
    adam,
    bias,
    block_floats,
    combine,
    cross_entropy,
    digest,
    eight_bits,
    gate,
    gate_losses,
    grouped_gemm,
    low_bits,
    nf4,
    norm,
    pick,
    quantised,
    rotary,
    rounding,
    sum_parts,
    topk_softmax,
)
from moeclipse.ops.activation import ACTIVATIONS, hidden_width
from moeclipse.ops.grouping import group_rows_kernel, group_rows_reference
from moeclipse.ops.tuning import Tile

CPU = torch.device("cpu")


def check_grouping(kind: str, block: int) -> None:
    ids = routing(kind)
    got = group_rows_kernel(ids, 5, block=block)
    expected = group_rows_reference(ids, 5)
    for name in ("counts_E", "offsets_E1", "row_token_M", "row_place_M", "place_row_TK"):
        same = torch.equal(getattr(got, name), getattr(expected, name))
        print(f"grouping {kind} {block} {name}\t{0 if same else 1}", flush=True)


def check_group_sum(kind: str, *, gather: bool, accumulate: bool) -> None:
    ids = routing(kind)
    grouping = group_rows_kernel(ids, 5)
    rows = torch.randn(len(ids) if gather else grouping.num_rows, 70)
    options = {"index_M": grouping.row_token_M if gather else None, "accumulate": accumulate}
    options["weight_M"] = torch.rand(grouping.num_rows, 2)[:, 1] if gather else None
    into = torch.randn(5, 70)
    expected = into.clone()
    bias.group_sum_reference(rows, grouping, expected, **options)
    bias.group_sum_kernel(rows, grouping, into, **options)
    report(f"group sum {kind} {gather}", into, expected)


def check_wgrad(kind: str, gather: str, tile: Tile, *, accumulate: bool) -> None:
    ids = routing(kind)
    grouping = group_rows_reference(ids, 5)
    used = int(grouping.offsets_E1[-1])
    rows = {name: len(ids) if gather == name else grouping.num_rows for name in ("dy", "x")}
    dy, x = torch.randn(rows["dy"], 40), torch.randn(rows["x"], 56)
    options = {} if gather == "none" else {f"{gather}_index_M": grouping.row_token_M}
    into = torch.randn(5, 40, 56)
    expected = into.clone()
    grouped_gemm.grouped_wgrad_reference(
        dy, x, grouping.offsets_E1, expected, accumulate=accumulate, **options
    )
    # What lies past the last group must not be looked at.
    for name, tensor in (("dy", dy), ("x", x)):
        if gather != name:
            tensor[used:] = float("nan")
    grouped_gemm.grouped_wgrad_kernel(
        dy, x, grouping.offsets_E1, into, accumulate=accumulate, tile=tile, **options
    )
    flags = [name for name in ("flatten", "swap", "ahead", "per_sm", "pointers") if getattr(tile, name)]
    report(f"wgrad {kind} {gather} add={accumulate} {' '.join(flags)}", into, expected)


def check_combine() -> None:
    rows, weight = torch.randn(50, 70), torch.rand(50, 2)[:, 1]
    for weights, choices in ((weight, 4), (None, 4), (weight, 20)):
        place = torch.randint(-1, 50, (13, choices), dtype=torch.int32)
        got = combine.gather_sum_kernel(rows, place, weights)
        name = f"combine {choices}{'' if weights is None else ' weighted'}"
        report(name, got, combine.gather_sum_reference(rows, place, weights))


def check_gate() -> None:
    logits = torch.randn(37, 11).round(decimals=1).requires_grad_()
    scores, ids = topk_softmax.topk_softmax_kernel(logits.detach(), 3)
    expected, expected_ids = topk_softmax.topk_softmax_reference(logits, 3)
    report("gate scores", scores, expected)
    print(f"gate ids\t{0 if torch.equal(ids, expected_ids) else 1}", flush=True)
    d_scores = torch.randn(37, 3)
    expected.backward(d_scores)
    got = topk_softmax.topk_softmax_backward_kernel(scores, ids, d_scores, 11, torch.float32)
    report("gate gradient", got, logits.grad)


def check_choice(k: int, num_experts: int, sigmoid: bool, renormalise: bool) -> None:
    kind = gate.GateKind(k=k, sigmoid=sigmoid, renormalise=renormalise, scale=1.5)
    name = f"choice {k} {num_experts} {sigmoid} {renormalise}"
    x, weight, bias = torch.randn(37, 6), torch.randn(num_experts, 6), 0.1 * torch.randn(num_experts)
    logits = (x @ weight.t()).double().requires_grad_()
    expected = gate.gate_reference(logits, torch.eye(num_experts).double(), bias.double(), kind)
    got = gate.choose_kernel(logits.detach().float(), bias, kind)
    for what in ("ids_TK", "load_E"):
        same = torch.equal(getattr(got, what), getattr(expected, what))
        print(f"{name} {what}\t{0 if same else 1}", flush=True)
    for what in ("scores_TK", "prob_E", "squares"):
        report(f"{name} {what}", getattr(got, what), getattr(expected, what).float())
    for part in ("scores", "scores, probabilities", "all"):
        d_scores, d_prob, d_squares = torch.randn(37, k), torch.randn(num_experts), torch.randn(())
        some = [d_scores, None if part == "scores" else d_prob, d_squares if part == "all" else None]
        outputs = (expected.scores_TK, expected.prob_E, expected.squares)
        total = sum((out * d).sum() for out, d in zip(outputs, some, strict=True) if d is not None)
        (truth,) = torch.autograd.grad(total, logits, retain_graph=True)
        found = gate.choose_backward_kernel(logits.detach().float(), got.ids_TK, *some, kind, torch.float32)
        report(f"{name} gradient of {part}", found.view(37, 3, -1).sum(1), truth.float())


def all_choices() -> None:
    for sigmoid in (False, True):
        check_choice(3, 11, sigmoid, renormalise=True)
        check_choice(2, 5, sigmoid, renormalise=False)
        check_choice(1, 16, sigmoid, renormalise=False)
    check_choice(1, 7, sigmoid=False, renormalise=True)


def check_adam() -> None:
    step = adam.AdamStep(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.3, number=3)
    for length, factor in ((1, 1.0), (3 * adam.BLOCK + 5, 0.3), (17, float("nan"))):
        given = [torch.randn(length), torch.randn(length), torch.rand(length), torch.randn(length)]
        given.append(torch.tensor(factor, dtype=torch.float64))
        rounded = torch.full((length,), 2.0, dtype=torch.float16)
        expected = [tensor.clone() for tensor in given]
        adam.adam_kernel(*given, step, rounded)
        adam.adam_reference(*expected, step)
        name = f"{length} {factor}"
        for what, got, truth in zip(("weight", "m", "v"), given, expected, strict=False):
            report(f"adam {what} {name}", got, truth)
            if factor != factor:
                print(f"adam skipped {what}\t{0 if torch.equal(got, truth) else 1}", flush=True)
        apart = (rounded.float() - given[0].half().float()).abs().max()
        print(f"adam rounded {name}\t{0 if factor != factor else apart.item()}", flush=True)
        if factor != factor:
            print(f"adam skipped rounded\t{(rounded != 2.0).sum().item()}", flush=True)
    check_by_chance(step)
    check_low_bits(step)
    check_eight_bits(step)
    parts = [torch.randn(2 * adam.BLOCK * adam.SQUARES_BLOCKS + 3), torch.randn(0), torch.randn(5)]
    report("squares", adam.squares_kernel(parts).sum(), adam.squares_reference(parts).sum())


def check_by_chance(step: adam.AdamStep) -> None:
    """Weights without a master: every bit. Moments in fp16, because bf16 is not rounded here."""
    length = 2 * adam.BLOCK + 100
    last = (3050, length - 3060, 3, 1 << 30, 999, 0)
    cuts = ((0, 50, 2**63 + 5, 7, 13, 0), (50, 3000, 77, 0, 64, 128), last)
    names = ("offset", "length", "key", "start", "columns", "left")
    stretches = [rounding.Stretch(**dict(zip(names, cut, strict=True))) for cut in cuts]
    whole = rounding.Stretches(stretches, length, torch.device("cpu"), adam.BLOCK)
    given = [torch.randn(length).bfloat16(), torch.randn(length).half(), torch.rand(length).half()]
    given += [torch.randn(length), torch.tensor(0.3, dtype=torch.float64)]
    expected = [tensor.clone() for tensor in given]
    for key in (2**64 - 12345, 5):
        adam.adam_kernel(*given, step, None, (whole, key))
        adam.adam_reference(*expected, step, None, (whole, key))
    other = (given[0] != expected[0]).float().mean().item()
    print(f"adam by chance\t{0 if other < 1e-3 else other}", flush=True)  # last bits of fp32 may tip one over
    report("adam narrow m 64x32", given[1], expected[1])
    report("adam narrow v 64x32", given[2], expected[2])


def check_low_bits(step: adam.AdamStep) -> None:
    """The bits of the kernel with an fp32 master; a rate of 0 leaves every tie as it is."""
    length = 2 * adam.BLOCK + 101
    ties = (torch.randint(-(1 << 15), 1 << 15, (length,)) << 16) + 0x8000
    ties = ties[ties >> 23 & 0xFF < 0xFF]
    level = dataclasses.replace(step, lr=0.0, decay=0.0)
    cases = {"drawn": (torch.randn(length), step, 0.3), "ties": (ties.int().view(torch.float32), level, 1.0)}
    cases["skipped"] = (torch.randn(17), step, float("nan"))
    for name, (wide, numbers, factor) in cases.items():
        rounded, bits = torch.empty(len(wide), dtype=torch.bfloat16), low_bits.LowBits.zeros(len(wide), CPU)
        low_bits.split(wide, rounded, bits)
        given = [torch.randn(len(wide)), torch.rand(len(wide)), torch.randn(len(wide))]
        given.append(torch.tensor(factor, dtype=torch.float64))
        expected = [tensor.clone() for tensor in given]
        for _ in range(2):
            adam.adam_kernel(bits, *given, numbers, rounded)
            adam.adam_kernel(wide, *expected, numbers)
        same = torch.equal(low_bits.join(rounded, bits).view(torch.int32), wide.view(torch.int32))
        same = same and all(torch.equal(a, b) for a, b in zip(given[:-1], expected[:-1], strict=True))
        same = same and torch.equal(rounded, wide.bfloat16())
        print(f"adam low bits {name}\t{0 if same else 1}", flush=True)


def check_eight_bits(step: adam.AdamStep) -> None:
    """Moments that are the gradient and its square, every bit; after two updates nearly every code."""
    fresh = dataclasses.replace(step, beta1=0.0, beta2=0.0, number=1)
    for group, length in ((16, 16), (64, adam.BLOCK + 192), (256, 512)):
        stretch = rounding.Stretch(offset=0, length=length, key=77, start=5, columns=group)
        whole = rounding.Stretches([stretch], length, CPU, adam.BLOCK)
        grad = torch.randn(length) * 10 ** (4 * torch.rand(length) - 6)
        factor = torch.tensor(1.0, dtype=torch.float64)
        found = []
        for update in (adam.adam_kernel, adam.adam_reference):
            weight = torch.ones(length)
            m, v = (eight_bits.EightBits.zeros(length, group, fraction, CPU) for fraction in (3, 4))
            update(weight, m, v, grad, factor, fresh, None, (whole, 12))
            begun = [one.clone() for one in (m.codes, m.tops, v.codes, v.tops)]
            for key in (2**64 - 7, 9):
                update(weight, m, v, grad, 0.3 * factor, step, None, (whole, key))
            update(weight, m, v, grad, factor * float("nan"), step, None, (whole, 13))
            found.append((begun, [m.codes, m.tops, v.codes, v.tops], weight))
        (begun, codes, weight), (begun_too, expected, truth) = found
        same = all(torch.equal(a, b) for a, b in zip(begun, begun_too, strict=True))
        print(f"adam eight bits begun {group}\t{0 if same else 1}", flush=True)
        other = max((a != b).float().mean().item() for a, b in zip(codes, expected, strict=True))
        print(f"adam eight bits {group}\t{0 if other < 2e-3 else other}", flush=True)
        report(f"adam eight bits weight {group} 64x32", weight, truth)


def check_norm(shape: tuple[int, ...], what: str, apart: int = 0) -> None:
    """`apart`: rows do not lie side by side."""
    add = what == "sum"
    width = shape[-1]
    x, b, dy, dh = (torch.randn(*shape[:-1], width + apart)[..., :width] for _ in range(4))
    operands = [x, b, torch.randn(width)] if add else [x, torch.randn(width)]
    exact = [tensor.detach().double().requires_grad_() for tensor in operands]
    ours = [tensor.detach().requires_grad_() for tensor in operands]
    function, reference = {
        "alone": (norm._RmsNorm.apply, norm.rms_norm_reference),
        "sum": (norm._AddNorm.apply, norm.add_norm_reference),
        "beside": (norm._BesideNorm.apply, lambda x, *rest: (1 * x, norm.rms_norm_reference(x, *rest))),
    }[what]
    found = {}
    for which, tensors in ((function, ours), (reference, exact)):
        out = which(*tensors, 1e-3, *(() if which is reference else (None,)))
        outs, d_outs = ((out,), (dy,)) if what == "alone" else (out, (dh, dy))
        torch.autograd.backward(outs, [d.to(outs[0].dtype) for d in d_outs])
        found[which] = [*outs, *(tensor.grad for tensor in tensors)]
    for number, (got, truth) in enumerate(zip(found[function], found[reference], strict=True)):
        report(f"norm {what} {shape} {apart} {number}", got, truth.float())


def all_norms() -> None:
    for number, shape in enumerate(((1, 5), (77, 40), (3, 7, 16), (1100, 33), (5, 3000))):
        for what in ("alone", "sum", "beside"):
            check_norm(shape, what, apart=3 * (number % 2))


def check_sum_parts() -> None:
    for shape in ((1, 1), (3, 5000), (3, 7, 11), (300, 33)):
        parts, held = torch.randn(shape), torch.randn(shape[1:])
        for accumulate in (False, True):
            for dtype in (torch.float32, torch.float16):
                got, expected = held.to(dtype), held.to(dtype)
                sum_parts.sum_parts_kernel(parts, got, accumulate=accumulate)
                sum_parts.sum_parts_reference(parts.double(), expected, accumulate=accumulate)
                report(f"parts {shape} {accumulate} {'64x32' * (dtype == torch.float16)}", got, expected)


def check_digest() -> None:
    digest.CHUNK = 256
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bool):
        for rows in (torch.randn(shape).to(dtype) for shape in ((1, 1), (3, 700), (2, 1024))):
            got = digest.digest_rows_kernel(rows, chunk=256, span=64)
            print(f"digest {dtype} {rows.shape}\t{int(not got.equal(digest.digest_rows_reference(rows)))}")


def check_decode(name: str, frozen: quantised.Quantised, rows: slice = slice(None)) -> None:
    first, stop, _ = rows.indices(frozen.shape[-2])
    shape = (*frozen.shape[:-2], stop - first, frozen.shape[-1])
    for dtype, bits in ((torch.float32, torch.int32), (torch.float16, torch.int16)):
        got, expected = (torch.full(shape, 7, dtype=dtype) for _ in range(2))
        assert frozen.launch(got, first)
        frozen.decode_reference(expected, first)
        numbers = [some.view(bits)[~expected.isnan()] for some in (got, expected)]
        same = torch.equal(*numbers) and torch.equal(got.isnan(), expected.isnan())
        print(f"quantised {name} {list(frozen.shape)} {rows} {dtype}\t{int(not same)}", flush=True)


def all_quantised() -> None:
    some = slice(3, 7)
    for shape, entries in (((2, 64), None), ((3, 8, 64), None), ((2, 9, 640), None), ((3, 8, 192), 6)):
        spread = torch.logspace(-3, 2, shape[-2])[:, None]
        frozen = nf4.quantise((torch.randn(shape) * spread).bfloat16(), entries)
        for rows in (slice(None), some) if shape[-2] > 7 else (slice(None),):
            check_decode("nf4", frozen, rows)
    check_decode("nf4", nf4.quantise(torch.randn(300, 64)), slice(250, 299))
    check_decode("nf4 of experts", nf4.quantise(torch.randn(4, 6, 64)).experts(1, 3), slice(1, 4))
    scales = torch.arange(256, dtype=torch.uint8).view(4, 8, 8)
    mx = block_floats.Mxfp4.of(torch.randint(0, 256, (4, 8, 8, 16), dtype=torch.uint8), scales)
    check_decode("mxfp4", mx)
    check_decode("mxfp4 of experts", mx.experts(1, 3), some)
    wide = torch.randint(0, 256, (1, 90, 16), dtype=torch.uint8), torch.full((1, 90), 120, dtype=torch.uint8)
    check_decode("mxfp4", block_floats.Mxfp4.of(*wide))
    for shape in ((2, 130, 144), (256, 16)):
        blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
        codes = torch.arange(prod(shape)).to(torch.uint8).view(torch.float8_e4m3fn).view(shape)
        frozen = block_floats.Fp8Blocks.of(codes, torch.rand(blocks) + 0.3)
        check_decode("fp8", frozen)
        check_decode("fp8", frozen, slice(5, 129))


def check_pick() -> None:
    for shape in ((1,), (1030,), (13, 4)):
        values, index = torch.randn(50, 2)[:, 1], torch.randint(-1, 50, shape, dtype=torch.int32)
        report(f"pick {shape}", pick.pick_kernel(values, index), pick.pick_reference(values, index))
        narrow, wide = values.bfloat16(), torch.float32
        got = pick.pick_kernel(narrow, index, wide)
        assert got.dtype == wide
        report(f"pick {shape}, widened", got, pick.pick_reference(narrow, index, wide))


def check_gate_losses() -> None:
    for num_experts, z in ((1, 0.3), (11, 0.0), (64, 0.3)):
        load, d_aux = torch.randint(0, 99, (num_experts,)), torch.tensor(0.7)
        prob, squares = (torch.rand(n, requires_grad=True) for n in ((num_experts,), ()))
        expected = gate_losses.gate_losses_reference(load, prob, squares, 0.2, z)
        got = gate_losses.gate_losses_kernel(load, prob.detach(), squares.detach(), 0.2, z)
        report(f"losses {num_experts}", got, expected.detach())
        grads = torch.autograd.grad(expected, (prob, squares), d_aux, allow_unused=True)
        found = gate_losses.gate_losses_backward_kernel(load, d_aux, 0.2, z)
        report(f"losses {num_experts} d_prob", found[0], grads[0])
        report(f"losses {num_experts} d_squares", found[1], torch.zeros(()) if grads[1] is None else grads[1])


def check_turn(shape: tuple[int, ...], *, neighbours: bool, normed: bool, by_token: bool) -> None:
    B, S, H, G, d = shape
    operands = [torch.randn(B, S, H, d), torch.randn(B, S, G, d)]
    operands += [torch.randn(d), torch.randn(d)] if normed else []
    table = torch.randn(2, B * S if by_token else S, d // 2, dtype=torch.float64)
    # As attention leaves them: heads outside of positions.
    d_outs = [torch.randn(B, heads, S, d).transpose(1, 2) for heads in (H, G)]
    found = []
    for exact in (False, True):
        given = [(t.double() if exact else t.clone()).requires_grad_() for t in operands]
        weights = given[2:] or [None, None]
        if exact:
            pairs = zip(given[:2], weights, strict=True)
            outs = [rotary.turn_reference(x, table, neighbours, w, 1e-3) for x, w in pairs]
        else:
            outs = rotary._Turn.apply(*given[:2], *weights, table, neighbours, 1e-3, (None, None))
        torch.autograd.backward(outs, [d.to(outs[0].dtype) for d in d_outs])
        found.append([*outs, *(tensor.grad for tensor in given)])
    for number, (got, truth) in enumerate(zip(*found, strict=True)):
        if truth.numel():
            name = f"turn {'normed ' if normed else ''}{shape} {neighbours} {by_token} {number}"
            report(name, got, truth.float())


def all_turns() -> None:
    for number, shape in enumerate(((1, 1, 1, 1, 8), (2, 5, 4, 2, 16), (3, 7, 3, 1, 24), (2, 4, 3, 0, 12))):
        for normed in (False, True):
            check_turn(shape, neighbours=number % 2 == 0, normed=normed, by_token=number > 1)
            check_turn(shape, neighbours=number % 2 == 1, normed=normed, by_token=number < 2)


def check_activation(shape: tuple[int, ...], name: str) -> None:
    width = shape[-1]
    h, d_a = 4 * torch.randn(*shape[:-1], hidden_width(name, width)), torch.randn(shape)
    h.requires_grad_()
    expected = activation.activate(h, name)
    report(f"activation {name} {shape}", activation._Activate.apply(h, name).detach(), expected.detach())
    expected.backward(d_a)
    d_h, a = activation.activate_backward_kernel(d_a, h.detach(), name)
    report(f"activation gradient {name} {shape}", d_h, h.grad)
    report(f"activation again {name} {shape}", a, expected.detach())
    truth, h.grad = h.grad, None
    activation._Activate.apply(h, name).backward(d_a)
    report(f"activation by autograd {name} {shape}", h.grad, truth)


def all_activations() -> None:
    for name in ACTIVATIONS:
        for shape in ((1, 1), (7, 40), (2, 3, 1500)):
            check_activation(shape, name)


def check_loss(T: int, V: int) -> None:
    logits, d_loss = 5 * torch.randn(T, V), torch.tensor(0.3)
    logits[0, -1] = float("-inf")
    target = torch.randint(-1, V - 1, (T,))
    got, expected = (
        function(logits, target)
        for function in (cross_entropy.statistics_kernel, cross_entropy.statistics_reference)
    )
    for name, ours, theirs in zip(("largest", "sum", "target"), got, expected, strict=True):
        report(f"loss {name} {T}x{V}", ours, theirs)
    given = (logits, expected[0] + expected[1].log(), target, d_loss)
    truth = cross_entropy.gradient_reference(*given)
    report(f"loss gradient {T}x{V}", cross_entropy.gradient_kernel(*given), truth)
    assert cross_entropy.gradient_kernel(*given, in_place=True) is logits
    report(f"loss gradient {T}x{V} in place", logits, truth)


def all_losses() -> None:
    for T, V in ((1, 2), (7, 256), (5, 5000)):
        check_loss(T, V)


def all_groupings() -> None:
    for number, kind in enumerate(KINDS):
        check_grouping(kind, block=16 if number % 2 else 128)
        check_few(kind, (1, 5, 16)[number % 3], (5, 70)[number % 2])
    for num_tokens in (16, 40):
        check_few("twice one takes all", num_tokens, 5)


def all_wgrads() -> None:
    for number, kind in enumerate(KINDS):
        tile = Tile(
            m=32,
            n=32,
            k=16,
            split=2,
            flatten=number % 2 == 1,
            swap=number % 4 > 1,
            ahead=number % 4 == 0,
            per_sm=int(number % 3 > 0),
        )
        check_wgrad(kind, ("x", "dy", "none")[number % 3], tile, accumulate=number % 2 == 0)
    for gather in ("x", "dy", "none"):
        for flatten in (True, False):
            tile = Tile(m=32, n=64, k=16, split=4, flatten=flatten)
            check_wgrad("unused", gather, tile, accumulate=flatten)


def all_wgrads_through_pointers() -> None:
    for number, kind in enumerate(KINDS):
        tile = Tile(m=32, n=64, k=16, split=(1, 4)[number % 2], flatten=number % 3 == 1, pointers=True)
        tile = dataclasses.replace(tile, swap=number % 4 > 1, ahead=number % 2 == 0, per_sm=number % 2)
        check_wgrad(kind, ("none", "x", "dy")[number % 3], tile, accumulate=number % 2 == 0)


def all_group_sums() -> None:
    for kind in ("empty", "unused"):
        check_group_sum(kind, gather=kind == "unused", accumulate=kind == "empty")


GROUPS = {
    "grouping": all_groupings,
    "experts": all_experts,
    "experts through pointers": all_experts_through_pointers,
    "experts of few rows": all_experts_of_few_rows,
    "wgrad": all_wgrads,
    "wgrad through pointers": all_wgrads_through_pointers,
    "bias": all_group_sums,
    "combine": check_combine,
    "gate": check_gate,
    "choice": all_choices,
    "adam": check_adam,
    "norm": all_norms,
    "parts": check_sum_parts,
    "digest": check_digest,
    "quantised": all_quantised,
    "pick": check_pick,
    "losses": check_gate_losses,
    "turn": all_turns,
    "loss": all_losses,
    "activation": all_activations,
}


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    GROUPS[sys.argv[1]]()
    print_what_ran()


if __name__ == "__main__":
    main()
