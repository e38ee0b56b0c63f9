"""Functions that no compiled graph holds, and that cost those nothing who compile nothing."""

from __future__ import annotations

import subprocess
import sys

import torch

from moeclipse.tensor.linear import eager


def test_a_graph_ends_before_and_another_begins_behind() -> None:
    from torch._dynamo.testing import CompileCounter  # a compiler, which all forks of the suite would copy

    compiling = []

    @eager
    def twice(x: torch.Tensor, *, more: float = 0.0) -> torch.Tensor:
        """Doubles."""
        compiling.append(torch.compiler.is_compiling())
        return 2 * x + more

    def around(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        z = twice(y, more=1.0)
        return torch.cos(z)

    assert (twice.__name__, twice.__doc__) == ("twice", "Doubles.")
    x = torch.linspace(0, 1, 5)
    expected = around(x)
    counter = CompileCounter()
    compiled = torch.compile(around, backend=counter)
    for _ in range(2):
        assert torch.equal(compiled(x), expected)
    assert counter.frame_count == 2, "one graph before it, one behind it"
    assert compiling == [False, False, False], "it runs as it is"


def test_who_compiles_nothing_loads_no_compiler() -> None:
    """Each of these takes a process half a second, and a run has many processes."""
    slow = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.checkpoint", "sympy", "triton")
    code = f"import sys, moeclipse.train.run.trainer; print([name for name in {slow} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
