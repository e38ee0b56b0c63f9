"""What a training run shows: progress while it goes, and a summary that says what was hidden.

On a terminal a start says what it is at, then the loss is drawn above a line that moves; elsewhere (a file, a
pipe, a dumb terminal) some twenty plain lines are printed. Everything is drawn twice, in blocks and in ASCII,
and the four parts of a step differ by character as well as by colour, so nothing is lost without Unicode or
colour.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from moeclipse.cli.evaluated import eval_lines, eval_text
from moeclipse.cli.heatmap import heat_lines
from moeclipse.cli.plot import average_to, plot_lines
from moeclipse.cli.terminal import terminal
from moeclipse.core.program import command
from moeclipse.core.steps import nth, nth_window
from moeclipse.train.observe.run_figures import RunInfo, RunSummary, StepRecord

BLOCKS = " ▁▂▃▄▅▆▇█"
ASCII_LEVELS = " .:-=+*#@"
PLAIN_LINES = 20
SPARK_WIDTH = 12
PLOT_HEIGHT, PLOT_WIDTH = 6, 78
ROOM_FOR_PLOT = (60, 16)
"""Columns and lines of a terminal that is large enough."""
CLEAR = "\r\033[2K"
LABEL_WIDTH = 10
# (key in the records, word, colour, character, ASCII character)
PARTS = (
    ("compute_ms", "compute", "green", "█", "#"),
    ("exposed_ms", "exposed", "red", "▓", "="),
    ("straggle_ms", "straggle", "yellow", "▒", "-"),
    ("idle_ms", "idle", "bright_black", "░", "."),
)


def make_observer(console: Console | None = None) -> Display:
    """The display for where the output goes."""
    return Display(console or terminal())


class Display:
    """Follows one run on rank 0; the trainer calls start, step, note and end."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.unicode = not console.options.ascii_only
        self.live = console.is_terminal and not console.is_dumb_terminal
        self.losses: list[float] = []
        self.experts_vary = False
        self.steps = 0
        self.first_step = 0
        self.begun = time.monotonic()
        self.progress: Progress | None = None
        self.in_phase = False
        self.task = TaskID(0)

    def phase(self, text: str) -> None:
        """What a start is at, on a line that the next word takes."""
        if self.live and self.progress is None:
            self.console.file.write(f"{CLEAR}{text} ...")
            self.console.file.flush()
            self.in_phase = True

    def _end_phase(self) -> None:
        if self.in_phase:
            self.console.file.write(CLEAR)
            self.console.file.flush()
            self.in_phase = False

    def start(self, info: RunInfo) -> None:
        self._end_phase()
        self.steps, self.first_step = int(info.get("steps", 0)), int(info.get("start_step", 0))
        self.begun = time.monotonic()
        self.experts_vary = bool(info.get("experts_vary"))
        ranks = int(info.get("num_ranks", 1))
        dot = "·" if self.unicode else "|"
        axes = (("tp", info.get("tp", 1)), ("pp", info.get("pp", 1)))
        more = "".join(f" x {axis} {size}" for axis, size in axes if size > 1)
        layout = f"{count(ranks, 'rank')} (dp {info.get('dp', 1)} x ep {info.get('ep', 1)}{more})"
        place = f"{info.get('device', '?')} {str(info.get('dtype', '')).removeprefix('torch.')}"
        name = str(info.get("name", "run"))
        self.console.print(Text.assemble((name, "bold"), f" {dot} {layout} {dot} {place}"))
        size = f"{short(info.get('num_parameters'))} parameters"
        active = f"{short(info.get('num_active_parameters'))} active"
        self.console.print(f"{size}, {active} {dot} {short(info.get('tokens_per_step'))} tokens per step")
        if info.get("corpus"):
            self.console.print(f"corpus: {info['corpus']}")
        if self.first_step:
            self.console.print(f"resumed after step {self.first_step}")
        if self.live:
            self._start_progress()

    def _start_progress(self) -> None:
        self.progress = PlotAndProgress(
            self.plot,
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("[bold]loss {task.fields[loss]}[/] [cyan]{task.fields[spark]}[/]"),
            TextColumn("{task.fields[speed]} tok/s{task.fields[experts]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            transient=True,
            expand=True,
        )
        begin: dict[str, Any] = {"total": self.steps, "completed": self.first_step}
        self.task = self.progress.add_task("", **begin, loss="-", spark="first step", speed="-", experts="")
        self.progress.start()

    def plot(self) -> list[Text]:
        """The loss so far, where the terminal has room for it."""
        if len(self.losses) < 2 or not has_room(self.console):
            return []
        width = min(self.console.width, PLOT_WIDTH)
        total = self.steps - self.first_step
        lines = plot_lines(self.losses, width, PLOT_HEIGHT, self.unicode, total)
        return [Text(line, style="cyan") for line in lines]

    def step(self, record: StepRecord) -> None:
        done, loss = nth(int(record.get("step", 0))), float(record.get("loss", math.nan))
        self.losses.append(loss)
        if "eval_loss" in record:
            self.console.print(f"step {done}: {eval_text(record)}")
        if self.progress is not None:
            spark = "" if has_room(self.console) else sparkline(self.losses, SPARK_WIDTH, self.unicode)
            speed = short(record.get("tokens_per_s"))
            experts = self._experts(record, " {:.2f} experts")
            self.progress.update(
                self.task, completed=done, loss=f"{loss:.3f}", spark=spark, speed=speed, experts=experts
            )
            return
        every = max(self.steps // PLAIN_LINES, 1)
        if done == self.first_step + 1 or done % every == 0 or done == self.steps:
            self._plain_step(done, loss, record)

    def _plain_step(self, done: int, loss: float, record: StepRecord) -> None:
        left = (time.monotonic() - self.begun) / max(done - self.first_step, 1) * (self.steps - done)
        width = len(str(self.steps))
        speed = short(record.get("tokens_per_s"))
        self.console.print(
            f"step {done:>{width}}/{self.steps}  loss {loss:.4f}  lr {record.get('lr', 0.0):.2e}  "
            f"grad norm {record.get('grad_norm', math.nan):.2f}  "
            f"{self._experts(record, 'experts {:.2f}  ')}{speed} tokens/s  left {clock(left)}"
        )

    def _experts(self, record: StepRecord, text: str) -> str:
        """Experts per token, where tokens choose how many they visit."""
        mean = record.get("mean_experts")
        return text.format(mean) if self.experts_vary and mean is not None else ""

    def note(self, text: str) -> None:
        self._end_phase()
        self.console.print(Text(f"note: {text}", style="yellow"))

    def close(self) -> None:
        """Give the terminal back; harmless when nothing is live."""
        self._end_phase()
        if self.progress is not None:
            self.progress.stop()
            self.progress = None

    def end(self, summary: RunSummary) -> None:
        drawn = self.plot() if self.live else []
        self.close()
        for line in drawn:
            self.console.print(line)
        self.console.print()
        for label, lines in summary_lines(summary, self.console.width, self.unicode):
            for index, line in enumerate(lines):
                head = f"{label if index == 0 else '':<{LABEL_WIDTH}}"
                self.console.print(Text.assemble((head, "bold"), line))


class PlotAndProgress(Progress):
    """A progress line under a plot."""

    def __init__(self, plot: Callable[[], list[Text]], *columns: ProgressColumn, **options: Any) -> None:
        self.plot = plot
        super().__init__(*columns, **options)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from self.plot()
        yield self.make_tasks_table(self.tasks)


def has_room(console: Console) -> bool:
    columns, lines = ROOM_FOR_PLOT
    return console.width >= columns and console.height >= lines


# --- the summary -----------------------------------------------------------------------------------------


def summary_lines(summary: Mapping[str, Any], width: int, unicode: bool) -> list[tuple[str, list[Text]]]:
    """(label, lines) of the summary, each line at most `width - LABEL_WIDTH` wide where it can be."""
    room = max(min(width, 100) - LABEL_WIDTH, 20)
    arrow = "→" if unicode else "->"
    loss = f"{number(summary.get('loss_first'), 3)} {arrow} {number(summary.get('loss_last'), 3)}"
    entropy = summary.get("unigram_entropy")
    baseline = f"  (unigram entropy of the corpus: {entropy:.3f})" if entropy is not None else ""
    speed = f"{short(summary.get('tokens_per_s'))} tokens/s, {number(summary.get('step_ms'), 1)} ms per step"
    if summary.get("mfu") is not None:
        share = f"{100 * summary['mfu']:.0f} % of the device's peak"
        speed += f", {share} (MFU), {100 * summary['of_limit']:.0f} % of what the work allows"
    lines = [
        ("loss", [Text.assemble((loss, "bold"), baseline)]),
        *eval_lines(summary),
        ("speed", [Text(speed)]),
        ("step", step_bar(summary, room, unicode)),
        ("hidden", [Text(hidden_text(summary))]),
    ]
    price = summary.get("slowdown")
    if price is not None:
        lines[-1][1].append(Text(f"under communication compute takes {price:.2f} times as long"))
    load, layers = [float(value) for value in summary.get("load") or []], summary.get("load_by_layer") or []
    if load:
        lines.append(("load", load_chart(load, room, unicode, layers=len(layers))))
    if len(layers) > 1:
        lines.append(("by layer", heat_lines(np.array(layers), room, unicode)))
    if summary.get("balance") is not None:
        lines.append(("ranks", [Text(ranks_text(summary))]))
    mean = summary.get("mean_experts")
    if mean is not None and not float(mean).is_integer():
        lines.append(("experts", [Text(f"{mean:.2f} per token, on average")]))
    if summary.get("dropped"):
        lines.append(("dropped", [Text(f"{summary['dropped']:,} rows over capacity")]))
    directory = str(summary.get("directory", ""))
    lines.append(("written", [Text(directory)]))
    if summary.get("checkpoint"):
        twice = 2 * int(str(summary["checkpoint"]).rpartition("-")[2])
        config = Path(directory) / "config.toml"
        again = command("train", config, "--resume", "auto", "--run.steps", twice)
        lines.append(("go on", [Text(again, style="cyan")]))
    if summary.get("sample"):
        lines.append(("it writes", sample_lines(summary["sample"], room, unicode)))
    return lines


def sample_lines(sample: Mapping[str, Any], room: int, unicode: bool) -> list[Text]:
    """What the model wrote, each on one line behind the words it went on from; or why it wrote nothing."""
    if sample.get("why"):
        return [Text(f"nothing: {sample['why']}")]
    lines = []
    for prompt, text in sample["lines"]:
        head, rest = (one_line(part, unicode) for part in (prompt, text))
        lines.append(Text.assemble((head, "bright_black"), rest))
        lines[-1].truncate(room, overflow="ellipsis" if unicode else "crop")
    return lines


def one_line(text: str, unicode: bool) -> str:
    """A text whose line ends and other controls can be seen; without Unicode, in ASCII."""
    seen = text.replace("\n", "↵" if unicode else "\\n").replace("\t", "    ")
    seen = "".join(char if char.isprintable() else "\ufffd" for char in seen)
    return seen if unicode else seen.encode("ascii", "replace").decode()


def hidden_text(summary: Mapping[str, Any]) -> str:
    """A percentage never stands without its milliseconds and its window."""
    total, hidden = summary.get("comm_ms") or 0.0, summary.get("hidden_ms") or 0.0
    window = f", {nth_window(summary['window'])}" if summary.get("window") else ""
    if total <= 0:
        return f"no communication{window}"
    fraction = summary.get("hidden_fraction")
    percent = 100 * (hidden / total if fraction is None else fraction)
    return f"{hidden:.1f} of {total:.1f} ms communication per step ({percent:.0f} %){window}"


def step_bar(summary: Mapping[str, Any], room: int, unicode: bool) -> list[Text]:
    """One step as a stacked bar, and its legend."""
    times = [max(float(summary.get(key) or 0.0), 0.0) for key, *_ in PARTS]
    total = sum(times)
    if total <= 0:
        return [Text("not measured")]
    bar, legend, lines = Text(), Text(), []
    for cells, time_ms, (_, word, colour, block, ascii_block) in zip(
        share(times, min(room, 60)), times, PARTS, strict=True
    ):
        mark = block if unicode else ascii_block
        bar.append(mark * cells, style=colour)
        entry = Text.assemble((mark, colour), f" {word} {time_ms:.1f} ms {100 * time_ms / total:.0f} %")
        if legend and len(legend) + 2 + len(entry) > room:
            lines.append(legend)
            legend = Text()
        legend = legend + Text("  ") + entry if legend else entry
    return [bar, *lines, legend]


def share(parts: Sequence[float], cells: int) -> list[int]:
    """Whole cells in proportion to the parts, all cells used (largest remainders first)."""
    total = sum(parts)
    exact = [part / total * cells for part in parts]
    whole = [math.floor(value) for value in exact]
    order = sorted(range(len(parts)), key=lambda i: whole[i] - exact[i])
    for index in order[: cells - sum(whole)]:
        whole[index] += 1
    return whole


def load_chart(
    load: Sequence[float], room: int, unicode: bool, height: int = 3, layers: int = 1
) -> list[Text]:
    """Tokens per expert as columns; neighbours are averaged when there are more experts than cells."""
    mean = sum(load) / len(load)
    worst = max(range(len(load)), key=load.__getitem__)
    values = average_to(load, room)
    column = max(min(room // len(values) - 1, 4), 1)
    gap = " " if (column + 1) * len(values) <= room else ""
    top = max(values) or 1.0
    levels = BLOCKS if unicode else " #"
    steps = len(levels) - 1
    rows: list[Text] = []
    for row in reversed(range(height)):
        cells = [min(max(round(value / top * height * steps) - row * steps, 0), steps) for value in values]
        rows.append(Text(gap.join(levels[cell] * column for cell in cells), style="blue"))
    if column >= len(str(len(load) - 1)) and len(values) == len(load):
        rows.append(Text(gap.join(f"{index:^{column}}" for index in range(len(load))), style="bright_black"))
    ratio = load[worst] / mean if mean else 1.0
    over = f" over {layers} layers" if layers > 1 else ""  # of each number, the sum of them
    busiest = f"{len(load)} experts{over}; busiest is {worst} with {ratio:.2f} x the mean load"
    idle = sum(value == 0 for value in load)
    return [*rows, Text(busiest + (f"; {idle} without a token" if idle else ""))]


def sparkline(values: Sequence[float], width: int, unicode: bool) -> str:
    """The course of some values in one line; gaps where they are not finite."""
    levels = BLOCKS if unicode else ASCII_LEVELS
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    top = len(levels) - 1

    def level(value: float) -> str:
        if not math.isfinite(value):
            return " "
        if high == low:
            return levels[1]
        # Halves: the distance of the largest numbers is none.
        return levels[1 + round((value / 2 - low / 2) / (high / 2 - low / 2) * (top - 1))]

    return "".join(map(level, average_to(values, width)))


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def short(value: float | None) -> str:
    """1234567 -> '1.23 M'."""
    if value is None or not math.isfinite(value):
        return "-"
    for size, suffix in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def count(number: int, thing: str, plural: str = "s") -> str:
    """(2, 'rank') -> '2 ranks'."""
    return f"{number} {thing}{'' if number == 1 else plural}"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def ranks_text(summary: Mapping[str, Any]) -> str:
    """How even the ranks were, and what was done about it; what that cost and won stands below."""
    text = f"at {summary['balance']:.2f}: rows of the mean rank over those of the fullest"
    placed = summary.get("placement") or {}
    if placed.get("plans"):
        done = f"{count(placed['plans'], 'plan')} taken, {count(placed['parcels'], 'transfer')}"
        return f"{text}; {done} since the run was last started"
    return text
