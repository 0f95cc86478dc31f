"""kvtierctl against a real daemon: what it shows, what --json prints, and its exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from kvtier import __version__, wire
from kvtier.client import Client, page_keys
from kvtier.ctl import main
from kvtier.demo.daemon import Daemon
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.types import Kind
from kvtier.views import amount, listing, shown, status

VERBS = ("status", "caches", "tree", "ping", "check", "flush")
SPEC = CacheSpec("[bold]model", b"f" * 16, "bf16", 4, (GroupSpec(Kind.FULL, 1, 1, 4096),), adapter="lora")


def ctl(*words: str, env: dict[str, str] | None = None) -> Result:
    """Run kvtierctl in this process."""
    return CliRunner().invoke(main, words, env={"COLUMNS": "200", **(env or {})})


@pytest.fixture
def served(daemon: Daemon) -> Iterator[tuple[list[str], str]]:
    """The words that name the daemon's admin socket, and the id of a cache with a branch."""
    with Client(daemon.socket, instance="engine-7") as client:
        cache = client.open(SPEC)
        for tail in (100, 200):
            tokens = np.concatenate([np.arange(8), np.arange(tail, tail + 8)])
            with cache.match(page_keys(SPEC, tokens)).reserve(0, 4) as reserved:
                for page in range(4):
                    reserved.write(0, page, np.full(4096, page, np.uint8))
                assert reserved.commit() == 4
        yield ["--socket", str(daemon.socket.with_name("admin.sock"))], cache.cache_id.hex()


def parsed(result: Result) -> dict[str, Any]:
    """What --json printed."""
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_status_shows_tiers_engines_and_counters(served):
    """The same facts for people and as JSON."""
    where, _ = served
    data = parsed(ctl(*where, "status", "--json"))
    assert data["version"] == __version__
    assert [engine["instance"] for engine in data["instances"]] == ["engine-7"]
    assert data["instances"][0]["pids"] == [os.getpid()]
    assert ctl(*where, "check").exit_code == 0
    text = ctl(*where, "status").stdout
    assert "0 broken" in text
    assert "engine-7" in text
    assert "128.0 MiB" in text
    assert "tier disk" in text


def test_status_shows_a_row_per_peer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who answers and why another one does not, in columns, not as the daemon says it."""
    monkeypatch.setenv("COLUMNS", "200")
    peers = [
        {"name": "b", "address": "10.0.0.2:9478", "up": True, "why": "", "idle": 3},
        {"name": "c", "address": "10.0.0.3:9478", "up": False, "why": "TimeoutError: ", "idle": 0},
    ]
    status({"version": "1", "peers": peers})
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[1:6:2] == ["b", "10.0.0.2:9478", "True"] for line in lines), lines
    assert any(" c " in line and "TimeoutError" in line for line in lines), lines
    assert not any("{" in line for line in lines)


def test_caches_shows_one_row_per_cache(served):
    """Names are shown as they are, also where they look like markup."""
    where, cache_id = served
    (row,) = parsed(ctl(*where, "caches", "--json"))["caches"]
    assert (row["id"], row["model"], row["pages"], row["adapter"]) == (cache_id, "[bold]model", 6, "lora")
    text = ctl(*where, "caches").stdout
    assert "[bold]model" in text
    assert cache_id[:12] in text


def test_tree_shows_the_branches_of_one_cache(served):
    """Nodes with their pages, tiers and first tokens; bounded by depth and limit; unknown ids are refused."""
    where, cache_id = served
    nodes = parsed(ctl(*where, "tree", cache_id[:6], "--json"))["nodes"]
    assert sorted((node["level"], node["first_page"], node["pages"]) for node in nodes) == [
        (0, 0, 2), (1, 2, 2), (1, 2, 2),
    ]  # fmt: skip
    text = ctl(*where, "tree", cache_id).stdout
    assert "pages 0..1" in text
    assert text.count("pages 2..3") == 2
    assert "100 101" in text
    assert parsed(ctl(*where, "tree", cache_id, "--limit", "1", "--json"))["left_off"] == 2
    assert "2 nodes more" in ctl(*where, "tree", cache_id, "--limit", "1").stdout
    refused = ctl(*where, "tree", "ffff0000ffff")
    assert refused.exit_code == 1
    assert "unknown" in refused.stderr


def test_ping_check_and_flush_answer(served):
    """Healthy is 0."""
    where, _ = served
    assert len(parsed(ctl(*where, "ping", "--count", "3", "--json"))["round_trips_us"]) == 3
    assert ctl(*where, "ping").stdout.endswith(" us\n")
    assert parsed(ctl(*where, "flush", "--json")) == {"durable": True}
    assert ctl(*where, "flush").stdout == "durable\n"
    checked = parsed(ctl(*where, "check", "--json"))
    assert (checked["broken"], checked["changed"], checked["healthy"]) == ([], [], True)
    assert ctl(*where, "check").stdout == "ok\n"


def answer(listener: socket.socket, reply: wire.Message, times: int) -> None:
    """Stand in for a daemon: the same reply to the first request of each connection."""
    for _ in range(times):
        sock, _ = listener.accept()
        with sock:
            header = wire.parse_header(sock.recv(4096)[: wire.HEADER.size])
            sock.sendall(wire.frame(header.verb, header.request, reply))


def test_a_broken_invariant_is_code_1(tmp_path):
    """What the daemon lists as broken is printed, and the exit code says unhealthy."""
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        reply = wire.Info({"broken": ["slot 5 is lost"]})
        thread = threading.Thread(target=answer, args=(listener, reply, 2))
        thread.start()
        result = ctl("--socket", str(path), "check")
        assert result.exit_code == 1
        assert "slot 5 is lost" in result.stdout
        again = ctl("--socket", str(path), "check", "--json")
        assert again.exit_code == 1
        assert json.loads(again.stdout) == {"broken": ["slot 5 is lost"], "healthy": False}
        thread.join()


@pytest.mark.parametrize("verb", VERBS)
def test_without_a_daemon_every_verb_is_code_2(tmp_path, verb):
    """The socket that was tried is named."""
    path = tmp_path / "nobody.sock"
    result = ctl("--socket", str(path), verb, *(["abc"] if verb == "tree" else []))
    assert result.exit_code == 2
    assert str(path) in result.stderr
    assert not result.stdout


def test_a_daemon_that_hangs_is_code_2_within_the_timeout(served, daemon):
    """An operator gets an answer also where the daemon gives none."""
    where, _ = served
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        result = ctl(*where, "--timeout", "0.2", "status")
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert result.exit_code == 2
    assert "does not answer" in result.stderr


def test_an_answer_that_comes_in_drops_is_late_too(tmp_path):
    """The timeout is of the whole answer, not of each of its bytes."""
    path, over = tmp_path / "admin.sock", threading.Event()

    def drip(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            header = wire.parse_header(sock.recv(4096)[: wire.HEADER.size])
            for byte in wire.frame(header.verb, header.request, wire.Info({"name": "x" * 100}))[:60]:
                sock.sendall(bytes([byte]))
                over.wait(0.05)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        result = ctl("--socket", str(path), "--timeout", "0.3", "status")
        over.set()
        thread.join()
    assert (result.exit_code, "timed out" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    "words",
    [
        ["status"],
        ["ping"],
        ["status", "--json"],
        ["policies"],
        ["size", "model", "Qwen3-8B"],
        ["size", "seed", "--json"],
    ],
    ids=" ".join,
)
def test_a_full_disk_is_not_the_daemons_silence(served, words):
    """What takes the output is full: code 1 and a line, not 2; where there is no output at all, nothing is wrong."""
    where, _ = served
    unprinted("kvtierctl", [sys.executable, "-m", "kvtier.ctl", *where, *words])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("kvtierctl", "ctl --help"),
        ("kvtierd", "daemon --help"),
        ("kvtierd", "daemon --check-config"),
        ("kvtier.sizing", "sizing --help"),
        ("kvtier.sizing", "sizing size model Qwen3-8B"),
        ("kvtier.sizing", "sizing size model Qwen3-8B --json"),
        ("kvtier.config", "config"),
        ("kvtier.metrics", "metrics"),
        ("kvtier.control.reference", "control.reference"),
    ],
)
def test_what_no_program_can_print_is_a_sentence(name, words):
    """A full output of any program is code 1 and a line, one that is closed is silent."""
    module, *rest = words.split()
    unprinted(name, [sys.executable, "-m", f"kvtier.{module}", *rest])


def unprinted(name: str, command: list[str]) -> None:
    """What a program says where its output is full, is a pipe that nobody reads, or is not there at all."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=env)
    assert (done.returncode, done.stderr[: len(name) + 2]) == (1, f"{name}: ")
    assert re.fullmatch(r".*No space left on device\n", done.stderr)
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False, env=env)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")
    closed = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, check=False, env=env)
    assert (closed.returncode, closed.stderr) == (0, b"")


def test_the_engines_socket_is_told_from_the_operators(served, daemon):
    """Who gives the wrong one of the two reads which is wanted."""
    del served
    result = ctl("--socket", str(daemon.socket), "status")
    assert (result.exit_code, "the admin socket?" in result.stderr) == (1, True)


def test_ids_that_engines_clients_choose_are_text(served, daemon):
    """They move no cursor and break no row, and a terminal that lacks their characters shows escapes."""
    where, _ = served
    with Client(daemon.socket, instance="engine-8") as client:
        client.open(SPEC).match(page_keys(SPEC, range(8)), request="\x1b[2Jgone\nrow", session="日本")
    runner = CliRunner(charset="ascii")
    for words in (("requests",), ("explain", "--request", "\x1b[2Jgone\nrow")):
        result = runner.invoke(main, [*where, *words], env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        assert r"\x1b[2Jgone\nrow" in result.stdout
        assert "\x1b" not in result.stdout
    assert r"\u65e5\u672c" in runner.invoke(main, [*where, "requests"]).stdout


@pytest.mark.parametrize("columns", [None, "40", "80", "200"])
def test_what_other_verbs_name_things_by_is_whole(served, tmp_path, columns):
    """However narrow the terminal is, and in a pipe."""
    where, cache_id = served
    (tmp_path / "ids").write_text(" ".join(map(str, range(8))))
    pin = parsed(ctl(*where, "pin", "--tokens", str(tmp_path / "ids"), "--json"))["pin"]
    narrow = {"COLUMNS": columns}
    assert cache_id[:12] in CliRunner().invoke(main, [*where, "caches"], env=narrow).stdout
    shown = CliRunner().invoke(main, [*where, "pins"], env=narrow).stdout
    assert f" {pin} " in shown
    assert "8.0 KiB" in shown


@pytest.mark.parametrize("width", [24, 60])
def test_what_does_not_fit_in_a_line_goes_on_in_the_next(monkeypatch, capsys, width):
    """A request's id may be as long as an engine likes: it is broken, and no part of it is cut off."""
    monkeypatch.setenv("COLUMNS", str(width))
    name = "".join(map(str, range(70)))
    listing("requests", [{"request": name, "pages": 7}])
    shown = capsys.readouterr().out
    assert "".join(row.split("│")[2].strip() for row in shown.splitlines() if "│" in row).startswith(name)


@pytest.mark.parametrize("text", ["[1, 1.5]", "[1e400]", "[true]", "[[1]]", "1 x", '["1"]', "{}"])
def test_what_is_no_token_id_is_refused(served, tmp_path, text):
    """Rather than taken for another prompt's."""
    where, _ = served
    (tmp_path / "ids").write_text(text)
    result = ctl(*where, "explain", "--tokens", str(tmp_path / "ids"))
    assert (result.exit_code, "a JSON list of token ids" in result.stderr) == (1, True), result.output


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["unpin", str(2**70)], "Unpin.pin"),
        (["requests", "--limit", str(2**64)], "Requests.limit"),
        (["set", "quotas=\udc80"], "Set.values"),
        (["curve", "--add", "99999999999TiB"], "Curve.add"),
        (["curve", "--add", "2000000TiB"], "add"),
        (["explain", "--keys", os.devnull], "--keys"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(served, words, named):
    """A number that the protocol has no room for, text that is none, room that no host has, no key at all."""
    where, _ = served
    result = ctl(*where, *words, "--json")
    error = json.loads(result.stdout)["error"]
    assert (result.exit_code, error["code"], error["field"]) == (1, "bad_request", named)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nothing"],
        ["caches", "rm"],
        ["status", "--nothing"],
        ["--timeout", "x", "status"],
        ["--timeout", "-1", "status"],
        ["--timeout", "nan", "status"],
        ["flush", "--wait", "inf"],
        ["disk", "scrub", "--wait", "nan"],
        ["top", "--interval", "-1"],
        ["top", "--count", "-1"],
        ["ping", "--count", "0"],
    ],
)
def test_wrong_usage_is_code_2(words):
    """As every command line tool does."""
    assert ctl(*words).exit_code == 2


def test_every_verb_has_help_and_json():
    """--help explains each verb in a sentence and lists --json."""
    text = ctl("--help").stdout
    for verb in VERBS:
        assert verb in text
        own = ctl(verb, "--help").stdout
        assert "--json" in own
        assert len(own.splitlines()[2].strip()) > 10
    assert __version__ in ctl("--version").stdout


@pytest.mark.parametrize(("words", "code"), [((), 0), (("--count", "3"), 1)])
def test_an_interrupt_is_how_top_ends(served, monkeypatch, words, code):
    """The last reading is printed; where so many were asked for, it is cut off."""
    where, _ = served
    moments = iter(range(2))

    def sleep(_: float) -> None:
        if next(moments, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr("kvtier.control.top.time.sleep", sleep)
    result = ctl(*where, "top", "--json", *words)
    assert result.exit_code == code
    assert ("tiers" if code == 0 else "error") in json.loads(result.stdout)


def test_the_admin_socket_is_found_by_the_environment(served, daemon):
    """Where engines find the daemon, operators do."""
    del served
    assert ctl("ping", env={"KVTIER_SOCKET": str(daemon.socket)}).exit_code == 0


def test_a_misspelt_variable_is_refused_by_the_operators_tool_too(served, daemon):
    """It might have named another daemon than the one that is asked; what tests and others call theirs is no matter."""
    del served
    where = ("--socket", str(daemon.socket.with_name("admin.sock")))
    done = ctl(*where, "ping", "--json", env={"KVTIER_SOKET": "/elsewhere"})
    assert done.exit_code == 1
    assert json.loads(done.stdout)["error"]["field"] == "KVTIER_SOKET"
    assert "KVTIER_SOCKET" in json.loads(done.stdout)["error"]["message"]
    assert ctl(*where, "ping", env={"KVTIER_VLLM_PYTHON": "/usr/bin/python3"}).exit_code == 0


def test_help_loads_neither_arrays_nor_tables():
    """--help is quick: what only some verbs need is imported by those."""
    code = "import sys\ntry:\n from kvtier.ctl import main; main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([m for m in ('numpy', 'rich', 'lmdb', 'asyncio', 'msgspec', 'aiohttp') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_amounts_read_as_people_say_them():
    """Bytes with the largest unit below them."""
    assert [amount(n) for n in (0, 1023, 1024, 3 << 29, 5 << 50)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 GiB",
        "5120.0 TiB",
    ]
    for name in ("used_bytes", "bytes_read", "packed_bytes_saved", "scattered_bytes.before"):
        assert shown(name, 2048) == "2.0 KiB"
    assert shown("moved_bytes", {"to_disk": 2048}) == "to_disk 2.0 KiB"
    assert shown("queue_pages", 2048) == "2048"


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("#!/bin/sh\necho transformers\n", "msgspec, numpy, xxhash, and not without transformers, got"),
        ("#!/bin/sh\nexit 1\n", "a Python with torch, transformers, msgspec"),
        ("no program\n", "a Python that can be run"),
    ],
)
def test_a_python_that_has_no_engine_is_refused_before_anything_is_started(tmp_path, script, complaint):
    """What it lacks is named; no traceback of what it could not run."""
    python = tmp_path / "python"
    python.write_text(script)
    python.chmod(0o755 if script.startswith("#!") else 0o644)
    result = ctl("try", "transformers", "--python", str(python))
    assert (result.exit_code, complaint in result.stderr) == (1, True), result.stderr
    assert len(result.stderr.splitlines()) == 1
