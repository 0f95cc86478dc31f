"""Metrics and health over HTTP, from a real daemon with a real engine; and what they say when the loop hangs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtier import metrics
from kvtier.client import Client, page_keys
from kvtier.demo.daemon import Daemon
from kvtier.http import MOST
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.types import Kind

ROOT = Path(__file__).resolve().parent.parent
SPEC = CacheSpec("m", b"f" * 16, "bf16", 4, (GroupSpec(Kind.FULL, 1, 1, 4096),))
DEADLINE = 20.0


def free_port() -> int:
    """A port of the loopback address that nobody has."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def get(port: int, page: str) -> tuple[int, str]:
    """Status and text of a page."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{page}", timeout=DEADLINE) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Value by metric name and label values."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def port(tmp_path: Path) -> Iterator[tuple[int, Daemon]]:
    """A daemon that serves HTTP, once it does."""
    number = free_port()
    with Daemon(tmp_path, host="64MiB", disk="128MiB", flags=[f"--http-port={number}"]) as daemon:
        end = time.monotonic() + DEADLINE
        while True:
            try:
                get(number, "/healthz")
                break
            except (urllib.error.URLError, OSError):
                assert time.monotonic() < end, daemon.log.read_text()
                time.sleep(0.05)
        yield number, daemon
        if daemon.running:
            assert daemon.stop() == 0, daemon.log.read_text()[-2000:]


def put(client: Client, first: int, pages: int) -> None:
    """Store one prompt of its own."""
    cache = client.open(SPEC)
    with cache.match(page_keys(SPEC, np.arange(first, first + 4 * pages))).reserve(0, pages) as reserved:
        for page in range(pages):
            reserved.write(0, page, np.full(4096, page, np.uint8))
        assert reserved.commit() == pages
    assert cache.match(page_keys(SPEC, np.arange(first, first + 4 * pages + 8))).pages == pages


def test_metrics_count_what_engines_did(port):
    """Hits by tier, misses by reason, latency per verb and refusals are those of the requests that were made."""
    number, daemon = port
    with Client(daemon.socket, instance="engine") as client:
        put(client, 0, 10)
        seen = samples(get(number, "/metrics")[1])
    assert seen["kvtier_up",] == 1
    assert seen["kvtier_requests_total",] == 2
    assert seen["kvtier_tokens_asked_total",] == 88
    assert seen["kvtier_tokens_hit_total", "host"] == 40
    assert seen["kvtier_tokens_missed_total", "absent"] == 48
    assert seen["kvtier_hit_ratio",] == pytest.approx(40 / 88)
    assert seen["kvtier_matched_prefix_tokens",] == 20
    assert seen["kvtier_request_seconds_count", "Match"] == 2
    assert seen["kvtier_request_seconds_bucket", "+Inf", "Match"] == 2
    assert seen["kvtier_instances",] == 1
    assert seen["kvtier_tier_used_bytes", "host"] > 0


def test_every_sample_is_of_a_documented_metric_and_labels_are_bounded(port):
    """No name outside the document, and no label that an engine could make longer."""
    number, daemon = port
    known = {name for name, *_ in metrics.names()}
    with Client(daemon.socket, instance="engine-with-a-name") as client:
        put(client, 0, 3)
        text = get(number, "/metrics")[1]
    names = {key[0].removesuffix("_bucket").removesuffix("_count").removesuffix("_sum") for key in samples(text)}
    assert names <= known
    assert "engine-with-a-name" not in text
    assert len(samples(text)) < 400


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="read from a checkout")
def test_the_document_is_what_the_code_says():
    """docs/metrics.md is generated and up to date, and names every metric."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert text == metrics.document()
    assert all(f"`{name}`" in text for name, *_ in metrics.names())


def test_healthz_is_green_while_the_loop_serves_and_red_within_two_seconds_when_it_hangs(port):
    """A stopped daemon answers neither the ping nor a newcomer; the page says so, and recovers with it."""
    number, daemon = port
    assert get(number, "/healthz")[0] == 200
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        start = time.monotonic()
        status, text = get(number, "/healthz")
        assert time.monotonic() - start < 2.0
        assert status == 503
        assert set(json.loads(text)["faults"]) == {"loop", "engine_socket"}
        status, text = get(number, "/metrics")
        assert samples(text) == {("kvtier_up",): 0.0}
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    end = time.monotonic() + DEADLINE
    while get(number, "/healthz")[0] != 200:
        assert time.monotonic() < end


def test_connections_on_which_nothing_comes_keep_nobody_out(port):
    """Some say nothing, some a part of a header, some not all of a body: the oldest go, and newcomers are served."""
    number, _ = port
    began = b"POST /v1/route HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
    with contextlib.ExitStack() as stack:
        silent = []
        for n in range(2 * MOST):
            silent.append(stack.enter_context(socket.create_connection(("127.0.0.1", number), DEADLINE)))
            silent[-1].sendall((b"", began[:20], began + b"\r\nx")[n % 3])
        assert get(number, "/healthz")[0] == 200
        for each in silent[:MOST]:
            with contextlib.suppress(ConnectionResetError):
                while each.recv(1 << 16):  # it is told that it is over, perhaps why
                    pass
        silent[-2].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[-2].recv(1)


def test_the_http_process_ends_with_the_daemon(port):
    """Also when the daemon is killed."""
    number, daemon = port
    daemon.kill()
    end = time.monotonic() + DEADLINE
    while True:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", number)):
                break
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_http_process_is_started_again(port):
    """The port answers again, from another process."""
    number, daemon = port
    (child,) = psutil.Process(daemon.pid).children()
    child.kill()
    end = time.monotonic() + DEADLINE
    while True:
        try:
            assert get(number, "/healthz")[0] == 200
            break
        except (urllib.error.URLError, OSError):
            assert time.monotonic() < end
            time.sleep(0.1)
    (again,) = psutil.Process(daemon.pid).children()
    assert again.pid != child.pid


def test_a_taken_port_keeps_nobody_from_being_served(tmp_path):
    """The daemon serves engines, and the log says why there is no HTTP."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        flags = [f"--http-port={taken.getsockname()[1]}"]
        with Daemon(tmp_path, host="16MiB", disk="0", flags=flags) as daemon:
            end = time.monotonic() + DEADLINE
            while "until the port is free" not in daemon.log.read_text():
                assert time.monotonic() < end
                time.sleep(0.05)
            with Client(daemon.socket) as client:
                assert client.ping()
            assert daemon.stop() == 0
