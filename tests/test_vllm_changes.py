"""Real vLLM engines whose weights change while they run: neither old nor new KV is taken for the other. Slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.demo.daemon import Daemon
from vllmkit import ATTACH, Engine, connector, make_model, needs_vllm, prompt, texts

pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and another of its kind."""
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "llama", "llama")
    make_model(folder / "other", "llama", seed=1)
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon."""
    (tmp_path / "home").mkdir()
    with Daemon(tmp_path / "home", host="256MiB", disk="256MiB") as running:
        yield running
        assert not running.broken_invariants()


def wait_for(true: Callable[[], bool]) -> None:
    """Wait until an engine finds what was saved."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_an_adapter_that_vllm_reads_again_from_other_files_is_not_shared(models: Path, home: Daemon, tmp_path: Path):
    """It had to make room for another, or is loaded in place: neither engine's KV is taken for the other files'.

    An engine that has read the new files alone shares them with none of what the first one computed.
    """
    options = {"model": models / "llama", "attach": connector(home.socket), "enable_lora": True, "max_lora_rank": 8,
               "max_loras": 1, "max_cpu_loras": 1}  # fmt: skip
    ask, longer = [prompt(200)], [prompt(200) + prompt(100, 5)]
    lora, other = make_model(tmp_path / "adapter", "adapter"), make_model(tmp_path / "other", "adapter", seed=2)
    with Engine(tmp_path / "log", **options) as engine:
        tuned = engine.generate(ask, lora=str(lora))
        wait_for(lambda: engine.again(ask, lora=str(lora))[0]["cached"] == 192)
        make_model(lora, "adapter", seed=1)
        engine.generate(ask, lora=str(other), number=2)  # the first one must go
        got = engine.again(longer, lora=str(lora))  # and is read again
        assert got[0]["cached"] == 0
        assert engine.again(longer, lora=str(lora))[0]["cached"] == 0
    with Engine(tmp_path / "log", **options) as engine:
        want = engine.generate(longer, lora=str(lora))
        assert want[0]["cached"] == 0
        assert texts(engine.again(ask, lora=str(lora))) != texts(tuned)
        wait_for(lambda: engine.again(ask, lora=str(lora))[0]["cached"] == 192)
        make_model(lora, "adapter")
        back = engine.again(ask, lora=str(lora), in_place=True)
        assert back[0]["cached"] == 0
        assert texts(back) == texts(tuned)


@pytest.mark.parametrize("attach", ATTACH)
def test_weights_that_are_loaded_in_place_are_noticed(models: Path, home: Daemon, tmp_path: Path, attach: str):
    """Nothing is stored until the engine is told, then its KV is its own; others keep what they share.

    Nor is anything found: vLLM's own host tier above the secondary one does keep old KV until then.
    """
    ask, late = [prompt(200)], [prompt(200, 9)]
    options = {"model": models / "llama", "attach": ATTACH[attach](home.socket)}
    with Engine(tmp_path / "log", **options) as engine:
        want = engine.generate(ask)
        wait_for(lambda: engine.again(ask)[0]["cached"] == 192)
        engine.tell("reload", model=str(models / "other"))
        for _ in range(3):
            changed = engine.again(late)
            assert attach == "tier" or changed[0]["cached"] == 0
        assert attach == "tier" or engine.again(ask)[0]["cached"] == 0
        assert engine.tell("reset", connector=True)
        assert engine.generate(late)[0]["cached"] == 0
        wait_for(lambda: engine.again(late)[0]["cached"] == 192)
        assert texts(engine.again(late)) == texts(changed)
    with Engine(tmp_path / "log", **options) as engine:
        got = engine.generate(ask + late)
        assert [each["cached"] for each in got] == [192, 0]
        assert texts(got[:1]) == texts(want)
        assert texts(got[1:]) != texts(changed)
