"""What vLLM's connector holds of the daemon is given back, whatever comes between: on a real daemon."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier import wire
from kvtier.client import Client
from kvtier.control.call import Admin
from kvtier.demo.daemon import Daemon
from kvtier.types import Code, KvtierError
from vllmstub import Request, adapters, config, paged, step
from weightkit import safetensors

torch = pytest.importorskip("torch")

TOKENS = list(range(1, 42))
"""Ten whole pages and one token to compute."""


@pytest.fixture
def rank(daemon: Daemon, tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """Both sides of an engine of one rank."""
    with adapters("scheduler", "worker") as vllm:
        weights = safetensors(tmp_path / "model" / "m.safetensors", {"a": np.ones((4, 8), "<f4")}).parent
        clients = [Client(daemon.socket, instance="vllm-fixed", timeout_s=20.0) for _ in range(2)]
        worker = vllm.worker.Worker(clients[0], config(weights), paged(2, 4 * 16 * 4, 64, 4))
        worker.register({"layer": torch.zeros(64, 2, 4, 16)})
        head = vllm.scheduler.Scheduler(clients[1], 1)
        head.agree([worker.formats()])
        yield head, worker
        worker.close()
        head.close()


def reserved(daemon: Daemon) -> int:
    """Reservations that are held."""
    with Admin(daemon.socket.with_name("admin.sock"), 10) as admin:
        return sum(each["reservations"] for each in admin.ask(wire.Status(), wire.Info).data["instances"])


def looked_up(head: Any, request: Request) -> bool:
    """Whether it is known what of a request is cached."""
    return head.matched(request, 0)[0] is not None


def act(worker: Any, plan: Any) -> Any:
    """A step of the worker's."""
    worker.load(plan)
    worker.save(plan)
    return plan


def soon(true: Any) -> bool:
    """Whether it comes true in a while."""
    deadline = time.monotonic() + 10
    while not (got := true()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(got)


@pytest.mark.parametrize("resets", [1, 2])
def test_slots_that_were_reserved_before_a_reset_are_given_back(rank: tuple[Any, Any], daemon: Daemon, resets: int):
    """Nobody writes them any more: the workers, who are in another cache by then, say so all the same."""
    head, worker = rank
    for n in range(resets):
        name = f"request {n}"
        request = Request(name, [n, *TOKENS], max_tokens=100)
        head.begin(request)
        assert soon(functools.partial(looked_up, head, request))
        with head._asked[name].lock:  # nothing is granted within this step; a later one would save
            assert not act(worker, head.plan(step(**{name: 40}))).saves
        assert soon(head._asked[name].reserving.done)
        assert reserved(daemon)
        assert head.reset()
    act(worker, head.plan(step()))
    assert soon(lambda: not reserved(daemon))


def test_memory_that_cannot_be_mapped_ends_no_step(
    rank: tuple[Any, Any], daemon: Daemon, monkeypatch: pytest.MonkeyPatch
):
    """Where saves are copied within the step, as on a GPU without kernels: the save is given up, its slots return."""

    def refused(*args: Any) -> None:
        raise KvtierError(Code.IO, "mmap: Cannot allocate memory")

    head, worker = rank
    monkeypatch.setattr(worker._copies, "aside", False)
    monkeypatch.setattr(worker._copies, "_save", refused)
    request = Request("a", TOKENS)
    head.begin(request)
    assert soon(functools.partial(looked_up, head, request))
    assert soon(lambda: act(worker, head.plan(step(a=40))).saves)
    head.heard(worker.take_done())
    act(worker, head.plan(step()))
    assert soon(lambda: not reserved(daemon))


def test_workers_on_other_hosts_are_refused_by_name(rank: tuple[Any, Any]):
    """They have no memory in common with this daemon: each load would fail, and no save would ever be whole."""
    head, worker = rank
    there = dataclasses.replace(worker.formats(), host="another")
    with pytest.raises(KvtierError, match="host"):
        head.agree([worker.formats(), there])
