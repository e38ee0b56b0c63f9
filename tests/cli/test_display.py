"""What a run shows, on a terminal, in a file, at 80 columns and without Unicode."""

from __future__ import annotations

import io
import re

import pytest
from fake_trainer import INFO, SUMMARY
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from moeclipse.cli.display import (
    Display,
    average_to,
    clock,
    hidden_text,
    load_chart,
    share,
    short,
    sparkline,
    summary_lines,
)
from moeclipse.cli.terminal import terminal as make_terminal
from moeclipse.core import program


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "program", lambda: "moeclipse")


def console(width: int = 80, terminal: bool = False, encoding: str = "utf-8", **options: object) -> Console:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    return make_terminal(file=file, width=width, force_terminal=terminal, _environ={}, **options)


def text_of(console: Console) -> str:
    console.file.flush()
    return console.file.buffer.getvalue().decode(console.file.encoding)  # type: ignore[attr-defined]


def show(out: Console, steps: int = 3) -> str:
    display = Display(out)
    display.start(INFO | {"name": "tiny-1", "steps": steps, "num_ranks": 2})
    for step in range(steps):
        display.step(
            {"step": step, "loss": 5.0 - step, "lr": 1e-3, "grad_norm": 1.5, "tokens_per_s": 12345.0}
        )
    display.note("a [note] with brackets")
    display.end(SUMMARY | {"directory": "runs/tiny-1"})
    return text_of(out)


def test_a_file_gets_plain_lines_and_the_summary() -> None:
    text = show(console())
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[0] == "tiny-1 · 2 ranks (dp 1 x ep 2) · cpu float32"
    assert lines[1] == "3.91 M parameters, 1.21 M active · 2.05 k tokens per step"
    assert lines[2] == "corpus: some [bold] text, 24.1 MB"
    assert lines[3].startswith("step 1/3  loss 5.0000  lr 1.00e-03  grad norm 1.50  12.3 k tokens/s  left ")
    assert lines[5].startswith("step 3/3  loss 3.0000")
    assert lines[6] == "note: a [note] with brackets"
    assert "loss      5.610 → 1.920  (unigram entropy of the corpus: 3.210)" in lines
    assert "speed     12.3 k tokens/s, 166.0 ms per step" in lines
    assert "hidden    36.0 of 60.0 ms communication per step (60 %), steps 5 to 201" in lines
    assert "█ compute 120.0 ms 72 %" in text
    assert "▓ exposed 24.0 ms 14 %" in text
    assert "▒ straggle 12.0 ms 7 %" in text
    assert "░ idle 10.0 ms 6 %" in text
    assert "8 experts; busiest is 7 with 1.47 x the mean load" in text
    assert "written   runs/tiny-1" in lines
    assert "go on     moeclipse train runs/tiny-1/config.toml --resume auto --run.steps 400" in lines


def test_long_runs_print_about_twenty_lines() -> None:
    text = show(console(), steps=1000)
    assert 20 <= sum(line.startswith("step ") and "/1000" in line for line in text.splitlines()) <= 22


@pytest.mark.parametrize("terminal", [False, True])
def test_ascii_is_enough(terminal: bool) -> None:
    text = show(console(encoding="ascii", terminal=terminal))
    assert text.isascii()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "5.610 -> 1.920" in text
    assert "###=========----...." in text
    assert "= exposed 24.0 ms 14 %" in text


def test_a_terminal_gets_a_live_line_and_its_cursor_back() -> None:
    text = show(console(terminal=True))
    assert "\x1b[?25l" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "left 0:0" not in text


def test_a_dumb_terminal_gets_plain_lines() -> None:
    out = Console(file=io.StringIO(), force_terminal=True, width=80, _environ={"TERM": "dumb"})
    assert not Display(out).live


@pytest.mark.parametrize("experts", [1, 2, 8, 16, 64, 300])
@pytest.mark.parametrize("unicode", [True, False])
def test_the_summary_fits_into_80_columns(experts: int, unicode: bool) -> None:
    load = [float(1 + i % 7) for i in range(experts)]
    summary = SUMMARY | {"load": load, "load_by_layer": [load, load[::-1]] * 9, "directory": "runs/x"}
    for _, lines in summary_lines(summary, 80, unicode):
        assert all(len(line) <= 70 for line in lines)


def test_the_command_that_goes_on_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "program", lambda: ".venv/bin/moeclipse")
    summary = SUMMARY | {"directory": "runs/a run"}
    (line,) = dict(summary_lines(summary, 80, True))["go on"]
    assert str(line) == ".venv/bin/moeclipse train 'runs/a run/config.toml' --resume auto --run.steps 400"


def test_a_percentage_never_stands_alone() -> None:
    assert hidden_text({"comm_ms": 0.0, "window": "steps 1 to 2"}) == "no communication, steps 2 to 3"
    assert hidden_text(SUMMARY) == "36.0 of 60.0 ms communication per step (60 %), steps 5 to 201"


def test_what_overlap_costs_stands_beside_what_it_hides() -> None:
    def text(**more: float) -> str:
        lines = dict(summary_lines({**SUMMARY, **more}, 100, True))["hidden"]
        return "\n".join(str(line) for line in lines)

    assert "under communication" not in text()
    assert text(slowdown=1.154).endswith("\nunder communication compute takes 1.15 times as long")


def test_speed_is_told_as_a_share_of_the_device_where_it_is_known() -> None:
    def speed(**more: float) -> str:
        return str(dict(summary_lines({**SUMMARY, **more}, 100, True))["speed"][0])

    assert "MFU" not in speed()
    told = "34 % of the device's peak (MFU), 66 % of what the work allows"
    assert speed(mfu=0.338, of_limit=0.66).endswith(told)


def test_an_empty_summary_still_prints() -> None:
    display = Display(console())
    display.end({})
    assert "not measured" in text_of(display.console)


@pytest.mark.parametrize("terminal", [False, True])
def test_experts_per_token_are_shown_where_tokens_choose(terminal: bool) -> None:
    record = {"step": 0, "loss": 5.0, "lr": 1e-3, "grad_norm": 1.5, "tokens_per_s": 9.0, "mean_experts": 1.25}
    for vary in (False, True):
        display = Display(console(width=120, terminal=terminal))
        display.start(INFO | {"steps": 2, "experts_vary": vary})
        display.step(record)
        if display.progress is not None:
            display.progress.refresh()
        shown = "1.25 experts" if terminal else "experts 1.25"
        assert (shown in text_of(display.console)) == vary
        display.end(SUMMARY | {"mean_experts": 1.25 if vary else 2.0})
        assert ("experts   1.25 per token, on average" in plain(text_of(display.console))) == vary


def test_the_summary_says_how_even_the_ranks_were() -> None:
    for more, told in (
        (
            {"balance": 0.5, "placement": None},
            "ranks     at 0.50: rows of the mean rank over those of the fullest\n",
        ),
        ({"balance": 0.96, "placement": None}, "ranks     at 0.96: rows"),
        (
            {"balance": 0.5, "placement": {"plans": 3, "parcels": 7}},
            "fullest; 3 plans taken, 7 transfers since the run was last started",
        ),
        ({"balance": 0.5, "placement": {"plans": 1, "parcels": 1}}, "1 plan taken, 1 transfer since"),
    ):
        display = Display(console(width=160))
        display.start(INFO)
        display.end(SUMMARY | more)
        assert told in plain(text_of(display.console))


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_the_load_of_each_layer_is_a_line_of_shades() -> None:
    load = [[0.0, 4.0, 4.0, 8.0], [1.0, 1.0, 1.0, 1.0]]
    lines = dict(summary_lines(SUMMARY | {"load_by_layer": load}, 80, False))["by layer"]
    assert [line.plain for line in lines] == [
        "layer 0      ++++++### max 2.0 x",
        "layer 1   ++++++++++++ max 1.0 x",
    ]


def test_resumed_runs_say_so() -> None:
    display = Display(console())
    display.start(INFO | {"steps": 10, "start_step": 4})
    assert "resumed after step 4" in text_of(display.console)


def test_a_resumed_run_has_its_own_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of six steps took 10 s, so five take 50 s; the 94 before it are an earlier job's."""
    now = [100.0]
    monkeypatch.setattr("moeclipse.cli.display.time.monotonic", lambda: now[0])
    display = Display(console())
    display.start(INFO | {"steps": 100, "start_step": 94})
    now[0] += 10.0
    display.step({"step": 94, "loss": 1.0})
    assert text_of(display.console).splitlines()[-1].endswith("left 0:50")


def test_load_chart_heights_follow_the_load() -> None:
    rows = [line.plain for line in load_chart([0.0, 1.0, 2.0], 40, unicode=True, height=2)]
    assert rows[0] == "          ████"
    assert rows[1] == "     ████ ████"
    assert rows[3] == "3 experts; busiest is 2 with 2.00 x the mean load; 1 without a token"


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=6).filter(lambda parts: sum(parts) > 1e-3),
    st.integers(1, 90),
)
def test_shares_use_every_cell_and_none_twice(parts: list[float], cells: int) -> None:
    whole = share(parts, cells)
    assert sum(whole) == cells
    assert all(abs(n - part / sum(parts) * cells) < 1 + 1e-6 for n, part in zip(whole, parts, strict=True))


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=50), st.booleans())
def test_sparkline_survives_any_loss(values: list[float], unicode: bool) -> None:
    assert len(sparkline(values, 12, unicode)) <= 12


def test_small_helpers() -> None:
    assert sparkline([1.0, 2.0, 3.0], 12, unicode=True) == "▁▅█"
    assert average_to([1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0]
    assert [short(x) for x in (None, 12.0, 1234.0, 5.1e9)] == ["-", "12", "1.23 k", "5.1 B"]
    assert [clock(x) for x in (5, 65, 3700)] == ["0:05", "1:05", "1:01:40"]


def test_what_the_model_wrote_stands_at_the_end() -> None:
    sample = {"lines": [["def f(", "x):\n\treturn é\x1b[31m"], ["import ", "y" * 200]]}
    for unicode in (True, False):
        label, lines = summary_lines({"directory": "runs/a", "sample": sample}, 80, unicode)[-1]
        assert label == "it writes"
        assert len(lines) == 2
        assert max(len(line) for line in lines) <= 70
        assert "\x1b" not in lines[0].plain, "what a model writes does not steer a terminal"
        assert lines[0].plain.isascii() or unicode
    assert "x):\\n    return" in lines[0].plain
    (_, lines) = summary_lines({"directory": "a", "sample": {"why": "of that"}}, 80, True)[-1]
    assert lines[0].plain == "nothing: of that"
    assert summary_lines({"directory": "a"}, 80, True)[-1][0] == "written"


def test_a_start_says_what_it_is_at_and_leaves_no_trace() -> None:
    display = Display(console(width=100, terminal=True))
    display.phase("importing torch")
    display.phase("connecting 2 ranks")
    display.start(INFO | {"steps": 3})
    text = text_of(display.console)
    assert text.startswith("\r\033[2Kimporting torch ...\r\033[2Kconnecting 2 ranks ...\r\033[2K")
    display.phase("too late")
    assert "too late" not in text_of(display.console)
    display.close()
    for word in ("note", "close"):
        display = Display(console(terminal=True))
        display.phase("loading")
        display.note("something") if word == "note" else display.close()
        assert "loading ...\r\033[2K" in text_of(display.console)
    plain_one = Display(console())
    plain_one.phase("importing torch")
    plain_one.close()
    assert text_of(plain_one.console) == ""


def test_the_loss_is_drawn_where_there_is_room() -> None:
    for height, drawn in ((30, True), (10, False)):
        display = Display(console(width=90, terminal=True))
        display.console.height = height
        display.start(INFO | {"steps": 3})
        for number, loss in enumerate((5.0, 4.0, 3.0)):
            display.step({"step": number, "loss": loss, "tokens_per_s": 9.0})
        assert bool(display.plot()) == drawn
        assert "5.000" in display.plot()[0].plain if drawn else True
        display.end(SUMMARY)
        assert ("5.000 │" in plain(text_of(display.console))) == drawn
    # Elsewhere a file gets lines, and no plot.
    display = Display(console(width=90))
    display.start(INFO | {"steps": 2})
    display.step({"step": 0, "loss": 5.0})
    display.step({"step": 1, "loss": 4.0})
    display.end(SUMMARY)
    assert "│" not in text_of(display.console)
