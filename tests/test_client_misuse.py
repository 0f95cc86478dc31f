"""What a program does wrong is said by name and changes nothing; what a daemon that is away would do is a miss."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from clientkit import FULL, KEYED, PAGE, SPEC, keys, put, right
from kvtier.client import AsyncClient, Client, page_keys
from kvtier.demo.daemon import Daemon
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.types import Code, Kind, KvtierError

ROWS = np.random.default_rng(3).integers(0, 256, (4, FULL.item_bytes), np.uint8)


class Tensor:
    """Like torch's: it has a dtype and a shape, and is neither an array nor a buffer."""

    dtype, shape, ndim = "uint8", ROWS.shape, 2

    def __len__(self) -> int:
        return len(ROWS)


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.socket, instance="engine", verify="always") as one:
        yield one


def refused(field: str, act, expected: str = "expected") -> None:
    """The call is refused, by name."""
    with pytest.raises(KvtierError, match=expected) as caught:
        act()
    assert (caught.value.code, caught.value.field) == (Code.BAD_REQUEST, field)


def away(path, lease, held) -> list[object]:
    """What everything says where no daemon ever was."""
    out = np.empty_like(ROWS)
    return [
        (path.pages, lease.pages, held.pages),
        [lease.view(0, 0), lease.views(0, 0, 4), lease.address(0, 0), lease.read(0, 0, out[0])],
        [lease.read_pages(0, 0, out), held.write(0, 0, ROWS[0]), held.write_pages(0, 0, ROWS), held.views(0, 0, 4)],
    ]  # fmt: skip


MISSES = [(0, 0, 0), [None, [], None, False], [0, False, False, []]]


def test_without_a_daemon_everything_is_a_miss(tmp_path: Path) -> None:
    """In place or copied, page by page or many at once, by either client; closed twice, and used after it too."""
    with Client(tmp_path / "nobody.sock", instance="e") as client:
        path = client.open(SPEC).match(keys(4))
        assert away(path, path.acquire(), path.reserve(0, 4)) == MISSES
        assert path.put(0, [ROWS]) == 0
    client.close()
    assert client.open(SPEC).match(keys(4)).pages == 0

    async def same() -> None:
        client = AsyncClient(tmp_path / "nobody.sock", instance="e")
        path = await (await client.open(SPEC)).match(keys(4))
        assert away(path, await path.acquire(), await path.reserve(0, 4)) == MISSES
        await client.close()
        await client.close()

    asyncio.run(same())


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("spec.kv_dtype", {"kv_dtype": np.dtype("float16")}),
        ("spec.model", {"model": 5}),
        ("spec.page_tokens", {"page_tokens": np.int64(4)}),
        ("spec.page_tokens", {"page_tokens": True}),
        ("spec.fingerprint", {"fingerprint": "a" * 32}),
        ("spec.salt", {"salt": None}),
        ("spec.groups", {"groups": [FULL]}),
        ("spec.groups", {"groups": None}),
        ("spec.groups[0].kind", {"groups": (GroupSpec("full", 2, 4, 4096),)}),  # type: ignore[arg-type]
        ("spec.groups[0].layers", {"groups": (GroupSpec(Kind.FULL, 2.0, 4, 4096),)}),  # type: ignore[arg-type]
    ],
)
def test_a_spec_of_wrong_types_names_its_field(tmp_path: Path, field: str, change: dict) -> None:
    """Before anything is sent: not by an error of Python's, nor by one about the protocol."""
    with Client(tmp_path / "nobody.sock", instance="e") as client:
        refused(field, lambda: client.open(msgspec.structs.replace(SPEC, **change)))


@pytest.mark.parametrize("tokens", [[[1], [1, 2]], [2**31], [2**70], [1.0], "abc", None, [True] * 4, [[1, 2]]])
def test_what_is_no_row_of_token_ids_is_refused(tokens: object) -> None:
    """Lists of different lengths, ids of more than 32 bits, floats, text, nothing."""
    refused("tokens", lambda: page_keys(SPEC, tokens))  # type: ignore[arg-type]


def test_keys_are_bytes_that_nobody_changes_later(tmp_path: Path) -> None:
    """A buffer that its owner uses again is not another prompt's path; what is no buffer is refused."""
    cache, buffer = Client(tmp_path / "nobody.sock", instance="e").open(SPEC), bytearray(keys(2))
    path = cache.match(buffer)
    buffer[:] = keys(2, first=1000)
    assert path.keys == keys(2)
    assert cache.match(np.frombuffer(keys(2), "<i4")).keys == keys(2)  # type: ignore[arg-type]
    for wrong in ([1] * PAGE * 4, "a" * PAGE * 4, 5):
        refused("keys", lambda wrong=wrong: cache.match(wrong))


def test_memory_that_does_not_fit_is_refused_and_nothing_is_stored(client: Client) -> None:
    """Tensors, other widths and types, strided and read-only memory, groups that are none; pages are right after it."""
    cache = client.open(SPEC)
    path, narrow, half = cache.match(keys(4)), ROWS[:, :-1], ROWS.view(np.float16)
    for data in (ROWS, None, [ROWS, ROWS], [narrow], [half], [ROWS[0]], [Tensor()], [ROWS.tobytes()]):
        with pytest.raises(KvtierError, match=r"data(\[0\])?: expected"):
            path.put(0, data)  # type: ignore[arg-type]
    with path.reserve(0, 4) as held:
        for wrong in (Tensor(), None, 5, "text"):
            refused("data", lambda wrong=wrong: held.write(0, 0, wrong))
        refused("data", lambda: held.write(0, 0, ROWS.T[0]))
        refused("data", lambda: held.write_pages(0, 0, Tensor()))  # type: ignore[arg-type]
        refused("group", lambda: held.write_pages(1, 0, ROWS))
        refused("group", lambda: held.views(-1, 0, 4))
        assert not held.write_pages(0, 1, ROWS)
    assert cache.match(keys(4)).pages == 0
    assert path.put(0, [np.asfortranarray(ROWS)]) == 4
    out = np.zeros_like(ROWS)
    locked = out.copy()
    locked.flags.writeable = False
    with cache.match(keys(4)).acquire() as lease:
        for wrong in (Tensor(), None, bytes(FULL.item_bytes), locked[0]):
            refused("out", lambda wrong=wrong: lease.read(0, 0, wrong))
        for wrong in (Tensor(), locked, np.asfortranarray(out), half, narrow, out[0]):
            refused("out", lambda wrong=wrong: lease.read_pages(0, 0, wrong))
        for group in (1, -1):
            refused("group", lambda group=group: lease.read_pages(group, 0, out))
            refused("group", lambda group=group: lease.views(group, 0, 4))
        assert not out.any()
        assert lease.read_pages(0, 0, out) == 4
    assert np.array_equal(out, ROWS)


def test_numbers_that_are_none_are_named_and_cost_no_connection(client: Client) -> None:
    """Of rows and of a region, numpy's own and floats among them: what is leased on the connection stays."""
    cache, fd = client.open(KEYED), os.memfd_create("rows")
    os.ftruncate(fd, 4 * FULL.item_bytes)
    put(client.open(SPEC), 1)
    lease = client.open(SPEC).match(keys(1)).acquire()
    region = client.register("rows", fd, 0, FULL.item_bytes, 4)
    wide: Any = np.int64(FULL.item_bytes)
    for field, where in (
        ("offset", (-1, 1, 1)),
        ("stride", (0, wide, 1)),
        ("rows", (0, 4096, None)),
        ("rows", (0, 1, 0)),
    ):
        refused(field, lambda where=where: client.register("other", fd, *where))
    refused("Register.name", lambda: client.register(np.int64(1), fd, 0, 4096, 1))
    for closed in (-1, 1 << 20, None):
        refused("fd", lambda closed=closed: client.register("other", closed, 0, 4096, 1))
    for rows in ([1.5], [True], ["0"], [2**64], np.zeros((1, 1), np.int64), 5, None, [None], [float("nan")]):
        refused("rows", lambda rows=rows: region.load((cache, b"k" * 16), rows))
        refused("rows", lambda rows=rows: region.start_store((cache, b"k" * 16), rows))
    for each in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="neither copied nor pickled"):
            each(region)
    path = client.open(SPEC).match(keys(2))
    for pages in ([1.5], [2**40], "1", [[1]]):
        refused("wants", lambda pages=pages: path.reserve(0, 2, [(0, pages)]))
    assert right(lease, 1)
    os.close(fd)


def test_a_put_says_why_there_was_no_room(tmp_path: Path, client: Client) -> None:
    """And says nothing where there was."""
    path = client.open(SPEC).match(keys(4))
    assert (path.put(0, [ROWS]), path.refused) == (4, "")
    (tmp_path / "small").mkdir()
    with Daemon(tmp_path / "small", host="0", disk="0") as small, Client(small.socket, instance="e") as other:
        path = other.open(SPEC).match(keys(4))
        assert (path.put(0, [ROWS]), path.refused) == (0, "no_space")


def test_caches_of_one_model_and_two_page_sizes_are_two(client: Client) -> None:
    """Keys of one are no keys of the other, and what one stores the other has not."""
    cache = client.open(SPEC)
    put(cache, 4)
    wide: CacheSpec = msgspec.structs.replace(SPEC, page_tokens=2 * PAGE)
    other = client.open(wide)
    assert other.cache_id != cache.cache_id
    assert other.match(page_keys(wide, np.arange(4 * PAGE))).pages == 0
    refused("keys", lambda: other.match(keys(3)))
    assert cache.match(keys(4)).pages == 4
