"""Scheduling and routing: longest prefix first is as good as any order, nobody starves, the cheapest host wins."""

from __future__ import annotations

import itertools
import random

import pytest

from engines import Engine, spec, tokens
from kvtier import wire
from kvtier.route import Sessions, View, cost, order, rank
from kvtier.types import KvtierError
from storekit import storing

Pages = tuple[int, ...]


class Lru:
    """A cache of `most` pages that drops what was used longest ago, deepest first, and never what is in use."""

    def __init__(self, most: int, held: Pages = ()) -> None:
        self.most = most
        self.clock = 0
        self.used: dict[Pages, int] = {}
        self.serve(held)

    def cached(self, path: Pages) -> int:
        """Leading pages of a path that are there."""
        return next((n for n in range(len(path)) if path[: n + 1] not in self.used), len(path))

    def serve(self, path: Pages) -> int:
        """Compute what is missing; how much was not."""
        self.clock += 1
        hits = self.cached(path)
        mine = {path[: n + 1] for n in range(len(path))}
        self.used |= dict.fromkeys(mine, self.clock)
        while len(self.used) > self.most:
            self.used.pop(min(self.used.keys() - mine, key=lambda key: (self.used[key], -len(key))))
        return hits


def served(paths: list[Pages], turns: list[int] | tuple[int, ...], most: int, held: Pages) -> int:
    """Pages that were hits when the requests are served in that order."""
    cache = Lru(most, held)
    return sum(cache.serve(paths[n]) for n in turns)


def greedy(paths: list[Pages], most: int, held: Pages) -> int:
    """Hits of taking, again and again, the request that shares most with the cache."""
    cache, left, hits = Lru(most, held), list(paths), 0
    while left:
        left.remove(path := max(left, key=cache.cached))
        hits += cache.serve(path)
    return hits


@pytest.mark.parametrize("seed", range(40))
def test_the_order_is_as_good_as_the_best_of_all_orders(seed: int) -> None:
    """With a cache that holds the longest request, no permutation of the batch has more hits; some has fewer."""
    rng = random.Random(seed)
    paths = [tuple(rng.randrange(2) for _ in range(rng.randrange(1, 6))) for _ in range(6)]
    most = max(map(len, paths))
    held = paths[rng.randrange(6)][: rng.randrange(most)]
    before = Lru(most, held)
    turns = order([tokens(*p) for p in paths], 8, [before.cached(p) for p in paths], [0.0] * 6, 1.0)
    assert sorted(turns) == list(range(6))
    every = [served(paths, each, most, held) for each in itertools.permutations(range(6))]
    assert served(paths, turns, most, held) == max(every)
    assert served(paths, turns, most, held) >= greedy(paths, most, held)


def test_some_orders_are_worse() -> None:
    """The comparison above can fail: going back and forth between two prefixes computes both twice."""
    paths = [(1, 1, 1, 2), (2, 2, 2, 2), (1, 1, 1, 3), (2, 2, 2, 3)]
    turns = order([tokens(*p) for p in paths], 8, [0] * 4, [0.0] * 4, 1.0)
    assert served(paths, turns, 4, ()) == 6
    assert served(paths, [0, 1, 2, 3], 4, ()) == 0


def test_nothing_waits_past_the_bound_behind_requests_that_keep_coming() -> None:
    """Requests that share a hot prefix arrive for ever; one that shares nothing is served once it is overdue."""
    waiting = {"lone": ((9, 9), 0.0)}
    hot, bound = 0, 5.0
    for now in range(1, 20):
        for _ in range(3):
            waiting[f"hot{hot}"] = ((1, 1, 1, hot), float(now))
            hot += 1
        names = list(waiting)
        paths = [waiting[n][0] for n in names]
        cached = [3 if p[0] == 1 else 0 for p in paths]
        turns = order([tokens(*p) for p in paths], 8, cached, [now - waiting[n][1] for n in names], bound)
        served_now = [names[turns[0]]]
        for name in served_now:
            del waiting[name]
        if "lone" not in waiting:
            break
    assert now == bound, "served as soon as it was overdue, and not before: others shared more"


async def test_engines_ask_for_the_order_of_their_requests() -> None:
    """Order names the handles that go first: those whose prefix is cached, then those that share with them."""
    async with storing(None) as store:
        engine = Engine(store)
        await engine.open(spec())
        await engine.put(tokens(1, 2, 3))
        paths = [tokens(5, 6), tokens(1, 2, 9), tokens(7, 7), tokens(1, 2, 3, 4)]
        handles = [(await engine.match(path)).handle for path in paths]
        reply = await engine.call(wire.Order(tuple(handles), (0, 0, 0, 0), 1000))
        assert [handles.index(h) for h in reply.handles][:2] == [3, 1]
        late = await engine.call(wire.Order(tuple(handles), (0, 0, 1000, 0), 1000))
        assert handles.index(late.handles[0]) == 2
        with pytest.raises(KvtierError):
            await engine.call(wire.Order((handles[0], 12345), (0, 0), 1000))
        engine.leave()


def test_costs_are_those_of_the_published_formula() -> None:
    """1600 tokens in blocks of 16: 40 blocks in GPU, 60 in host, 100 on disk cost 960, 880, 1200 tokens; 50: 800."""
    views = [View("gpu", device=40), View("host", host=60), View("disk", disk=100)]
    assert [cost(view, 100) * 16 for view in views] == [960, 880, 1200]
    assert rank(views, 100)[0][0] == "host"
    assert rank([View("gpu", device=50), *views[1:]], 100)[0] == ("gpu", 50.0)


def test_load_outweighs_copies() -> None:
    """A host with every page and a long queue loses to an idle one with none."""
    assert rank([View("warm", device=100, backlog=300), View("idle")], 100)[0][0] == "idle"


def test_cold_prompts_go_where_hashing_says_unless_that_host_is_busy() -> None:
    """Without any copy the first of `cold` is taken; one busier by more than the prompt is not."""
    idle = [View("a"), View("b"), View("c")]
    assert rank(idle, 10, cold=["c", "a", "b"])[0][0] == "c"
    assert rank([*idle[:2], View("c", backlog=11)], 10, cold=["c", "b", "a"])[0][0] == "b"
    assert rank([View("a", host=1), *idle[1:]], 10, cold=["c", "b", "a"])[0][0] == "a"


def test_a_session_stays_until_its_host_is_too_busy_or_it_was_silent_too_long() -> None:
    """Affinity beats a slightly better host, gives way to a much better one, and ends with its time."""
    views = [View("a", host=4), View("b", host=8)]
    assert rank(views, 10, stay="a")[0][0] == "a"
    assert rank([View("a", host=4, backlog=40), views[1]], 10, stay="a")[0][0] == "b"
    sessions = Sessions(ttl_s=10.0, most=2)
    sessions.put("s", "a", 0.0)
    assert sessions.get("s", 9.0) == "a"
    assert sessions.get("s", 10.0) == ""
    sessions.put("t", "b", 1.0)
    sessions.put("u", "b", 1.0)
    assert sessions.get("s", 1.0) == "", "the oldest went for the third"
