"""Real SGLang for tests: where its Python is, and an engine or its storage that is told what to do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any, Self

import pytest

import vllmkit

ROOT = vllmkit.ROOT
SIDE = ROOT / "tests" / "sglang_side"
PYTHON = Path(os.environ.get("KVTIER_SGLANG_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))
PAGE = 16
START_S = 600.0
"""SGLang's processes import for half a minute each on a machine that has nothing else to do."""

needs_sglang = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"no SGLang at {PYTHON}: `make engines`, or set KVTIER_SGLANG_PYTHON"
)


def environment(**more: str) -> dict[str, str]:
    """What a process with SGLang runs with."""
    return vllmkit.environment(PYTHONPATH=vllmkit.paths(SIDE, ROOT), **more)


def config(socket: Path, **extra: Any) -> dict[str, Any]:
    """What --hicache-storage-backend-extra-config takes."""
    return {
        "backend_name": "kvtier", "module_path": "kvtier.engines.sglang.hicache", "class_name": "KvtierHiCache",
        "interface_v1": 1, "prefetch_threshold": PAGE, "socket": str(socket), **extra,
    }  # fmt: skip


def make_model(folder: Path, kind: str = "llama", seed: int = 0) -> Path:
    """A model in a folder of its own."""
    command = [PYTHON, ROOT / "tests" / "vllm_side" / "models.py", folder, kind, str(seed)]
    subprocess.run(command, check=True, env=environment(), capture_output=True, timeout=vllmkit.START_S)
    return folder


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
        """Build the engine."""
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
