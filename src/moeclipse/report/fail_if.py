"""Conditions for `--fail-if`: a small language of named numbers, without eval.

    exposed > 10%
    tokens_per_s < 0.95 * RUN2              RUN2: the same number of the second run
    loss > RUN2.loss + 0.05 or skipped > 0
    tokens_per_s < RUN3                     and so on, as many as are given

Numbers (10% is 0.1), names of `report/measures`, + - * /, brackets, comparisons, and, or, not. A bare RUN2
stands for the name on the other side of its comparison. What a run did not measure is an error and never
passes as false: a check that compares nothing must not be green.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from moeclipse.core.errors import ConfigError
from moeclipse.report.measures import in_words

TOKEN = re.compile(
    r"\s*(?:(\d+\.?\d*(?:[eE][+-]?\d+)?%?|\.\d+%?)|([A-Za-z_][\w.]*)|(<=|>=|==|!=|[-+*/()<>]))"
)
COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}
MOST_TOKENS = 100
OTHER = re.compile(r"RUN([1-9]\d{0,5})(?:\.(\w+))?")
"""Another run than the first, and a name of it."""
Values = Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    holds: bool
    told: str
    """The condition with the numbers it was judged by."""


def judge(text: str, *runs: Values) -> Judgement:
    """Whether a condition holds of the first run, beside the others."""
    asked = Condition(text, runs)
    holds = asked.whole()
    said = ", ".join(f"{name} is {value}" for name, value in asked.said.items())
    return Judgement(holds=holds, told=f"{text.strip()}: {said}" if said else text.strip())


class Condition:
    """One pass over the words of a condition, from left to right."""

    def __init__(self, text: str, runs: Sequence[Values]) -> None:
        self.text, self.runs = text, runs
        self.words = self._split(text)
        self.at = 0
        self.said: dict[str, str] = {}
        self.other = ""
        """The name that a bare RUN2 stands for, on the other side of its comparison."""

    def _split(self, text: str) -> list[str]:
        words, at = [], 0
        while text[at:].strip():
            found = TOKEN.match(text, at)
            if found is None:
                raise self._error(f"cannot read {text[at:].strip()[:20]!r}")
            words.append(found.group().strip())
            at = found.end()
        if not words:
            raise self._error("it is empty; write for instance: exposed > 10%")
        if len(words) > MOST_TOKENS:
            raise self._error(f"it has {len(words)} words; at most {MOST_TOKENS} are read")
        return words

    def _error(self, why: str) -> ConfigError:
        return ConfigError(f"--fail-if {self.text.strip()!r}: {why}")

    def whole(self) -> bool:
        holds = self._either()
        if self.at < len(self.words):
            raise self._error(f"{self.words[self.at]!r} is one word too many")
        return holds

    def _next(self, *wanted: str) -> str:
        if self.at < len(self.words) and self.words[self.at] in wanted:
            self.at += 1
            return self.words[self.at - 1]
        return ""

    def _either(self) -> bool:
        holds = self._both()
        while self._next("or"):
            holds = self._both() or holds  # both sides are read, whatever the first says
        return holds

    def _both(self) -> bool:
        holds = self._comparison()
        while self._next("and"):
            holds = self._comparison() and holds
        return holds

    def _comparison(self) -> bool:
        if self._next("not"):
            return not self._comparison()
        if self._at_condition() and self._next("("):
            holds = self._either()
            self._close()
            return holds
        self.other = self._only_name()
        left = self._sum()
        sign = self._next(*COMPARISONS)
        if not sign:
            raise self._error("it compares nothing; write for instance: exposed > 10%")
        return COMPARISONS[sign](left, self._sum())

    def _at_condition(self) -> bool:
        """Whether the bracket that opens here holds a condition, and not a sum."""
        depth = 0
        for word in self.words[self.at :]:
            depth += (word == "(") - (word == ")")
            if depth <= 0:
                return False
            if word in COMPARISONS:
                return True
        return False

    def _close(self) -> None:
        if not self._next(")"):
            raise self._error("a bracket is not closed")

    def _only_name(self) -> str:
        """The one name of the comparison that begins here, or nothing."""
        end = self.at
        while end < len(self.words) and self.words[end] not in ("and", "or"):
            end += 1
        words = {word for word in self.words[self.at : end] if word[0].isalpha() or word[0] == "_"}
        names = {word for word in words if word != "not" and not OTHER.fullmatch(word)}
        return names.pop() if len(names) == 1 else ""

    def _sum(self) -> float:
        value = self._product()
        while sign := self._next("+", "-"):
            other = self._product()
            value = value + other if sign == "+" else value - other
        return value

    def _product(self) -> float:
        value = self._one()
        while sign := self._next("*", "/"):
            other = self._one()
            if sign == "/" and other == 0:
                raise self._error("it divides by 0")
            value = value * other if sign == "*" else value / other
        return value

    def _one(self) -> float:
        if self._next("-"):
            return -self._one()
        if self._next("("):
            value = self._sum()
            self._close()
            return value
        if self.at == len(self.words):
            raise self._error("it ends where a number is missing")
        word = self.words[self.at]
        self.at += 1
        if word[0].isdigit() or word[0] == ".":
            return float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
        if not (word[0].isalpha() or word[0] == "_"):
            raise self._error(f"{word!r} stands where a number is missing")
        return self._named(word)

    def _named(self, word: str) -> float:
        number, name, which = 1, word, "the run"
        if found := OTHER.fullmatch(word):
            number, name = int(found[1]), found[2] or self.other
            which = {1: "the first run", 2: "the second run"}.get(number, f"run {number}")
            if number > len(self.runs):
                raise self._error(f"RUN{number} is not given: moeclipse report RUN RUN2 ... --fail-if ...")
            if not name:
                raise self._error(f"which number of RUN{number} is meant? write RUN{number}.tokens_per_s")
            word = f"RUN{number}.{name}"
        values = self.runs[number - 1]
        if name not in values:
            close = get_close_matches(name, [*values, "RUN2"], n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(values)}"
            raise self._error(f"there is no {name}; {hint}")
        value = values[name]
        if value is None or not math.isfinite(value):
            raise self._error(f"{which} has no {name}")
        self.said[word] = in_words(name, value)
        return value
