"""Reads a whole catalogue in a process of its own: a torn LMDB kills its reader, and that must not be the daemon.

`python -m kvtier.tiers.scan PATH [deep]` exits 0 when every byte could be read, else with the code below or by the
signal that LMDB died of. A deep scan first checks every structure without LMDB, its free list above all, which
LMDB itself believes unread. Nothing is changed: a trial transaction that deletes everything is aborted.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

import lmdb
from lmdb.verify import VerifyError, verify

PACKAGE: Final = Path(__file__).resolve().parents[2]
DAMAGED: Final = 3
MAX_DBS: Final = 16
SHALLOW: Final = 64 << 20


class Verdict(NamedTuple):
    """What the child found: `ok`, or why the catalogue must not be opened here."""

    ok: bool
    reason: str


def scan(path: Path, *, clean: bool = False) -> Verdict:
    """Run the child over a catalogue directory; never raises for what is in it.

    Large catalogues that were closed cleanly are spared the deep scan (0.5 s for a million pages).
    """
    size = sum(file.lstat().st_size for file in path.iterdir())
    limit_s = 60 + size / 20e6  # damage can make LMDB walk in circles
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")]))
    try:
        child = subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-m", "kvtier.tiers.scan", str(path), *([] if clean and size > SHALLOW else ["deep"])],
            env=env, capture_output=True, timeout=limit_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Verdict(False, f"not read through in {limit_s:.0f} s")
    if child.returncode == 0:
        return Verdict(True, "")
    if child.returncode < 0:
        return Verdict(False, f"its reader died of {signal.Signals(-child.returncode).name}")
    return Verdict(False, child.stderr.decode(errors="replace").strip()[-300:])


def read_through(path: str) -> int:
    """Touch every key and value, then try every page's write path; returns the number of entries."""
    env = lmdb.open(path, create=False, max_dbs=MAX_DBS, mode=0o600)
    with env.begin(write=True, buffers=True) as txn:
        names = [bytes(name) for name, _ in txn.cursor()]
        dbs = [db for name in names if (db := _open(env, txn, name)) is not None]
        entries = sum(_read(txn, db) for db in dbs)
        for db in dbs:
            cursor = txn.cursor(db)
            more = cursor.first()
            while more:
                more = cursor.delete()
        with contextlib.suppress(lmdb.MapFullError):  # the free list was walked all the same
            txn.put(b"\xff trial", bytes(3 * 4096))
        txn.abort()
    env.close()
    return entries


def inspect(path: str) -> None:
    """Check meta pages, trees and free list against each other; raises lmdb.CorruptedError."""
    try:
        problems = verify(path)  # type: ignore[no-untyped-call]
    except VerifyError as error:
        problems = [str(error)]
    if problems:
        raise lmdb.CorruptedError("; ".join(problems[:3]))


def _open(env: lmdb.Environment, txn: lmdb.Transaction, name: bytes) -> lmdb._Database | None:
    """A database inside; None where the name is that of a plain value: not ours, which the caller will tell."""
    try:
        return env.open_db(name, txn=txn, create=False)
    except lmdb.IncompatibleError:
        return None


def _read(txn: lmdb.Transaction, db: lmdb._Database) -> int:
    """Touch everything in a database; raises lmdb.Error where it is not what it counts, or out of order."""
    bound = txn.stat(db)["entries"]
    count, last = 0, b""
    there = txn.cursor(db)
    for item, value in txn.cursor(db):
        key, _ = bytes(item), bytes(value)
        if count and key <= last:
            raise lmdb.CorruptedError("keys out of order")
        if not there.set_key(key):  # the way down to it may be damaged where the way along is not
            raise lmdb.CorruptedError("a key that is not found")
        count, last = count + 1, key
        if count > bound:
            break
    if count != bound:
        raise lmdb.CorruptedError(f"{count} entries, {bound} expected")
    return count


def main() -> int:
    """Scan the directory named on the command line."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        if sys.argv[2:] == ["deep"]:
            inspect(sys.argv[1])
        read_through(sys.argv[1])
    except (lmdb.Error, OSError, ValueError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return DAMAGED
    return 0


if __name__ == "__main__":
    sys.exit(main())
