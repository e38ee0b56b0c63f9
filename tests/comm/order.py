"""Rules that every hand-over must keep, checked while it runs, whatever the processors of this machine do.

watched = Watched(words, Rules(heard={...}, said={...}, sleepers={...}))
signals.words, signals.fence = watched, watched.rules.fence

load of a word the peer posts   then, before memory it speaks of is touched,   acquire
touching memory                 then, before a word of one's own is posted,    release
a post                          then, before sleepers are looked for,          full
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moeclipse.comm.shared.fence import Fence
from moeclipse.comm.shared.signals import WORD


class Rules:
    """What one rank has done since its last fences. Words that are neither heard nor said are memory."""

    def __init__(self, *, heard: set[int], said: set[int], sleepers: set[int]) -> None:
        self.heard, self.said, self.sleepers = heard, said, sleepers
        self.fence = Fence(self._release, self._acquire, self._full)
        self.events: list[str] = []
        self.note: Callable[[], None] = lambda: None
        self._unreleased, self._unacquired, self._unseen = True, False, False

    def touch(self) -> None:
        """Read or write memory that is handed over."""
        self.events.append("touch")
        assert not self._unacquired, "memory is touched before the fence behind its word"
        self._unreleased = True

    def load(self, word: int) -> None:
        self.note()
        if word in self.sleepers:
            self.events.append("look")
            assert not self._unseen, "sleepers are looked for before the post is visible"
        elif word in self.heard:
            self.events.append("load")
            self._unacquired = True
        elif word not in self.said:
            self.touch()

    def store(self, word: int) -> None:
        self.note()
        if word in self.said:
            self.events.append("store")
            assert not self._unreleased, "a word is posted without a fence before it"
            self._unreleased = self._unseen = True  # what follows may be memory of any kind
        elif word not in self.sleepers:
            self.touch()

    def _release(self) -> None:
        self.events.append("release")
        self._unreleased = False

    def _acquire(self) -> None:
        self.events.append("acquire")
        self._unacquired = False

    def _full(self) -> None:
        self.events.append("full")
        self._unreleased = self._unacquired = self._unseen = False


class Watched:
    """Words that tell the rules what happens to them."""

    def __init__(self, words: memoryview, rules: Rules) -> None:
        self._words, self.rules = words, rules

    def __getitem__(self, place: int) -> Any:
        self.rules.load(place // WORD)
        return self._words[place]

    def __setitem__(self, place: int, value: int) -> None:
        self.rules.store(place // WORD)
        self._words[place] = value
