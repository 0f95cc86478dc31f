"""The tier's directory: private, on the device, and used by one process at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kvtier.types import Code, KvtierError


def claim(path: Path) -> int:
    """Make the directory private and lock it; the descriptor holds the lock. Raises busy, naming the holder."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, 20, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise KvtierError(Code.BUSY, f"the disk tier {path} is in use by process {holder}", "disk.path") from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def sync_names(*folders: Path) -> None:
    """Names created in these directories survive a power cut once this returns."""
    for folder in folders:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
