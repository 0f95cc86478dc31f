"""After a start most of the index stays as disk had it until somebody looks into it, and nobody can tell."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engines import FULL, STATE, Engine, idle, spec, tokens
from kvtier.index import RadixIndex
from kvtier.index.folded import FoldedNode
from kvtier.store import Store
from kvtier.types import RUN_PAGES, Tier
from storekit import MIB, quiet, storing

TRUNK = tokens(*range(1, 4 * RUN_PAGES + 9))
PAGE = len(tokens(1))


async def stored(path: Path, prompts: list[bytes], groups: tuple = (FULL,)) -> None:
    """Prompts on disk, each in runs of its own below those it shares."""
    async with storing(path, host=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec(groups))
        for keys in prompts:
            await engine.put(keys)
            await quiet(store)
        engine.leave()


@asynccontextmanager
async def again(path: Path, groups: tuple = (FULL,)) -> AsyncIterator[tuple[Store, Engine, RadixIndex]]:
    """The store after a start, whose catalogue is loaded."""
    async with storing(path, host=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec(groups))
        yield store, engine, store.parts.caches[engine.opened.cache].radix
        engine.leave()
        await quiet(store)
        assert idle(store) == []


def shape(index: RadixIndex) -> list[tuple[int, int]]:
    """First page and pages of every node."""
    return sorted((node.depth, node.pages) for node in index.walk())


def folded(index: RadixIndex) -> int:
    """Nodes that nobody has looked into."""
    return sum(isinstance(node, FoldedNode) for node in index.walk())


async def test_runs_of_a_prompt_are_one_node_that_is_unfolded_when_it_is_matched(tmp_path: Path) -> None:
    """A check and a save of the heat look into nothing; a match does, and the index is right before and after."""
    other = tokens(*range(7000, 7020))
    await stored(tmp_path, [TRUNK, other])
    (tmp_path / "heat").unlink(missing_ok=True)
    async with again(tmp_path) as (store, engine, index):
        pages = len(TRUNK) // PAGE
        assert shape(index) == [(0, 20), (0, pages)]
        assert folded(index) == 2
        assert index.check() == []
        await store.parts.warmth.save()
        assert folded(index) == 2
        assert await engine.get(TRUNK) == pages
        assert folded(index) == 1
        assert index.check() == []
        assert index.copies[Tier.DISK] == pages + 20


@pytest.mark.parametrize("at", [RUN_PAGES, 2 * RUN_PAGES, 2 * RUN_PAGES + 7, 4 * RUN_PAGES])
async def test_what_branches_off_between_runs_or_within_one_is_served(tmp_path: Path, at: int) -> None:
    """Where a second prompt goes on from inside the first, both come back bit-exact."""
    branch = TRUNK[: at * PAGE] + tokens(*range(5000, 5000 + 2 * RUN_PAGES))
    await stored(tmp_path, [TRUNK[: at * PAGE], TRUNK, branch])
    (tmp_path / "heat").unlink(missing_ok=True)
    async with again(tmp_path) as (_, engine, index):
        assert index.check() == []
        for keys in (branch, TRUNK):
            assert await engine.get(keys) == len(keys) // PAGE
        assert index.check() == []


async def test_a_cut_between_runs_looks_into_no_node(tmp_path: Path) -> None:
    """Two prompts that share whole runs are three nodes after a start, all as disk had them."""
    branch = TRUNK[: 2 * RUN_PAGES * PAGE] + tokens(*range(5000, 5000 + RUN_PAGES))
    await stored(tmp_path, [TRUNK, branch])
    (tmp_path / "heat").unlink(missing_ok=True)
    async with again(tmp_path) as (_, engine, index):
        shared = 2 * RUN_PAGES
        assert shape(index) == [(0, shared), (shared, RUN_PAGES), (shared, len(TRUNK) // PAGE - shared)]
        assert folded(index) == 3
        assert index.check() == []
        assert await engine.get(branch) == 3 * RUN_PAGES
        assert index.check() == []


async def test_a_node_that_was_used_by_itself_is_one_again(tmp_path: Path) -> None:
    """What was saved of the use of a beginning is not lost in the longer prompt's."""
    begin = TRUNK[: RUN_PAGES * PAGE]
    async with storing(tmp_path, host=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec())
        await engine.put(begin)
        await quiet(store)
        await engine.put(TRUNK)
        await quiet(store)
        engine.leave()
        await store.parts.warmth.save()
    async with again(tmp_path) as (_, engine, index):
        assert shape(index)[0] == (0, RUN_PAGES)
        assert all(node.time for node in index.walk())
        assert await engine.get(TRUNK) == len(TRUNK) // PAGE


async def test_what_is_evicted_unseen_leaves_a_right_index(tmp_path: Path) -> None:
    """Leaves that nobody looked into go page by page from their end, and what is left is served."""
    await stored(tmp_path, [TRUNK, tokens(*range(7000, 7020))])
    async with again(tmp_path) as (store, engine, index):
        before = index.copies[Tier.DISK]
        assert store.parts.persist.room.evict(8 * 4096)
        assert index.copies[Tier.DISK] < before
        assert index.check() == []
        found = (await engine.match(TRUNK)).pages
        assert await engine.get(TRUNK) == found


async def test_groups_that_are_not_whole_are_loaded_as_before(tmp_path: Path) -> None:
    """Runs with items of some pages only go in page by page."""
    await stored(tmp_path, [TRUNK], (FULL, STATE))
    async with again(tmp_path, (FULL, STATE)) as (_, _engine, index):
        assert index.check() == []
        assert index.pages == len(TRUNK) // PAGE
