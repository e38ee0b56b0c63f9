"""A chat template in a process of its own: whatever it does there, it does within bounds.

A template is a program that came with somebody else's model. Jinja's sandbox keeps it from files and from
Python's inside, but not from running for ever or taking all memory; a process can be ended.

    with the parent:   TemplateProcess(text, specials).render([(messages, begins), ...])
    there (`serve`):   compiles the template, renders what comes through a pipe, and says what came of it

Contract. One render, and the compilation, may take SECONDS of computing and the process MEMORY bytes; a text
has at most MOST_TEXT characters. Refused, a ValueError, says which of it was too much, or what the template
itself says. A process that was ended is started again; what it had not answered is asked one by one.

Hazard. Seconds are those of the processor: on a busy machine nothing is refused that is not elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import IO, TYPE_CHECKING, Any, BinaryIO, TypeVar

from moeclipse.core.outside import parse_json

if TYPE_CHECKING:
    import jinja2
    import jinja2.nodes
    import jinja2.parser

A = TypeVar("A")
R = TypeVar("R")

SECONDS = 5.0
MEMORY = 1 << 29
MOST_TEXT = 1 << 26
TOGETHER = 1 << 16
"""Bytes of what is asked, and characters of what is answered, at once."""
WALL_S = 300.0
"""For a process that neither computes nor answers: there is none that we know of."""
PARENT_S = 5.0
BEGIN, END = "\U0010fffe", "\U0010ffff"
"""Around what the assistant said: no text has these characters."""
PROGRAM = "from moeclipse.train.documents.template_process import serve; serve()"


Asked = tuple[Sequence[Mapping[str, Any]], bool]
"""Messages, and whether an answer begins behind them."""


class Refused(ValueError):
    """What a template did not take, by its number among what was asked together."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


Reply = dict[str, str]
"""{"text": ...} or {"error": ...}."""


class TemplateProcess:
    def __init__(self, text: str, specials: Mapping[str, str]) -> None:
        self._first = json.dumps({"template": text, "specials": dict(specials)}).encode()
        self._process: subprocess.Popen[bytes] | None = None
        self._begin()

    def render(self, asked: Sequence[Asked]) -> list[str]:
        """The texts, in order; many at once, because a word to another process takes longer than a text."""
        texts: list[str] = []
        parts = [json.dumps({"messages": messages, "begins": begins}).encode() for messages, begins in asked]
        for group in groups(parts):
            replies, ended = self._answers(group)
            if ended and len(group) > 1:  # one of those without a reply did it
                for part in group[len(replies) :]:
                    more, ended = self._answers([part])
                    replies += more
                    if ended:
                        break
            for reply in replies:
                if "error" in reply:
                    raise Refused(len(texts), reply["error"])
                texts.append(str(reply["text"]))
            if ended:
                raise Refused(len(texts), ended)
        return texts

    def _begin(self) -> subprocess.Popen[bytes]:
        path = [part for part in sys.path if part]
        program = f"import sys; sys.path[:] = {path!r}; {PROGRAM}"
        self._process = process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        weakref.finalize(self, end, process)
        replies, ended = self._answers([self._first])
        if ended or "error" in replies[0]:
            raise Refused(0, ended or replies[0]["error"])
        return process

    def _answers(self, parts: Sequence[bytes]) -> tuple[list[Reply], str]:
        """Replies, and why there are fewer than there should be."""
        process = self._process or self._begin()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):  # it has ended; how, is told below
            write(process.stdin, b"[" + b",".join(parts) + b"]")
        replies: list[Reply] = []
        while len(replies) < len(parts):
            ready, _, _ = select.select([process.stdout], [], [], WALL_S)
            found = read(process.stdout) if ready else None
            if found is None:
                self._process = None
                end(process)
                long = process.returncode == -signal.SIGPROF or not ready
                took = f"it computed for more than {SECONDS:g} s"
                return replies, took if long else f"it ended its process (status {process.returncode})"
            replies += found
        return replies, ""


def groups(parts: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    first = size = 0
    for number, part in enumerate(parts):
        if number > first and size + len(part) > TOGETHER:
            yield parts[first:number]
            first, size = number, 0
        size += len(part)
    if parts:
        yield parts[first:]


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


# --- there -----------------------------------------------------------------------------------------------


def serve() -> None:
    """The process's whole life: a template first, then conversations until the pipe ends."""
    parent, source, target = os.getppid(), sys.stdin.buffer, sys.stdout.buffer

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    render: Callable[[Any], str] | None = None
    while True:
        while not select.select([source], [], [], PARENT_S)[0]:
            if os.getppid() != parent:
                return
        asked = read(source)
        if asked is None:
            return
        if render is None:
            made = tried(lambda first: renderer(first["template"], first["specials"]), asked[0])
            render = None if isinstance(made, dict) else made
            answer(target, [made if isinstance(made, dict) else {"text": ""}])
            continue
        replies: list[Reply] = []
        size = 0
        for one in asked:
            reply = tried(render, one)
            replies.append({"text": reply} if isinstance(reply, str) else reply)
            size += len(reply)
            if size > TOGETHER:
                answer(target, replies)
                replies, size = [], 0
        if replies:
            answer(target, replies)


def tried(work: Callable[[A], R], asked: A) -> R | Reply:
    """What it gives, or {"error": why it gives nothing}."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process, whatever that is doing
    try:
        found = work(asked)
        if isinstance(found, str) and len(found) > MOST_TEXT:
            return {"error": f"its text has more than {MOST_TEXT} characters"}
        return found
    except MemoryError:
        return {"error": f"it took more than {MEMORY >> 20} MiB"}
    except RecursionError:
        return {"error": "it calls itself too deeply"}
    except Exception as error:  # a template may do anything
        return {"error": f"{error}"[:1000] or type(error).__name__}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def answer(target: BinaryIO, replies: list[Reply]) -> None:
    """Where memory ends while a reply is on its way the process ends: behind a part nothing could be told."""
    try:
        data = json.dumps(replies).encode()
    except MemoryError:
        data = json.dumps([*replies[:-1], {"error": f"it took more than {MEMORY >> 20} MiB"}]).encode()
    write(target, data)


def renderer(text: str, specials: dict[str, str]) -> Callable[[Mapping[str, object]], str]:
    template = compiled(text)

    def render(asked: Mapping[str, object]) -> str:
        told = {"tools": None, "documents": None, "add_generation_prompt": asked["begins"]}
        return str(template.render(messages=asked["messages"], **told, **specials))

    return render


def compiled(text: str) -> jinja2.Template:
    """As transformers compiles templates."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012  (Jinja asks for a set)

        def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_marked")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            return f"{BEGIN}{caller()}{END}"

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: object, indent: int | None = None, **_: object) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    extensions: list[Any] = [Generation, jinja2.ext.loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(text)


def write(file: IO[bytes], data: bytes) -> None:
    file.write(len(data).to_bytes(8, "little"))
    file.write(data)
    file.flush()


def read(file: IO[bytes]) -> Any:
    """None where the other end is gone."""
    head = file.read(8)
    if len(head) < 8:
        return None
    data = file.read(int.from_bytes(head, "little"))
    return parse_json(data, numbers=False, deep=True) if len(data) == int.from_bytes(head, "little") else None
