"""The index against a dictionary: matching, leases, splits, eviction order, cuts, group rules."""

from __future__ import annotations

import random
import sys
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.identity import CacheSpec, GroupSpec, chain_keys
from kvtier.index import KeyedIndex, Order, RadixIndex
from kvtier.index.names import AHEAD
from kvtier.index.node import LOCAL, Node
from kvtier.policy import Policy
from kvtier.types import NO_COPY, Kind, Tier

FULL = GroupSpec(Kind.FULL, 1, 1, 64)


def spec(page_tokens: int = 1, groups: tuple[GroupSpec, ...] = (FULL,), **more: object) -> CacheSpec:
    return CacheSpec(model="m", fingerprint=b"f" * 16, kv_dtype="bf16", page_tokens=page_tokens, groups=groups, **more)


def radix(page_tokens: int = 1, groups: tuple[GroupSpec, ...] = (FULL,)) -> RadixIndex:
    orders = {Tier.HOST: Order(Tier.HOST, Policy(Tier.HOST)), Tier.DISK: Order(Tier.DISK, Policy(Tier.DISK))}
    return RadixIndex(spec(page_tokens, groups), b"r" * 16, orders)


def keys_of(pages: tuple[int, ...], page_tokens: int) -> bytes:
    return b"".join(np.full(page_tokens, p, "<i4").tobytes() for p in pages)


class Store:
    """Numbers handles and inserts paths, as the real store does: extend, put, publish."""

    def __init__(self, index: RadixIndex) -> None:
        self.index = index
        self.handle = 0

    def insert(self, keys: bytes, now: float, tier: int = Tier.HOST) -> dict[int, int]:
        index = self.index
        stride = index.stride
        total = len(keys) // stride
        _, have = index.deepest(keys)
        if have == total:
            return {}
        node = index.extend(keys, now)
        new = {}
        for page in range(have, total):
            where, at = index.locate(node, page)
            handles = array("q", range(self.handle, self.handle + index.groups))
            for group in range(index.groups):
                index.put(where, at, tier, group, [handles[group]], [page])
            self.handle += index.groups
            index.publish(node, page + 1)
            new[page + 1] = handles[0]
        for tier in index.orders:
            index.requeue(node, tier)
        node.time = max(node.time, now)
        return new


class Machine(RuleBasedStateMachine):
    """Random operations; the model maps each cached path to its host and disk handles."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[tuple[int, ...], dict[int, int]] = {}
        self.leases: list[tuple[object, tuple[int, ...]]] = []
        self.now = 0.0

    @initialize(page=st.sampled_from((1, 2, 16, 64, 256)))
    def begin(self, page: int) -> None:
        self.tokens = page
        self.index = radix(page)
        self.store = Store(self.index)

    paths = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple)

    def tick(self) -> float:
        self.now += 1
        return self.now

    def cached(self, path: tuple[int, ...]) -> int:
        depth = 0
        while depth < len(path) and path[: depth + 1] in self.model:
            depth += 1
        return depth

    @rule(path=paths)
    def insert(self, path: tuple[int, ...]) -> None:
        for depth, handle in self.store.insert(keys_of(path, self.tokens), self.tick()).items():
            self.model[path[:depth]] = {Tier.HOST: handle}

    @rule(path=paths)
    def match_is_the_longest_cached_prefix(self, path: tuple[int, ...]) -> None:
        found = self.index.match(keys_of(path, self.tokens), self.tick())
        assert found.pages == self.cached(path)
        if found.pages:
            assert found.node.depth < found.pages <= found.node.end

    @rule(path=paths)
    def lease(self, path: tuple[int, ...]) -> None:
        found = self.index.match(keys_of(path, self.tokens), self.tick())
        if found.pages:
            node = self.index.ending_at(found.node, found.pages)
            self.index.lease(node)
            self.leases.append((node, path[: found.pages]))

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 99))
    def unlease(self, pick: int) -> None:
        node, _ = self.leases.pop(pick % len(self.leases))
        self.index.unlease(node)

    @rule(path=paths)
    def save(self, path: tuple[int, ...]) -> None:
        """Write to disk, parents first, what of a path is cached."""
        depth = self.cached(path)
        if not depth:
            return
        node, _ = self.index.deepest(keys_of(path[:depth], self.tokens))
        for page in range(depth):
            where, at = self.index.locate(node, page)
            copies = self.model[path[: page + 1]]
            if Tier.DISK not in copies:
                self.store.handle += 1
                self.index.put(where, at, Tier.DISK, 0, [self.store.handle], [page])
                copies[Tier.DISK] = self.store.handle

    @rule(tier=st.sampled_from([Tier.HOST, Tier.DISK]))
    def evict(self, tier: int) -> None:
        """The victim is a leaf that nobody leases, and the least recently used of those."""
        taken = self.index.orders[tier].pop()
        if taken is None:
            return
        _, node = taken
        assert not node.refs
        lo, hi = self.index.tail(node, tier, most=2)
        if lo == hi:
            return
        gone = {h for d in self.index.drop(node, lo, hi, tier) for h in d.handles}
        hit = [path for path, copies in self.model.items() if copies.get(tier) in gone]
        for path in hit:
            del self.model[path][tier]
        for path in hit:
            deeper = [p for p in self.model if len(p) > len(path) and p[: len(path)] == path]
            assert not any(tier in self.model[p] for p in deeper), "evicted before its child"
        for path in sorted(hit, key=len, reverse=True):
            if not self.model[path]:
                assert not any(len(p) > len(path) and p[: len(path)] == path for p in self.model), "others need it"
                del self.model[path]
        self.index.settle(node)
        self.index.requeue(node, tier)

    @rule(path=paths)
    def cut(self, path: tuple[int, ...]) -> None:
        """Losing a page takes all below it, and nothing else."""
        if self.cached(path) < len(path):
            return
        node, _ = self.index.deepest(keys_of(path, self.tokens))
        result = self.index.cut(self.index.cut_at(node, len(path) - 1))
        lost = [p for p in self.model if p[: len(path)] == path]
        assert result.pages == len(lost)
        for each in lost:
            del self.model[each]

    @invariant()
    def invariants_hold(self) -> None:
        assert self.index.check() == []
        held = {}
        for tier in (Tier.HOST, Tier.DISK):
            held[tier] = sorted(
                int(h)
                for n in self.index.walk()
                for h in (n.handles(tier, 0) if n.at[tier] is not None else [])
                if h >= 0
            )
            assert held[tier] == sorted(c[tier] for c in self.model.values() if tier in c)

    @invariant()
    def leased_paths_stay_whole(self) -> None:
        for node, path in self.leases:
            if not node.dead:
                assert self.cached(path) == len(path)
                assert node.end == len(path)

    def teardown(self) -> None:
        while self.leases:
            self.unlease(0)
        assert self.index.root.refs == 0
        assert not self.index.doomed
        assert all(n.refs == 0 for n in self.index.walk())


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("page_tokens", [1, 16, 64, 256])
def test_match_finds_every_prefix_and_nothing_more(page_tokens: int) -> None:
    """Whole pages only: a prompt shorter than a page, a partial page and a diverging token end the match."""
    index = radix(page_tokens)
    rng = np.random.default_rng(page_tokens)
    tokens = rng.integers(0, 1000, page_tokens * 20).astype("<i4")
    Store(index).insert(tokens.tobytes(), 1.0)
    assert index.match(b"", 2.0).pages == 0
    for pages in (1, 7, 20):
        assert index.match(tokens[: pages * page_tokens].tobytes(), 2.0).pages == pages
        changed = tokens[: pages * page_tokens].copy()
        changed[-1] += 1
        assert index.match(changed.tobytes(), 2.0).pages == pages - 1
    assert index.check() == []


def test_a_prompt_of_a_million_tokens_matches_whole() -> None:
    """Length alone breaks nothing."""
    index = radix(64)
    keys = np.random.default_rng(1).integers(0, 2**31 - 1, 1 << 20).astype("<i4").tobytes()
    pages = len(keys) // 256
    node = index.extend(keys, 1.0)
    index.put(node, 0, Tier.HOST, 0, array("q", range(pages)), array("Q", range(pages)))
    index.publish(node, pages)
    assert index.match(keys, 2.0).pages == pages
    index.ending_at(node, pages // 3)
    assert index.match(keys, 2.0).pages == pages
    assert index.check() == []


def test_pending_pages_are_shown_and_not_matched() -> None:
    """Reserved pages are nobody's hit until they are published."""
    index = radix(1)
    path = keys_of((1, 2, 3, 4), 1)
    node = index.extend(path, 1.0)
    index.lease(node)
    found = index.match(path, 1.0)
    assert (found.pages, found.pending) == (0, 4)
    index.put(node, 0, Tier.HOST, 0, [7], [0])
    index.publish(node, 1)
    found = index.match(path, 1.0)
    assert (found.pages, found.pending) == (1, 3)
    index.unlease(node)
    found = index.match(path, 1.0)
    assert (found.pages, found.pending) == (1, 0)
    assert index.pages == 1
    assert index.check() == []


def test_leases_stay_symmetric_when_a_later_insert_splits_what_is_leased() -> None:
    """A lease taken before a split is released after it without a trace."""
    index = radix(1)
    store = Store(index)
    store.insert(keys_of((1, 2, 3, 4), 1), 1.0)
    node = index.ending_at(index.match(keys_of((1, 2, 3), 1), 1.0).node, 3)
    index.lease(node)
    store.insert(keys_of((1, 9), 1), 2.0)
    store.insert(keys_of((1, 2, 8), 1), 3.0)
    assert index.orders[Tier.HOST].pop()[1].edge in {keys_of((9,), 1), keys_of((8,), 1), keys_of((4,), 1)}
    index.unlease(node)
    assert all(n.refs == 0 for n in index.walk())


def test_a_leased_page_that_is_cut_is_doomed_until_its_lease_ends() -> None:
    """Its slot comes back exactly once, when the last holder lets go."""
    index = radix(1)
    Store(index).insert(keys_of((1, 2, 3), 1), 1.0)
    node = index.match(keys_of((1, 2, 3), 1), 1.0).node
    index.lease(node)
    cut = index.cut(index.cut_at(node, 1))
    assert not cut.freed
    assert index.doomed
    assert index.match(keys_of((1, 2, 3), 1), 1.0).pages == 1
    freed = [h for d in index.unlease(node) for h in d.handles]
    assert freed == [1, 2]
    assert not index.doomed
    assert index.check() == []


def test_eviction_takes_leaves_in_order_of_use() -> None:
    """Least recently used first, children before parents, whatever the number of leaves."""
    index = radix(1)
    store = Store(index)
    for n in range(100):
        store.insert(keys_of((0, n), 1), float(n + 1))
    index.match(keys_of((0, 0), 1), 1000.0)
    out = []
    while (taken := index.orders[Tier.HOST].pop()) is not None:
        _, node = taken
        lo, hi = index.tail(node, Tier.HOST)
        out.append(int(np.frombuffer(node.edge, "<i4")[0]))
        index.drop(node, lo, hi, Tier.HOST)
        index.settle(node)
        index.requeue(node, Tier.HOST)
    assert out == [*range(1, 100), 0, 0]
    assert index.nodes == 0


def test_the_order_does_not_grow_with_touches() -> None:
    """One entry a leaf, however often it is matched (no rebuild, no leak)."""
    index = radix(1)
    store = Store(index)
    for n in range(50):
        store.insert(keys_of((n,), 1), 1.0)
    for n in range(5000):
        index.match(keys_of((n % 50,), 1), 2.0 + n)
    assert len(index.orders[Tier.HOST]) == 50


def test_disk_never_evicts_the_parent_of_what_host_alone_holds() -> None:
    """A page on disk only, with a child in host only, stays until the child is gone."""
    index = radix(1)
    store = Store(index)
    store.insert(keys_of((1,), 1), 1.0, Tier.DISK)
    store.insert(keys_of((1, 2), 1), 2.0)
    parent = index.match(keys_of((1,), 1), 3.0).node
    taken = index.orders[Tier.DISK].pop()
    assert taken is None or index.tail(taken[1], Tier.DISK) == (1, 1)
    _, child = index.orders[Tier.HOST].pop()
    index.drop(child, *index.tail(child, Tier.HOST), Tier.HOST)
    index.settle(child)
    assert index.orders[Tier.DISK].pop() == (index, parent)
    assert index.tail(parent, Tier.DISK) == (0, 1)


def test_a_page_on_one_tier_alone_stays_while_a_deeper_one_lasts_elsewhere() -> None:
    """A load that failed for one page of a node leaves a hole in host: disk keeps what fills it."""
    index = radix(1)
    Store(index).insert(keys_of((1, 2, 3, 4), 1), 1.0, Tier.DISK)
    node = index.match(keys_of((1, 2, 3, 4), 1), 2.0).node
    for page in (0, 2):
        index.put(node, page, Tier.HOST, 0, [100 + page], [page])
    assert index.tail(node, Tier.DISK) == (2, 4)
    index.evict(node, 2, 4, Tier.DISK)
    index.settle(node)
    assert index.check() == []
    assert index.match(keys_of((1, 2, 3, 4), 1), 3.0).pages == 3


def test_what_is_left_of_a_page_that_loses_its_anchor_goes_with_it() -> None:
    """A state point in host is of no use, and nobody's, once its page has gone from disk."""
    index = radix(1, (FULL, STATE))
    node = index.extend(keys_of((1, 2), 1), 1.0)
    index.put(node, 0, Tier.DISK, 0, array("q", [7, 8]), array("Q", [0, 0]))
    index.put(node, 0, Tier.DISK, 1, array("q", [7, 8]), array("Q", [0, 0]))
    index.publish(node, 2)
    index.put(node, 1, Tier.HOST, 1, [50], [0])
    lo, hi = index.tail(node, Tier.DISK)
    gone = {(d.tier, d.group, h) for d in index.evict(node, lo, hi, Tier.DISK) for h in d.handles}
    assert gone == {(Tier.DISK, 0, 7), (Tier.DISK, 0, 8), (Tier.DISK, 1, 7), (Tier.DISK, 1, 8), (Tier.HOST, 1, 50)}
    index.settle(node)
    assert index.nodes == 0
    assert index.check() == []


WINDOW = GroupSpec(Kind.WINDOW, 1, 1, 64, window=3)
STATE = GroupSpec(Kind.STATE, 1, 1, 64)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_match_ends_where_every_groups_rule_holds(data: st.DataObject) -> None:
    """Full: every page. Window: the pages of the last W tokens. State: a point exactly at the boundary."""
    tokens = data.draw(st.sampled_from([1, 2]))
    index = radix(tokens, (FULL, WINDOW, STATE))
    pages = data.draw(st.integers(1, 10))
    path = tuple(range(pages))
    node = index.extend(keys_of(path, tokens), 1.0)
    present = [[True] * pages, *(data.draw(st.lists(st.booleans(), min_size=pages, max_size=pages)) for _ in range(2))]
    split = data.draw(st.integers(1, pages))
    if split < pages:
        index.split(node, split)
    for page in range(pages):
        where, at = index.locate(node, page)
        for group in range(3):
            if present[group][page]:
                tier = data.draw(st.sampled_from([Tier.HOST, Tier.DISK]))
                index.put(where, at, tier, group, [page * 3 + group], [0])
        index.publish(node, page + 1)
    asked = data.draw(st.integers(0, pages))
    expected = 0
    for end in range(1, asked + 1):
        window = all(present[1][max(0, end * tokens - 3) // tokens : end])
        if window and present[2][end - 1]:
            expected = end
    assert index.match(keys_of(path[:asked], tokens), 2.0).pages == expected
    assert index.check() == []


def test_a_split_keeps_handles_sums_and_chain_keys() -> None:
    """What a page was before a split it is after it."""
    index = radix(2)
    keys = keys_of(tuple(range(10)), 2)
    node = index.extend(keys, 1.0)
    index.put(node, 0, Tier.HOST, 0, array("q", range(100, 110)), array("Q", range(200, 210)))
    index.publish(node, 10)
    expected = chain_keys(b"r" * 16, keys, 8)
    assert index.chain_of(node) == expected
    for at in (7, 3, 1):
        index.ending_at(node, at)
    got = b"".join(index.chain_of(n) for n in sorted(index.walk(), key=lambda n: n.depth))
    assert got == expected
    for page in range(10):
        where, at = index.locate(node, page)
        assert index.get(where, at, Tier.HOST, 0) == 100 + page
        assert where.sums[0][at] == 200 + page


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_what_may_go_of_a_leaf_is_what_nothing_cached_needs(data: st.DataObject) -> None:
    """Whatever the tiers hold: the deepest copies, back to a page that deeper pages of other tiers need."""
    groups = data.draw(st.sampled_from([(FULL,), (FULL, FULL), (FULL, STATE)]))
    index = radix(1, groups)
    pages, most = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    node = index.extend(keys_of(tuple(range(pages)), 1), 1.0)
    held = st.sets(st.tuples(st.integers(0, pages - 1), st.integers(0, len(groups) - 1)))
    whole = {(page, group) for page in range(pages) for group in range(len(groups))}
    copies = {tier: data.draw(held | st.just(whole)) for tier in LOCAL}
    for tier, items in copies.items():
        for page, group in items:
            index.put(node, page, tier, group, [page << 56 | 0xFF], [0])
    published = data.draw(st.integers(0, pages))
    index.publish(node, published)
    if goes_on := data.draw(st.booleans()):
        index.extend(keys_of(tuple(range(pages + 1)), 1), 1.0)

    def anchored(page: int, tiers: list[Tier]) -> bool:
        return all(any((page, group) in copies[tier] for tier in tiers) for group in index.anchors)

    for tier in LOCAL:
        hi = max((page + 1 for page, _ in copies[tier]), default=0)
        lo = max(0, hi - most)
        if index.states and not goes_on:
            alive = max((p + 1 for p in range(pages) if any((p, 1) in copies[t] for t in LOCAL)), default=0)
            lo = alive if lo < alive < hi else lo
        elsewhere = [page for page in range(pages) if anchored(page, [t for t in LOCAL if t != tier])]
        deepest = pages if goes_on else max(elsewhere, default=0)
        needed = [page for page in range(lo, min(deepest, hi)) if page not in elsewhere]
        assert index.tail(node, tier, most) == (max((page + 1 for page in needed), default=lo), hi)
    kept = max((page + 1 for page in range(published) if anchored(page, list(LOCAL))), default=0)
    assert index._kept(node) == kept


@pytest.mark.parametrize("page_tokens", [1, 3, 16])
def test_a_page_has_one_name_wherever_nodes_are_cut(page_tokens: int) -> None:
    """Splits, joins and cut ends change no name; another page, path or place has another."""
    keys = keys_of(tuple(range(12)), page_tokens)
    whole = radix(page_tokens)
    expected = whole.names(whole.extend(keys, 1.0), 0, 12)
    assert len(set(expected)) == 12
    for asked in (False, True):
        index = radix(page_tokens)
        node = index.extend(keys, 1.0)
        for at in (9, 5, 2):
            if asked:
                index.name_of(node)
            index.ending_at(node, at)
        parts = sorted(index.walk(), key=lambda each: each.depth)
        assert [name for each in parts for name in index.names(each, 0, each.pages)] == expected
        index.publish(node, 12)
        index.join(node)
        assert index.names(node, 3, 7) == expected[3:7]
        index.put(node, 0, Tier.HOST, 0, array("q", range(8)), array("Q", range(8)))
        index.settle(node)
        assert node.pages == 8
        assert index.names(node, 2, 8) == expected[2:8]
    other = whole.extend(keys_of((20, *range(1, 12)), page_tokens), 1.0)
    assert not set(whole.names(other, 0, 12)) & set(expected)
    again = whole.extend(keys_of((0, 0), page_tokens), 1.0)
    assert whole.name_of(again) not in expected


@pytest.mark.parametrize("page_tokens", [1, 16])
def test_what_is_left_of_a_node_that_goes_page_by_page_keeps_its_names(page_tokens: int) -> None:
    """Two nodes by turns, of more pages than are named at once, one of them split meanwhile."""
    pages = 2 * AHEAD + 5
    whole = radix(page_tokens)
    index = radix(page_tokens)
    ends = []
    for first in (0, 1000):
        keys = keys_of(tuple(range(first, first + pages)), page_tokens)
        node = index.extend(keys, 1.0)
        index.put(node, 0, Tier.HOST, 0, array("q", range(pages)), array("Q", range(pages)))
        index.publish(node, pages)
        ends.append((node, whole.names(whole.extend(keys, 1.0), 0, pages)))
        index.name_of(node)
    for left in range(pages - 1, 0, -1):
        for node, expected in ends:
            index.evict(node, node.pages - 1, node.pages, Tier.HOST)
            index.settle(node)
            assert node.depth + node.pages == left
            assert index.name_of(node) == expected[left - 1]
        if left == AHEAD:
            index.ending_at(ends[0][0], 3)
        if left == 4:
            break


def test_dead_tails_go_before_colder_pages_that_can_be_resumed() -> None:
    """Pages beyond the last state point serve nobody."""
    index = radix(1, (FULL, STATE))

    def put(path: tuple[int, ...], points: set[int], now: float) -> None:
        node = index.extend(keys_of(path, 1), now)
        for page in range(len(path)):
            index.put(node, page, Tier.HOST, 0, [page], [0])
            if page in points:
                index.put(node, page, Tier.HOST, 1, [50 + page], [0])
        index.publish(node, len(path))

    put((1, 2, 3), {2}, 1.0)
    put((7, 8, 9), {0}, 2.0)
    index.orders[Tier.HOST] = order = Order(Tier.HOST, Policy(Tier.HOST))
    for node in index.walk():
        node.queued = 0
        order.push(index, node)
    _, node = order.pop()
    assert node.edge == keys_of((7, 8, 9), 1)
    assert index.tail(node, Tier.HOST) == (1, 3)


@pytest.mark.parametrize("seed", range(40))
def test_a_walk_meets_every_page_whatever_is_split_and_joined_meanwhile(seed: int) -> None:
    """It may wait between two nodes: pages that a split gives to a node above, or a join to one below, are met too."""
    pick = random.Random(seed)
    index = radix(1, (FULL,))
    for _ in range(6):
        path = tuple(pick.randrange(2) for _ in range(10))
        index.publish(index.extend(keys_of(path, 1), 1.0), 10)
    for number, node in enumerate(index.walk()):
        handles = range(10 * number, 10 * number + node.pages)
        index.put(node, 0, Tier.HOST, 0, list(handles), [0] * node.pages)

    def nodes() -> list[Node]:
        return list(index.walk())

    def pages(node: Node) -> set[bytes]:
        whole = b"".join(each.edge for each in index.path(node))
        return {whole[: (node.depth + n + 1) * index.stride] for n in range(node.pages)}

    before = set().union(*map(pages, nodes()))
    met: set[bytes] = set()
    for node in index.walk():
        met |= set() if node.dead else pages(node)
        for _ in range(pick.randrange(3)):
            other = pick.choice(nodes())
            if pick.random() < 0.5 and other.pages > 1:
                index.split(other, pick.randrange(1, other.pages))
            else:
                index.join(other)
    assert met == before
    assert index.check() == []


@pytest.mark.parametrize("depth", [0, 1])
def test_a_dead_node_that_the_index_leads_to_is_found(depth: int) -> None:
    """Walks pass it over, so that its pages are served and nobody evicts, flushes or scrubs them."""
    index = radix(1, (FULL,))
    for path in ((1, 2), (1, 3), (4,)):
        Store(index).insert(keys_of(path, 1), 1.0)
    index.check()
    index.match(keys_of((4,) if not depth else (1, 2), 1), 1.0).node.dead = True
    assert f"node at page {depth}: dead but reachable" in index.check()


def test_a_walk_of_many_keys_begins_in_little_time() -> None:
    """It is one step of the loop: nothing is made for each, which takes twenty times as long as to list them."""
    index = KeyedIndex(spec(key_bytes=16), b"k" * 16, {})
    for number in range(20_000):
        index.ensure(index.name(0, number.to_bytes(16, "little")), 1.0)
    before = sys.getallocatedblocks()
    walk = index.walk()
    first = next(walk)
    assert sys.getallocatedblocks() - before < 1000
    assert 1 + sum(node is not first for node in walk) == 20_000


keyed_names = st.tuples(st.integers(0, 1), st.integers(0, 5))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["put", "lease", "unlease", "evict", "cut"]), keyed_names), max_size=60))
def test_the_keyed_index_equals_a_dictionary(steps: list[tuple[str, tuple[int, int]]]) -> None:
    """Existence per (group, key), no parents, holes, leases."""
    orders = {Tier.HOST: Order(Tier.HOST, Policy(Tier.HOST))}
    index = KeyedIndex(spec(key_bytes=16, groups=(FULL, FULL)), b"r" * 16, orders)
    model: dict[bytes, int] = {}
    leased: list[tuple[object, bytes]] = []
    for now, (what, (group, number)) in enumerate(steps):
        name = index.name(group, bytes([number]) * 16)
        node = index.find(name)
        if what == "put" and (node is None or not node.live):
            node = index.ensure(name, float(now))
            index.put(node, 0, Tier.HOST, group, [now], [0])
            node.live = 1
            model[name] = now
        elif what == "lease" and node is not None:
            index.lease(node)
            leased.append((node, name))
        elif what == "unlease" and leased:
            index.unlease(leased.pop()[0])
        elif what == "cut" and node is not None and not node.refs:
            index.cut(node)
            del model[name]
        elif what == "evict" and (taken := orders[Tier.HOST].pop()) is not None:
            victim = taken[1]
            assert victim.edge not in {n for _, n in leased}
            assert model[victim.edge] == min(v for k, v in model.items() if k not in {n for _, n in leased})
            index.drop(victim, 0, 1, Tier.HOST)
            index.settle(victim)
            del model[victim.edge]
        assert index.check() == []
        assert {n.edge for n in index.walk()} == set(model)
    for node, _ in leased:
        index.unlease(node)
    assert index.root.refs == 0


def test_no_copy_is_minus_one_everywhere() -> None:
    """Handles of absent copies are the one value that no tier hands out."""
    index = radix(1)
    node = index.extend(keys_of((1, 2), 1), 1.0)
    assert index.get(node, 0, Tier.HOST, 0) == NO_COPY == -1


shares = st.integers(0, 3)
doings = st.lists(
    st.one_of(
        st.tuples(st.just("store"), shares, st.integers(0, 9)),
        st.tuples(st.just("match"), shares, st.integers(0, 9)),
        st.tuples(st.just("use"), shares, st.integers(0, 9)),
        st.tuples(st.just("lease"), shares, st.integers(0, 9)),
        st.tuples(st.just("keep"), shares, st.integers(0, 9)),
        st.tuples(st.just("evict"), shares, st.integers(-1, 3)),
        st.tuples(st.just("move"), shares, shares),
    ),
    max_size=60,
)


@given(doings)
@settings(max_examples=300, deadline=None)
def test_whatever_quotas_there_are_what_was_used_least_recently_goes_first(ops):
    """Of one quota or of all: never what is leased, what is to be kept after all others, and nobody is forgotten."""
    order = Order(Tier.HOST, Policy(Tier.HOST))
    indexes = [RadixIndex(spec(), bytes([n]) * 16, {Tier.HOST: order}) for n in range(4)]
    for n, index in enumerate(indexes):
        index.share = n
    now, leased = 0.0, []
    for what, number, detail in ops:
        now += 1.0
        index, keys = indexes[number], keys_of((detail,), 1)
        if what == "store":
            Store(index).insert(keys, now)
        elif what == "move":
            for _ in index.move_to(detail):
                pass
        elif what == "evict":
            free = [
                (node.keep > max(now, node.time), node.keep if node.keep > max(now, node.time) else node.time, node)
                for each in indexes if detail < 0 or each.share == detail
                for node in each.walk() if node.count[Tier.HOST] and not node.refs
            ]  # fmt: skip
            found = order.pop(now, detail)
            assert (found is None) == (not free)
            if found is not None:
                first = min(free, key=lambda each: each[:2])
                assert found[1] is first[2] or (first[0] and found[1].keep > now), "something went before its turn"
                dropped = found[0].evict(found[1], 0, 1, Tier.HOST)
                assert dropped
                found[0].settle(found[1])
        elif (found := index.match(keys, now)).pages:
            if what == "use":
                index.use(found.node, now)
            elif what == "keep":
                index.keep(found.node, now + 2 * detail)
            elif what == "lease":
                index.lease(found.node)
                leased.append((index, found.node))
        elif leased:
            where, node = leased.pop(0)
            where.unlease(node)


def test_an_eviction_looks_at_few_quotas_however_many_there_are():
    """Those whose leaves changed, and the one whose turn it is: not at all tenants for each page."""
    looks = []

    class Counted(Order):
        def _pick(self, heaps, share, now, own):
            looks.append(share)
            return super()._pick(heaps, share, now, own)

    order = Counted(Tier.HOST, Policy(Tier.HOST))
    for n in range(64):
        index = RadixIndex(spec(), bytes([n]) * 16, {Tier.HOST: order})
        index.share = n
        for page in range(4):
            Store(index).insert(keys_of((page,), 1), float(page * 64 + n))
    assert order.pop(1000.0) is not None
    looks.clear()
    for _ in range(100):
        assert order.pop(1000.0) is not None
    assert len(looks) <= 300
