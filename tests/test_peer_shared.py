"""What holds of every store that the fleet shares, whatever it answers: nothing but what was stored is ever served."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from engines import Engine, spec, tokens
from kvtier import wire
from kvtier.identity import GroupSpec, chain_keys
from kvtier.peer.base import Place
from kvtier.peer.depot import Depot
from kvtier.peer.generations import BELIEVED_S, Generations
from kvtier.peer.secrets import Secrets
from kvtier.peer.shelf import HEAD, Head, Want, generation_names, head_of, item_name, marks, pieces
from kvtier.types import Kind
from peerkit import SHARED, SPEC, Pair, blank, fetched, given, right
from storekit import storing, until

PATH = tokens(*range(1, 10))
OTHER = tokens(*range(20, 29))


class Names:
    """What a path's items are called in the store."""

    def __init__(self, pair: Pair, keys: bytes = PATH) -> None:
        self.depot = pair.tier
        self._pair = pair
        self._keys = keys

    async def heads(self) -> list[str]:
        """The head of every page."""
        generation = await self.depot.generations.of(self._pair.shared, soon())
        return [item_name(self._pair.shared, generation, mark, 0) for mark in marks(self._pair.shared, self._keys)]

    async def pieces(self, at: int) -> list[Want]:
        """The pieces of a page, with memory of their own."""
        name = (await self.heads())[at]
        (raw,) = await self.depot.shelf.peek([name], HEAD.size, soon())
        return pieces(name, head_of(raw), blank(range(1))[0])


def soon() -> float:
    """A deadline."""
    return time.monotonic() + 5.0


async def put(depot: Depot, name: str, value: bytes) -> None:
    """Replace a value behind everybody's back."""
    assert await depot.shelf.drop([name], soon())
    assert await depot.shelf.write([Want(name, [memoryview(value)])], soon()) == [True]


async def flip(names: Names, at: int) -> None:
    """One bit of a page's bytes."""
    (piece,) = await names.pieces(at)
    assert await names.depot.shelf.read([piece], soon()) == [True]
    piece.views[0][17] ^= 1
    await put(names.depot, piece.name, bytes(piece.views[0]))


async def shorten(names: Names, at: int) -> None:
    """A page's bytes are fewer."""
    (piece,) = await names.pieces(at)
    await put(names.depot, piece.name, b"short")


async def lose(names: Names, at: int) -> None:
    """A page's bytes are gone, its head is not."""
    (piece,) = await names.pieces(at)
    assert await names.depot.shelf.drop([piece.name], soon())


async def garbage(names: Names, at: int) -> None:
    """A page's head is no head."""
    await put(names.depot, (await names.heads())[at], b"x" * HEAD.size)


async def swap(names: Names, at: int) -> None:
    """The store answers with another key's head: its bytes and checksum are right, but not this page's."""
    heads = await names.heads()
    (other,) = await names.depot.shelf.peek([heads[at - 1]], HEAD.size, soon())
    await put(names.depot, heads[at], other)


def test_names_are_made_of_the_cache_and_the_chain_key_and_do_not_change() -> None:
    """Two versions of kvtier that share a store call a page the same, by everything that its KV depends on."""
    shared = Secrets(b"f" * 32, {"uid:0": b"s" * 32}).shared(SPEC, "uid:0", 0)
    named = list(marks(shared, PATH))
    assert b"".join(mark.chain for mark in named) == chain_keys(shared.id[:16], PATH, SPEC.stride)
    assert generation_names(shared)[0] == "kvt1:fkM492EPAcTEZ0pn8pss8XpPYHXvRaUCOybtAziBZPE:{generation-ea}"
    assert (
        item_name(shared, b"generation12", named[1], 0)
        == "kvt1:fkM492EPAcTEZ0pn8pss8XpPYHXvRaUCOybtAziBZPE:Z2VuZXJhdGlvbjEy:{S1v78QhxFGQa4xnPhmk_OA}:0"
    )
    assert (
        Head(3, 4000, 5, named[1].echo).pack().hex()
        == "4b56543103000000a00f0000000000000500000000000000c53b0f927d86c09ce4049a7115e80677"
    )


@SHARED
@pytest.mark.parametrize(
    ("spoil", "counter"),
    [
        (flip, "peer_checksum"), (shorten, "peer_torn"), (lose, "peer_torn"), (garbage, "peer_mismatch"),
        (swap, "peer_mismatch"),
    ],
)  # fmt: skip
async def test_whatever_the_store_answers_only_what_was_stored_is_served(tmp_path: Path, tier, spoil, counter) -> None:
    """One page that is not what was stored is a miss, counted and dropped there; stored again, it is served again."""
    async with tier(tmp_path) as pair:
        assert await given(pair.tier, pair.shared, PATH) == 9
        await spoil(Names(pair), 4)
        (source,) = await pair.tier.find(pair.shared, PATH, 0)
        places = blank(range(9))
        sums = await source.fetch(places)
        assert [value is None for value in sums] == [at == 4 for at in range(9)]
        assert all(right(place, PATH) for place, value in zip(places, sums, strict=True) if value is not None)
        assert pair.tier.counts[counter] == 1
        assert [source.pages for source in await pair.tier.find(pair.shared, PATH, 0)] == [4]
        assert await given(pair.tier, pair.shared, PATH) == 1
        assert await fetched(pair.tier, pair.shared, PATH) == 9


@SHARED
async def test_an_engine_gets_pages_up_to_the_spoilt_one(tmp_path: Path, tier) -> None:
    """A store of another host serves what is right, recomputes from the wrong page on, and heals the shared store."""
    async with tier(tmp_path) as pair, storing(None) as near:
        assert await given(pair.tier, pair.shared, PATH) == 9
        await flip(Names(pair), 4)
        engine = Engine(pair.far)
        await engine.open(SPEC)
        assert await engine.get(PATH) == 4
        assert await engine.put(PATH, 4) == 5
        engine.leave()
        await pair.settled()
        near.join_fleet(pair.tier)
        other = Engine(near)
        await other.open(SPEC)
        assert await other.get(PATH) == 9
        other.leave()
        await until(lambda: not near.parts.peers.busy)
        near.parts.peers = None  # the tier is closed by whoever made it


@SHARED
async def test_kv_of_another_model_format_tenant_or_epoch_never_matches(tmp_path: Path, tier) -> None:
    """Whatever is in the identity is in the names: equal tokens under any other spec or secret find nothing."""
    async with tier(tmp_path) as pair:
        assert await given(pair.tier, pair.shared, PATH) == 9
        others = [
            spec(model="n"), spec(fingerprint=b"g" * 16), spec(kv_dtype="fp8"), spec(adapter="lora"), spec(salt=b"t"),
            spec(revision="2"), spec(codec="kv8"), spec(layout="private"), spec(backend="fa"),
        ]  # fmt: skip
        for other in others:
            assert await pair.tier.find(pair.tier.shared(other, "uid:0", 0), PATH, 0) == []
        stranger = Depot(pair.tier.shelf, Secrets(b"f" * 32, {"uid:0": b"another secret of a tenant"}))
        assert await stranger.find(stranger.shared(SPEC, "uid:0", 0), PATH, 0) == []
        assert pair.tier.shared(SPEC, "uid:0", 1) is None, "a cache that was reset is shared no more"
        assert pair.tier.shared(SPEC, "uid:1", 0) is None, "nor is one without a secret"
        assert await fetched(pair.tier, pair.shared, PATH) == 9


@SHARED
async def test_a_purged_cache_is_served_to_nobody_any_more(tmp_path: Path, tier) -> None:
    """After a purge on one host neither it nor any other finds the pages, nor does what was found before bring them."""
    async with tier(tmp_path) as pair:
        engine = Engine(pair.far)
        await engine.open(SPEC)
        assert await engine.put(PATH) == 9
        await pair.settled()
        assert await fetched(pair.tier, pair.shared, PATH) == 9
        (late,) = await pair.far.parts.peers.tier.find(pair.shared, PATH, 0)
        await pair.far.admin[wire.Purge](wire.Purge(scope="uid:0"))
        assert await late.fetch(blank(range(9))) == [None] * 9
        assert await engine.get(PATH) == 0
        now = time.monotonic()
        await until(lambda: time.monotonic() > now + BELIEVED_S)
        assert await pair.tier.find(pair.shared, PATH, 0) == []
        assert await engine.put(OTHER) == 9
        await pair.settled()
        assert await fetched(pair.tier, pair.shared, OTHER) == 9
        engine.leave()


@SHARED
async def test_hosts_agree_on_a_generation_whatever_one_server_lost(tmp_path: Path, tier) -> None:
    """Hosts that begin at once take the same; one name that is lost or out of date changes nothing; a purge wins."""
    async with tier(tmp_path) as pair:
        a, b = pair.tier, pair.far.parts.peers.tier
        names = generation_names(pair.shared)

        async def both() -> set[bytes]:
            return {await Generations(depot.shelf).of(pair.shared, soon()) for depot in (a, b)}

        first = set().union(*await asyncio.gather(both(), both(), both())) - {None}  # None: somebody is at it
        assert len(first) == 1
        assert await a.shelf.drop(names[:1], soon())
        assert await both() == first
        assert await a.shelf.peek(names, 12, soon()) == [*first] * 3, "it was put there again"
        await a.forget(pair.shared)
        second = await both()
        assert len(second) == 1
        assert second != first
        assert await a.shelf.replace(names[2:], *first, soon()) == [True]
        assert await both() == second, "an old server that came back"
        assert await given(a, pair.shared, PATH) == 9
        assert await fetched(b, pair.shared, PATH) == 9


@SHARED
async def test_a_purge_that_one_server_missed_holds_once_the_others_are_evicted(tmp_path: Path, tier) -> None:
    """The third name comes back with an older generation and is corrected; alone, whatever it says, one begins."""
    async with tier(tmp_path) as pair:
        shelf, names = pair.tier.shelf, generation_names(pair.shared)

        async def now() -> bytes | None:
            return await Generations(shelf).of(pair.shared, soon())

        old = await now()
        await pair.tier.forget(pair.shared)
        assert await shelf.replace(names[2:], old, soon()) == [True]
        new = await now()
        assert old < new
        assert await shelf.peek(names, 12, soon()) == [new] * 3
        assert await shelf.replace(names[2:], old, soon()) == [True]
        assert await shelf.drop(names[:2], soon())
        again = await now()
        assert old < again
        assert again != new
        assert await shelf.peek(names, 12, soon()) == [again] * 3


@SHARED
async def test_items_of_many_pieces_and_of_many_slots_come_back_bit_exact(tmp_path: Path, tier) -> None:
    """An item over several pieces of 2 MiB, in slots whose ends are no piece's ends, is stored and fetched whole."""
    big = spec((GroupSpec(Kind.FULL, 1, 1, (18 << 20) + 12345),))
    async with tier(tmp_path, cache=big) as pair:
        assert await given(pair.tier, pair.shared, PATH[: 2 * big.stride]) == 2
        (source,) = await pair.tier.find(pair.shared, PATH, 0)
        assert source.pages == 2
        places = blank(range(2), 0, big)
        cut = [Place(p.group, p.page, [p.views[0][:3_000_000], p.views[0][3_000_000:]]) for p in places]
        assert None not in await source.fetch(cut)
        assert all(right(place, PATH, big) for place in places)
