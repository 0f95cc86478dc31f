"""Models whose layers or heads lie on several hosts: each daemon keeps a part, and a match is the least of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engineproc import HEADS, LAYERS, SPEC, content, path_keys
from fleetkit import Fleet, Host, until
from kvtier.identity import CacheSpec, Slice, cache_id, part_of
from kvtier.types import Code, KvtierError

SLICES = {"a": Slice(0, LAYERS, 0, HEADS // 2), "b": Slice(0, LAYERS, HEADS // 2, HEADS)}
PARTS = {name: part_of(SPEC, (cut,)) for name, cut in SLICES.items()}
PATH = [70, 71, 72, 73, 74]


def stored(host: Host, pages: int) -> None:
    """Two workers of a host write their halves of its part."""
    keys, cut, spec = path_keys(PATH), SLICES[host.name], PARTS[host.name]
    half = spec.groups[0].heads // 2
    engine = host.engine()
    owner = engine.open(spec, rank=0, world=2, slices=(Slice(0, LAYERS, 0, half),))
    reserved = owner.match(keys).reserve(0, pages, wait_ms=2000)
    with type(engine)(host.daemon.socket, instance=engine.identity.instance, timeout_s=10.0) as other:
        worker = other.open(spec, rank=1, world=2, slices=(Slice(0, LAYERS, half, 2 * half),))
        for number, held in enumerate((reserved, worker.adopt(reserved.share()))):
            first = cut.h0 + number * half
            for page in range(pages):
                cells = content(keys[: (page + 1) * SPEC.stride])[:, first : first + half]
                held.write(0, page, np.ascontiguousarray(cells).reshape(-1))
            served = held.commit()
    assert served == pages


def right(host: Host, pages: int) -> None:
    """What a worker gets of its host's part is the canonical page's layers and heads."""
    keys, cut = path_keys(PATH), SLICES[host.name]
    path = host.engine().open(PARTS[host.name]).match(keys)
    with path.acquire(pages) as lease:
        assert lease.pages == pages
        out = np.empty(PARTS[host.name].groups[0].item_bytes, np.uint8)
        for page in range(pages):
            assert lease.read(0, page, out)
            cells = content(keys[: (page + 1) * SPEC.stride])[:, cut.h0 : cut.h1]
            assert np.array_equal(out, np.ascontiguousarray(cells).reshape(-1))


def test_a_model_over_two_hosts_matches_what_both_have_and_nothing_once_one_is_gone(tmp_path: Path) -> None:
    """Five pages on a and three on b are three, bit exact on each; with b killed none; strangers are refused."""
    with Fleet(tmp_path, 2, replicas=1) as hosts:
        stored(hosts["a"], 5)
        stored(hosts["b"], 3)
        path = hosts["a"].engine().open(PARTS["a"]).match(path_keys(PATH))
        assert path.pages == 5
        until(lambda: path.agree({"b": PARTS["b"]}, wait_ms=5000) == 3)  # b may be slow, and is asked again then
        for host in hosts.values():
            right(host, 3)
        with pytest.raises(KvtierError, match=r"others\.host") as caught:
            path.agree({"z": PARTS["b"]})
        assert caught.value.code is Code.BAD_REQUEST
        hosts["b"].daemon.kill()
        assert path.agree({"b": PARTS["b"]}, wait_ms=5000) == 0
        hosts["a"].sound()


def test_a_part_is_a_cache_of_its_own() -> None:
    """Parts of one model that differ in any bound have different ids, also where their sizes are equal."""
    cuts = [Slice(0, 1, 0, HEADS), Slice(1, 2, 0, HEADS), *SLICES.values()]
    ids = {cache_id(part_of(SPEC, (cut,)), "s", 0) for cut in cuts} | {cache_id(SPEC, "s", 0)}
    assert len(ids) == len(cuts) + 1
    small = CacheSpec(**{f: getattr(SPEC, f) for f in SPEC.__struct_fields__} | {"groups": PARTS["a"].groups})
    assert cache_id(small, "s", 0) not in ids, "a smaller model of the part's shape is not the part"
    for wrong in ((Slice(0, LAYERS + 1, 0, 1),), (Slice(0, 0, 0, 1),), ()):
        with pytest.raises(KvtierError, match="slices"):
            part_of(SPEC, wrong)
