"""Export files: what one host cached is served by another, bit for bit; damage costs the damaged pages and no more."""

from __future__ import annotations

import json
import os
import stat
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from click.testing import CliRunner, Result

from engines import FULL, STATE, WINDOW, Engine, content, idle, spec, tokens
from kvtier import archive, wire
from kvtier.client import Client, page_keys
from kvtier.control.call import Admin
from kvtier.control.carry import _send, records
from kvtier.ctl import main
from kvtier.demo.daemon import Daemon
from kvtier.device.host import HostDevice
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.store import Store, imports
from kvtier.store.vram import DeviceMemory
from kvtier.types import Code, Kind, KvtierError, Tier
from storekit import MIB, drop_host, quiet, storing

SPEC = CacheSpec("m", b"f" * 16, "bf16", 4, (GroupSpec(Kind.FULL, 2, 1, 2048),))


async def call(store: Store, message: wire.Message) -> Any:
    """One admin verb."""
    reply = store.admin[type(message)](message)
    return await reply if hasattr(reply, "__await__") else reply


async def exported(store: Store, of: wire.Prompt) -> bytes:
    """The file that an export would write."""
    return await rest(store, (await call(store, wire.Export(of))).data["export"])


async def rest(store: Store, number: int) -> bytes:
    """What is left of an export."""
    out, last = b"", False
    while not last:
        chunk = await call(store, wire.ExportNext(number))
        out, last = out + chunk.data, chunk.last
    return out


async def imported(store: Store, file: Path, scope: str = "") -> dict[str, int]:
    """What became of a file's pages."""
    with file.open("rb") as source:
        found = records(source)
        begun = await call(store, wire.Import(next(found).meta, scope))
        number = begun.data["import"]
        for record in found:
            if record.kind != archive.RUN:
                continue
            if (await call(store, wire.ImportRun(number, record.meta))).data["wanted"]:
                source.seek(record.payload)
                payload = source.read(record.payload_bytes)
                for at in range(0, len(payload), 5000):
                    await call(store, wire.ImportData(number, payload[at : at + 5000]))
    return (await call(store, wire.ImportEnd(number))).data["pages"]


def ended(file: Path) -> archive.End:
    """What a file says of itself at its end."""
    with file.open("rb") as source:
        return archive.decode_end(list(records(source))[-1].meta)


def paths() -> list[bytes]:
    """Prompts with common beginnings."""
    trunk = tokens(*range(1, 71))
    return [trunk, trunk[:400] + tokens(500, 501, 502), trunk[:80] + tokens(*range(600, 700))]


GROUPS = [(FULL,), (FULL, STATE), (FULL, WINDOW), (WINDOW,)]


@pytest.mark.parametrize("groups", GROUPS)
async def test_a_cache_is_served_by_another_host(tmp_path: Path, groups: tuple[GroupSpec, ...]) -> None:
    """Every branch, from host and disk alike, groups of every kind; what was imported is durable there too."""
    states = (wire.Want(1, np.array([9, 69], "<i4").tobytes()),) if STATE in groups else ()
    async with storing(tmp_path / "a", host=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec(groups))
        for n, keys in enumerate(paths()):
            await engine.put(keys, wants=states if n == 0 else ())
        await quiet(store)
        served = [await engine.get(keys) for keys in paths()]
        assert served[0] == 70
        drop_host(store)
        await engine.get(paths()[0])  # some is in host, the rest on disk only
        (tmp_path / "file").write_bytes(await exported(store, wire.Prompt()))
        engine.leave()
        await quiet(store)
        assert idle(store) == []
    async with storing(tmp_path / "b", host=16 * MIB) as store:
        said = await imported(store, tmp_path / "file")
        assert set(said) == {"stored"}
        engine = Engine(store)
        await engine.open(spec(groups))
        assert [await engine.get(keys) for keys in paths()] == served
        assert await imported(store, tmp_path / "file") == {"known": said["stored"]}
        engine.leave()
        await quiet(store)
        assert idle(store) == []
    async with storing(tmp_path / "b", host=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec(groups))
        assert [await engine.get(keys) for keys in paths()] == served


async def test_pages_that_only_a_device_has_are_exported(tmp_path: Path) -> None:
    """They are brought to host first: of a prefix or the whole cache, the file has them all."""
    device = DeviceMemory(HostDevice, 16 << 12, slab_bytes=4 << 12)
    async with storing(None, device=device) as store:
        engine = Engine(store)
        await engine.open(spec())
        keys = tokens(*range(8))
        assert await engine.put(keys) == 8
        for n, of in enumerate([wire.Prompt(), wire.Prompt(tokens=keys)]):
            assert store.parts.space.evict(store.parts.host.pools[0], [8])
            assert next(iter(store.parts.caches.values())).index.copies == [8, 0, 0, 0]
            (tmp_path / str(n)).write_bytes(await exported(store, of))
        engine.leave()
        await quiet(store)
        assert idle(store) == []
    for n in range(2):
        assert ended(tmp_path / str(n)) == archive.End(8, 0)
        async with storing(None) as store:
            assert await imported(store, tmp_path / str(n)) == {"stored": 8}


async def test_what_cannot_be_read_ends_its_path_in_the_file_and_is_counted(tmp_path: Path) -> None:
    """The device has pages in the middle of a path and host has no room: the file has what is before them, alone."""
    device = DeviceMemory(HostDevice, 16 << 12, slab_bytes=4 << 12)
    async with storing(None, host=16 << 12, device=device, cap=1.0) as store:
        engine, other = Engine(store), Engine(store, "other", pid=2)
        await engine.open(spec())
        await other.open(spec())
        other.mapped = False
        keys = tokens(*range(10))
        assert await engine.put(keys[: 8 * 8]) == 8
        assert await engine.put(keys, start=8) == 2
        cache = next(iter(store.parts.caches.values()))
        top = next(node for node in cache.index.walk() if node.live == 8)
        cache.release(cache.index.drop(top, 4, 8, Tier.HOST), None)
        held = await engine.call(wire.Acquire((await engine.match(keys)).handle))
        assert held.pages == 10
        taken = await other.reserve(tokens(*range(50, 90)))
        assert taken.refused == Code.NO_SPACE
        (tmp_path / "file").write_bytes(await exported(store, wire.Prompt()))
        await engine.call(wire.Release(held.lease))
        await other.call(wire.Abort(taken.reservation))
    assert ended(tmp_path / "file") == archive.End(4, 6)
    async with storing(None) as store:
        assert await imported(store, tmp_path / "file") == {"stored": 4}


async def test_a_prefix_alone_is_exported(tmp_path: Path) -> None:
    """Its pages and no others."""
    async with storing(None, host=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec())
        for keys in paths():
            await engine.put(keys)
        (tmp_path / "file").write_bytes(await exported(store, wire.Prompt(tokens=paths()[1])))
    async with storing(None, host=16 * MIB) as store:
        assert await imported(store, tmp_path / "file") == {"stored": 53}
        engine = Engine(store)
        await engine.open(spec())
        assert [await engine.get(keys) for keys in paths()] == [50, 53, 10]


async def test_a_keyed_cache_is_carried_key_by_key(tmp_path: Path) -> None:
    """Opaque keys, groups and holes included."""
    keyed = spec((FULL, FULL), key_bytes=16)
    keys = b"".join(bytes([n]) * 16 for n in range(10))

    async with storing(tmp_path / "a", host=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(keyed)
        await engine.put_keys(keys, 1)
        await quiet(store)
        drop_host(store)
        (tmp_path / "file").write_bytes(await exported(store, wire.Prompt()))
    async with storing(tmp_path / "b", host=16 * MIB) as store:
        assert await imported(store, tmp_path / "file") == {"stored": 10}
        engine = Engine(store)
        await engine.open(keyed)
        got = await engine.call(wire.AcquireKeys(engine.opened.cache, 1, keys))
        for items in got.items:
            engine.verify(keys, items)
        assert got.pages == 10
        assert set((await engine.call(wire.Exists(engine.opened.cache, 0, keys))).states) == {0}


async def whole_file(tmp_path: Path) -> bytes:
    """An export of one path of 70 pages, in two runs."""
    async with storing(None, host=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec())
        await engine.put(paths()[0])
        raw = await exported(store, wire.Prompt())
    (tmp_path / "file").write_bytes(raw)
    return raw


async def test_no_single_damaged_byte_serves_wrong_kv(tmp_path: Path) -> None:
    """A byte flipped anywhere, or the file cut off anywhere: good pages are served right, the rest are misses."""
    raw = await whole_file(tmp_path)
    rng = np.random.default_rng(1)
    total = set()
    for round_ in range(60):
        at = int(rng.integers(len(raw)))
        hurt = bytearray(raw)
        hurt[at] ^= 1 << int(rng.integers(8))
        bad = bytes(hurt if round_ % 3 else raw[:at])
        (tmp_path / "hurt").write_bytes(bad)
        async with storing(None, host=16 * MIB) as store:
            engine = Engine(store)
            await engine.open(spec())
            try:
                said = await imported(store, tmp_path / "hurt")
            except KvtierError as exc:
                assert exc.code == Code.BAD_REQUEST
                continue
            stored = said.get("stored", 0)
            total.add(stored)
            assert await engine.get(paths()[0]) == stored
            engine.leave()
            assert idle(store) == []
    assert len(total) > 5


async def test_a_file_of_other_weights_is_refused_by_name(tmp_path: Path) -> None:
    """After a reset here, or there, the epochs differ: no page is taken."""
    await whole_file(tmp_path)
    async with storing(None, host=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec())
        engine.opened = await engine.call(wire.Reset(engine.opened.cache))
        with pytest.raises(KvtierError) as caught:
            await imported(store, tmp_path / "file")
        assert caught.value.field == "epoch"
        assert await engine.get(paths()[0]) == 0


async def test_a_record_of_another_file_is_not_taken(tmp_path: Path) -> None:
    """Spliced between files of different caches, a run is damage; the identity is part of every record's check."""
    raw = await whole_file(tmp_path)
    async with storing(None, host=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec(model="another"))
        await engine.put(paths()[0])
        other = await exported(store, wire.Prompt())
    cut = raw.index(archive.MARK, 8)
    (tmp_path / "spliced").write_bytes(raw[:cut] + other[other.index(archive.MARK, 8) :])
    async with storing(None, host=16 * MIB) as store:
        assert await imported(store, tmp_path / "spliced") == {}


async def test_a_file_of_a_later_format_is_refused_by_name(tmp_path: Path) -> None:
    """The number is the first field of every format's header."""
    await whole_file(tmp_path)
    with (tmp_path / "file").open("rb") as source:
        meta = next(records(source)).meta
    fields = msgspec.msgpack.decode(meta)
    fields[0] = 9
    body = msgspec.msgpack.encode(fields)
    start = archive.MARK + struct.pack("<IIQ", archive.HEADER, len(body), 0)
    check = struct.pack("<Q", xxhash.xxh3_64_intdigest(start + body))
    (tmp_path / "later").write_bytes(start + check + body)
    async with storing(None, host=16 * MIB) as store:
        with pytest.raises(KvtierError, match="format 9") as caught:
            await imported(store, tmp_path / "later")
        assert caught.value.code == Code.VERSION


async def test_pages_without_room_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine holds the host arena: what fits is served, the rest is counted, nothing hangs or leaks."""
    await whole_file(tmp_path)
    async with storing(None, host=MIB // 4, cap=1.0) as store:
        engine = Engine(store)
        await engine.open(spec())
        await engine.reserve(tokens(*range(9000, 9030)))
        monkeypatch.setattr(imports, "ROOM_S", 0.05)
        pages = await imported(store, tmp_path / "file")
        assert sum(pages.values()) == 70
        assert 0 < pages["stored"] < 70
        assert await engine.get(paths()[0]) == pages["stored"]
        engine.leave()
        assert idle(store) == []


async def test_what_engines_store_meanwhile_stays(tmp_path: Path) -> None:
    """An engine that reserved the same pages commits after the import: one wins, both are right."""
    await whole_file(tmp_path)
    async with storing(tmp_path / "b", host=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec())
        reserved = await engine.reserve(paths()[0])
        assert await imported(store, tmp_path / "file") == {"stored": 70}
        engine.write(paths()[0], reserved)
        await engine.call(wire.Commit(reserved.reservation, 0, reserved.pages))
        assert await engine.get(paths()[0]) == 70
        engine.leave()
        await quiet(store)
        assert idle(store) == []


async def test_pages_that_a_match_joins_meanwhile_are_in_the_file(tmp_path: Path) -> None:
    """A path of many short nodes becomes one between two calls, and a branch of it stays: the file has every page."""
    keys, branch = tokens(*range(32)), tokens(0, 1, 50, 51)
    async with storing(None, host=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec())
        for pages in range(1, 33):
            assert await engine.put(keys[: 8 * pages]) == pages
        assert await engine.put(branch) == 4
        nodes = next(iter(store.parts.caches.values())).index.nodes
        number = (await call(store, wire.Export(wire.Prompt()))).data["export"]
        raw = (await call(store, wire.ExportNext(number))).data
        assert await engine.get(keys) == 32
        assert next(iter(store.parts.caches.values())).index.nodes == nodes - 29
        raw += await rest(store, number)
        (tmp_path / "file").write_bytes(raw)
    assert ended(tmp_path / "file") == archive.End(34, 0)
    async with storing(None, host=16 * MIB) as store:
        assert await imported(store, tmp_path / "file") == {"stored": 34}
        engine = Engine(store)
        await engine.open(spec())
        assert [await engine.get(keys), await engine.get(branch)] == [32, 4]


async def test_an_import_that_stops_half_way_lets_go(tmp_path: Path) -> None:
    """Slots of the run that was arriving return; the pages before stay."""
    await whole_file(tmp_path)
    async with storing(None, host=16 * MIB) as store:
        with (tmp_path / "file").open("rb") as source:
            found = records(source)
            number = (await call(store, wire.Import(next(found).meta))).data["import"]
            run = next(found)
            await call(store, wire.ImportRun(number, run.meta))
            await call(store, wire.ImportData(number, bytes(10_000)))
        store.visits.end(number)
        assert idle(store) == []
        with pytest.raises(KvtierError) as caught:
            await call(store, wire.ImportData(number, b"x"))
        assert caught.value.code == Code.UNKNOWN


async def test_exports_are_few_at_a_time(tmp_path: Path) -> None:
    """One too many is refused by name; ended ones make room."""
    async with storing(None, host=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec())
        await engine.put(tokens(1, 2))
        numbers = [(await call(store, wire.Export(wire.Prompt()))).data["export"] for _ in range(8)]
        with pytest.raises(KvtierError) as caught:
            await call(store, wire.Export(wire.Prompt()))
        assert caught.value.code == Code.BUSY
        await call(store, wire.ExportEnd(numbers[0]))
        await call(store, wire.Export(wire.Prompt()))


async def test_an_import_that_is_refused_holds_nothing(tmp_path: Path) -> None:
    """One too many: once the others have ended their caches, and that of the refused one, are forgotten."""
    async with storing(None) as store:

        def head(n: int) -> bytes:
            return msgspec.msgpack.encode(archive.header(spec(model=f"m{n}"), "uid:0", 0))

        numbers = [(await call(store, wire.Import(head(n), ""))).data["import"] for n in range(8)]
        with pytest.raises(KvtierError) as caught:
            await call(store, wire.Import(head(8), ""))
        assert caught.value.code == Code.BUSY
        for number in numbers:
            await call(store, wire.ImportEnd(number))
        assert store.parts.caches == {}


async def test_rot_found_by_an_export_is_left_out(tmp_path: Path) -> None:
    """A copy on disk that is not what was stored ends its path in the file; it is counted, and cut here."""
    async with storing(tmp_path / "a", host=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec())
        await engine.put(paths()[0])
        await quiet(store)
        drop_host(store)
        needle = content(paths()[0][: 8 * 40], 0, engine.opened.groups[0].item_bytes)[:2000].tobytes()
        extents = tmp_path / "a" / "extents"
        raw = extents.read_bytes()
        with extents.open("r+b") as file:
            file.seek(raw.index(needle))
            file.write(b"rot")
        (tmp_path / "file").write_bytes(await exported(store, wire.Prompt()))
        assert store.parts.counts["load_checksum"] == 1
    assert ended(tmp_path / "file") == archive.End(39, 31)
    async with storing(None, host=16 * MIB) as store:
        assert await imported(store, tmp_path / "file") == {"stored": 39}


# -- by kvtierctl ----------------------------------------------------------------------------------------------------


def ctl(daemon: Daemon, *words: object) -> Result:
    """Run kvtierctl."""
    where = str(daemon.socket.with_name("admin.sock"))
    return CliRunner().invoke(main, ["--socket", where, *map(str, words)], env={"COLUMNS": "200"})


def said(result: Result, code: int = 0) -> dict[str, Any]:
    """What --json printed."""
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_kvtierctl_carries_a_cache_between_daemons(tmp_path: Path) -> None:
    """Export, import, and an engine of the other daemon is served; a damaged copy says what it lacks."""
    prompt = np.arange(400)
    keys = page_keys(SPEC, prompt)
    data = np.random.default_rng(1).integers(0, 256, (100, 4096), np.uint8)
    file = tmp_path / "cache.kv"
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with Daemon(tmp_path / "a", host="64MiB", disk="128MiB") as a, Client(a.socket, instance="e") as client:
        cache = client.open(SPEC)
        with cache.match(keys).reserve(0, 100) as reserved:
            for page in range(100):
                reserved.write(0, page, data[page])
            assert reserved.commit() == 100
        (tmp_path / "a" / "precious").write_text("of somebody else")
        (tmp_path / "cache.kv.part").symlink_to(tmp_path / "a" / "precious")
        done = said(ctl(a, "export", file, "--cache", cache.cache_id.hex()[:8], "--json"))
        assert (tmp_path / "a" / "precious").read_text() == "of somebody else"
        assert (done["pages"], done["lost"], done["file_bytes"]) == (100, 0, file.stat().st_size)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        before = file.read_bytes()
        assert ctl(a, "export", file, "--cache", "zz").exit_code == 1
        assert file.read_bytes() == before
        nowhere = ctl(a, "export", tmp_path / "no" / "where.kv", "--cache", cache.cache_id.hex()[:8])
        assert (nowhere.exit_code, "that can be written" in nowhere.output) == (1, True)
        assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "cache.kv"}
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "stdout").symlink_to(tmp_path / "pipe")
        for special in ("pipe", "stdout"):  # as /dev/null, which root would take from everybody
            refused = ctl(a, "export", tmp_path / special, "--cache", cache.cache_id.hex()[:8])
            assert (refused.exit_code, "expected a regular file" in refused.output) == (1, True)
        assert (tmp_path / "pipe").is_fifo()
        (tmp_path / "latest").symlink_to(file)
        file.write_bytes(b"old")
        assert (
            said(ctl(a, "export", tmp_path / "latest", "--cache", cache.cache_id.hex()[:8], "--json"))["pages"] == 100
        )
        assert ((tmp_path / "latest").is_symlink(), len(file.read_bytes())) == (True, len(before))
    with Daemon(tmp_path / "b", host="64MiB", disk="128MiB") as b, Client(b.socket, instance="e", verify="always") as e:
        with Admin(b.socket.with_name("admin.sock"), 20.0) as admin:
            (tmp_path / "cut.kv").write_bytes(before)
            with (tmp_path / "cut.kv").open("rb") as source:
                head, run = list(records(source))[:2]
                number = int(admin.ask(wire.Import(head.meta, ""), wire.Info).data["import"])
                os.truncate(source.name, run.payload + 5000)
                with pytest.raises(KvtierError, match=r"cut\.kv: expected a file that stays whole"):
                    _send(admin, number, source, run)
        assert "scope: expected uid:N" in ctl(b, "import", file, "--scope", "1000").output
        hurt = bytearray(before)
        hurt[150_000] ^= 1
        (tmp_path / "hurt.kv").write_bytes(hurt)
        part = said(ctl(b, "import", tmp_path / "hurt.kv", "--json"), 1)
        assert part["stored"] == 150_000 // 4096
        assert part["refused"] == {"checksum": 64 - part["stored"], "parent": 36}
        rest = said(ctl(b, "import", file, "--json"))
        assert rest["stored"] == 100
        with e.open(SPEC).match(keys).acquire(wait_ms=5000) as lease:
            out = np.empty(4096, np.uint8)
            assert lease.pages == 100
            for page in range(100):
                assert lease.read(0, page, out)
                assert np.array_equal(out, data[page])
        (tmp_path / "none.kv").write_bytes(b"something else")
        assert "expected an export file" in ctl(b, "import", tmp_path / "none.kv").output
        assert not b.broken_invariants()


def test_an_export_or_import_that_is_interrupted_amid_a_request_makes_room_for_the_next_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the eight that there may be none is left, and the daemon is as it was."""
    file, ask = tmp_path / "cache.kv", Admin.ask

    def interrupted(self: Admin, message: wire.Message, reply: type[wire.Message]) -> Any:
        if isinstance(message, wire.ExportNext | wire.ImportData):
            self._sock.sendall(wire.request_frame(message, 99))
            raise KeyboardInterrupt
        return ask(self, message, reply)

    with Daemon(tmp_path, host="64MiB", disk="128MiB") as daemon, Client(daemon.socket, instance="e") as client:
        cache, keys = client.open(SPEC), page_keys(SPEC, np.arange(400))
        with cache.match(keys).reserve(0, 100) as reserved:
            assert reserved.write_pages(0, 0, np.ones((100, 4096), np.uint8))
            assert reserved.commit() == 100
        of = ["--cache", cache.cache_id.hex()[:8]]
        assert ctl(daemon, "export", file, *of).exit_code == 0
        with file.open("rb") as source:
            header = next(records(source)).meta
        with monkeypatch.context() as patched:
            patched.setattr(Admin, "ask", interrupted)
            for words in (("export", tmp_path / "other.kv", *of), ("import", file, "--scope", "uid:1")):
                assert "Aborted" in ctl(daemon, *words).output
        with Admin(daemon.socket.with_name("admin.sock"), 20.0) as admin:
            for _ in range(8):
                admin.ask(wire.Import(header, ""), wire.Info)
        assert not daemon.broken_invariants()
