"""Where peers are: names whose look-up hangs or that are none hold up no other peer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fleetkit import FLEET, free_ports, write_secrets
from kvtier.peer import node, redis
from kvtier.peer.direct import Direct
from kvtier.peer.fame import Fame
from kvtier.peer.secrets import Secrets, read
from kvtier.peer.terms import Terms
from kvtier.server.home import Home
from sharedkit import Redis, needs_redis
from storekit import storing, until

real = socket.getaddrinfo


def several(monkeypatch: pytest.MonkeyPatch, addresses: list[str]) -> None:
    """`far.example` has these addresses from now on."""

    def look_up(host: str, port: int, *words: object, **more: object) -> object:
        if host != "far.example":
            return real(host, port, *words, **more)
        if more.get("flags"):
            raise socket.gaierror(-2, "no address")
        return [row for each in addresses for row in real(each, port, type=socket.SOCK_STREAM)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


@needs_redis
async def test_a_shared_store_of_several_addresses_is_reached_at_whichever_answers(tmp_path: Path, monkeypatch) -> None:
    """Each ping tries the next one."""
    several(monkeypatch, ["127.0.0.2", "127.0.0.3", "127.0.0.1"])
    monkeypatch.setattr(redis, "PING_S", 0.05)
    with Redis(tmp_path) as server:
        shelf = redis.RedisShelf([("far.example", server.port)])
        shelf.start()
        try:
            await until(lambda: shelf.up, 5.0)
        finally:
            await shelf.close()


@contextlib.asynccontextmanager
async def asking(ports: dict[str, int], mine: Secrets, theirs: Secrets) -> AsyncIterator[node.Node]:
    """What `near`, which has `mine`, knows of `far.example`, where a daemon with `theirs` serves."""
    nodes = {"near": ("127.0.0.1", ports["near"]), "far": ("far.example", ports["far"])}
    async with storing(None) as far:
        home = Home(far, Terms("far", theirs), ("127.0.0.1", ports["far"]), Fame())
        home.start()
        tier = Direct(nodes, Terms("near", mine, 3.0))
        tier.start()
        try:
            yield tier._nodes["far"]
        finally:
            await tier.close()
            await home.close()


async def test_a_name_of_several_addresses_is_reached_at_whichever_answers(tmp_path: Path, monkeypatch) -> None:
    """The first accepts and says nothing, the second refuses: the third is found within one deadline, and kept to."""
    addresses = ["127.0.0.2", "127.0.0.3", "127.0.0.1"]
    several(monkeypatch, addresses)
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    ports = dict(zip(("near", "far"), free_ports(2), strict=True))
    with socket.create_server((addresses[0], ports["far"])) as mute:
        mute.setblocking(False)
        async with asking(ports, secrets, secrets) as reached:
            await until(lambda: reached.up or reached.why != "not asked yet", 5.0)
            assert reached.up
            reached._hang_up()
            reached.up = False
            await until(lambda: reached.up, 5.0)
            mute.accept()[0].close()
            with pytest.raises(BlockingIOError):
                mute.accept()


async def test_what_a_daemon_says_at_one_address_is_told_whatever_is_wrong_with_others(tmp_path, monkeypatch):
    """As after an upgrade, or with another key: not that nobody answers where nobody is to answer."""
    several(monkeypatch, ["127.0.0.1", "127.0.0.3"])
    ports = dict(zip(("near", "far"), free_ports(2), strict=True))
    keys = {"mine": FLEET, "other": "33" * 32}
    mine, other = (read(write_secrets(tmp_path / name, ["uid:0"], fleet=key)) for name, key in keys.items())
    async with asking(ports, mine, other) as reached:
        await until(lambda: reached.why != "not asked yet", 5.0)
        assert "does not have the fleet's key" in reached.why


async def test_a_name_whose_look_up_hangs_or_that_is_none_holds_up_no_other_peer(tmp_path: Path, monkeypatch) -> None:
    """One look-up of it at a time, whatever its pings ask; peers with addresses need no thread to be connected to."""
    gate, asked = threading.Event(), []

    def look_up(host: str, *words: object, **more: object) -> object:
        if host == "dead.example" and not more.get("flags"):
            asked.append(host)
            gate.wait()
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        if host == "dead.example":
            raise socket.gaierror(-2, "no address")
        return real(host, *words, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(node, "PING_S", 0.05)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    nodes = {name: ("127.0.0.1", port) for name, port in zip(("near", "far"), free_ports(2), strict=True)}
    async with storing(None) as far:
        home = Home(far, Terms("far", secrets), nodes["far"], Fame())
        home.start()
        tier = Direct(nodes | {"dead": ("dead.example", 1), "none": ("a..b", 1)}, Terms("near", secrets, 0.3))
        tier.start()
        try:
            dead, reached, none = (tier._nodes[name] for name in ("dead", "far", "none"))
            await until(lambda: reached.up and "not asked" not in none.why)
            assert "a..b" in none.why
            await until(lambda: len(asked) > 1 or dead.counts["peer_down"] or "Timeout" in dead.why)
            await asyncio.sleep(1.5)
            assert len(asked) == 1
            assert not none._watch.done()
            reached._hang_up()
            await asyncio.sleep(0.5)
            assert reached.up
            assert tier.counts["peer_down"] == 0
        finally:
            gate.set()
            await tier.close()
            await home.close()


@needs_redis
async def test_a_name_that_is_another_servers_by_now_is_followed(tmp_path: Path, monkeypatch) -> None:
    """As after a failover, where the old server still answers; a look-up that fails or hangs takes nobody down."""
    gate, says = threading.Event(), {}

    def look_up(host: str, port: int, *words: object, **more: object) -> object:
        if host != "far.example":
            return real(host, port, *words, **more)
        if more.get("flags"):
            raise socket.gaierror(-2, "no address")
        if says["at"] == "hangs":
            gate.wait()
        if says["at"] in {"fails", "hangs"}:
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return real("127.0.0.1", says["at"], type=socket.SOCK_STREAM)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(redis, "PING_S", 0.05)
    with Redis(tmp_path) as first, Redis(tmp_path) as second:
        shelf = redis.RedisShelf([("far.example", 1)], deadline_s=1.0)
        says["at"] = first.port
        shelf.start()
        try:
            await until(lambda: shelf.up, 5.0)
            assert await shelf.replace(["kvt1:{a}"], b"v", time.monotonic() + 1) == [True]
            for at in ("fails", "hangs"):
                says["at"] = at
                await asyncio.sleep(0.5)
                assert await shelf.has(["kvt1:{a}"], time.monotonic() + 1) == [True]
            says["at"] = second.port
            gate.set()
            await asyncio.sleep(0.5)
            assert await shelf.has(["kvt1:{a}"], time.monotonic() + 1) == [False]
            assert await shelf.replace(["kvt1:{b}"], b"v", time.monotonic() + 1) == [True]
            assert (first.names(), second.names()) == ([b"kvt1:{a}"], [b"kvt1:{b}"])
            assert shelf.counts["peer_down"] == 0
        finally:
            gate.set()
            await shelf.close()
