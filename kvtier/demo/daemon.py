"""A real kvtierd of the demo's own, on a temporary folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvtier.client import Client

COMMAND: Final = (sys.executable, "-m", "kvtier.daemon")
START_S: Final = 30.0
STOP_S: Final = 20.0


class Daemon:
    """Starts, kills and restarts kvtierd with its sockets, disk tier and log in `home`; a context manager."""

    def __init__(
        self,
        home: Path,
        *,
        host: str,
        disk: str,
        flags: Sequence[str] = (),
        env: dict[str, str] | None = None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """`host` and `disk` are sizes of the tiers, such as 64MiB; `flags` and `env` are more for the command."""
        self.home = home
        self.socket = home / "kvtierd.sock"
        self.log = home / "kvtierd.log"
        self._sizes = (host, disk)
        self.flags = ["--http-port=0", *flags]
        self._env = env or {}
        self._command = [*command]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers; raises RuntimeError with its log where it does not."""
        host, disk = self._sizes
        flags = [f"--socket-path={self.socket}", f"--host-bytes={host}", f"--disk-bytes={disk}"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [*self._command, *flags, f"--disk-path={self.home / 'disk'}", *self.flags],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment | self._env, cwd=self.home,
            )  # fmt: skip
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"kvtierd did not start:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        """Whether the serving loop answers a ping."""
        with Client(self.socket) as client:
            return client.ping()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    def broken_invariants(self) -> list[str]:
        """What `kvtierctl check` complains of."""
        command = [sys.executable, "-m", "kvtier.ctl", "--socket", str(self.socket.with_name("admin.sock")), "check"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)  # noqa: S603
        return (done.stdout + done.stderr).splitlines() if done.returncode else []

    def kill(self) -> None:
        """Kill -9, and reap."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> int:
        """SIGTERM, and the exit code; killed where it does not end in time (then the code is negative)."""
        if self._process is None:
            return 0
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.returncode

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self.running:
            self.stop()
