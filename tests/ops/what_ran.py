"""What Triton's interpreter ran in this process, a line for each function of a kernel."""

from __future__ import annotations


def print_what_ran() -> None:
    from triton.runtime.interpreter import InterpretedFunction

    for function in InterpretedFunction.rewritten_fn:
        print(f"ran {function.__module__}.{function.__name__}\t0", flush=True)
