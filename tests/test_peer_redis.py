"""Redis and Valkey as the store that a fleet shares: daemons, a Cluster that loses a server, passwords, TLS, limits."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from engines import Engine, spec, tokens
from fleetkit import DEADLINE_MS, Host, free_ports, write_secrets
from fleetkit import until as waited
from kvtier import wire
from kvtier.config import load
from kvtier.demo.daemon import Daemon
from kvtier.depots import Redis as Settings
from kvtier.peer import redis
from kvtier.peer.depot import Depot
from kvtier.peer.redis import RedisShelf
from kvtier.peer.redis_server import Login
from kvtier.peer.resp import Line
from kvtier.peer.secrets import read
from kvtier.peer.shelf import GENERATION_TAGS, Want, item_name, marks
from kvtier.peer.terms import MAX_OPS
from kvtier.store import pushes, repairs
from kvtier.types import KvtierError
from peerkit import PATIENCE_S, SPEC, blank, fetched, given, given_soon, page, right, sums_of
from sharedkit import REDIS, Proxy, Redis, needs_redis
from storekit import storing, until

pytestmark = needs_redis
PATHS = [tokens(*range(100 * n, 100 * n + 5)) for n in range(1, 41)]
RNG = random.Random(0)
NEW = [tokens(*range(100 * n, 100 * n + 5)) for n in range(51, 61)]
PAGES = [list(range(100 * n, 100 * n + 5)) for n in range(1, 7)]


@asynccontextmanager
async def sharing(home: Path, shelf: RedisShelf, deadline_s: float = PATIENCE_S) -> AsyncIterator[Depot]:
    """A started tier."""
    secrets = home / "secrets"
    tier = Depot(shelf, read(secrets if secrets.exists() else write_secrets(secrets, ["uid:0"])), deadline_s=deadline_s)
    tier.start()
    try:
        yield tier
    finally:
        await tier.close()


def hosts(home: Path, server: Redis, names: str = "ab") -> Iterator[Host]:
    """Daemons that share a Redis."""
    secrets = write_secrets(home / "secrets", [f"uid:{os.getuid()}"])
    for name in names:
        (home / name).mkdir()
        flags = [
            "--peers-backend=redis", f"--peers-redis-servers=127.0.0.1:{server.port}", f"--peers-secrets={secrets}",
            f"--peers-deadline-ms={DEADLINE_MS}",
        ]  # fmt: skip
        yield Host(name, Daemon(home / name, host="64MiB", disk="0", flags=flags))


@contextmanager
def fleet(home: Path) -> Iterator[tuple[Redis, Host, Host]]:
    """A Redis and two daemons that found it."""
    with ExitStack() as stack:
        server = stack.enter_context(Redis(home))
        a, b = hosts(home, server)
        for host in (a, b):
            stack.callback(host.close)
            host.start()
            waited(lambda host=host: len(host.up()) == 1)
        yield server, a, b


@pytest.mark.slow
def test_daemons_that_share_a_redis_serve_each_others_pages(tmp_path: Path) -> None:
    """What one computes another serves bit exact; a purge is for all; kill -9 and SIGSTOP of the server are misses."""
    with fleet(tmp_path) as (server, a, b):
        for pages in PAGES:
            assert a.put(pages) == 5
        waited(a.settled)
        assert a.count("pages_pushed_peer") == 30
        assert [b.get(pages) for pages in PAGES] == [5] * 6
        assert b.count("pages_loaded_peer") == 30
        assert b.ask(wire.Status())["peers"][0]["name"] == f"redis 127.0.0.1:{server.port}"
        b.emptied()
        assert [b.get(pages) for pages in PAGES] == [0] * 6, "purged for everybody"
        assert b.put(PAGES[0]) == 5
        waited(b.settled)
        a.emptied()
        server.signal(signal.SIGSTOP)
        assert a.get(PAGES[0], wait_ms=60_000) == 0
        server.signal(signal.SIGCONT)
        waited(lambda: a.up() != set())
        server.kill()
        assert a.get(PAGES[1], wait_ms=60_000) == 0
        server.start()
        waited(lambda: b.up() != set())
        assert b.put(PAGES[2]) == 5
        waited(lambda: a.up() != set() and b.settled())
        assert a.get(PAGES[2]) == 5
        for host in (a, b):
            host.emptied()


async def test_a_purge_that_the_store_did_not_hear_of_outlives_the_daemon(tmp_path: Path) -> None:
    """The store hangs while a cache is purged, the daemon ends: the next one finds nothing of it, and purges once."""
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    shared = secrets.shared(SPEC, "uid:0", 0)
    with Redis(tmp_path) as server:

        @asynccontextmanager
        async def life() -> AsyncIterator[Depot]:
            async with storing(tmp_path / "disk") as store:
                tier = Depot(
                    RedisShelf([server.address], deadline_s=1.0), secrets, deadline_s=1.0, book=store.parts.disk
                )
                tier.start()
                try:
                    await until(tier.answers)
                    yield tier
                finally:
                    await tier.close()

        async with life() as tier:
            await given_soon(tier, shared, PATHS[0])
            assert await fetched(tier, shared, PATHS[0]) == 5
            server.signal(signal.SIGSTOP)
            await tier.forget(shared)
        server.signal(signal.SIGCONT)
        async with life() as tier:
            assert await tier.find(shared, PATHS[0], 0) == []
            await given_soon(tier, shared, PATHS[1])
        async with life() as tier:
            assert await fetched(tier, shared, PATHS[1]) == 5
            assert await tier.find(shared, PATHS[0], 0) == []


@contextmanager
def cluster(home: Path) -> Iterator[list[Redis]]:
    """Three servers that share the slots and go on when one is lost."""
    ports = [port for port in free_ports(24) if port < 50_000][:3]  # the port of their bus is 10,000 above
    flags = ["--cluster-enabled", "yes", "--cluster-require-full-coverage", "no", "--cluster-node-timeout", "1000"]
    with ExitStack() as stack:
        servers = [stack.enter_context(Redis(home, port, *flags)) for port in ports]
        for n, server in enumerate(servers):
            first, last = 16384 * n // 3, 16384 * (n + 1) // 3 - 1
            assert b"OK" in server.cli("CLUSTER", "ADDSLOTSRANGE", str(first), str(last))
            server.cli("CLUSTER", "MEET", "127.0.0.1", str(ports[0]))
        for server in servers:
            waited(lambda server=server: b"cluster_state:ok" in server.cli("CLUSTER", "INFO"))
            waited(lambda server=server: b"cluster_known_nodes:3" in server.cli("CLUSTER", "INFO"))
        yield servers


@pytest.mark.slow
async def test_a_cluster_that_loses_a_server_loses_its_share_only(tmp_path: Path) -> None:
    """Three servers: pages are on all of them; one killed costs what was on it, and serves again when it is back."""
    with cluster(tmp_path) as servers:
        shelf = RedisShelf([servers[0].address], deadline_s=1.0)
        async with sharing(tmp_path, shelf, 1.0) as tier:
            await until(lambda: len(shelf.status()) == 3 and all(row["up"] for row in shelf.status()))
            shared = tier.shared(SPEC, "uid:0", 0)
            for path in PATHS:
                assert await given(tier, shared, path) == 5
            assert all(len(server.names()) > 0 for server in servers)
            assert [await fetched(tier, shared, path) for path in PATHS] == [5] * len(PATHS)
            lost = servers[0]
            expected = [await leading(tier, path, lost) for path in PATHS]
            lost.kill()
            await until(lambda: sum(row["up"] for row in shelf.status()) == 2)
            left = [await fetched(tier, shared, path) for path in PATHS]
            assert left == expected, "what was on it, and nothing else"
            assert 0 < sum(left) < 5 * len(PATHS)
            before = sum(len(server.names()) for server in servers if server is not lost)
            for path in NEW:
                with contextlib.suppress(OSError, AssertionError):
                    await given(tier, shared, path)
            assert sum(len(server.names()) for server in servers if server is not lost) > before, "others take theirs"
            assert tier.counts["peer_checksum"] + tier.counts["peer_mismatch"] + tier.counts["peer_torn"] == 0
            lost.start()
            await until(lambda: all(row["up"] for row in shelf.status()))
            for path in PATHS:
                await given_soon(tier, shared, path)
            assert [await fetched(tier, shared, path) for path in PATHS] == [5] * len(PATHS)


async def leading(tier: Depot, path: bytes, lost: Redis) -> int:
    """Pages of a path up to the first one that a server of a Cluster has."""
    shared = tier.shared(SPEC, "uid:0", 0)
    generation = await tier.generations.of(shared, time.monotonic() + PATIENCE_S)
    mine = lost.names()
    heads = [item_name(shared, generation, mark, 0).encode() in mine for mark in marks(shared, path)]
    return heads.index(True) if True in heads else len(heads)


@pytest.mark.slow
async def test_slots_that_moved_are_found_where_they_are_now(tmp_path: Path) -> None:
    """A slot that an operator moved is refused by its old owner; the map is read anew, and pages go to the new one."""
    with cluster(tmp_path) as servers:
        shelf = RedisShelf([servers[0].address], deadline_s=PATIENCE_S)
        async with sharing(tmp_path, shelf) as tier:
            await until(lambda: len(shelf.status()) == 3 and all(row["up"] for row in shelf.status()))
            shared = tier.shared(SPEC, "uid:0", 0)
            generation = await tier.generations.of(shared, time.monotonic() + PATIENCE_S)
            mark = next(marks(shared, PATHS[0]))
            tag = item_name(shared, generation, mark, 0).partition("{")[2].partition("}")[0]
            slot = int(servers[0].cli("CLUSTER", "KEYSLOT", tag)[1:])
            before = next(n for n in range(3) if slot < 16384 * (n + 1) // 3)
            after = servers[(before + 1) % 3].cli("CLUSTER", "MYID").split(b"\r\n")[1]
            for server in (servers[(before + 1) % 3], servers[before], servers[(before + 2) % 3]):
                assert b"OK" in server.cli("CLUSTER", "SETSLOT", str(slot), "NODE", after)
            with pytest.raises((OSError, AssertionError)):
                await given(tier, shared, PATHS[0])
            await given_soon(tier, shared, PATHS[0])
            assert await fetched(tier, shared, PATHS[0]) == 5


async def test_a_redis_that_is_full_refuses_and_what_was_there_is_still_served(tmp_path: Path) -> None:
    """At maxmemory without eviction a push fails by name, and reads go on."""
    with Redis(tmp_path) as server:
        async with sharing(tmp_path, RedisShelf([server.address], deadline_s=PATIENCE_S)) as tier:
            await until(tier.answers)
            shared = tier.shared(SPEC, "uid:0", 0)
            assert await given(tier, shared, PATHS[0]) == 5
            server.cli("CONFIG", "SET", "maxmemory-policy", "noeviction")
            server.cli("CONFIG", "SET", "maxmemory", "1")
            with pytest.raises(OSError, match="did not take"):
                await given(tier, shared, PATHS[1])
            assert tier.counts["peer_refused"] > 0
            assert await fetched(tier, shared, PATHS[0]) == 5
            assert tier.answers()
            assert await tier.offer("redis", shared, PATHS[2], ()) is None, "it is given nothing for a while"


async def test_what_is_refused_costs_itself_and_not_what_was_sent_with_it(tmp_path: Path) -> None:
    """As where one server of a Cluster is full: the push fails, and what the others took with it is served."""
    keyed = spec(key_bytes=16)
    names = [bytes([n]) * 16 for n in range(3)]
    keys = b"".join(names)
    with Redis(tmp_path) as server:
        async with sharing(tmp_path, RedisShelf([server.address], deadline_s=PATIENCE_S)) as tier:
            await until(tier.answers)
            shared = tier.shared(keyed, "uid:0", 0)
            sink = await tier.offer("redis", shared, keys, ())
            generation = await tier.generations.of(shared, tier.until())
            items = [item_name(shared, generation, mark, 0) for mark in marks(shared, keys)]
            allowed = [f"%W~{name}*" for name in (items[0], items[2])]
            assert server.cli("ACL", "SETUSER", "default", "resetkeys", "%R~*", *allowed).startswith(b"+OK")
            places = [page(keys, at, cache=keyed) for at in range(3)]
            with pytest.raises(OSError, match="did not take"):
                await sink.send(places, sums_of(places))
            assert set(await tier.holders(shared, 0, names)) == {names[0], names[2]}
            source = await tier.source("redis", shared, 0, keys)
            got = blank(range(3), cache=keyed)
            assert [value is not None for value in await source.fetch(got)] == [True, False, True]
            assert all(right(got[at], keys, keyed) for at in (0, 2))


@pytest.mark.parametrize("row", [(-70_000, 16_383, 7000), (5, 4, 7000), (0, 16_384, 7000), (0, 5, 99_999)])
async def test_a_map_of_slots_that_there_are_not_is_none(tmp_path: Path, row: tuple[int, int, int]) -> None:
    """Who says so is asked nothing, instead of a list being made as long as it says."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while said := await reader.read(1 << 16):
                first, last, port = row
                slots = b"*1\r\n*3\r\n:%d\r\n:%d\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % (first, last, port)
                writer.write(slots if b"SLOTS" in said else b"+PONG\r\n")

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    shelf = RedisShelf([address], deadline_s=PATIENCE_S)
    async with sharing(tmp_path, shelf):
        await until(lambda: shelf.counts["peer_failures"])
        assert shelf._slots == []
        assert list(shelf._servers) == [address]
    server.close()


def flipped(data: bytes) -> bytes:
    """One bit, somewhere."""
    at = RNG.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << RNG.randrange(8)]) + data[at + 1 :]


SPOILS = {
    "flips": flipped,
    "noise": lambda data: RNG.randbytes(len(data)),
    "half": lambda data: data[: len(data) // 2],
    "twice": lambda data: data + data,
    "silence": lambda _: b"",
    "end": lambda _: None,
    "huge": lambda _: b"$99999999999\r\n",
    "other length": lambda _: b"$3\r\nabc\r\n",
    "numbers": lambda _: b":1\r\n" * 9,
    "nothing": lambda _: b"$-1\r\n" * 9,
    "lists": lambda _: b"*1\r\n" * 5000,
    "long list": lambda _: b"*999999999\r\n",
    "no": lambda _: b"-MOVED 1 127.0.0.1:1\r\n" * 9,
    "line": lambda _: b"+" + b"x" * 9000,
}


@pytest.mark.slow
@pytest.mark.parametrize("how", SPOILS)
async def test_whatever_comes_back_on_the_wire_nothing_wrong_is_served_and_it_goes_on(tmp_path: Path, how: str) -> None:
    """Replies that are spoilt on their way are misses by the deadline; once they are right again, all pages come."""
    with Redis(tmp_path) as server, Proxy(server.port) as proxy:
        async with sharing(tmp_path, RedisShelf([proxy.address], deadline_s=0.3), 0.3) as tier:
            await until(tier.answers)
            shared = tier.shared(SPEC, "uid:0", 0)
            for path in PATHS[:4]:
                await given_soon(tier, shared, path)
            sources = [source for path in PATHS[:4] for source in await tier.find(shared, path, 0)]
            proxy.spoil = SPOILS[how]
            for path, source in zip(PATHS, sources, strict=False):
                places = blank(range(5))
                sums = await source.fetch(places)
                assert all(right(place, path) for place, value in zip(places, sums, strict=True) if value is not None)
            for path in PATHS[:6]:
                assert await fetched(tier, shared, path) in range(6), "whatever came is right"
            proxy.spoil = None
            await until(tier.answers)
            for path in PATHS[:4]:
                await given_soon(tier, shared, path)
                assert await fetched(tier, shared, path) == 5


async def test_pages_are_forgotten_after_their_time(tmp_path: Path) -> None:
    """With ttl_s every value but the generation expires."""
    with Redis(tmp_path) as server:
        async with sharing(tmp_path, RedisShelf([server.address], ttl_s=1000, deadline_s=PATIENCE_S)) as tier:
            await until(tier.answers)
            await given(tier, tier.shared(SPEC, "uid:0", 0), PATHS[0])
            left = {key: int(server.cli("TTL", key)[1:]) for key in server.names()}
            assert len(left) == 10 + 3
            assert all(0 < ttl <= 1000 for key, ttl in left.items() if b"{generation" not in key)
            assert [ttl for key, ttl in left.items() if b"{generation" in key] == [-1] * 3


async def test_a_server_that_repeats_the_password_does_not_get_it_shown(tmp_path: Path, caplog) -> None:
    """One that does not know AUTH says what it was told: neither log nor status have it."""
    caplog.set_level(logging.DEBUG)
    with Redis(tmp_path, 0, "--rename-command", "AUTH", "OTHER") as server:
        shelf = RedisShelf([server.address], Login(b"some-user", b"s3cret-word"), deadline_s=1.0)
        async with sharing(tmp_path, shelf):
            await until(lambda: "AUTH" in shelf.status()[0]["why"])
            told = [caplog.text, repr(shelf.status())]
    assert not any(word in text for word in ("s3cret-word", "some-user") for text in told)


async def test_a_password_is_asked_for_and_never_shown(tmp_path: Path, caplog) -> None:
    """With the right one pages go; with none or a wrong one nothing does, and no log or status has it."""
    caplog.set_level(logging.DEBUG)
    with Redis(tmp_path, 0, "--requirepass", "s3cret-word") as server:
        for login, works in ((Login(password=b"s3cret-word"), True), (Login(password=b"wr0ng-word"), False),
                             (Login(), False)):  # fmt: skip
            async with sharing(tmp_path, RedisShelf([server.address], login, deadline_s=PATIENCE_S)) as tier:
                await until(lambda tier=tier: tier.answers() or "not asked" not in tier.status()[0]["why"])
                assert tier.answers() == works
                if works:
                    assert await given(tier, tier.shared(SPEC, "uid:0", 0), PATHS[0]) == 5
                shown = caplog.text + repr(tier.status()) + repr(login)
                assert not any(word in shown for word in ("s3cret-word", "wr0ng-word"))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here to make certificates with")
async def test_tls_goes_only_to_servers_that_the_authority_vouches_for(tmp_path: Path) -> None:
    """Pages go over TLS, on connections that are known to be open; who does not know the authority does not talk."""
    if b"libssl" not in subprocess.run(["ldd", REDIS], capture_output=True).stdout:
        pytest.skip("this redis-server is built without TLS")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    (port,) = free_ports(1)
    flags = ["--port", "0", "--tls-port", str(port), "--tls-cert-file", str(cert), "--tls-key-file", str(key),
             "--tls-ca-cert-file", str(cert), "--tls-auth-clients", "no"]  # fmt: skip
    with Redis(tmp_path, port, *flags) as server:
        for settings, works in ((Settings(f"127.0.0.1:{port}", tls=True, ca=str(cert)), True),
                                (Settings(f"127.0.0.1:{port}", tls=True), False)):  # fmt: skip
            settings.check()
            async with sharing(tmp_path, settings.shelf(PATIENCE_S, Counter())) as tier:
                await until(lambda tier=tier: tier.answers() or "not asked" not in tier.status()[0]["why"])
                assert tier.answers() == works
                if works:
                    shared = tier.shared(SPEC, "uid:0", 0)
                    assert await given(tier, shared, PATHS[0]) == 5
                    assert await fetched(tier, shared, PATHS[0]) == 5
                    idle = tier.shelf._servers["127.0.0.1", port]._idle.pop()
                    assert idle.quiet()
                    server.kill()
                    await until(lambda idle=idle: not idle.quiet())  # it hung up: that is seen before the next use
                    idle.close()
                    server.start()
        assert server.port == port


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"servers": "10.0.0.1:6379"}, "peers.redis.credentials"),
        ({"servers": ""}, "peers.redis.servers"),
        ({"servers": "127.0.0.1:99999"}, "peers.redis.servers"),
        ({"servers": "127.0.0.1:6379", "ttl_s": "-1"}, "peers.redis.ttl_s"),
        ({"servers": "127.0.0.1:6379", "ca": "x"}, "peers.redis.tls"),
    ],
)
def test_settings_that_cannot_be_served_are_refused_by_name(flags: dict[str, str], named: str) -> None:
    """Off loopback without a password, no server, no port, certificates without TLS."""
    values = {"peers.backend": "redis", "peers.secrets": "s"} | {f"peers.redis.{k}": v for k, v in flags.items()}
    with pytest.raises(KvtierError) as refused:
        load(None, {}, values)
    assert refused.value.field == named


def test_a_file_of_credentials_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """Mode 0644 is refused, and so is a file that is no user and password; neither says what is in it."""
    file = tmp_path / "credentials"
    for text, mode in (("s3cret", 0o644), ("a b s3cret", 0o600), ("", 0o600)):
        file.write_text(text)
        file.chmod(mode)
        with pytest.raises(KvtierError) as refused:
            Settings("127.0.0.1:1", credentials=str(file)).shelf(1.0, Counter())
        assert "s3cret" not in str(refused.value)


async def test_who_waits_while_others_move_bytes_has_its_deadline_after_that(tmp_path: Path, monkeypatch) -> None:
    """Eight transfers take longer than a deadline: those behind them bring their pages too, and no server is blamed."""
    number, real = itertools.count(), Line.read

    def slow(line: Line, wants: Sequence[Want]) -> list[bool | None]:
        if next(number) < MAX_OPS:
            time.sleep(0.6)
            line.until += 0.6
        return real(line, wants)

    with Redis(tmp_path) as server:
        async with sharing(tmp_path, RedisShelf([server.address], deadline_s=0.3), 0.3) as tier:
            await until(tier.answers)
            shared = tier.shared(SPEC, "uid:0", 0)
            for path in PATHS[:12]:
                await given_soon(tier, shared, path)
            monkeypatch.setattr(Line, "read", slow)
            assert await asyncio.gather(*(fetched(tier, shared, path) for path in PATHS[:12])) == [5] * 12
            assert (tier.counts["peer_busy"], tier.counts["peer_down"]) == (0, 0)


async def test_a_thread_that_has_its_turn_late_has_its_deadline_after_that(tmp_path: Path) -> None:
    """This host holds the threads up for longer than a deadline: there is an answer, and the server is not blamed."""
    with Redis(tmp_path) as server:
        async with sharing(tmp_path, RedisShelf([server.address], deadline_s=0.3), 0.3) as tier:
            await until(tier.answers)
            one = tier.shelf._servers[server.address]
            held = [one._pool.submit(time.sleep, 0.5) for _ in range(one._pool._max_workers)]
            assert await tier.shelf.has(["kvt1:x:y:{z}:0"], time.monotonic() + 0.3) == [False]
            assert any(each.done() for each in held)
            assert tier.counts["peer_down"] == 0


async def test_a_server_that_was_given_little_time_is_not_blamed(tmp_path: Path) -> None:
    """What came before it took the deadline: that is a miss, and no reason to ask the server nothing."""
    with Redis(tmp_path) as server, Proxy(server.port) as proxy:
        proxy.spoil = lambda said: time.sleep(0.1) or said
        async with sharing(tmp_path, RedisShelf([proxy.address], deadline_s=0.4), 0.4) as tier:
            await until(tier.answers)
            names = ["kvt1:x:y:{z}:0"]
            assert await tier.shelf.has(names, time.monotonic() + 0.05) == [None]
            assert tier.counts["peer_down"] == 0
            assert await tier.shelf.has(names, time.monotonic() + 0.4) == [False]


async def test_who_waits_in_vain_for_a_turn_at_a_shared_store_is_a_miss(tmp_path: Path) -> None:
    """All that may be under way hangs: others get nothing after ten deadlines; afterwards all is as before."""
    with Redis(tmp_path) as server:
        async with sharing(tmp_path, RedisShelf([server.address], deadline_s=0.1), 0.1) as tier:
            await until(tier.answers)
            shared = tier.shared(SPEC, "uid:0", 0)
            await given_soon(tier, shared, PATHS[0])
            held = [source for _ in range(MAX_OPS) for source in await tier.find(shared, PATHS[0], 0)]
            assert len(held) == MAX_OPS
            assert await asyncio.gather(tier.offer("redis", shared, PATHS[0], ()), tier.find(shared, PATHS[0], 0)) == [
                None,
                [],
            ]
            assert tier.counts["peer_busy"] == 2
            assert None not in await held[0].fetch(blank(range(2)))
            for source in held * 2:
                source.close()
            assert [await fetched(tier, shared, PATHS[0]) for _ in range(MAX_OPS + 1)] == [5] * (MAX_OPS + 1)
            assert tier._room._value == MAX_OPS


async def test_operators_are_told_that_a_store_is_full_and_may_not_evict(tmp_path: Path, caplog) -> None:
    """It answers, so it is up; status and log say that it refuses, and why, until it takes what it is given again."""
    with Redis(tmp_path) as server:
        async with sharing(tmp_path, RedisShelf([server.address], deadline_s=0.5), 0.5) as tier:
            await until(tier.answers)
            shared = tier.shared(SPEC, "uid:0", 0)
            sink = await tier.offer("redis", shared, PATHS[0], ())
            server.cli("CONFIG", "SET", "maxmemory", "1")
            places = [page(PATHS[0], at) for at in range(5)]
            with pytest.raises(OSError, match="did not take"):
                await sink.send(places, sums_of(places))
            assert [(row["up"], row["why"]) for row in tier.status()] == [(True, "refuses what it is given: OOM")]
            await until(lambda: "refuses what it is given: OOM" in caplog.text)
            server.cli("CONFIG", "SET", "maxmemory", "0")
            assert await sink.send(places, sums_of(places)) == 5
            assert tier.status()[0]["why"] == ""


@pytest.mark.parametrize("keyed", [False, True])
async def test_what_was_given_up_while_a_store_was_away_gets_there_once_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, keyed: bool
) -> None:
    """It is away for longer than a push is tried: what host has of all that was computed is offered then, once."""
    for module, name, value in ((pushes, "RETRY_S", 0.01), (repairs, "LOOK_S", 0.05), (redis, "PING_S", 0.05)):
        monkeypatch.setattr(module, name, value)
    cache, keys = spec(key_bytes=16 if keyed else 0), tokens(*range(1, 21))
    with Redis(tmp_path) as server:
        secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
        async with storing(None) as near:
            near.join_fleet(Depot(RedisShelf([server.address]), secrets))
            near.parts.peers.start()
            tier, engine = near.parts.peers.tier, Engine(near)
            await engine.open(cache)
            await until(tier.answers)
            server.kill()
            await until(lambda: not tier.answers())
            if keyed:
                await engine.put_keys(keys)
            else:
                assert await engine.put(keys) == 20
            await until(lambda: near.parts.counts["peer_push_dropped_home"] and not near.parts.peers.busy)
            assert tier.moves() is None
            server.start()
            items = len(keys) // cache.stride
            await until(lambda: len(server.names()) == 2 * items + len(GENERATION_TAGS))
            await until(lambda: not (near.parts.peers.busy or near.parts.peers.repairs.walking))
            assert tier.moves() is None
            await near.parts.peers.close()
            near.parts.peers = None
            engine.leave()
