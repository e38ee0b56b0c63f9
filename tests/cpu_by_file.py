"""`pytest --cpu`: what each file of tests costs in CPU seconds, its forked ranks and subprocesses included.

Seconds on the clock say little on a busy machine and nothing of ranks that wait for each other; CPU seconds
are what a suite has to pay on any number of cores.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest

SHOWN = 40


class CpuByFile:
    def __init__(self, path: str | None) -> None:
        self.path = path  # every test with its seconds goes there, if anywhere
        self.seconds: Counter[str] = Counter()
        self.last = spent()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        now = spent()
        report.cpu, self.last = now - self.last, now  # xdist carries attributes to whoever prints
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += getattr(report, "cpu", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        files: Counter[str] = Counter()
        for test, seconds in self.seconds.items():
            files[test.partition("::")[0]] += seconds
        terminalreporter.section(f"CPU seconds: {files.total():.0f} in {len(files)} files")
        for file, seconds in files.most_common(SHOWN):
            terminalreporter.write_line(f"{seconds:8.1f}  {file}")
        if self.path:
            with open(self.path, "w") as table:
                table.writelines(f"{seconds:.2f}\t{test}\n" for test, seconds in self.seconds.most_common())


def spent() -> float:
    """CPU seconds of this process and of all children it has waited for."""
    times = os.times()
    return sum(times[:4])
