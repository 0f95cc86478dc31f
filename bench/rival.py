"""Other projects beside kvtier: each in a venv of its own, in a process that answers one JSON line a request."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from measure import RivalFailed

ROOT = Path(__file__).resolve().parent.parent
VENVS = ROOT / ".venv-rivals"
SCRIPTS = ROOT / "bench" / "rivals"
INSTALL_S = 900
START_S = 60
ANSWER_S = 120


class Rival(msgspec.Struct, frozen=True):
    """What to install and run."""

    name: str
    folder: str
    script: str
    pip: tuple[tuple[str, ...], ...] = ()
    """Arguments of one `pip install` each."""
    programs: tuple[str, ...] = ()
    """Programs that must be installed on the machine."""
    beside: str = ""
    """Site packages of another environment that its own come before."""

    def python(self) -> Path:
        """The interpreter of its venv, made on first use. Raises RivalFailed."""
        for program in self.programs:
            if shutil.which(program) is None:
                raise RivalFailed(f"{program} is not installed")
        if not self.pip:
            return Path(sys.executable)
        home = VENVS / self.folder
        stamp = home / "installed.json"
        python = home / "bin" / "python"
        wanted = json.dumps([self.pip, self.beside])
        if not (stamp.exists() and stamp.read_text() == wanted):
            print(f"installing {self.name} into {home.relative_to(ROOT)}", flush=True)
            self._install(home, python)
            stamp.write_text(wanted)
        return python

    def _install(self, home: Path, python: Path) -> None:
        try:
            base = getattr(sys, "_base_executable", sys.executable)  # a venv made from a venv sees neither's packages
            subprocess.run([ROOT / ".ci" / "make-venv", base, home], check=True, capture_output=True, text=True)
            if self.beside:
                site = next((home / "lib").glob("python*")) / "site-packages"
                (site / "beside.pth").write_text(f"import site; site.addsitedir({self.beside!r})\n")
            for packages in self.pip:
                command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S)
        except subprocess.CalledProcessError as exc:
            lines = (exc.stderr or exc.stdout or "").strip().splitlines() or ["no output"]
            raise RivalFailed(f"its installation failed: {lines[-1][:200]}") from None
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise RivalFailed(f"its installation failed: {exc}") from None


class Running:
    """A rival's process. A context manager; every wait is bounded."""

    def __init__(self, rival: Rival, *args: object) -> None:
        self.rival = rival
        self._log = VENVS / f"{rival.folder}.log"
        python = rival.python()
        self._log.parent.mkdir(exist_ok=True)
        env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, SCRIPTS / rival.script, *map(str, args)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=env,
            )
        try:
            self._answer(START_S)
        except BaseException:
            self.close()
            raise

    def ask(self, op: str, **args: Any) -> Any:
        """The answer of one operation; raises RivalFailed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([op, args]) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise RivalFailed(f"its process ended; see {self._log.relative_to(ROOT)}") from None
        return self._answer(ANSWER_S)

    def _answer(self, timeout_s: float) -> Any:
        out = self._process.stdout
        assert out is not None
        with selectors.DefaultSelector() as ready:
            ready.register(out, selectors.EVENT_READ)
            if not ready.select(timeout_s):
                raise RivalFailed(f"no answer within {timeout_s} s")
        line = out.readline()
        if not line:
            raise RivalFailed(f"its process ended; see {self._log.relative_to(ROOT)}")
        answer = json.loads(line)
        if "error" in answer:
            raise RivalFailed(answer["error"])
        return answer["value"]

    def close(self) -> None:
        """End it and whatever it started."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
