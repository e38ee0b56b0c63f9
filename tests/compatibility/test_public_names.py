"""Every public name of version 0.1 is still there and is called as it was; more may come, nothing may go."""

from __future__ import annotations

import pytest
from release import PUBLIC
from signatures import breaks, describe, resolve

import moeclipse


def test_every_public_name_is_still_there() -> None:
    assert set(PUBLIC["names"]) <= set(moeclipse.__all__)


@pytest.mark.parametrize("name", moeclipse.__all__)
def test_every_public_name_can_be_had(name: str) -> None:
    assert getattr(moeclipse, name) is not None
    assert name in dir(moeclipse)


def test_no_public_name_is_that_of_a_room() -> None:
    """Importing `moeclipse.train.x` would put the room in its place."""
    rooms = {folder.name for folder in resolve_package().iterdir()}
    assert not rooms & set(moeclipse.__all__)


def resolve_package():  # type: ignore[no-untyped-def]
    from importlib.resources import files

    return files("moeclipse")


@pytest.mark.parametrize("spec", PUBLIC["calls"])
def test_what_was_called_is_called_as_before(spec: str) -> None:
    assert breaks(PUBLIC["calls"][spec], describe(resolve(spec))) == []


@pytest.mark.parametrize("spec", PUBLIC["constants"])
def test_constants_are_still_there(spec: str) -> None:
    assert resolve(spec) is not None


def first(a, b=1, *, c, d=None): ...  # type: ignore[no-untyped-def]


def longer(a, b=1, e=3, *, c, d=None, f=()): ...  # type: ignore[no-untyped-def]


def renamed(x, b=1, *, c, d=None): ...  # type: ignore[no-untyped-def]


def swapped(b=1, a=0, *, c, d=None): ...  # type: ignore[no-untyped-def]


def other_default(a, b=2, *, c, d=None): ...  # type: ignore[no-untyped-def]


def needs_more(a, b=1, *, c, d=None, g): ...  # type: ignore[no-untyped-def]


def by_place(a, /, b=1, *, c, d=None): ...  # type: ignore[no-untyped-def]


@pytest.mark.parametrize(
    ("later", "told"),
    [
        (longer, []),
        (renamed, ["a is gone", "x must be given, which nobody knew"]),
        (swapped, ["a is no longer argument 1", "a was None", "b is no longer argument 2"]),
        (other_default, ["b was 1 where it is left out, and is 2"]),
        (needs_more, ["g must be given, which nobody knew"]),
        (by_place, ["a can no longer be given by name"]),
    ],
)
def test_what_breaks_a_call_is_seen(later: object, told: list[str]) -> None:
    found = breaks(describe(first), describe(later))  # type: ignore[arg-type]
    assert len(found) == len(told), found
    for text, start in zip(found, told, strict=True):
        assert text.startswith(start)
