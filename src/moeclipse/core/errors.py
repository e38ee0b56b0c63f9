"""Every error that MoEclipse raises on purpose.

An error says what was given, what was expected and what to do. It is raised before any rank waits
for another wherever that is possible; `code` is the exit status of the command line. Its text may be printed
as it is: names and keys of others in it drive no terminal (`core/shown`).
"""

from __future__ import annotations

from collections.abc import Sequence

from moeclipse.core.shown import sentence, visible


class MoEclipseError(Exception):
    """Base of all errors below; the command line prints its text without a traceback."""

    code = 1
    lines = False
    """Whether its text has several, as a program's grid."""

    def __init__(self, text: str = "") -> None:
        super().__init__(visible(text, lines=True) if self.lines else sentence(text))


class ConfigError(MoEclipseError, ValueError):
    """One or more problems in a configuration, all of them listed."""

    code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [sentence(one) for one in ([problems] if isinstance(problems, str) else problems)]
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        alone = len(self.problems) == 1
        text = self.problems[0] if alone else f"{len(self.problems)} problems:{lines}"
        Exception.__init__(self, text)


class ScheduleError(MoEclipseError, ValueError):
    """A program that cannot run: malformed, incomplete or deadlocking."""

    code = 2
    lines = True


class DataError(MoEclipseError, ValueError):
    """Training data that is missing, empty or unreadable."""

    code = 2


class CheckpointError(MoEclipseError):
    """Weights that cannot be taken: a checkpoint, a model's or an adapter's folder that is damaged, or
    another model's."""

    code = 2


class StorageError(CheckpointError):
    """A disk that does not take a checkpoint, or gives back a damaged one; another try may go well."""

    code = 1


class CommError(MoEclipseError, RuntimeError):
    """A rank failed, left or did not arrive; the text names it."""

    lines = True


class DeadlineError(CommError):
    """Ranks waited longer than the deadline; the text names who waited, and for whom."""


class DivergedError(MoEclipseError, RuntimeError):
    """Too many steps in a row with a non-finite loss or gradient."""


class CorruptionError(MoEclipseError, RuntimeError):
    """Bits of weights or optimizer state changed without an update; the text names rank and tensor."""


class Preempted(MoEclipseError):
    """Asked to leave, the run has saved its state and ends; the text says how to go on."""

    code = 75  # EX_TEMPFAIL: try again later
