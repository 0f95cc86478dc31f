"""Every policy, those that ship and a user's own file, through the same checks."""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines import Engine, spec, tokens
from kvtier import wire
from kvtier.identity import GroupSpec
from kvtier.index import Order, RadixIndex
from kvtier.policy import DEFAULT, ByKind, Counting, Ghosts, Policy, every, load, path_of
from kvtier.policy.ages import EDGES, WIDTHS, Ages, Waits, at_age
from kvtier.policy.ghosts import MOST
from kvtier.policy.guard import guarded
from kvtier.policy.kinds import HEARD
from kvtier.replay.drive import replay
from kvtier.replay.trace import Mix, read, segments
from kvtier.sizing.curve import Trace
from kvtier.sizing.replay import belady_hits, lru_hits
from kvtier.store.ways import Ways
from kvtier.types import NO_COPY, Code, Kind, KvtierError, Tier
from storekit import storing
from tracekit import longest, published, traces

OWN = '''"""mine: the newest goes first."""

from kvtier.policy import Policy


class Mine(Policy):
    """Most recently used first."""

    def rank(self, index, node):
        """The opposite of LRU."""
        return -node.time
'''
NAMES = [*(found.name for found in every()), "own"]


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's own policy."""
    path = tmp_path_factory.mktemp("policies") / "mine.py"
    path.write_text(OWN)
    return path


@pytest.fixture(params=NAMES)
def policy(request: pytest.FixtureRequest, own: Path) -> str:
    """Each of them, as it would be asked for."""
    return str(own) if request.param == "own" else request.param


class Forest:
    """A radix index over one tier of so many slots, driven by hand: what the store does, without bytes."""

    def __init__(self, policy: str, room: int, *, joins: bool = False) -> None:
        self.joins = joins
        self.order = Order(Tier.HOST, load(policy)(Tier.HOST))
        self.index = RadixIndex(spec(page_tokens=1), bytes(16), {Tier.HOST: self.order})
        self.room = room
        self.held = 0
        self.now = 0.0
        self.leased: list = []
        self.gone: list[bytes] = []

    def request(self, keys: bytes) -> int:
        """Match, use, store what is missing within the room; returns pages found."""
        self.now += 1.0
        index, stride = self.index, self.index.stride
        found = index.match(keys, self.now)
        node = index.root
        if found.pages:
            node = index.ending_at(found.node, found.pages)
            index.use(node, self.now)
            if self.joins:
                index.join(node)
        index.lease(node)
        missing = len(keys) // stride - found.pages
        if missing:
            self.evict(self.held + missing - self.room)
            got = min(missing, self.room - self.held)
            if got > 0:
                self.store(keys[: (found.pages + got) * stride], found.pages, got)
        index.unlease(node)
        return found.pages

    def store(self, keys: bytes, first: int, pages: int) -> None:
        """New pages at the end of a path."""
        node = self.index.extend(keys, self.now)
        self.index.lease(node)
        at = first - node.depth
        self.index.put(node, at, Tier.HOST, 0, array("q", range(pages)), array("Q", bytes(8 * pages)))
        self.index.publish(node, first + pages)
        self.index.fresh(node, self.now)
        self.held += pages
        self.index.unlease(node)

    def evict(self, pages: int) -> None:
        """Make room for so many pages, as far as the order gives leaves."""
        while pages > 0 and (taken := self.order.pop(self.now)) is not None:
            _, node = taken
            assert not node.refs, "a leased node was offered"
            assert node.tier_leaf(Tier.HOST), "a node with copies below it was offered"
            lo, hi = self.index.tail(node, Tier.HOST, min(pages, self.order.policy.share(node)))
            assert lo < hi, "nothing of the victim may go"
            self.gone.append(b"".join(each.edge for each in self.index.path(node)) + bytes([hi - lo]))
            freed = sum(len(dropped.handles) for dropped in self.index.evict(node, lo, hi, Tier.HOST))
            self.held -= freed
            pages -= freed
            self.index.settle(node)
            self.index.requeue(node, Tier.HOST)

    def check(self) -> None:
        """The index's invariants, leaf-first among them, and the policy's count of copies."""
        assert self.index.check() == []
        for node in self.index.walk():
            held = node.handles(Tier.HOST, 0)
            assert held is not None
            assert (held[: node.live] != NO_COPY).all(), "a page lost its copy before what follows it"
        assert self.order.policy.size == self.held


paths = st.lists(st.integers(0, 2), min_size=1, max_size=10).map(lambda pages: tokens(*pages, page_tokens=1))


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(paths, st.booleans()), min_size=1, max_size=60), st.integers(1, 25), st.booleans())
def test_leaves_go_first_and_leases_hold(policy, requests, room, joins):
    """Whatever is asked and held: no page outlives its parent, nothing leased goes, the counts agree."""
    forest = Forest(policy, room, joins=joins)
    leased = []
    for keys, hold in requests:
        forest.request(keys)
        found = forest.index.match(keys, forest.now)
        if hold and found.pages:
            node = forest.index.ending_at(found.node, found.pages)
            forest.index.lease(node)
            leased.append((node, keys[: found.pages * forest.index.stride]))
        elif len(leased) > 2:
            forest.index.unlease(leased.pop(0)[0])
        forest.check()
        for _, held in leased:
            assert forest.index.match(held, forest.now).pages * forest.index.stride == len(held)
    for node, _ in leased:
        forest.index.unlease(node)
    forest.evict(1 << 30)
    assert (forest.held, forest.index.pages) == (0, 0), "something is never evicted"


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(paths, min_size=1, max_size=60), st.integers(1, 20))
def test_the_same_requests_evict_the_same_pages(policy, requests, room):
    """No policy draws lots."""
    one, other = Forest(policy, room), Forest(policy, room)
    assert [one.request(keys) for keys in requests] == [other.request(keys) for keys in requests]
    assert one.gone == other.gone


@settings(max_examples=100, deadline=None)
@given(st.lists(paths, min_size=1, max_size=60), st.integers(10, 25))
def test_joining_nodes_changes_no_eviction(requests, room):
    """Under LRU the same pages are found whether or not the nodes above a used one are joined to it."""
    plain, joined = Forest("lru", room), Forest("lru", room, joins=True)
    assert [plain.request(keys) for keys in requests] == [joined.request(keys) for keys in requests]
    assert joined.index.nodes <= plain.index.nodes


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(traces(), st.integers(0, 10))
def test_the_store_serves_by_it(policy, trace, spare):
    """Replay through the real store hits no more than Belady, and all there is where nothing is evicted."""
    pages = longest(trace) + spare
    outcome = asyncio.run(replay(segments(trace), policy, [pages]))
    hits = sum(outcome.hit_tokens.values()) // trace.block_tokens
    assert hits <= belady_hits(trace, pages)
    if pages >= len(trace.parent):
        assert hits == lru_hits(trace, pages)


def test_policies_choose_among_the_first_leaves():
    """Whatever was used, leased or evicted since the last choice: each head is the first free leaf of its lane."""
    forest = Forest("heat", 30)
    policy, pick = forest.order.policy, forest.order.policy.pick

    def checked(heads: list, now: float) -> int:
        first: dict[int, float] = {}
        for node in forest.index.walk():
            if node.tier_leaf(Tier.HOST) and not node.refs:
                lane = policy.lane(node)
                first[lane] = min(first.get(lane, node.time), node.time)
        assert {lane: head.time for lane, head in enumerate(heads) if head is not None} == first
        return pick(heads, now)

    policy.pick = checked
    draw = random.Random(5)
    held: list = []
    for _ in range(1500):
        keys = tokens(*(draw.randrange(4) for _ in range(draw.randrange(1, 5))), page_tokens=1)
        forest.request(keys)
        other = tokens(*(draw.randrange(4) for _ in range(4)), page_tokens=1)
        node, pages = forest.index.deepest(other)
        if pages and draw.random() < 0.1:
            held.append(forest.index.ending_at(node, pages))
            forest.index.lease(held[-1])
        if len(held) > 2:
            forest.index.unlease(held.pop(0))


def _ghosts(policy: object) -> list[Ghosts]:
    """Every memory of evicted pages that a policy has."""
    found = []
    for value in vars(policy).values():
        found += [each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, Ghosts)]
    return found


def test_memory_of_evicted_pages_is_bounded(policy):
    """However much goes through a tier, a policy remembers at most twice what the tier holds, and few entries."""
    forest = Forest(policy, 200)
    for n in range(600):
        forest.request(tokens(*(n * 10 + k for k in range(10)), page_tokens=1))
        for ghosts in _ghosts(forest.order.policy):
            assert len(ghosts) <= 400
    numbers = [v for v in vars(forest.order.policy).values() if isinstance(v, (list, dict, set, array, np.ndarray))]
    assert sum(map(len, numbers)) <= 256 + HEARD
    assert len(forest.order) <= 4 * forest.index.nodes + 2048


@pytest.mark.parametrize("name", ["heat", "adaptive", "foresight"])
def test_what_is_to_be_learnt_is_bounded(name):
    """However often pages are used while none come, the waits that were not looked into yet stay few."""
    forest = Forest(name, 20)
    for n in range(HEARD):
        forest.request(tokens(n % 3, page_tokens=1))
    assert len(forest.order.policy._heard) <= HEARD


def test_ghosts_of_a_large_tier_are_a_sample():
    """The number of entries does not grow with the tier; what is said of pages does."""
    ghosts: Ghosts[None] = Ghosts()
    ghosts.resize(100 * MOST)
    assert ghosts.scale >= 100
    assert ghosts.bound <= MOST


def _cost_us(policy: str, leaves: int, touches: int = 2000) -> float:
    """Microseconds for a use, or an eviction with the store that caused it, with so many leaves."""
    forest = Forest(policy, leaves)
    for n in range(leaves):
        forest.request(tokens(n + 1, page_tokens=1))
    draw = random.Random(1)
    chosen = [tokens(draw.randrange(leaves) + 1, page_tokens=1) for _ in range(touches)]
    best = float("inf")
    for round_ in range(3):
        start = time.thread_time()
        for n, keys in enumerate(chosen):
            forest.request(keys if n % 2 else tokens(10_000_000 + round_ * touches + n, page_tokens=1))
        best = min(best, time.thread_time() - start)
    return best / touches * 1e6


@pytest.mark.slow
def test_the_cost_is_flat(policy):
    """A use or an eviction among 50 times as many leaves costs less than three times as much."""
    few, many = _cost_us(policy, 1000), _cost_us(policy, 50_000)
    assert many < 3 * few + 10, f"{few:.1f} us among 1000 leaves, {many:.1f} us among 50000"


def test_policies_that_ship_are_short():
    """A policy is a file of fewer than 100 lines, with a line that says what goes first."""
    for found in every():
        assert len(Path(found.path).read_text().splitlines()) < 100, found.name
        assert found.summary, found.name
    assert DEFAULT in {found.name for found in every()}


def test_names_and_paths(own):
    """A name, a path, and what is said of neither."""
    assert load(str(own)).__name__ == "Mine"
    assert path_of("lru").stem == "lru"
    for wrong in ("none-such", "./none.py"):
        with pytest.raises(KvtierError) as caught:
            load(wrong)
        assert caught.value.code == Code.BAD_REQUEST


@pytest.mark.parametrize("text", ["x = 1\n", "raise RuntimeError\n", "raise SystemExit(3)\n", "class Two:\n    pass\n"])
def test_a_file_that_is_no_policy_is_refused(tmp_path, text):
    """Before anything is served by it."""
    path = tmp_path / "wrong.py"
    path.write_text(text)
    with pytest.raises(KvtierError, match="policy"):
        load(str(path))


MISTAKES = {
    "rank": "def rank(self, index, node):\n        return 1 / ((1 - node.depth) * (2 - node.depth))",
    "nan": "def rank(self, index, node):\n        return float('nan')",
    "no number": "def rank(self, index, node):\n        return None",
    "share": "def share(self, node):\n        return 0",
    "lane": "lanes = 3\n    def lane(self, node):\n        return 3",
    "pick": "lanes = 3\n    def pick(self, heads, now):\n        return 2",
    "spare": "def spare(self, node):\n        return True",
    "gain": "def gain(self, *args):\n        super().gain(*args)\n        self.x += 1",
    "lose": "def lose(self, index, node, lo, hi, copies):\n        raise KeyError(lo)",
    "use": "def use(self, node, now):\n        node.none",
    "fall": "def fall(self, node, parent):\n        node.none",
    "init": "def __init__(self, tier):\n        self.y = tier.z",
}


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_a_users_policy_that_makes_a_mistake_is_left_for_lru(mistake, tmp_path):
    """Nothing fails and nothing is lost: from then on it is LRU. Status and log name the mistake, replay ends by it."""
    path = tmp_path / "mine.py"
    path.write_text(f"from kvtier.policy import Policy\n\n\nclass Mine(Policy):\n    {MISTAKES[mistake]}\n")
    pages = spec((GroupSpec(Kind.FULL, 1, 1, 4096),), page_tokens=1)
    async with storing(None, host=256 << 10, ways=Ways(str(path))) as store:
        engine = Engine(store)
        await engine.open(pages)
        for n in range(60):
            await engine.match(tokens(100, 101, page_tokens=1))
            assert await engine.put(tokens(100, 101, *range(1000 * n, 1000 * n + 9), page_tokens=1)) >= 9
            assert store.parts.check() == []
        status = store.report.status(wire.Status()).data
        assert status["policy"] == str(path)
        assert status["policy_mistake"]
        latest = [await engine.match(tokens(100, 101, 1000 * n, page_tokens=1)) for n in range(55, 60)]
        assert [each.pages for each in latest] == [3] * 5, "as with LRU"
    parent = [-1, *(up for n in range(1, 40, 3) for up in (0, n, n + 1))]
    leaf = [at for n in range(3, 40, 3) for at in (n, n)]
    count = len(leaf)
    requests = segments(Trace("t", 1, parent, leaf, [4] * count, [0] * count, [float(n) for n in range(count)]))
    with pytest.raises(KvtierError, match="policy: expected a policy without mistakes"):
        await replay(requests, str(path), [12])


def test_what_a_users_policy_had_ranked_goes_before_what_was_used_since_its_mistake():
    """Its ranks are of another order than times: a leaf of a rank above all times, or in a lane behind, would stay."""

    class Mine(Policy):
        lanes = 2
        broken = False

        def lane(self, node):
            return int(node.time < 6)

        def rank(self, index, node):
            return 1 / (not self.broken) + 1e9 - node.time

    policy = guarded(Mine, lambda where, exc: None)(Tier.HOST)
    order = Order(Tier.HOST, policy)
    index = RadixIndex(spec(page_tokens=1), bytes(16), {Tier.HOST: order})

    def store(at: int) -> None:
        node = index.extend(tokens(at, page_tokens=1), float(at))
        index.put(node, 0, Tier.HOST, 0, [at], [1])
        index.publish(node, 1)

    for at in range(1, 11):
        store(at)
    policy.broken = True
    store(11)
    index.use(index.match(tokens(3, page_tokens=1), 12.0).node, 12.0)
    for at in range(13, 20):
        store(at)
    went = []
    while (found := order.pop(100.0)) is not None:
        went.append(int(found[1].time))
    assert sorted(went[:10]) == [1, 2, 4, 5, 6, 7, 8, 9, 10, 11]
    assert went[10:] == list(range(12, 20))


def test_a_users_second_chances_are_no_mistake_however_many_leaves_have_one():
    """Nor does its own book-keeping have to be Policy's: it may leave that out, from the start."""

    class Clock(Policy):
        def __init__(self, tier):
            self.used = set()

        def gain(self, index, node, lo, hi, copies):
            self.used.add(node)

        def rank(self, index, node):
            return node.time + 1e6 * (node not in self.used)

        def spare(self, node):
            spared = node in self.used
            self.used.discard(node)
            return spared

    wrong = []
    order = Order(Tier.HOST, guarded(Clock, lambda where, exc: wrong.append((where, exc)))(Tier.HOST))
    index = RadixIndex(spec(page_tokens=1), bytes(16), {Tier.HOST: order})
    for at in range(1500):
        node = index.extend(tokens(at, page_tokens=1), float(at))
        index.put(node, 0, Tier.HOST, 0, [at], [1])
        index.publish(node, 1)
    found = order.pop(1e4)
    assert wrong == []
    assert found is not None
    assert found[1].time == 0.0


@pytest.mark.parametrize("lanes", ["0", "-1", "300", "'two'"])
def test_lanes_that_cannot_be_are_refused(lanes, tmp_path):
    """Before anything is served."""
    path = tmp_path / "mine.py"
    path.write_text(f"from kvtier.policy import Policy\n\n\nclass Mine(Policy):\n    lanes = {lanes}\n")
    with pytest.raises(KvtierError, match="lanes"):
        load(str(path))


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_ends_that_nobody_misses_are_pages_however_many_groups_a_page_has(groups):
    """Of a prompt of 200 pages tlru gives up first what is computed again in a bearable time, and no more."""
    order = Order(Tier.HOST, load("tlru")(Tier.HOST))
    layers = tuple(GroupSpec(Kind.FULL, 1, 1, 64) for _ in range(groups))
    index = RadixIndex(spec(layers, page_tokens=16), bytes(16), {Tier.HOST: order})
    node = index.extend(tokens(*range(200), page_tokens=16), 1.0)
    for group in range(groups):
        index.put(node, 0, Tier.HOST, group, array("q", range(200)), array("Q", bytes(1600)))
    index.publish(node, 200)
    policy, gone = order.policy, 0
    while policy.lane(node) == 0:
        lo, hi = index.tail(node, Tier.HOST, policy.share(node))
        index.evict(node, lo, hi, Tier.HOST)
        gone += hi - lo
    assert gone == 1024 // 16


def test_uses_are_handed_up_once():
    """A node that goes, comes back and goes again gives its parent every use once."""
    forest = Forest("lfuda", 100)
    forest.request(tokens(1, 2, page_tokens=1))
    for _ in range(4):
        forest.request(tokens(1, 2, 3, page_tokens=1))
    policy = forest.order.policy
    assert isinstance(policy, Counting)
    parent = forest.index.match(tokens(1, 2, page_tokens=1), 0.0).node
    before = policy.uses(parent).count
    forest.evict(1)
    assert policy.uses(parent).count == before + 3


def around(forest: Forest, documents: range, times: int, questions: int = 0) -> float:
    """Share of the documents' pages that are found going through them so often, a question after each."""
    found = asked = 0
    for turn in range(times):
        for number in documents:
            pages = [1, 2, *range(10 * number, 10 * number + 9)]
            after = [10**6 * (turn + 1) + 10 * number + at for at in range(questions)]
            found += forest.request(tokens(*pages, *after, page_tokens=1))
            asked += len(pages)
    return found / asked


@pytest.mark.parametrize("name", ["heat", "foresight", "adaptive"])
@pytest.mark.parametrize("questions", [0, 1])
def test_in_a_loop_over_more_than_the_tier_holds_a_part_stays(name, questions):
    """Least recently used, all of it goes before it is asked for again. Once the loop is over, what stayed goes."""
    loop, room = range(10, 60), 400
    lru, forest = Forest("lru", room, joins=True), Forest(name, room, joins=True)
    assert around(lru, loop, 12, questions) < 0.2  # what all begin with
    around(forest, loop, 12, questions)
    assert around(forest, loop, 5, questions) > 0.6
    policy = forest.order.policy
    assert isinstance(policy, ByKind)
    kept = [node.count[Tier.HOST] for node in forest.index.walk() if (uses := policy.note(node)) and uses.extra.kept]
    assert sum(kept) == policy._loops.kept > room / 2
    around(forest, range(100, 125), 30)
    assert around(forest, range(100, 125), 2) == 1.0


def test_kinds_are_learnt():
    """Prompts that come back are hotter than prompts that never do, and so outlive newer ones of those."""
    forest = Forest("heat", 120)
    draw = random.Random(3)
    for n in range(3000):
        if n % 3:
            forest.request(tokens(*(1000 + 4 * n + k for k in range(4)), page_tokens=1))
        else:
            forest.request(tokens(draw.randrange(12), page_tokens=1) + tokens(7, page_tokens=1))
    policy = forest.order.policy
    assert isinstance(policy, ByKind)
    assert policy.heat[13] > 3 * min(policy.heat[1:11])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 60), st.floats(0, 60), st.integers(1, 9), st.booleans()), max_size=12))
def test_waits_are_counted_where_they_were(waits):
    """Whatever waited from one age to another counts in each bin for as long as it was in it."""
    seen = Ages(1)
    seen.wait(Waits.of(array("d", [n for since, until, pages, used in waits for n in (0, since, until, pages, used)])))
    there = np.array(seen._part) + np.cumsum(seen._whole)[:-1] * WIDTHS
    for number, (lo, hi) in enumerate(pairwise(EDGES)):
        spent = sum(pages * max(0.0, min(until, hi) - max(since, lo)) for since, until, pages, _ in waits)
        assert there[number] == pytest.approx(spent, abs=1e-6)
    assert seen._used.sum() == sum(pages for since, until, pages, used in waits if used and until > since)


def test_what_comes_back_after_a_while_is_worth_its_wait():
    """Uses at one age only: before it pages are worth more and more, after it next to nothing; hotter kinds more."""
    seen = Ages(2)
    heard = array("d")
    for n in range(4000):
        kind, used = n % 2, n % 8 in {0, 1, 3, 5}
        heard.extend((kind, 0.0, 1.0 if used else 3.0, 1, used))
    seen.wait(Waits.of(heard))
    seen.learn(1000)
    cold, hot = seen.worth()
    assert at_age(hot, 0.2) < at_age(hot, 0.5) < at_age(hot, 0.9)
    assert at_age(hot, 2.0) < at_age(hot, 0.2) / 3
    assert at_age(cold, 0.5) < at_age(hot, 0.5)
    assert at_age(hot, 100.0) == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["mooncake_conversation", "mooncake_synthetic", "kvct_claudecode"])
def test_the_default_is_never_far_below_lru(name):
    """At 1-5 % and 4-20 % of the blocks heat hits at most 0.5 point less than LRU, on chat more."""
    requests = read([published(name)], Mix())
    for percent in (1, 2, 5, 10, 20):
        pages = [requests.blocks * percent // 100]
        heat, lru = (100 * asyncio.run(replay(requests, each, pages)).ratio for each in ("heat", "lru"))
        assert heat >= lru - 0.5, percent
        if name == "mooncake_conversation" and percent <= 5:
            assert heat > lru, percent


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "percent"), [("mooncake_conversation", 5), ("mooncake_synthetic", 5), ("kvct_claudecode", 1)]
)
def test_adaptive_is_never_far_below_the_best_of_the_others(name, percent):
    """On second halves, what was learnt before included, it hits at most a point less than any policy that ships."""
    requests = read([published(name)], Mix())
    pages, first = [requests.blocks * percent // 100], len(requests.leaf) // 2
    hits = {each.name: 100 * asyncio.run(replay(requests, each.name, pages, first)).ratio for each in every()}
    assert hits["adaptive"] >= max(hits.values()) - 1.0, hits
