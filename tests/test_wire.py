"""The protocol as bytes: framing in any pieces, decoding of anything, and the examples of docs/protocol.md."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import wire
from kvtier.frames import Frames
from kvtier.tiers.slab import ARENA_SHIFT
from kvtier.types import Code, KvtierError

DOC = Path(__file__).resolve().parent.parent / "docs" / "protocol.md"
NESTED = b"\x91" * 100_000
WRONG = [
    (wire.Match, {"cache": "one"}),
    (wire.Match, {"keys": [1, 2, 3]}),
    (wire.Match, {"keys": "text"}),
    (wire.Match, {"cache": 1.5}),
    (wire.Match, {"nothing": 1}),
    (wire.Hello, {"version": 1}),
    (wire.Hello, {"version": True, "instance": "a"}),
    (wire.Load, {"region": 1, "group": 0, "rows": None}),
    (wire.Open, {"spec": []}),
]


def cut(raw: bytes, places: list[int]) -> list[bytes]:
    """The stream in pieces."""
    edges = sorted({0, len(raw), *(place % (len(raw) + 1) for place in places)})
    return [raw[a:b] for a, b in itertools.pairwise(edges)]


def refusal(call, *args) -> Code | None:
    """Code of the KvtierError that a call raises; None where it raises nothing."""
    try:
        call(*args)
    except KvtierError as exc:
        return exc.code
    return None


def take_all(frames: Frames, pieces: list[bytes]) -> list[tuple[int, int, bytes]]:
    """Every frame of a stream; copies the bodies, which are valid until the next feed."""
    out = []
    for piece in pieces:
        frames.feed(piece)
        while (frame := frames.next()) is not None:
            out.append((frame.verb, frame.request, bytes(frame.body)))
    return out


@given(st.lists(st.tuples(st.integers(0, 65535), st.integers(0, 2**64 - 1), st.binary(max_size=200))), st.data())
def test_frames_are_the_same_in_whatever_pieces_they_arrive(sent, data):
    """Framing gives back every frame, for every way of cutting the stream."""
    raw = b"".join(wire.HEADER.pack(len(body), 1, 0, verb, number) + body for verb, number, body in sent)
    places = data.draw(st.lists(st.integers(0, max(1, len(raw))), max_size=20))
    frames = Frames()
    assert take_all(frames, cut(raw, places)) == sent
    assert frames.buffered == 0


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=10))
def test_framing_of_garbage_ends_in_frames_or_a_refusal(raw, places):
    """Garbage raises KvtierError and nothing else, and never more is buffered than was fed."""
    frames = Frames(max_body=1000)
    assert refusal(take_all, frames, cut(raw, places)) in {None, Code.VERSION, Code.BAD_REQUEST}
    assert frames.buffered <= len(raw)


def test_nothing_is_kept_of_frames_that_were_handed_out():
    """A connection on which nothing more is said for hours holds no memory for its last long prompt."""
    piece, frames = wire.frame(16, 7, wire.Match(1, 0, bytes(1000))), Frames()
    before = sys.getrefcount(piece)
    frames.feed(piece)
    frame = frames.next()
    assert frame is not None
    assert frame.body == piece[wire.HEADER.size :]
    del frame
    assert sys.getrefcount(piece) == before
    assert take_all(frames, [piece[:100], piece[100:] + piece]) == 2 * [(16, 7, piece[wire.HEADER.size :])]


@pytest.mark.parametrize(
    ("header", "field"),
    [
        (wire.HEADER.pack(0xFFFFFFFF, 1, 0, 16, 7), "length"),
        (wire.HEADER.pack(wire.MAX_BODY + 1, 1, 0, 16, 7), "length"),
        (wire.HEADER.pack(0, 2, 0, 16, 7), "version"),
        (wire.HEADER.pack(0, 1, 1, 16, 7), "reserved"),
    ],
)
def test_a_bad_header_is_refused_before_its_body_comes(header, field):
    """A refused header names the field and still tells which request it was."""
    frames = Frames()
    frames.feed(header)
    with pytest.raises(KvtierError) as caught:
        frames.next()
    assert caught.value.field == field
    assert frames.request == 7


@given(st.sampled_from([0, 999, *wire.VERBS.values()]), st.binary(max_size=300))
def test_decoding_any_body_gives_a_request_or_bad_request(verb, body):
    """The decoder knows no third way out."""
    assert refusal(wire.decode_request, verb, body) in {None, Code.BAD_REQUEST}


@given(st.sampled_from(list(wire.VERBS.values())), st.recursive(st.none() | st.integers() | st.binary(), st.lists))
def test_decoding_any_messagepack_gives_a_request_or_bad_request(verb, tree):
    """Well-formed values of the wrong shape are refused like bytes that are no MessagePack."""
    try:
        raw = msgspec.msgpack.encode(tree)
    except OverflowError:
        return
    assert refusal(wire.decode_request, verb, raw) in {None, Code.BAD_REQUEST}


@pytest.mark.parametrize(("kind", "fields"), WRONG)
def test_wrong_types_are_refused(kind, fields):
    """Strict decoding: no number for text, no list for bytes, no unknown field, no missing one."""
    with pytest.raises(KvtierError) as caught:
        wire.decode_request(wire.VERBS[kind], msgspec.msgpack.encode(fields))
    assert caught.value.code is Code.BAD_REQUEST


@pytest.mark.parametrize("verb", list(wire.VERBS.values()))
def test_deep_nesting_is_refused(verb):
    """A body of 100,000 nested arrays overflows no stack."""
    with pytest.raises(KvtierError):
        wire.decode_request(verb, NESTED)


def test_a_reply_nested_deeply_is_refused():
    """Info carries any tree of values; one too deep for this side is a refusal."""
    with pytest.raises(KvtierError) as caught:
        wire.decode_reply(65, b"\x81\xa4data\x81\xa1x" + NESTED, wire.Info)
    assert caught.value.code is Code.INTERNAL


def test_an_error_reply_raises_what_it_carries():
    """Code, sentence and field come through; a code of a later version is internal."""
    known = msgspec.msgpack.encode(wire.Error("busy", "later", "x"))
    with pytest.raises(KvtierError, match="x: later") as caught:
        wire.decode_reply(wire.ERROR_VERB, known, wire.Ok)
    assert caught.value.code is Code.BUSY
    with pytest.raises(KvtierError) as caught:
        wire.decode_reply(wire.ERROR_VERB, msgspec.msgpack.encode(wire.Error("new", "?")), wire.Ok)
    assert caught.value.code is Code.INTERNAL


def test_a_reply_of_another_shape_is_not_the_callers_fault():
    """What the daemon says wrong must not look like a bad request of the engine."""
    with pytest.raises(KvtierError) as caught:
        wire.decode_reply(16, msgspec.msgpack.encode({"handle": "x"}), wire.Matched)
    assert caught.value.code is Code.INTERNAL


def test_a_body_over_the_limit_is_not_sent():
    """The sender refuses what the receiver would."""
    with pytest.raises(KvtierError, match="over the limit"):
        wire.request_frame(wire.Match(1, 0, bytes(wire.MAX_BODY)), 1)


def test_verb_numbers_are_distinct():
    """No two verbs share a number, and none is the error reply's."""
    assert len(set(wire.VERBS.values())) == len(wire.VERBS)
    assert wire.ERROR_VERB not in wire.VERBS.values()


def test_addresses_mean_the_same_to_both_sides():
    """The host tier and the protocol pack an arena's number at the same bit."""
    assert wire.ARENA_SHIFT == ARENA_SHIFT


def examples() -> list[tuple[str, str, int, dict, bytes]]:
    """Direction, struct, request id, fields and frame of every example in the protocol's text."""
    block = DOC.read_text().split("```frames\n")[1].split("```")[0]
    found = []
    for part in re.split(r"\n(?=[<>] )", block.strip()):
        head, *lines = part.split("\n")
        way, name, number, fields = head.split(" ", 3)
        found.append((way, name, int(number), json.loads(fields), bytes.fromhex("".join(lines).replace(" ", ""))))
    return found


def hexed(value: object) -> object:
    """A struct as the text writes it: bytes in hex, defaults left out."""
    tree = msgspec.to_builtins(value, builtin_types=(bytes,))
    return json.loads(json.dumps(tree, default=bytes.hex))


@pytest.mark.parametrize("example", examples(), ids=lambda e: f"{e[0]}{e[1]}-{e[2]}")
def test_examples_of_the_text_decode(example):
    """Each example frame is one frame, and decodes to the struct and fields printed above it."""
    way, name, number, fields, raw = example
    (verb, request, body), *rest = take_all(Frames(), [raw])
    assert not rest
    assert request == number
    kind = getattr(wire, name)
    if way == ">":
        assert wire.VERBS[kind] == verb
    assert hexed(msgspec.msgpack.decode(body, type=kind)) == fields


def test_the_text_names_every_verb_and_code():
    """A verb or an error code that is not in the protocol's text does not exist."""
    text = DOC.read_text()
    for kind, number in wire.VERBS.items():
        assert re.search(rf"\b{kind.__name__}\b", text), kind
        assert re.search(rf"\b{number}\b", text), kind
    for code in Code:
        assert f"`{code.value}`" in text
