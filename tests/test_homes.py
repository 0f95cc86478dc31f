"""Homes that change: hosts that go away and come back, and prompts that many hosts ask for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engineproc import SPEC, path_keys
from fleetkit import Fleet, until
from kvtier import wire
from kvtier.peer.base import Move
from kvtier.peer.fame import HALF_S, HOT, MOST, Fame
from kvtier.peer.members import Members
from kvtier.peer.ring import homes, rungs
from kvtier.peer.secrets import read

PATHS = [[100 * n + page for page in range(3)] for n in range(1, 13)]
NAMES = "abcd"


def homes_of(home: Path, path: list[int], replicas: int) -> list[str]:
    """Homes of a prompt while every host answers."""
    shared = read(home / "secrets").shared(SPEC, f"uid:{os.getuid()}", 0)
    return homes(list(NAMES), rungs(shared, path_keys(path))[-1].key, replicas)


@pytest.mark.slow
def test_a_lost_homes_pages_get_another_home_and_it_gets_its_share_back(tmp_path: Path) -> None:
    """R=2: b is killed, then a, which computed all, and nothing is lost; b, back and empty, got its share again."""
    with Fleet(tmp_path, 4, replicas=2, more_flags=["--peers-grace-s=5"]) as hosts:
        both = [path for path in PATHS if set(homes_of(tmp_path, path, 2)) == {"a", "b"}]
        assert both, "of some prompts only the two hosts that are lost are homes"
        for path in PATHS:
            assert hosts["a"].put(path) == len(path)
        until(hosts["a"].settled)
        hosts["b"].daemon.kill()
        until(lambda: all(sum(n == 3 for n in hosts["a"].seen(path).values()) >= 2 for path in PATHS), 60.0)
        until(lambda: hosts["a"].ask(wire.Metrics())["queues"]["repairs"] == 0)
        hosts["b"].start()
        mine = [path for path in PATHS if "b" in homes_of(tmp_path, path, 2)]
        until(lambda: all(hosts["a"].seen(path).get("b") == 3 for path in mine), 60.0)
        until(lambda: not any(host.ask(wire.Metrics())["queues"]["repairs"] for host in hosts.values()))
        assert not any(hosts["a"].seen(path)["b"] for path in PATHS if path not in mine), "nor what is not its share"
        hosts["a"].daemon.kill()
        for name in "cd":
            assert [hosts[name].get(path) for path in PATHS] == [len(path) for path in PATHS]
            hosts[name].sound()


@pytest.mark.slow
def test_a_prompt_that_others_fetch_often_gets_more_homes(tmp_path: Path) -> None:
    """R=1: after enough fetches another host has the pages too, and serves them once the first home is killed."""
    with Fleet(tmp_path, 3, replicas=1) as hosts:
        shared = read(tmp_path / "secrets").shared(SPEC, f"uid:{os.getuid()}", 0)
        ring = {tuple(p): homes(list("abc"), rungs(shared, path_keys(p))[-1].key, 2) for p in PATHS}
        path = next(list(p) for p, found in ring.items() if found == ["b", "c"])
        assert hosts["b"].put(path) == len(path)

        def asked_again() -> bool:
            hosts["a"].ask(wire.Purge(scope=f"uid:{os.getuid()}"))
            assert hosts["a"].get(path) == len(path)
            return hosts["b"].seen(path).get("c", 0) == len(path)

        assert not asked_again()
        until(asked_again, 50.0)
        assert hosts["b"].count("pages_served_peer") >= HOT * len(path)
        asked_again()  # the home says now that there is another one
        hosts["b"].daemon.kill()
        until(lambda: "b" not in hosts["a"].up())
        hosts["a"].ask(wire.Purge(scope=f"uid:{os.getuid()}"))
        assert hosts["a"].get(path) == len(path)


def test_fame_grows_with_fetches_is_bounded_and_fades() -> None:
    """Each doubling of the fetches is worth a home, up to a bound; after some half-lives there is none any more."""
    fame, key = Fame(), b"k"
    rises = [n for n in range(1, 1001) if fame.note(key, 0.0)]
    assert rises == [int(HOT) << n for n in range(MOST)]
    assert fame.more(key, 0.0) == MOST
    levels = [fame.more(key, HALF_S * n) for n in range(12)]
    assert levels == sorted(levels, reverse=True)
    assert levels[-1] == 0
    assert fame.more(b"other", 0.0) == 0
    fame.tell(b"other", 99, 0.0)
    assert [fame.more(b"other", at) for at in (0.0, 59.0, 61.0)] == [MOST, MOST, 0]


class Seen:
    """A host as another one sees it."""

    def __init__(self, name: str) -> None:
        self.name, self.away, self.up, self.incarnation, self.missed = name, False, True, b"1", False


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("bcde"), st.sampled_from(["away", "back", "again"])), max_size=12))
def test_what_has_new_homes_is_owed_and_nothing_else(changes) -> None:
    """After each change every host owes what has another home than before, or one that was started again."""
    names = "abcde"
    seen = {name: [Seen(each) for each in names if each != name] for name in names}
    views = {name: Members(names, name, 2, Fame()) for name in names}
    keys = [bytes((n,)) for n in range(16)]
    for name in names:
        assert views[name].look(seen[name]) is None
    for number, (who, what) in enumerate(changes):
        for host in [host for others in seen.values() for host in others if host.name == who]:
            host.away, host.up = what == "away", what != "away"
            host.incarnation = b"%d" % number if what == "again" else host.incarnation
        before = {(name, key): views[name].homes(key) for name in names for key in keys}
        for name in set(names) - {who}:
            move = views[name].look(seen[name])
            for key in keys if move else ():
                now = views[name].homes(key)
                new = {home for home in now if home not in before[name, key] or home in move.fresh} - {name}
                assert views[name].owed([key], move) == bool(new)


def test_hosts_begin_to_ask_with_different_homes() -> None:
    """Each host asks all homes of a key, and of many hosts some begin with each."""
    hosts = [f"h{n}" for n in range(12)]
    views = [Members(hosts, name, 3, Fame()) for name in hosts]
    for key in (b"a", b"b", b"c"):
        turns = [view.turn(key) for view in views]
        assert all(set(turn) == set(views[0].homes(key)) for turn in turns)
        assert {turn[0] for turn in turns} == set(turns[0])


def test_a_move_says_who_was_there_and_who_is_new() -> None:
    """A host that stays away is named once; one that comes back, or answers in another life, is fresh."""
    b, c = Seen("b"), Seen("c")
    view = Members("abc", "a", 1, Fame())
    assert view.look([b, c]) is None
    b.away, b.up = True, False
    assert view.look([b, c]) == Move(("a", "b", "c"), frozenset())
    assert view.look([b, c]) is None
    assert "b" not in {name for n in range(64) for name in view.homes(bytes((n,)))}
    b.away, b.up = False, True
    assert view.look([b, c]) == Move(("a", "c"), frozenset("b"))
    c.incarnation = b"2"
    assert view.look([b, c]) == Move(("a", "b", "c"), frozenset("c"))
