"""A systemd of the test's own: process 1 of fresh namespaces, in control groups of its own, with only our units."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

BINARY = Path("/lib/systemd/systemd")
TOOLS = ("unshare", "nsenter", "systemctl")
START_S = 20.0
BASE = ("basic", "default", "local-fs", "multi-user", "shutdown", "sockets", "sysinit", "umount")
"""Targets that units depend on by themselves."""
MOUNTS = """set -e
for each in /run /var/lib /var/cache; do mount -t tmpfs tmpfs $each; done
if [ -f /sys/fs/cgroup/cgroup.controllers ]; then
  mount -t cgroup2 cgroup2 /sys/fs/cgroup
else
  mount -t tmpfs tmpfs /sys/fs/cgroup
  mkdir /sys/fs/cgroup/systemd
  mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
fi
exec env -i PATH="$PATH" container=test SYSTEMD_UNIT_PATH="$1" SYSTEMD_LOG_TARGET=console \\
  "$2" --system --show-status=no
"""


def lacking() -> str:
    """What is missing to run one here; empty where nothing is."""
    if os.geteuid() != 0:
        return "needs root"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None] + [str(BINARY)] * (not BINARY.exists())
    return f"needs {', '.join(absent)}" if absent else ""


class UnableError(Exception):
    """Systemd does not come up here."""


class Systemd:
    """Runs until the end of the `with`; `units` is its only folder of units."""

    def __init__(self, home: Path, units: Path) -> None:
        self.units = units
        self._home = home
        self._groups: list[Path] = []

    def __enter__(self) -> Self:
        for name in BASE:
            (self.units / f"{name}.target").write_text("[Unit]\n")
        script = self._home / "start.sh"
        script.write_text(MOUNTS)
        self._make_groups()
        joins = "".join(f"echo $$ > {group}/cgroup.procs; " for group in self._groups)
        spaces = ["--kill-child", "--pid", "--mount", "--ipc", "--uts", "--cgroup", "--fork", "--mount-proc"]
        command = ["unshare", *spaces, "sh", str(script), str(self.units), str(BINARY)]
        self._log = (self._home / "systemd.log").open("wb")
        self._process = subprocess.Popen(
            ["sh", "-c", f'{joins}exec "$@"', "sh", *command],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
        )  # fmt: skip
        try:
            self._wait()
        except BaseException:
            self.close()
            raise
        return self

    def _make_groups(self) -> None:
        """A control group below this process's in every hierarchy that lets us make one."""
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines() if " cgroup" in line]
        own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        for _, names, path in own:
            for mount in mounts:
                kind, options = mount[mount.index("-") + 1], mount[-1].split(",")
                if (kind == "cgroup2") if not names else set(names.split(",")) <= set(options):
                    group = Path(mount[4]) / path.lstrip("/") / f"kvtier-test-{os.getpid()}"
                    with contextlib.suppress(OSError):
                        group.mkdir()
                        self._groups.append(group)
                        break

    def _wait(self) -> None:
        """Until it says that it runs; raises UnableError with its log."""
        end = time.monotonic() + START_S
        while self._process.poll() is None and time.monotonic() < end:
            children = psutil.Process(self._process.pid).children()
            if children and children[0].name() == "systemd":
                self._first = children[0].pid
                if self.ctl("is-system-running", check=False).strip() in {"running", "degraded"}:
                    return
            time.sleep(0.1)
        raise UnableError((self._home / "systemd.log").read_text()[-500:])

    def run(self, *command: str, check: bool = True) -> str:
        """What a command says within the namespaces."""
        words = ["nsenter", "-t", str(self._first), "--mount", "--pid", "--cgroup", "--", *command]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def ctl(self, *words: str, check: bool = True) -> str:
        """Systemctl."""
        return self.run("systemctl", "--no-pager", *words, check=check)

    def show(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.ctl("show", "--property", name, "--value", unit).strip()

    def close(self) -> None:
        """End it and all that it started, and remove the control groups."""
        first = getattr(self, "_first", 0)
        if first:
            with contextlib.suppress(ProcessLookupError):
                os.kill(first, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        self._process.wait()
        self._log.close()
        for group in self._groups:
            for folder in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
                _remove(folder)
            _remove(group)

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _remove(group: Path) -> None:
    """Remove a control group once its last process is reaped."""
    for _ in range(100):
        try:
            group.rmdir()
        except OSError:
            time.sleep(0.05)
        else:
            return
