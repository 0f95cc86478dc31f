"""Who may do what: modes, credentials from the kernel, scopes, admin verbs, names that are no paths."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import tempfile
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from engineproc import SPEC, content, path_keys
from engines import Engine, idle, spec, tokens
from faultkit import eventually
from kvtier import wire
from kvtier.client import Client
from kvtier.demo.daemon import COMMAND, Daemon
from kvtier.types import Code, KvtierError
from storekit import drop_host, memfd, quiet, rows, storing

KEYED = spec(model="keyed", key_bytes=16)
KEY = b"k" * 16
PATH = tokens(1, 2, 3)


class Victim:
    """An engine of one scope, with one of everything that a verb can name."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def settle(self, fd: int) -> None:
        """Pages and keys that are cached, a handle, a lease, a reservation, a region."""
        engine = self.engine
        self.keyed = (await engine.open(KEYED)).cache
        names = await engine.call(wire.ReserveKeys(self.keyed, 0, KEY))
        engine.write(KEY, names)
        assert (await engine.call(wire.Commit(names.reservation, 0, 1))).published == 1
        self.cache = (await engine.open(spec())).cache
        assert await engine.put(PATH) == 3
        self.handle = (await engine.match(PATH)).handle
        self.lease = (await engine.call(wire.Acquire(self.handle))).lease
        self.reserved = await engine.reserve(tokens(7, 8))
        self.reservation = self.reserved.reservation
        self.region = engine.store.register(wire.Register("victim", "rows", 0, 8192, 4), fd, engine.process.peer).region


Tries = Callable[[Victim, "Attacker"], list[wire.Message]]


class Attacker(typing.NamedTuple):
    """An engine of another scope: what it may well have of its own, and the victim's names for everything."""

    engine: Engine
    cache: int
    keyed: int
    handle: int
    region: int


TRIES: dict[type[wire.Message], Tries] = {
    wire.Reset: lambda v, _: [wire.Reset(v.cache)],
    wire.Unregister: lambda v, _: [wire.Unregister(v.region)],
    wire.Match: lambda v, a: [wire.Match(v.cache, keys=PATH), wire.Match(0, v.handle), wire.Match(a.cache, keys=PATH)],
    wire.Acquire: lambda v, a: [wire.Acquire(v.handle), wire.Acquire(a.handle)],
    wire.Release: lambda v, _: [wire.Release(v.lease)],
    wire.Forget: lambda v, _: [wire.Forget(v.handle)],
    wire.Prefetch: lambda v, _: [wire.Prefetch(v.handle)],
    wire.Hint: lambda v, _: [wire.Hint(v.handle, "dead"), wire.Hint(v.handle, "continues")],
    wire.Push: lambda v, _: [wire.Push(v.handle, "b")],
    wire.Order: lambda v, a: [wire.Order((v.handle, a.handle), (0, 0))],
    wire.Agree: lambda v, _: [wire.Agree(v.handle, (wire.Elsewhere("b", spec()),))],
    wire.Reserve: lambda v, _: [wire.Reserve(v.handle, 0, 3)],
    wire.Commit: lambda v, _: [wire.Commit(v.reservation, 0, 2)],
    wire.Abort: lambda v, _: [wire.Abort(v.reservation)],
    wire.Exists: lambda v, a: [wire.Exists(v.keyed, 0, KEY), wire.Exists(a.keyed, 0, KEY)],
    wire.AcquireKeys: lambda v, a: [wire.AcquireKeys(v.keyed, 0, KEY), wire.AcquireKeys(a.keyed, 0, KEY)],
    wire.ReserveKeys: lambda v, _: [wire.ReserveKeys(v.keyed, 0, KEY)],
    wire.Load: lambda v, a: [
        wire.Load(a.region, 0, rows(0, 1, 2), lease=v.lease),
        wire.Load(a.region, 0, rows(0), cache=v.keyed, keys=KEY),
        wire.Load(a.region, 0, rows(0), cache=a.keyed, keys=KEY),
        wire.Load(v.region, 0, rows(0), cache=a.keyed, keys=KEY),
    ],
    wire.Store: lambda v, a: [
        wire.Store(a.region, 0, rows(0, 1), reservation=v.reservation),
        wire.Store(a.region, 0, rows(0), cache=v.keyed, keys=b"n" * 16),
        wire.Store(v.region, 0, rows(0), cache=a.keyed, keys=b"n" * 16),
    ],
    wire.Flush: lambda v, _: [wire.Flush(v.cache, 1000)],
    wire.Stat: lambda _v, _a: [wire.Stat()],
}
"""For each verb that engines may ask: how one of another scope would try to reach, hold, learn or spoil something."""

NAMELESS = {
    wire.Hello: "its scope is the kernel's word for the peer: test_a_process_of_another_user",
    wire.Register: "the same; its region belongs to the scope that registered it",
    wire.Open: "makes the cache of the scope that asks: the attacker opens the very spec of the victim's",
    wire.Bye: "names nothing but its own connection",
    wire.Ping: "names nothing",
    wire.MapDevice: "its scope as with Hello; the memory is one's: test_another_scope_has_no_part_of_the_device",
    wire.UseDevice: "names nothing; its token can be read only in the memory that its scope maps",
    wire.RegisterKv: "as Register: the engine's own memory, of its own instance",
    wire.Cancel: "names requests of its own connection",
    wire.Unmapped: "sessions of its own process: test_unmapped_of_a_live_own_or_foreign_session_is_refused",
    wire.Durable: "an event, refused as a request",
}
"""Verbs with which nothing of others can be named, and why."""


def test_every_verb_is_classified() -> None:
    """A new verb is either for operators, or tried by an attacker below, or said here to name nothing of others."""
    assert not TRIES.keys() & NAMELESS.keys()
    assert TRIES.keys() | NAMELESS.keys() | wire.ADMIN == wire.VERBS.keys()


def empty(reply: wire.Message) -> bool:
    """Whether a reply gives nothing of what is cached: no page, no key, no lease, no name."""
    match reply:
        case wire.Matched(pages=0, pending=0) | wire.Acquired(lease=0, pages=0) | wire.Ok():
            return True
        case wire.Existence(states=states):
            return not any(states)
        case wire.Loaded(done=done) | wire.Stored(done=done):
            return not any(done)
        case wire.Acquired(items=items):
            return all((np.frombuffer(each.offsets, "<i8") == -1).all() for each in items)
        case wire.Info(data=data):
            return "victim" not in repr(data) and "uid:1" not in repr(data)
    return False


@pytest.mark.parametrize("kind", TRIES, ids=lambda kind: kind.__name__)
async def test_no_verb_reaches_another_scopes_pages(tmp_path: Path, kind: type[wire.Message]) -> None:
    """With the victim's own numbers and its very spec and keys: a refusal or nothing, and the victim's is as it was."""
    fd, memory = memfd(4, 8192, sealed=True)
    own, mine = memfd(4, 8192, sealed=True)
    async with storing(tmp_path) as store:
        victim, other = Victim(Engine(store, "victim", pid=1, uid=1)), Engine(store, "other", pid=2, uid=2)
        await victim.settle(fd)
        keyed = (await other.open(KEYED)).cache
        cache = (await other.open(spec())).cache
        handle = (await other.match(PATH)).handle
        region = store.register(wire.Register("other", "rows", 0, 8192, 4), own, other.process.peer).region
        memory[:], mine[:] = 0x55, 0xAA
        for message in TRIES[kind](victim, Attacker(other, cache, keyed, handle, region)):
            try:
                reply = await other.call(message)
            except KvtierError as exc:
                assert exc.code in {Code.UNKNOWN, Code.FORBIDDEN, Code.BAD_REQUEST}, message
                assert "victim" not in exc.message
            else:
                assert empty(reply), (message, reply)
        assert (mine == 0xAA).all(), "something of another scope came into the attacker's memory"
        assert (memory == 0x55).all(), "the attacker wrote into the victim's memory"
        await unharmed(victim)
        victim.engine.leave()
        other.leave()
        await quiet(store)
        store.parts.prune()
        assert idle(store) == []
    os.close(fd)
    os.close(own)


async def unharmed(victim: Victim) -> None:
    """It still has its lease, its reservation and its region, and right bytes, also from disk."""
    engine = victim.engine
    assert victim.engine.process.instance.leases.keys() >= {victim.lease}
    engine.write(tokens(7, 8), victim.reserved)
    assert (await engine.call(wire.Commit(victim.reservation, 0, 2))).published == 2
    await engine.call(wire.Release(victim.lease))
    await quiet(engine.store)
    drop_host(engine.store)
    assert await engine.get(PATH) == 3
    assert await engine.get(tokens(7, 8)) == 2
    assert (await engine.call(wire.Exists(victim.keyed, 0, KEY))).states[0]
    await engine.call(wire.Unregister(victim.region))


async def test_the_attack_would_work_within_the_scope(tmp_path: Path) -> None:
    """The same tries by a process of the victim's own uid do reach pages: the refusals above are the scope's doing."""
    async with storing(tmp_path) as store:
        fd, _ = memfd(4, 8192, sealed=True)
        victim, other = Victim(Engine(store, "victim", pid=1, uid=1)), Engine(store, "other", pid=2, uid=1)
        await victim.settle(fd)
        await other.open(KEYED)
        await other.open(spec())
        assert await other.get(PATH) == 3
        assert (await other.call(wire.Exists(victim.keyed, 0, KEY))).states[0]
        victim.engine.leave()
        other.leave()
        os.close(fd)


# -- sockets of a real daemon ---------------------------------------------------------------------------------------


def dummy(kind: Any) -> Any:
    """Some value of a type."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        made = {field.name: dummy(field.type) for field in msgspec.structs.fields(kind) if field.required}
        return kind(**made)
    origin = typing.get_origin(kind) or kind
    if origin is typing.Annotated:
        return dummy(typing.get_args(kind)[0])
    if isinstance(origin, types.UnionType):
        return dummy(typing.get_args(kind)[0])
    return {int: 1, str: "x", bytes: b"", tuple: (), dict: {}, float: 1.0, bool: False}[origin]


class Raw:
    """A connection that says exactly what it is told."""

    def __init__(self, path: Path, *first: wire.Message) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(20.0)
        self.sock.connect(str(path))
        self.number = 0
        for message in first:
            assert self.ask(message) == ""

    def ask(self, message: wire.Message) -> str:
        """The code of the refusal; empty for any other reply."""
        self.number += 1
        self.sock.sendall(wire.request_frame(message, self.number))
        head = wire.parse_header(self.read(wire.HEADER.size))
        body = self.read(head.length)
        return msgspec.msgpack.decode(body)["code"] if head.verb == wire.ERROR_VERB else ""

    def read(self, size: int) -> bytes:
        """Exactly so many bytes."""
        out = b""
        while len(out) < size:
            got = self.sock.recv(size - len(out))
            assert got, "closed"
            out += got
        return out


BOTH = {wire.Ping, wire.Bye, wire.Cancel, wire.Flush}
"""Of the engines' verbs, those that operators may ask too: they read and change nothing of a cache."""


def test_no_admin_verb_is_served_on_the_engine_socket_nor_the_reverse(daemon: Daemon) -> None:
    """Every verb there is, on the socket where it does not belong: forbidden, and the connection goes on."""
    raw = Raw(daemon.socket, wire.Hello(wire.VERSION, "engine"))
    with contextlib.closing(raw.sock):
        for kind in sorted(wire.ADMIN, key=wire.VERBS.__getitem__):
            assert raw.ask(dummy(kind)) == "forbidden", kind
        assert raw.ask(wire.Ping()) == ""
    admin = Raw(daemon.socket.with_name("admin.sock"))
    with contextlib.closing(admin.sock):
        for kind in wire.VERBS.keys() - wire.ADMIN - BOTH:
            assert admin.ask(dummy(kind)) == "forbidden", kind
        assert admin.ask(wire.Ping()) == ""


@pytest.fixture
def open_home() -> Iterator[Path]:
    """A folder that users other than this one can look into."""
    home = Path(tempfile.mkdtemp())
    home.chmod(0o755)
    yield home
    shutil.rmtree(home)


@pytest.mark.slow
def test_no_file_of_the_daemon_is_for_others_whatever_the_umask(open_home: Path) -> None:
    """With umask 0: all files are its user's alone, but for the engine socket, which is its group's too."""
    command = ("/bin/sh", "-c", 'umask 0; exec "$@"', "sh", *COMMAND)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [f"--http-port={port}"]
    with Daemon(open_home, host="16MiB", disk="64MiB", command=command, flags=flags) as daemon:
        with Client(daemon.socket, instance="engine", timeout_s=10.0) as client:
            with client.open(SPEC).match(path_keys([1, 2])).reserve(0, 2) as held:
                assert held.commit() == 2
            assert client.open(SPEC).flush(20.0)
        assert daemon.stop() == 0
        daemon.start()
        eventually((open_home / "dashboard.url").exists)
        seen = {path.relative_to(open_home): path.lstat().st_mode for path in open_home.rglob("*")}
        del seen[Path("kvtierd.log")]  # this test's own
        assert stat.S_IMODE(seen.pop(Path("kvtierd.sock"))) == 0o660
        assert {str(name): oct(mode) for name, mode in seen.items() if mode & 0o077} == {}
        assert {"admin.sock", "dashboard.url", "disk", "extents", "data.mdb"} <= {name.name for name in seen}
        for link in Path(f"/proc/{daemon.pid}/fd").iterdir():
            if "memfd:" in str(link.readlink()):
                assert stat.S_IMODE(link.stat().st_mode) == 0o600


def as_user(uid: int, gid: int, work: Callable[[], str]) -> str:
    """What the work says in a child of another user."""
    here, there = socket.socketpair()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
            there.sendall(work().encode())
        except BaseException as exc:  # noqa: BLE001 - said to the parent
            there.sendall(f"{type(exc).__name__}: {exc}".encode())
        finally:
            os._exit(0)
    there.close()
    with here:
        said = b"".join(iter(lambda: here.recv(4096), b""))
    os.waitpid(child, 0)
    return said.decode()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be others")
def test_a_process_of_another_user(open_home: Path) -> None:
    """Out of the group: no socket at all. In it: a scope of its own, whatever it says, and never the operator's."""
    with Daemon(open_home, host="16MiB", disk="64MiB") as daemon:
        with Client(daemon.socket, instance="engine", timeout_s=10.0, scope="shared") as client:
            cache, keys = client.open(SPEC), path_keys([1, 2])
            with cache.match(keys).reserve(0, 2) as held:
                for page in range(2):
                    held.write(0, page, content(keys[: (page + 1) * SPEC.stride]).reshape(-1))
                assert held.commit() == 2
            group = daemon.socket.stat().st_gid

            def dial(path: Path) -> str:
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.connect(str(path))
                return "connected"

            def read() -> str:
                """Join the same instance and the same label, and read the same prompt."""
                with Client(daemon.socket, instance="engine", timeout_s=10.0, scope="shared") as mine:
                    path = mine.open(SPEC).match(keys)
                    with path.acquire() as lease:
                        return f"{path.pages} {lease.pages} {mine.link.joined.welcome.scope}"

            assert as_user(12345, 12345, lambda: dial(daemon.socket)).startswith("PermissionError")
            assert as_user(12345, group, lambda: dial(daemon.socket)) == "connected"
            for path in (daemon.socket.with_name("admin.sock"), Path(f"{daemon.socket}.lock")):
                assert as_user(12345, group, lambda path=path: dial(path)).startswith("PermissionError")
            assert as_user(12345, group, read) == "0 0 uid:12345:shared"
            assert as_user(os.getuid(), group, read).startswith("2 2 "), "the same user does reach it"
        assert daemon.stop() == 0


HOSTILE = ["../../escaped", "/etc/escaped", "a/b", "..", "\x7f", "x" * 129, "", "%2e%2e%2f"]


@pytest.mark.slow
def test_names_that_engines_give_are_never_paths(tmp_path: Path) -> None:
    """Instances, scopes, regions, models and requests named like paths make no file anywhere, or are refused."""
    (tmp_path / "home").mkdir()
    with Daemon(tmp_path / "home", host="16MiB", disk="64MiB") as daemon:
        before = set(tmp_path.rglob("*"))
        for name in HOSTILE:
            with (
                contextlib.suppress(KvtierError),
                Client(daemon.socket, instance=name or "e", scope=name, timeout_s=10.0) as client,
            ):
                cache = client.open(spec(model=name or "m", revision=name, adapter=name.encode(), salt=name.encode()))
                with cache.match(PATH, request=name, session=name).reserve(0, 3) as held:
                    held.commit()
                cache.flush(20.0)
                fd, _ = memfd(4, 8192, sealed=True)
                try:
                    with contextlib.suppress(KvtierError):
                        client.register(name, fd, 0, 8192, 4)
                finally:
                    os.close(fd)
        assert set(tmp_path.rglob("*")) - before <= {daemon.home / "disk" / "warmth"}
        assert daemon.broken_invariants() == []
        assert daemon.stop() == 0


def test_a_length_that_nobody_would_send_costs_no_memory(tmp_path: Path) -> None:
    """Headers that announce the most there is, on many connections: refused or bounded, and others are served."""
    flags = ["--host-prefault=false"]  # else the arena's own pages arrive meanwhile
    with Daemon(tmp_path, host="128MiB", disk="0", flags=flags) as daemon:
        _announce_much(daemon)
        assert daemon.stop() == 0


def _announce_much(daemon: Daemon) -> None:
    process = psutil.Process(daemon.pid)
    held = process.memory_full_info().uss
    socks = []
    with Client(daemon.socket, instance="engine", timeout_s=10.0) as client:
        for number in range(64):
            raw = Raw(daemon.socket, wire.Hello(wire.VERSION, f"big{number}"))
            raw.sock.sendall(wire.HEADER.pack(wire.MAX_BODY, wire.VERSION, 0, wire.VERBS[wire.Match], 5))
            socks.append(raw.sock)
        assert client.ping()
        assert process.memory_full_info().uss - held < wire.MAX_BODY, "64 of them are promised 4 GiB"
        for length in (wire.MAX_BODY + 1, 0xFFFFFFFF):
            raw = Raw(daemon.socket, wire.Hello(wire.VERSION, "bigger"))
            raw.sock.sendall(wire.HEADER.pack(length, wire.VERSION, 0, wire.VERBS[wire.Match], 5))
            head = wire.parse_header(raw.read(wire.HEADER.size))
            assert head.verb == wire.ERROR_VERB
            socks.append(raw.sock)
        assert client.ping()
    for sock in socks:
        sock.close()
