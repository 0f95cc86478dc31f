"""Real SGLang with kvtier right below its KV: the same bits, its answers those of recomputing, no request ended."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.demo.daemon import Daemon
from sglangkit import PAGE, WHOLE, Engine, home, linker, model, needs_sglang, same, spoil, until
from vllmkit import prompt, texts

__all__ = ["home", "model"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), needs_sglang]

OF = [3, 4, 9, 1, 12, 7]
TO = [2, 10, 5, 6, 8, 14]


@pytest.fixture(scope="module")
def side(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """SGLang's pools and the linker, without an engine."""
    with Engine(tmp_path_factory.mktemp("side") / "log") as process:
        yield process.storage(model, {})


@pytest.fixture
def pool(side: Engine, home: Daemon) -> Iterator[Any]:
    """Makes pools with linkers."""
    yield lambda **more: side.tell("link", **{"config": {"socket": str(home.socket)}, **more})
    side.tell("unlink")


@pytest.fixture
def keys(request: pytest.FixtureRequest) -> list[str]:
    """Page hashes that no other test has."""
    return [hashlib.sha256(f"{request.node.name} {n}".encode()).hexdigest() for n in range(6)]


# -- SGLang's pools ----------------------------------------------------------------------------------------------------


def test_pages_come_back_to_other_slots_as_they_were(side: Engine, pool: Any, keys: list[str]):
    """MHA, MLA, and a sliding window beside full attention, in two types: these bytes, and no other is touched."""
    for kind, window in (("mha", 0), ("mla", 0), ("swa", 2)):
        for seed, dtype in enumerate(("float32", "bfloat16")):
            at = pool(kind=kind, dtype=dtype)
            asked = {"at": at, "keys": keys, "window": window}
            assert side.tell("lookup", **asked) == []
            assert side.tell("offload", pages=OF, seed=seed, **asked)
            until(lambda asked=asked: max(side.tell("lookup", **asked), default=0) == len(keys))
            got = side.tell("load", pages=TO, of=OF, seed=seed, **asked)
            assert got == {"done": True, "right": True, "alone": True}, (kind, dtype)


def test_a_prompt_is_restored_where_the_window_is_there_too(side: Engine, pool: Any, keys: list[str]):
    """SGLang asks for every length that all pools can restore, not for the longest."""
    at = pool(kind="swa")
    side.tell("offload", at=at, keys=keys[:3], pages=OF[:3], window=2)
    side.tell("offload", at=at, keys=keys, pages=OF, window=1)
    until(lambda: side.tell("lookup", at=at, keys=keys, window=2) == [3])
    until(lambda: side.tell("lookup", at=at, keys=keys, window=1) == [2, 3, 6])


def test_a_load_that_is_not_whole_is_said_before_it_counts(side: Engine, pool: Any, keys: list[str]):
    """A page that went since the look-up: SGLang is told in time to compute, and no page that it asks for is wrong."""
    at = pool()
    side.tell("offload", at=at, keys=keys[:4], pages=OF[:4])
    until(lambda: side.tell("lookup", at=at, keys=keys) == [1, 2, 3, 4])
    got = side.tell("load", at=at, keys=keys, pages=TO, of=OF)
    assert not got["done"]
    assert side.tell("load", at=at, keys=keys[:4], pages=TO[:4], of=OF[:4])["right"]


def test_a_daemon_that_hangs_is_a_miss_and_is_waited_for_briefly(
    side: Engine, pool: Any, home: Daemon, keys: list[str]
):
    """Look-ups, loads and offloads come to an end, and go on working when it goes on."""
    at = pool()
    asked = {"at": at, "keys": keys}
    assert side.tell("offload", pages=OF, **asked)
    os.kill(home.pid, signal.SIGSTOP)
    try:
        assert side.tell("lookup", **asked) == []
        assert side.tell("lookup", **asked) == []
        assert not side.tell("load", pages=TO, of=OF, **asked)["done"]
        assert not side.tell("offload", pages=OF, **asked)
    finally:
        os.kill(home.pid, signal.SIGCONT)
    until(lambda: max(side.tell("lookup", **asked), default=0) == len(keys))
    assert side.tell("load", pages=TO, of=OF, **asked)["right"]


def test_what_cannot_be_linked_is_refused_by_name(side: Engine, pool: Any):
    """Pools that nobody here knows, drafts, pipelines, settings that do not exist: the start ends with the reason."""
    for more, said in (
        ({"kind": "strange"}, "Strange"), ({"draft": True}, "speculative"), ({"pp_size": 2}, "pp_size"),
        ({"config": {"sockets": "x"}}, "sockets"),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match=said):
            pool(**more)


# -- the engine --------------------------------------------------------------------------------------------------------


def started(folder: Path, model: Path, home: Daemon, env: dict[str, str] | None = None, **options: Any) -> Engine:
    """An engine on the daemon."""
    return Engine(folder / "log", env).start(model, None, linker=linker(home.socket), **options)


def kept(engine: Engine, prompts: list[list[int]], whole: list[int]) -> None:
    """Wait until these tokens of the prompts are loaded: a thread stores them."""
    until(lambda: linked(engine.again(prompts)) == whole)


def linked(answers: list[dict[str, Any]]) -> list[int]:
    """Tokens of each prompt that were loaded."""
    return [each["linked"] for each in answers]


def test_a_fresh_engine_and_a_restarted_daemon_give_the_same_bits(home: Daemon, model: Path, tmp_path: Path):
    """192 of 200 tokens are loaded; tokens and logprobs are those that the engine which computed them gives from them.

    Another tenant's `extra_key` finds nothing and gets the same text.
    """
    ask = [prompt(200), prompt(3 * PAGE + 1, 12)]
    with started(tmp_path, model, home) as cold:
        assert linked(cold.generate(ask)) == [0, 0]
        want = cold.generate(ask)
        kept(cold, ask, [WHOLE, 3 * PAGE])
    home.stop()
    home.start()
    with started(tmp_path, model, home) as warm:
        kept(warm, ask, [WHOLE, 3 * PAGE])  # a busy machine's daemon may answer late once
        got = warm.again(ask)
        salted = warm.generate(ask, extra_key="another tenant")
    assert same(got, want)
    assert linked(salted) == [0, 0]
    assert texts(salted) == texts(want)


def test_two_ranks_take_one_decision(home: Daemon, model: Path, tmp_path: Path):
    """Both ranks load what both have, in a fresh engine too, and the text is what they computed."""
    both = {"tp_size": 2, "env": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}
    ask = [prompt(200, 21)]
    with started(tmp_path, model, home, **both) as two:
        want = two.generate(ask)
        kept(two, ask, [WHOLE])
    with started(tmp_path, model, home, **both) as two:
        kept(two, ask, [WHOLE])
        got = two.again(ask)
    assert texts(got) == texts(want)


def test_no_request_ends_for_its_daemon_or_for_changed_weights(home: Daemon, model: Path, tmp_path: Path):
    """Stopped, killed, started again, disk pages spoilt: the same text each time, and hits again afterwards.

    SGLang ends a request whose load fails once it was begun, so a load that would fail is never begun. Weights that are
    changed in place find nothing of the old ones', nor do the old ones find theirs when they are back.
    """
    ask = [prompt(200, 31)]
    with started(tmp_path, model, home) as engine:
        engine.generate(ask)
        want = engine.generate(ask)
        kept(engine, ask, [WHOLE])
        os.kill(home.pid, signal.SIGSTOP)
        try:
            assert texts(engine.again(ask)) == texts(want)
        finally:
            os.kill(home.pid, signal.SIGCONT)
        kept(engine, ask, [WHOLE])
        home.kill()
        assert texts(engine.again(ask)) == texts(want)
        spoil(home)
        home.start()
        until(lambda: texts(engine.again(ask)) == texts(want) and "a load came to nothing" in log(engine))
        kept(engine, ask, [WHOLE])
        engine.tell("scale", model=str(model), by=-3.0)
        changed = engine.again(ask)
        assert linked(changed) == [0]
        assert texts(changed) != texts(want)
        kept(engine, ask, [WHOLE])
        assert texts(engine.again(ask)) == texts(changed)
        engine.tell("scale", model=str(model), by=1.0)
        back = engine.again(ask)
        assert linked(back) == [0]
        assert texts(back) == texts(want)
    with started(tmp_path, model, home) as fresh:
        kept(fresh, ask, [WHOLE])
        got = fresh.again(ask)
    assert same(got, want)


def log(engine: Engine) -> str:
    """What it has said."""
    return engine.log.read_text(errors="replace")
