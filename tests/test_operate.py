"""What operators do to a running cache, by kvtierctl against a real daemon: every verb, and its refusals."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from kvtier import metrics, wire
from kvtier.client import Client, page_keys
from kvtier.control import doctor, reference
from kvtier.control.call import Admin, Call
from kvtier.control.progress import ask_long
from kvtier.control.top import rates
from kvtier.ctl import main
from kvtier.demo.daemon import Daemon
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.types import Code, Kind, KvtierError

DOC = Path(__file__).resolve().parent.parent / "docs" / "kvtierctl.md"
SPEC = CacheSpec("m", b"f" * 16, "bf16", 4, (GroupSpec(Kind.FULL, 1, 1, 4096),), adapter="lora", salt=b"\x01\x02")
OTHER = CacheSpec("other", b"f" * 16, "bf16", 4, (GroupSpec(Kind.FULL, 1, 1, 4096),))
DEADLINE = 20.0


class Bench:
    """An engine that stored two prompts with a common beginning, and kvtierctl."""

    def __init__(self, daemon: Daemon, client: Client) -> None:
        self.daemon = daemon
        self.client = client
        self.cache = client.open(SPEC)
        self.a, self.b = (np.concatenate([np.arange(8), np.arange(tail, tail + 8)]) for tail in (100, 200))
        for tokens in (self.a, self.b):
            self.put(tokens)
        self.ctl("flush")  # else what is on its way to disk is held

    def put(self, tokens: np.ndarray) -> None:
        """Store a prompt."""
        pages = len(tokens) // 4
        with self.cache.match(page_keys(SPEC, tokens), request=f"r{tokens[8]}").reserve(0, pages) as reserved:
            for page in range(pages):
                if reserved.view(0, page) is not None:
                    reserved.write(0, page, np.full(4096, page, np.uint8))
            assert reserved.commit() == pages

    def matched(self, tokens: np.ndarray) -> int:
        """Pages that an engine would be served."""
        return self.cache.match(page_keys(SPEC, tokens)).pages

    def run(self, *words: str) -> Result:
        """Run kvtierctl."""
        where = str(self.daemon.socket.with_name("admin.sock"))
        return CliRunner().invoke(main, ["--socket", where, *words], env={"COLUMNS": "200"})

    def ctl(self, *words: str) -> dict[str, Any]:
        """What --json prints."""
        result = self.run(*words, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def file(self, tokens: np.ndarray) -> str:
        """A file with token ids."""
        path = self.daemon.home / "tokens.json"
        path.write_text(json.dumps(tokens.tolist()))
        return str(path)


@contextlib.contextmanager
def bench_of(daemon: Daemon) -> Iterator[Bench]:
    """See Bench."""
    with Client(daemon.socket, instance="engine-7") as client:
        yield Bench(daemon, client)
        assert not daemon.broken_invariants()


@pytest.fixture
def bench(daemon: Daemon) -> Iterator[Bench]:
    """One of the test's own."""
    with bench_of(daemon) as made:
        yield made


@pytest.fixture(scope="module")
def refusing(standing: Daemon) -> Iterator[Bench]:
    """One for all tests of what is refused."""
    with bench_of(standing) as made:
        yield made


def test_explain_says_what_matches_and_where_a_prompt_diverges(bench):
    """The token, and what is cached there instead; looking counts as no use."""
    asked = bench.a.copy()
    asked[14] = 999
    before = bench.ctl("status")["counters"]["requests"]
    data = bench.ctl("explain", "--tokens", bench.file(asked))
    assert data["asked"] == {"pages": 4, "tokens": 16}
    assert data["matched"] == {"pages": 3, "tokens": 12}
    (row,) = data["segments"]
    assert (row["tier"], row["first_page"], row["pages"], row["bytes"]) == ("host", 0, 3, 3 * 4096)
    where = data["diverges"].pop("from")
    assert data["diverges"] == {
        "page": 3, "token": 14, "asked": [999, 107], "cached": [106, 107], "extras": False,
    }  # fmt: skip
    assert where["requests"] == ["r100"]
    assert bench.ctl("explain", "--chain", where["chain"])["matched"]["pages"] == 4
    assert data["miss"] == "absent"
    text = bench.run("explain", "--tokens", bench.file(asked)).stdout
    assert "diverges at token 14" in text
    assert bench.ctl("status")["counters"]["requests"] == before


def test_a_prompt_is_named_by_request_chain_key_or_tokens(bench):
    """All three name the same path, also after the engine forgot the request."""
    by_tokens = bench.ctl("explain", "--tokens", bench.file(bench.a), "--cache", bench.cache.cache_id.hex()[:8])
    assert by_tokens["matched"]["pages"] == 4
    assert bench.ctl("explain", "--request", "r100") == by_tokens | {
        "idle_s": pytest.approx(by_tokens["idle_s"], abs=5)
    }
    assert bench.ctl("explain", "--chain", by_tokens["chain"])["asked"]["pages"] == 4
    chain = bench.cache.cache_id[:16]
    for page in range(4):
        chain = hashlib.sha256(chain + page_keys(SPEC, bench.a)[page * 16 : page * 16 + 16]).digest()[:16]
    assert by_tokens["chain"] == chain.hex()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "exactly one"),
        (["--request", "nobody"], "no recent request"),
        (["--chain", "00" * 16], "no page"),
        (["--chain", "zz"], "hex"),
        (["--chain", "00"], "16 bytes"),
        (["--tokens", "/nothing/there"], "readable"),
        (["--request", "r100", "--chain", "00" * 16], "exactly one"),
        (["--text", "hello"], "tokenizer"),
        (["--text", "hello", "--tokenizer", "/nothing"], "tokenizer"),
    ],
)
def test_a_prompt_that_is_not_named_well_is_refused(refusing, words, complaint):
    """Code 1 and a sentence, for each verb about a prompt."""
    for verb in ("explain", "pin", "prefetch", "evict"):
        result = refusing.run(verb, *words)
        assert result.exit_code == 1, result.output
        assert complaint in result.stderr
        assert not result.stdout


def test_token_files_may_be_json_numbers_or_standard_input(bench, tmp_path):
    """And anything else is refused by name."""
    file = tmp_path / "x"
    for text in ("0 1 2 3\n4,5 6\t7", "[0,1,2,3,4,5,6,7]"):
        file.write_text(text)
        assert bench.ctl("explain", "--tokens", str(file))["matched"]["pages"] == 2
    for text in ("[1, null]", "one two", "[99999999999]", "[[1]]"):
        file.write_text(text)
        assert bench.run("explain", "--tokens", str(file)).exit_code == 1


def test_a_prompt_is_named_by_text_or_messages_with_a_tokenizer(bench, tmp_path):
    """The tokenizer's own ids and chat template; tree shows the text of what is cached."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{number}": number for number in range(300)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w299"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=model)
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    fast.save_pretrained(tmp_path / "tokenizer")
    text = " ".join(f"w{one}" for one in bench.a)
    named = ["--tokenizer", str(tmp_path / "tokenizer")]
    assert bench.ctl("explain", "--text", text, *named)["matched"]["pages"] == 4
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps([{"role": "user", "content": text}]))
    assert bench.ctl("explain", "--messages", str(chat), *named)["matched"]["pages"] == 4
    apart = bench.ctl("explain", "--text", text.replace("w105", "w299"), *named)["diverges"]
    assert (apart["token"], apart["asked_text"], apart["cached_text"]) == (13, "w299 w106 w107", "w105 w106 w107")
    assert "'w299 w106 w107'" in bench.run("explain", "--text", text.replace("w105", "w299"), *named).stdout
    assert "w0 w1 w2" in bench.run("tree", "", *named).stdout


def test_evict_takes_only_what_the_prompt_has_for_itself(bench):
    """From every tier: the common beginning and the other prompt stay, and explain tells who did it."""
    assert bench.ctl("evict", "--tokens", bench.file(bench.a), "--from", "all") == {"pages": 2, "held": 0}
    assert (bench.matched(bench.a), bench.matched(bench.b)) == (2, 4)
    data = bench.ctl("explain", "--tokens", bench.file(bench.a))
    assert data["miss"] == "evicted"
    assert [row["why"] for row in data["evictions"]] == ["an operator"]
    assert "an operator" in bench.run("explain", "--tokens", bench.file(bench.a)).stdout
    assert bench.ctl("evict", "--tokens", bench.file(bench.a), "--from", "all") == {"pages": 0, "held": 0}
    assert bench.run("evict", "--request", "r100", "--from", "nowhere").exit_code == 1


def test_evicted_from_host_it_is_served_from_disk_and_prefetch_brings_it_back(bench):
    """Nothing is lost on the way."""
    assert bench.ctl("evict", "--request", "r100")["pages"] == 2
    tiers = [row["tier"] for row in bench.ctl("explain", "--request", "r100")["segments"]]
    assert tiers == ["host", "disk"]
    assert bench.ctl("prefetch", "--request", "r100") == {"pages": 4, "items": 2, "left": 0, "healthy": True}
    assert [row["tier"] for row in bench.ctl("explain", "--request", "r100")["segments"]] == ["host"]
    with bench.cache.match(page_keys(SPEC, bench.a)).acquire() as lease:
        assert lease.pages == 4
        assert (lease.view(0, 3) == 3).all()


def test_a_held_prompt_is_not_evicted_from_host(bench):
    """A lease keeps it, and the answer says so."""
    with bench.cache.match(page_keys(SPEC, bench.a)).acquire() as lease:
        assert lease.pages == 4
        assert bench.ctl("evict", "--request", "r100") == {"pages": 0, "held": 2}


def test_pins_hold_until_unpinned(bench):
    """Listed with priority and time left; evict leaves them; unpin lets go."""
    pinned = bench.ctl("pin", "--request", "r100", "--ttl", "600", "--priority", "70")
    assert (pinned["pages"], pinned["priority"]) == (4, 70)
    (row,) = bench.ctl("pins")["pins"]
    assert row["pin"] == pinned["pin"]
    assert 0 < row["left_s"] <= 600
    assert bench.cache.cache_id.hex()[:12] in bench.run("pins").stdout
    assert bench.ctl("evict", "--request", "r100") == {"pages": 0, "held": 2}
    assert bench.ctl("unpin", str(pinned["pin"])) == {"unpinned": [pinned["pin"]]}
    assert bench.run("pins").stdout == "no pins\n"
    assert bench.ctl("evict", "--request", "r100")["pages"] == 2


def test_a_pin_ends_by_itself(bench):
    """At its time, with nothing held after it."""
    bench.ctl("pin", "--request", "r100", "--ttl", "0.2")
    end = time.monotonic() + DEADLINE
    while bench.ctl("pins")["pins"]:
        assert time.monotonic() < end
    assert bench.ctl("explain", "--request", "r100")["leases"] == 0


@pytest.mark.parametrize(
    "words",
    [
        ["pin", "--request", "r100", "--ttl", "0"],
        ["pin", "--request", "r100", "--ttl", "nan"],
        ["pin", "--request", "r100", "--priority", "101"],
        ["unpin", "77"],
        ["unpin"],
        ["unpin", "0"],
        ["caches", "rm", "ffff0000ffff"],
        ["purge"],
        ["purge", "--tenant", "xyz"],
        ["set", "caps.instance"],
        ["set", "caps.instanse=0.5"],
        ["set", "host.bytes=1GiB"],
        ["tree", "", "--width", "0"],
        ["caches", "rm", ""],
    ],
)
def test_wrong_values_are_refused_with_a_sentence(refusing, words):
    """Code 1, nothing printed but why."""
    result = refusing.run(*words)
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("kvtierctl: ")
    assert not result.stdout


def test_pins_are_bounded_and_the_higher_priority_stays(tmp_path):
    """A pin that does not fit displaces lower ones, or is refused by name where there is none."""
    spec = CacheSpec("m", b"f" * 16, "bf16", 4, (GroupSpec(Kind.FULL, 1, 1, 1 << 20),))
    with Daemon(tmp_path, host="64MiB", disk="0") as daemon, Client(daemon.socket, instance="e") as client:
        cache = client.open(spec)
        for name in (1, 2):
            keys = page_keys(spec, np.full(4 * 20, name))
            with cache.match(keys, request=f"p{name}").reserve(0, 20) as reserved:
                for page in range(20):
                    reserved.write(0, page, np.full(1 << 20, name, np.uint8))
                assert reserved.commit() == 20
        with Admin(daemon.socket.with_name("admin.sock"), DEADLINE) as admin:
            first = admin.ask(wire.Pin(wire.Prompt(request="p1"), 60, 10), wire.Info).data
            with pytest.raises(KvtierError) as caught:
                admin.ask(wire.Pin(wire.Prompt(request="p2"), 60, 10), wire.Info)
            assert caught.value.code is Code.OVER_CAP
            second = admin.ask(wire.Pin(wire.Prompt(request="p2"), 60, 11), wire.Info).data
            assert [row["pin"] for row in admin.ask(wire.Pins(), wire.Info).data["pins"]] == [second["pin"]]
            assert second["pin"] != first["pin"]
            assert admin.ask(wire.Unpin(0), wire.Info).data == {"unpinned": [second["pin"]]}
        assert daemon.stop() == 0


def test_caches_rm_empties_a_cache_and_engines_go_on(bench):
    """The engine that has it open misses, and stores again; the other cache stays."""
    bench.client.open(OTHER)
    data = bench.ctl("caches", "rm", bench.cache.cache_id.hex()[:10])
    assert data == {"caches": [bench.cache.cache_id.hex()], "pages": 6, "held": 0}
    assert bench.matched(bench.a) == 0
    bench.put(bench.a)
    assert bench.matched(bench.a) == 4


def test_what_was_removed_stays_removed_after_a_restart(bench):
    """Disk forgets it too."""
    assert bench.ctl("flush") == {"durable": True}
    bench.ctl("caches", "rm", bench.cache.cache_id.hex())
    bench.ctl("flush")
    assert bench.daemon.stop() == 0
    bench.daemon.start()
    end = time.monotonic() + DEADLINE
    while not bench.client.ping():
        assert time.monotonic() < end
    assert bench.matched(bench.a) == 0


def test_purge_empties_what_fits_all_that_is_given(bench):
    """A tenant by salt, an adapter, a scope; another tenant is left alone."""
    assert bench.ctl("purge", "--tenant", "ffff") == {"caches": [], "pages": 0, "held": 0}
    assert bench.ctl("purge", "--tenant", "0102", "--adapter", "none")["pages"] == 0
    assert bench.matched(bench.a) == 4
    data = bench.ctl("purge", "--tenant", "0102", "--adapter", "lora", "--scope", f"uid:{os.getuid()}")
    assert (data["pages"], len(data["caches"])) == (6, 1)
    assert bench.matched(bench.b) == 0


def test_removing_what_an_engine_holds_keeps_its_bytes_until_it_lets_go(bench):
    """The lease goes on reading what it leased."""
    bench.ctl("flush")
    with bench.cache.match(page_keys(SPEC, bench.a)).acquire() as lease:
        assert bench.ctl("caches", "rm", bench.cache.cache_id.hex())["held"] == 4
        assert (lease.view(0, 2) == 2).all()
    assert bench.matched(bench.a) == 0


def test_tree_shows_heat_and_keeps_to_its_width(bench):
    """The most recently used children are shown."""
    bench.matched(bench.a)
    nodes = bench.ctl("tree", "", "--width", "1")["nodes"]
    assert [(node["level"], node["pages"]) for node in nodes] == [(0, 2), (1, 2)]
    assert nodes[1]["tokens"][:2] == [100, 101]
    assert all(node["idle_s"] >= 0 for node in nodes)
    assert nodes[1]["heat"] > 1, "two uses"
    assert "heat" in bench.run("tree", "").stdout


def test_set_changes_live_settings(bench):
    """And shows them without an argument."""
    assert bench.ctl("set", "caps.instance=0.25", "log_level=warning")["settings"]["caps.instance"] == 0.25
    assert bench.ctl("set")["settings"]["log_level"] == "warning"
    assert "0.2" in bench.run("set").stdout


def test_top_reads_rates_between_two_moments(bench):
    """One reading is enough for a script; people see it as a table."""
    data = bench.ctl("top", "--count", "1", "--interval", "0.05")
    assert data["instances"] == 1
    assert data["verbs"]["Metrics"]["calls"] == 1
    shown = bench.run("top", "--count", "2", "--interval", "0.05").stdout
    assert shown.count("requests/s") == 2  # no terminal: every reading, as it comes
    assert shown.endswith("\n")


def test_rates_are_differences_over_time():
    """Counters that are new count from zero; without requests there is no ratio."""
    server = {"verbs": {}}
    same = {"queues": {}, "leases": 0, "held_bytes": 0, "instances": 0, "tiers": {}, "server": server}
    before = {"counters": {"tokens_asked": 100, "tokens_hit_host": 50}} | same
    after = {"counters": {"tokens_asked": 300, "tokens_hit_host": 100, "tokens_hit_disk": 100}} | same
    found = rates(before, after, 2.0)
    assert (found["tokens_asked_s"], found["tokens_hit_s"], found["hit_ratio"]) == (100, {"disk": 50, "host": 25}, 0.75)
    assert rates(after, after, 1.0)["hit_ratio"] is None


def test_doctor_says_what_to_change(bench):
    """Against the daemon that runs; each finding that is not ok has an advice."""
    result = bench.run("doctor", "--disk", str(bench.daemon.home / "disk"), "--json")
    found = {row["check"]: row for row in json.loads(result.stdout)["findings"]}
    assert found["daemon"]["state"] == "ok"
    assert found["engine socket"]["state"] == found["admin socket"]["state"] == "ok"
    assert found["disk permissions"]["state"] == "ok"
    assert {
        "open files",
        "memlock",
        "hugepages",
        "NUMA",
        "memory limit",
        "GPU driver",
        "shared memory",
        "disk room",
    } <= found.keys()
    assert all(row["advice"] for row in found.values() if row["state"] != "ok")
    bench.daemon.socket.with_name("admin.sock").chmod(0o666)
    result = bench.run("doctor")
    assert result.exit_code == 1
    assert "chmod 0600" in result.stdout


def test_doctor_says_what_a_daemon_without_host_memory_cannot_do(tmp_path):
    """Its token caches are misses, whatever disk has: a warning with the setting's name."""
    with Daemon(tmp_path, host="0", disk="64MiB") as daemon:
        where = str(daemon.socket.with_name("admin.sock"))
        result = CliRunner().invoke(main, ["--socket", where, "doctor", "--json"])
        (row,) = [row for row in json.loads(result.stdout)["findings"] if row["check"] == "host tier"]
        assert (row["state"], row["found"]) == ("warn", "0 MiB")
        assert "host.bytes" in row["advice"]
        with Client(daemon.socket, instance="e") as client:
            reserved = client.open(SPEC).match(page_keys(SPEC, np.arange(16))).reserve(0, 4)
            assert reserved.pages == 0
        assert daemon.stop() == 0


def test_verbs_that_need_a_disk_say_that_there_is_none(tmp_path):
    """Nothing can be made durable, nor stay on disk when it leaves host; code 1 and a sentence."""
    with Daemon(tmp_path, host="64MiB", disk="0") as daemon, Client(daemon.socket, instance="e") as client:
        small = Bench.__new__(Bench)
        small.daemon, small.client, small.cache = daemon, client, client.open(SPEC)
        small.put(np.arange(16))
        for words in (["flush"], ["evict", "--request", "r8"]):
            result = small.run(*words)
            assert result.exit_code == 1
            assert "no disk tier" in result.stderr
        assert small.ctl("evict", "--request", "r8", "--from", "all")["pages"] == 4
        assert daemon.stop() == 0


def test_prefetch_without_room_says_what_is_left(tmp_path):
    """Held by an engine, host has no place for it: code 1, and how many items are not there."""
    spec = CacheSpec("m", b"f" * 16, "bf16", 4, (GroupSpec(Kind.FULL, 1, 1, 1 << 20),))
    flags = ["--caps-instance=1"]
    with Daemon(tmp_path, host="64MiB", disk="256MiB", flags=flags) as daemon, Client(daemon.socket) as client:
        small = Bench.__new__(Bench)
        small.daemon, small.client, small.cache = daemon, client, client.open(spec)
        for name in (1, 2):
            keys = page_keys(spec, np.full(4 * 40, name))
            with small.cache.match(keys, request=f"p{name}").reserve(0, 40, wait_ms=5000) as reserved:
                for page in range(40):
                    reserved.write(0, page, np.full(1 << 20, name, np.uint8))
                assert reserved.commit() == 40
            small.ctl("flush")
        with small.cache.match(page_keys(spec, np.full(4 * 40, 2))).acquire() as lease:
            assert lease.pages == 40
            result = small.run("prefetch", "--request", "p1", "--wait", "0.5", "--json")
            assert result.exit_code == 1
            assert json.loads(result.stdout)["left"] > 0
        assert small.ctl("prefetch", "--request", "p1")["left"] == 0
        assert daemon.stop() == 0


def test_doctor_judges_a_folder_that_it_may_not_look_into(tmp_path):
    """By the nearest one that it may: no error of the daemon's is made of it."""
    shut = tmp_path / "shut"
    shut.mkdir(mode=0)
    uid = os.geteuid()
    try:
        if not uid:
            os.seteuid(65534)
        found = {one.check for one in doctor.disk(shut / "kvtier" / "disk", Path("/proc"))}
    finally:
        os.seteuid(uid)
    assert {"disk file system", "disk room", "disk access"} <= found


def test_doctor_works_without_a_daemon(tmp_path):
    """That is when it is needed; the exit code says that something fails."""
    result = CliRunner().invoke(main, ["--socket", str(tmp_path / "none.sock"), "doctor", "--json"])
    assert result.exit_code == 1
    found = {row["check"]: row["state"] for row in json.loads(result.stdout)["findings"]}
    assert (found["daemon"], found["admin socket"]) == ("fail", "warn")


def test_doctor_reads_limits_memory_and_mounts(tmp_path):
    """From files as the kernel writes them."""
    (tmp_path / "7").mkdir()
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    (tmp_path / "driver/nvidia/version").write_text("NVRM version: 580\n")
    row = "{:<26}{:<21}{:<21}{}\n"
    (tmp_path / "7/limits").write_text(
        row.format("Limit", "Soft Limit", "Hard Limit", "Units")
        + row.format("Max locked memory", "65536", "65536", "bytes")
        + row.format("Max open files", "1024", "4096", "files")
    )
    assert [one.state for one in doctor.limits(tmp_path, "7")] == ["warn", "warn"]
    driver, devices = doctor.gpu(tmp_path, tmp_path)
    assert (driver.found, devices.state) == ("NVRM version: 580", "warn")
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "nvidia-uvm").touch()
    assert [one.state for one in doctor.gpu(tmp_path, tmp_path)] == ["ok", "ok"]
    huge = tmp_path / "kernel/mm/transparent_hugepage"
    huge.mkdir(parents=True)
    (huge / "shmem_enabled").write_text("always within_size [advise] never deny force\n")
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nSwapTotal: 2048 kB\n")
    found = {one.check: one for one in doctor.memory(tmp_path, tmp_path)}
    assert (found["hugepages"].state, found["swap"].state) == ("ok", "warn")
    for number in (0, 1):
        (tmp_path / f"devices/system/node/node{number}").mkdir(parents=True)
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "sys/kernel/numa_balancing").write_text("1\n")
    found = {one.check: one for one in doctor.memory(tmp_path, tmp_path)}
    assert (found["NUMA"].state, found["NUMA"].found) == ("warn", "2 nodes")
    for pid, space in (("7", "ipc:[1]"), ("8", "ipc:[1]"), ("9", "ipc:[2]")):
        (tmp_path / pid / "ns").mkdir(parents=True)
        (tmp_path / pid / "ns/ipc").symlink_to(space)
    assert [one.state for one in doctor.spaces(tmp_path, "7", ["8"])] == ["ok"]
    (apart,) = doctor.spaces(tmp_path, "7", ["8", "9"])
    assert (apart.state, apart.found) == ("warn", "of other IPC namespaces: 9")
    assert not list(doctor.spaces(tmp_path, "7", []))
    mounts = "overlay / overlay rw 0 0\n/dev/a /var ext4 rw 0 0\nx /var/lib/kv tmpfs rw 0 0\n"
    assert doctor.file_system(Path("/var/lib/other"), mounts) == "ext4"
    assert doctor.file_system(Path("/var/lib/kv/disk"), mounts) == "tmpfs"
    assert doctor.file_system(Path("/home"), mounts) == "overlay"


@pytest.mark.parametrize("kind", sorted(wire.ADMIN, key=lambda kind: kind.__name__))
def test_operators_verbs_are_refused_on_the_engine_socket(standing, kind):
    """Each of them, by name, whatever the file modes say."""
    import socket

    from kvtier.frames import Frames

    fields = {f.name: f.type() for f in msgspec.structs.fields(kind) if f.required}
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(DEADLINE)
        sock.connect(str(standing.socket))
        sock.sendall(wire.request_frame(wire.Hello(wire.VERSION, "sneaky"), 1))
        frames = Frames()
        frames.feed(sock.recv(1 << 16))
        assert frames.next().verb == wire.VERBS[wire.Hello]
        sock.sendall(wire.request_frame(kind(**fields), 2))
        while (frame := frames.next()) is None:
            frames.feed(sock.recv(1 << 16))
        with pytest.raises(KvtierError) as caught:
            wire.decode_reply(frame.verb, frame.body, wire.Ok)
        assert caught.value.code is Code.FORBIDDEN


def test_a_bar_is_drawn_while_the_daemon_works(bench):
    """Only on a terminal, and the answer or refusal is the daemon's."""
    call = Call(bench.daemon.socket.with_name("admin.sock"), DEADLINE)
    seen: list[int] = []

    def left(status: dict[str, Any]) -> int:
        seen.append(status["pages"])
        return status["pages"]

    terminal = Console(file=io.StringIO(), force_terminal=True)
    assert ask_long(call, wire.Flush(0, 5000), wire.Ok, left, 5.0, terminal) == wire.Ok()
    with pytest.raises(KvtierError):
        ask_long(call, wire.Remove("ffff0000"), wire.Info, left, 5.0, terminal)
    assert ask_long(call, wire.Flush(0, 5000), wire.Ok, left, 5.0, Console(file=io.StringIO())) == wire.Ok()


@pytest.mark.parametrize(
    "words",
    [
        ["check"],
        ["flush"],
        ["prefetch", "--request", "r100"],
        ["evict", "--request", "r100"],
        ["caches", "rm", "ID"],
        ["purge", "--tenant", "0102"],
    ],
    ids=lambda words: words[0],
)
def test_long_verbs_draw_their_bar_on_a_terminal_and_print_the_same(bench, words):
    """Standard error is a terminal, standard output is not: the answer is whole, the bar is gone at the end."""
    words = [bench.cache.cache_id.hex() if word == "ID" else word for word in words]
    master, slave = os.openpty()
    where = str(bench.daemon.socket.with_name("admin.sock"))
    command = [sys.executable, "-m", "kvtier.ctl", "--socket", where, *words, "--json"]
    env = os.environ | {"TERM": "xterm"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=slave, stdin=subprocess.DEVNULL, env=env, text=True)
    os.close(slave)
    drawn = os.read(master, 1 << 16).decode()
    os.close(master)
    assert done.returncode == 0, drawn
    assert "Traceback" not in drawn
    assert json.loads(done.stdout)


def test_completion_scripts_complete_verbs():
    """The script that is printed calls kvtierctl, which then lists its verbs."""
    for shell in ("bash", "zsh", "fish"):
        result = CliRunner().invoke(main, ["completion", shell])
        assert result.exit_code == 0, result.output
        assert "_KVTIERCTL_COMPLETE" in result.stdout
    env = os.environ | {"_KVTIERCTL_COMPLETE": "bash_complete", "COMP_WORDS": "kvtierctl pi", "COMP_CWORD": "1"}
    code = "from kvtier.ctl import main; main(prog_name='kvtierctl')"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert [line.split(",")[1] for line in done.stdout.split()] == ["pin", "ping", "pins"]


@pytest.mark.skipif(not DOC.exists(), reason="read from a checkout")
def test_the_reference_is_what_the_help_says_and_names_every_verb():
    """docs/kvtierctl.md is generated and up to date."""
    text = DOC.read_text()
    assert text == reference.document()
    assert f"{Path.home()}/" not in text  # it is the same on every machine
    for verb in main.commands | main.more:
        assert f"## kvtierctl {verb}\n" in text


def test_every_verb_has_help_and_json():
    """--help explains each in a sentence and lists --json."""
    for verb in (*main.commands, *main.more):
        if verb in {"size", "probe"}:
            continue
        text = CliRunner().invoke(main, [verb, "--help"]).stdout
        assert "--json" in text, verb
        assert len(text.splitlines()[2].strip()) > 10, verb


def test_explain_says_that_a_prompt_was_evicted_for_want_of_room(tmp_path):
    """Without a disk the oldest goes; the miss has that reason, for people and in the counters."""
    spec = CacheSpec("m", b"f" * 16, "bf16", 4, (GroupSpec(Kind.FULL, 1, 1, 1 << 20),))
    with Daemon(tmp_path, host="64MiB", disk="0") as daemon, Client(daemon.socket, instance="e") as client:
        cache = client.open(spec)
        for name in range(8):
            keys = page_keys(spec, np.full(4 * 16, name))
            with cache.match(keys, request=f"p{name}").reserve(0, 16) as reserved:
                for page in range(reserved.pages):
                    reserved.write(0, page, np.full(1 << 20, name, np.uint8))
                assert reserved.commit() == 16
        cache.match(page_keys(spec, np.zeros(4 * 16, np.int32)))
        with Admin(daemon.socket.with_name("admin.sock"), DEADLINE) as admin:
            data = admin.ask(wire.Explain(wire.Prompt(request="p0")), wire.Info).data
            numbers = admin.ask(wire.Metrics(), wire.Info).data
            counters, batches = numbers["counters"], numbers["eviction_batches"]["tiers"]
        assert data["matched"]["pages"] < 16
        assert data["miss"] == "evicted"
        assert {row["why"] for row in data["evictions"]} == {"no room in host"}
        assert counters["tokens_missed_evicted"] > 0
        batch = batches["host"]
        assert batch["pages"] == counters["pages_evicted_host"] > sum(batch["buckets"]) > 0
        text = metrics.render(numbers).decode()
        assert f'kvtier_eviction_batch_pages_count{{tier="host"}} {float(sum(batch["buckets"]))}' in text
        assert f'kvtier_eviction_batch_pages_sum{{tier="host"}} {float(batch["pages"])}' in text
        assert daemon.stop() == 0
