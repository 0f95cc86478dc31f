"""The dashboard of a real daemon: what it shows to whom, what it changes for whom, and the page in a real browser."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from kvtier import wire
from kvtier.client import Client, page_keys
from kvtier.control.call import Admin
from kvtier.dashboard import site
from kvtier.dashboard.history import KEPT, History
from kvtier.dashboard.site import ADDRESS_NAME, FILES, MAX_BODY, MAX_PROMPT
from kvtier.demo.daemon import Daemon
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.types import Kind
from test_metrics import free_port

SPEC = CacheSpec("some/model", b"f" * 16, "bf16", 4, (GroupSpec(Kind.FULL, 1, 1, 4096),))
STEM, BRANCHES, BRANCH = 40, 6, 10
"""Pages of what all prompts share, how many prompts, and pages of each alone."""


class Board:
    """A daemon with a dashboard and a few cached prompts."""

    def __init__(self, daemon: Daemon, port: int) -> None:
        self.daemon = daemon
        self.port = port
        self.address_path = daemon.socket.parent / ADDRESS_NAME

    @property
    def token(self) -> str:
        """The operator's."""
        return self.address_path.read_text().strip().partition("#token=")[2]

    def ask(self, path: str, method: str = "GET", body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
        """Status, JSON or text, headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(
                method, path, body if body is None or isinstance(body, bytes) else json.dumps(body), headers
            )
            reply = connection.getresponse()
            raw, kind = reply.read(), reply.getheader("Content-Type", "")
            return reply.status, json.loads(raw) if "json" in kind else raw.decode(), dict(reply.getheaders())
        finally:
            connection.close()

    def trusted(self, path: str, method: str = "GET", body: Any = None) -> tuple[int, Any]:
        """The same with the token."""
        return self.ask(path, method, body, Authorization=f"Bearer {self.token}")[:2]


def fill(cache: Any) -> None:
    """Store prompts with a common stem."""
    for n in range(BRANCHES):
        tokens = np.repeat(np.array([*range(STEM), *range(1000 * (n + 1), 1000 * (n + 1) + BRANCH)], np.int32), 4)
        path = cache.match(page_keys(SPEC, tokens))
        with path.reserve(path.pages, STEM + BRANCH - path.pages, wait_ms=5000) as held:
            held.write_pages(0, path.pages, np.zeros((held.pages, 4096), np.uint8))
            held.commit()
    assert cache.flush(20.0)


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    """Prompts with a common stem, on disk."""
    port = free_port()
    with Daemon(tmp_path, host="64MiB", disk="128MiB", flags=[f"--http-port={port}"]) as daemon:
        with Client(daemon.socket, instance="engine", timeout_s=10.0) as client:
            fill(client.open(SPEC))
            made = Board(daemon, port)
            until(lambda: answers(made))
            yield made
        assert daemon.stop() == 0, daemon.log.read_text()[-2000:]


def until(holds: Any) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + 20.0
    while not holds():
        assert time.monotonic() < deadline, "still waiting"
        time.sleep(0.05)


def answers(board: Board) -> bool:
    """Whether HTTP is up."""
    try:
        return board.ask("/healthz")[0] == 200
    except OSError:
        return False


def test_the_page_needs_nothing_from_elsewhere_and_may_load_nothing(board: Board) -> None:
    """Every asset comes from the daemon, under a policy that lets a page load from it alone."""
    for path, (_, kind) in FILES.items():
        status, text, headers = board.ask(path)
        assert status == 200
        assert headers["Content-Type"].startswith(kind)
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in text


def test_anybody_sees_numbers_and_the_operator_alone_sees_tokens(board: Board) -> None:
    """Loopback is not private on a host with several users: token ids are part of prompts, salts are tenants' own."""
    with Admin(board.daemon.socket.with_name("admin.sock"), 10.0) as admin:
        admin.ask(wire.Set({"quotas": "tenant=6163 host=1GiB"}), wire.Info)
    assert board.trusted("/v1/overview")[1]["status"]["quotas"][0]["rule"] == "tenant=6163"
    shown = board.ask("/v1/overview")[1]
    assert shown["trusted"] is False
    assert shown["status"]["pages"] == STEM + BRANCHES * BRANCH
    assert [set(quota) for quota in shown["status"]["quotas"]] == [{"host_limit_bytes", "host_held_bytes"}]
    assert not {"policy", "policy_mistake", "disk_path"} & set(shown["status"])
    assert "pids" not in shown["status"]["instances"][0]
    cache = shown["caches"][0]["id"]
    assert not any("tokens" in node for node in board.ask(f"/v1/tree?cache={cache}")[1]["nodes"])
    status, tree = board.trusted(f"/v1/tree?cache={cache}&limit=3&depth=2")
    assert status == 200
    assert len(tree["nodes"]) == 3
    assert tree["nodes"][0]["tokens"][:4] == [0] * 4
    assert board.address_path.stat().st_mode & 0o777 == 0o600


def test_kvtierctl_prints_the_address_with_the_token(board: Board, tmp_path: Path) -> None:
    """For whoever may read the file; where there is none, or no daemon that it is of any more, it says so."""
    ctl = [sys.executable, "-m", "kvtier.ctl", "--socket", str(board.address_path.with_name("admin.sock")), "dashboard"]
    said = json.loads(subprocess.run([*ctl, "--json"], check=True, capture_output=True, text=True).stdout)
    assert said == {"url": f"http://127.0.0.1:{board.port}/#token={board.token}"}
    ctl[4] = str(tmp_path / "elsewhere" / "admin.sock")
    gone = subprocess.run([*ctl, "--json"], capture_output=True, text=True)
    assert gone.returncode == 1
    assert "dashboard.url" in gone.stdout + gone.stderr
    left = tmp_path / "left"
    left.mkdir()
    (left / "dashboard.url").write_text(said["url"])
    ctl[4] = str(left / "admin.sock")
    dead = subprocess.run(ctl, capture_output=True, text=True)
    assert (dead.returncode, dead.stdout, "no daemon" in dead.stderr) == (2, "", True)


def test_pins_are_changed_with_the_token_alone(board: Board) -> None:
    """Without it, or with another, nothing changes; with it a page's path is held and let go."""
    cache = board.ask("/v1/overview")[1]["caches"][0]["id"]
    chain = board.ask(f"/v1/tree?cache={cache}")[1]["nodes"][0]["chain"]
    pin = {"cache": cache, "chain": chain}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic x"}, {"Authorization": "Bearer "},
                    {"Authorization": "Bearer \xff"}):  # fmt: skip
        assert board.ask("/v1/pins", "POST", pin, **headers)[0] == 403
        assert board.ask("/v1/pins/1", "DELETE", **headers)[0] == 403
    assert board.ask("/v1/pins")[1]["pins"] == []
    assert board.trusted("/v1/pins", "POST", pin)[0] == 200
    held = board.ask("/v1/pins")[1]["pins"]
    assert [each["pages"] for each in held] == [STEM]
    assert board.trusted(f"/v1/pins/{held[0]['pin']}", "DELETE")[0] == 200
    assert board.ask("/v1/pins")[1]["pins"] == []


def test_a_pin_may_take_seconds(board: Board) -> None:
    """Its page is looked for among all there are; the rest of the page is told within a second that nobody answers."""
    cache = board.ask("/v1/overview")[1]["caches"][0]["id"]
    chain = next(node["chain"] for node in board.trusted(f"/v1/tree?cache={cache}")[1]["nodes"] if "chain" in node)
    os.kill(board.daemon.pid, signal.SIGSTOP)
    again = threading.Timer(1.7, os.kill, (board.daemon.pid, signal.SIGCONT))
    again.start()
    try:
        status, pin = board.trusted("/v1/pins", "POST", {"cache": cache, "chain": chain})
        assert status == 200, pin
    finally:
        again.join()


def test_bad_requests_are_refused_by_field_and_pages_of_other_names_not_at_all(board: Board) -> None:
    """A name that resolves to loopback is another site's; what is asked wrongly is answered with the field."""
    for name in ("evil.example", "evil.example:80", f"evil.example:{board.port}", "127.0.0.1.evil.example"):
        assert board.ask("/v1/overview", Host=name)[0] == 403
        assert board.ask("/", Host=name)[0] == 403
    assert board.ask("/v1/overview", Host=f"localhost:{board.port}")[0] == 200
    for path, field in (
        ("/v1/tree?cache=zz", "cache"),
        ("/v1/tree?depth=-1", "depth"),
        ("/v1/curve?add=x", "add"),
        ("/v1/tree?limit=99999999999999999999999", "limit"),
        ("/v1/tree?limit=%C2%B2", "limit"),
        (f"/v1/curve?add={'0' * 19}1{'9' * 100}", "add"),
        (f"/v1/curve?add={'0' * 19}1{'9' * 5000}", "add"),
    ):
        status, body, _ = board.ask(path)
        assert (status, body["error"]["field"]) in {(400, field), (404, field)}, path
    for body in ({"cache": ""}, {"cache": "", "chain": "zz"}, [], {"cache": 1, "chain": "", "more": 1}):
        assert board.trusted("/v1/pins", "POST", body)[0] == 400
    assert board.trusted("/v1/pins", "POST", b"[" * (MAX_BODY + 1000))[0] == 400
    assert board.trusted("/v1/pins/x", "DELETE")[0] == 400
    assert board.trusted("/v1/pins/77", "DELETE")[0] == 404
    for path in ("/../http.py", "/static/app.js", "/v1/../../etc/passwd", "/%2e%2e/http.py"):
        assert board.ask(path)[0] == 404


def test_a_pin_that_comes_in_pieces_is_read_whole(board: Board) -> None:
    """A body is cut where the network likes; one that is too long is refused by name."""

    def pieces(*parts: bytes) -> Iterator[bytes]:
        for part in parts:
            yield part
            time.sleep(0.1)

    for body, field in (
        (pieces(b'{"cache": "", "cha', b'in": "00"}'), "chain"),
        (pieces(b" " * (MAX_BODY + 1)), "body"),
    ):
        connection = http.client.HTTPConnection("127.0.0.1", board.port, timeout=20)
        connection.request("POST", "/v1/pins", body, {"Authorization": f"Bearer {board.token}"})
        reply = connection.getresponse()
        said = json.loads(reply.read())["error"]
        connection.close()
        assert (reply.status, said["field"]) == (400, field), said


def body_said(board: Board, head: str, body: bytes) -> tuple[int, dict[str, str]]:
    """Status and error of a POST by hand: its head as given, a part of its body, and no more."""
    with socket.create_connection(("127.0.0.1", board.port), timeout=20) as sock:
        sock.sendall(f"POST {head}\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {board.token}\r\n\r\n".encode())
        with contextlib.suppress(ConnectionError):  # it was refused before all of it was sent
            sock.sendall(body)
        reply = http.client.HTTPResponse(sock, method="POST")
        reply.begin()
        return reply.status, json.loads(reply.read())["error"]


def chunked(size: int) -> bytes:
    """A body of so many blanks in chunks of 1 MiB, and no end."""
    return b"".join(b"100000\r\n" + b" " * (1 << 20) + b"\r\n" for _ in range(size >> 20))


def test_a_body_that_is_too_long_is_refused_by_name_and_not_kept(board: Board) -> None:
    """Of a pin or a route, said to be long, sent without a length, or packed: an error that names it; memory stays."""
    http_process = next(each for each in psutil.Process(board.daemon.pid).children() if "kvtier.http" in each.cmdline())
    held = http_process.memory_info().rss
    packed = zlib.compress(bytes(256 << 20))
    for path, most in (("/v1/pins", MAX_BODY), ("/v1/route", MAX_PROMPT)):
        for head, body in (
            (f"Content-Length: {most + 1}", b"{"),
            (f"Content-Length: {1 << 60}", b"{"),
            ("Transfer-Encoding: chunked", chunked(most + (2 << 20))),
            (f"Content-Encoding: deflate\r\nContent-Length: {len(packed)}", packed),
        ):
            status, error = body_said(board, f"{path} HTTP/1.1\r\n{head}", body)
            assert (status, error["code"], error["field"]) == (400, "bad_request", "body"), (path, head, error)
            assert f"at most {most} bytes" in error["message"], (path, head)
    for path in ("/v1/overview", "/v1/tree", "/metrics", "/healthz", "/"):
        assert board.ask(path, body=b" " * (2 << 20))[0] == 200, "nobody reads what a GET brings along"
    assert http_process.memory_info().rss - held < 96 << 20
    longest = board.trusted("/v1/route", "POST", b'{"tokens": [1]}' + b" " * (MAX_PROMPT - 15))[1]
    assert longest["error"]["field"] != "body", longest


SMUGGLED = b"GET /v1/pins HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


HEADS = (
    b"Content-Length: 4\r\nTransfer-Encoding: chunked",
    b"Content-Length: 4\r\nContent-Length: 60",
    b"Content-Length: +4",
    b"Content-Length: -1",
    b"Content-Length : 4",
    b"Transfer-Encoding: chunked, identity",
    b"X-Long: " + b"x" * 100_000,
)


def test_requests_that_two_readers_would_cut_differently_end_their_connection(board: Board) -> None:
    """What a proxy took for a body is never answered as a request of its own."""
    for head in HEADS:
        said = b""
        with socket.create_connection(("127.0.0.1", board.port), timeout=20) as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(b"POST /v1/pins HTTP/1.1\r\nHost: 127.0.0.1\r\n" + head + b"\r\n\r\n0\r\n\r\n" + SMUGGLED)
            with contextlib.suppress(ConnectionError):
                while more := sock.recv(1 << 16):
                    said += more
        assert said.count(b"HTTP/1.") <= 1, said
        assert said[8:].startswith(b" 4") or not said, said
        assert b'"pins"' not in said
    assert board.ask("/v1/pins")[1] == {"pins": []}


def test_a_daemon_that_hangs_is_said_so(board: Board) -> None:
    """The page still comes, its numbers do not, within the probe's time."""
    os.kill(board.daemon.pid, signal.SIGSTOP)
    try:
        assert board.ask("/")[0] == 200
        status, body, _ = board.ask("/v1/overview")
        assert (status, body["error"]["code"]) == (503, "io")
        assert body["error"]["message"] == "the daemon does not answer: not in time"
    finally:
        os.kill(board.daemon.pid, signal.SIGCONT)
    until(lambda: board.ask("/v1/overview")[0] == 200)


def test_the_history_holds_an_hour_and_begins_anew_with_the_daemon() -> None:
    """Rates are between readings, whatever time lies between them; counters that fell belong to another daemon."""
    history = History()
    for n in range(KEPT + 50):
        history.add(5.0 * n, {"tokens_asked": 1000 * n, "tokens_hit_host": 250 * n})
    steps = history.steps()
    assert len(steps) == KEPT - 1
    assert {(step["asked_s"], step["hit_s"]["host"], step["hit_s"]["disk"]) for step in steps} == {(200.0, 50.0, 0.0)}
    history.add(1e6, {"tokens_asked": 10})
    assert history.steps() == []


async def test_a_clock_that_is_set_back_makes_no_peak_in_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are by a clock that nobody sets: an hour of the picture would be flat beside one such step."""
    asked, times = itertools.count(0, 1000), itertools.count(10**9, -3600)

    class Line:
        """A daemon that is asked for 1,000 tokens between two readings."""

        async def ask(self, *_: object) -> wire.Info:
            return wire.Info({"counters": {"tokens_asked": next(asked)}})

    monkeypatch.setattr(site, "EVERY_S", 0.01)
    monkeypatch.setattr(time, "time", lambda: next(times))
    shown = site.Dashboard(Line(), Line(), "token")
    watch = asyncio.create_task(shown.watch())
    while len(shown._history.steps()) < 5:
        await asyncio.sleep(0.01)
    watch.cancel()
    assert max(step["asked_s"] for step in shown._history.steps()) < 1e6
