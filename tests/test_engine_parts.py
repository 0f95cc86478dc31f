"""Parts of the engines' adapters that need no engine: digests of weights, lookups by batch, pages in strided memory."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.engines.vllm.lookups import Lookups
from kvtier.engines.weights import weights_digest
from kvtier.identity import GroupSpec, Slice
from kvtier.types import Kind, KvtierError, Presence
from weightkit import safetensors

torch = pytest.importorskip("torch")

from kvtier.engines.vllm.planes import Plane

BLOCKS, LAYERS, HEADS, TOKENS, CONTENT = 6, 3, 4, 8, 16
"""Of the KV that the planes' tests lay out: float32 content."""
SPEC = GroupSpec(Kind.FULL, LAYERS, HEADS, TOKENS * CONTENT * 4)


def weights(seed: int = 0, **more: np.ndarray) -> dict[str, np.ndarray]:
    """Two tensors."""
    random = np.random.default_rng(seed)
    return {name: random.standard_normal((64, 512)).astype("<f4") for name in ("up", "down")} | more


def test_the_digest_follows_weights_settings_and_configuration(tmp_path: Path):
    """Equal files anywhere give one digest; other weights in one tensor, another setting or configuration do not."""
    first = safetensors(tmp_path / "a" / "model.safetensors", weights()).parent
    same = safetensors(tmp_path / "b" / "model.safetensors", weights()).parent
    tuned = safetensors(tmp_path / "c" / "model.safetensors", weights(down=weights(1)["down"])).parent
    config = {"hidden_size": 64, "_name_or_path": "somewhere"}
    base = weights_digest(str(first), config, "auto")
    assert base == weights_digest(str(same), config | {"_name_or_path": "elsewhere"}, "auto")
    others = [
        weights_digest(str(tuned), config, "auto"),
        weights_digest(str(first), config | {"rope_theta": 5e5}, "auto"),
        weights_digest(str(first), config, "fp8"),
        weights_digest(str(first), config, "auto", exact=True),
    ]
    assert len({base, *others}) == 5


def test_the_exact_digest_sees_one_element(tmp_path: Path):
    """One element that no sample reads changes the exact digest."""
    changed = weights()
    changed["up"][3, 7] += 1
    folders = [
        safetensors(tmp_path / name / "m.safetensors", values).parent
        for name, values in (("a", weights()), ("b", changed))
    ]
    assert len({weights_digest(str(folder), {}, exact=True) for folder in folders}) == 2


@pytest.mark.parametrize("mib", [0.1, 2, 8])
def test_small_files_of_other_kinds_are_told_apart_wherever_they_differ(tmp_path: Path, mib: float):
    """A GGUF or .bin file of a few MiB: a change of 4 KiB anywhere in it changes the digest of the sample."""
    raw = np.random.default_rng(0).integers(0, 256, int(mib * (1 << 20)), np.uint8)
    path, digests = tmp_path / "m.gguf", set()
    places = np.linspace(0, len(raw) - 4096, 20, dtype=int)
    for at in places:
        changed = raw.copy()
        changed[at : at + 4096] ^= 1
        path.write_bytes(changed.tobytes())
        digests.add(weights_digest(str(path), {}))
    assert len(digests) == len(places)


def test_weights_that_are_not_here_are_refused(tmp_path: Path):
    """No digest of nothing, and none of a file that is not what its name says."""
    with pytest.raises(KvtierError, match="local folder or file with weights"):
        weights_digest(str(tmp_path / "none"), {})
    (tmp_path / "m.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(KvtierError, match="safetensors files with a header"):
        weights_digest(str(tmp_path), {})


class Asked:
    """What Lookups has asked, to be answered by the test."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[bytes], Future[bytes]]] = []

    def __call__(self, keys: list[bytes]) -> Future[bytes]:
        self.calls.append((keys, Future()))
        return self.calls[-1][1]

    def answer(self, *states: Presence) -> None:
        """Answer the oldest call."""
        self.calls.pop(0)[1].set_result(bytes(states))


def test_lookups_of_a_step_are_one_call_and_answers_are_kept_for_their_requests():
    """All keys of a step in one call, each once; a key that nobody has asked for any more is asked again."""
    asked = Asked()
    lookups = Lookups(asked)
    assert [lookups.get(key, request) for request in "pq" for key in (b"a", b"b")] == [None] * 4
    lookups.flush()
    lookups.flush()
    assert [keys for keys, _ in asked.calls] == [[b"a", b"b"]]
    assert lookups.get(b"a", "p") is None
    asked.answer(Presence.DISK, Presence.MISS)
    assert [lookups.get(key, "p") for key in (b"a", b"b")] == [True, False]
    lookups.gone([b"a"])
    assert lookups.get(b"a", "q") is False
    lookups.forget("p")
    assert lookups.get(b"b", "q") is False
    lookups.forget("q")
    assert lookups.get(b"b", "r") is None
    lookups.flush()
    assert asked.calls[0][0] == [b"b"]


def test_a_key_that_is_being_written_is_asked_for_again_and_then_given_up(monkeypatch: pytest.MonkeyPatch):
    """PENDING is neither a hit nor a miss for a second; then the page is computed."""
    asked, now = Asked(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lookups = Lookups(asked)
    for at in (0.0, 0.5, 0.9):
        now[0] = at
        assert lookups.get(b"k", "p") is None
        lookups.flush()
        asked.answer(Presence.PENDING)
    now[0] = 2.0
    assert lookups.get(b"k", "p") is False


def test_a_look_up_that_fails_is_a_miss():
    """Whatever the thread that asks meets with: its keys are not there, later ones are asked for as ever."""
    asked = Asked()
    lookups = Lookups(asked)
    for key, error in ((b"a", OSError("disk")), (b"b", ValueError("JSON"))):
        assert lookups.get(key, "p") is None
        lookups.flush()
        asked.calls.pop()[1].set_exception(error)
        assert lookups.get(key, "p") is False


ORDERS = {"LBHNC": (0, 1, 2, 3, 4), "LBNHC": (0, 1, 3, 2, 4), "BLHNC": (1, 0, 2, 3, 4), "BHLNC": (1, 2, 0, 3, 4)}


def laid_out(order: str, heads: int = HEADS) -> list[Any]:
    """Each layer's logical view [B, H, N, C] of one allocation in a physical order."""
    sizes, strides, step = (LAYERS, BLOCKS, heads, TOKENS, CONTENT), [0] * 5, 1
    for dim in reversed(ORDERS[order]):
        strides[dim], step = step, step * sizes[dim]
    whole = torch.as_strided(torch.zeros(step), sizes, strides)
    return [whole[layer] for layer in range(LAYERS)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_pages_are_the_same_whatever_the_physical_order(order: str, apart: bool):
    """A page is head by head, token by token, layer by layer, whether the layers lie in one allocation or not."""
    views = laid_out(order)
    if apart:
        views = [view.clone(memory_format=torch.preserve_format) for view in views]
    plane = Plane(views, BLOCKS, SPEC, None)
    page = np.random.default_rng(0).standard_normal((LAYERS, HEADS, TOKENS, CONTENT)).astype("<f4")
    plane.load([4], page.view(np.uint8).reshape(1, -1))
    for layer in range(LAYERS):
        assert np.array_equal(views[layer][4].numpy(), page[layer])
        assert not views[layer][3].any()
        assert not views[layer][5].any()
    out = np.zeros((1, SPEC.item_bytes), np.uint8)
    plane.save([4], out)
    assert out.tobytes() == page.tobytes()


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_blocks_in_any_order_go_to_their_pages(apart: bool):
    """Blocks that follow each other, and those that do not, in slots with room between them: each to its own page."""
    views = [view.clone() if apart else view for view in laid_out("LBHNC")]
    plane, blocks = Plane(views, BLOCKS, SPEC, None), [5, 2, 3, 4, 0]
    slots = np.random.default_rng(1).integers(0, 256, (len(blocks), SPEC.item_bytes + 64), dtype=np.uint8)
    pages, out = slots[:, : SPEC.item_bytes], np.zeros_like(slots)
    plane.load(blocks, pages)
    plane.save(blocks, out[:, : SPEC.item_bytes])
    assert np.array_equal(out[:, : SPEC.item_bytes], pages)
    assert not out[:, SPEC.item_bytes :].any()
    for block, page in zip(blocks, pages, strict=True):
        one = np.zeros((1, SPEC.item_bytes), np.uint8)
        plane.save([block], one)
        assert np.array_equal(one[0], page)


def test_ranks_write_their_heads_of_one_page():
    """Two ranks of two heads each fill a page that one rank of four loads."""
    page, part = np.zeros((1, SPEC.item_bytes), np.uint8), HEADS // 2
    for rank in range(2):
        views = laid_out("LBNHC", part)
        for layer, view in enumerate(views):
            view[1] = torch.arange(part * TOKENS * CONTENT).view(part, TOKENS, CONTENT) + 1000 * layer + 100000 * rank
        Plane(views, BLOCKS, SPEC, Slice(0, LAYERS, rank * part, (rank + 1) * part)).save([1], page)
    whole = laid_out("BLHNC")
    Plane(whole, BLOCKS, SPEC, None).load([2], page)
    for layer, view in enumerate(whole):
        assert view[2, :, 0, 0].tolist() == [1000 * layer + 128 * (h % 2) + 100000 * (h // 2) for h in range(HEADS)]


def test_kernel_blocks_within_a_block_belong_to_its_page():
    """VLLM may cut a block into kernel blocks: the page has all of them, head by head."""
    views = [view.reshape(BLOCKS * 2, HEADS, TOKENS // 2, CONTENT) for view in laid_out("LBHNC")]
    plane = Plane(views, BLOCKS, SPEC, None)
    page = np.arange(SPEC.item_bytes // 4, dtype="<f4")
    plane.load([3], page.view(np.uint8).reshape(1, -1))
    assert np.array_equal(views[0][6, 1].flatten().numpy(), page.reshape(LAYERS, HEADS, 2, -1)[0, 1, 0])
    assert np.array_equal(views[2][7, 3].flatten().numpy(), page.reshape(LAYERS, HEADS, 2, -1)[2, 3, 1])


def test_kv_of_another_shape_is_refused():
    """Tensors that are not what the group says are named, not copied."""
    with pytest.raises(KvtierError, match="kv_caches"):
        Plane(laid_out("LBHNC")[:2], BLOCKS, SPEC, None)
    with pytest.raises(KvtierError, match="kv_caches"):
        Plane(laid_out("LBHNC", HEADS - 1), BLOCKS, SPEC, None)
