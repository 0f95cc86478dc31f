"""Pages of HiCache's host pools on a daemon, without SGLang: a pool here is memory that says where its pages lie."""

from __future__ import annotations

import hashlib
import importlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from kvtier.client import Client
from kvtier.demo.daemon import Daemon
from kvtier.engines.sglang.pools import Pool, names, quick_turns
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.types import Kind
from sglangkit import module

PAGE = 16
HALF = 512 << 10


class Memory:
    """K and V of each page apart, as in most of HiCache's layouts."""

    page_size = PAGE

    def __init__(self, pages: int) -> None:
        self.data = np.zeros((2, pages, HALF), np.uint8)

    def get_page_buffer_meta(self, indices: np.ndarray) -> tuple[list[int], list[int]]:
        at = [half[first // PAGE].ctypes.data for first in indices[::PAGE] for half in self.data]
        return at, [HALF] * len(at)


def slots(first: int, pages: int) -> np.ndarray:
    """The tokens' slots of pages that follow each other."""
    return np.arange(first * PAGE, (first + pages) * PAGE)


@pytest.mark.slow
def test_a_batch_that_host_cannot_hold_at_once_is_loaded_whole(daemon: Daemon):
    """160 pages of 1 MiB on a host tier of 128 MiB: one call stores them, and one loads them all, byte for byte."""
    memory = Memory(160)
    memory.data[:] = np.random.default_rng(0).integers(0, 256, memory.data.shape, np.uint8)
    want = memory.data.copy()
    keys = [hashlib.sha256(b"%d" % n).hexdigest() for n in range(160)]
    spec = CacheSpec("m", b"f" * 16, "x", PAGE, (GroupSpec(Kind.FULL, 1, 1, 2 * HALF),), key_bytes=32)
    with Client(daemon.socket, verify="always", timeout_s=20.0) as client:
        pool = Pool(memory, client.open(spec))
        stored = [pool.store(keys[at : at + 32], slots(at, 32)) for at in range(0, 160, 32)]
        assert pool.cache.flush()
        assert all(map(all, stored))
        memory.data[:] = 0
        assert pool.load(keys, slots(0, 160)) == [True] * 160
    assert np.array_equal(memory.data, want)


def test_indices_that_are_not_those_of_the_keys_are_a_miss(daemon: Daemon):
    """Too few slots, none at all: nothing is copied, and nothing raised."""
    memory = Memory(2)
    spec = CacheSpec("m", b"f" * 16, "x", PAGE, (GroupSpec(Kind.FULL, 1, 1, 2 * HALF),), key_bytes=32)
    with Client(daemon.socket) as client:
        pool = Pool(memory, client.open(spec))
        for indices in (slots(0, 1), None):
            assert pool.store(["a", "b"], indices) == [False, False]
            assert pool.load(["a", "b"], indices) == [False, False]
        assert pool.store([], slots(0, 0)) == []


def test_one_call_moves_pages_of_one_cache_though_weights_change_meanwhile(daemon: Daemon):
    """A store of several parts that began with the old weights' cache ends there: nothing of it is the new one's."""
    memory, keys = Memory(96), [hashlib.sha256(b"one %d" % n).hexdigest() for n in range(96)]
    spec = CacheSpec("m", b"f" * 16, "x", PAGE, (GroupSpec(Kind.FULL, 1, 1, 2 * HALF),), key_bytes=32)
    with Client(daemon.socket, timeout_s=20.0) as client:
        old, new = client.open(spec), client.open(msgspec.structs.replace(spec, revision="changed"))
        pool = Pool(memory, old)

        class Changing(list):
            """Keys whose first part is followed by a change of weights."""

            def __getitem__(self, part: slice) -> list[str]:
                if part.start:
                    pool.cache = new
                return list.__getitem__(self, part)

        done = pool.store(Changing(keys), slots(0, 96))
        assert pool.cache is new
        assert sum(done) >= 64
        assert not any(pool.exists(keys))
        pool.cache = old
        assert pool.exists(keys) == done


@pytest.fixture
def reload(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module that counts changes of weights, beside classes that have SGLang's names."""
    places = {"WeightUpdater": "model_executor.model_runner_components.weight_updater",
              "HiCacheController": "managers.cache_controller"}  # fmt: skip
    members = {
        "WeightUpdater": [
            "update_weights_from_disk", "load_weights_from_distributed", "update_weights_from_tensor",
            "update_weights_from_ipc", "begin_weight_update", "end_weight_update",
        ], "HiCacheController": ["reset"],
    }  # fmt: skip
    for name, place in places.items():
        kind = type(name, (), {each: lambda _: None for each in members[name]})
        monkeypatch.setattr(module(monkeypatch, place), name, kind, raising=False)
    yield importlib.import_module("kvtier.engines.sglang.reload")
    del sys.modules["kvtier.engines.sglang.reload"]


def test_a_flush_after_a_change_of_weights_counts_as_one(reload: Any):
    """SGLang stores KV of old weights until it flushes, however late: what is stored before that is not found after.

    A flush before any change leaves the engine's pages shared, and later ones what was computed since.
    """
    reload.watch()
    controller, updater = reload.HiCacheController(), reload.WeightUpdater()
    controller.reset()
    assert reload.count() == 0
    updater.update_weights_from_tensor()
    changed = reload.count()
    assert changed > 0
    controller.reset()
    flushed = reload.count()
    assert flushed > changed
    controller.reset()
    assert reload.count() == flushed


@pytest.mark.parametrize("name", ["begin_weight_update", "end_weight_update"])
def test_what_comes_before_and_after_an_update_writes_weights_too(reload: Any, name: str):
    """Layers whose weights are packed for a kernel are unpacked first and packed last."""
    reload.watch()
    getattr(reload.WeightUpdater(), name)()
    assert reload.count() > 0


def test_a_storage_that_is_attached_to_an_engine_that_runs_begins_as_after_a_change(reload: Any):
    """Nobody has seen what was before; and what is in SGLang's caches then goes with the next flush."""

    class Controller(reload.HiCacheController):
        def attach(self) -> None:
            reload.watch()

    controller = Controller()
    controller.attach()
    attached = reload.count()
    assert attached > 0
    controller.attach()
    assert reload.count() == attached  # it has been watched since
    controller.reset()
    assert reload.count() > attached


def test_a_storage_that_comes_with_its_engine_shares(reload: Any):
    """It is attached while SGLang's controller is being made."""

    class Controller(reload.HiCacheController):
        def __init__(self) -> None:
            self.attach()

        def attach(self) -> None:
            reload.watch()

    Controller()
    assert reload.count() == 0


def test_keys_have_32_bytes_whatever_they_are():
    """SHA-256 in hex is taken as it is, in either case; other keys by their digest, and none becomes another's."""
    digest = hashlib.sha256(b"x").hexdigest()
    odd = ["", "a", "g" * 64, digest + ".mamba", digest[:-1]]
    assert names([digest]) == bytes.fromhex(digest)
    assert len({names([key]) for key in [digest, *odd]}) == 1 + len(odd)
    assert all(len(names([key])) == 32 for key in odd)


def test_turns_are_quick_only_while_pages_are_copied():
    """Overlapping copies of two threads: the interval is back where it was when the last of them ends."""
    before = sys.getswitchinterval()
    inside, leave = threading.Event(), threading.Event()

    def copies() -> None:
        with quick_turns:
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=copies)
    with quick_turns:
        thread.start()
        assert inside.wait(30)
    assert sys.getswitchinterval() < before
    leave.set()
    thread.join()
    assert sys.getswitchinterval() == before
