"""A page that follows its run: served on loopback, read anew whenever files of the run have changed.

    /               the page
    /figures.json   its figures; 304 where nothing has changed since (ETag)

Contract. Only 127.0.0.1 is listened on, and only by names of this machine is it answered: a page of somebody
else's in the same browser cannot read a run by a name that it lets point here. Nothing is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseServer
from threading import BoundedSemaphore, Lock, Timer
from typing import Any

from moeclipse.report.figures import figures
from moeclipse.report.page import fill, title_of
from moeclipse.report.run import TRACE, RunData, read_run
from moeclipse.report.step_table import MetricsFile

HERE = "127.0.0.1"
METRICS = "metrics.jsonl"
MOST_CLIENTS = 32
PATIENCE_S = 10.0
"""With a client that says nothing, or takes nothing."""
ALL_S = 60.0
"""With a client, altogether."""
WATCHED = (METRICS, "summary.json", "incidents.jsonl", "choices.json", "load.npz", TRACE)


class Figures:
    """Of some runs, made anew when their files have changed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self._lock = Lock()
        self._metrics = [MetricsFile(path / METRICS) for path in paths]
        self._version, self._found, self._title = "", {}, ""  # type: ignore[var-annotated]

    def now(self) -> tuple[str, dict[str, Any], str]:
        """(version, figures, title)."""
        with self._lock:
            version = version_of(self.paths)
            if version != self._version:
                runs: list[RunData] = [
                    read_run(path, metrics) for path, metrics in zip(self.paths, self._metrics, strict=True)
                ]
                self._found = figures(runs)
                self._title = title_of(runs)
                self._version = version
            return self._version, self._found, self._title


def version_of(paths: Sequence[Path]) -> str:
    """Another one whenever a file of a run has another size or time."""
    stamps = []
    for path in paths:
        for name in WATCHED:
            try:
                stat = (path / name).stat()
                stamps.append(f"{stat.st_size:x}.{stat.st_mtime_ns:x}")
            except OSError:
                stamps.append("0")
    return f'"{"-".join(stamps)}"'


def make_server(paths: Sequence[Path], port: int = 0) -> ThreadingHTTPServer:
    """Listening, not yet serving; refuses folders without a run."""
    shown = Figures(paths)
    shown.now()

    class Handler(BaseHTTPRequestHandler):
        timeout = PATIENCE_S

        def do_GET(self) -> None:
            at = port_of(self.server)
            if self.headers.get("Host") not in (f"{HERE}:{at}", f"localhost:{at}"):
                self._answer(403, "text/plain", b"this page is for this machine alone\n")
                return
            version, found, title = shown.now()
            if self.path == "/":
                self._answer(200, "text/html; charset=utf-8", fill(found, title, live=True).encode())
            elif self.path == "/figures.json" and self.headers.get("If-None-Match") == version:
                self._answer(304, "application/json", b"", version)
            elif self.path == "/figures.json":
                self._answer(200, "application/json", json.dumps(found, allow_nan=False).encode(), version)
            else:
                self._answer(404, "text/plain", b"there is / and /figures.json\n")

        def _answer(self, status: int, kind: str, body: bytes, version: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            if version:
                self.send_header("ETag", version)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Who asks every two seconds need not be told of."""

    return FewClients((HERE, port), Handler)


class FewClients(ThreadingHTTPServer):
    """So many at once, each for so long: whoever comes beyond that is sent away at once."""

    daemon_threads = True

    def __init__(self, *given: Any) -> None:
        self._room = BoundedSemaphore(MOST_CLIENTS)
        super().__init__(*given)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        enough = Timer(ALL_S, lambda: self.shutdown_request(request))
        enough.daemon = True
        enough.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            enough.cancel()
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves in the middle is no news."""


def port_of(server: BaseServer) -> int:
    return int(server.server_address[1])  # type: ignore[index]


def serve(paths: Sequence[Path], port: int, say: Callable[[str], None]) -> int:
    """Until Ctrl-C."""
    server = make_server(paths, port)
    say(f"serving http://{HERE}:{port_of(server)}/ (Ctrl-C ends it)")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 0
    finally:
        server.server_close()
    return 0
