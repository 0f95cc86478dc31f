"""Transfers between blocks and slots on a device that does queued work late and in any legal order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import xxhash

from enginekv import EngineKv, Shape
from kvtier.device.base import Event
from kvtier.device.host import HostBuffer, HostDevice
from kvtier.device.shuttle import MOST_TRANSFERS, Shuttle, Transfer, Way
from kvtier.types import Code, KvtierError
from lazydevice import LazyDevice, Site

SEEDS = 50
SHAPE = Shape("LBNHC", 4, 16, 2, 8, (4, 4), 2)
PAGES = 5
WAYS = {
    "staged": {"stage_bytes": 2 * 1024, "pieces": 2},
    "batched": {"stage_bytes": 2 * 1024, "way": Way.BATCHED},
    "summed": {"stage_bytes": 2 * 1024, "sums": True},
    "direct": {"direct": True, "pieces": 2},
}


class Slot(NamedTuple):
    """A slot in host memory."""

    address: int
    data: np.ndarray


class Story:
    """An engine that computes KV, has it stored, overwrites its blocks, and loads the pages into other blocks."""

    def __init__(self, device: HostDevice, *, own_stream: bool = False, **way) -> None:
        self.device = device
        self.engine = EngineKv(SHAPE, self.take)
        self.plan = self.engine.plan(8)
        self.item = self.plan.group.item_bytes
        self.compute = device.stream()
        self.shuttle = Shuttle(device, self.plan, **way, stream=self.compute if own_stream else None)
        self.seen = np.zeros((2, SHAPE.layers, PAGES, self.engine.logical()[0, 0].size), np.uint8)
        self.wrong: list[str] = []

    def take(self, size: int) -> tuple[int, np.ndarray]:
        self.memory = self.device.take(size)
        return self.memory.address, self.memory.data

    def slots(self) -> list[Slot]:
        """A slot a page; the first ones are neighbours, which are copied at once."""
        whole = HostBuffer(3 * self.item)
        near = [Slot(whole.address + n * self.item, whole.data[n * self.item : (n + 1) * self.item]) for n in range(3)]
        return [*near, *(Slot(one.address, one.data) for one in (HostBuffer(self.item) for _ in range(PAGES - 3)))]

    def write(self, ids: np.ndarray, seed: int) -> None:
        """The engine computes blocks."""
        values = np.random.default_rng(seed).integers(0, 256, self.engine.logical()[:, ids].shape, np.uint8)

        def work() -> None:
            self.engine.logical()[:, ids] = values

        self.compute.add(work)

    def attend(self, turn: int, ids: np.ndarray, layers: range) -> None:
        """The engine reads layers of blocks."""

        def work() -> None:
            for layer in layers:
                self.seen[turn, layer] = self.engine.logical()[layer, ids].reshape(len(ids), -1)

        self.compute.add(work)

    def expect(self, ids: np.ndarray, seed: int) -> tuple[list[np.ndarray], np.ndarray]:
        """Pages and blocks as they must come out."""
        shadow = EngineKv(SHAPE, lambda size: (0, np.zeros(size, np.uint8)))
        shadow.logical()[:, ids] = np.random.default_rng(seed).integers(
            0, 256, shadow.logical()[:, ids].shape, np.uint8
        )
        return [shadow.page([block]) for block in ids], shadow.logical()[:, ids].reshape(SHAPE.layers, len(ids), -1)

    def turn(self, number: int) -> None:
        """One store and one load through a second set of blocks."""
        ids, others = np.arange(PAGES) * 2 + number % 2, np.arange(PAGES) + 11
        slots = self.slots()
        addresses = np.array([slot.address for slot in slots], np.uint64)
        self.write(ids, number)
        stored = self.shuttle.store(ids, addresses, self.compute.record())
        self.compute.wait(stored.read)
        self.write(ids, 1000 + number)
        stored.wait()
        pages, blocks = self.expect(ids, number)
        self.check("slots", all(np.array_equal(slot.data, page) for slot, page in zip(slots, pages, strict=True)))
        self.check_sums(stored, slots)
        self.write(others, 2000 + number)  # still running when the load is asked for
        loaded = self.shuttle.load(others, addresses, self.compute.record())
        step = SHAPE.layers // len(loaded.layers)
        for part, event in enumerate(loaded.layers):
            self.compute.wait(event)
            self.attend(number, others, range(part * step, part * step + step))
        loaded.wait()
        self.check_sums(loaded, slots)
        for slot in slots:
            slot.data[:] = 0xEE  # released: somebody else's now
        self.blocks = blocks
        self.compute.synchronize()
        self.check("blocks", np.array_equal(self.seen[number], blocks))

    def check(self, what: str, holds: bool) -> None:
        if not holds:
            self.wrong.append(what)

    def check_sums(self, transfer: Transfer, slots: list[Slot]) -> None:
        if transfer.sums is not None:
            self.check("sums", transfer.sums.tolist() == [xxhash.xxh3_64_intdigest(slot.data) for slot in slots])

    def tell(self) -> list[str]:
        """Two turns, and a close that nobody waited before; what came out wrong."""
        for number in range(2):
            self.turn(number)
        slots = self.slots()
        self.shuttle.store(np.arange(PAGES), np.array([slot.address for slot in slots], np.uint64))
        self.shuttle.close()
        pages = [self.engine.page([block]) for block in range(PAGES)]
        self.check("closed", all(np.array_equal(slot.data, page) for slot, page in zip(slots, pages, strict=True)))
        return self.wrong


def tell(way: str, seed: int, without: Site | None = None, *, own_stream: bool = False) -> tuple[list[str], set[Site]]:
    """What goes wrong under one order of work, and which lines waited."""
    device = LazyDevice(seed, without)
    try:
        return Story(device, own_stream=own_stream, **WAYS[way]).tell(), device.sites
    except AssertionError as exc:
        return [str(exc)], device.sites


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_any_legal_order_of_work_brings_the_same_bytes(way: str, own_stream: bool):
    """Slots, blocks and sums are right in 50 random orders that streams and events allow, the engine's own included."""
    assert not {seed: wrong for seed in range(SEEDS) if (wrong := tell(way, seed, own_stream=own_stream)[0])}


@pytest.mark.parametrize("way", WAYS)
def test_every_wait_is_needed(way: str):
    """Without any one of the waits some of 50 orders goes wrong: none is there in vain, none goes untested."""
    sites = {where for seed in range(3) for where in tell(way, seed)[1]}
    assert len([name for name, _ in sites if name == "shuttle.py"]) >= 3
    needless = [where for where in sites if not any(tell(way, seed, where)[0] for seed in range(SEEDS))]
    assert not needless


def test_the_device_in_order_needs_no_waits():
    """The CPU in a GPU's place does the same work at once."""
    for way in WAYS.values():
        assert not Story(HostDevice(), **way).tell()


def test_a_stuck_device_is_given_up_by_its_deadline():
    """A transfer that is not done in time is io by name; the shuttle refuses more, and closes without waiting."""
    device = LazyDevice(0)
    story = Story(device, stage_bytes=4096)
    slot = HostBuffer(story.item)
    slot.data[:] = 0x11
    addresses = np.array([slot.address], np.uint64)
    story.shuttle.store(np.array([0]), addresses).wait(1.0)
    device.stuck = True
    flying = story.shuttle.store(np.array([1]), addresses)
    with pytest.raises(KvtierError, match="did not move 1 pages") as caught:
        flying.wait(0.01)
    assert caught.value.code is Code.IO
    assert not flying.settled()
    with pytest.raises(KvtierError, match="did not move"):
        story.shuttle.load(np.array([1]), addresses)
    story.shuttle.close()


def test_what_is_refused_costs_nothing():
    """Blocks that are not there, blocks that come twice, odd slots: refused by name as often as one likes."""
    story = Story(HostDevice(), direct=True)
    slots = np.array([slot.address for slot in story.slots()][:2], np.uint64)
    for _ in range(2 * MOST_TRANSFERS):
        with pytest.raises(KvtierError, match="ids"):
            story.shuttle.store(np.array([0, SHAPE.blocks]), slots)
        with pytest.raises(KvtierError, match="each block once"):
            story.shuttle.load(np.array([3, 3]), slots)
        with pytest.raises(KvtierError, match="slots"):
            story.shuttle.store(np.array([0, 1]), slots + np.uint64(8))
    story.shuttle.store(np.array([0, 1]), slots).wait()


def test_a_device_that_fails_midway_makes_the_shuttle_sick():
    """A transfer of which a part was queued when the device failed is never taken for done."""

    class Failing(LazyDevice):
        def copies(self, *args: object) -> None:
            raise KvtierError(Code.IO, "the link is down")

    story = Story(Failing(0), stage_bytes=4096)
    slots = np.array([slot.address for slot in story.slots()][:1], np.uint64)
    for _ in range(2):
        with pytest.raises(KvtierError, match="the link is down"):
            story.shuttle.store(np.array([0]), slots)
    story.shuttle.close()


def test_transfers_in_flight_are_bounded():
    """The seventeenth transfer that nobody waited for is refused as busy, and room is there again after a wait."""
    story = Story(LazyDevice(0), direct=True)
    story.device.eager = 0.0  # works only when somebody waits
    slots = [HostBuffer(story.item) for _ in range(1)]
    address = np.array([slots[0].address], np.uint64)
    flying = [story.shuttle.store(np.array([0]), address) for _ in range(MOST_TRANSFERS)]
    with pytest.raises(KvtierError, match="in flight"):
        story.shuttle.store(np.array([0]), address)
    flying[0].wait()
    story.shuttle.store(np.array([0]), address).wait()
    assert len([transfer for transfer in flying if not transfer.settled()]) <= MOST_TRANSFERS - 1


def test_transfers_of_which_only_an_event_was_waited_for_are_over():
    """Whoever commits after `stored.done` and asks for nothing else is never told that too many are in flight."""
    story = Story(LazyDevice(0), direct=True)
    slots = story.slots()
    addresses = np.array([slot.address for slot in slots], np.uint64)
    for _ in range(MOST_TRANSFERS + 3):
        assert story.shuttle.store(np.arange(PAGES), addresses).done.synchronize()
    story.shuttle.close()


def test_a_transfer_that_is_begun_while_another_thread_ends_one_is_known():
    """One thread steps and begins transfers, another waits for them: no place among those in flight is lost."""
    story = Story(LazyDevice(0), direct=True)
    slots = story.slots()
    addresses = np.array([slot.address for slot in slots], np.uint64)
    shuttle, begun, armed = story.shuttle, list[Event](), list[bool]()

    def begin() -> None:
        begun.append(shuttle.store(np.arange(PAGES), addresses).done)

    class Flying(list[Transfer]):
        """Those in flight; who has looked at all of them is held up while the other thread begins one, once."""

        def __iter__(self) -> Iterator[Transfer]:
            yield from list.__iter__(self)
            if armed:
                armed.clear()
                begin()

    for _ in range(MOST_TRANSFERS + 3):
        ended = shuttle.store(np.arange(PAGES), addresses)
        armed.append(True)
        shuttle._flying = Flying(shuttle._flying[:])
        ended.wait()
        assert all(each.synchronize() for each in begun)
        begun.clear()
    story.shuttle.close()
