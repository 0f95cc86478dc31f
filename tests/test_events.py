"""KV events over ZMQ: numbered, per tier, replayed, announced anew; and a router of another project believes them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from engineproc import SPEC, path_keys
from fleetkit import Host, free_ports, until
from kvtier import wire
from kvtier.demo.daemon import Daemon
from kvtier.events.feed import Stored

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed (kvtier[events])")
from kvtier.events.publish import Publisher

PATH = [1, 2, 3, 4, 5, 6]


class Telling:
    """A daemon that publishes, and somebody who listens from the beginning."""

    def __init__(self, home: Path) -> None:
        self.ports = free_ports(2)
        publish, replay = (f"tcp://127.0.0.1:{port}" for port in self.ports)
        flags = [f"--events-publish={publish}", f"--events-replay={replay}"]
        self.host = Host("a", Daemon(home, host="64MiB", disk="256MiB", flags=flags))
        self.context = zmq.Context()
        self.ear = self.context.socket(zmq.SUB)
        self.ear.subscribe(b"")
        self.ear.connect(publish)
        self.ask = self.context.socket(zmq.DEALER)
        self.ask.connect(replay)
        self.heard: list[tuple[int, list]] = []

    def listen(self) -> list[dict]:
        """All events so far, in order."""
        while self.ear.poll(50):
            topic, number, payload = self.ear.recv_multipart()
            assert topic == b""
            self.heard.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))
        return [event for _, batch in self.heard for event in batch[1]]

    def known(self) -> dict[str, set[int]]:
        """Which blocks a listener believes each medium has."""
        out: dict[str, set[int]] = {}
        for event in self.listen():
            if event["type"] == "AllBlocksCleared":
                out.clear()
            elif event["type"] == "BlockStored":
                out.setdefault(event["medium"], set()).update(event["block_hashes"])
            else:
                out.get(event["medium"], set()).difference_update(event["block_hashes"])
        return out

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        """What the daemon kept from a number on."""
        self.ask.send_multipart([b"", first.to_bytes(8, "big")])
        out = []
        while True:
            assert self.ask.poll(10_000)
            _, number, payload = self.ask.recv_multipart()
            if number == b"\xff" * 8:
                return out
            out.append((int.from_bytes(number, "big"), payload))


@pytest.fixture
def telling(tmp_path: Path) -> Iterator[Telling]:
    """A daemon that publishes."""
    one = Telling(tmp_path)
    one.host.start()
    until(lambda: one.replay(1 << 60) is not None and one.listen() != [])  # a subscriber misses what comes before it
    yield one
    one.host.close()
    one.context.destroy(linger=0)


def counts(known: dict[str, set[int]]) -> dict[str, int]:
    """How many blocks each medium has, those that have some."""
    return {medium: len(blocks) for medium, blocks in known.items() if blocks}


def test_every_page_is_told_of_per_tier_and_taken_back(telling: Telling) -> None:
    """Pages are announced with tokens and parents when host has them, again for disk, and taken back tier by tier."""
    host = telling.host
    host.put(PATH)
    until(lambda: counts(telling.known()) == {"CPU_PINNED": 6, "DISK": 6})
    stored = [event for event in telling.listen() if event["type"] == "BlockStored" and event["medium"] == "CPU_PINNED"]
    ids = [token for event in stored for token in event["token_ids"]]
    assert ids == np.frombuffer(path_keys(PATH), "<i4").tolist()
    assert stored[0]["parent_block_hash"] is None
    assert {event["block_size"] for event in stored} == {SPEC.page_tokens}
    host.ask(wire.Evict(wire.Prompt(tokens=path_keys(PATH)), "host"))
    until(lambda: counts(telling.known()) == {"DISK": 6})
    host.ask(wire.Evict(wire.Prompt(tokens=path_keys(PATH)), "all"))
    until(lambda: counts(telling.known()) == {})
    numbers = [number for number, _ in telling.heard]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_missed_batches_are_replayed_and_a_newcomer_learns_everything(telling: Telling) -> None:
    """A replay from 0 gives what was published; one from beyond what is kept makes the daemon announce all anew."""
    telling.host.put(PATH)
    until(lambda: counts(telling.known()) == {"CPU_PINNED": 6, "DISK": 6})
    kept = telling.replay(0)
    assert [number for number, _ in kept] == list(range(kept[0][0], kept[0][0] + len(kept)))
    assert dict(kept).items() >= {number: msgspec.msgpack.encode(batch) for number, batch in telling.heard}.items()
    telling.heard.clear()
    telling.replay(1 << 60)
    until(lambda: counts(telling.known()) == {"CPU_PINNED": 6, "DISK": 6})
    assert any(event["type"] == "AllBlocksCleared" for event in telling.listen())


DEAF = """
import sys, zmq
context, asked = zmq.Context(), []
for number in range(6):
    asked.append(context.socket(zmq.DEALER))
    asked[-1].rcvhwm = 1
    asked[-1].connect(sys.argv[1])
    asked[-1].send((0).to_bytes(8, "big"))
for each in asked:  # that something comes says that all was sent to those before
    each.recv_multipart()
print("asked", flush=True)
sys.stdin.read()
context.destroy(linger=0)
"""


def test_who_asks_for_batches_and_does_not_read_them_takes_no_memory() -> None:
    """Any process of the host may ask, as often as it likes."""
    publish, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    publisher = Publisher(publish, replay, lambda: None)
    for number in range(60):
        tokens = np.arange(number, number + 200_000, dtype="<i4").tobytes()
        publisher.send(0.0, [Stored("CPU_PINNED", b"", bytes(16), tokens, 200_000)])
    until(lambda: publisher._next == publisher._first + 60)
    assert publisher._kept_bytes > 30 << 20
    before = psutil.Process().memory_info().rss
    command = [sys.executable, "-c", DEAF, replay]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as deaf:
        assert deaf.stdout.readline() == b"asked\n"
        assert psutil.Process().memory_info().rss - before < 64 << 20
        deaf.stdin.close()
    publisher.close()


def test_a_daemon_that_starts_again_tells_what_its_disk_has(telling: Telling) -> None:
    """After kill -9 the stream begins anew: all is cleared, and then what the catalogue has is announced."""
    telling.host.put(PATH)
    assert telling.host.engine().open(SPEC).flush(20.0)
    telling.host.daemon.kill()
    telling.listen()
    telling.host.start()
    until(lambda: counts({}) == {} and telling.replay(0) != [])
    telling.heard = [(number, msgspec.msgpack.decode(payload)) for number, payload in telling.replay(0)]
    assert telling.heard[0][1][1][0]["type"] == "AllBlocksCleared"
    until(lambda: counts(telling.known()) == {"DISK": 6})


def test_who_heard_the_life_before_learns_that_it_ended_wherever_it_had_stopped(telling: Telling) -> None:
    """What a daemon that was started again says is nobody's next batch: it is asked for, and clears all first."""
    telling.listen()
    heard = telling.heard[-1][0]
    telling.host.put(PATH)
    telling.host.daemon.kill()
    telling.host.start()
    until(lambda: telling.host.put(PATH) == 6 and len(telling.replay(heard + 1)) > 2)
    numbers, (first, *_) = zip(*telling.replay(heard + 1), strict=True)
    assert numbers[0] > heard + 1
    assert msgspec.msgpack.decode(first)[1] == [{"type": "AllBlocksCleared"}]


def test_who_subscribes_is_told_where_the_stream_is_though_nothing_more_happens(telling: Telling) -> None:
    """Else whoever connects again after the last event believes for ever what it knew before."""
    telling.host.put(PATH)
    until(lambda: counts(telling.known()) == {"CPU_PINNED": 6, "DISK": 6})
    for _ in range(2):
        late = telling.context.socket(zmq.SUB)
        late.subscribe(b"")
        late.connect(f"tcp://127.0.0.1:{telling.ports[0]}")
        assert late.poll(5000)
        _, number, payload = late.recv_multipart()
        late.close()
        assert msgspec.msgpack.decode(payload)[1] == []
        telling.listen()
        assert int.from_bytes(number, "big") == telling.heard[-1][0]


def test_pages_computed_again_stay_announced_when_the_purged_ones_are_let_go_of(telling: Telling) -> None:
    """An engine that still reads what was purged says nothing about what is served by then."""
    host = telling.host
    host.put(PATH)
    until(lambda: counts(telling.known()) == {"CPU_PINNED": 6, "DISK": 6})
    with host.engine().open(SPEC).match(path_keys(PATH)).acquire() as lease:
        assert lease.pages == 6
        host.ask(wire.Purge(scope=f"uid:{os.getuid()}"))
        until(lambda: counts(telling.known()) == {})
        host.put(PATH)
        until(lambda: counts(telling.known()) == {"CPU_PINNED": 6, "DISK": 6})
    host.put([7])
    until(lambda: counts(telling.known()).get("DISK") == 7)
    assert counts(telling.known()) == {"CPU_PINNED": 7, "DISK": 7}


def test_dynamos_indexer_scores_tiers_as_the_daemon_has_them(telling: Telling) -> None:
    """Dynamo's indexer, fed by the daemon, counts the pages of each tier as the daemon does, so its costs are equal."""
    pytest.importorskip("dynamo", reason="ai-dynamo-runtime is not installed")
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port), "--model-name", SPEC.model]
    command += ["--block-size", str(SPEC.page_tokens), "--workers", f"1=tcp://127.0.0.1:{telling.ports[0]}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as indexer:
        try:
            check_indexer(telling, port)
        finally:
            indexer.kill()


def check_indexer(telling: Telling, port: int) -> None:
    """Compare what the indexer says with what the daemon has."""
    ids = np.frombuffer(path_keys([*PATH, 99]), "<i4").tolist()

    def query() -> dict:
        body = json.dumps({"token_ids": ids, "model_name": SPEC.model, "block_size": SPEC.page_tokens}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/query", body, headers)
        with contextlib.suppress(OSError), urllib.request.urlopen(request) as reply:
            return json.loads(reply.read())
        return {}

    until(lambda: query() != {})
    host = telling.host
    host.put(PATH)
    until(lambda: counts(telling.known()) == {"CPU_PINNED": 6, "DISK": 6})
    host.ask(wire.Evict(wire.Prompt(tokens=path_keys(PATH)), "host"))
    host.engine().open(SPEC).match(path_keys(PATH[:2])).acquire().release()
    until(lambda: counts(telling.known()) == {"CPU_PINNED": 2, "DISK": 6})
    mine = host.ctl("route", "--tokens", "-", stdin=json.dumps(ids))["hosts"][0]
    assert (mine["device"], mine["host"], mine["disk"]) == (0, 2, 4)
    pages = {name: int(value) // SPEC.page_tokens for name, value in query()["instances"]["1"].items() if name != "dp"}
    assert pages == {"longest_matched": 6, "gpu": 0, "cpu": 2, "disk": 6}
    credit = 0.75 * pages["cpu"] + 0.25 * (pages["disk"] - pages["cpu"])
    assert mine["cost"] == len(ids) // SPEC.page_tokens - credit
