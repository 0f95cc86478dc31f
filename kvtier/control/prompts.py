"""Verbs about one prompt: explain, pin, unpin, pins, prefetch, evict."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvtier import views, wire
from kvtier.control.call import Call, Data, verb
from kvtier.control.progress import ask_long
from kvtier.types import bad

OPTIONS = (
    click.option("--cache", default="", help="Beginning of the cache's id; may be left out where there is one."),
    click.option("--tokens", help="File with token ids: a JSON list, or numbers apart; - reads standard input."),
    click.option("--text", help="The prompt as text, for --tokenizer."),
    click.option("--messages", help="JSON file with chat messages, for --tokenizer."),
    click.option("--tokenizer", help="Folder of a tokenizer (needs transformers)."),
    click.option("--request", default="", help="The engine's id of a recent request."),
    click.option("--chain", default="", help="Chain key of the prompt's last page, in hex."),
)


def prompt(command: Callable[..., Data | None]) -> Callable[..., Data | None]:
    """Adds the options that name a prompt; the command gets it as `of`."""

    def run(
        call: Call,
        show: bool,
        cache: str,
        tokens: str | None,
        text: str | None,
        messages: str | None,
        tokenizer: str | None,
        request: str,
        chain: str,
        **more: Any,
    ) -> Data | None:
        raw = _tokens(tokens, text, messages, tokenizer)
        try:
            key = bytes.fromhex(chain)
        except ValueError:
            raise bad("chain", "32 hex digits", chain) from None
        return command(call, show, of=wire.Prompt(cache, raw, request, key), **more)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__click_params__ = list(getattr(command, "__click_params__", []))  # type: ignore[attr-defined]
    for option in reversed(OPTIONS):
        run = option(run)
    return run


def _tokens(file: str | None, text: str | None, messages: str | None, tokenizer: str | None) -> bytes:
    """Raw int32 ids of whatever names tokens; empty where nothing does. Raises bad_request."""
    if file:
        return _packed(_read(file))
    if text is None and messages is None:
        return b""
    if tokenizer is None:
        raise bad("tokenizer", "a folder, for --text and --messages")
    one = load_tokenizer(tokenizer)
    if text is not None:
        return _packed(one.encode(text))
    chat = json.loads(_read_text(messages or ""))
    return _packed(one.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False))


def load_tokenizer(folder: str) -> Any:
    """The tokenizer of a folder; raises bad_request where it or transformers is missing."""
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415 - an extra
    except ImportError:
        raise bad("tokenizer", "an environment with transformers (pip install transformers)") from None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as exc:
        raise bad("tokenizer", f"a folder with a tokenizer ({str(exc).splitlines()[0]})", folder) from None


def _read_text(file: str) -> str:
    """A file's text; raises bad_request naming it."""
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise bad(file, f"a readable file ({exc})") from None


def _read(file: str) -> list[Any]:
    """Token ids as JSON or as numbers apart."""
    text = _read_text(file)
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else text.replace(",", " ").split()
        return [int(one) for one in found]
    except (ValueError, TypeError, RecursionError):
        raise bad(file, "a JSON list of token ids, or numbers apart") from None


def _packed(ids: list[int]) -> bytes:
    """Raw little-endian int32."""
    try:
        packed = array("i", ids)
    except OverflowError:
        raise bad("tokens", "ids of 32 bits") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


@click.command()
@verb
@prompt
def explain(call: Call, show: bool, of: wire.Prompt) -> Data:
    """Why a prompt is served as it is: what matches, from which tier, where it diverges, what was evicted."""
    data = call.info(wire.Explain(of))
    if show:
        views.explain(data)
    return data


@click.command()
@click.option("--ttl", "ttl_s", default=3600.0, show_default=True, help="Seconds until it ends.")
@click.option("--priority", default=50, show_default=True, help="0..100; higher ones displace lower ones.")
@verb
@prompt
def pin(call: Call, show: bool, of: wire.Prompt, ttl_s: float, priority: int) -> Data:
    """Hold what is cached of a prompt in host for a time; pins end with the daemon."""
    data = call.info(wire.Pin(of, ttl_s, priority))
    if show:
        views.one("pinned", data)
    return data


@click.command()
@click.argument("number", type=int, required=False)
@click.option("--all", "every", is_flag=True, help="End all pins.")
@verb
def unpin(call: Call, show: bool, number: int | None, every: bool) -> Data:
    """End a pin by its number, or all of them."""
    if (number is None) != every or number == 0:
        raise bad("number", "a pin's number, or --all")
    data = call.info(wire.Unpin(number or 0))
    if show:
        click.echo(f"{len(data['unpinned'])} unpinned")
    return data


@click.command()
@verb
def pins(call: Call, show: bool) -> Data:
    """List the pins: what each holds, its priority and how long it lasts."""
    data = call.info(wire.Pins())
    if show:
        views.pins(data)
    return data


@click.command()
@click.option("--wait", "wait_s", default=60.0, show_default=True, help="Seconds to wait.")
@verb
@prompt
def prefetch(call: Call, show: bool, of: wire.Prompt, wait_s: float) -> Data:
    """Bring what is cached of a prompt to host; exit code 1 where some of it did not get there in time."""
    message = wire.Warm(of, int(wait_s * 1000))
    data = ask_long(call, message, wire.Info, lambda status: status["moving"]["loads"], wait_s).data
    if show:
        views.one("in host", data)
    return {**data, "healthy": not data["left"]}


@click.command()
@click.option("--from", "tier", default="host", show_default=True, help="host: it stays on disk; all: it is gone.")
@click.option("--wait", "wait_s", default=60.0, show_default=True, help="Seconds to wait for the disk.")
@verb
@prompt
def evict(call: Call, show: bool, of: wire.Prompt, tier: str, wait_s: float) -> Data:
    """Take the pages that only this prompt has, and all that continue them, out of host or out of every tier."""
    message = wire.Evict(of, tier, int(wait_s * 1000))
    data = ask_long(call, message, wire.Info, lambda status: status["moving"]["disk_queue_pages"], wait_s).data
    if show:
        views.one("evicted", data)
    return data
