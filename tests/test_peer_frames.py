"""What guards the talk between daemons: frames that cannot be changed, repeated or moved; secrets; proofs."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import random
import socket
from pathlib import Path

import pytest

from engines import idle, spec
from fleetkit import FLEET, free_ports, write_secrets
from kvtier.config import load
from kvtier.peer import frames, patience
from kvtier.peer.fame import Fame
from kvtier.peer.pipe import Pipe
from kvtier.peer.secrets import Mac, read
from kvtier.peer.terms import Terms
from kvtier.server import visit
from kvtier.server.home import Home
from kvtier.types import Code, KvtierError
from peerkit import SPEC, direct, page, sums_of
from storekit import storing, until

PING = frames.Ping()


def sides(key: bytes = b"k" * 32) -> tuple[frames.Session, frames.Session]:
    """Both ends of a connection."""
    return frames.Session(key, asker=True), frames.Session(key, asker=False)


def opened(session: frames.Session, raw: bytes) -> frames.Message:
    """What the other side makes of a frame."""
    size = frames.LENGTH.size
    return session.open(raw[:size], raw[size:])


def test_a_frame_is_taken_once_in_its_place_and_only_as_it_was_made() -> None:
    """Altered anywhere, repeated, skipped, reflected, or from another connection: each is refused."""
    asker, answerer = sides()
    first = asker.close(frames.Find(b"c" * 32, b"abcd"))
    assert opened(answerer, first) == frames.Find(b"c" * 32, b"abcd")
    for at in range(len(first)):
        asker, answerer = sides()
        raw = bytearray(asker.close(frames.Find(b"c" * 32, b"abcd")))
        raw[at] ^= 1
        with pytest.raises(KvtierError):
            opened(answerer, bytes(raw))
    asker, answerer = sides()
    one, two = asker.close(PING), asker.close(PING)
    opened(answerer, one)
    with pytest.raises(KvtierError):
        opened(answerer, one)
    asker, answerer = sides()
    one, two = asker.close(PING), asker.close(PING)
    with pytest.raises(KvtierError):
        opened(answerer, two)
    asker, _ = sides()
    with pytest.raises(KvtierError):
        opened(asker, asker.close(PING))
    with pytest.raises(KvtierError):
        opened(sides(b"other" * 8)[1], asker.close(PING))


def test_frames_are_signed_with_hmac_sha256() -> None:
    """Whatever the key and the parts, what is hashed ahead gives what the standard library gives."""
    rng = random.Random(2)
    for size in (1, 32, 64):
        key = rng.randbytes(size)
        mac = Mac(key)
        for _ in range(20):
            parts = [rng.randbytes(rng.randrange(0, 200)) for _ in range(3)]
            assert mac.of(*parts) == hmac.digest(key, b"".join(parts), hashlib.sha256)


def test_bytes_that_are_no_frame_are_refused_by_name() -> None:
    """Random bodies raise KvtierError and nothing else."""
    rng = random.Random(1)
    for _ in range(2000):
        with pytest.raises(KvtierError):
            frames.decode(rng.randbytes(rng.randrange(1, 60)))


def test_what_a_stranger_says_as_it_refuses_can_be_shown_on_a_terminal() -> None:
    """Nobody has shown a key by then: operators read it in `kvtierctl status` and in the log."""
    with pytest.raises(frames.Refusal, match=r"^no\?\[31m\?line$"):
        frames.expect(frames.Refused("busy", "no\x1b[31m\nline"), frames.Done)


async def test_who_lacks_the_fleets_key_is_told_nothing(tmp_path: Path) -> None:
    """A home hangs up on a stranger's first frame, and a stranger that poses as a home is found out."""
    mine = read(write_secrets(tmp_path / "mine", ["uid:0"]))
    theirs = read(write_secrets(tmp_path / "theirs", ["uid:0"], fleet="55" * 32))
    (port,) = free_ports(1)
    async with storing(None) as store:
        home = Home(store, Terms("b", mine, 1.0), ("127.0.0.1", port), Fame())
        home.start()
        try:
            for secrets in (mine, theirs):
                sock = socket.create_connection(("127.0.0.1", port))
                pipe = Pipe(sock)
                if secrets is mine:
                    await pipe.knock(Terms("a", secrets), "b")
                    assert isinstance(await pipe.ask(PING, frames.Done), frames.Done)
                else:
                    with pytest.raises(KvtierError) as refused:
                        await pipe.knock(Terms("a", secrets), "b")
                    assert refused.value.code is Code.FORBIDDEN
                    await asyncio.get_running_loop().sock_sendall(sock, frames.encode(PING) + bytes(16))
                    assert await asyncio.get_running_loop().sock_recv(sock, 100) == b""
                pipe.close()
        finally:
            await home.close()


async def test_a_cache_is_named_on_a_connection_only_after_its_secret_was_shown_there(tmp_path: Path) -> None:
    """Find without Use, Use with another connection's proof, and Use with another secret are all forbidden."""
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    other = read(write_secrets(tmp_path / "other", ["uid:0"], secret="66" * 32))
    shared = secrets.shared(spec(), "uid:0", 0)
    (port,) = free_ports(1)
    async with storing(None) as store:
        home = Home(store, Terms("b", secrets, 1.0), ("127.0.0.1", port), Fame())
        home.start()
        try:
            pipe = Pipe(socket.create_connection(("127.0.0.1", port)))
            await pipe.knock(Terms("a", secrets), "b")
            key_id = secrets.key_id("uid:0")
            tries = [
                frames.Find(shared.id, b"x" * spec().stride),
                frames.Use(shared.id, shared.spec, key_id, secrets.proof("uid:0", b"s" * 32, shared.id)),
                frames.Use(shared.id, shared.spec, key_id, other.proof("uid:0", pipe.session.id, shared.id)),
                frames.Use(shared.id, shared.spec, other.key_id("uid:0"), b""),
                frames.Use(b"n" * 32, shared.spec, key_id, secrets.proof("uid:0", pipe.session.id, b"n" * 32)),
            ]
            for message in tries:
                with pytest.raises(frames.Refusal) as refused:
                    await pipe.ask(message, frames.Done)
                assert refused.value.code is Code.FORBIDDEN
            proof = secrets.proof("uid:0", pipe.session.id, shared.id)
            await pipe.ask(frames.Use(shared.id, shared.spec, key_id, proof), frames.Done)
            assert (await pipe.ask(tries[0], frames.Found)).pages == 0
            pipe.close()
        finally:
            await home.close()


@pytest.mark.parametrize("holding", [True, False])
async def test_a_connection_on_which_nothing_comes_ends_and_what_it_held_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, holding: bool
) -> None:
    """Who is idle, or is to send what was reserved for it and does not, is hung up on after its time."""
    monkeypatch.setattr(patience, "LOOK_S", 0.01)
    monkeypatch.setattr(visit, "TAKE_S" if holding else "IDLE_S", 0.05)
    async with direct(tmp_path) as pair:
        keys = b"x" * SPEC.stride
        sink = await pair.tier.offer("far", pair.shared, keys, ())
        if not holding:
            places = [page(keys, 0)]
            assert await sink.send(places, sums_of(places)) == 1
        await sink._pipe.stream.something(10.0)
        assert sink._pipe.stream.sock.recv(1) == b""
        await until(lambda: idle(pair.far) == [])
        sink.close()


def test_secrets_that_others_can_read_are_not_used_and_none_is_shown(tmp_path: Path) -> None:
    """A file that its group can read, a short secret, a missing fleet line: refused; and repr tells nothing."""
    path = write_secrets(tmp_path / "secrets", ["uid:0"])
    assert FLEET not in repr(read(path))
    path.chmod(0o640)
    with pytest.raises(KvtierError) as refused:
        read(path)
    assert refused.value.code is Code.FORBIDDEN
    path.chmod(0o600)
    twice = f"fleet {FLEET}\nuid:0 {'22' * 32}\nuid:1 {'22' * 32}"
    for text in (twice, "uid:0 " + "22" * 32, "fleet 22", "fleet nonsense", "fleet"):
        path.write_text(text)
        with pytest.raises(KvtierError):
            read(path)


def test_what_would_listen_without_a_key_is_not_started() -> None:
    """Peers without secrets, and events off loopback, are refused with the setting's name."""
    peers = {"peers.nodes": "a=10.0.0.1:9478,b=10.0.0.2:9478", "peers.name": "a"}
    for flags, field in (
        (peers, "peers.secrets"),
        (peers | {"peers.name": "c", "peers.secrets": "x"}, "peers.name"),
        ({"peers.nodes": "a=10.0.0.1"}, "peers.nodes"),
        ({"events.publish": "tcp://0.0.0.0:5557"}, "events.publish"),
    ):
        with pytest.raises(KvtierError) as refused:
            load(None, env={}, flags=flags)
        assert refused.value.field == field


def test_a_cache_that_was_reset_is_shared_no_more(tmp_path: Path) -> None:
    """Epochs are counted by each host: only the first one has a name that other hosts know."""
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    assert secrets.shared(spec(), "uid:0", 1) is None
    assert secrets.shared(spec(), "uid:1", 0) is None
    elsewhere = read(write_secrets(tmp_path / "elsewhere", ["uid:7:team"]))
    assert secrets.shared(spec(), "uid:0", 0).id == elsewhere.shared(spec(), "uid:7:team", 0).id, (
        "one secret, one domain"
    )
