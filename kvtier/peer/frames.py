"""What daemons say to each other, as structs, and the frames that carry it.

A frame is the length of its body (u32, little-endian), the body (one MessagePack map), and 16 bytes of HMAC-SHA256
over the number of the frame in its direction, the length and the body. So a frame that was altered, repeated, left
out, reordered or taken from another connection ends the connection. Bytes of pages follow the frame that announces
them, outside of it; off loopback an HMAC over them follows too.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec.structs import replace

from kvtier.identity import MAX_GROUPS, CacheSpec
from kvtier.peer.base import Pick
from kvtier.peer.secrets import Mac, derive
from kvtier.types import Code, KvtierError

VERSION: Final = 5
NONCE_BYTES: Final = 16
MAC_BYTES: Final = 16
SEAL_BYTES: Final = 32
LENGTH: Final = struct.Struct("<I")
MAX_HELLO: Final = 512
"""A body before the other side has shown that it has the key."""
MAX_BODY: Final = 16 << 20
MAX_PATH: Final = MAX_BODY - (64 << 10)
"""Bytes of page keys that are asked about: the rest of such a frame is small."""
MAX_ITEMS: Final = 1 << 16
Picks = Annotated[tuple[Pick, ...], msgspec.Meta(max_length=MAX_GROUPS)]
"""More are refused before one is made: a frame holds millions, which would take the loop seconds."""
T = TypeVar("T")


class Message(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, tag_field="t"):
    """Base of every body."""


class Knock(Message, tag=1):
    """First frame, without a key: who connects draws a nonce."""

    version: int
    nonce: bytes
    sealed: bool
    """Whether an HMAC follows the bytes of pages."""
    name: str = ""
    """Who knocks: its name in the fleet, which the key of the connection follows from, too. Version 1 had none."""
    rate: int = 0
    """Bytes of pages a second at most, each way; 0: no limit."""


class Challenge(Message, tag=2):
    """Its answer, without a key: the other nonce, which life of the daemon answers, and a proof that it has the key."""

    nonce: bytes
    incarnation: bytes
    proof: bytes
    """It covers all else that both first frames say."""
    rate: int = 0
    """As Knock has it."""


class Ping(Message, tag=3):
    """Answered with Done by the serving loop."""


class Done(Message, tag=4):
    """Yes."""


class Refused(Message, tag=5):
    """No, and the connection goes on: `code` is one of types.Code."""

    code: str
    message: str


class Use(Message, tag=6):
    """Shows that the asker holds the secret of a cache; later frames name it by `cache`."""

    cache: bytes
    spec: CacheSpec
    key_id: bytes
    proof: bytes


class Find(Message, tag=7):
    """How much of a path of page keys is there; the connection keeps the path.

    `picks` are fetched with it, if all of them are in host there; `packed` as Fetch has it.
    """

    cache: bytes
    keys: bytes
    picks: Picks = ()
    packed: bool = False


class Fetch(Message, tag=9):
    """Items of the path that was found last; `packed`: they come sooner if they are."""

    picks: Picks
    packed: bool = False


class Load(Message, tag=10):
    """Announces items whose bytes follow, in the order of the picks.

    `sums`: the xxh3-64 of each, u64 little-endian. `echo` names the path as the sender's tree has it. Where they are
    `packed`, each has its frame's length (u32 little-endian) in front, 0 where it comes as it is.
    """

    picks: Picks
    sums: bytes
    nbytes: int
    echo: bytes
    packed: bool = False


class Found(Message, tag=8):
    """The first `pages` pages can be fetched, from `more` homes than usual: it is hot.

    `load` announces what was to be fetched with it, and the bytes follow as they follow a Load; None: they do not.
    """

    pages: int
    more: int = 0
    load: Load | None = None


class Offer(Message, tag=11):
    """The asker has a path, and `spare` of its window and state groups. Answered with Wanted, or Refused.

    `load` announces items that may be missing there, a piece at most and not packed, whose bytes follow: they are read
    whatever the answer is, and kept as far as they are wanted.
    """

    cache: bytes
    keys: bytes
    spare: Picks = ()
    group: int = 0
    """Of a keyed cache's keys."""
    load: Load | None = None


class More(Message, tag=12):
    """What is wanted of the offered path now; an offered path is kept by the connection."""


class Wanted(Message, tag=13):
    """Reserved here: the asker sends these items in a Load (or fewer, from the front). None: all is there.

    `stored`: pages that are served now of those that came with the offer.
    """

    picks: Picks = ()
    stored: int = 0


class Stored(Message, tag=14):
    """Pages that are served now of those that the Load brought."""

    pages: int


class Have(Message, tag=17):
    """Which keys of a keyed cache are there; the connection keeps them, and Fetch names them by position."""

    cache: bytes
    group: int
    keys: bytes


class Has(Message, tag=18):
    """A byte per key: 1 where it can be fetched."""

    have: bytes


class Weigh(Message, tag=15):
    """What a path would cost there."""

    cache: bytes
    keys: bytes


class Weighed(Message, tag=16):
    """Pages of the path by the fastest tier that has them, and the load, in pages."""

    device: int = 0
    host: int = 0
    disk: int = 0
    backlog: int = 0
    decode: int = 0
    requests: int = 0


Any = (
    Knock
    | Challenge
    | Ping
    | Done
    | Refused
    | Use
    | Find
    | Found
    | Fetch
    | Load
    | Offer
    | More
    | Wanted
    | Stored
    | Weigh
    | Weighed
    | Have
    | Has
)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Any, strict=True)


class Refusal(KvtierError):  # noqa: N818 - it is the peer's answer, not a fault
    """The peer understood and said no; the connection goes on."""


def encode(message: Message) -> bytes:
    """Length and body; raises a Refusal for what no peer would take: that is nobody's fault there."""
    body = _encoder.encode(message)
    if len(body) > MAX_BODY:
        raise Refusal(Code.OVER_CAP, f"a frame of {len(body)} bytes (at most {MAX_BODY})")
    return LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """The struct of a body; raises bad_request."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as exc:
        raise KvtierError(Code.BAD_REQUEST, f"not a peer's frame: {exc}") from None


def size_of(head: bytes, most: int) -> int:
    """Bytes of the body that follows; raises bad_request."""
    size: int = LENGTH.unpack(head)[0]
    if size > most:
        raise KvtierError(Code.BAD_REQUEST, f"a frame of {size} bytes (at most {most})")
    return size


def expect(message: Message, kind: type[T]) -> T:
    """A frame of that kind; raises the Refusal that came instead, bad_request for anything else."""
    if isinstance(message, Refused) and not issubclass(Refused, kind):
        code = Code(message.code) if message.code in set(Code) else Code.INTERNAL
        raise Refusal(code, "".join(each if each.isprintable() else "?" for each in message.message[:200]))
    if not isinstance(message, kind):
        raise KvtierError(Code.BAD_REQUEST, f"expected {kind.__name__}, got {type(message).__name__}")
    return message


class Session:
    """The keys of one connection after both nonces are known, and how many frames went each way."""

    def __init__(self, key: bytes, *, asker: bool) -> None:
        ways = (derive(key, b"asker"), derive(key, b"answerer"))
        self._out, self._in = ways if asker else ways[::-1]
        self._sign, self._expect = Mac(self._out), Mac(self._in)
        self._sent = self._received = 0
        self.id = derive(key, b"id")
        self._answer = derive(key, b"challenge")

    def challenge(self, knock: Knock, answer: Challenge) -> bytes:
        """What the answerer proves with: of both first frames as they were sent and received, every field of them."""
        return derive(self._answer, encode(knock), encode(replace(answer, proof=b"")))

    def close(self, message: Message) -> bytes:
        """The next frame that is sent, whole."""
        raw = encode(message)
        self._sent += 1
        return raw + self._sign.of(self._sent.to_bytes(8, "little"), raw)[:MAC_BYTES]

    def open(self, head: bytes, raw: bytes) -> Message:
        """The next frame that was received: its length, and its body with the MAC; raises forbidden, bad_request."""
        body = raw[:-MAC_BYTES]
        self._verify(head + body, raw[-MAC_BYTES:])
        return decode(body)

    def _verify(self, frame: bytes, mac: bytes) -> None:
        """Raise forbidden unless this is the next frame that the other side sent."""
        self._received += 1
        expected = self._expect.of(self._received.to_bytes(8, "little"), frame)[:MAC_BYTES]
        if not hmac.compare_digest(expected, mac):
            raise KvtierError(Code.FORBIDDEN, "a frame was not made with the fleet's key, or not for here and now")

    def seal_out(self) -> hmac.HMAC:
        """An HMAC for the bytes that follow the frame that was sent last."""
        return hmac.new(self._out, b"bytes" + self._sent.to_bytes(8, "little"), hashlib.sha256)

    def seal_in(self) -> hmac.HMAC:
        """The same for those that follow the frame that was received last."""
        return hmac.new(self._in, b"bytes" + self._received.to_bytes(8, "little"), hashlib.sha256)
