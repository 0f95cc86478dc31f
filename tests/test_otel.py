"""Spans of requests: a real daemon sends them to an OTLP/HTTP receiver on loopback, and makes none when not asked."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engineproc import SPEC, path_keys
from faultkit import eventually
from kvtier import wire
from kvtier.client import Client
from kvtier.config import load
from kvtier.control.call import Admin
from kvtier.demo.daemon import Daemon
from kvtier.otlp import encoded
from kvtier.server.spans import MOST, Spans
from kvtier.types import Code, KvtierError


class Receiver(http.server.ThreadingHTTPServer):
    """Takes what is posted; answers with `status`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status = 200
        self.posts: list[tuple[str, str, dict[str, Any]]] = []

    @property
    def endpoint(self) -> str:
        """Its address, as in the settings."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def spans(self) -> list[dict[str, Any]]:
        """All spans that came."""
        return [span for _, _, body in self.posts for resource in body["resourceSpans"]
                for scope in resource["scopeSpans"] for span in scope["spans"]]  # fmt: skip


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.posts.append((self.path, self.headers["Content-Type"], body))
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """One on loopback."""
    with Receiver() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    """Names and values."""
    return {each["key"]: next(iter(each["value"].values())) for each in span["attributes"]}


def work(daemon: Daemon) -> None:
    """Store a prompt, find and lease it, and ask for something that is refused."""
    with Client(daemon.socket, instance="engine", timeout_s=10.0) as client:
        cache, keys = client.open(SPEC), path_keys([1, 2])
        with cache.match(keys, request="r17", session="chat").reserve(0, 2) as held:
            assert held.commit() == 2
        path = cache.match(keys, request="r18")
        path.acquire().release()
        with pytest.raises(KvtierError):
            client.wait(client.submit(wire.Release(12345), wire.Ok))


def test_a_receiver_gets_spans_with_pages_by_tier(tmp_path: Path, receiver: Receiver) -> None:
    """Each verb with its times, its engine, the engine's own ids, pages by tier, and refusals by name."""
    before = time.time_ns()
    flags = [f"--otel-endpoint={receiver.endpoint}/", "--otel-share=1"]
    with Daemon(tmp_path, host="16MiB", disk="0", flags=flags) as daemon:
        work(daemon)
        eventually(
            lambda: {"kvtier.Match", "kvtier.Acquire", "kvtier.Release"} <= {s["name"] for s in receiver.spans()}
        )
        eventually(lambda: any(s["status"] for s in receiver.spans()))
        assert daemon.stop() == 0
    assert {(path, kind) for path, kind, _ in receiver.posts} == {("/v1/traces", "application/json")}
    found = next(s for s in receiver.spans() if attributes(s).get("kvtier.request") == "r18")
    assert attributes(found) == {
        "kvtier.instance": "engine", "kvtier.request": "r18", "kvtier.pages": "2", "kvtier.pages.host": "2",
        "kvtier.pending": "0",
    }  # fmt: skip
    assert before < int(found["startTimeUnixNano"]) < int(found["endTimeUnixNano"]) < time.time_ns()
    refused = [s for s in receiver.spans() if s["status"]]
    assert [(s["name"], s["status"]) for s in refused] == [("kvtier.Release", {"code": 2, "message": "unknown"})]
    ids = [(s["traceId"], s["spanId"]) for s in receiver.spans()]
    assert len(set(ids)) == len(ids)
    assert all(len(bytes.fromhex(trace)) == 16 and len(bytes.fromhex(span)) == 8 for trace, span in ids)


@pytest.mark.slow
def test_a_receiver_that_takes_nothing_costs_its_spans_alone(tmp_path: Path, receiver: Receiver) -> None:
    """It refuses, then it takes again: engines notice nothing, the failure is logged once, later spans arrive."""
    receiver.status = 503
    flags = [f"--otel-endpoint={receiver.endpoint}", "--otel-share=1"]
    with Daemon(tmp_path, host="16MiB", disk="0", flags=flags) as daemon:
        work(daemon)
        eventually(lambda: receiver.posts)
        work(daemon)
        seen = len(receiver.posts)
        eventually(lambda: len(receiver.posts) > seen)
        receiver.status = 200
        receiver.posts.clear()
        work(daemon)
        eventually(receiver.spans)
        assert daemon.log.read_text().count("spans are lost") == 1
        assert daemon.stop() == 0


def test_without_a_receiver_no_span_is_made(daemon: Daemon) -> None:
    """What is off is off: nothing is kept, and no process is started for it."""
    work(daemon)
    with Admin(daemon.socket.with_name("admin.sock"), 10.0) as admin:
        assert admin.ask(wire.Spans(), wire.Info).data == {"spans": [], "lost": 0}
    assert Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text() == ""


def test_spans_are_a_share_and_bounded() -> None:
    """A tenth of the requests is about a tenth; what nobody takes is given up, oldest first, and counted."""
    some, all_of_them = Spans(0.1), Spans(1.0)
    for number in range(MOST + 1000):
        for spans in (some, all_of_them):
            spans.note("e", wire.Match(1, request=str(number)), wire.Matched(1, 0), 0.001)
    data = all_of_them.take(wire.Spans()).data
    assert data["lost"] == 1000
    assert [span["attributes"]["kvtier.request"] for span in data["spans"]] == [str(1000 + n) for n in range(MOST)]
    assert 300 < len(some.take(wire.Spans()).data["spans"]) < 800
    assert all_of_them.take(wire.Spans()).data == {"spans": [], "lost": 0}
    all_of_them.note("e", wire.Match(1, request="x" * (70 << 20)), wire.Matched(1, 0), 0.001)
    assert wire.frame(117, 1, all_of_them.take(wire.Spans())), "an engine's id of any length is not kept whole"
    all_of_them.note("", wire.Metrics(), wire.Info({}), 0.1)
    assert all_of_them.take(wire.Spans()).data["spans"] == [], "who scrapes is not traced"


def test_the_encoding_is_one_that_opentelemetry_reads() -> None:
    """Every field is one of its ExportTraceServiceRequest, with its type."""
    trace = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="not installed")
    json_format = pytest.importorskip("google.protobuf.json_format")
    spans = Spans(1.0)
    spans.note("e", wire.Match(1, request="r"), wire.Matched(1, 3, (wire.Segment(1, 3),)), 0.5)
    spans.note("e", wire.Release(1), KvtierError(Code.UNKNOWN, "no"), 0.5)
    read = json_format.ParseDict(encoded(spans.take(wire.Spans()).data["spans"]), trace.ExportTraceServiceRequest())
    one, other = read.resource_spans[0].scope_spans[0].spans
    assert one.end_time_unix_nano - one.start_time_unix_nano == 500_000_000
    assert {each.key: each.value.int_value for each in one.attributes}["kvtier.pages.host"] == 3
    assert other.status.code == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("otel.endpoint", "localhost:4318"), ("otel.endpoint", "ftp://x"), ("otel.endpoint", "http://"),
     ("otel.share", "0"), ("otel.share", "1.5")],
)  # fmt: skip
def test_settings_that_cannot_be_served_are_named(name: str, value: str) -> None:
    """By the setting's name."""
    with contextlib.ExitStack() as stack:
        caught = stack.enter_context(pytest.raises(KvtierError))
        load(flags={name: value})
    assert caught.value.field == name
