"""Every error that MoEclipse raises on purpose.

An error says what was given, what was expected and what to do. It is raised before any rank waits
for another wherever that is possible; `code` is the exit status of the command line.
"""

from __future__ import annotations

from collections.abc import Sequence


class MoEclipseError(Exception):
    """Base of all errors below; the command line prints its text without a traceback."""

    code = 1


class ConfigError(MoEclipseError, ValueError):
    """One or more problems in a configuration, all of them listed."""

    code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        if len(self.problems) == 1:
            super().__init__(self.problems[0])
        else:
            lines = "".join(f"\n  - {problem}" for problem in self.problems)
            super().__init__(f"{len(self.problems)} problems in the configuration:{lines}")


class ScheduleError(MoEclipseError, ValueError):
    """A program that cannot run: malformed, incomplete or deadlocking."""

    code = 2


class DataError(MoEclipseError, ValueError):
    """Training data that is missing, empty or unreadable."""

    code = 2


class CheckpointError(MoEclipseError):
    """A checkpoint that cannot be written, is damaged, or belongs to another model."""


class CommError(MoEclipseError, RuntimeError):
    """A rank failed, left or did not arrive; the text names it."""


class DeadlineError(CommError):
    """Ranks waited longer than the deadline; the text names who waited, and for whom."""


class DivergedError(MoEclipseError, RuntimeError):
    """Too many steps in a row with a non-finite loss or gradient."""


class CorruptionError(MoEclipseError, RuntimeError):
    """Bits of weights or optimizer state changed without an update; the text names rank and tensor."""


class Preempted(MoEclipseError):
    """Asked to leave, the run has saved its state and ends; the text says how to go on."""

    code = 75  # EX_TEMPFAIL: try again later
