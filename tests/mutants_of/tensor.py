"""Mutants of tensor/: tensor parallelism."""

from __future__ import annotations

from mutants_of.mutant import Mutant

MUTANTS = (
    Mutant(
        "tensor/linear.py",
        """\
        if d_x is not None and tp.size > 1:
            travelling = reduce_input_grad(tp, d_x, label)
        parameters = [*weights, *ctx.biases]
        grads = tp.wgrads.submit_linears(parameters, wanted, [*dys_TN, *dys_TN], x_TD, num, fuse=tp.fuse)
""",
        """\
        parameters = [*weights, *ctx.biases]
        grads = tp.wgrads.submit_linears(parameters, wanted, [*dys_TN, *dys_TN], x_TD, num, fuse=tp.fuse)
        if d_x is not None and tp.size > 1:
            travelling = reduce_input_grad(tp, d_x, label)
""",
        "tensor/test_linear_order.py::test_exchanges_travel_under_the_products_that_do_not_need_them",
        "all-reduce of d_x launched behind the weight gradient",
        "tensor parallel steps pay the whole all-reduce",
    ),
    Mutant(
        "tensor/linear.py",
        """\
            if whole is not None and not tp.overlap:
                whole.get()
""",
        "            whole.get()\n",
        "tensor/test_linear_order.py::test_exchanges_travel_under_the_products_that_do_not_need_them",
        "the input's gather waited for before dgrad",
        "with sequence parallelism the gather is exposed in every layer",
    ),
    Mutant(
        "tensor/linear.py",
        """\
    if not hidden:
        travelling.get()
""",
        "",
        "tensor/test_linear_order.py::test_without_overlap_each_exchange_ends_before_the_next_product",
        "without overlap, the reduction of d_x left under way",
        "`overlap = False`, the yardstick, hides something",
    ),
    Mutant(
        "tensor/cut.py",
        '    return "cut" if isinstance(share, Cut) else share',
        '    return "cut" if isinstance(share, Cut) else "sum"',
        "tensor/test_cut.py::test_marks_say_what_gradients_are",
        "gradients that all ranks have are summed over them",
        "norms learn tp times as fast",
    ),
    Mutant(
        "tensor/cut.py",
        "((b * block + self.start) * width, self.length * width)",
        "((b + self.start) * width, self.length * width)",
        "tensor/test_cut.py::test_parts_have_the_weights_of_the_whole",
        "blocks lie one row apart",
        "checkpoints of gated MLPs are read from wrong places under tp",
    ),
    Mutant(
        "tensor/parallel.py",
        '        return "sum" if self.sequence_parallel else "same"',
        '        return "sum"',
        "tensor/test_parallel.py::test_what_follows_from_options",
        "without sequence parallelism, gradients that all ranks have are marked as shares",
        "norms learn tp times as fast",
    ),
    Mutant(
        "tensor/parallel.py",
        "        key = (like.dtype, like.device)\n",
        "        key = (torch.float32, like.device)\n",
        "tensor/test_parallel.py::test_a_buffer_grows_to_the_largest",
        "one buffer for all types",
        "what is gathered in float64 is rounded to float32",
    ),
    Mutant(
        "tensor/parallel.py",
        "        if self.sequence_parallel and self.async_all_reduce:",
        "        if False:",
        "tensor/test_parallel.py::test_what_follows_from_options",
        "settings that exclude each other are taken",
        "one of them is ignored without a word",
    ),
)
