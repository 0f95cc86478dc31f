"""What runs beside the serving loop: systemd's watchdog, fed while the loop answers, and the HTTP process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvtier import wire
from kvtier.frames import Frames
from kvtier.types import bad

RESTART_S: Final = 5.0
FIRST_FD: Final = 3
"""Where systemd puts the first socket that it passes."""
_log = logging.getLogger("kvtier.daemon")


def notify(state: str) -> None:
    """Tell systemd, where it asks."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock, contextlib.suppress(OSError):
        sock.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)


def watchdog_s(env: Mapping[str, str] = os.environ) -> float:
    """Seconds within which systemd wants a word; 0 where it wants none of this process."""
    if env.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    text = env.get("WATCHDOG_USEC", "0")
    return int(text) / 1e6 if text.isdecimal() else 0.0


def passed_sockets(env: Mapping[str, str] = os.environ) -> dict[str, socket.socket]:
    """Listening sockets that systemd passed, by name; empty where it passed none to this process."""
    if env.get("LISTEN_PID") != str(os.getpid()):
        return {}
    names = env.get("LISTEN_FDNAMES", "").split(":")
    found = {}
    for number in range(int(env.get("LISTEN_FDS", "0"))):
        name = names[number] if number < len(names) else ""
        if name not in {"engine", "admin"}:
            raise bad(f"LISTEN_FDNAMES[{number}]", "engine or admin", name)
        os.set_inheritable(FIRST_FD + number, False)
        found[name] = socket.socket(fileno=FIRST_FD + number)
    return found


class Watchdog:
    """Pings the serving loop through a socket from a thread, and feeds systemd's watchdog with each answer.

    The connection is made once: a daemon that has run out of descriptors, or that drains, still answers on it.
    """

    def __init__(self, admin: Path, within_s: float) -> None:
        """`within_s`: see watchdog_s. Raises OSError where there is no admin socket."""
        self._within_s = within_s
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._sock.connect(str(admin))
        self._sock.settimeout(None)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-watchdog", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """One ping at a time: where the answer does not come, systemd hears nothing."""
        number = 0
        while not self._stopped.wait(self._within_s / 4):
            number += 1
            try:
                self._ping(number)
            except (OSError, EOFError):
                return
            notify("WATCHDOG=1")

    def _ping(self, number: int) -> None:
        """A round trip through the serving loop; raises OSError, EOFError."""
        self._sock.sendall(wire.request_frame(wire.Ping(), number))
        frames = Frames()
        while frames.next() is None:
            data = self._sock.recv(4096)
            if not data:
                raise EOFError
            frames.feed(data)

    def stop(self) -> None:
        """Ping no more."""
        self._stopped.set()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._sock.close()


class Companions:
    """Both of them, for a server that listens already."""

    def __init__(self, port: int, engine: Path, admin: Path, traced: str = "") -> None:
        """`port` 0: no HTTP is served; `traced`: where spans go, empty: nowhere. Without both there is no process."""
        self._command = [sys.executable, "-m", "kvtier.http", str(port), str(engine), str(admin), traced]
        self._http = asyncio.get_running_loop().create_task(self._keep()) if port or traced else None
        within_s = watchdog_s()
        self._watchdog = Watchdog(admin, within_s) if within_s else None

    async def _keep(self) -> None:
        """Start the HTTP process again when it ends; later, where the host has no room for one just now."""
        while True:
            began = time.monotonic()
            try:
                process = await asyncio.create_subprocess_exec(*self._command, stdin=asyncio.subprocess.PIPE)
            except OSError as exc:
                _log.warning("the HTTP process cannot be started, which is tried again: %s", exc)
                await asyncio.sleep(RESTART_S)
                continue
            try:
                code = await process.wait()
            except asyncio.CancelledError:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
                await process.wait()
                raise
            _log.warning("the HTTP process ended with code %d; it is started again", code)
            await asyncio.sleep(max(0.0, RESTART_S - (time.monotonic() - began)))

    async def stop(self) -> None:
        """End both."""
        if self._watchdog is not None:
            self._watchdog.stop()
        if self._http is not None:
            self._http.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._http
