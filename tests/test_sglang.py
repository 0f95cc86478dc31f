"""Real SGLang on kvtier: its host pools' pages bit-identical, its answers those of recomputing, never foreign KV."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier import wire
from kvtier.control.call import Admin
from kvtier.demo.daemon import Daemon
from sglangkit import PAGE, WHOLE, Engine, config, home, model, needs_sglang, same, spoil, until
from vllmkit import prompt, texts

__all__ = ["home", "model"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), needs_sglang]


@pytest.fixture(scope="module")
def storage(home: Daemon, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """SGLang's host pools and its storage factory, without an engine."""
    with Engine(tmp_path_factory.mktemp("storage") / "log") as side:
        yield side.storage(model, config(home.socket))


@pytest.fixture
def keys(request: pytest.FixtureRequest) -> list[str]:
    """Page hashes that no other test has."""
    return [hashlib.sha256(f"{request.node.name} {n}".encode()).hexdigest() for n in range(12)]


def pages(daemon: Daemon) -> int:
    """Pages that the daemon has."""
    with Admin(daemon.socket.with_name("admin.sock"), 10) as admin:
        return int(admin.ask(wire.Status(), wire.Info).data["pages"])


# -- SGLang's host pools -----------------------------------------------------------------------------------------------


def test_pages_of_every_layout_come_back_as_they_were(storage: Engine, keys: list[str]):
    """MHA and MLA pools in each layout that has page addresses: other slots get the very bytes, in float32 and bf16."""
    kinds = [("page_first", False), ("page_first_direct", False), ("layer_first", False), ("page_head", False)]
    kinds += [("page_first", True), ("page_first_direct", True), ("layer_first", True)]
    for seed, (layout, mla) in enumerate(kinds):
        for dtype in ("float32", "bfloat16"):
            at = storage.tell("pool", layout=layout, mla=mla, dtype=dtype)
            assert storage.tell("exists", at=at, keys=keys) == 0
            assert storage.tell("set", at=at, keys=keys, seed=seed) == [True] * len(keys)
            assert storage.tell("exists", at=at, keys=keys) == len(keys)
            got = storage.tell("get", at=at, keys=keys, seed=seed)
            assert got == {"done": [True] * len(keys), "right": [True] * len(keys)}, (layout, mla, dtype)


def test_what_changes_the_bytes_never_answers_for_other_pages(storage: Engine, keys: list[str]):
    """Layout, dtype, heads, ranks, another pool of the model, other weights: the same hashes are not there."""
    mine = storage.tell("pool")
    assert all(storage.tell("set", at=mine, keys=keys, seed=1))
    others = [
        {"layout": "page_first_direct"}, {"dtype": "bfloat16"}, {"heads": 2}, {"mla": True}, {"name": "swa"},
        {"fingerprint": "exact"}, {"fingerprint": "weights of another host"}, {"ranks": {"tp_rank": 0, "tp_size": 2}},
        {"ranks": {"tp_rank": 1, "tp_size": 2}}, {"ranks": {"pp_rank": 1, "pp_size": 2}},
        {"ranks": {"attn_cp_rank": 1, "attn_cp_size": 2}}, {"scope": "other"},
    ]  # fmt: skip
    for other in others:
        at = storage.tell("pool", **other)
        name = other.get("name", "kv")
        found = storage.tell("both", at=at, keys=keys, name=name, policy="all_pages", window=0)
        assert name == "kv" or not found["hits"].get(name), other
        assert name != "kv" or not found["pages"], other
    assert storage.tell("exists", at=storage.tell("pool"), keys=keys) == len(keys)


def test_ranks_that_hold_replicas_share_one_copy(storage: Engine, keys: list[str]):
    """MLA pages are the same on every tensor-parallel rank and size: what one writes all read."""
    writer = storage.tell("pool", mla=True, ranks={"tp_rank": 0, "tp_size": 2})
    reader = storage.tell("pool", mla=True, ranks={"tp_rank": 1, "tp_size": 2})
    assert all(storage.tell("set", at=writer, keys=keys, seed=3))
    assert storage.tell("get", at=reader, keys=keys, seed=3)["right"] == [True] * len(keys)


def test_a_batch_that_is_partly_there_gives_a_prefix(storage: Engine, keys: list[str]):
    """Existence counts leading pages; a load ends at the first page that is missing."""
    at = storage.tell("pool")
    storage.tell("set", at=at, keys=keys[:5], seed=4)
    storage.tell("set", at=at, keys=keys[6:], seed=5)
    assert storage.tell("exists", at=at, keys=keys) == 5
    got = storage.tell("get", at=at, keys=keys, seed=4)
    assert got["done"] == [True] * 5 + [False] * 7
    assert got["right"][:5] == [True] * 5


def test_pools_of_hybrid_models_restore_what_all_have(storage: Engine, keys: list[str]):
    """Trailing pages count where they end, holes before them or not; every page counts where all are asked for."""
    at = storage.tell("pool", name="swa")
    storage.tell("set", at=at, keys=keys[:8], seed=6)
    for some in (keys[2:4], keys[6:8]):
        assert all(storage.tell("set_v2", at=at, keys=some, name="swa"))
    trailing = storage.tell("both", at=at, keys=keys, name="swa", policy="trailing_pages", window=2)
    assert trailing == {"pages": 8, "hits": {"kv": 8, "swa": 8}, "restorable": [4, 8]}
    every = storage.tell("both", at=at, keys=keys, name="swa", policy="all_pages", window=0)
    assert every == {"pages": 0, "hits": {"kv": 8}, "restorable": []}
    groups = storage.tell("both", at=at, keys=keys, name="swa", policy="block_groups", window=0)
    assert groups["pages"] == 8
    assert groups["hits"] == {"kv": 8}


def test_clear_forgets_everywhere(storage: Engine, keys: list[str]):
    """SGLang's operator asks its storage to forget: neither this backend nor another that shares has it any more."""
    mine, other = storage.tell("pool"), storage.tell("pool")
    storage.tell("set", at=mine, keys=keys, seed=7)
    assert storage.tell("exists", at=other, keys=keys) == len(keys)
    storage.tell("clear", at=mine)
    assert storage.tell("exists", at=mine, keys=keys) == 0
    assert storage.tell("exists", at=storage.tell("pool"), keys=keys) == 0


def test_a_daemon_that_is_gone_or_hangs_is_a_miss(storage: Engine, home: Daemon, keys: list[str]):
    """Killed, stopped, started again: no call raises, every one returns, and pages are there again after a restart."""
    at = storage.tell("pool")
    assert all(storage.tell("set", at=at, keys=keys, seed=8))
    os.kill(home.pid, signal.SIGSTOP)
    try:
        assert storage.tell("exists", at=at, keys=keys) == 0
        assert storage.tell("get", at=at, keys=keys, seed=8)["done"] == [False] * len(keys)
        assert storage.tell("set", at=at, keys=keys, seed=8) == [False] * len(keys)
    finally:
        os.kill(home.pid, signal.SIGCONT)
    until(lambda: storage.tell("exists", at=at, keys=keys) == len(keys))
    home.kill()
    assert storage.tell("exists", at=at, keys=keys) == 0
    assert storage.tell("get", at=at, keys=keys, seed=8)["done"] == [False] * len(keys)
    home.start()
    until(lambda: all(storage.tell("set", at=at, keys=keys, seed=8)))
    assert storage.tell("get", at=at, keys=keys, seed=8)["right"] == [True] * len(keys)


def test_what_cannot_be_shared_is_refused_by_name(storage: Engine, home: Daemon, model: Path, tmp_path: Path):
    """LoRA and media (page hashes do not say what is in them) and the slow interface end the start with the reason."""
    with pytest.raises(AssertionError, match="interface_v1"):
        storage.tell("pool", interface_v1=0)
    lora = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj"]}
    try:
        storage.storage(model, config(home.socket), **lora)
        with pytest.raises(AssertionError, match="enable_lora"):
            storage.tell("pool")
        seeing = tmp_path / "seeing"
        shutil.copytree(model, seeing)
        settings = json.loads((seeing / "config.json").read_text())
        (seeing / "config.json").write_text(json.dumps(settings | {"image_token_id": 7}))
        storage.storage(seeing, config(home.socket))
        with pytest.raises(AssertionError, match="30 bits"):
            storage.tell("pool")
        storage.tell("pool", media="never")
    finally:
        storage.storage(model, config(home.socket))


# -- the engine --------------------------------------------------------------------------------------------------------


def kept(engine: Engine, prompts: list[list[int]], whole: list[int]) -> None:
    """Wait until the daemon has these tokens of the prompts: SGLang stores them when it likes."""
    until(lambda: [each["cached"] for each in engine.again(prompts)] == whole)


def started(folder: Path, model: Path, home: Daemon, env: dict[str, str] | None = None, **options: Any) -> Engine:
    """An engine on the daemon."""
    return Engine(folder / "log", env).start(model, config(home.socket), **options)


def test_a_fresh_engine_and_a_restarted_daemon_give_the_same_bits(home: Daemon, model: Path, tmp_path: Path):
    """192 of 200 tokens are loaded; tokens and logprobs are those that the engine which computed them gives from them.

    Another tenant's `extra_key` finds nothing and gets the same text.
    """
    ask = [prompt(200), prompt(3 * PAGE + 1, 12)]
    with started(tmp_path, model, home) as cold:
        assert [each["cached"] for each in cold.generate(ask)] == [0, 0]
        want = cold.generate(ask)
        kept(cold, ask, [WHOLE, 3 * PAGE])
    home.stop()
    home.start()
    with started(tmp_path, model, home) as warm:
        got = warm.generate(ask)
        salted = warm.generate(ask, extra_key="another tenant")
    assert [each["cached"] for each in got] == [WHOLE, 3 * PAGE]
    assert same(got, want)
    assert [each["cached"] for each in salted] == [0, 0]
    assert texts(salted) == texts(want)


def test_two_ranks_take_one_decision(home: Daemon, model: Path, tmp_path: Path):
    """Both ranks load what both have, in a fresh engine too, and the text is what they computed."""
    both = {"tp_size": 2, "env": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}
    ask = [prompt(200, 21)]
    with started(tmp_path, model, home, **both) as two:
        want = two.generate(ask)
        kept(two, ask, [WHOLE])
    with started(tmp_path, model, home, **both) as two:
        got = two.generate(ask)
    assert got[0]["cached"] == WHOLE
    assert texts(got) == texts(want)


def test_an_engine_survives_its_daemon_and_changed_weights(home: Daemon, model: Path, tmp_path: Path):
    """Stopped, killed, started again, disk pages spoilt: the same text each time, and hits again afterwards.

    Weights that are changed in place find nothing of the old ones', nor do the old ones find theirs when they are back.
    """
    ask = [prompt(200, 31)]
    with started(tmp_path, model, home) as engine:
        engine.generate(ask)
        want = engine.generate(ask)
        kept(engine, ask, [WHOLE])
        os.kill(home.pid, signal.SIGSTOP)
        try:
            assert texts(engine.again(ask)) == texts(want)
        finally:
            os.kill(home.pid, signal.SIGCONT)
        kept(engine, ask, [WHOLE])
        home.kill()
        assert texts(engine.again(ask)) == texts(want)
        spoil(home)
        home.start()
        assert texts(engine.again(ask)) == texts(want)
        kept(engine, ask, [WHOLE])
        engine.tell("scale", model=str(model), by=-3.0)
        changed = engine.again(ask)
        assert changed[0]["cached"] == 0
        assert texts(changed) != texts(want)
        kept(engine, ask, [WHOLE])
        assert texts(engine.again(ask)) == texts(changed)
        engine.tell("scale", model=str(model), by=1.0)
        back = engine.again(ask)
        assert back[0]["cached"] == 0
        assert texts(back) == texts(want)
        engine.tell("scale", model=str(model), by=-3.0, flush=False)
        longer, before = [ask[0] + prompt(200, 32)], pages(home)
        engine.generate(longer)  # goes on from KV of the old weights, and is stored
        until(lambda: pages(home) > before)
        assert engine.again(longer)[0]["cached"] == 0
        assert texts(engine.again(ask)) == texts(changed)
    with started(tmp_path, model, home) as fresh:
        got = fresh.generate(ask)
    assert got[0]["cached"] == WHOLE
    assert same(got, want)
