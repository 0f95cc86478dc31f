"""Real vLLM engines for tests: where its Python is, models to run, and an engine that is told what to do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from engine_side.orders import ANSWER

ROOT = Path(__file__).resolve().parent.parent
SIDE = ROOT / "tests" / "vllm_side"
PYTHON = Path(os.environ.get("KVTIER_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
ORDERS = ROOT / "tests" / "engine_side"
"""What all engines' processes have in common."""
PAGE = 32
START_S = 240.0
ORDER_S = 120.0

needs_vllm = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"no vLLM at {PYTHON}: `make engines`, or set KVTIER_VLLM_PYTHON"
)


def prompt(tokens: int, seed: int = 7) -> list[int]:
    """A row of token ids that depends on the seed."""
    return [(i * seed + i * i // 7) % 290 + 3 for i in range(tokens)]


def connector(socket: Path, **extra: Any) -> dict[str, Any]:
    """Configuration that attaches KvtierConnector."""
    return {
        "kv_connector": "KvtierConnector", "kv_connector_module_path": "kvtier.engines.vllm.connector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": str(socket), **extra},
    }  # fmt: skip


def tier(socket: Path, host_bytes: int = 4 << 20, **extra: Any) -> dict[str, Any]:
    """Configuration that attaches KvtierSecondaryTier, below a host tier that works on a CPU."""
    kvtier = {"type": "KvtierSecondaryTier", "module_path": "kvtier.engines.vllm.tier", "socket": str(socket)}
    return {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec", "spec_module_path": "cpu_tiering", "cpu_bytes_to_use": host_bytes,
            "offload_prompt_only": False, "secondary_tiers": [kvtier | extra],
        },
    }  # fmt: skip


def kernels(socket: Path, **extra: Any) -> dict[str, Any]:
    """The connector, whose copies the device's operations do: here the CPU's, on the path that a GPU takes."""
    return connector(socket, copy="kernels", **extra)


ATTACH = {"connector": connector, "tier": tier}
EVERY = ATTACH | {"kernels": kernels}


def environment(**more: str) -> dict[str, str]:
    """What a process with vLLM runs with."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    return kept | {"PYTHONPATH": paths(ROOT, SIDE), "PYTHONDONTWRITEBYTECODE": "1"} | more


def paths(*folders: Path) -> str:
    """PYTHONPATH of an engine's process."""
    return os.pathsep.join(map(str, [*folders, ORDERS]))


def make_model(folder: Path, kind: str, seed: int = 0) -> Path:
    """A model in a folder of its own."""
    command = [PYTHON, SIDE / "models.py", folder, kind, str(seed)]
    subprocess.run(command, check=True, env=environment(), capture_output=True, timeout=START_S)
    return folder


class Engine:
    """A vLLM engine in a process of its own; a context manager that ends it."""

    def __init__(
        self, log: Path, model: Path, attach: dict[str, Any] | None, env: dict[str, str] | None = None,
        python: Path = PYTHON, **options: Any,
    ) -> None:  # fmt: skip
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                ["nice", python, SIDE / "engine.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                text=True, env=environment(**(env or {})), start_new_session=True,
            )  # fmt: skip
        more = {} if attach is None else {"kv_transfer_config": attach}
        try:
            self.tell("start", wait_s=START_S, model=str(model), **more, **options)
        except BaseException:
            self.kill()
            raise

    def order(self, do: str, **arguments: Any) -> None:
        """Tell it something and do not wait."""
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self, wait_s: float = ORDER_S) -> Any:
        """What it answers; killed, and a failure, where it does not in time."""
        late = threading.Timer(wait_s, self.kill)
        late.start()
        try:
            for line in self.process.stdout:
                if line.startswith(ANSWER):
                    answer = json.loads(line.removeprefix(ANSWER))
                    assert "error" not in answer, answer["trace"]
                    return answer["ok"]
        finally:
            late.cancel()
        raise AssertionError(f"the engine ended or hung:\n{self.log.read_text(errors='replace')[-3000:]}")

    def tell(self, do: str, *, wait_s: float = ORDER_S, **arguments: Any) -> Any:
        """Tell it something; its answer."""
        self.order(do, **arguments)
        return self.answer(wait_s)

    def generate(self, prompts: Sequence[list[int]], **more: Any) -> list[dict[str, Any]]:
        """Greedy continuations."""
        return self.tell("generate", prompts=list(prompts), **more)

    def again(self, prompts: Sequence[list[int]], **more: Any) -> list[dict[str, Any]]:
        """The same with vLLM's own prefix cache forgotten."""
        assert self.tell("reset")
        return self.generate(prompts, **more)

    def kill(self) -> None:
        """Kill -9, with its workers."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.stdin.close()
            try:
                self.process.wait(60)
            finally:
                self.kill()


def texts(answers: Sequence[dict[str, Any]]) -> list[list[int]]:
    """What was generated."""
    return [answer["tokens"] for answer in answers]
