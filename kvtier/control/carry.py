"""Verbs that carry KV between hosts: export to a file, import from one."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import click

from kvtier import archive, views, wire
from kvtier.control.address import prompt_or_cache
from kvtier.control.call import Admin, Call, Data, NoDaemon, verb
from kvtier.types import KvtierError, bad

CHUNK_BYTES: Final = 1 << 20
WAIT_S: Final = 60.0
"""A chunk may wait so long: for room in host, or behind what engines wait for."""


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@verb
@prompt_or_cache
def export(call: Call, show: bool, file: Path, of: wire.Prompt) -> Data:
    """Write what is cached of a prompt, or of a whole cache (--cache alone), to a file.

    The file has its name only when it is whole and on the device. It holds KV and token ids: mode 0600. A part of it
    may take a minute longer than --timeout, behind what engines wait for.
    """
    target = Path(os.path.realpath(file))  # what a link names goes, not the link
    if target.exists() and not target.is_file():
        raise bad(str(file), "a regular file, or a name that nothing has")
    part = target.with_name(target.name + ".part")
    with call.admin(WAIT_S) as admin:
        begun: Data = admin.ask(wire.Export(of), wire.Info).data
        try:
            with _naming(file):
                part.unlink(missing_ok=True)  # of an export that was cut off, or a trap of another user's
                out = open(part, "wb", opener=_private)  # noqa: SIM115 - its opener; closed below
            with out:
                size = _fetch(admin, int(begun["export"]), out)
                with _naming(file):
                    out.flush()
                    os.fsync(out.fileno())
            with _naming(file):
                part.replace(target)
                _sync(target.parent)
        except BaseException:
            part.unlink(missing_ok=True)
            _give_up(call, wire.ExportEnd(int(begun["export"])), wire.Ok)
            raise
    last = _last(file, begun["cache"])
    data = {"file": str(file), "cache": begun["cache"], "pages": last.pages, "lost": last.lost, "file_bytes": size}
    if show:
        views.one("exported", data)
    return data


def _give_up(call: Call, message: wire.Message, reply: type[wire.Message]) -> None:
    """End what was cut off, an interrupt amid a request too: on a connection of its own, where nothing is half said."""
    with contextlib.suppress(OSError, EOFError, KvtierError, NoDaemon), call.admin() as admin:
        admin.ask(message, reply)


@contextlib.contextmanager
def _naming(file: Path) -> Iterator[None]:
    """What goes wrong with the file is about the file, not about the daemon."""
    try:
        yield
    except OSError as exc:
        raise bad(str(file), f"a file that can be written ({exc.strerror})") from None


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL | os.O_NOFOLLOW, 0o600)


def _sync(folder: Path) -> None:
    """The new name survives a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _fetch(admin: Admin, number: int, out: BinaryIO) -> int:
    """Write an export's chunks; the bytes written."""
    size, last = 0, False
    while not last:
        chunk = admin.ask(wire.ExportNext(number), wire.Chunk)
        with _naming(Path(out.name)):
            size += out.write(chunk.data)
        last = chunk.last
    return size


def _last(file: Path, cache: str) -> archive.End:
    """What the end of a whole file says."""
    with file.open("rb") as source:
        for found in records(source):
            if found.kind == archive.END:
                return archive.decode_end(found.meta)
    raise bad(str(file), f"a whole export of cache {cache[:12]}")


# -- reading files -----------------------------------------------------------------------------------------------------


class Record(NamedTuple):
    """A record whose head and meta are right; `kind` 0: bytes that belong to no such record."""

    kind: int
    meta: bytes
    payload: int
    """Where its payload begins in the file."""
    payload_bytes: int


def records(source: BinaryIO) -> Iterator[Record]:
    """The records of a file, the header first; what is damaged is passed over and told as one Record of kind 0.

    Raises bad_request where the file has no header that is right, version where it is of another format.
    """
    size = os.fstat(source.fileno()).st_size
    first = _record(source, 0, b"", size)
    if first is None or first.kind != archive.HEADER:
        raise bad(source.name, "an export file of kvtier, with its header undamaged")
    yield first
    cache = archive.decode_header(first.meta).cache_id
    at, lost = first.payload + first.payload_bytes, False
    while at < size:
        found = _record(source, at, cache, size)
        if found is None:
            if not lost:
                yield Record(0, b"", at, 0)
            lost, at = True, _next_mark(source, at + 1, size)
            continue
        lost = False
        yield found
        at = found.payload + found.payload_bytes


def _record(source: BinaryIO, at: int, cache: bytes, size: int) -> Record | None:
    """The record at an offset; None where there is none that is right and whole."""
    source.seek(at)
    raw = source.read(archive.HEAD.size)
    head = archive.head(raw)
    if head is None:
        return None
    meta = source.read(head.meta_bytes)
    payload = at + archive.HEAD.size + head.meta_bytes
    if not archive.vouched(raw, meta, cache) or payload + head.payload_bytes > size:
        return None
    return Record(head.kind, meta, payload, head.payload_bytes)


def _next_mark(source: BinaryIO, at: int, size: int) -> int:
    """Where the next mark is; the size of the file where there is none."""
    while at < size:
        source.seek(at)
        block = source.read(CHUNK_BYTES + len(archive.MARK))
        found = block.find(archive.MARK)
        if found >= 0:
            return at + found
        at += CHUNK_BYTES
    return size


# -- importing ---------------------------------------------------------------------------------------------------------


@click.command("import")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--scope", default="", help="Trust scope to import into, such as uid:1000; the file's own by default.")
@verb
def import_(call: Call, show: bool, file: Path, scope: str) -> Data:
    """Bring the pages of an export file to this host: to host memory, and from there to disk.

    Every page is verified. Of a damaged file the good pages are imported; exit code 1 where some were not. A part of
    it may take a minute longer than --timeout: it waits for room.
    """
    with file.open("rb") as source, call.admin(WAIT_S) as admin:
        data = _carry(call, admin, source, scope)
    if show:
        views.one("imported", data)
    return data


def _carry(call: Call, admin: Admin, source: BinaryIO, scope: str) -> Data:
    """Send a file's records; what became of its pages."""
    found = records(source)
    begun: Data = admin.ask(wire.Import(next(found).meta, scope), wire.Info).data
    number = int(begun["import"])
    damaged, whole = 0, False
    try:
        for record in found:
            if record.kind == archive.RUN:
                _send(admin, number, source, record)
            elif record.kind == archive.END:
                whole = True
            else:
                damaged += 1
    except BaseException:
        _give_up(call, wire.ImportEnd(number), wire.Info)
        raise
    ended: Data = admin.ask(wire.ImportEnd(number), wire.Info).data
    pages: Counter[str] = Counter(ended["pages"])
    refused = {name: count for name, count in pages.items() if name not in {"stored", "known"}}
    return {
        "cache": begun["cache"],
        "stored": pages["stored"],
        "known": pages["known"],
        "refused": refused,
        "damaged_records": damaged,
        "whole": whole,
        "healthy": whole and not damaged and not refused,
    }


def _send(admin: Admin, number: int, source: BinaryIO, record: Record) -> None:
    """One run, and its payload where it is wanted."""
    if not admin.ask(wire.ImportRun(number, record.meta), wire.Info).data["wanted"]:
        return
    source.seek(record.payload)
    left = record.payload_bytes
    while left:
        data = source.read(min(left, CHUNK_BYTES))
        if not data:
            raise bad(source.name, "a file that stays whole while it is imported")
        admin.ask(wire.ImportData(number, data), wire.Info)
        left -= len(data)
