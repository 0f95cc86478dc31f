"""What vLLM's adapters do where one name is two things (a LoRA's, an image's): nothing is shared, on a real daemon."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvtier.client import Client
from kvtier.demo.daemon import Daemon
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.types import Kind
from vllmkit import PYTHON, SIDE, environment, needs_vllm
from vllmstub import Context, Request, adapters, config, item, model, paged, step
from weightkit import safetensors

torch = pytest.importorskip("torch")

TOKENS = list(range(1, 42))
"""Ten whole pages and one token to compute."""
PAGES = 10


@pytest.fixture
def vllm() -> Iterator[Any]:
    """The adapters' modules."""
    with adapters("scheduler", "messages", "worker", "served", "naming", "media") as modules:
        yield modules


class Rank(NamedTuple):
    """Both sides of an engine of one rank, without vLLM between them."""

    head: Any
    worker: Any
    blocks: Any

    def step(self, request: Request, tokens: int = 40) -> Any:
        """Compute so many tokens and save them; what the worker was told."""
        plan = self.head.plan(step(**{request.request_id: tokens}))
        self.worker.load(plan)
        self.worker.save(plan)
        self.worker.fence()
        done = self.worker.take_done()
        if done is not None:
            self.head.heard(done)
        return plan

    def saves(self, request: Request) -> bool:
        """Whether what a request has computed is kept: loaded by the next that asks for the same."""
        self.head.begin(request)
        until(lambda: self.head.matched(request, 0)[0])
        asked = self.head._asked[request.request_id]
        until(lambda: self.step(request).saves or (None if asked.saves else True))
        self.head.finished(request.request_id)
        deadline = time.monotonic() + 2
        while not (hit := self.finds(request)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return hit > 0

    def finds(self, request: Request) -> int:
        """Tokens that a request would load."""
        self.head.begin(request)
        found: int = until(lambda: self.head.matched(request, 0)[0])
        self.head.finished(request.request_id)
        return found


@pytest.fixture
def rank(vllm: Any, daemon: Daemon, tmp_path: Path) -> Iterator[Callable[[], Rank]]:
    """Makes engines of one model that may have adapters."""
    weights = safetensors(tmp_path / "model" / "m.safetensors", {"a": np.ones((4, 8), "<f4")}).parent
    made = []

    def make() -> Rank:
        settings = config(weights, lora_config=SimpleNamespace(lora_dtype="auto"))
        clients = [Client(daemon.socket, instance=f"vllm-{len(made)}", timeout_s=20.0) for _ in range(2)]
        worker = vllm.worker.Worker(clients[0], settings, paged(2, 4 * 16 * 4, 64, 4))
        blocks = torch.arange(64.0).reshape(64, 1, 1, 1).expand(64, 2, 4, 16).clone()
        worker.register({"layer": blocks})
        head = vllm.scheduler.Scheduler(clients[1], 1)
        head.agree([worker.formats()])
        made.append(Rank(head, worker, blocks))
        return made[-1]

    yield make
    for each in made:
        each.worker.close()
        each.head.close()


def until(true: Callable[[], Any]) -> Any:
    """The first answer that is one."""
    deadline = time.monotonic() + 30
    while (got := true()) is None or got == ():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return got


# -- adapters ----------------------------------------------------------------------------------------------------------


def adapter(folder: Path, weights: int = 0) -> Path:
    """The files of a LoRA adapter."""
    safetensors(folder / "adapter_model.safetensors", {"a": np.full((4, 8), weights, "<f4")})
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4}))
    return folder


def lora(path: Path, number: int = 1, name: str = "adapter") -> SimpleNamespace:
    """A request's adapter."""
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path))


def read(of: SimpleNamespace) -> None:
    """Have vLLM's worker read an adapter's files."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    WorkerLoRAManager()._load_adapter(of)


def test_an_adapter_that_workers_read_is_shared(rank: Callable[[], Rank], tmp_path: Path):
    """As it lies on disk, and with another engine; the same bytes loaded again, in place or not, change nothing."""
    one, other = rank(), rank()
    tuned = lora(adapter(tmp_path / "a"))
    read(tuned)
    assert one.saves(Request("a", TOKENS, lora_request=tuned))
    read(tuned)
    assert other.finds(Request("b", TOKENS, lora_request=tuned)) == 4 * PAGES


def test_an_adapter_is_shared_wherever_it_lies(rank: Callable[[], Rank], tmp_path: Path):
    """Another host may keep it elsewhere; the model without it is another."""
    one, other = rank(), rank()
    here, there = (lora(adapter(tmp_path / folder), number) for number, folder in enumerate("ab", 1))
    read(here)
    read(there)
    assert one.saves(Request("a", TOKENS, lora_request=here))
    assert other.finds(Request("b", TOKENS, lora_request=there)) == 4 * PAGES
    assert other.finds(Request("c", TOKENS)) == 0


def test_files_that_changed_since_are_not_the_adapter(rank: Callable[[], Rank], tmp_path: Path):
    """VLLM may go on with what it read, or read anew what it had to drop: neither is found nor stored."""
    one = rank()
    tuned = lora(adapter(tmp_path / "a"))
    read(tuned)
    assert one.saves(Request("a", TOKENS, lora_request=tuned))
    adapter(tmp_path / "a", weights=1)
    assert one.finds(Request("b", TOKENS, lora_request=tuned)) == 0
    read(tuned)
    assert not one.saves(Request("c", TOKENS, lora_request=tuned))
    adapter(tmp_path / "a")
    read(tuned)
    assert not one.saves(Request("d", TOKENS, lora_request=tuned))  # vLLM's own cache has blocks of both


def test_what_vllm_read_before_files_changed_is_neither_loaded_nor_saved(rank: Callable[[], Rank], tmp_path: Path):
    """An adapter that is added and then written anew: requests are computed with what was read."""
    one, other = rank(), rank()
    early, late = lora(adapter(tmp_path / "a")), lora(adapter(tmp_path / "b", weights=1), number=2)
    read(late)
    assert other.saves(Request("x", TOKENS, lora_request=late))
    read(early)
    adapter(tmp_path / "a", weights=1)
    request = Request("a", TOKENS, lora_request=early)
    one.head.begin(request)
    assert until(lambda: one.head.matched(request, 0)[0]) == 4 * PAGES  # as far as the files say
    one.head.allocated(request, (list(range(1, 41)),), 4 * PAGES)
    before = one.blocks.clone()
    one.step(request)
    assert one.worker.take_bad_blocks() == set(range(1, PAGES + 1))
    assert torch.equal(one.blocks, before)
    one.head.finished("a")
    assert one.finds(Request("b", TOKENS, lora_request=early)) == 0  # workers have told


@pytest.mark.parametrize("path", ["a", "b"])
def test_requests_that_run_while_an_adapter_is_loaded_in_place_save_nothing(
    rank: Callable[[], Rank], tmp_path: Path, path: str
):
    """They go on with its number and its new weights, whether it came from the same place or from another."""
    one = rank()
    tuned = lora(adapter(tmp_path / "a"))
    read(tuned)
    request = Request("a", TOKENS, lora_request=tuned)
    one.head.begin(request)
    assert until(lambda: one.head.matched(request, 0)[0]) == 0
    reserve = one.head._asked["a"]
    output = step(a=40)
    plan = until(lambda: (got := one.head.plan(output)).saves and got)
    read(lora(adapter(tmp_path / path, weights=1)))
    one.worker.load(plan)
    one.worker.save(plan)
    one.worker.fence()
    done = one.worker.take_done()
    assert done.dropped
    assert not done.served
    assert reserve.weights is not None


def test_files_that_change_while_they_are_read_are_nobodys(vllm: Any, tmp_path: Path, monkeypatch: Any):
    """What a worker has of them is a mixture."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", lambda *_: adapter(tmp_path / "a", weights=1))
    vllm.served.watch()
    tuned = lora(adapter(tmp_path / "a"))
    read(tuned)
    assert vllm.served.known(1)
    assert not vllm.served._Read.digests[1]


# -- the model's own weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["worker", "loader", "model"])
def test_nothing_is_shared_of_weights_that_were_written_until_somebody_says_so(rank: Callable[[], Rank], way: str):
    """By vLLM's own orders to workers, or by what loads a model's weights, which may be its own method alone.

    Loads fail, saves are given up.
    """
    from vllm.model_executor.models.utils import AutoWeightsLoader
    from vllm.v1.worker.gpu_worker import Worker

    one = rank()
    assert one.saves(Request("a", TOKENS))
    request = Request("b", TOKENS)
    one.head.begin(request)
    assert until(lambda: one.head.matched(request, 0)[0]) == 4 * PAGES
    one.head.allocated(request, (list(range(1, 41)),), 4 * PAGES)
    model_class = one.worker._configs[0].model_config.model_class
    {"worker": Worker().update_weights, "loader": AutoWeightsLoader().load_weights,
     "model": model_class().load_weights}[way]()  # fmt: skip
    one.step(request)
    assert one.worker.take_bad_blocks() == set(range(1, PAGES + 1))
    other = Request("c", TOKENS[1:])
    one.head.begin(other)
    assert one.head.matched(other, 0) == (0, False)
    assert not one.step(other).saves
    one.head.reset()
    for name in "bc":
        one.head.finished(name)
    assert one.finds(Request("d", TOKENS)) == 0  # its KV is its own
    assert one.saves(Request("e", TOKENS))
    assert rank().finds(Request("f", TOKENS)) == 4 * PAGES


def test_nothing_is_shared_after_a_reset_that_vllm_refused(rank: Callable[[], Rank]):
    """Its own prefix cache still has KV of the old weights, which new requests begin with: not to be stored as new."""
    one = rank()
    assert one.saves(Request("a", TOKENS))
    assert not one.head.reset(kept=True)
    request = Request("b", TOKENS)
    one.head.begin(request)
    assert one.head.matched(request, 0) == (0, False)
    assert not one.step(request).saves
    assert one.head.reset()
    one.head.finished("b")
    assert one.finds(Request("c", TOKENS)) == 0
    assert one.saves(Request("d", TOKENS))


def test_weights_that_are_written_beside_a_reset_are_what_it_was_for(rank: Callable[[], Rank]):
    """Before it or after it, as long as no step came between that computed anything."""
    from vllm.v1.worker.gpu_worker import Worker

    one = rank()
    assert one.saves(Request("a", TOKENS))
    Worker().update_weights()
    one.head.reset()
    one.worker.load(one.head.plan(step()))
    Worker().update_weights()
    assert one.finds(Request("b", TOKENS)) == 0
    assert one.saves(Request("c", TOKENS))


def test_orders_that_write_weights_are_seen_beside_the_scheduler(vllm: Any):
    """VLLM's own names of them, and no others."""
    with adapters("reload") as modules:
        from vllm.v1.engine.core import EngineCore

        modules.reload.watch_orders()
        engine = EngineCore()
        engine.collective_rpc("get_model_inspection")
        assert modules.reload.count() == 0
        engine.collective_rpc("update_weights")
        assert modules.reload.count() > 0


# -- images ------------------------------------------------------------------------------------------------------------


def picture(value: float = 0.0) -> Any:
    """Pixels."""
    return torch.full((3, 4), value)


def shown(number: str, *items: Any, **more: Any) -> Request:
    """A request with images."""
    return Request(number, TOKENS, mm_features=items, **more)


def test_an_image_is_what_its_bytes_are_and_not_what_it_is_called(rank: Callable[[], Rank]):
    """Another name for the same pixels finds them; the same name, a digest or not, for other pixels does not.

    Nor do the same pixels of other tokens, or of another sort.
    """
    name = "ab" * 32
    assert rank().saves(shown("a", item(name, pixels=picture())))
    others = [item(name, pixels=picture(1)), item(name, tokens=5, pixels=picture()), item(name, 1, pixels=picture())]
    others += [item(name, pixels=[picture()]), item(name, pixels=picture().double())]
    assert [rank().finds(shown("b", each)) for each in others] == [0] * len(others)
    assert rank().finds(shown("c", item("my image", pixels=picture()))) == 4 * PAGES


@pytest.mark.slow
@needs_vllm
def test_images_are_read_as_vllm_sends_them():
    """By vLLM's own classes and codec: a name that looks like a digest says nothing, and equal bytes are one image."""
    shows = [["ab" * 32, 0.0], ["my image", 0.0], ["ab" * 32, 1.0]]
    command = [PYTHON, SIDE / "shown.py", json.dumps(shows)]
    done = subprocess.run(command, check=True, env=environment(), capture_output=True, text=True, timeout=200)
    (one, sure), (same, also), (other, not_sure) = json.loads(done.stdout.splitlines()[-1])
    assert one == same != other
    assert (sure, also, not_sure) == (True, True, False)


def test_a_name_that_was_two_images_is_stored_under_neither(rank: Callable[[], Rank]):
    """VLLM's caches go by names, so an engine may compute with either: from then on it stores nothing of that name."""
    one = rank()
    first = shown("a", item("ab" * 32, pixels=picture()))
    one.head.begin(first)
    assert until(lambda: one.head.matched(first, 0)[0]) == 0
    assert not one.saves(shown("b", item("ab" * 32, pixels=picture(1))))
    asked = one.head._asked["a"]
    until(lambda: one.step(first).saves or (None if asked.saves else True))
    assert not asked.saves
    assert one.saves(shown("c", item("cd" * 32, pixels=picture(1))))


def test_nothing_is_saved_while_an_image_of_its_name_is_being_read(
    vllm: Any, rank: Callable[[], Rank], monkeypatch: pytest.MonkeyPatch
):
    """The later request may be computed first."""
    one = rank()
    first = shown("a", item("ab" * 32, pixels=picture()))
    one.head.begin(first)
    assert until(lambda: one.head.matched(first, 0)[0]) == 0
    go = threading.Event()
    slow = vllm.media.item_of
    monkeypatch.setattr(vllm.media, "item_of", lambda each: go.wait(30) and slow(each))
    one.head.begin(shown("b", item("ab" * 32, pixels=picture(1))))
    for _ in range(20):
        assert not one.step(first).saves
        time.sleep(0.01)
    go.set()
    until(lambda: None if one.head._asked["a"].saves and not one.step(first).saves else True)
    assert not one.head._asked["a"].saves


@pytest.mark.parametrize(
    "data", [None, {"address": 1}, {"pixel_values": SimpleNamespace(data=None, field=None)}, {"pixel_values": None}]
)
def test_an_image_whose_bytes_are_not_here_is_neither_loaded_nor_saved(rank: Callable[[], Rank], data: Any):
    """They lie in shared memory that workers read, came by another way, or are of no form that is known."""
    image = item("ab" * 32)
    image.data = data
    one = rank()
    assert not one.saves(shown("a", image))
    assert one.finds(Request("b", TOKENS)) == 0
    media = one.head._media
    again = media.show(shown("c", image))
    media.settle()
    assert media.sure(again) is False  # it was read, as far as it can be


def test_an_encoder_with_adapters_has_one_of_each_name(rank: Callable[[], Rank], tmp_path: Path):
    """VLLM keeps an image's embeddings under the adapter's name: from another path they are others."""
    one = rank()
    for number, folder in enumerate("ab", 1):
        tuned = lora(adapter(tmp_path / folder, weights=number), number)
        read(tuned)
        image = item("ab" * 32, pixels=picture(), key="adapter:" + "ab" * 32)
        assert one.saves(shown(folder, image, lora_request=tuned)) is (number == 1)


def test_a_session_that_shows_more_later_ends_sharing_of_images(rank: Callable[[], Rank]):
    """Nobody tells what it shows; text is shared as before."""
    one = rank()
    one.head.begin(Request("s", TOKENS, resumable=True))
    assert not one.saves(shown("a", item("ab" * 32, pixels=picture())))
    assert one.saves(Request("b", TOKENS))


def test_embeds_and_tokens_are_told_apart(vllm: Any):
    """Where a prompt mixes them, token 0 is no embed of the same bytes."""
    with adapters("keys") as modules:
        keys = modules.keys.Keys(CacheSpec("m", b"f" * 32, "x", 4, (GroupSpec(Kind.FULL, 1, 1, 4096),), extras=True))
        masks = [None, [True] * 8, [True] * 4 + [False] + [True] * 3]
        made = []
        for mask in masks:
            request = Request("a", [0] * 8, prompt_embeds=torch.zeros(8, 2))
            request.prompt_is_token_ids = mask
            made.append(keys.of(request, modules.keys.Said(), 0, 2))
    assert made[0] == made[1] != made[2]


# -- chunks of the secondary tier --------------------------------------------------------------------------------------


@pytest.fixture
def naming(vllm: Any, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    """Makes the naming of engines of a model that takes images."""
    made = []

    def make(**media: Any) -> Any:
        settings = config(tmp_path)
        settings.model_config = model(tmp_path, **media)
        made.append(vllm.naming.Naming(settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


KEYS = [bytes([number]) * 36 for number in range(3)]
"""Of chunks of 16 tokens."""


def context(naming: Any, request: Request) -> Context:
    """What a tier is told of a request."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import _create_req_context

    made: Context = _create_req_context(request)
    naming.show(made)
    return made


def test_a_chunk_is_named_by_the_images_before_its_end(naming: Callable[[], Any]):
    """Whatever they are called: other pixels, other chunks; those before an image are what they are without."""
    one, other = naming(mm_processor_cache_gb=4), naming(mm_processor_cache_gb=4)
    name = "ab" * 32
    plain = one.names(KEYS, context(one, Request("a", TOKENS)))
    assert plain == KEYS
    first = one.names(KEYS, context(one, shown("b", item(name, 20, pixels=picture()))))
    second = other.names(KEYS, context(other, shown("c", item(name, 20, pixels=picture(1)))))
    again = other.names(KEYS, context(other, shown("d", item("mine", 20, pixels=picture()))))
    assert first == again
    assert first[0] == second[0] == plain[0]
    assert len({*first[1:], *second[1:], *plain[1:]}) == 6
    assert all(each[32:] == key[32:] for each, key in zip(first, KEYS, strict=True))


def test_chunks_are_stored_only_where_a_name_was_one_image(naming: Callable[[], Any]):
    """And only of requests that were seen; a model that takes none has nothing to be sure of."""
    one = naming(mm_processor_cache_gb=4)
    first = context(one, shown("a", item("ab" * 32, pixels=picture())))
    assert one.sure(first)
    second = context(one, shown("b", item("ab" * 32, pixels=picture(1))))
    assert not one.sure(first)
    assert not one.sure(second)
    assert one.sure(context(one, Request("c", TOKENS)))
    unseen = Context(Request("d", TOKENS))
    assert (one.sure(unseen), one.name(KEYS[0], unseen), one.ready(unseen)) == (False, None, True)
    text = naming()
    assert text.sure(unseen)
    assert text.name(KEYS[0], unseen) == KEYS[0]
