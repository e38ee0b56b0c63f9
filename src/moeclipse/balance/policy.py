"""A planner of one's own: a function that is named in the configuration.

    def keep_two(problem: PlanProblem) -> Placement: ...          # in plans.py

    moeclipse train --placement.policy plans.py:keep_two

Idea: a policy is a pure function from what is asked (`balance/problem`: loads, slots, what holds now, what
things cost, and a judge that says what a placement would cost) to a placement. It is named and not handed
over, so that it stands in the run's configuration, and every rank and every restart finds it.

Contract: only the first rank of a stage calls it, in a thread beside training; all ranks check its answer
before one of them moves. What it raises, or an answer that does not fit, costs a note and moves nothing;
`sys.exit` is something that it raises. A function that ends the process itself (`os._exit`) ends a rank.

Hazard: runs are equal, bit by bit, as long as the function is: no clock, no random numbers without a seed.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import current_thread, main_thread

from moeclipse.balance.placement import Placement
from moeclipse.balance.problem import PlanProblem
from moeclipse.core.errors import ConfigError
from moeclipse.core.outside import read_bytes

Policy = Callable[[PlanProblem], Placement]
FORM = "FILE.py:FUNCTION or MODULE:FUNCTION"


def policy_problems(text: str, planner: str) -> Iterator[str]:
    """What is wrong with `placement.policy`, before it is loaded."""
    where, colon, name = text.rpartition(":")
    if not (where and colon and name.isidentifier()):
        yield f"placement.policy ({text!r}) must be {FORM}"
    elif where.endswith(".py"):
        yield from _file_problems(Path(where), name)
    if planner not in ("static", "auto"):
        yield f"placement.policy stands in place of a planner; leave out placement.planner ({planner!r})"


def _file_problems(path: Path, name: str) -> Iterator[str]:
    """Read, not run: nobody's code runs before ranks start."""
    if not path.is_file():
        yield f"placement.policy: there is no file {path}"
        return
    try:
        body = ast.parse(read_bytes(path)).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        yield f"placement.policy: {path} cannot be loaded ({error!r})"
        return
    # What is no plain definition (an import, a loop, an assignment) may make any name.
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    plain = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef, ast.Expr)
    others = [node for node in body if not isinstance(node, plain)]
    made = any(name in ast.dump(node) or "'*'" in ast.dump(node) for node in others)
    if name not in functions and not made:
        yield f"placement.policy: {path} has no function {name}"


def load_policy(text: str) -> Policy:
    """The function of that name."""
    problems = list(policy_problems(text, "static"))
    if problems:
        raise ConfigError(problems)
    where, _, name = text.rpartition(":")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(where).stem, where)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"placement.policy: {where} cannot be loaded ({error!r})") from error
    found: Policy | None = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"placement.policy: {where} has no function {name}")
    return guarded(found, text)


def guarded(policy: Policy, name: str) -> Policy:
    """The same, whose every failure is one error with its name: a thread would end without a word."""

    def ask(problem: PlanProblem) -> Placement:
        try:
            return policy(problem)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and current_thread() is main_thread():
                raise  # a person's, not the function's
            raise ConfigError(f"placement.policy {name} raised {error!r}") from error

    return ask
