"""The server on real sockets: a fault of one connection is an error or a close for that connection alone."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import os
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier import handshake, wire
from kvtier.frames import Frames
from kvtier.handshake import readable
from kvtier.server import Limits, Server
from kvtier.server.sessions import Owner
from kvtier.types import Code, KvtierError

HELLO = wire.Hello(wire.VERSION, "engine")
ARENA_BYTES = 1 << 16


class SmallStore:
    """A store with one arena and verbs whose timing the test decides."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.fd = os.memfd_create("arena", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, ARENA_BYTES)
        self.notify: list[Callable[[wire.Message], None]] = []
        self.registered: list[tuple[os.stat_result, int]] = []
        self.gate = asyncio.Event()
        self.drained = asyncio.Event()
        self.moving = asyncio.Event()
        self.dead = asyncio.Event()
        self.changed = asyncio.Event()
        self.verbs = {
            wire.Match: lambda _, msg: wire.Matched(1, len(msg.keys)),
            wire.Acquire: self.acquire,
            wire.Load: self.load,
            wire.Stat: lambda _, msg: wire.Info({"blob": bytes(100_000)}),
            wire.Forget: self.fail,
            wire.Flush: self.fail_later,
        }
        self.admin = {wire.Status: lambda msg: wire.Info({"ok": True})}

    def note(self, *what: Any) -> None:
        """Something happened."""
        self.log.append(what)
        self.changed.set()

    async def happened(self, *what: Any) -> None:
        """Wait until it has."""
        while what not in self.log:
            self.changed.clear()
            await self.changed.wait()

    def join(self, hello: wire.Hello, peer: Any, notify: Callable[[wire.Message], None]) -> Any:
        if hello.instance == "refused":
            raise KvtierError(Code.OVER_CAP, "too many")
        self.note("join", peer.pid, peer.uid)
        self.notify.append(notify)
        arenas = (wire.ArenaInfo(0, ARENA_BYTES),)
        return object(), wire.Welcome(wire.VERSION, "small", "uid", arenas, 1, 1), [self.fd]

    def leave(self, process: object, clean: bool) -> None:
        self.note("leave", clean)

    def gone(self, process: object, by: object = None) -> None:
        self.note("gone")

    def ended(self, process: object) -> None:
        self.dead.set()

    def register(self, msg: wire.Register, fd: int, peer: Any, process: Any) -> wire.Registered:
        if msg.name == "refused":
            raise KvtierError(Code.BAD_REQUEST, "no", "name")
        self.registered.append((os.fstat(fd), peer.pid))
        return wire.Registered(5, mapped=False)

    async def acquire(self, process: object, msg: wire.Acquire) -> wire.Acquired:
        await self.gate.wait()
        return wire.Acquired(1, msg.pages)

    async def load(self, process: object, msg: wire.Load) -> wire.Loaded:
        """Ends when its bytes have moved, also where it is cancelled before."""
        self.moving.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            await self.drained.wait()
            self.note("drained")
            raise
        return wire.Loaded(b"\1")

    def fail(self, process: object, msg: wire.Forget) -> wire.Ok:
        raise ZeroDivisionError("a bug")

    async def fail_later(self, process: object, msg: wire.Flush) -> wire.Ok:
        await asyncio.sleep(0)
        raise ZeroDivisionError("a later bug")

    def close(self) -> None:
        os.close(self.fd)


class Peer:
    """The other end of one connection, frame by frame."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.setblocking(False)
        try:
            self.sock.connect(str(path))
        except OSError:
            self.sock.close()
            raise
        self.frames = Frames()
        self.last = 0

    async def send(self, message: wire.Message, request: int | None = None) -> int:
        """Send a request; its id."""
        self.last = self.last + 1 if request is None else request
        await self.raw(wire.request_frame(message, self.last))
        return self.last

    async def raw(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def frame(self) -> tuple[int, int, bytes] | None:
        """The next frame; None at the end of the stream."""
        while (frame := self.frames.next()) is None:
            try:
                data = await asyncio.get_running_loop().sock_recv(self.sock, 1 << 18)
            except ConnectionError:
                return None
            if not data:
                return None
            self.frames.feed(data)
        return frame.verb, frame.request, bytes(frame.body)

    async def reply(self, kind: type[Any] = wire.Ok) -> Any:
        """The next frame as a reply; the KvtierError that it carries, or None at the end."""
        frame = await self.frame()
        if frame is None:
            return None
        try:
            return wire.decode_reply(frame[0], frame[2], kind)
        except KvtierError as exc:
            return exc

    async def ask(self, message: wire.Message, kind: type[Any] = wire.Ok) -> Any:
        """Send a request, and the next frame as its reply."""
        await self.send(message)
        return await self.reply(kind)

    async def join(self, hello: wire.Hello = HELLO) -> wire.Welcome:
        """Say Hello, and one word more: who says nothing else is given nothing, and is over with its connection."""
        welcome = await self.ask(hello, wire.Welcome)
        assert isinstance(welcome, wire.Welcome)
        assert await self.ask(wire.Ping()) == wire.Ok()
        return welcome

    def send_fds(self, message: wire.Message, fds: list[int]) -> None:
        """Send a request with descriptors."""
        self.last += 1
        socket.send_fds(self.sock, [wire.request_frame(message, self.last)], fds)

    def close(self) -> None:
        self.sock.close()


class World:
    """A server over a small store, and peers of it that are closed at the end."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.store = SmallStore()
        owner: Owner = self.store
        self.path = folder / "engine.sock"
        self.admin = folder / "admin.sock"
        self.server = Server(owner, self.path, self.admin, limits)
        self.peers: list[Peer] = []

    def peer(self, path: Path | None = None) -> Peer:
        """A connection to the engine socket, or another."""
        self.peers.append(Peer(path or self.path))
        return self.peers[-1]

    async def joined(self) -> Peer:
        """A connection that said Hello."""
        peer = self.peer()
        await peer.join()
        return peer

    async def close(self) -> None:
        self.store.gate.set()
        self.store.drained.set()
        for peer in self.peers:
            peer.close()
        await self.server.close()
        self.store.close()


def scene(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test on the daemon's kind of loop, giving it `world`, or `make` to make one with limits of its own."""
    names = inspect.signature(test).parameters

    async def play(tmp_path: Path, given: dict[str, Any]) -> None:
        worlds: list[World] = []

        async def make(**limits: Any) -> World:
            worlds.append(World(tmp_path, Limits(**limits)))
            await worlds[-1].server.start()
            return worlds[-1]

        own = {"make": make, "tmp_path": tmp_path}
        if "world" in names:
            own["world"] = await make()
        try:
            await test(**{name: value for name, value in own.items() if name in names}, **given)
        finally:
            for world in worlds:
                await world.close()

    def run(tmp_path: Path, **given: Any) -> None:
        uvloop.run(play(tmp_path, given))

    keyword = inspect.Parameter.KEYWORD_ONLY
    others = [name for name in names if name not in {"world", "make", "tmp_path"}]
    run.__signature__ = inspect.Signature([inspect.Parameter(name, keyword) for name in ["tmp_path", *others]])
    run.__doc__, run.__name__ = test.__doc__, test.__name__
    return run


def descriptors() -> int:
    """How many descriptors this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def still_serves(peer: Peer) -> None:
    """Another connection is served as if nothing had happened."""
    async with asyncio.timeout(5):
        assert (await peer.ask(wire.Match(1, 0, b"abc"), wire.Matched)).pages == 3


# -- the first frame ---------------------------------------------------------------------------------------------


@scene
async def test_hello_answers_with_the_arena_as_shared_memory(world):
    """The descriptor that comes with Welcome is the store's memory."""
    peer = world.peer()
    await peer.send(HELLO)
    await readable(asyncio.get_running_loop(), peer.sock.fileno())
    assert ("join", os.getpid(), os.getuid()) in world.store.log
    data, fds, _, _ = socket.recv_fds(peer.sock, 4096, 4)
    peer.frames.feed(data)
    welcome = wire.decode_reply(1, peer.frames.next().body, wire.Welcome)
    assert len(fds) == len(welcome.arenas) == 1
    os.pwrite(fds[0], b"hello", 100)
    assert os.pread(world.store.fd, 5, 100) == b"hello"
    os.close(fds[0])


@scene
async def test_requests_may_follow_hello_in_the_same_send(world):
    """The handshake reads its own frame and not a byte more."""
    peer = world.peer()
    await peer.raw(wire.request_frame(HELLO, 1) + wire.request_frame(wire.Match(1, 0, b"ab"), 2))
    assert isinstance(await peer.reply(wire.Welcome), wire.Welcome)
    assert (await peer.reply(wire.Matched)).pages == 2


@scene
async def test_hello_may_arrive_byte_by_byte(world):
    """The first frame is framed like all others."""
    peer = world.peer()
    for byte in wire.request_frame(HELLO, 1):
        await peer.raw(bytes([byte]))
    assert isinstance(await peer.reply(wire.Welcome), wire.Welcome)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (wire.Match(1), Code.BAD_REQUEST),
        (wire.Ping(), Code.BAD_REQUEST),
        (wire.Hello(99, "engine"), Code.VERSION),
        (wire.Hello(1, ""), Code.BAD_REQUEST),
        (wire.Hello(1, "x" * 129), Code.BAD_REQUEST),
        (wire.Hello(1, "a\nb"), Code.BAD_REQUEST),
        (wire.Hello(1, "engine", "y" * 129), Code.BAD_REQUEST),
        (wire.Hello(1, "refused"), Code.OVER_CAP),
        (wire.Register("engine", "r", 0, 1, 1), Code.BAD_REQUEST),
    ],
)
@scene
async def test_a_first_frame_that_is_refused_closes_its_connection(world, message, code):
    """The refusal is said, then the stream ends; nothing joined."""
    peer = world.peer()
    assert (await peer.ask(message)).code is code
    assert await peer.frame() is None
    assert not world.store.log


@scene
async def test_a_first_frame_that_never_ends_is_closed(make):
    """Half a Hello keeps its connection for a bounded time only."""
    world = await make(first_frame_s=0.05)
    peer = world.peer()
    await peer.raw(wire.request_frame(HELLO, 1)[:-1])
    async with asyncio.timeout(5):
        assert await peer.frame() is None


@scene
async def test_a_first_frame_is_bounded_in_size(world):
    """A first frame is small; a header that says otherwise is refused before its body."""
    peer = world.peer()
    await peer.raw(wire.HEADER.pack(1 << 20, 1, 0, 1, 3))
    error = await peer.reply()
    assert (error.code, error.field) == (Code.BAD_REQUEST, "length")


# -- descriptors -------------------------------------------------------------------------------------------------


@scene
async def test_register_hands_over_the_memory_and_is_answered_once(world):
    """The store sees the very file, by the kernel's word of who sent it; the connection then ends."""
    fd = os.memfd_create("region")
    peer = world.peer()
    peer.send_fds(wire.Register("engine", "r", 0, 1, 1), [fd])
    assert await peer.reply(wire.Registered) == wire.Registered(5, mapped=False)
    assert await peer.frame() is None
    (status, pid), *_ = world.store.registered
    assert (status.st_ino, pid) == (os.fstat(fd).st_ino, os.getpid())
    os.close(fd)


@pytest.mark.parametrize("count", [2, 60, 200])
@scene
async def test_descriptors_of_a_refused_frame_are_closed(world, count):
    """However many come along, none stays open in the daemon."""
    fds = [os.memfd_create("x") for _ in range(count)]
    before = descriptors()
    for message in (wire.Register("engine", "r", 0, 1, 1), wire.Register("engine", "refused", 0, 1, 1), wire.Ping()):
        peer = world.peer()
        peer.send_fds(message, fds if message != wire.Ping() else fds[:1])
        assert (await peer.reply()).code is Code.BAD_REQUEST
        assert await peer.frame() is None
        peer.close()
    assert descriptors() <= before  # what earlier tests left may go meanwhile
    for fd in fds:
        os.close(fd)


@scene
async def test_descriptors_of_a_half_frame_are_closed(make):
    """A peer that sends descriptors and then nothing leaves none behind."""
    world = await make(first_frame_s=0.05)
    fd = os.memfd_create("x")
    before = descriptors()
    peer = world.peer()
    socket.send_fds(peer.sock, [wire.request_frame(HELLO, 1)[:20]], [fd])
    async with asyncio.timeout(5):
        assert await peer.frame() is None
    peer.close()
    assert descriptors() <= before  # what earlier tests left may go meanwhile
    os.close(fd)


@scene
async def test_descriptors_after_the_first_frame_are_dropped(world):
    """Nobody can fill the daemon's table of descriptors through an open connection."""
    peer = await world.joined()
    fd = os.memfd_create("x")
    before = descriptors()
    for _ in range(20):
        peer.send_fds(wire.Ping(), [fd])
        assert await peer.reply() == wire.Ok()
    assert descriptors() <= before
    os.close(fd)


# -- requests ----------------------------------------------------------------------------------------------------


@scene
async def test_replies_carry_the_verb_and_id_of_their_request(world):
    """Pipelined requests are told apart by id."""
    peer = await world.joined()
    await peer.send(wire.Match(1, 0, b"a"), 70)
    await peer.send(wire.Ping(), 2**64 - 1)
    assert (await peer.frame())[:2] == (wire.VERBS[wire.Match], 70)
    assert (await peer.frame())[:2] == (wire.VERBS[wire.Ping], 2**64 - 1)


@scene
async def test_a_request_that_waits_holds_up_no_other(world):
    """Replies come as requests finish."""
    peer = await world.joined()
    await peer.send(wire.Acquire(1, 7), 5)
    assert await peer.ask(wire.Ping()) == wire.Ok()
    world.store.gate.set()
    assert (await peer.reply(wire.Acquired)).pages == 7


@scene
async def test_unknown_verbs_and_wrong_bodies_are_answered_and_the_connection_goes_on(world):
    """What is wrong inside a frame costs that request alone."""
    peer = await world.joined()
    for raw in (
        wire.HEADER.pack(0, 1, 0, 999, 9),
        wire.HEADER.pack(3, 1, 0, wire.VERBS[wire.Match], 9) + b"\xc1\xc1\xc1",
        wire.HEADER.pack(8, 1, 0, wire.VERBS[wire.Match], 9) + b"\x91" * 8,
        wire.HEADER.pack(1, 1, 0, wire.VERBS[wire.Hello], 9) + b"\x80",
        wire.HEADER.pack(1, 1, 0, wire.VERBS[wire.Durable], 9) + b"\x80",
    ):
        await peer.raw(raw)
        verb, request, body = await peer.frame()
        assert (verb, request) == (wire.ERROR_VERB, 9)
        assert b"bad_request" in body
    await still_serves(peer)


@scene
async def test_a_second_hello_is_refused(world):
    """One connection is one process of one instance."""
    peer = await world.joined()
    assert (await peer.ask(HELLO)).code is Code.BAD_REQUEST
    await still_serves(peer)


@scene
async def test_request_ids_in_flight_and_zero_are_refused(world):
    """An id names one request at a time, and 0 is for events."""
    peer = await world.joined()
    await peer.send(wire.Acquire(1), 5)
    await peer.send(wire.Ping(), 5)
    assert (await peer.reply()).field == "request"
    await peer.send(wire.Ping(), 0)
    assert (await peer.reply()).field == "request"
    world.store.gate.set()
    assert isinstance(await peer.reply(wire.Acquired), wire.Acquired)


@scene
async def test_verbs_stay_on_their_socket(world):
    """Admin verbs on the engine socket and engine verbs on the admin socket are forbidden."""
    engine, admin = await world.joined(), world.peer(world.admin)
    assert (await engine.ask(wire.Status())).code is Code.FORBIDDEN
    assert (await admin.ask(wire.Match(1))).code is Code.FORBIDDEN
    assert (await admin.ask(HELLO)).code is Code.FORBIDDEN
    assert (await admin.ask(wire.Status(), wire.Info)).data == {"ok": True}
    assert await admin.ask(wire.Ping()) == wire.Ok()


@scene
async def test_a_bug_in_a_verb_is_internal_and_logged(world, caplog):
    """The traceback is in the log, the request is answered, the connection goes on."""
    peer = await world.joined()
    with caplog.at_level(logging.ERROR, "kvtier.server"):
        assert (await peer.ask(wire.Forget(1))).code is Code.INTERNAL
        assert (await peer.ask(wire.Flush(1))).code is Code.INTERNAL
    assert [record.exc_info[0] for record in caplog.records] == [ZeroDivisionError, ZeroDivisionError]
    await still_serves(peer)


@scene
async def test_requests_in_flight_are_bounded_per_connection(make):
    """Over the bound a request is busy; another connection has its own bound."""
    world = await make(tasks=3)
    peer, other = await world.joined(), await world.joined()
    for _ in range(3):
        await peer.send(wire.Acquire(1, 1))
    assert (await peer.ask(wire.Acquire(1, 1))).code is Code.BUSY
    await other.send(wire.Acquire(1, 2))
    world.store.gate.set()
    assert [(await peer.reply(wire.Acquired)).pages for _ in range(3)] == [1, 1, 1]
    assert (await other.reply(wire.Acquired)).pages == 2


@scene
async def test_events_reach_the_connection_that_asked(world):
    """An event is a frame with request id 0."""
    peer = await world.joined()
    world.store.notify[0](wire.Durable(4, 2))
    verb, request, body = await peer.frame()
    assert (verb, request) == (wire.VERBS[wire.Durable], 0)
    assert wire.decode_request(verb, body) == wire.Durable(4, 2)


# -- fences ------------------------------------------------------------------------------------------------------


@scene
async def test_cancel_answers_after_the_request_and_that_after_its_last_byte(world):
    """First the drain, then the request's own reply, then the Ok of Cancel."""
    peer = await world.joined()
    await peer.send(wire.Load(1, 0, b""), 5)
    await world.store.moving.wait()
    await peer.send(wire.Cancel(5), 6)
    assert await peer.ask(wire.Ping()) == wire.Ok()  # neither has answered while bytes move
    assert ("drained",) not in world.store.log
    world.store.drained.set()
    verb, request, body = await peer.frame()
    assert ("drained",) in world.store.log
    assert (verb, request) == (wire.ERROR_VERB, 5)
    assert b"cancelled" in body
    assert (await peer.frame())[:2] == (wire.VERBS[wire.Cancel], 6)


@scene
async def test_cancel_in_the_same_send_as_its_request_still_answers_both(world):
    """A request that is cancelled before its first step is answered like any other."""
    peer = await world.joined()
    await peer.raw(wire.request_frame(wire.Load(1, 0, b""), 5) + wire.request_frame(wire.Cancel(5), 6))
    world.store.drained.set()
    assert (await peer.reply()).code is Code.CANCELLED
    assert await peer.reply() == wire.Ok()


@scene
async def test_cancel_of_what_is_not_in_flight_is_ok(world):
    """Its word was given before."""
    peer = await world.joined()
    assert await peer.ask(wire.Cancel(77)) == wire.Ok()


@scene
async def test_cancels_are_bounded(make):
    """Cancelling the same request without end fills nothing."""
    world = await make(tasks=2)
    peer = await world.joined()
    await peer.send(wire.Load(1, 0, b""), 5)
    await world.store.moving.wait()
    for number in (6, 7):
        await peer.send(wire.Cancel(5), number)
    await peer.send(wire.Cancel(5), 8)
    assert (await peer.reply()).code is Code.BUSY
    world.store.drained.set()
    assert (await peer.reply()).code is Code.CANCELLED
    assert [await peer.reply(), await peer.reply()] == [wire.Ok(), wire.Ok()]


@scene
async def test_bye_drains_then_lets_go_then_answers(world):
    """After Bye nothing of the process is in flight, and its pidfd is not waited for."""
    peer = await world.joined()
    await peer.send(wire.Load(1, 0, b""), 5)
    await world.store.moving.wait()
    await peer.send(wire.Bye(), 6)
    await asyncio.sleep(0.02)
    assert ("leave", True) not in world.store.log
    world.store.drained.set()
    assert (await peer.reply()).code is Code.CANCELLED
    assert await peer.reply() == wire.Ok()
    assert await peer.frame() is None
    assert world.store.log[1:] == [("drained",), ("leave", True)]
    assert len(world.server.sessions) == 0


@scene
async def test_a_lost_connection_leaves_only_when_its_requests_have_drained(world):
    """The store is told after the last byte, never before."""
    peer = await world.joined()
    await peer.send(wire.Load(1, 0, b""))
    await world.store.moving.wait()
    peer.close()
    await asyncio.sleep(0.02)
    assert ("leave", False) not in world.store.log
    world.store.drained.set()
    async with asyncio.timeout(5):
        await world.store.happened("leave", False)
    assert world.store.log[1:] == [("drained",), ("leave", False)]


# -- processes ---------------------------------------------------------------------------------------------------

CHILD = """
import mmap, socket, sys, os
from kvtier import wire
sock = socket.socket(socket.AF_UNIX); sock.connect(sys.argv[1])
sock.sendall(wire.request_frame(wire.Hello(1, "child"), 1)); _, fds, _, _ = socket.recv_fds(sock, 4096, 9)
sock.sendall(wire.request_frame(wire.Ping(), 2)); sock.recv(4096)
if "fork" in sys.argv and os.fork() == 0:
    print(os.getpid(), flush=True); sys.stdin.read(); os._exit(0)
if "load" in sys.argv: sock.sendall(wire.request_frame(wire.Load(1, 0, b""), 3))
if "drop" in sys.argv: sock.close()
if "map" in sys.argv: sock.close(); kept = mmap.mmap(fds[0], 1 << 16); os.close(fds[0])
if "fork" not in sys.argv: print(os.getpid(), flush=True)
sys.stdin.read()
"""


class Unseen:
    """Credentials as of a process of another pid namespace."""

    size = 12

    def unpack(self, raw: bytes) -> tuple[int, int, int]:
        """The same without its pid."""
        return 0, *struct.unpack("3i", raw)[1:]


async def child(world: World, *how: str) -> Any:
    """Another process that said Hello; its stdin ends it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, str(world.path), *how, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    await process.stdout.readline()
    return process


async def reap(process: Any) -> None:
    """Wait for it, its pipes closed."""
    process.stdin.close()
    await process.wait()
    await process.stdout.read()


@scene
async def test_kill_9_of_a_process_is_known_by_its_pidfd(world):
    """The store hears that the connection is lost and then that the process has ended; others go on."""
    other = await world.joined()
    process = await child(world)
    process.kill()
    async with asyncio.timeout(5):
        await world.store.happened("gone")
    assert world.store.log[-2:] == [("leave", False), ("gone",)]
    await still_serves(other)
    await reap(process)


@scene
async def test_a_process_that_only_lost_its_connection_is_not_gone(world):
    """Its slots stay quarantined for as long as it lives."""
    process = await child(world, "drop")
    async with asyncio.timeout(5):
        await world.store.happened("leave", False)
    await asyncio.sleep(0.05)
    assert ("gone",) not in world.store.log
    process.kill()
    async with asyncio.timeout(5):
        await world.store.happened("gone")
    await reap(process)


@scene
async def test_a_request_that_waits_for_the_end_of_its_process_hears_of_it(world):
    """What nobody else can end, such as a load to a device that is stuck, does not keep what the process held."""

    async def load(process: object, msg: wire.Load) -> wire.Loaded:
        world.store.moving.set()
        try:
            await world.store.gate.wait()
        except asyncio.CancelledError:
            await world.store.dead.wait()
            raise
        return wire.Loaded(b"")

    world.store.verbs[wire.Load] = load
    process = await child(world, "load")
    async with asyncio.timeout(5):
        await world.store.moving.wait()
        process.kill()
        await world.store.happened("gone")
    await reap(process)


@scene
async def test_a_child_that_inherited_the_socket_does_not_keep_its_parent_alive(world):
    """The pidfd ends the session although the connection is still open in the child."""
    process = await child(world, "fork")
    process.kill()
    async with asyncio.timeout(5):
        await world.store.happened("gone")
    assert world.store.log[-2:] == [("leave", False), ("gone",)]
    await reap(process)


@scene
async def test_a_kernel_that_gives_no_pidfd_of_a_peer_gives_one_of_its_pid(world, monkeypatch):
    """Before 6.5: the process is watched all the same."""
    monkeypatch.setattr(handshake, "SO_PEERPIDFD", 9999)
    process = await child(world)
    process.kill()
    await reap(process)
    async with asyncio.timeout(5):
        await world.store.happened("gone")
    assert world.store.log[-2:] == [("leave", False), ("gone",)]


@scene
async def test_a_process_that_cannot_be_watched_keeps_its_slots_while_it_maps_them(make, monkeypatch):
    """Before 6.5 and in another pid namespace: the end of its connection is not its end."""
    monkeypatch.setattr(handshake, "SO_PEERPIDFD", 9999)
    monkeypatch.setattr(handshake, "_UCRED", Unseen())
    world = await make(drain_s=0.01)
    process = await child(world, "map")
    try:
        async with asyncio.timeout(5):
            await world.store.happened("leave", False)
        await asyncio.sleep(0.2)
        assert ("gone",) not in world.store.log
    finally:
        process.kill()
        await reap(process)
    async with asyncio.timeout(5):
        await world.store.happened("gone")


@scene
async def test_a_process_that_cannot_be_watched_has_no_part_of_the_device(world, monkeypatch):
    """Nothing would say when it maps that no more."""
    monkeypatch.setattr(handshake, "SO_PEERPIDFD", 9999)
    monkeypatch.setattr(handshake, "_UCRED", Unseen())
    peer = await world.joined()
    assert (await peer.ask(wire.UseDevice(b""))).code is Code.UNKNOWN
    await still_serves(peer)


@scene
async def test_a_hello_after_which_nothing_is_said_leaves_no_session(world):
    """Whether it gave up before the Welcome was sent, after, or had read it: nothing was given on it."""
    early = world.peer()
    early.sock.setblocking(True)
    early.sock.sendall(wire.request_frame(HELLO, 1))
    early.close()
    late = world.peer()
    await late.send(HELLO)
    await readable(asyncio.get_running_loop(), late.sock.fileno())
    late.close()
    async with asyncio.timeout(5):
        while world.store.log.count(("leave", True)) < 2:
            await asyncio.sleep(0.01)
        interrupted = world.peer()
        assert isinstance(await interrupted.ask(HELLO, wire.Welcome), wire.Welcome)
        interrupted.close()
        while world.store.log.count(("leave", True)) < 3:
            await asyncio.sleep(0.01)
    assert len(world.server.sessions) == 0
    assert ("leave", False) not in world.store.log


@scene
async def test_no_session_number_tells_another(world):
    """Who knows one is the client that it was given to, also where pids tell nothing."""
    numbers = [(await world.peer().join()).session for _ in range(3)]
    assert all(abs(a - b) > 1 << 20 for a, b in itertools.pairwise(numbers))


@scene
async def test_unmapped_ends_an_earlier_session_of_the_same_process(world):
    """What the lost connection held returns at once, though the process lives."""
    first = world.peer()
    session = (await first.join()).session
    first.close()
    async with asyncio.timeout(5):
        await world.store.happened("leave", False)
    second = await world.joined()
    assert await second.ask(wire.Unmapped(session)) == wire.Ok()
    assert world.store.log[-1] == ("gone",)
    assert await second.ask(wire.Unmapped(session)) == wire.Ok()
    assert world.store.log.count(("gone",)) == 1


@scene
async def test_sessions_that_hello_lists_end_before_the_new_one_begins(world):
    """A process that connects again and kept nothing starts clean, though its old socket is still open here."""
    first = world.peer()
    session = (await first.join()).session
    second = world.peer()
    await second.join(wire.Hello(wire.VERSION, "engine", unmapped=(session, 12345)))
    kinds = [what[0] for what in world.store.log]
    assert kinds == ["join", "leave", "gone", "join"]
    assert await first.frame() is None
    await still_serves(second)


@scene
async def test_a_session_that_still_drains_does_not_hold_up_hello(world):
    """What has bytes in flight is left for Unmapped; the newcomer is served meanwhile."""
    first = world.peer()
    session = (await first.join()).session
    await first.send(wire.Load(1, 0, b""))
    await world.store.moving.wait()
    second = world.peer()
    await second.join(wire.Hello(wire.VERSION, "engine", unmapped=(session,)))
    assert (await second.ask(wire.Unmapped(session))).code is Code.BUSY
    world.store.drained.set()
    async with asyncio.timeout(5):
        await world.store.happened("leave", False)
    assert await second.ask(wire.Unmapped(session)) == wire.Ok()
    assert world.store.log[-1] == ("gone",)


@scene
async def test_unmapped_of_a_live_own_or_foreign_session_is_refused(world):
    """Only an earlier, closed connection of the very process can be ended."""
    first, second = world.peer(), world.peer()
    one, two = (await first.join()).session, (await second.join()).session
    assert (await second.ask(wire.Unmapped(one))).code is Code.BUSY
    assert (await second.ask(wire.Unmapped(two))).code is Code.FORBIDDEN
    process = await child(world, "drop")
    sessions = world.server.sessions._sessions
    foreign = next(number for number, session in sessions.items() if session.peer.pid != os.getpid())
    assert (await second.ask(wire.Unmapped(foreign))).code is Code.FORBIDDEN
    assert ("gone",) not in world.store.log
    process.kill()
    await reap(process)


# -- what a bad peer can do ----------------------------------------------------------------------------------------


@given(
    st.lists(
        st.binary(max_size=300)
        | st.builds(
            wire.HEADER.pack, st.integers(0, 2**32 - 1), st.just(1), st.just(0), st.integers(0, 120), st.just(7)
        )
        | st.sampled_from([wire.request_frame(wire.Ping(), 3), wire.request_frame(HELLO, 1)]),
        max_size=6,
    ),
    st.booleans(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_garbage_hurts_only_its_own_connection(tmp_path_factory, pieces, hello):
    """Whatever bytes one peer sends, before or after Hello, another is served."""

    async def scene() -> None:
        world = World(tmp_path_factory.mktemp("fuzz"), Limits(first_frame_s=0.2))
        await world.server.start()
        good, bad = await world.joined(), world.peer()
        try:
            if hello:
                await bad.join()
            for piece in pieces:
                await bad.raw(piece)
                await still_serves(good)
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            await still_serves(good)
            await world.close()

    uvloop.run(scene())


@pytest.mark.parametrize("header", [wire.HEADER.pack(2**32 - 1, 1, 0, 16, 4), b"GET / HTTP/1.1\r\n\r\n"])
@scene
async def test_a_bad_header_is_answered_and_closes_that_connection(world, header):
    """4 GiB lengths and other protocols end where they began."""
    good, bad = await world.joined(), await world.joined()
    await bad.raw(header)
    assert (await bad.reply()).code in {Code.BAD_REQUEST, Code.VERSION}
    assert await bad.frame() is None
    await still_serves(good)


@scene
async def test_a_half_frame_that_does_not_move_is_closed(make):
    """A body that stops coming is not kept for ever."""
    world = await make(stall_s=0.05)
    good, bad = await world.joined(), await world.joined()
    await bad.raw(wire.HEADER.pack(1000, 1, 0, 16, 4) + b"x")
    async with asyncio.timeout(10):
        assert await bad.frame() is None
    await still_serves(good)


@scene
async def test_half_received_bodies_are_bounded_over_all_connections(make):
    """Many large half bodies are refused by name before they fill the memory."""
    world = await make(buffered=1 << 20)
    good = await world.joined()
    bad = [await world.joined() for _ in range(4)]
    for peer in bad:
        await peer.raw(wire.HEADER.pack(8 << 20, 1, 0, 16, 4) + bytes(400_000))
        await still_serves(good)
    answering = [asyncio.ensure_future(peer.reply()) for peer in bad]
    answered, waiting = await asyncio.wait(answering, timeout=5, return_when=asyncio.FIRST_COMPLETED)
    assert [each.result().code for each in answered] == [Code.BUSY] * len(answered)
    for each in waiting:
        each.cancel()
    assert world.server._shared.buffered <= 1 << 20
    await still_serves(good)


@scene
async def test_whoever_has_most_half_received_gives_way_to_others(make):
    """Not who comes next with a long prompt, whose leases would go with the connection."""
    world = await make(buffered=1 << 20)
    good, *bad = [await world.joined() for _ in range(4)]
    for peer in bad:
        await peer.raw(wire.HEADER.pack(8 << 20, 1, 0, 16, 4) + bytes(330_000))
    raw = wire.request_frame(wire.Match(1, 0, bytes(300_000)), 7)
    async with asyncio.timeout(5):
        for piece in (raw[:200_000], raw[200_000:]):
            await good.raw(piece)
            await still_serves(await world.joined())
        assert (await good.reply(wire.Matched)).pages == 300_000
    await still_serves(good)
    assert world.server._shared.buffered <= 1 << 20


@scene
async def test_a_reader_that_stops_costs_bounded_memory_and_no_other(make):
    """Its requests are no longer read; others are served; when it reads again all its replies are there."""
    world = await make(write_high=1 << 16)
    good, bad = await world.joined(), await world.joined()
    raw = b"".join(wire.request_frame(wire.Stat(), number) for number in range(10, 210))
    await bad.raw(raw)  # 200 replies of 100 kB
    for _ in range(20):
        await still_serves(good)
    (connection,) = [c for c in world.server._shared.connections if c._full]
    assert connection._transport.get_write_buffer_size() < 1 << 19
    for number in range(10, 210):
        assert (await bad.frame())[1] == number


@scene
async def test_a_reader_that_stops_for_too_long_is_closed(make):
    """Unread replies are kept for a bounded time."""
    world = await make(write_high=1 << 16, stall_s=0.05)
    bad = await world.joined()
    for _ in range(20):
        await bad.send(wire.Stat())
    async with asyncio.timeout(10):
        await world.store.happened("leave", False)


@scene
async def test_events_that_nobody_reads_close_the_connection_at_the_bound(make):
    """Events cannot be held back like requests: over the bound their reader is dropped."""
    world = await make(write_high=1 << 16, write_cap=1 << 18)
    await world.joined()
    for number in range(40_000):
        world.store.notify[0](wire.Durable(number, 1))
    async with asyncio.timeout(5):
        await world.store.happened("leave", False)


@scene
async def test_a_flood_of_requests_leaves_turns_to_others(world):
    """Thousands of pipelined requests of one peer do not hold up another for long."""
    good, bad = await world.joined(), await world.joined()
    flood = b"".join(wire.request_frame(wire.Ping(), number) for number in range(10, 10_010))
    sending = asyncio.ensure_future(bad.raw(flood))
    answered = 0
    while not sending.done() or answered < 5:
        await still_serves(good)
        answered += 1
        if sending.done():
            break
        await asyncio.sleep(0)
    for number in range(10, 10_010):
        assert (await bad.frame())[1] == number
    await sending
    assert answered


@scene
async def test_connections_are_bounded_by_name(make):
    """Over the bound a newcomer is told why and closed; those inside go on."""
    world = await make(connections=2)
    good = await world.joined()
    await world.joined()
    late = world.peer()
    assert (await late.reply()).code is Code.BUSY
    assert await late.frame() is None
    await still_serves(good)


# -- paths ---------------------------------------------------------------------------------------------------------


@scene
async def test_sockets_have_the_modes_that_guard_them(world):
    """Engines by group, operators by owner alone."""
    assert stat.S_IMODE(world.path.stat().st_mode) == 0o660
    assert stat.S_IMODE(world.admin.stat().st_mode) == 0o600


@scene
async def test_a_stale_socket_is_replaced_and_a_live_one_refused(world, tmp_path):
    """A socket that nobody answers at is no obstacle; one that is served is named."""
    stale = tmp_path / "stale.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(stale))
    server = Server(world.store, stale)
    await server.start()
    await server.close()
    assert not stale.exists()
    with pytest.raises(KvtierError, match=str(world.path)) as caught:
        await Server(world.store, world.path).start()
    assert caught.value.code is Code.BUSY
    await still_serves(await world.joined())


@scene
async def test_a_foreign_listener_on_the_path_is_refused(world, tmp_path):
    """What another program serves is not taken away from it."""
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "other.sock"))
        other.listen()
        with pytest.raises(KvtierError, match="another process"):
            await Server(world.store, tmp_path / "other.sock").start()
        assert (tmp_path / "other.sock").exists()


@scene
async def test_a_file_on_the_path_is_not_removed(world, tmp_path):
    """Only sockets are replaced."""
    path = tmp_path / "file"
    path.write_text("precious")
    with pytest.raises(KvtierError, match="not a socket"):
        await Server(world.store, path).start()
    assert path.read_text() == "precious"


@scene
async def test_a_path_that_is_too_long_is_named(world, tmp_path):
    """The kernel's bound on socket paths is an error that says so."""
    with pytest.raises(KvtierError, match="cannot listen"):
        await Server(world.store, tmp_path / ("x" * 120)).start()


@scene
async def test_close_ends_every_connection_and_removes_the_sockets(make):
    """After close nothing is left: no path, no session, no descriptor."""
    counts = []
    for _ in range(3):
        world = await make()
        peer = await world.joined()
        await world.server.close()
        assert await peer.frame() is None
        assert not world.path.exists()
        assert not world.admin.exists()
        assert len(world.server.sessions) == 0
        peer.close()
        counts.append(descriptors())
    assert counts[2] - counts[1] <= 1  # the store's arena; the loop itself opened some in the first round


@scene
async def test_drain_refuses_new_work_and_finishes_what_is_in_flight(world):
    """While draining: closing for newcomers and new work, a reply for what began before."""
    peer = await world.joined()
    await peer.send(wire.Acquire(1, 3))
    await peer.ask(wire.Ping())
    draining = asyncio.ensure_future(world.server.drain(5))
    await asyncio.sleep(0)
    assert (await peer.ask(wire.Match(1))).code is Code.CLOSING
    assert await peer.ask(wire.Ping()) == wire.Ok()
    with pytest.raises(FileNotFoundError):
        world.peer()
    assert not draining.done()
    world.store.gate.set()
    assert (await peer.reply(wire.Acquired)).pages == 3
    await draining


@scene
async def test_drain_cancels_what_does_not_finish_in_time(world):
    """The end of the daemon is bounded."""
    peer = await world.joined()
    await peer.send(wire.Acquire(1, 3))
    await peer.ask(wire.Ping())
    async with asyncio.timeout(5):
        await world.server.drain(0.02)
    assert (await peer.reply()).code is Code.CANCELLED
