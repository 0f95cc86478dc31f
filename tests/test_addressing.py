"""How operators name a prompt besides tokens: sessions, recent requests, opaque keys; and what its parts cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from kvtier.client import AsyncClient, Client, page_keys
from kvtier.control.address import _named
from kvtier.control.cost import priced, total
from kvtier.ctl import main
from kvtier.demo.daemon import Daemon
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.store.cache import Cache
from kvtier.store.instance import Path
from kvtier.store.requests import MOST_REQUESTS, Requests
from kvtier.types import Kind, KvtierError

GROUP = GroupSpec(Kind.FULL, 1, 1, 4096)
SPEC = CacheSpec("m", b"f" * 16, "bf16", 4, (GROUP,))
KEYED = CacheSpec("keyed", b"f" * 16, "bf16", 4, (GROUP, GROUP), key_bytes=16)


class Bench:
    """A daemon with an engine, and kvtierctl."""

    def __init__(self, daemon: Daemon, client: Client) -> None:
        self.daemon = daemon
        self.client = client
        self.cache = client.open(SPEC)

    def put(self, tokens: list[int], request: str = "", session: str = "") -> None:
        """Store a prompt."""
        pages = len(tokens) // 4
        path = self.cache.match(page_keys(SPEC, np.array(tokens)), request=request, session=session)
        with path.reserve(0, pages) as reserved:
            for page in range(pages):
                if reserved.view(0, page) is not None:
                    reserved.write(0, page, np.full(4096, page % 256, np.uint8))
            assert reserved.commit() == pages

    def run(self, *words: str) -> Result:
        """Run kvtierctl."""
        where = str(self.daemon.socket.with_name("admin.sock"))
        return CliRunner().invoke(main, ["--socket", where, *words], env={"COLUMNS": "200"})

    def ctl(self, *words: str) -> dict[str, Any]:
        """What --json prints."""
        result = self.run(*words, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)


@pytest.fixture
def bench(daemon: Daemon) -> Iterator[Bench]:
    """See Bench."""
    with Client(daemon.socket, instance="engine") as client:
        yield Bench(daemon, client)
        assert not daemon.broken_invariants()


# -- sessions and requests ---------------------------------------------------------------------------------------------


def test_a_session_names_its_latest_request(bench):
    """Two turns of a conversation and another one between them; the verbs act on the last turn."""
    bench.put(list(range(8)), "r1", "chat")
    bench.put([50, 51, 52, 53], "other", "another")
    bench.put(list(range(16)), "", "chat")
    data = bench.ctl("explain", "--session", "chat")
    assert data["matched"]["pages"] == 4
    assert bench.ctl("pin", "--session", "chat")["pages"] == 4
    assert bench.ctl("unpin", "--all")
    bench.ctl("flush")
    assert bench.ctl("prefetch", "--session", "chat")["pages"] == 4
    assert bench.ctl("evict", "--session", "chat", "--from", "all")["pages"] == 4
    assert bench.ctl("explain", "--session", "another")["matched"]["pages"] == 1
    result = bench.run("explain", "--session", "nobody")
    assert result.exit_code == 1
    assert "'nobody'" in result.stderr


def test_a_prompt_shorter_than_a_page_is_no_error(bench, tmp_path):
    """There is nothing of it to cache, pin or evict, and each verb says so."""
    file = tmp_path / "short"
    file.write_text("1 2 3")
    assert bench.ctl("explain", "--tokens", str(file))["asked"] == {"pages": 0, "tokens": 0}
    assert bench.ctl("prefetch", "--tokens", str(file))["pages"] == 0
    assert bench.ctl("evict", "--tokens", str(file), "--from", "all") == {"pages": 0, "held": 0}
    assert "nothing: " in bench.run("evict", "--tokens", str(file), "--from", "all").stdout
    assert bench.run("pin", "--tokens", str(file)).exit_code == 1
    assert "shorter than a page" in bench.run("explain", "--tokens", str(file)).stdout


async def test_the_async_client_gives_sessions_too(bench):
    """Also for a prompt of which nothing is stored yet."""
    async with AsyncClient(bench.daemon.socket, instance="async") as client:
        cache = await client.open(SPEC)
        await cache.match(page_keys(SPEC, np.arange(8)), session="from-async")
        (row,) = bench.ctl("requests", "--session", "from-async")["requests"]
        assert (row["request"], row["pages"]) == ("", 2)
        assert bench.ctl("explain", "--session", "from-async")["matched"]["pages"] == 0


def test_requests_lists_what_can_be_named(bench):
    """The latest first, of one session or all; those without any id are not kept."""
    assert "no request" in bench.run("requests").stdout
    bench.put(list(range(8)), "r1", "chat")
    bench.put(list(range(8)))
    bench.put(list(range(100, 112)), "r2")
    rows = bench.ctl("requests")["requests"]
    assert [(row["request"], row["session"], row["pages"]) for row in rows] == [("r2", "", 3), ("r1", "chat", 2)]
    assert rows[0]["cache"] == bench.cache.cache_id.hex()
    assert [row["request"] for row in bench.ctl("requests", "--session", "chat")["requests"]] == ["r1"]
    assert len(bench.ctl("requests", "--limit", "1")["requests"]) == 1
    assert "r2" in bench.run("requests").stdout
    assert bench.run("requests", "--limit", "0").exit_code == 1


def test_requests_are_bounded_and_a_repeated_id_means_the_newest():
    """By number and by bytes; a path that grows is one request."""
    found = Requests()
    cache: Cache = object()  # type: ignore[assignment]

    def asked(request: str, session: str = "", size: int = 10) -> Path:
        path = Path(cache, request, session)
        path.keys = bytes(size)
        found.note(path, size)
        return path

    for number in range(MOST_REQUESTS + 5):
        asked(f"r{number}")
    assert len(list(found.latest())) == MOST_REQUESTS
    assert found.get("r4") is None
    old, new = asked("again", "s"), asked("again", "s")
    assert found.get("again") is new
    assert [path for path, _ in found.latest("s")] == [new]
    assert old is not new
    new.keys += bytes(60 << 20)
    found.note(new, 60 << 20)
    asked("large", size=10 << 20)
    assert [path.request for path, _ in found.latest()] == ["large"]


def test_explain_says_what_is_cached_of_a_prompt_that_no_match_can_end_in(bench):
    """Pages without their state match nothing: the answer counts them, says where states are, and evicts them all."""
    state = CacheSpec("s", b"f" * 16, "bf16", 4, (GROUP, GroupSpec(Kind.STATE, 1, 1, 4096)))
    cache = bench.client.open(state)
    keys = page_keys(state, np.arange(16))
    with cache.match(keys, request="stateful").reserve(0, 4, [(1, [1])]) as reserved:
        for group in (0, 1):
            for page in range(4):
                if reserved.view(group, page) is not None:
                    reserved.write(group, page, np.full(4096, page, np.uint8))
        assert reserved.commit() == 4
    data = bench.ctl("explain", "--request", "stateful")
    assert data["matched"]["pages"] == 2
    assert (data["miss"], data["diverges"]) == ("rule", None)
    assert data["rule"] == {"cached_pages": 4, "states_after_pages": {"1": [2]}}
    assert "group 1 has its state after pages 2" in bench.run("explain", "--request", "stateful").stdout
    assert bench.ctl("evict", "--request", "stateful", "--from", "all")["pages"] == 4


# -- keyed caches ------------------------------------------------------------------------------------------------------


@pytest.fixture
def keyed(bench: Bench, tmp_path) -> tuple[Bench, list[bytes], str]:
    """Keys 0, 1, 2 and 4 of six stored in group 1, and a file that lists all six."""
    cache = bench.client.open(KEYED)
    keys = [bytes([n]) * 16 for n in range(6)]
    with cache.reserve_keys(1, b"".join(keys[n] for n in (0, 1, 2, 4))) as reserved:
        for at in range(4):
            reserved.write(1, at, np.full(4096, at, np.uint8))
        assert reserved.commit() == 4
    bench.ctl("flush")
    file = tmp_path / "keys.txt"
    file.write_text("\n".join(key.hex() for key in keys))
    return bench, keys, str(file)


def test_explain_says_which_keys_are_there_and_why_others_are_not(keyed):
    """Runs of keys by tier, the leading ones as matched, and an operator's eviction as the reason of a miss."""
    bench, keys, file = keyed
    named = ["--keys", file, "--group", "1"]
    data = bench.ctl("explain", *named)
    assert data["asked"] == {"pages": 6}
    assert data["matched"] == {"pages": 3}
    assert data["present_pages"] == 4
    rows = [(row["tier"], row["first_page"], row["pages"], row["bytes"]) for row in data["segments"]]
    assert rows == [("host", 0, 3, 12288), ("absent", 3, 1, 0), ("host", 4, 1, 4096), ("absent", 5, 1, 0)]
    assert data["miss"] == "absent"
    assert bench.ctl("evict", "--key", keys[1].hex(), "--group", "1", "--from", "all") == {"pages": 1, "held": 0}
    data = bench.ctl("explain", *named)
    assert [row["tier"] for row in data["segments"]] == ["host", "evicted", "host", "absent", "host", "absent"]
    assert data["miss"] == "evicted"
    assert [row["why"] for row in data["evictions"]] == ["an operator"]
    assert "evicted" in bench.run("explain", *named).stdout
    assert bench.ctl("explain", "--keys", file)["present_pages"] == 0, "another group has other keys"


def test_keys_are_evicted_to_disk_brought_back_and_pinned(keyed):
    """Out of host they are on disk; a pin holds them there until it ends."""
    bench, _, file = keyed
    named = ["--keys", file, "--group", "1"]
    assert bench.ctl("evict", *named) == {"pages": 4, "held": 0}
    assert [r["tier"] for r in bench.ctl("explain", *named)["segments"]] == ["disk", "absent", "disk", "absent"]
    assert bench.ctl("prefetch", *named) == {"pages": 4, "items": 4, "left": 0, "healthy": True}
    pinned = bench.ctl("pin", *named)
    assert (pinned["pages"], pinned["held_bytes"]) == (4, 4 * 4096)
    assert bench.ctl("evict", *named) == {"pages": 0, "held": 4}
    assert not bench.daemon.broken_invariants()
    assert bench.ctl("unpin", str(pinned["pin"]))["unpinned"] == [pinned["pin"]]
    assert bench.ctl("evict", *named)["pages"] == 4


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--key", "zz"], "hex"),
        (["--key", "00"], "16 bytes"),
        (["--key", "00" * 16, "--group", "7"], "0..1"),
        (["--key", "00" * 16 * 4097], "at most 4096 keys"),
        (["--keys", "/nowhere"], "readable"),
        (["--key", "00" * 16, "--request", "r"], "exactly one"),
        (["--key", "00" * 16, "--cache", "ffffffffffff"], "0 keyed caches"),
    ],
)
def test_keys_that_are_not_named_well_are_refused(standing, words, complaint):
    """Code 1 and a sentence, for each verb about a prompt."""
    with Client(standing.socket, instance="engine") as client:
        bench = Bench(standing, client)
        client.open(KEYED)
        for verb in ("explain", "pin", "prefetch", "evict"):
            result = bench.run(verb, *words)
            assert result.exit_code == 1, result.output
            assert complaint in result.stderr


def test_key_files_may_be_json(keyed, tmp_path):
    """And - is standard input in either form."""
    bench, keys, _ = keyed
    file = tmp_path / "keys.json"
    file.write_text(json.dumps([key.hex() for key in keys[:2]]))
    assert bench.ctl("explain", "--keys", str(file), "--group", "1")["present_pages"] == 2
    file.write_text("[1, {]")
    assert bench.run("explain", "--keys", str(file)).exit_code == 1


def test_standard_input_is_called_so_and_may_be_closed(monkeypatch):
    """What is wrong with - is said of standard input; without one there are no tokens."""
    wrong = CliRunner().invoke(main, ["explain", "--tokens", "-"], input="1 2 x")
    assert (wrong.exit_code, "standard input: expected" in wrong.stderr) == (1, True)
    monkeypatch.setattr("kvtier.control.address.sys.stdin", None)
    with pytest.raises(KvtierError, match="--tokens: expected at least one token"):
        _named("", "", "", "-", None, None, None, "", None, (), 0)


# -- cost --------------------------------------------------------------------------------------------------------------


def test_explain_prices_each_part_by_measured_rates_and_prefill(bench):
    """Once something came from disk its rate is known; a slow engine should load, a fast one compute."""
    bench.put(list(range(4000)), "r1")
    bench.ctl("flush")
    bench.ctl("evict", "--request", "r1")
    before = bench.ctl("explain", "--request", "r1")
    assert "disk" not in before["bytes_s"]
    assert before["cost"] == {"bytes": 1000 * 4096, "load_s": None, "compute_s": None}
    bench.ctl("prefetch", "--request", "r1")
    bench.ctl("evict", "--request", "r1")
    after = bench.ctl("explain", "--request", "r1", "--prefill-tokens-per-s", "1")
    rate = after["bytes_s"]["disk"]
    assert after["cost"]["load_s"] == pytest.approx(1000 * 4096 / rate, rel=0.01)
    assert after["cost"]["compute_s"] == 4000
    assert [row["faster"] for row in after["segments"]] == ["load"]
    given = ["--prefill-tokens-per-s", "1000", "--rate", "disk=1KB/s"]
    (row,) = bench.ctl("explain", "--request", "r1", *given)["segments"]
    assert (row["load_s"], row["compute_s"], row["faster"]) == (4100, 4, "compute")
    assert "faster" in bench.run("explain", "--request", "r1", *given).stdout
    assert bench.ctl("status")["bytes_s"]["disk"] == pytest.approx(rate)
    for wrong in ("disk", "disk=fast", "moon=1GB/s"):
        assert bench.run("explain", "--request", "r1", "--rate", wrong).exit_code == 2


def test_prices_are_none_where_a_rate_is_not_known():
    """One part without a rate leaves the sum open; pages that are not there cost nothing."""
    host = {"pages": 2, "bytes": 200, "moves": {"host": 100, "disk": 100}}
    rows = priced([host, {"pages": 1, "bytes": 0, "moves": {}}], 10, {"host": 100.0}, 5.0)
    assert (rows[0]["load_s"], rows[0]["compute_s"]) == (None, 4.0)
    assert total(rows) == {"bytes": 200, "load_s": None, "compute_s": 4.0}
    rows = priced([host], 10, {"host": 100.0, "disk": 50.0}, 5.0)
    assert rows[0]["load_s"] == 3.0
    assert rows[0]["faster"] == "load"
    assert "faster" not in priced([host], 10, {"host": 100.0, "disk": 50.0})[0]
