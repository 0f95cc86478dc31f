"""The catalogue: which runs are stored, in an LMDB that was read through in a child process before it is trusted here.

Writes come from one OS thread; reads may come from others, in transactions that end before the call returns.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from time import monotonic, sleep
from typing import Final, TypeVar

import lmdb

from kvtier.tiers.aside import asides, clear_way, remove, set_aside
from kvtier.tiers.records import (
    FORMAT,
    VERSION_KEY,
    CacheRecord,
    Change,
    Damaged,
    Version,
    decode_cache,
    decode_number,
    decode_version,
    encode_version,
)
from kvtier.tiers.scan import MAX_DBS, scan
from kvtier.tiers.upgrade import OLDEST, ROOM, upgrade

log = logging.getLogger("kvtier.disk")

MAP_BYTES: Final = 64 << 20
PANIC_S: Final = 0.5
"""So long a read waits for a catalogue that has to be opened again, which takes moments."""
T = TypeVar("T")
NAMES: Final = (b"meta", b"caches", b"epochs", b"runs", b"live")


class Catalogue:
    """An open catalogue directory."""

    def __init__(self, path: Path, slab_bytes: int, *, limit_bytes: int, sync: bool, clean: bool = False) -> None:
        self.path = path
        self._sync = sync
        self._limit = limit_bytes
        self._remap = threading.Lock()  # no transaction survives a change of the map's size
        self._env: lmdb.Environment
        self._dbs: dict[bytes, lmdb._Database]
        self._shut = False
        """Whether it had to be closed and could not be opened again so far."""
        self._unnamed = False
        self.version: Version
        """Slab size of this directory (as asked for when new) and the next cache number."""
        self.set_aside = _set_aside_unless_sound(path, clean)
        """Whether a catalogue was found here that could not be used."""
        path.mkdir(mode=0o700, exist_ok=True)
        self.drop_fresh()
        self._open(room=ROOM)
        try:
            if upgrade(self._env, self._dbs):
                self._env.sync(True)
            self.version = self._settle_version(slab_bytes)
        except BaseException:
            self._env.close()
            raise

    def _open(self, room: int = 2) -> None:
        """Open it with a map of so many times its size."""
        data = self.path / "data.mdb"
        have = data.stat().st_size if data.exists() else 0
        env = lmdb.open(
            str(self.path), map_size=max(MAP_BYTES, room * have), max_dbs=MAX_DBS, mode=0o600,
            sync=self._sync, metasync=self._sync,
        )  # fmt: skip
        try:
            env.reader_check()
            dbs = {name: env.open_db(name) for name in NAMES}
        except BaseException:
            env.close()
            raise
        self._env, self._dbs, self._shut = env, dbs, False

    @contextlib.contextmanager
    def _closed(self) -> Iterator[None]:
        """Inside, nobody has the file. It is open again after that, or whoever needs it next opens it."""
        with self._remap:
            self._shut = True
            self._env.close()
            try:
                yield
            finally:
                self._open()

    def _ready(self) -> None:
        """Open it where that failed before; with `_remap` held. Raises lmdb.Error, OSError."""
        if self._shut:
            self._open()

    @contextlib.contextmanager
    def _read(self) -> Iterator[lmdb.Transaction[memoryview]]:
        """A transaction to read in. Raises lmdb.Error, OSError.

        Once a meta page could not be written LMDB refuses even reads, until the writing thread has opened it again.
        """
        until = monotonic() + PANIC_S
        while True:
            with self._remap:
                self._ready()
                try:
                    txn = self._env.begin(buffers=True)
                except lmdb.PanicError:
                    if monotonic() > until:
                        raise
                else:
                    with txn:
                        yield txn
                    return
            sleep(1e-3)

    def _settle_version(self, slab_bytes: int) -> Version:
        """The version on record; a new catalogue records the slab size asked for."""
        with self._env.begin(write=True) as txn:
            found = txn.get(VERSION_KEY, db=self._dbs[b"meta"])
            if found is None:
                version = Version(FORMAT, slab_bytes, 1)
                txn.put(VERSION_KEY, encode_version(version), db=self._dbs[b"meta"])
                return version
            return decode_version(found)

    def commit(self, changes: Iterable[Change]) -> None:
        """Apply all changes in one transaction, durable when this returns; raises lmdb.Error and changes nothing."""
        changes = list(changes)
        reopened = False
        self._name()
        with self._remap:
            self._ready()
        while True:
            try:
                with self._env.begin(write=True) as txn:
                    for db, key, value in changes:
                        if value is None:
                            txn.delete(key, db=self._dbs[db])
                        else:
                            txn.put(key, value, db=self._dbs[db])
            except lmdb.MapFullError:
                if not self._grow():
                    raise
            except lmdb.PanicError:
                if reopened:
                    raise
                self._reopen()
                reopened = True
            except lmdb.Error:
                self._revive()
                raise
            else:
                return

    def _grow(self) -> bool:
        """Double the map; False at the limit."""
        with self._remap:
            size = self._env.info()["map_size"]
            if size < self._limit:
                self._env.set_mapsize(min(2 * size, self._limit))
            return size < self._limit

    def _revive(self) -> None:
        """Open it again where LMDB refuses all further work: nobody can read until then, either."""
        with contextlib.suppress(lmdb.Error, OSError):
            try:
                self._env.begin().abort()
            except lmdb.PanicError:
                self._reopen()

    def _reopen(self) -> None:
        with self._closed():
            pass

    def caches(self) -> tuple[dict[int, CacheRecord], list[bytes]]:
        """All caches by number, and the keys of records that are damaged."""
        caches: dict[int, CacheRecord] = {}
        damaged: list[bytes] = []
        for key, value in self._all(b"caches"):
            try:
                caches[int.from_bytes(key, "big")] = decode_cache(key, value)
            except Damaged:
                damaged.append(key)
        return caches, damaged

    def epochs(self) -> dict[bytes, int]:
        """Epoch by base id."""
        return {key: decode_number(key, value) for key, value in self._all(b"epochs")}

    def _all(self, db: bytes) -> list[tuple[bytes, bytes]]:
        with self._read() as txn:
            return [(bytes(key), bytes(value)) for key, value in txn.cursor(self._dbs[db])]

    def run(self, key: bytes) -> bytes | None:
        """One run's value."""
        with self._read() as txn:
            return bytes(found) if (found := txn.get(key, db=self._dbs[b"runs"])) is not None else None

    def runs(
        self, after: bytes, count: int, read: Callable[[bytes, memoryview], T]
    ) -> list[tuple[bytes, T, bytes | None]]:
        """Up to `count` runs behind this key: key, what `read` makes of key and value, the mask's value if any."""
        with self._read() as txn:
            items = self._behind(txn, b"runs", after, count)
            found = [(key := bytes(name), read(key, value)) for name, value in items]
            masks = {bytes(key): bytes(mask) for key, mask in self._behind(txn, b"live", after, count)}
        return [(key, run, masks.get(key)) for key, run in found]

    def _behind(
        self, txn: lmdb.Transaction[memoryview], db: bytes, after: bytes, count: int
    ) -> Iterator[tuple[memoryview, memoryview]]:
        """Up to `count` keys and values of a database behind this key."""
        cursor = txn.cursor(self._dbs[db])
        return islice(cursor.iternext(), count) if cursor.set_range(after + b"\0") else iter(())

    def rewrite(self) -> None:
        """Put a compact copy in place of the file: what was deleted is in it no more. From the writing thread.

        Raises lmdb.Error, OSError; what is stored stays as it is, then and at any instant of a power cut.
        """
        fresh = self.path / "fresh"
        self.drop_fresh()
        fresh.mkdir(mode=0o700)
        with self._remap:
            self._ready()
        self._env.copy(str(fresh), compact=True)
        (fresh / "data.mdb").chmod(0o600)
        fd = os.open(fresh / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        with self._closed():
            (fresh / "data.mdb").replace(self.path / "data.mdb")
            self._unnamed = True
        self.drop_fresh()
        self._name()

    def drop_fresh(self) -> None:
        """Remove a copy that was not finished: it takes room that may be what was lacking."""
        shutil.rmtree(self.path / "fresh", ignore_errors=True)

    def drop_aside(self) -> None:
        """Remove catalogues that were set aside: they have records of what is deleted here. Raises OSError."""
        for old in asides(self.path):
            remove(old)
        sync_names(self.path.parent)

    def _name(self) -> None:
        """A rewritten file has its name for good before anything in it is called durable; raises OSError."""
        if self._unnamed:
            sync_names(self.path)
            self._unnamed = False

    def runs_at(self, prefix: bytes) -> list[tuple[bytes, bytes, bytes | None]]:
        """The same of every run whose key begins so."""
        out: list[tuple[bytes, bytes, bytes | None]] = []
        with self._read() as txn:
            cursor = txn.cursor(self._dbs[b"runs"])
            found = cursor.set_range(prefix)
            while found and (key := bytes(cursor.key())).startswith(prefix):
                mask = txn.get(key, db=self._dbs[b"live"])
                out.append((key, bytes(cursor.value()), None if mask is None else bytes(mask)))
                found = cursor.next()
        return out

    @property
    def free_bytes(self) -> int:
        """Bytes of the file that hold nothing."""
        with self._read() as txn:
            stats = [self._env.stat(), *(txn.stat(db) for db in self._dbs.values())]
        pages = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        return max(self.used_bytes - pages * stats[0]["psize"], 0)

    @property
    def used_bytes(self) -> int:
        """Bytes of the catalogue file."""
        return (self.path / "data.mdb").stat().st_size

    def close(self) -> None:
        """Close it; the writing thread must have ended."""
        self._env.close()


def sync_names(*folders: Path) -> None:
    """Names created in these directories survive a power cut once this returns."""
    for folder in folders:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _set_aside_unless_sound(path: Path, clean: bool) -> bool:
    """Rename a catalogue that cannot be used; whether one was."""
    moved = clear_way(path, stat.S_ISDIR)
    for name in ("data.mdb", "lock.mdb"):
        moved = clear_way(path / name, stat.S_ISREG) or moved
    if not (path / "data.mdb").exists():
        return moved
    verdict = scan(path, clean=clean)
    kind, reason = _judge(path) if verdict.ok else ("damaged", verdict.reason)
    if not kind:
        return moved
    aside = set_aside(path, kind)
    log.error(
        "the disk catalogue %s cannot be used (%s): set aside as %s, the tier starts empty", path, reason, aside.name
    )
    return True


def _judge(path: Path) -> tuple[str, str]:
    """Why a sound LMDB is still not ours to use: its kind and a reason, or two empty strings."""
    with lmdb.open(str(path), create=False, max_dbs=MAX_DBS, mode=0o600) as env:
        try:
            meta, epochs = env.open_db(b"meta", create=False), env.open_db(b"epochs", create=False)
        except lmdb.NotFoundError:
            return "foreign", "not a catalogue of kvtier"
        with env.begin() as txn:
            try:
                version = decode_version(txn.get(VERSION_KEY, default=b"", db=meta))
                if not OLDEST <= version.format <= FORMAT:
                    return f"format{version.format}", f"format {version.format}; this daemon reads {FORMAT}"
                for key, value in txn.cursor(epochs):
                    decode_number(key, value)  # starting an epoch over could serve what a reset has freed
            except Damaged:
                return "damaged", "its version or an epoch is damaged"
    return "", ""
