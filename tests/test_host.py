"""The host tier: slots are given once, counted, and their memory moves between scopes."""

import gc
import os
import time
import tracemalloc
from array import array

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier.identity import Shape
from kvtier.tiers.host import HostTier, SlotState
from kvtier.tiers.pool import LISTED
from kvtier.tiers.slab import ARENA_SHIFT, OFFSET_MASK

MIB = 1 << 20
KIB = 1 << 10
ONE = Shape((16 * KIB,), (1,))


@pytest.fixture
def tier():
    """16 MiB in slabs of 1 MiB, without prefaulting."""
    made = HostTier(16 * MIB, slab_bytes=MIB, hugepages="never", prefault=False)
    yield made
    assert made.check() == []
    made.close()


def held(tier, scope):
    """Bytes of memory behind a scope's arenas."""
    return sum(os.fstat(arena.fd).st_blocks * 512 for arena in tier.arenas(scope))


def fill(pool, group, handles, value):
    """Write every byte of the items."""
    for handle in handles:
        for view in pool.views(group, handle, pool.shape.slot_bytes[group] * pool.shape.slots_per_item[group]):
            view[:] = value


def test_the_whole_budget_can_be_given_and_no_more(tier):
    """Alloc returns what fits, each handle once, ascending; the rest is left out."""
    pool = tier.pool("a", ONE)
    handles = pool.alloc(0, 2000)
    assert len(handles) == 1024 == len(set(handles))
    assert list(handles) == sorted(handles)
    assert (tier.used_bytes, tier.free_bytes, pool.total_bytes) == (16 * MIB, 0, 16 * MIB)
    assert pool.alloc(0, 1) == array("q")
    assert pool.capacity(0) == pool.used(0) == pool.counts()[0][SlotState.RESERVED] == 1024
    pool.free(0, handles)
    assert (pool.capacity(0), pool.used(0), pool.counts()[0][SlotState.FREE]) == (1024, 0, 1024)


def test_handles_are_the_addresses_of_what_views_show(tier):
    """Writing through a view changes the arena at the handle's offset, within the slot alone."""
    pool = tier.pool("a", ONE)
    first, second = pool.alloc(0, 2)
    (view,) = pool.views(0, second, 10_000)
    view[:] = 3
    data = tier.arenas("a")[second >> ARENA_SHIFT].data
    at = second & OFFSET_MASK
    assert at % 4096 == 0
    assert (data[at : at + 10_000] == 3).all()
    assert np.count_nonzero(data) == 10_000
    assert pool.offsets(0, [first, -1, second]).tolist() == [first, -1, second]


def test_items_of_several_slots_keep_their_list():
    """A state point spreads over slots in order; offsets list them and views clip to the item's bytes."""
    tier = HostTier(MIB, hugepages="never", prefault=False)
    pool = tier.pool("a", Shape((4 * KIB, 8 * KIB), (1, 5)))
    pages = pool.alloc(0, 3)
    points = pool.alloc(1, 2)
    assert all(point & LISTED for point in points)
    offsets = pool.offsets(1, [points[1], -1, points[0]])
    assert offsets.dtype == np.int64
    assert offsets[5:10].tolist() == [-1] * 5
    assert len(set(offsets.tolist()) - {-1}) == 10
    views = pool.views(1, points[0], 35 * KIB)
    assert [view.size for view in views] == [8 * KIB] * 4 + [3 * KIB]
    fill(pool, 1, [points[0]], 1)
    fill(pool, 1, [points[1]], 2)
    fill(pool, 0, pages, 3)
    assert all((view == 1).all() for view in views)
    assert pool.counts()[1][SlotState.RESERVED] == pool.used(1) == 10
    pool.mark(1, [points[0]], SlotState.CACHED)
    assert pool.counts()[1][SlotState.CACHED] == 5
    pool.free(1, points)
    assert (pool.used(1), tier.check()) == (0, [])
    tier.close()


def test_items_that_do_not_fit_whole_take_nothing():
    """The slots of half an item, and slabs taken for it in vain, are given back."""
    tier = HostTier(64 * KIB, hugepages="never", prefault=False)
    pool = tier.pool("a", Shape((4 * KIB,), (17,)))
    assert pool.alloc(0, 1) == array("q")
    assert (tier.used_bytes, tier.check()) == (0, [])
    pool = tier.pool("a", Shape((4 * KIB,), (7,)))
    assert len(pool.alloc(0, 9)) == 2
    assert (pool.used(0), tier.check()) == (14, [])
    tier.close()


@pytest.mark.parametrize("shape", [ONE, Shape((4 * KIB,), (3,))])
def test_wrong_handles_are_bugs_and_change_nothing(tier, shape):
    """Double free, repeated, foreign and misaligned handles raise, and the others of the call stay as they were."""
    pool = tier.pool("a", shape)
    good = pool.alloc(0, 4)
    pool.free(0, good[3:])
    foreign = tier.pool("b", ONE).alloc(0, 300)[-1]
    for wrong in ([good[3]], [good[0], good[0]], [foreign], [good[0] + 1], [-1], [good[0], good[3]]):
        with pytest.raises(AssertionError):
            pool.free(0, wrong)
        with pytest.raises(AssertionError):
            pool.mark(0, wrong, SlotState.CACHED)
    with pytest.raises(AssertionError):
        pool.mark(0, good[:1], SlotState.FREE)
    assert pool.counts()[0][SlotState.RESERVED] == 3 * shape.slots_per_item[0]
    assert tier.check() == []


def test_any_iterable_of_handles_is_taken(tier):
    """Lists, arrays, numpy arrays, generators and nothing at all."""
    pool = tier.pool("a", ONE)
    handles = pool.alloc(0, 8)
    pool.mark(0, np.array(handles), SlotState.FILLING)
    pool.mark(0, reversed(handles), SlotState.CACHED)
    pool.mark(0, [], SlotState.CACHED)
    assert pool.counts()[0][SlotState.CACHED] == 8
    assert pool.offsets(0, iter(handles)).tolist() == list(handles)
    pool.free(0, (handle for handle in handles))
    pool.free(0, array("q"))
    assert pool.alloc(0, 0) == array("q")
    assert pool.used(0) == 0


def test_fullest_slabs_are_filled_first_and_in_order(tier):
    """New items close the gaps of full slabs, so that the others can empty."""
    pool = tier.pool("a", ONE)
    handles = pool.alloc(0, 3 * 64)
    pool.free(0, handles[10:64])
    pool.free(0, handles[64 + 60 : 128])
    pool.free(0, handles[128 + 30 : 192])
    assert pool.alloc(0, 6) == handles[64 + 60 : 128] + handles[128 + 30 : 128 + 32]


def test_closed_slab_returns_to_the_budget_with_its_last_slot(tier):
    """No new items go to a closed slab; it leaves by itself; a reopened one serves again until it has left."""
    pool = tier.pool("a", ONE)
    handles = pool.alloc(0, 128)
    slab = pool.slabs[0]
    pool.close_slab(slab)
    pool.free(0, handles[1:64])
    more = pool.alloc(0, 70)
    assert not any(slab.lo <= handle < slab.hi for handle in more)
    pool.reopen_slab(slab)
    back = pool.alloc(0, 100)
    assert handles[1] in back
    pool.close_slab(slab)
    before = tier.used_bytes
    pool.free(0, [handles[0], *(handle for handle in back if slab.lo <= handle < slab.hi)])
    assert before - tier.used_bytes == MIB
    assert slab not in pool.slabs
    with pytest.raises(AssertionError):
        pool.reopen_slab(slab)


def test_closing_takes_free_slots_out_of_reach(tier):
    """Slots that were free when their slab closed are not given any more."""
    pool = tier.pool("a", ONE)
    handles = pool.alloc(0, 40)
    pool.close_slab(pool.slabs[0])
    assert min(pool.alloc(0, 1)) > max(handles) + 24 * 16 * KIB


def test_closing_an_empty_slab_returns_it_at_once(tier):
    """An empty slab stays with its pool until it is closed or shed."""
    pool = tier.pool("a", ONE)
    pool.free(0, pool.alloc(0, 192))
    assert tier.used_bytes == 3 * MIB
    pool.close_slab(pool.slabs[1])
    assert tier.used_bytes == 2 * MIB
    assert pool.shed() == 2 * MIB
    assert (tier.used_bytes, pool.slabs) == (0, [])


def test_budget_moves_between_scopes_and_takes_the_memory_along(tier):
    """Memory that one scope sheds is punched out of its file and another scope can have all of it."""
    one, two = tier.pool("a", ONE), tier.pool("b", ONE)
    handles = one.alloc(0, 1024)
    fill(one, 0, handles, 1)
    assert held(tier, "a") == 16 * MIB
    assert two.alloc(0, 1) == array("q")
    one.free(0, handles)
    assert one.shed() == 16 * MIB
    assert tier.settle()
    assert held(tier, "a") == 0
    others = two.alloc(0, 1024)
    assert len(others) == 1024
    assert not any(view.any() for handle in others for view in two.views(0, handle, 16 * KIB))


def test_space_being_emptied_is_still_there_for_its_scope(tier):
    """An alloc right after a shed gets all of the budget, whatever the thread is doing, and the thread goes on."""
    pool, other = tier.pool("a", ONE), tier.pool("a", Shape((32 * KIB,), (1,)))
    for turn in range(60):
        for one, n in ((pool, 1024), (other, 512)):
            time.sleep(turn * 5e-6)  # the thread is caught at different steps
            handles = one.alloc(0, n)
            assert len(handles) == n
            tier.arenas("a")[0].data[:] = 1
            one.free(0, handles)
            assert one.shed() == 16 * MIB
    handles = pool.alloc(0, 1024)
    assert len(pool.alloc(0, 1)) == 0
    pool.free(0, handles)
    pool.shed()
    assert tier.settle()


def test_scopes_share_no_byte(tier):
    """The same handle in two scopes is different memory on different descriptors."""
    one, two = tier.pool("a", ONE), tier.pool("b", ONE)
    (mine,), (theirs,) = one.alloc(0, 1), two.alloc(0, 1)
    assert mine == theirs
    fill(one, 0, [mine], 5)
    assert not two.views(0, theirs, 16 * KIB)[0].any()
    files = {(s.st_dev, s.st_ino) for s in (os.fstat(tier.arenas(scope)[0].fd) for scope in "ab")}
    assert len(files) == 2
    assert tier.arenas("a") == tier.arenas("a")


def test_prefault_keeps_the_budget_backed_for_the_scope_that_grows():
    """All of the budget is backed before use; another scope's growth takes idle memory, never more than the budget."""
    tier = HostTier(16 * MIB, slab_bytes=2 * MIB, hugepages="never")
    one = tier.pool("a", ONE)
    assert tier.settle()
    assert held(tier, "a") == 16 * MIB
    two = tier.pool("b", ONE)
    kept = two.alloc(0, 256)
    assert tier.settle()
    assert (held(tier, "a"), held(tier, "b")) == (12 * MIB, 4 * MIB)
    fill(two, 0, kept, 9)
    assert len(one.alloc(0, 1024)) == 768
    assert tier.settle()
    assert (held(tier, "a"), held(tier, "b")) == (12 * MIB, 4 * MIB)
    assert all((two.views(0, handle, 16 * KIB)[0] == 9).all() for handle in kept)
    two.free(0, kept)
    assert two.shed() == 4 * MIB
    assert tier.settle()
    assert held(tier, "b") == 4 * MIB
    assert len(one.alloc(0, 1024)) == 256
    assert tier.settle()
    assert (held(tier, "a"), held(tier, "b")) == (16 * MIB, 0)
    assert tier.check() == []
    tier.close()


def test_close_stops_the_thread_in_the_middle():
    """A tier closed while it prefaults leaves no thread and no descriptor."""
    import threading
    from pathlib import Path

    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    tier = HostTier(256 * MIB, hugepages="never")
    (handle,) = tier.pool("a", ONE).alloc(0, 1)
    assert handle >= 0
    tier.close()
    tier.close()
    del tier
    gc.collect()
    assert (len(list(Path("/proc/self/fd").iterdir())), threading.active_count()) == before


def test_empty_budget_is_legal():
    """A daemon without host memory has no arenas and every alloc is empty."""
    tier = HostTier(0)
    assert tier.arenas("a") == []
    assert tier.pool("a", ONE).alloc(0, 5) == array("q")
    assert (tier.used_bytes, tier.free_bytes, tier.check()) == (0, 0, [])
    tier.close()


@pytest.mark.parametrize("budget", [4 * KIB, 20 * KIB, MIB - 1, 3 * MIB, 33 * MIB])
def test_odd_budgets_are_kept(budget):
    """Whatever the budget and the slot sizes, slabs never exceed it, and each group that fits gets a slot."""
    tier = HostTier(budget, hugepages="never", prefault=False)
    pool = tier.pool("a", Shape((4 * KIB, 12 * KIB), (1, 1)))
    small, large = pool.alloc(0, 1), pool.alloc(1, 1)
    assert len(small) == 1
    assert len(large) == (budget >= 24 * KIB)
    pool.alloc(0, 100_000)
    assert tier.used_bytes <= budget
    assert budget - tier.used_bytes < max(pool.slab_bytes // 8, 4 * KIB) + 4 * KIB
    assert tier.check() == []
    tier.close()


def test_slabs_hold_sixteen_of_the_largest_slot():
    """Slabs follow the largest slot in whole huge pages, but never exceed a quarter of the budget."""
    tier = HostTier(1 << 40, hugepages="never", prefault=False)
    assert tier.pool("a", ONE).slab_bytes == 64 * MIB
    assert tier.pool("a", Shape((4 * KIB, 5 * MIB), (1, 1))).slab_bytes == 80 * MIB
    assert tier.pool("a", ONE) is tier.pool("a", Shape((16 * KIB,), (1,)))
    assert len(tier.pools) == 2
    tier.close()
    tier = HostTier(65 * MIB, hugepages="never", prefault=False)
    assert tier.pool("a", ONE).slab_bytes == 16 * MIB
    tier.close()


@pytest.mark.parametrize("share", [1.9, 2.6, 3.4, 5.3, 7.1, 11.5, 15.9, 23.7, 61.3])
def test_large_pages_leave_little_of_a_host_in_no_slot(share):
    """Slabs are whole pages, whichever part of host one takes: nearly as many fit as could."""
    for budget in (24 * MIB + 4 * KIB, 100 * MIB, 717 * MIB, 6 << 30):
        size = int(budget / share) // (4 * KIB) * 4 * KIB
        tier = HostTier(budget, hugepages="never", prefault=False)
        pool = tier.pool("a", Shape((size,), (1,)))
        slots = len(pool.alloc(0, 100))
        assert slots >= 0.9 * (budget // size), (budget, size)
        assert tier.check() == []
        tier.close()


def test_each_node_gets_slabs_by_its_memory(tmp_path):
    """With two CPU nodes a scope has two arenas, filled in proportion to the nodes' memory."""
    for number, kib in ((0, 100), (1, 300)):
        folder = tmp_path / f"node{number}"
        folder.mkdir()
        (folder / "cpulist").write_text("0\n")
        (folder / "meminfo").write_text(f"Node {number} MemTotal: {kib} kB\n")
    tier = HostTier(16 * MIB, slab_bytes=MIB, hugepages="never", prefault=False, nodes=tmp_path)
    assert [arena.number for arena in tier.arenas("a")] == [0, 1]
    pool = tier.pool("a", ONE)
    handles = pool.alloc(0, 512)
    assert sum(handle >> ARENA_SHIFT == 1 for handle in handles) == 384
    fill(pool, 0, handles, 4)
    assert all(np.count_nonzero(a.data) == n * MIB for a, n in zip(tier.arenas("a"), (2, 6), strict=True))
    pool.free(0, handles)
    assert tier.check() == []
    tier.close()


def test_memory_stays_flat_under_churn(tier):
    """200,000 allocations and frees leave no more objects behind than the first thousands did."""
    pool = tier.pool("a", ONE)
    kept = pool.alloc(0, 900)
    rng = np.random.default_rng(1)

    def churn(rounds):
        nonlocal kept
        for _ in range(rounds):
            order = rng.permutation(np.array(kept))
            pool.free(0, order[:200])
            kept = array("q", order[200:].tolist()) + pool.alloc(0, 200)

    tracemalloc.start()
    churn(100)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    churn(1000)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(set(kept)) == 900 == pool.used(0)
    assert grown < 64 * KIB


SHAPES = [Shape((4 * KIB,), (1,)), Shape((8 * KIB, 12 * KIB, 20 * KIB), (1, 3, 1)), Shape((36 * KIB,), (2,))]
NUMBERS = st.integers(0, 60)
STATES = [state for state in SlotState if state is not SlotState.FREE]


class HostMachine(RuleBasedStateMachine):
    """Pools over a dict of which item is in which state and what its bytes say."""

    def __init__(self):
        super().__init__()
        self.tier = HostTier(768 * KIB, slab_bytes=64 * KIB, hugepages="never", prefault=self.prefault)
        self.model = {}
        self.stamp = 0

    prefault = False

    def teardown(self):
        """Close what is open."""
        self.tier.close()

    def pick(self, at, picks):
        """A pool, a group and some of its items; the numbers drawn mean the same whatever the thread has done."""
        pool, group = sorted({key[:2] for key in self.model})[at % len({key[:2] for key in self.model})]
        items = [key[2] for key in self.model if key[:2] == (pool, group)]
        return pool, group, list(dict.fromkeys(items[pick % len(items)] for pick in picks))

    def pool(self, name):
        """The pool by scope and number of its shape."""
        return self.tier.pool(name[0], SHAPES[name[1]])

    @rule(scope=st.sampled_from("ab"), group=st.sampled_from([(0, 0), (1, 0), (1, 1), (1, 2), (2, 0)]), n=NUMBERS)
    def alloc(self, scope, group, n):
        """New items are none that is held and keep what is written to them; fewer come only where no more fit."""
        shape, group = group
        pool = self.pool((scope, shape))
        closed = [(slab, slab.used) for slab in pool.slabs if slab.closed]
        handles = pool.alloc(group, n)
        assert len(handles) <= n
        assert all(slab.used == used for slab, used in closed)
        for handle in handles:
            assert ((scope, shape), group, handle) not in self.model
            self.stamp = self.stamp % 255 + 1
            fill(pool, group, [handle], self.stamp)
            self.model[(scope, shape), group, handle] = [SlotState.RESERVED, self.stamp]
        if len(handles) < n:
            assert not pool.alloc(group, 1)

    @rule(at=NUMBERS, picks=st.lists(NUMBERS, min_size=1, max_size=60))
    def free(self, at, picks):
        """Freed items are gone; freeing them again is refused."""
        if self.model:
            name, group, items = self.pick(at, picks)
            self.pool(name).free(group, items)
            for item in items:
                del self.model[name, group, item]
            with pytest.raises(AssertionError):
                self.pool(name).free(group, items)

    @rule(at=NUMBERS)
    def free_all(self, at):
        """A whole group goes, so that slabs empty."""
        self.free(at, range(1000))

    @rule(at=NUMBERS, picks=st.lists(NUMBERS, min_size=1, max_size=8), state=st.sampled_from(STATES))
    def mark(self, at, picks, state):
        """Items change state."""
        if self.model:
            name, group, items = self.pick(at, picks)
            self.pool(name).mark(group, items, state)
            for item in items:
                self.model[name, group, item][0] = state

    @rule(at=NUMBERS, close=st.booleans())
    def turn_slab(self, at, close):
        """Slabs close and open at any time."""
        slabs = [(pool, slab) for pool in self.tier.pools for slab in pool.slabs]
        if slabs:
            pool, slab = slabs[at % len(slabs)]
            (pool.close_slab if close else pool.reopen_slab)(slab)

    @rule(at=NUMBERS)
    def shed(self, at):
        """Only empty slabs leave."""
        if self.tier.pools:
            pool = self.tier.pools[at % len(self.tier.pools)]
            pool.shed()
            assert all(slab.used for slab in pool.slabs)

    @rule()
    def settle(self):
        """The thread catches up."""
        assert self.tier.settle()
        total = sum(held(self.tier, scope) for scope in self.tier._space._scopes)
        assert total <= (768 * KIB if self.prefault else self.tier.used_bytes)

    @invariant()
    def agree(self):
        """States, counts, capacities and every held byte agree with the model, and check() finds nothing."""
        assert self.tier.check() == []
        want = {}
        for (name, group, item), (state, stamp) in self.model.items():
            pool = self.pool(name)
            per_item = pool.shape.slots_per_item[group]
            want[name, group, state] = want.get((name, group, state), 0) + per_item
            views = pool.views(group, item, pool.shape.slot_bytes[group] * per_item)
            assert all(view[0] == view[-1] == stamp for view in views)
        for pool in self.tier.pools:
            name = pool.scope, SHAPES.index(pool.shape)
            for group, counts in enumerate(pool.counts()):
                free = counts.pop(SlotState.FREE)
                assert counts == {state: want.get((name, group, state), 0) for state in STATES}
                assert pool.used(group) == pool.capacity(group) - free == sum(counts.values())


class PrefaultingMachine(HostMachine):
    """The same while the thread warms and empties memory in between."""

    prefault = True


TestHostMachine = HostMachine.TestCase
TestHostMachine.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
TestPrefaultingMachine = PrefaultingMachine.TestCase
TestPrefaultingMachine.settings = settings(max_examples=25, stateful_step_count=50, deadline=None)
