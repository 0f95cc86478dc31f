"""Daemons that are each other's peers, as processes on loopback: hits across hosts, and hosts that die or hang."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engineproc import CELL, HEADS, LAYERS, SPEC, content, path_keys
from fleetkit import Fleet, Host, free_ports, until, write_secrets
from kvtier import wire
from kvtier.client import Client
from kvtier.identity import Slice
from kvtier.peer import frames
from kvtier.peer.base import Place
from kvtier.peer.direct import Direct
from kvtier.peer.fame import Fame
from kvtier.peer.lacks import LACKS_S
from kvtier.peer.members import Members, keys_of
from kvtier.peer.pipe import Pipe
from kvtier.peer.ring import homes, rungs
from kvtier.peer.secrets import read
from kvtier.peer.terms import MAX_OPS, Terms
from kvtier.types import Presence
from liar import MODES, Liar
from storekit import until as soon

RECOVERY_S = 5.0
PATHS = [[100 * n + page for page in range(5)] for n in range(1, 13)]
"""Twelve prompts without a common page: every host is home of some."""


def stored(host: Host) -> None:
    """All prompts computed on one host, and pushed to their homes."""
    for path in PATHS:
        assert host.put(path) == len(path)
    until(host.settled)


def test_pages_computed_on_one_host_are_served_on_another_bit_exact(tmp_path: Path) -> None:
    """With one copy a page each, an engine on any host gets every page that another host computed."""
    with Fleet(tmp_path, replicas=1) as hosts:
        stored(hosts["a"])
        assert hosts["a"].count("pages_pushed_peer") > 0
        for name in "bc":
            assert [hosts[name].get(path) for path in PATHS] == [len(path) for path in PATHS]
            assert hosts[name].count("pages_loaded_peer") > 0
            hosts[name].sound()
        assert [host.daemon.stop() for host in hosts.values()] == [0, 0, 0]


def test_with_two_copies_no_single_lost_host_loses_a_page(tmp_path: Path) -> None:
    """R=2: after kill -9 of the host that computed everything, every page is served by the others."""
    with Fleet(tmp_path, replicas=2) as hosts:
        stored(hosts["a"])
        hosts["a"].daemon.kill()
        for name in "bc":
            assert [hosts[name].get(path) for path in PATHS] == [len(path) for path in PATHS]
            hosts[name].sound()


def homes_of(home: Path, name: str, names: str = "abc") -> list[list[int]]:
    """Prompts whose only home (R=1) is that host."""
    shared = read(home / "secrets").shared(SPEC, f"uid:{os.getuid()}", 0)
    return [p for p in PATHS if homes(list(names), rungs(shared, path_keys(p))[-1].key, 1) == [name]]


def test_a_killed_home_costs_its_share_and_serves_again_soon_after_it_is_back(tmp_path: Path) -> None:
    """R=1, kill -9 of b: its pages are misses, all others hits, and 5 s after its return it takes and gives pages."""
    with Fleet(tmp_path, replicas=1) as hosts:
        mine, others = homes_of(tmp_path, "b"), homes_of(tmp_path, "c")
        for path in mine:
            assert hosts["b"].put(path) == len(path)
        for path in others:
            assert hosts["a"].put(path) == len(path)
        until(hosts["a"].settled)
        hosts["b"].daemon.kill()
        assert [hosts["a"].get(path) for path in mine] == [0] * len(mine)
        assert [hosts["a"].get(path) for path in others] == [len(path) for path in others]
        hosts["b"].start()
        until(lambda: "b" in hosts["a"].up(), timeout_s=RECOVERY_S)
        assert [hosts["a"].get(path) for path in mine] == [0] * len(mine), "it was started empty"
        assert hosts["a"].count("peer_restarts") == 1
        for path in mine:
            until(lambda path=path: hosts["b"].put(path) == len(path))  # the engine connects again first
        time.sleep(LACKS_S)
        assert [hosts["a"].get(path) for path in mine] == [len(path) for path in mine]
        for name in "ac":
            hosts[name].sound()


def test_a_stopped_home_costs_one_deadline_and_then_nothing(tmp_path: Path) -> None:
    """SIGSTOP of the only home: one question goes unanswered, later ones are not asked, and nothing is held."""
    with Fleet(tmp_path, replicas=1) as hosts:
        mine = homes_of(tmp_path, "b")
        assert len(mine) >= 3
        for path in mine:
            assert hosts["b"].put(path) == len(path)
        assert hosts["a"].get(mine[0]) == len(mine[0])
        hosts["b"].signal(signal.SIGSTOP)
        begin = time.monotonic()
        assert [hosts["a"].get(path, wait_ms=30_000) for path in mine[1:]] == [0] * (len(mine) - 1)
        assert time.monotonic() - begin < 30, "the peer's deadline ends it, not the engine's"
        assert hosts["a"].count("peer_failures") <= 1
        hosts["b"].signal(signal.SIGCONT)
        until(lambda: "b" in hosts["a"].up(), timeout_s=RECOVERY_S)
        assert [hosts["a"].get(path) for path in mine] == [len(path) for path in mine]
        for name in "abc":
            hosts[name].emptied()


@pytest.mark.parametrize("mode", MODES)
def test_whatever_a_peer_sends_nothing_wrong_is_served_and_nothing_leaks(tmp_path: Path, mode: str) -> None:
    """A peer that lies in any way is a miss, counted; what it takes is given back, and the daemon goes on."""
    (port,) = free_ports(1)
    fleet = Fleet(tmp_path, 1, more=[("z", port)])
    with Liar(read(tmp_path / "secrets"), port, mode) as liar, fleet as hosts:
        host = hosts["a"]
        until(lambda: host.up() == {"z"})
        path = PATHS[0]
        assert host.get(path, wait_ms=20_000) in range(len(path))  # what came before the lie may be right
        assert liar.fetches or mode == "more"
        assert bool(host.count("peer_failures")) == (mode != "more")
        host.sound()
        host.put(path)
        assert host.get(path) == len(path)
        host.emptied()


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "more"])
async def test_what_comes_with_an_answer_is_checked_like_what_is_fetched(tmp_path: Path, mode: str) -> None:
    """On a connection in use pages come with the answer to the question for them: a lie there is a miss, too."""
    secrets, keys = read(write_secrets(tmp_path / "secrets", ["uid:0"])), path_keys([1, 2, 3])
    nodes = {name: ("127.0.0.1", port) for name, port in zip(("near", "z"), free_ports(2), strict=True)}
    with Liar(secrets, nodes["z"][1], mode) as liar:
        tier = Direct(nodes, Terms("near", secrets, 1.0))
        tier.start()
        try:
            await soon(lambda: tier.status()[0]["up"])
            shared = tier.shared(SPEC, "uid:0", 0)
            assert await tier.depth("z", shared, keys) == 3
            assert liar.fetches == 0
            places = [Place(0, at, [np.zeros(SPEC.groups[0].item_bytes, np.uint8)]) for at in range(3)]
            sums: list[int | None] = [None]
            for source in await tier.find(shared, keys, 0):
                sums = await source.fetch(places)
                source.close()
            assert liar.fetches == 1
            assert None in sums
            for place, value in zip(places, sums, strict=False):
                whole = content(keys[: (place.page + 1) * SPEC.stride]).reshape(-1)
                assert value is None or np.array_equal(place.views[0], whole)
            assert tier.counts["peer_failures"] == 1
        finally:
            await tier.close()


def test_a_home_that_fails_in_a_fetch_is_followed_by_the_next_in_the_same_request(tmp_path: Path) -> None:
    """R=2: the home that is asked first hangs up when it is to send; the engine gets every page from the other one."""
    (port,) = free_ports(1)
    fleet = Fleet(tmp_path, 2, more=[("z", port)])
    secrets = read(tmp_path / "secrets")
    view = Members("abz", "a", 2, Fame())
    shared = secrets.shared(SPEC, f"uid:{os.getuid()}", 0)
    paths = [[100 * n + page for page in range(5)] for n in range(1, 200)]
    paths = [path for path in paths if view.turn(keys_of(shared, path_keys(path))[0]) == ["z", "b"]]
    with Liar(secrets, port, "close") as liar, fleet as hosts:
        until(lambda: hosts["a"].up() == {"b", "z"})
        for path in paths:  # where it is slow to answer, the other one has served them before it was asked: once more
            assert hosts["b"].put(path) == len(path)
            assert hosts["a"].get(path, wait_ms=20_000) == len(path)
            if liar.fetches:
                break
        assert liar.fetches
        hosts["a"].emptied()


def test_a_cache_that_was_reset_gets_nothing_of_its_old_weights_when_its_engine_comes_back(tmp_path: Path) -> None:
    """No disk: the engine leaves, its cache is forgotten, and the next one that opens it is in the new epoch, alone."""
    with Fleet(tmp_path, 2, replicas=2) as hosts:
        a, b = hosts["a"], hosts["b"]
        assert a.put(PATHS[0]) == 5
        until(lambda: a.settled() and b.seen(PATHS[0])["b"] == 5)
        assert a.engine().open(SPEC).reset() == 1
        a.client.close()
        a.client = None
        until(lambda: a.ask(wire.Caches())["caches"] == [])
        assert a.get(PATHS[0]) == 0, "KV of the old weights"
        assert a.engine().open(SPEC).epoch == 1
        assert b.put(PATHS[1]) == 5
        until(b.settled)
        assert a.get(PATHS[1]) == 0, "KV of the old weights, pushed"


def test_a_path_that_no_frame_holds_is_asked_of_nobody_and_takes_no_peer_down(tmp_path: Path) -> None:
    """17 MiB of page keys: looked for, routed and pushed they are a miss, and peers serve all others as before."""
    keys = path_keys([1]) * ((17 << 20) // SPEC.stride)
    with Fleet(tmp_path, 2, replicas=2) as hosts:
        a, b = hosts["a"], hosts["b"]
        assert b.put(PATHS[0]) == 5
        until(b.settled)
        path = a.engine().open(SPEC).match(keys)
        assert (path.pages, path.asking) == (0, False)
        path.push("b")
        with path.reserve(0, 1, wait_ms=2000) as reserved:
            reserved.write(0, 0, content(keys[: SPEC.stride]).reshape(-1))
            assert reserved.commit() == 1
        until(lambda: a.settled() and a.count("pages_pushed_peer") == 1)
        assert len(a.ask(wire.Route(wire.Prompt(tokens=keys)))["hosts"]) in {1, 2}
        assert a.count("peer_failures") == a.count("peer_down") == 0
        assert a.up() == {"b"}
        assert a.get(PATHS[0]) == 5


async def test_every_host_of_a_fleet_has_room_for_its_connections(tmp_path: Path) -> None:
    """32 hosts: b serves nine connections of each, and 200 strangers that say nothing, and answers a all the while."""
    dead = free_ports(30)
    fleet = Fleet(tmp_path, 2, more=[(f"h{n}", port) for n, port in enumerate(dead)])
    secrets = read(tmp_path / "secrets")
    with fleet as hosts:
        a, b = hosts["a"], hosts["b"]
        where = next(row["address"] for row in a.ask(wire.Status())["peers"] if row["name"] == "b")
        port = int(where.rpartition(":")[2])
        pipes = []
        for n in range(30):
            for _ in range(MAX_OPS + 1):
                pipe = Pipe(socket.create_connection(("127.0.0.1", port)))
                pipes.append(pipe)
                await pipe.knock(Terms(f"h{n}", secrets), "b")
                await pipe.ask(frames.Ping(), frames.Done)
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
        a.daemon.kill()
        a.client = None
        await asyncio.to_thread(a.start)
        await soon(lambda: "b" in a.up())
        await asyncio.sleep(3.0)
        assert "b" in a.up()
        assert a.count("peer_down") == 0
        assert b.count("peer_down") <= 1
        for end in (*pipes, *strangers):
            end.close()


def test_a_host_without_the_secret_of_a_cache_gets_none_of_it(tmp_path: Path) -> None:
    """A peer reads only caches whose secret it holds, and one without the fleet's key is not talked to at all."""
    fleet = Fleet(tmp_path, 3, replicas=2)
    write_secrets(tmp_path / "other", [f"uid:{os.getuid()}"], secret="33" * 32)
    write_secrets(tmp_path / "foreign", [f"uid:{os.getuid()}"], fleet="44" * 32)
    fleet.hosts["b"].secrets(tmp_path / "other")
    fleet.hosts["c"].secrets(tmp_path / "foreign")
    fleet.isolated = {"c"}
    with fleet as hosts:
        for path in PATHS:
            assert hosts["a"].put(path) == len(path)
        until(hosts["a"].settled)
        for name in "bc":
            assert [hosts[name].get(path) for path in PATHS] == [0] * len(PATHS)
        assert hosts["a"].up() == {"b"}
        assert hosts["a"].count("peer_refused") > 0
        assert "c" not in hosts["b"].up()


def test_a_prompt_is_routed_to_the_host_that_has_it(tmp_path: Path) -> None:
    """Both kvtierctl route and POST /v1/route rank hosts by cached pages and load; cold prompts go by hashing."""
    fleet = Fleet(tmp_path, replicas=1)
    (port,) = free_ports(1)
    fleet.hosts["a"].daemon.flags = [*fleet.hosts["a"].daemon.flags, f"--http-port={port}"]
    with fleet as hosts:
        (path, *_), cold = homes_of(tmp_path, "b"), [1, 2, 3]
        hosts["a"].engine().open(SPEC).match(path_keys(cold))
        hosts["b"].put(path)
        ids = np.frombuffer(path_keys(path), "<i4").tolist()
        shown = hosts["a"].ctl("route", "--tokens", "-", stdin=json.dumps(ids))
        assert shown["hosts"][0] | {"name": "b", "host": 5, "cost": 5 - 0.75 * 5} == shown["hosts"][0]

        def ask(body: dict) -> dict:
            url = f"http://127.0.0.1:{port}/v1/route"
            token = hosts["a"].daemon.socket.with_name("dashboard.url").read_text().strip().partition("token=")[2]
            request = urllib.request.Request(url, json.dumps(body).encode(), {"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(request) as reply:
                return json.loads(reply.read())

        until(lambda: reachable(port))
        assert ask({"tokens": ids, "session": "s"})["hosts"] == shown["hosts"]
        cold_ids = np.frombuffer(path_keys(cold), "<i4").tolist()
        first = ask({"tokens": cold_ids})["hosts"][0]["name"]
        shared = read(tmp_path / "secrets").shared(SPEC, f"uid:{os.getuid()}", 0)
        assert first == homes(list("abc"), rungs(shared, path_keys(cold))[0].key, 3)[0]
        assert ask({"tokens": cold_ids, "session": "s"})["hosts"][0]["name"] == "b", "the session stays"
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask({"tokens": "nonsense"})
        assert refused.value.code == 400
        refused.value.close()


def reachable(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_a_decoding_host_sees_and_gets_pages_as_they_are_prefilled_elsewhere(tmp_path: Path) -> None:
    """Push: pages that two ranks commit on a reach the one process on b, each before the next is computed."""
    with Fleet(tmp_path, 2, replicas=1) as hosts:
        paths = [list(range(n, n + 6)) for n in range(1000, 2000, 10)]
        path = next(p for p in paths if homes_of_path(tmp_path, p) == ["a"])
        keys, stride = path_keys(path), SPEC.stride
        ranks = []
        for rank in range(2):
            client = Client(hosts["a"].daemon.socket, instance="prefill", timeout_s=10.0)
            part = Slice(0, LAYERS, rank * HEADS // 2, (rank + 1) * HEADS // 2)
            ranks.append((client, client.open(SPEC, rank=rank, world=2, slices=(part,)), part))
        prefill = ranks[0][1].match(keys)
        prefill.push("b")
        reserved = prefill.reserve(0, len(path), wait_ms=2000)
        writers = [(reserved, ranks[0][2]), (ranks[1][1].adopt(reserved.share()), ranks[1][2])]
        decode = hosts["b"].engine().open(SPEC).match(keys)
        until(lambda: hosts["b"].count("peer_misses") == 1)
        for page in range(len(path)):
            for held, part in writers:
                cells = np.ascontiguousarray(content(keys[: (page + 1) * stride])[:, part.h0 : part.h1])
                held.write(0, page, cells.reshape(-1))
                held.commit(page, 1)
            until(lambda page=page: decode.extend().pages == page + 1)
        assert hosts["b"].count("pages_taken_peer") == len(path)
        assert hosts["b"].count("peer_hits") == 0, "nothing was asked for: it was all pushed"
        assert hosts["b"].get(path) == len(path)
        for client, *_ in ranks:
            client.close()


def homes_of_path(home: Path, path: list[int]) -> list[str]:
    """The home (R=1) of a prompt in a fleet of a and b."""
    shared = read(home / "secrets").shared(SPEC, f"uid:{os.getuid()}", 0)
    return homes(["a", "b"], rungs(shared, path_keys(path))[-1].key, 1)


def test_with_two_copies_no_lost_host_loses_a_key(tmp_path: Path) -> None:
    """Keyed caches, R=2: after kill -9 of the host that stored them, every key is served by the two others."""
    cache_spec = msgspec.structs.replace(SPEC, key_bytes=16)
    keys = [n.to_bytes(16, "little") for n in range(40)]
    size = LAYERS * HEADS * CELL
    with Fleet(tmp_path, replicas=2) as hosts:
        with hosts["a"].engine().open(cache_spec).reserve_keys(0, b"".join(keys), wait_ms=2000) as held:
            for at, key in enumerate(keys):
                assert held.write(0, at, content(key).reshape(-1))
            assert held.commit() == len(keys)
        until(hosts["a"].settled)
        hosts["a"].daemon.kill()
        for name in "bc":
            cache = hosts[name].engine().open(cache_spec)
            until(lambda cache=cache: Presence.PENDING not in cache.exists(0, b"".join(keys)))
            assert set(cache.exists(0, b"".join(keys))) <= {Presence.HOST, Presence.PEER}
            with cache.acquire_keys(0, b"".join(keys), wait_ms=5000) as lease:
                out = np.empty(size, np.uint8)
                for at, key in enumerate(keys):
                    assert lease.read(0, at, out)
                    assert np.array_equal(out, content(key).reshape(-1))
        for name in "bc":
            hosts[name].emptied()
