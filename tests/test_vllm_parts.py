"""What vLLM's adapters decide without an engine, on a real daemon: whose KV is whose, and what never ends a step."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from kvtier import wire
from kvtier.client import Client, page_keys
from kvtier.control.call import Admin
from kvtier.demo.daemon import Daemon
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.types import Kind
from vllmstub import Request, adapters, config, model, paged, step
from weightkit import safetensors

torch = pytest.importorskip("torch")

SPEC = CacheSpec("m", b"f" * 32, "x", 4, (GroupSpec(Kind.FULL, 1, 1, 4096),), extras=True)
TOKENS = list(range(1, 42))
"""Ten whole pages and one token to compute."""


@pytest.fixture
def vllm() -> Iterator[Any]:
    """The adapters' modules."""
    with adapters("scheduler", "messages", "formats", "adapters", "worker", "keys", "asked") as modules:
        yield modules


@pytest.fixture
def engine(vllm: Any, daemon: Daemon) -> Iterator[Callable[[], Any]]:
    """Makes scheduler's sides of engines that all have one name, as a copied configuration gives them."""
    made = []

    def make() -> Any:
        made.append(vllm.scheduler.Scheduler(Client(daemon.socket, instance="vllm-fixed", timeout_s=20.0), 1))
        made[-1].agree([vllm.messages.Formats(msgspec.msgpack.encode(SPEC))])
        return made[-1]

    yield make
    for each in made:
        each.close()


def put(daemon: Daemon, spec: CacheSpec) -> None:
    """Keep ten pages of TOKENS."""
    with Client(daemon.socket, instance="other", timeout_s=20.0) as client:
        path = client.open(spec).match(page_keys(spec, TOKENS[:40]))
        held = path.reserve(0, 10, wait_ms=5000)
        for page in range(10):
            held.write(0, page, bytes([page]) * spec.groups[0].item_bytes)
        assert held.commit() == 10


def until(true: Callable[[], Any]) -> Any:
    """The first answer that is one."""
    deadline = time.monotonic() + 30
    while (got := true()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return got


def matched(engine: Any, name: str, tokens: list[int] = TOKENS) -> int:
    """Tokens that a new request would load."""
    request = Request(name, tokens)
    engine.begin(request)
    got: int = until(lambda: engine.matched(request, 0)[0])
    engine.finished(name)
    return got


def test_after_a_change_of_weights_engines_of_one_name_share_nothing(vllm: Any, daemon: Daemon, engine: Any):
    """Two engines (or one, restarted) whose operator gave them one name: what one's changed weights made is its own."""
    changed = vllm.formats.changed
    first, second = engine(), engine()
    first.reset()
    put(daemon, changed(SPEC, first.plan(step()).changed))
    assert matched(first, "a") == 40
    second.reset()
    assert matched(second, "a") == 0
    first.reset()
    assert matched(first, "b") == 0


@pytest.mark.parametrize("way", ["allocated", "finished", "reset"])
def test_a_request_that_goes_on_while_its_look_up_runs_leaves_no_lease(
    daemon: Daemon, engine: Any, monkeypatch: pytest.MonkeyPatch, way: str
):
    """VLLM may compute a request whose look-up is not over, end it, or reset: what is leased later is given back."""
    put(daemon, SPEC)
    one, begun, found, go = engine(), threading.Event(), threading.Event(), threading.Event()
    find = one._finder.find
    leases = []

    def slowly(*args: Any) -> Any:
        begun.set()
        assert go.wait(30)
        leases.append(find(*args))
        found.set()
        return leases[-1]

    monkeypatch.setattr(one._finder, "find", slowly)
    request = Request("a", TOKENS)
    one.begin(request)
    until(lambda: (one.matched(request, 0), begun.is_set() or None)[1])
    assert one.matched(request, 0) == (None, False)
    end = {"allocated": lambda: one.allocated(request, (list(range(20)),), 0), "finished": lambda: one.finished("a"),
           "reset": one.reset}  # fmt: skip
    end[way]()
    go.set()
    assert found.wait(30)
    assert leases[0].pages == 10
    until(lambda: None if held(daemon) else True)


def test_a_request_of_which_nothing_is_cached_is_looked_up_once(
    vllm: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
):
    """Its step waits for the match that began when it came, and for nothing after that."""
    one, more = engine(), []
    monkeypatch.setattr(vllm.asked, "FRESH_S", 60.0)
    monkeypatch.setattr(one._finder, "find", lambda *args: more.append(args))
    request = Request("a", TOKENS)
    one.begin(request)
    assert until(lambda: one.matched(request, 0)[0]) == 0
    assert more == []


def test_a_request_that_ends_before_its_turn_is_not_looked_up(engine: Any):
    """All threads wait for the disk: nothing is brought from there, and no path kept, for what nobody asks any more."""
    one, go = engine(), threading.Event()
    for _ in range(32):
        one._pool.submit(go.wait, 30)
    one.begin(Request("a", TOKENS))
    asked = one._asked["a"]
    one.finished("a")
    until(lambda: asked.over or None)
    go.set()
    asked.warming.result(30)
    assert asked.path.keys == b""


def held(daemon: Daemon) -> int:
    """Leases that are held."""
    with Admin(daemon.socket.with_name("admin.sock"), 10) as admin:
        return sum(each["leases"] for each in admin.ask(wire.Status(), wire.Info).data["instances"])


def test_what_waits_for_room_keeps_no_look_up_waiting(daemon: Daemon, engine: Any, monkeypatch: pytest.MonkeyPatch):
    """While as many requests as there are wait for room to be made, a new one's look-up is answered."""
    put(daemon, SPEC)
    one, go, waiting = engine(), threading.Event(), threading.Semaphore(0)
    reserve = one._reserve

    def slowly(*args: Any) -> Any:
        waiting.release()
        assert go.wait(30)
        return reserve(*args)

    monkeypatch.setattr(one, "_reserve", slowly)
    for n in range(40):
        request = Request(f"r{n}", [1000 + n, *TOKENS])
        one.begin(request)
        assert until(lambda request=request: one.matched(request, 0)[0]) == 0
    one.plan(step(**{f"r{n}": 40 for n in range(40)}))
    for _ in range(8):
        assert waiting.acquire(timeout=30)
    try:
        assert matched(one, "new") == 40
    finally:
        go.set()


def test_a_lease_that_was_lost_while_its_request_waited_is_not_loaded(daemon: Daemon, engine: Any):
    """VLLM had no blocks for it, and the daemon has gone meanwhile: the next answer is that there is nothing."""
    put(daemon, SPEC)
    one, request = engine(), Request("a", TOKENS)
    one.begin(request)
    assert until(lambda: one.matched(request, 0)[0]) == 40
    daemon.kill()
    assert until(lambda: one.matched(request, 0)[0]) == 0
    daemon.start()


@pytest.mark.parametrize("error", [OSError("disk"), ValueError("JSON"), TimeoutError()])
def test_what_a_thread_meets_with_is_a_miss_and_ends_no_step(
    engine: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    """An error of the system's or of a decoder's while looking up or reserving: computed, not saved, nothing raised."""
    one = engine()
    for owner, verb in ((one._finder, "find"), (one, "_reserve")):
        monkeypatch.setattr(owner, verb, Mock(side_effect=error))
    request = Request("a", TOKENS)
    one.begin(request)
    assert until(lambda: one.matched(request, 0)[0]) == 0
    one.allocated(request, ([],), 0)
    until(lambda: None if one.plan(step(a=40)).saves or one._asked["a"].saves else True)


# -- names of what changes KV ------------------------------------------------------------------------------------------


def lora(path: Path | str, number: int = 1) -> SimpleNamespace:
    """A request's adapter."""
    return SimpleNamespace(lora_name="adapter", lora_int_id=number, lora_path=str(path))


def adapter(folder: Path, weights: int = 0, alpha: int = 8) -> Path:
    """The files of one."""
    safetensors(folder / "adapter_model.safetensors", {"a": np.full((4, 8), weights, "<f4")})
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": alpha}))
    return folder


def test_an_adapter_is_its_weights_and_its_configuration(vllm: Any, tmp_path: Path):
    """Another scale in adapter_config.json is another adapter; the same files elsewhere are the same one."""
    folders = [adapter(tmp_path / "a"), adapter(tmp_path / "b", alpha=16), adapter(tmp_path / "c", weights=1)]
    digests = [vllm.adapters.adapter_digest(str(folder)) for folder in folders]
    assert len(set(digests)) == 3
    assert vllm.adapters.adapter_digest(str(adapter(tmp_path / "d"))) == digests[0]


def test_an_adapter_is_found_where_vllm_finds_it(vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In the home folder, beside the process, in the hub's cache when offline; a hub that may have a newer one: not."""
    want = vllm.adapters.adapter_digest(str(adapter(tmp_path / "mine")))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert vllm.adapters.adapter_digest("~/mine") == vllm.adapters.adapter_digest("mine") == want
    hub = pytest.importorskip("huggingface_hub")
    kept = tmp_path / "hub" / "models--some--lora"
    adapter(kept / "snapshots" / "1234")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("1234")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(kept.parent))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    assert vllm.adapters.adapter_digest("some/lora") is None
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    assert vllm.adapters.adapter_digest("some/lora") == want
    assert vllm.adapters.adapter_digest("some/other") is None


@pytest.mark.parametrize("missing", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_adapter_whose_files_are_not_here_is_neither_loaded_nor_saved(engine: Any, tmp_path: Path, missing: str):
    """A request with it finds nothing and reserves nothing; one with an adapter that is here does."""
    known, unknown = adapter(tmp_path / "known"), adapter(tmp_path / "unknown")
    (unknown / missing).unlink()
    one = engine()
    assert [saved(one, Request(str(at), TOKENS, lora_request=lora(at))) for at in (known, unknown)] == [True, False]


def saved(engine: Any, request: Any) -> bool:
    """Whether room is asked for, for the pages that a request has computed."""
    engine.begin(request)
    assert until(lambda: engine.matched(request, 0)[0]) == 0
    asked, output = engine._asked[request.request_id], step(**{request.request_id: 40})
    reserve, got = engine._reserve, []
    engine._reserve = lambda *args: got.append(reserve(*args)) or got[0]
    engine.plan(output)
    until(lambda: got or (None if asked.saves else [None]))
    engine._reserve = reserve
    engine.finished(request.request_id)
    return bool(got and got[0].pages)


def test_the_fingerprint_has_what_turns_pixels_into_tokens_and_the_draft(vllm: Any, tmp_path: Path):
    """Server-wide processor settings, the processor's file, a draft's weights: each another fingerprint."""
    folder = safetensors(tmp_path / "m" / "m.safetensors", {"a": np.ones((4, 8), "<f4")}).parent
    settings = config(folder, speculative_config=None)
    found = [vllm.formats.model_fingerprint(settings)]
    for more in (
        {"mm_processor_kwargs": None},
        {"mm_processor_kwargs": {"max_pixels": 9}},
        {"video_pruning_rate": 0.5},
    ):
        settings.model_config = model(folder, **more)
        found.append(vllm.formats.model_fingerprint(settings))
    (folder / "preprocessor_config.json").write_text("{}")
    found.append(vllm.formats.model_fingerprint(settings))
    settings.model_config = model(folder)
    for weight in (1, 2):
        draft = safetensors(tmp_path / "draft" / "m.safetensors", {"a": np.full((4, 8), weight, "<f4")}).parent
        settings.speculative_config = SimpleNamespace(draft_model_config=model(draft))
        found.append(vllm.formats.model_fingerprint(settings))
    assert len(set(found)) == len(found)
    settings.speculative_config = SimpleNamespace(draft_model_config=model(folder))  # its draft lies in the model
    assert vllm.formats.model_fingerprint(settings) == found[0]


# -- steps -------------------------------------------------------------------------------------------------------------


def test_a_step_looks_at_no_request_that_adds_a_token_to_a_page(daemon: Daemon, engine: Any):
    """Of a thousand that decode, those whose page it completes: what it costs all others is a look into a table."""
    looked: list[str] = []

    class Decoding(Request):
        @property
        def num_tokens(self) -> int:
            looked.append(self.request_id)
            return len(self.all_token_ids)

    one = engine()
    for name in "ab":
        request = Decoding(name, TOKENS, max_tokens=100)
        one.begin(request)
        assert until(lambda request=request: one.matched(request, 0)[0]) == 0
        one.allocated(request, (), 0)
        one._asked[name].saved = 10  # of pages that are stored
    looked.clear()
    for tokens in (41, 42, 43):
        one.plan(step(a=tokens, b=tokens))
    assert looked == []
    one.plan(step(a=43, b=44))
    assert set(looked) == {"b"}


# -- blocks that are copied --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", [1, 2])
def test_no_block_is_written_while_it_is_copied(vllm: Any, daemon: Daemon, tmp_path: Path, runner: int):
    """VLLM's second model runner zeroes blocks before it says that a step begins: there a step ends with its copies.

    With the first one, copies end when a step begins that gives their blocks to something else.
    """
    weights = safetensors(tmp_path / "m.safetensors", {"a": np.ones((4, 8), "<f4")}).parent
    settings = config(weights, use_v2_model_runner=runner == 2)
    client = [Client(daemon.socket, instance="vllm-fixed", timeout_s=20.0) for _ in range(2)]
    worker = vllm.worker.Worker(client[0], settings, paged(2, 4 * 16 * 4, 64, 4))
    blocks = torch.arange(64.0).reshape(64, 1, 1, 1).expand(64, 2, 4, 16).clone()
    worker.register({"layer": blocks})
    head = vllm.scheduler.Scheduler(client[1], 1)
    head.agree([worker.formats()])
    end, copied = worker._end, []

    def slowly(*args: Any) -> None:
        time.sleep(0.2)
        end(*args)
        copied.append(args)

    worker._end = slowly
    head.begin(Request("a", TOKENS))

    def saves() -> Any:
        plan = head.plan(step(a=40))
        worker.load(plan)
        worker.save(plan)
        return plan.saves or None

    until(saves)
    if runner == 1:
        worker.fence()
    assert copied
    blocks[:] = 0
    until(lambda: (done := worker.take_done()) and (done.served or None))
    path = head._cache.match(head._finder.keys.of(Request("a", TOKENS), vllm.keys.Said(), 0, 10))
    with path.acquire(10) as lease:
        first = [np.frombuffer(lease.view(0, page), "<f4")[0] for page in range(10)]
    assert first == list(range(1, 11))
    worker.close()
    head.close()


def test_a_load_between_steps_takes_of_each_step_what_one_may(
    vllm: Any, daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is begun part by part, is over when all parts are, and fails with the first page that is not right."""
    monkeypatch.setattr(vllm.scheduler, "LATER_BYTES", 0)
    weights = safetensors(tmp_path / "m.safetensors", {"a": np.ones((4, 8), "<f4")}).parent
    clients = [Client(daemon.socket, instance="vllm-fixed", timeout_s=20.0) for _ in range(2)]
    worker = vllm.worker.Worker(clients[0], config(weights), paged(2, 4 * 16 * 4, 64, 4))
    blocks = torch.zeros(64, 2, 4, 16)
    worker.register({"layer": blocks})
    worker._part, copy = 3, worker._copies.load
    head = vllm.scheduler.Scheduler(clients[1], 1)
    head.agree([worker.formats()])
    put(daemon, worker.spec)
    right = [True]

    def slowly(*args: Any, **more: Any) -> Any:
        arrival = copy(*args, **more)
        arrival.good = right.pop(0) if len(right) > 1 else right[0]
        time.sleep(vllm.worker.COPY_S)
        return arrival

    monkeypatch.setattr(worker._copies, "load", slowly)

    def load(name: str, first: int) -> Iterator[tuple[int, set[str], set[str]]]:
        """Blocks that have their pages after each step, and who was told to have come or failed."""
        request = Request(name, TOKENS)
        head.begin(request)
        assert until(lambda: head.matched(request, 0)[0]) == 40
        head.allocated(request, (list(range(first, first + 10)),), 40)
        worker.load(head.plan(step()))
        for _ in range(5):
            worker.between()
            there = blocks[first : first + 10].reshape(10, -1).view(torch.uint8)
            yield int(there[1:].any(dim=1).sum()) + 1, *worker.take_received()  # the first page is of zeros
        head.heard(worker.take_done())
        head.finished(name)

    assert list(load("a", 1)) == [(3, set(), set()), (6, set(), set()), (9, set(), set()), (10, {"a"}, set()),
                                  (10, set(), set())]  # fmt: skip
    assert torch.equal(blocks[1:11].reshape(10, -1).view(torch.uint8)[:, 0], torch.arange(10, dtype=torch.uint8))
    right[:] = [True, False]
    assert list(load("b", 21))[:3] == [(3, set(), set()), (6, {"b"}, {"b"}), (6, set(), set())]
    until(lambda: None if held(daemon) else True)
    worker.close()
    head.close()
