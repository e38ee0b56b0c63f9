"""A chat template in a process of its own: whatever it does there, it does within bounds.

A template is a program that came with somebody else's model. Jinja's sandbox keeps it from files and from
Python's inside, but not from running for ever or taking all memory; a process can be ended.

    with the parent:   TemplateProcess(text, specials).render(messages, begins)
    there (`serve`):   compiles the template, renders what comes through a pipe, and says what came of it

Contract. One render, and the compilation, may take SECONDS of computing and the process MEMORY bytes; a text
has at most MOST_TEXT characters. ValueError says which of it was too much, or what the template itself says.
A process that was ended is started again by the next render.

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
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, BinaryIO

from moeclipse.core.outside import parse_json

SECONDS = 5.0
MEMORY = 1 << 29
MOST_TEXT = 1 << 26
WALL_S = 300.0
"""For a process that neither computes nor answers: there is none that we know of."""
PARENT_S = 5.0
BEGIN, END = "\U0010fffe", "\U0010ffff"
"""Around what the assistant said: no text has these characters."""
PROGRAM = "from moeclipse.train.documents.template_process import serve; serve()"


class TemplateProcess:
    def __init__(self, text: str, specials: Mapping[str, str]) -> None:
        self._first = {"template": text, "specials": dict(specials)}
        self._process: subprocess.Popen[bytes] | None = None
        self._answer(self._begin())

    def render(self, messages: Sequence[Mapping[str, Any]], begins: bool) -> str:
        process = self._process
        if process is None:
            process = self._begin()
            self._answer(process)
        self._ask(process, {"messages": messages, "begins": begins})
        return self._answer(process)

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
        self._ask(process, self._first)
        return process

    def _ask(self, process: subprocess.Popen[bytes], value: Any) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended; how, the answer says
            write(process.stdin, value)

    def _answer(self, process: subprocess.Popen[bytes]) -> str:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], WALL_S)
        reply = read(process.stdout) if ready else None
        if reply is None:
            self._process = None
            end(process)
            ended = process.returncode
            raise ValueError(
                f"it computed for more than {SECONDS:g} s"
                if ended == -signal.SIGPROF or not ready
                else f"it ended its process (status {ended})"
            )
        if "error" in reply:
            raise ValueError(reply["error"])
        return str(reply["text"])


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
    template: Any = None
    specials: dict[str, str] = {}
    while True:
        while not select.select([source], [], [], PARENT_S)[0]:
            if os.getppid() != parent:
                return
        asked = read(source)
        if asked is None:
            return
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process, whatever that is doing
        try:
            if template is None:
                template, specials = compiled(asked["template"]), asked["specials"]
                text = ""
            else:
                text = template.render(
                    messages=asked["messages"],
                    tools=None,
                    documents=None,
                    add_generation_prompt=asked["begins"],
                    **specials,
                )
            reply = (
                {"text": text}
                if len(text) <= MOST_TEXT
                else {"error": f"its text has more than {MOST_TEXT} characters"}
            )
        except MemoryError:
            reply = {"error": f"it took more than {MEMORY >> 20} MiB"}
        except RecursionError:
            reply = {"error": "it calls itself too deeply"}
        except Exception as error:  # a template may do anything
            reply = {"error": f"{error}"[:1000] or type(error).__name__}
        signal.setitimer(signal.ITIMER_PROF, 0)
        try:
            write(target, reply)
        except MemoryError:
            write(target, {"error": f"it took more than {MEMORY >> 20} MiB"})


def compiled(text: str) -> Any:
    """As transformers compiles templates."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012  (Jinja asks for a set)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            call = self.call_method("_marked")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            return f"{BEGIN}{caller()}{END}"

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    extensions: list[Any] = [Generation, jinja2.ext.loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(text)


def write(file: BinaryIO | Any, value: Any) -> None:
    data = json.dumps(value).encode()
    file.write(len(data).to_bytes(8, "little") + data)
    file.flush()


def read(file: BinaryIO | Any) -> Any:
    """None where the other end is gone."""
    head = file.read(8)
    if len(head) < 8:
        return None
    data = file.read(int.from_bytes(head, "little"))
    return parse_json(data, numbers=False) if len(data) == int.from_bytes(head, "little") else None
