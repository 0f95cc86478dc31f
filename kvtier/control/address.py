"""The options by which the verbs about one prompt name it, and the files that they read."""

from __future__ import annotations

import io
import json
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvtier import wire
from kvtier.control.call import Call, Data
from kvtier.types import bad

OPTIONS = (
    click.option("--request", default="", help="The engine's id of a recent request: see `requests`."),
    click.option("--session", default="", help="The engine's id of a conversation: its latest request."),
    click.option("--tokens", metavar="FILE", help="Token ids: a JSON list, or numbers apart; - reads standard input."),
    click.option("--text", help="The prompt as text, for --tokenizer."),
    click.option("--messages", metavar="FILE", help="JSON list of chat messages, for --tokenizer."),
    click.option("--tokenizer", metavar="DIR", help="Folder of a tokenizer (needs transformers), for --text and "
                 "--messages; explain then shows text too."),
    click.option("--chain", metavar="HEX", default="", help="Chain key of the prompt's last page."),
    click.option("--keys", metavar="FILE", help="Keys of a keyed cache in hex, at most 4096: a JSON list, or apart; - "
                 "reads standard input."),
    click.option("--key", "some", metavar="HEX", multiple=True, help="One such key; repeat it."),
    click.option("--group", default=0, show_default=True, help="The group of the keys."),
    click.option("--cache", default="", help="Beginning of the cache's id; may be left out where there is one."),
)  # fmt: skip
HOW = "Name the prompt by --request, --session, --tokens, --text, --messages, --chain, or --keys and --key."


def prompt(command: Callable[..., Data | None]) -> Callable[..., Data | None]:
    """Adds the options that name a prompt; the command gets it as `of`."""
    return _adding(command, HOW, whole=False)


def prompt_or_cache(command: Callable[..., Data | None]) -> Callable[..., Data | None]:
    """The same for verbs that are about a whole cache where --cache alone is given."""
    return _adding(command, f"{HOW} --cache alone names all of it.", whole=True)


def _adding(command: Callable[..., Data | None], how: str, *, whole: bool) -> Callable[..., Data | None]:
    def run(call: Call, show: bool, **options: Any) -> Data | None:
        names = ("request", "session", "tokens", "text", "messages", "tokenizer", "chain", "keys", "some", "group")
        given = {name: options.pop(name) for name in names}
        cache = options.pop("cache")
        alone = whole and cache and not any(given.values())
        return command(call, show, of=wire.Prompt(cache) if alone else _named(cache, **given), **options)

    run.__name__, run.__doc__ = command.__name__, f"{command.__doc__}\n\n    {how}"
    run.__click_params__ = list(getattr(command, "__click_params__", []))  # type: ignore[attr-defined]
    for option in reversed(OPTIONS):
        run = option(run)
    return run


def _named(
    cache: str,
    request: str,
    session: str,
    tokens: str | None,
    text: str | None,
    messages: str | None,
    tokenizer: str | None,
    chain: str,
    keys: str | None,
    some: tuple[str, ...],
    group: int,
) -> wire.Prompt:
    """What the options name; raises bad_request unless it is one prompt."""
    ways = {"--request": request, "--session": session, "--tokens": tokens, "--text": text, "--messages": messages,
            "--chain": chain, "--keys": keys, "--key": some}  # fmt: skip
    used = [way for way, value in ways.items() if value not in {None, "", ()}]
    if len(used) != 1 and used != ["--keys", "--key"]:
        raise bad("prompt", f"exactly one of {', '.join(ways)}", " and ".join(used) or None)
    ids = _tokens(tokens, text, messages, tokenizer)
    if not ids and used[0] in {"--tokens", "--text", "--messages"}:
        raise bad(used[0], "at least one token")
    opaque = b"".join(_hex("key", word) for word in (*_words(keys), *some))
    if not opaque and used[0] in {"--keys", "--key"}:
        raise bad(used[0], "at least one key")
    return wire.Prompt(cache, ids, request, session, _hex("chain", chain), opaque, group)


def _hex(name: str, word: str) -> bytes:
    """Bytes in hex; raises bad_request."""
    try:
        return bytes.fromhex(word)
    except ValueError:
        raise bad(name, "hex digits", word) from None


def _tokens(file: str | None, text: str | None, messages: str | None, tokenizer: str | None) -> bytes:
    """Raw int32 ids of whatever names tokens; empty where nothing does. Raises bad_request."""
    if file:
        return _packed(_ids(file))
    if text is None and messages is None:
        return b""
    if tokenizer is None:
        raise bad("tokenizer", "a folder, for --text and --messages")
    one = load_tokenizer(tokenizer)
    if text is not None:
        return _packed(one.encode(text))
    return _packed(
        one.apply_chat_template(_chat(messages or ""), add_generation_prompt=True, tokenize=True, return_dict=False)
    )


def _chat(file: str) -> Any:
    """Chat messages; raises bad_request naming the file."""
    try:
        found = json.loads(_read_text(file))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(isinstance(one, dict) and "role" in one for one in found):
        raise bad(_called(file), 'a JSON list of messages such as {"role": "user", "content": "..."}')
    return found


def load_tokenizer(folder: str) -> Any:
    """The tokenizer of a folder; raises bad_request where it or transformers is missing."""
    if not Path(folder).is_dir():
        raise bad("tokenizer", "a folder with a tokenizer", folder)
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
        return (sys.stdin or io.StringIO()).read() if file == "-" else Path(file).read_text()  # closed: None
    except (OSError, UnicodeDecodeError) as exc:
        raise bad(_called(file), f"a readable file ({exc})") from None


def _called(file: str) -> str:
    """What a file is called in errors."""
    return "standard input" if file == "-" else file


def _words(file: str | None) -> list[str]:
    """Keys in hex as a JSON list or apart; none without a file. Raises bad_request."""
    if not file:
        return []
    text = _read_text(file)
    if not text.lstrip().startswith("["):
        return text.replace(",", " ").split()
    try:
        return [str(one) for one in json.loads(text)]
    except (ValueError, RecursionError):
        raise bad(_called(file), "a JSON list of keys in hex, or keys apart") from None


def _ids(file: str) -> list[int]:
    """Token ids as JSON or as numbers apart."""
    text = _read_text(file)
    apart = not text.lstrip().startswith("[")
    try:
        found = [int(one) for one in text.replace(",", " ").split()] if apart else json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or any(type(one) is not int for one in found):  # true and 1.5 are no ids
        raise bad(_called(file), "a JSON list of token ids, or numbers apart")
    return found


def _packed(ids: list[int]) -> bytes:
    """Raw little-endian int32."""
    try:
        packed = array("i", ids)
    except OverflowError:
        raise bad("tokens", "ids of 32 bits") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
