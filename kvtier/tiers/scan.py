"""Reads a whole catalogue in a process of its own: a torn LMDB kills its reader, and that must not be the daemon.

`python -m kvtier.tiers.scan PATH` exits 0 when every byte could be read, else with one of the codes below or by
the signal that LMDB died of. Nothing is changed: the trial write that walks the free list is aborted.
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

PACKAGE: Final = Path(__file__).resolve().parents[2]
DAMAGED: Final = 3
MAX_DBS: Final = 16


class Verdict(NamedTuple):
    """What the child found: `ok`, or why the catalogue must not be opened here."""

    ok: bool
    reason: str


def scan(path: Path) -> Verdict:
    """Run the child over a catalogue directory; never raises for what is in it."""
    size = sum(file.stat().st_size for file in path.iterdir())
    limit_s = 60 + size / 20e6  # damage can make LMDB walk in circles
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")]))
    try:
        child = subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-m", "kvtier.tiers.scan", str(path)],
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
    """Touch every key and value, then begin a write and abort it; returns the number of entries."""
    entries = 0
    env = lmdb.open(path, create=False, max_dbs=MAX_DBS, mode=0o600)
    with env.begin(buffers=True) as txn:
        for name in [bytes(name) for name, _ in txn.cursor()]:
            try:
                db = env.open_db(name, txn=txn, create=False)
            except lmdb.IncompatibleError:
                continue  # a plain value: not ours, for the caller to tell
            bound = txn.stat(db)["entries"]
            count = 0
            for count, (key, value) in enumerate(txn.cursor(db), 1):
                hash((bytes(key), bytes(value)))
                if count > bound:
                    raise lmdb.CorruptedError(f"more than the {bound} entries it counts")
            if count != bound:
                raise lmdb.CorruptedError(f"{count} entries, {bound} expected")
            entries += count
    with env.begin(write=True) as txn:
        with contextlib.suppress(lmdb.MapFullError):  # the free list was walked all the same
            txn.put(b"\xff trial", bytes(3 * 4096))
        txn.abort()
    env.close()
    return entries


def main() -> int:
    """Scan the directory named on the command line."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        read_through(sys.argv[1])
    except (lmdb.Error, OSError, ValueError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return DAMAGED
    return 0


if __name__ == "__main__":
    sys.exit(main())
