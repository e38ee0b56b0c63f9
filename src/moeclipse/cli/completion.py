"""`moeclipse completion SHELL`: a script that completes commands, flags and their values.

    bash    eval "$(moeclipse completion bash)"                 in ~/.bashrc
    zsh     eval "$(moeclipse completion zsh)"                  in ~/.zshrc
    fish    moeclipse completion fish > ~/.config/fish/completions/moeclipse.fish

Idea. The script is a table that was made from the same dataclasses as parsers and help, so completing starts
no Python; after an update it is made anew by the next shell.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import typing
from typing import Any, Literal

from moeclipse.cli.words import read
from moeclipse.core.config import keys_of

Shell = Literal["bash", "zsh", "fish"]
SCHEMAS = {
    "train": "train:TrainCommand",
    "generate": "generate:GenerateOptions",
    "simulate": "simulate:SimulateConfig",
    "plan": "plan:PlanOptions",
    "measure": "measure:MeasureOptions",
    "place": "place:PlaceConfig",
    "skew": "skew:SkewConfig",
    "report": "report:ReportConfig",
    "convert": "convert:ConvertOptions",
    "doctor": "doctor:DoctorOptions",
    "completion": "completion:CompletionOptions",
}
"""Command -> the dataclass of its flags, in a module beside this one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """Print a script that completes commands, flags and values in a shell."""

    shell: Shell
    """bash, zsh or fish."""


def main(words: list[str]) -> int:
    options = read(CompletionOptions, words, "completion", positional="shell", usage="SHELL")
    sys.stdout.write({"bash": bash, "zsh": zsh, "fish": fish}[options.shell](table()))
    return 0


Table = dict[str, dict[str, tuple[str, ...]]]
"""Command -> flag -> the values that it takes, where these are a few."""


def table() -> Table:
    found: Table = {}
    for command, place in SCHEMAS.items():
        module, _, name = place.partition(":")
        kinds = keys_of(getattr(importlib.import_module(f"moeclipse.cli.{module}"), name))
        found[command] = {f"--{key.replace('_', '-')}": values_of(kind) for key, kind in kinds.items()}
    found["completion"] = dict.fromkeys(typing.get_args(Shell), ())
    return found


def values_of(kind: Any) -> tuple[str, ...]:
    if kind is bool:
        return ()
    if typing.get_origin(kind) is Literal:
        return tuple(map(str, typing.get_args(kind)))
    return tuple(value for part in typing.get_args(kind) for value in values_of(part) if part is not Ellipsis)


def cases(found: Table, indent: str) -> str:
    """Flags by command, then values by command and flag, as the arms of a `case`."""
    arms = [f"{indent}{command}) words='{' '.join(flags)}' ;;" for command, flags in found.items()]
    return "\n".join(arms)


def value_cases(found: Table, indent: str) -> str:
    arms = [
        f"{indent}{command}:{flag}) words='{' '.join(values)}' ;;"
        for command, flags in found.items()
        for flag, values in flags.items()
        if values
    ]
    return "\n".join(arms)


def bash(found: Table) -> str:
    return f"""_moeclipse() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
  local command=${{COMP_WORDS[1]}} words=''
  if [ "$COMP_CWORD" -eq 1 ]; then words='{" ".join(found)}'; else
    case "$command:$before" in
{value_cases(found, "      ")}
      *) case "$command" in
{cases(found, "        ")}
      esac ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  [ ${{#COMPREPLY[@]}} -gt 0 ] || COMPREPLY=($(compgen -f -- "$word"))
}}
complete -o filenames -F _moeclipse moeclipse
"""


def zsh(found: Table) -> str:
    """By bash's own way of completing, which zsh knows."""
    return "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n" + bash(found)


def fish(found: Table) -> str:
    lines = ["complete -c moeclipse -e"]
    begins = "not __fish_seen_subcommand_from " + " ".join(found)
    lines += [f"complete -c moeclipse -f -n '{begins}' -a '{command}'" for command in found]
    for command, flags in found.items():
        there = f"__fish_seen_subcommand_from {command}"
        for flag, values in flags.items():
            if not flag.startswith("--"):
                lines.append(f"complete -c moeclipse -f -n '{there}' -a '{flag}'")
                continue
            more = f" -x -a '{' '.join(values)}'" if values else ""
            lines.append(f"complete -c moeclipse -n '{there}' -l '{flag[2:]}'{more}")
    return "\n".join(lines) + "\n"
