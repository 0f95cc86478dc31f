"""What vLLM's adapters decide without an engine, on a real daemon: whose KV is whose, and what never ends a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from kvtier import wire
from kvtier.client import Client, page_keys
from kvtier.control.call import Admin
from kvtier.demo.daemon import Daemon
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.types import Kind
from vllmstub import Request, adapters, step

pytest.importorskip("torch")

SPEC = CacheSpec("m", b"f" * 32, "x", 4, (GroupSpec(Kind.FULL, 1, 1, 4096),), extras=True)
TOKENS = list(range(1, 42))
"""Ten whole pages and one token to compute."""


@pytest.fixture
def vllm() -> Iterator[Any]:
    """The adapters' modules: scheduler, messages, formats."""
    with adapters("scheduler", "messages", "formats") as modules:
        yield modules


@pytest.fixture
def engine(vllm: Any, daemon: Daemon) -> Iterator[Callable[[], Any]]:
    """Makes scheduler's sides of engines that all have one name, as a copied configuration gives them."""
    made = []

    def make() -> Any:
        scheduler, messages, _ = vllm
        made.append(scheduler.Scheduler(Client(daemon.socket, instance="vllm-fixed", timeout_s=20.0), 1))
        made[-1].agree([messages.Formats(msgspec.msgpack.encode(SPEC))])
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
    changed = vllm[2].changed
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
    one, found, go = engine(), threading.Event(), threading.Event()
    find = one._find
    leases = []

    def slowly(*args: Any) -> Any:
        assert go.wait(30)
        leases.append(find(*args))
        found.set()
        return leases[-1]

    monkeypatch.setattr(one, "_find", slowly)
    request = Request("a", TOKENS)
    one.begin(request)
    assert one.matched(request, 0) == (None, False)
    end = {"allocated": lambda: one.allocated(request, (list(range(20)),), 0), "finished": lambda: one.finished("a"),
           "reset": one.reset}  # fmt: skip
    end[way]()
    go.set()
    assert found.wait(30)
    assert leases[0].pages == 10
    until(lambda: None if held(daemon) else True)


def held(daemon: Daemon) -> int:
    """Leases that are held."""
    with Admin(daemon.socket.with_name("admin.sock"), 10) as admin:
        return sum(each["leases"] for each in admin.ask(wire.Status(), wire.Info).data["instances"])


@pytest.mark.parametrize("error", [OSError("disk"), ValueError("JSON"), TimeoutError()])
def test_what_a_thread_meets_with_is_a_miss_and_ends_no_step(
    engine: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    """An error of the system's or of a decoder's while looking up or reserving: computed, not saved, nothing raised."""
    one = engine()
    for verb in ("_find", "_reserve"):
        monkeypatch.setattr(one, verb, Mock(side_effect=error))
    request = Request("a", TOKENS)
    one.begin(request)
    assert until(lambda: one.matched(request, 0)[0]) == 0
    one.allocated(request, ([],), 0)
    until(lambda: None if one.plan(step(a=40)).saves or one._asked["a"].saves else True)
