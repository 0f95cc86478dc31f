"""Every command of the README and of docs/: run as it is written, or named here with the reason why not."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pytest

from faultkit import eventually
from kvtier.client import Client, page_keys
from kvtier.ctl import main
from kvtier.daemon import main as kvtierd
from kvtier.identity import CacheSpec, GroupSpec, cache_id
from kvtier.types import Kind
from test_sizing_cli import commands as sizing_commands
from test_sizing_cli import requests

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"sh", "text", "python", "toml", "frames"}
IDENTITY = "3f2a"
"""The cache that the README looks at."""

ELSEWHERE = {
    "make demo": "`.ci/run` runs it; it installs torch",
    "make test": "`.ci/run` runs it: this is one of its tests",
    "make engines": "downloads 2.5 GB; tests/test_vllm_real.py runs what it makes, where it was made",
    "pip install": "would replace what is being tested; tests/test_package.py installs the wheel",
    "vllm serve": "needs vLLM and never ends; vLLM's parser reads it where vLLM is, tests/test_vllm_real.py runs it",
    "python -m sglang.launch_server": "needs SGLang and a GPU; tests/test_sglang.py runs what its JSON says",
    "install -m": "writes to the system: run there for one that lies in a folder",
    "systemctl": "needs systemd as process 1: run there offline; tests/test_systemd_run.py runs the units",
}
"""Beginnings of commands that do not do here all that they do, and why; what they do, tests/test_examples.py has."""


def fences() -> Iterator[tuple[Path, str, str]]:
    """(page, language, text) of every fenced block."""
    for page in PAGES:
        for language, text in re.findall(r"^```(\S*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            yield page, language, text


def lines(text: str) -> Iterator[str]:
    """Commands of a shell block, without comments, a quoted argument over several lines being one command."""
    held = ""
    for line in text.splitlines():
        held += line
        try:
            words = shlex.split(held, comments=True)
        except ValueError:  # a quotation goes on
            held += "\n"
            continue
        if words:
            yield re.sub(r"\s+# .*$", "", held).strip()
        held = ""
    assert not held, held


def elsewhere(line: str) -> str:
    """Why a command is not run here; empty where it is."""
    if line.removeprefix("kvtierctl ") in sizing_commands():
        return "tests/test_sizing_cli.py runs it"
    return next((why for start, why in ELSEWHERE.items() if line.startswith(start)), "")


ALL = [line for _, language, text in fences() if language == "sh" for line in lines(text)]
HERE = [line for line in ALL if not elsewhere(line)]


def test_every_block_says_what_it_is_and_every_command_is_run_somewhere() -> None:
    """A block without a language could hide a command; one that is neither run nor explained fails here."""
    wrong = [(page.name, language, text[:40]) for page, language, text in fences() if language not in LANGUAGES]
    assert not wrong
    assert all(line.startswith(("kvtierctl ", "kvtierd")) for line in HERE), HERE
    assert all(any(line.startswith(start) for line in ALL) for start in ELSEWHERE)


def test_commands_in_sentences_are_ones_that_there_are() -> None:
    """Every `kvtierctl VERB --option`, `kvtierd --flag`, `make TARGET` and `python ...` in the text."""
    targets = (
        set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        if (ROOT / "kvtier").is_dir()
        else None
    )
    for page in PAGES:
        for span in re.findall(r"(?<!`)`((?:kvtierctl|kvtierd|make|python) [^`\n]+)`", page.read_text()):
            words = span.replace("...", "").split()
            if words[0] == "make":
                assert targets is None or words[1] in targets, (page.name, span)
            elif words[:2] == ["python", "-m"]:
                assert importlib.util.find_spec(words[2]) is not None, (page.name, span)
            elif words[0] == "python":
                assert all(word in (ROOT / words[1]).read_text() for word in words[2:]), (page.name, span)
            else:
                known(main if words[0] == "kvtierctl" else kvtierd, words)


def known(command: click.Command, words: list[str]) -> None:
    """The verbs and options of a command line exist."""
    context = click.Context(command, info_name=words[0])
    for word in words[1:]:
        if word in {"|", "..."}:
            return
        if word.startswith("--"):
            options = [name for param in command.params for name in param.opts]
            assert word.partition("=")[0] in {*options, "--help", "--json"}, (words, word)
        elif isinstance(command, click.Group) and not word.isupper():
            _, found, _ = command.resolve_command(context, [word])
            assert found is not None, (words, word)
            command = found
            context = click.Context(command, parent=context, info_name=word)


# -- running them -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """An environment in which kvtierctl and kvtierd are this package's, and `kvtierd &` of the README runs."""
    home = tmp_path_factory.mktemp("shell")
    for name, module in (("kvtierctl", "kvtier.ctl"), ("kvtierd", "kvtier.daemon")):
        script = home / name
        # `top` goes on until it is interrupted, as a person would after a while
        limit = 'if [ "$1" = top ]; then set -- top --count 2; fi\n' if name == "kvtierctl" else ""
        script.write_text(f'#!/bin/sh\n{limit}exec "{sys.executable}" -m {module} "$@"\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    env |= {
        "PATH": f"{home}:{env['PATH']}", "HOME": str(home), "KVTIER_SOCKET": str(home / "kvtierd.sock"),
        "KVTIER_DISK_PATH": str(home / "disk"), "KVTIER_HOST_BYTES": "64MiB", "KVTIER_DISK_BYTES": "256MiB",
        "KVTIER_HTTP_PORT": "0", "COLUMNS": "200",
    }  # fmt: skip
    with subprocess.Popen(
        ["bash", "-c", "kvtierd &\necho $!; wait"], env=env, stdout=subprocess.PIPE, text=True
    ) as bash:
        pid = int(bash.stdout.readline())
        try:
            with Client(env["KVTIER_SOCKET"]) as client:
                eventually(client.ping)
            yield env
        finally:
            os.kill(pid, signal.SIGTERM)
            bash.wait(30)


@pytest.fixture(scope="module")
def spec() -> CacheSpec:
    """A cache of tenant 0102 whose id begins as the README has it."""
    scope = f"uid:{os.getuid()}"
    for number in range(1 << 20):
        made = CacheSpec(
            "m", b"f" * 16, "bf16", 4, (GroupSpec(Kind.FULL, 1, 1, 4096),), revision=str(number), salt=b"\1\2"
        )
        if cache_id(made, scope, 0).hex().startswith(IDENTITY):
            return made
    raise AssertionError("no such cache")


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in HERE if line.startswith("kvtierctl")])
def test_each_command_runs_as_written(shell: dict[str, str], spec: CacheSpec, tmp_path: Path, line: str) -> None:
    """Against the daemon that the README starts, with a request r17 of session chat-42 of tenant 0102 cached."""
    keys = page_keys(spec, np.arange(32, dtype=np.int32))
    with Client(shell["KVTIER_SOCKET"], instance="engine", timeout_s=10.0) as client:
        cache = client.open(spec)
        with cache.match(keys, request="r17", session="chat-42").reserve(0, 8, wait_ms=5000) as held:
            assert held.commit() == held.pages
        assert cache.flush(20.0)
        assert cache.match(keys, request="r17", session="chat-42").pages == 8
        subprocess.run(["kvtierctl", "unpin", "--all"], env=shell, check=True, capture_output=True)
        if "--tokens FILE" in line:
            (tmp_path / "FILE").write_text(json.dumps(list(range(32))))
        (tmp_path / "TRACE").write_text(requests(10, 3))
        done = subprocess.run(
            ["bash", "-c", "set -e\n" + line], env=shell, cwd=tmp_path, capture_output=True, text=True, timeout=100
        )
    advice = "doctor" in line and done.returncode == 1  # it has something to say about the host of the tests
    assert done.returncode == 0 or advice, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.strip()
