"""Every verb of kvtierctl, found by walking its commands: --json, and errors that programs can read."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner, Result

from kvtier.control.call import Group
from kvtier.ctl import main

LOCAL = {"completion", "policies", "probe", "replay", "size", "try"}
"""First words of the verbs that ask no daemon."""
WITHOUT = {"dashboard", "doctor"}
"""Read files or this host: without a daemon their answer is another."""


def leaves(
    ctx: click.Context, command: click.Command, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """(words, command) of everything that can be called."""
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            _, found, _ = command.resolve_command(ctx, [name])
            yield from leaves(click.Context(found, ctx, name), found, (*words, name))
        if not command.invoke_without_command:
            return
    yield words, command


VERBS = dict(leaves(click.Context(main), main))
NAMES = [" ".join(words) for words in VERBS]


def call(socket: str, words: tuple[str, ...], *more: str) -> Result:
    """Run a verb with something in place of each argument that it needs."""
    needed = [p for p in VERBS[words].params if isinstance(p, click.Argument) and p.required]
    given = [p.type.choices[0] if isinstance(p.type, click.Choice) else __file__ for p in needed]
    prompt = any(p.name == "chain" for p in VERBS[words].params)
    named = ["--request", "r1"] * prompt + ["--all"] * (words == ("unpin",)) + ["--scope", "s"] * (words == ("purge",))
    return CliRunner().invoke(main, ["--socket", socket, *words, *given, *named, *more])


def test_the_walk_finds_the_verbs():
    """Groups are walked into, and a group that does something alone is a verb too."""
    assert isinstance(main, Group)
    assert {"caches", "caches rm", "explain", "size fit", "status"} <= set(NAMES)


@pytest.mark.parametrize("words", VERBS, ids=NAMES)
def test_every_verb_takes_json_and_wrong_usage_is_json(words):
    """One object with an error on standard output, nothing on standard error, exit code 2."""
    assert any("--json" in param.opts for param in VERBS[words].params)
    result = call("/nowhere", words, "--no-such-option", "--json")
    assert result.exit_code == 2
    assert not result.stderr
    error = json.loads(result.stdout)["error"]
    assert error["code"] == "usage"
    assert "--no-such-option" in error["message"]
    assert error["field"] == "--no-such-option"


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("ping", "--count", "0"), "--count"),
        (("flush", "--wait", "nan"), "--wait"),
        (("explain", "--request", "r1", "--prefill-tokens-per-s", "nan"), "--prefill-tokens-per-s"),
        (("explain", "--request", "r1", "--rate", "moon=1GB/s"), "--rate"),
        (("size", "fit", "Qwen3-8B", "--hit", "nan"), "--hit"),
        (("size", "trace", __file__, "--model", "Qwen3-8B", "--warmup", "nan"), "--warmup"),
        (("import", "/nowhere"), "file"),
        (("ping", "--count"), "--count"),
        (("status", "more"), ""),
    ],
)
def test_wrong_usage_names_the_option(words, field):
    """As the command line has it; none where it is about none."""
    result = CliRunner().invoke(main, [*words, "--json"])
    assert result.exit_code == 2, result.output
    assert json.loads(result.stdout)["error"]["field"] == field


@pytest.mark.parametrize("words", [w for w in VERBS if w[0] not in LOCAL | WITHOUT], ids=" ".join)
def test_without_a_daemon_every_verb_says_so_in_json(words, tmp_path):
    """Exit code 2 and the socket that was tried; without --json the same as a sentence on standard error."""
    path = str(tmp_path / "nobody.sock")
    result = call(path, words, "--json")
    assert result.exit_code == 2, result.output
    assert not result.stderr
    error = json.loads(result.stdout)["error"]
    assert error["code"] == "no_daemon"
    assert path in error["message"]
    plain = call(path, words)
    assert plain.exit_code == 2
    assert path in plain.stderr
    assert not plain.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("size", "fit", "no-such-model"),
        ("size", "trace", "/nowhere.npz", "--model", "Llama-3.1-70B"),
        ("replay", __file__),
        ("unpin",),
        ("explain",),
        ("explain", "--tokens", "/nowhere"),
    ],
    ids=" ".join,
)
def test_refusals_are_json_with_code_1(words):
    """The code, a sentence and the field that it is about."""
    result = CliRunner().invoke(main, [*words, "--json"])
    assert result.exit_code == 1, result.output
    assert not result.stderr
    error = json.loads(result.stdout)["error"]
    assert error["code"] == "bad_request"
    assert error["field"]
    assert error["message"]
