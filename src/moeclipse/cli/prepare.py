"""Tokens before ranks: documents are tokenised once, by all cores, with a bar that says how far it is.

Ranks then map what they find in `data.cache`. Under torchrun nobody comes before the ranks: the first of each
machine does it while the others wait.
"""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from moeclipse.cli.terminal import terminal
from moeclipse.train.config import TrainConfig
from moeclipse.train.data.corpus import find_corpus, is_made_of_documents, open_corpus, total_size
from moeclipse.train.data.data_config import DataConfig, all_parts
from moeclipse.train.documents.cache import IN_MEMORY


class TokenBar:
    """A bar that appears with the first news, and not at all where tokens are there already."""

    def __init__(self, console: Console) -> None:
        self.console, self.shown = console, 0
        self.progress: Progress | None = None

    def tell(self, done: int, total: int) -> None:
        if total < IN_MEMORY:
            return
        if not self.console.is_terminal:
            self._line(done, total)
            return
        if self.progress is None:
            self.progress = Progress(
                TextColumn("tokenising"),
                BarColumn(bar_width=None),
                TaskProgressColumn(),
                TimeRemainingColumn(compact=True),
                console=self.console,
                transient=True,
                expand=True,
            )
            self.task = self.progress.add_task("", total=total)
            self.progress.start()
        self.progress.update(self.task, completed=done)

    def _line(self, done: int, total: int) -> None:
        """In a file or a pipe: a line for each quarter."""
        while self.shown < 4 * done // total:
            self.shown += 1
            self.console.print(f"tokenising: {25 * self.shown} % of {total / 1e6:.0f} MB")

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()


def prepare_all(config: TrainConfig) -> None:
    """Tokens of everything that a run reads."""
    for part in all_parts(config.data, config.eval):
        prepare(part, config.model.vocab_size)


def prepare(config: DataConfig, vocab_size: int) -> None:
    """Tokens of all documents that a configuration names, in its cache."""
    found = find_corpus(config)
    if not is_made_of_documents(config, found):
        return
    if total_size(found.files) < IN_MEMORY:
        return
    bar = TokenBar(terminal())
    try:
        open_corpus(config, vocab_size, bar.tell)
    finally:
        bar.close()
