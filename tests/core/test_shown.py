"""What others wrote is shown so that it drives no terminal and forges no line."""

from __future__ import annotations

import os
import re

import pytest

from moeclipse.core.errors import CheckpointError, ConfigError, DataError, ScheduleError
from moeclipse.core.shown import MOST, say, sentence, visible, warn

ESCAPE = "\x1b]0;title\x07\x1b[2J"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("as it is: ü, 模型, 🙂, a\u200db, \xa0", "as it is: ü, 模型, 🙂, a\u200db, \xa0"),
        (ESCAPE, r"\x1b]0;title\x07\x1b[2J"),
        ("\x9b31m\x7f\x00", r"\x9b31m\x7f\x00"),
        ("a\nb\rc\td", r"a\nb\rc\td"),
        ("\u202egpj.exe\u2066\u2028", r"\u202egpj.exe\u2066\u2028"),
        (os.fsdecode(b"caf\xe9"), r"caf\udce9"),
    ],
)
def test_what_drives_a_terminal_is_written_out(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert visible(shown) == shown
    shown.encode()


def test_lines_and_tabs_may_stay() -> None:
    assert visible("a\tb\nc\x1b[1md\r", lines=True) == "a\tb\nc\\x1b[1md\\r"


def test_a_sentence_has_an_end_that_is_read() -> None:
    assert sentence("x" * MOST) == "x" * MOST
    cut = sentence("begin " + "x" * 100_000 + "; do this")
    assert cut.startswith("begin x")
    assert cut.endswith("x; do this")
    assert len(cut) <= MOST


def test_errors_are_harmless_wherever_they_are_printed() -> None:
    name = f"a{ESCAPE}\nerror: all is well"
    for kind in (DataError, CheckpointError, ConfigError):
        assert str(kind(name)) == visible(name)
    several = ConfigError([name, "second"])
    assert several.problems == [visible(name), "second"]
    assert str(several).splitlines()[1:] == [f"  - {visible(name)}", "  - second"]
    assert str(ScheduleError(f"grid\n{ESCAPE}")) == f"grid\n{visible(ESCAPE)}"
    assert str(ConfigError(str(several.problems[0]))) == several.problems[0], "it is not written out twice"


def test_what_is_said_can_be_encoded(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"written: {os.fsdecode(b'caf' + bytes([233]))}")
    say("note: \x1b[1m", error=True)
    assert capsys.readouterr() == ("written: caf\\udce9\n", "note: \\x1b[1m\n")


def test_warnings_are_harmless_and_name_who_called() -> None:
    def warns() -> None:
        warn(f"from {ESCAPE}", FutureWarning)

    with pytest.warns(FutureWarning, match=re.escape(visible(ESCAPE))) as found:
        warns()
    assert (found[0].filename, found[0].lineno) == (__file__, warns.__code__.co_firstlineno + 4)
