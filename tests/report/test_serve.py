"""A page that follows its run, on loopback and for this machine alone."""

from __future__ import annotations

import http.client
import json
import os
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest
from made_runs import make_run, record_of

from moeclipse.core.errors import ConfigError
from moeclipse.report import serve
from moeclipse.report.serve import make_server, version_of


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, int]]:
    server = make_server([folder])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield str(server.server_address[0]), server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(at: tuple[str, int], path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(*at, timeout=10)
    connection.request(
        "GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def test_figures_follow_the_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=5)
    with served(folder) as at:
        assert at[0] == "127.0.0.1"
        status, _, page = ask(at, "/")
        assert (status, b"connect-src" in page, b'"live":true' in page) == (200, True, True)
        status, headers, body = ask(at, "/figures.json")
        assert json.loads(body)["runs"][0]["done"] == 5
        assert ask(at, "/figures.json", If_None_Match=headers["ETag"])[0] == 304
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record_of(5)) + "\n")
        status, _, body = ask(at, "/figures.json", If_None_Match=headers["ETag"])
        assert (status, json.loads(body)["runs"][0]["done"]) == (200, 6)


def test_a_file_that_keeps_its_size_has_changed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=3)
    file, before = folder / "summary.json", version_of([folder])
    assert version_of([folder]) == before
    stat = file.stat()
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))
    assert version_of([folder]) != before


def test_others_are_sent_away(tmp_path: Path) -> None:
    with served(make_run(tmp_path / "run", steps=3)) as at:
        assert ask(at, "/", Host="evil.example")[0] == 403
        assert ask(at, "/", Host=f"evil.example:{at[1]}")[0] == 403, "a name that points here"
        assert ask(at, "/../secret")[0] == 404
        assert ask(at, "/", Host=f"localhost:{at[1]}")[0] == 200


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        make_server([tmp_path])


def test_clients_that_say_nothing_are_few_and_do_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "MOST_CLIENTS", 3)
    monkeypatch.setattr(serve, "ALL_S", 0.2)
    server = serve.make_server([make_run(tmp_path / "run")])
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        silent = [socket.create_connection(server.server_address[:2], timeout=30) for _ in range(8)]
        assert [one.recv(1) for one in silent] == [b""] * 8, "all are sent away, three of them after a while"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("patience_s", "all_s"), [(0.2, 3600.0), (3600.0, 0.2)])
def test_either_limit_of_time_sends_a_client_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience_s: float, all_s: float
) -> None:
    monkeypatch.setattr(serve, "PATIENCE_S", patience_s)
    monkeypatch.setattr(serve, "ALL_S", all_s)
    with served(make_run(tmp_path / "run")) as at, socket.create_connection(at, timeout=30) as silent:
        silent.sendall(b"GET / HT")
        assert silent.recv(1) == b""


def test_who_comes_beyond_thirty_two_is_sent_away_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "PATIENCE_S", 3600.0)
    monkeypatch.setattr(serve, "ALL_S", 3600.0)
    server = serve.make_server([make_run(tmp_path / "run")])
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        silent = [socket.create_connection(server.server_address[:2], timeout=30) for _ in range(40)]
        assert [one.recv(1) for one in silent[32:]] == [b""] * 8
        assert select.select(silent[:32], [], [], 0)[0] == [], "the others may stay"
    finally:
        server.shutdown()
        for one in silent:
            one.close()
        server.server_close()
