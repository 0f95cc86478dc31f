"""Listening on a path: one daemon per path, modes that hold from the first instant, accepts that never spin."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvtier.types import Code, KvtierError, bad

BACKLOG: Final = 1024
ACCEPTS: Final = 64
"""Connections accepted before the loop does something else."""
RETRY_S: Final = 0.2
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

_log = logging.getLogger("kvtier.server")


class PathLock:
    """Keeps a second daemon off a socket path, also while the first is stopped or its socket file was deleted."""

    def __init__(self, path: Path) -> None:
        """Take the lock beside `path`, making its folder; raises busy naming the daemon that has it, bad_request."""
        try:
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            self._fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as exc:
            raise bad("socket.path", f"a path in a folder that can be written to: {exc}", str(path)) from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise KvtierError(Code.BUSY, f"a daemon (pid {owner}) already serves {path}", "socket") from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, b"%d\n" % os.getpid(), 0)

    def release(self) -> None:
        """Let another daemon have the path."""
        os.close(self._fd)


def bind(path: Path, mode: int) -> socket.socket:
    """A listening socket at `path` with exactly `mode`; replaces a stale socket, refuses anything else there."""
    _clear(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        # The file takes the socket's own mode at bind, so that it is never open to more than `mode` allows.
        os.fchmod(sock.fileno(), mode & 0o600)
        sock.bind(str(path))
        path.chmod(mode)
        sock.listen(BACKLOG)
    except OSError as exc:
        sock.close()
        raise KvtierError(Code.IO, f"cannot listen on {path}: {exc}", "socket") from None
    return sock


def _clear(path: Path) -> None:
    """Remove a stale socket; raises busy when somebody answers there, bad_request when it is no socket."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise KvtierError(Code.BAD_REQUEST, f"{path} exists and is not a socket", "socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass
    raise KvtierError(Code.BUSY, f"another process already serves {path}", "socket")


class Listener:
    """Hands accepted non-blocking sockets to `accepted` until closed.

    `passed` is a socket that listens at `path` already and belongs to whoever passed it: its file stays.
    """

    def __init__(
        self,
        path: Path,
        mode: int,
        accepted: Callable[[socket.socket], None],
        passed: socket.socket | None = None,
    ) -> None:
        self.path = path
        self._accepted = accepted
        self._loop = asyncio.get_running_loop()
        self._sock = bind(path, mode) if passed is None else passed
        self._sock.setblocking(False)
        self._inode = path.lstat().st_ino if passed is None else 0
        self._retry: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        """Accept what waits; where descriptors have run out, come back later instead of spinning."""
        for _ in range(ACCEPTS):
            try:
                sock, _address = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as exc:
                if exc.errno in _EXHAUSTED:
                    _log.warning("cannot accept connections for now: %s", exc)
                    self._loop.remove_reader(self._sock.fileno())
                    self._retry = self._loop.call_later(RETRY_S, self._again)
                    return
                continue
            sock.setblocking(False)
            self._accepted(sock)

    def _again(self) -> None:
        """Accept again."""
        self._retry = None
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def close(self) -> None:
        """Stop listening and remove the path, unless it is no longer this listener's."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        with contextlib.suppress(FileNotFoundError):
            if self.path.lstat().st_ino == self._inode:
                self.path.unlink()
