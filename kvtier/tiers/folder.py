"""The tier's directory: private, on the device, and used by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import NamedTuple

from kvtier.tiers.catalogue import Catalogue, sync_names
from kvtier.tiers.cells import BLOCK, CELLS_PER_SLAB_MIN, Cells
from kvtier.tiers.extentfile import Calls, Extents
from kvtier.types import Code, KvtierError, bad


class Folder(NamedTuple):
    """An open directory: its lock, catalogue, extent file and the cells that the file has."""

    lock: int
    catalogue: Catalogue
    extents: Extents
    cells: Cells


def open_folder(
    path: Path, capacity_bytes: int, slab_bytes: int, *, direct: bool, sync: bool, calls: Calls | None
) -> Folder:
    """Open or make the directory; raises busy where another process has it, bad_request, OSError, lmdb.Error."""
    if capacity_bytes < CELLS_PER_SLAB_MIN * BLOCK:
        raise bad("disk.capacity_bytes", f"at least {CELLS_PER_SLAB_MIN * BLOCK}", capacity_bytes)
    slab_bytes = min(slab_bytes, capacity_bytes // CELLS_PER_SLAB_MIN) // BLOCK * BLOCK
    with contextlib.ExitStack() as undo:
        lock, clean = claim(path)
        undo.callback(os.close, lock)
        limit_bytes = (1 << 30) + capacity_bytes // 4
        catalogue = Catalogue(path / "catalogue", slab_bytes, limit_bytes=limit_bytes, sync=sync, clean=clean)
        undo.callback(catalogue.close)
        cells = Cells(capacity_bytes, catalogue.version.slab_bytes)
        extents = Extents(
            path / "extents", cells.total * BLOCK, catalogue.version.slab_bytes, direct=direct, calls=calls
        )
        undo.callback(extents.close)
        sync_names(path / "catalogue", path, path.parent)
        undo.pop_all()
    return Folder(lock, catalogue, extents, cells)


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
        holder = os.pread(fd, 20, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise KvtierError(Code.BUSY, f"the disk tier {path} is in use by process {holder}", "disk.path") from error
    clean = os.fstat(fd).st_size == 0
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd, clean


def let_go(lock: int, *, clean: bool) -> None:
    """Unlock the directory; where it is not left in good order the next to open it looks closely."""
    if clean:
        os.ftruncate(lock, 0)
    os.close(lock)
