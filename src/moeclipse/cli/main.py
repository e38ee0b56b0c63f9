"""`moeclipse`: one table of commands, each loaded when it is called.

Help and version answer at once: nothing here imports torch, and a command's module is imported only when
the command runs. What a user has to mend is printed as one `error: ...` without a traceback (`cli/guard`).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from moeclipse import __version__
from moeclipse.cli.guard import BAD_INPUT, first_to_tell, one_line
from moeclipse.core.config import nearest
from moeclipse.core.program import program
from moeclipse.core.shown import say

INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended


class Command(NamedTuple):
    module: str
    summary: str


COMMANDS = {
    "train": Command("moeclipse.cli.train", "train a model, on this machine's ranks or under torchrun"),
    "generate": Command("moeclipse.cli.generate", "write text with a run or a Hugging Face model"),
    "simulate": Command("moeclipse.cli.simulate", "predict a schedule's timeline without running it"),
    "plan": Command(
        "moeclipse.cli.plan", "find the layout of a model on a cluster, before a GPU is asked for"
    ),
    "measure": Command("moeclipse.cli.measure", "measure this machine, or fit a run, for plan and simulate"),
    "place": Command("moeclipse.cli.place", "plan who holds which expert from the loads of a run"),
    "skew": Command("moeclipse.cli.skew", "say what uneven gates cost, and what would help"),
    "report": Command("moeclipse.cli.report", "show a run as one page, compare two, check numbers in CI"),
    "convert": Command("moeclipse.cli.convert", "turn Hugging Face models into checkpoints, and back"),
    "doctor": Command("moeclipse.cli.doctor", "what works on this machine, what does not, what to do"),
    "completion": Command("moeclipse.cli.completion", "complete commands and flags in bash, zsh or fish"),
}


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    return (
        "MoEclipse trains Mixture-of-Experts models so that communication hides behind computation.\n\n"
        f"usage: moeclipse COMMAND ...\n\n{lines}\n\n"
        "moeclipse COMMAND --help shows what a command takes; moeclipse --version shows the version.\n"
        f"Start with: {program()} train"
    )


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return dispatch(words)
    except KeyboardInterrupt:
        say("interrupted", error=True)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has left; without this Python complains again while it shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        told = one_line(error)
        if told is None:
            raise
        text, code = told
        if code != BAD_INPUT or first_to_tell(text):
            say(f"error: {text}", error=True)
        return code


def dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        say(usage())
        return 0
    if words[0] in ("-V", "--version", "version"):
        say(f"moeclipse {__version__}")
        return 0
    name, *rest = words
    if name not in COMMANDS:
        close = nearest(name, COMMANDS)
        hint = f"did you mean {close!r}?" if close else f"choose one of {', '.join(COMMANDS)}"
        say(f"error: unknown command {name!r}; {hint}", error=True)
        return 2
    try:
        module = importlib.import_module(COMMANDS[name].module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in ("moeclipse", "torch"):
            raise
        say(f"error: `moeclipse {name}` needs {error.name}; run: pip install {error.name}", error=True)
        return 2
    run: Callable[[list[str]], int] = module.main
    return run(rest)
