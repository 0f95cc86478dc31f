"""The tier's directory: private, on the device, and used by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
from pathlib import Path
from typing import Final, NamedTuple

import lmdb

from kvtier.tiers.aside import clear_way
from kvtier.tiers.catalogue import Catalogue, sync_names
from kvtier.tiers.cells import BLOCK, CELLS_PER_SLAB_MIN, Cells
from kvtier.tiers.extentfile import Calls, Extents
from kvtier.types import Code, KvtierError, bad

log = logging.getLogger("kvtier.disk")

MARK_BYTES: Final = 20
"""Of the lock while somebody holds it; a process's number and blanks."""


class Folder(NamedTuple):
    """An open directory: its lock, catalogue, extent file, the cells that the file has, and how much was set aside."""

    lock: int
    catalogue: Catalogue
    extents: Extents
    cells: Cells
    set_aside: int


def open_folder(
    path: Path, capacity_bytes: int, slab_bytes: int, *, direct: bool, sync: bool, calls: Calls | None
) -> Folder:
    """Open or make the directory; raises busy where another process has it, bad_request where it cannot be used."""
    if capacity_bytes < CELLS_PER_SLAB_MIN * BLOCK:
        raise bad("disk.capacity_bytes", f"at least {CELLS_PER_SLAB_MIN * BLOCK}", capacity_bytes)
    slab_bytes = min(slab_bytes, capacity_bytes // CELLS_PER_SLAB_MIN) // BLOCK * BLOCK
    try:
        return _open(path, capacity_bytes, slab_bytes, direct=direct, sync=sync, calls=calls)
    except (OSError, lmdb.Error) as error:
        raise bad("disk.path", f"a folder that can be written to: {error}", str(path)) from error


def _open(path: Path, capacity_bytes: int, slab_bytes: int, *, direct: bool, sync: bool, calls: Calls | None) -> Folder:
    """What is of the wrong kind is set aside. Raises KvtierError, OSError, lmdb.Error."""
    with contextlib.ExitStack() as undo:
        moved = int(clear_way(path / "lock", stat.S_ISREG))
        lock, clean = claim(path)
        undo.callback(os.close, lock)
        limit_bytes = (1 << 30) + capacity_bytes // 4
        catalogue = Catalogue(path / "catalogue", slab_bytes, limit_bytes=limit_bytes, sync=sync, clean=clean)
        undo.callback(catalogue.close)
        cells = Cells(capacity_bytes, catalogue.version.slab_bytes)
        moved += clear_way(path / "extents", stat.S_ISREG) + catalogue.set_aside
        extents = Extents(
            path / "extents", cells.total * BLOCK, catalogue.version.slab_bytes, direct=direct, calls=calls
        )
        undo.callback(extents.close)
        sync_names(path / "catalogue", path, path.parent)
        undo.pop_all()
    return Folder(lock, catalogue, extents, cells, moved)


def claim(path: Path) -> tuple[int, bool]:
    """Make the directory private and lock it: the descriptor that holds the lock, and whether the last holder let go.

    Raises busy, naming the holder.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, MARK_BYTES, 0).decode(errors="replace").strip("\0 \n") or "unknown"
        os.close(fd)
        raise KvtierError(Code.BUSY, f"the disk tier {path} is in use by process {holder}", "disk.path") from error
    clean = os.fstat(fd).st_size == 0
    try:
        _mark(fd)
    except OSError:
        os.close(fd)
        raise
    return fd, clean


def _mark(lock: int) -> None:
    """Somebody has the directory, and says who where the file system has room for that; raises OSError."""
    os.ftruncate(lock, MARK_BYTES)  # no block is needed for a hole: what is stored is served from a full one, too
    with contextlib.suppress(OSError):
        os.pwrite(lock, f"{os.getpid()}\n".ljust(MARK_BYTES).encode(), 0)
    os.fsync(lock)  # else a power cut leaves it as the last holder did


def let_go(lock: int, *, clean: bool) -> None:
    """Unlock the directory; where it is not left in good order the next to open it looks closely."""
    try:
        if clean:
            os.ftruncate(lock, 0)
    except OSError:  # read-only since nobody knows when: it is as if the process had been killed
        log.warning("the disk tier cannot be marked as closed", exc_info=True)
    finally:
        os.close(lock)
