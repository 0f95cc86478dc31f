"""Real SGLang for tests: where its Python is, and an engine or its storage that is told what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import pytest

import vllmkit
from kvtier.demo.daemon import Daemon

ROOT = vllmkit.ROOT
SIDE = ROOT / "tests" / "sglang_side"
PYTHON = Path(os.environ.get("KVTIER_SGLANG_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))
PAGE = 16
WHOLE = 192
"""Of a prompt of 200 tokens, what whole pages hold."""
START_S = 600.0
"""SGLang's processes import for half a minute each on a machine that has nothing else to do."""

needs_sglang = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"no SGLang at {PYTHON}: `make engines`, or set KVTIER_SGLANG_PYTHON"
)


def module(monkeypatch: pytest.MonkeyPatch, place: str) -> ModuleType:
    """A module of SGLang's below `sglang.srt`, made with all above it where it is not there."""
    parts = ["sglang", "srt", *place.split(".")]
    for depth in range(1, len(parts) + 1):
        path = ".".join(parts[:depth])
        monkeypatch.setitem(sys.modules, path, sys.modules.get(path, ModuleType(path)))
    return sys.modules[".".join(parts)]


def environment(**more: str) -> dict[str, str]:
    """What a process with SGLang runs with."""
    return vllmkit.environment(PYTHONPATH=vllmkit.paths(SIDE, ROOT), **more)


def config(socket: Path, **extra: Any) -> dict[str, Any]:
    """What --hicache-storage-backend-extra-config takes."""
    return {
        "backend_name": "kvtier", "module_path": "kvtier.engines.sglang.hicache", "class_name": "KvtierHiCache",
        "interface_v1": 1, "prefetch_threshold": PAGE, "socket": str(socket), **extra,
    }  # fmt: skip


def linker(socket: Path, **extra: Any) -> dict[str, Any]:
    """What --unified-cache-external-linker-config takes."""
    return {
        "linker": "KvtierLinker", "linker_module_path": "kvtier.engines.sglang.linker",
        "linker_extra_config": {"socket": str(socket), **extra},
    }  # fmt: skip


def make_model(folder: Path, kind: str = "llama", seed: int = 0) -> Path:
    """A model in a folder of its own."""
    command = [PYTHON, ROOT / "tests" / "vllm_side" / "models.py", folder, kind, str(seed)]
    subprocess.run(command, check=True, env=environment(), capture_output=True, timeout=vllmkit.START_S)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of full attention."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all tests, as an engine's processes take long to start."""
    with Daemon(tmp_path_factory.mktemp("home"), host="256MiB", disk="256MiB") as running:
        yield running
        assert running.stop() == 0, running.log.read_text()[-2000:]


class Engine(vllmkit.Engine):
    """SGLang in a process of its own that is told what to do; a context manager that ends it."""

    def __init__(self, log: Path, env: dict[str, str] | None = None) -> None:
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [PYTHON, SIDE / "engine.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                text=True, env=environment(**(env or {})), start_new_session=True,
            )  # fmt: skip

    def start(self, model: Path, config: dict[str, Any] | None, **options: Any) -> Self:
        """Build the engine; `config` is HiCache's, or `linker` among the options the linker's."""
        try:
            self.tell("start", wait_s=START_S, model=str(model), config=config, **options)
        except BaseException:
            self.kill()
            raise
        return self

    def storage(self, model: Path, config: dict[str, Any], **args: Any) -> Self:
        """Be the storage alone."""
        self.tell("storage", wait_s=START_S, model=str(model), config=config, args=args)
        return self

    def again(self, prompts: list[list[int]], **more: Any) -> list[dict[str, Any]]:
        """The same with SGLang's own caches forgotten."""
        assert self.tell("flush")["done"]
        return self.generate(prompts, **more)


def until(holds: Callable[[], bool], wait_s: float = 60.0) -> None:
    """Wait until something holds; a failure where it does not."""
    end = time.monotonic() + wait_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def spoil(home: Daemon) -> None:
    """Flip a bit in every 4 KiB of what is on disk."""
    with (home.home / "disk" / "extents").open("r+b") as file:
        size = file.seek(0, 2)
        for at in range(100, size, 4096):
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 4]))


def same(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> bool:
    """Tokens and logprobs are bit-identical."""
    return vllmkit.texts(got) == vllmkit.texts(want) and [g["logprobs"] for g in got] == [w["logprobs"] for w in want]
