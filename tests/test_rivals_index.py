"""What went wrong in other prefix caches and must hold in this index: names, leases, splits, eviction cost, memory."""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
import tracemalloc
from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import STATE, WINDOW, spec
from kvtier.client import page_keys
from kvtier.identity import CacheSpec, GroupSpec, base_id, cache_id, chain_keys
from kvtier.index import Order, RadixIndex
from kvtier.index import order as order_module
from kvtier.policy import Policy
from kvtier.types import Kind, Tier

FULL = GroupSpec(Kind.FULL, 1, 1, 64)


def radix(page_tokens: int = 1, order: Order | None = None) -> RadixIndex:
    orders = {Tier.HOST: Order(Tier.HOST, Policy(Tier.HOST)) if order is None else order}
    return RadixIndex(spec((FULL,), page_tokens=page_tokens), b"r" * 16, orders)


def insert(index: RadixIndex, keys: bytes, now: float = 1.0) -> int:
    """Publish a path in host; how many pages of it are new."""
    pages = len(keys) // index.stride
    node, have = index.deepest(keys)
    if have < pages:
        node = index.extend(keys, now)
        for page in range(have, pages):
            where, at = index.locate(node, page)
            index.put(where, at, Tier.HOST, 0, [page], [page])
        index.publish(node, pages)
    return pages - have


def path(*pages: int, page_tokens: int = 1) -> bytes:
    return np.repeat(np.array(pages, "<i4"), page_tokens).tobytes()


# -- names -----------------------------------------------------------------------------------------------------------


def test_no_two_field_lists_make_one_identity() -> None:
    """What ends one field and begins the next is part of the name: moving a letter between fields is another cache."""
    fields = ("model", "revision", "kv_dtype", "codec", "layout", "backend", "adapter")
    specs = [spec(**dict(zip(fields, values, strict=True))) for values in set(itertools.permutations("abcdefg", 7))]
    specs = [*specs[:500], spec(model="ab", revision="c"), spec(model="a", revision="bc")]
    specs += [spec(adapter="x"), spec(salt=b"x"), spec(revision="x"), spec(backend="x"), spec(extras=True)]
    ids = {base_id(each, scope) for each in specs for scope in ("uid:1", "uid:1:x")}
    assert len(ids) == 2 * len(specs)
    assert len({cache_id(spec(), "uid:1", epoch) for epoch in range(100)}) == 100


def test_every_field_of_a_spec_is_part_of_its_identity() -> None:
    """A field that is added to the spec and forgotten in its name would let formats mix."""
    other = {
        "model": "n", "fingerprint": b"g" * 16, "kv_dtype": "fp8", "page_tokens": 4, "revision": "2", "codec": "c",
        "layout": "l", "backend": "b", "adapter": "a", "salt": b"s", "extras": True, "key_bytes": 16,
        "groups": (GroupSpec(Kind.FULL, 2, 2, 1004),),
    }  # fmt: skip
    assert set(other) == set(CacheSpec.__struct_fields__)
    ids = {base_id(spec(**{name: value}), "s") for name, value in other.items()} | {base_id(spec(), "s")}
    assert len(ids) == len(other) + 1
    group = {"kind": Kind.STATE, "layers": 3, "heads": 3, "cell_bytes": 77, "window": 6}
    assert set(group) == set(GroupSpec.__struct_fields__)
    values = {"kind": WINDOW.kind, "layers": 1, "heads": 2, "cell_bytes": 500, "window": 5}
    groups = [GroupSpec(**(values | {name: value})) for name, value in group.items()] + [WINDOW]
    assert len({base_id(spec((FULL, each)), "s") for each in groups}) == len(groups)


def test_names_are_the_same_in_every_process() -> None:
    """Whatever seed the interpreter hashes with: else nothing on disk would ever be found again."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from engines import spec; from kvtier.identity import *\n"
        "print(cache_id(spec(adapter='x', salt=b'y'), 'uid:1', 3).hex(), chain_keys(b'p' * 16, b'k' * 64, 8).hex())"
    )
    roots = [path for path in sys.path if path]
    said = {
        subprocess.run(
            [sys.executable, "-c", code, *roots],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    here = cache_id(spec(adapter="x", salt=b"y"), "uid:1", 3).hex(), chain_keys(b"p" * 16, b"k" * 64, 8).hex()
    assert said == {f"{here[0]} {here[1]}\n".encode()}


def test_the_same_page_under_another_prefix_has_another_name() -> None:
    """A chain key names a page with everything before it."""
    one, two = chain_keys(b"r" * 16, path(1, 7, 7), 4), chain_keys(b"r" * 16, path(2, 7, 7), 4)
    names = [chain[at : at + 16] for chain in (one, two) for at in range(0, 48, 16)]
    assert len(set(names)) == 6


# -- pages, prompts and counts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_tokens", [16, 64, 256])
def test_a_prompt_shorter_than_a_page_is_no_page(page_tokens: int) -> None:
    """It matches nothing, inserts nothing and counts nothing; the part of a last page neither."""
    index = radix(page_tokens)
    short = page_keys(index.spec, np.arange(page_tokens - 1, dtype=np.int32))
    assert short == b""
    assert index.match(short, 1.0).pages == 0
    assert insert(index, short) == 0
    assert (index.nodes, index.pages) == (0, 0)
    more = page_keys(index.spec, np.arange(3 * page_tokens + 5, dtype=np.int32))
    assert insert(index, more) == 3
    assert (index.nodes, index.pages) == (1, 3)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1, 16, 64]))
def test_counts_hold_through_splits_leases_and_evictions(data: st.DataObject, page_tokens: int) -> None:
    """Free, leased and cached pages always sum up: nothing is counted twice, nothing below zero, nothing for ever."""
    index, leases, there = radix(page_tokens), [], 0
    for _ in range(data.draw(st.integers(1, 25))):
        keys = path(*data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=8)), page_tokens=page_tokens)
        match data.draw(st.sampled_from(["insert", "lease", "release", "evict"])):
            case "insert":
                there += insert(index, keys)
            case "lease":
                found = index.match(keys, 1.0)
                if found.pages:
                    node = index.ending_at(found.node, found.pages)
                    index.lease(node)
                    leases.append(node)
            case "release" if leases:
                index.unlease(leases.pop(data.draw(st.integers(0, len(leases) - 1))))
            case "evict":
                there -= evict_one(index)
        held = sum(node.pages for node in index.walk() if node.refs)
        assert held == len({(id(n), at) for lease in leases for n in index.path(lease) for at in range(n.pages)})
        assert sum(node.count[Tier.HOST] for node in index.walk()) == index.pages == there
        assert index.check() == []
    for node in leases:
        index.unlease(node)
    while gone := evict_one(index):
        there -= gone
    assert (there, index.nodes, index.pages) == (0, 0, 0)
    assert not any(node.refs for node in index.walk())


def evict_one(index: RadixIndex) -> int:
    """Evict one leaf's tail; how many pages went."""
    taken = index.orders[Tier.HOST].pop()
    if taken is None:
        return 0
    _, node = taken
    assert not node.refs, "evicted while leased"
    lo, hi = index.tail(node, Tier.HOST)
    index.evict(node, lo, hi, Tier.HOST)
    index.settle(node)
    index.requeue(node, Tier.HOST)
    return hi - lo


def test_a_lease_holds_the_matched_pages_and_no_more() -> None:
    """What goes on after the match can be evicted; overlapping inserts later leave nothing held for ever."""
    index = radix()
    insert(index, path(*range(10)))
    found = index.match(path(0, 1, 2, 3, 99), 1.0)
    node = index.ending_at(found.node, found.pages)
    index.lease(node)
    assert evict_one(index) == 6
    assert evict_one(index) == 0
    assert index.pages == 4
    for n in range(5):
        insert(index, path(0, 1, 2, 3, 50 + n))
        insert(index, path(0, 1, 60 + n))
        insert(index, path(*range(5 + n)))
    index.unlease(node)
    assert not any(n.refs for n in index.walk())
    while evict_one(index):
        pass
    assert (index.nodes, index.pages) == (0, 0)


# -- cost ------------------------------------------------------------------------------------------------------------


class Counting(Policy[None]):
    """Least recently used, counting how often a leaf is looked at."""

    looks = 0

    def rank(self, index: object, node: object) -> float:
        self.looks += 1
        return super().rank(index, node)


def test_an_eviction_looks_at_few_leaves_however_many_there_are() -> None:
    """Nothing is rebuilt: with twenty times the leaves, touched in any order, a victim costs no more looks."""
    cost = []
    for leaves in (1_000, 20_000):
        policy = Counting(Tier.HOST)
        index = radix(order=Order(Tier.HOST, policy))
        for n in range(leaves):
            insert(index, path(n, n), float(n))
        for n in np.random.default_rng(0).permutation(leaves)[: leaves // 20]:
            index.match(path(n, n), float(leaves))
        policy.looks = 0
        for _ in range(200):
            assert evict_one(index) > 0
        cost.append(policy.looks / 200)
    assert cost[1] < 4 * cost[0] < 40


def test_entries_of_leaves_that_are_gone_are_swept_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No single death looks at many, however many leaves there are; the order is not much longer than they are."""
    looks, real = 0, order_module._among

    def counted(*args: object) -> bool:
        nonlocal looks
        looks += 1
        return real(*args)

    monkeypatch.setattr(order_module, "_among", counted)
    index, leaves = radix(), 10_000
    order = index.orders[Tier.HOST]
    times = np.random.default_rng(0).permutation(leaves)
    for n in range(leaves):
        insert(index, path(n, n), float(times[n]))
    for n in np.random.default_rng(1).permutation(leaves)[: leaves * 9 // 10]:
        looks = 0
        index.cut(index.deepest(path(n, n))[0])
        assert looks < 20
        assert len(order) < 1.3 * index.nodes + 64
    gone = []
    while (popped := order.pop()) is not None:
        gone.append(popped[1].time)
    assert len(gone) == index.nodes
    assert gone == sorted(gone)


def test_a_match_of_a_million_tokens_copies_none_of_them() -> None:
    """Neither the prompt nor what is left of it is sliced, however many nodes the path has."""
    index = radix(64)
    keys = np.random.default_rng(1).integers(0, 1 << 31, 1 << 20).astype("<i4").tobytes()
    for pages in range(1 << 8, (1 << 14) + 1, 1 << 8):
        insert(index, keys[: pages * index.stride])
    assert index.nodes == 64
    tracemalloc.start()
    try:
        assert index.match(keys, 2.0).pages == 1 << 14
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(keys) // 100


def test_what_is_left_of_a_path_keeps_nothing_of_the_rest_alive() -> None:
    """A node that was cut short, or split, owns exactly its own bytes: no view of what it came from."""
    index = radix(64)
    keys = np.random.default_rng(2).integers(0, 1 << 31, 1 << 18).astype("<i4").tobytes()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        insert(index, bytes(bytearray(keys)))
        index.chain_of(index.deepest(keys)[0])
        full, _ = tracemalloc.get_traced_memory()
        node = index.ending_at(index.match(keys, 1.0).node, 8)
        index.lease(node)
        while evict_one(index):
            pass
        assert index.pages == 8
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert left - before < (full - before) / 50


def test_states_and_windows_survive_a_split_where_they_are() -> None:
    """A split moves no item to another page, of any group."""
    index = RadixIndex(spec((FULL, WINDOW, STATE)), b"r" * 16, {Tier.HOST: Order(Tier.HOST, Policy(Tier.HOST))})
    keys = np.repeat(np.arange(8, dtype="<i4"), 2).tobytes()
    node = index.extend(keys, 1.0)
    for group in range(3):
        index.put(node, 0, Tier.HOST, group, array("q", range(8 * group, 8 * group + 8)), array("Q", range(8)))
    index.publish(node, 8)
    for at in (3, 6, 1):
        index.ending_at(index.deepest(keys)[0], at)
    for page in range(8):
        where, at = index.locate(index.deepest(keys)[0], page)
        assert [index.get(where, at, Tier.HOST, group) for group in range(3)] == [page, 8 + page, 16 + page]
    assert index.check() == []


def test_what_was_only_matched_can_be_evicted() -> None:
    """A look-up pins nothing, however often it is repeated and whether or not anybody reads the pages later."""
    index = radix()
    insert(index, path(*range(10)))
    for _ in range(100):
        assert index.match(path(*range(10)), 5.0).pages == 10
    assert evict_one(index) == 10
    assert (index.nodes, index.pages) == (0, 0)


def test_every_test_that_the_design_names_is_there() -> None:
    """The table of what went wrong elsewhere points at tests that exist."""
    here = Path(__file__).resolve().parent
    text = here.parent / "docs" / "design.md"
    if not text.exists():
        pytest.skip("read from a checkout")
    named = set(re.findall(r"`(test_\w+)`", text.read_text()))
    found = {name for file in here.glob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())}
    assert len(named) > 50
    assert named <= found


def test_nothing_that_runs_what_it_reads_is_used_at_any_boundary() -> None:
    """No module of the product loads pickles, marshals or evaluates text."""
    package = Path(__file__).resolve().parent.parent / "kvtier"
    files = sorted(package.rglob("*.py"))
    if not files:
        pytest.skip("read from a checkout")
    wrong = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            wrong += [f"{file.name}: {n}" for n in names if n.split(".")[0] in {"pickle", "marshal", "shelve", "dill"}]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec"}:
                wrong.append(f"{file.name}: {node.func.id}")
    assert not wrong
