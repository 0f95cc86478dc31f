"""The protocol as data: one struct per verb, and frames. Pure: no sockets, no clock.

Frame: 16-byte header (body length u32, version u8, reserved u8, verb u16, request id u64, little-endian),
then a MessagePack map. Tokens, keys, offsets and checksums travel as raw little-endian bytes, never as
integer lists. A reply carries the verb and request id of its request; verb 0 is an error reply; request
id 0 is an event. docs/protocol.md is the text of this file.
"""

from __future__ import annotations

import functools
import struct
from typing import Final, NamedTuple, TypeVar

import msgspec

from kvtier.identity import CacheSpec, Slice
from kvtier.types import Code, KvtierError, bad

VERSION: Final = 1
HEADER: Final = struct.Struct("<IBBHQ")
MAX_BODY: Final = 64 << 20
MAX_NAME: Final = 128
MAX_KEYS: Final = 512
"""Opaque keys of one request: some milliseconds in which the daemon serves nobody else."""
MAX_ORDERED: Final = 1024
"""Requests of one Order."""
MAX_ASKED: Final = 4096
"""The same of Exists, which costs a fraction of that a key."""
ARENA_SHIFT: Final = 44
"""An address is arena number << ARENA_SHIFT | byte offset in that arena."""


class Message(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Base of every body."""


class Error(Message):
    """A refusal: `code` is one of types.Code, `field` the input it is about."""

    code: str
    message: str
    field: str = ""


class Ok(Message):
    """Done; nothing more to say."""


# -- session ---------------------------------------------------------------------------------------------------


class Hello(Message):
    """First frame on a connection: join the engine instance `instance`."""

    version: int
    instance: str
    scope: str = ""
    """Trust scope label; empty means this process's uid."""
    events: bool = False
    """Whether this connection wants events (Durable)."""
    unmapped: tuple[int, ...] = ()
    """Sessions of this process that are over, as in Unmapped: they end before this one begins."""


class ArenaInfo(Message):
    """A host arena of the scope; its memfd comes with the reply by SCM_RIGHTS, in list order."""

    arena: int
    bytes: int


class Welcome(Message):
    """Reply to Hello."""

    version: int
    server: str
    scope: str
    arenas: tuple[ArenaInfo, ...]
    lease_cap_bytes: int
    reserve_cap_bytes: int
    session: int = 0
    """Names this connection to Unmapped; the server gives it."""
    run: bytes = b""
    """Random, of this run of the daemon: what it gave means nothing to another."""


class Bye(Message):
    """The process lets go of all it holds and will touch no slot any more."""


class Unmapped(Message):
    """The process has unmapped the arenas of its lost connection `session`: what that held returns at once.

    Without it, slots of a lost connection stay quarantined until the process ends.
    """

    session: int
    unheard: bytes = b""
    """Request ids (u64) of it whose replies never came: what they gave is nobody's and returns, too."""


class Ping(Message):
    """Answered with Ok by the serving loop itself."""


class Open(Message):
    """Open (or make) the cache that `spec` names, and say which shard of it this process holds."""

    spec: CacheSpec
    rank: int = -1
    """Which of `world` workers; -1: a scheduler, or an engine of one process, which writes what it reserves itself."""
    world: int = 1
    slices: tuple[Slice, ...] = ()
    """One per group; empty means whole items. Workers with equal slices are replicas: one of them writes."""
    epoch: int = 0
    """The newest epoch this engine knows; an older one here moves up to it."""


class GroupInfo(Message):
    """How items of one group lie in the arena."""

    item_bytes: int
    slot_bytes: int
    slots_per_item: int


class Opened(Message):
    """Reply to Open and Reset."""

    cache: int
    cache_id: bytes
    epoch: int
    groups: tuple[GroupInfo, ...]
    writes_above: int = -1
    """This process writes its shard of others' reservations with higher numbers; -1: a replica does, or none."""


class Reset(Message):
    """Move the cache to a new epoch and free the old one (weights changed). Replies Opened."""

    cache: int


# -- token caches -----------------------------------------------------------------------------------------------


class Match(Message):
    """Longest cached prefix of a path of page keys. Pins nothing."""

    cache: int = 0
    handle: int = 0
    """0: a new path; else go on with that path, appending `keys`."""
    keys: bytes = b""
    """Whole page keys, `stride` bytes each; a remainder is a bad_request."""
    request: str = ""
    """The engine's own request id, for people."""
    session: str = ""
    """The engine's id of the conversation that the request is part of, for people."""
    prefill: float = 0.0
    """Tokens a second that this engine computes at present; 0: it does not say, and everything is loaded."""


class Segment(Message, array_like=True):
    """`pages` consecutive pages served best from `tier`."""

    tier: int
    pages: int


class Matched(Message):
    """Reply to Match: `pages` can be acquired; after them `pending` are reserved by somebody."""

    handle: int
    pages: int
    segments: tuple[Segment, ...] = ()
    pending: int = 0
    load_s: tuple[float, ...] = ()
    """Where `prefill` was given: seconds to load each segment, by what was measured of its tier lately,"""
    recompute_s: tuple[float, ...] = ()
    """and to compute it."""
    cut: int = -1
    """So many pages are worth loading, the rest is computed faster; Acquire of -1 pages loads so many."""
    asking: bool = False
    """Whether other hosts are being asked for more: match again soon, or acquire all (-1), which waits for them."""
    known: int = 0
    """Where a cache has state groups: pages that are served along the path, whether or not a state point is there."""


class Acquire(Message):
    """Lease the first `pages` pages of the handle's path (-1: all that match), loading what is not in host."""

    handle: int
    pages: int = -1
    wait_ms: int = 1000
    device: bool = False
    """Whoever reads maps the device's memory: addresses there may come, and pages that are hot are brought there."""


class Items(Message):
    """Slots of `count` items of one group, first at page `first`.

    offsets: int64 addresses, slots_per_item each, -1 where there is none: arena number << ARENA_SHIFT | byte offset.
    sums: u64 xxh3-64 of each item.
    """

    group: int
    first: int
    count: int
    offsets: bytes
    sums: bytes = b""


class Acquired(Message):
    """Reply to Acquire. pages may be fewer than matched when a copy was lost. lease 0: nothing is held."""

    lease: int
    pages: int
    items: tuple[Items, ...] = ()


class Release(Message):
    """Give the lease back."""

    lease: int


class Forget(Message):
    """Drop a request handle."""

    handle: int


class Prefetch(Message):
    """Bring the handle's matched pages to host without leasing them. Replies Ok at once."""

    handle: int


class Hint(Message):
    """What the engine knows of the future of the handle's path. Replies Ok at once; what is not cached is not hinted.

    `continues`: the conversation goes on; `waiting`: it goes on after a tool's answer, within `seconds`; both keep the
    path until `seconds` have passed (0: a minute), after which it is like any other. `dead`: nothing comes after page
    `page` any more, what is there goes first.
    """

    handle: int
    what: str
    seconds: float = 0.0
    page: int = 0


class Push(Message):
    """Give a peer the request's pages now, and those that follow as they are committed here (prefill and decode apart).

    Replies Ok at once; what the peer has not got after all it computes itself.
    """

    handle: int
    to: str
    """The peer's name in the fleet."""


class Elsewhere(Message):
    """Another host that keeps a part of the model: its name in the fleet, and the spec of the part."""

    host: str
    spec: CacheSpec


class Agree(Message):
    """How much of the handle's path this daemon and those of all other hosts of the model can serve. Pins nothing."""

    handle: int
    others: tuple[Elsewhere, ...]
    wait_ms: int = 200


class Agreed(Message):
    """Reply to Agree: 0 also where some host did not say in time."""

    pages: int


class Order(Message):
    """In which order these requests are best served: longest shared prefix first, but overdue ones before all."""

    handles: tuple[int, ...]
    waited_ms: tuple[int, ...]
    """How long each has waited."""
    bound_ms: int = 1000
    """Requests that waited so long are overdue."""


class Ordered(Message):
    """Reply to Order."""

    handles: tuple[int, ...]


class Want(Message):
    """Items of one group that a reservation asks for: page numbers, int32 little-endian, ascending."""

    group: int
    pages: bytes


class Reserve(Message):
    """Slots for pages [start, start + pages) of the handle's path.

    With `running` the pages may go beyond the path: their tokens are not known yet, and a Commit brings their keys.
    Such a reservation is read as well as written: it holds all of its slots until its writers say Abort.

    Every full group gets every page. `wants` lists pages of window and state groups (absent: every page for
    window groups, none for state groups).
    """

    handle: int
    start: int
    pages: int
    wants: tuple[Want, ...] = ()
    wait_ms: int = 50
    device: bool = False
    """Slots in the device's memory, which whoever writes maps."""
    running: bool = False


class Reserved(Message):
    """Reply to Reserve: the first `pages` pages were granted; an offset of -1 is already stored: skip it."""

    reservation: int
    pages: int
    items: tuple[Items, ...] = ()
    refused: str = ""
    """Why fewer pages than asked: a types.Code."""
    writes: bool = True
    """Whether who reserved writes them; false for a scheduler beside workers."""
    named: int = -1
    """Of a running reservation: pages of its path, from the root, whose keys the daemon has. Others: -1."""


class Sums(Message):
    """Checksums of one group's items of the pages that a Commit is about: u64 xxh3-64 each, 0 where not known."""

    group: int
    sums: bytes


class Commit(Message):
    """The process has written its shard of pages [first, first + pages) (absolute page numbers).

    For a keyed reservation: positions in the list of keys that was reserved. Replies after the checksum, which the
    daemon takes of items for which `sums` has none; only who wrote whole items can know any.

    `keys`: of a running reservation, the keys of the path's pages from `named` on, as far as they are known by now;
    what the daemon knows of them already is left as it is.
    """

    reservation: int
    first: int
    pages: int
    sums: tuple[Sums, ...] = ()
    keys: bytes = b""
    named: int = 0


class Committed(Message):
    """Reply to Commit: pages of the reservation that are now served, and complete ones that wait for a parent."""

    published: int
    waiting: int = 0


class Abort(Message):
    """Give back what is not committed; this process will write there no more."""

    reservation: int


# -- keyed caches -------------------------------------------------------------------------------------------------


class Exists(Message):
    """Presence of opaque keys (concatenated) in one group."""

    cache: int
    group: int
    keys: bytes


class Existence(Message):
    """Reply: one types.Presence byte per key."""

    states: bytes


class AcquireKeys(Message):
    """Lease the given keys; those absent come back with offset -1. Order: prefix root first."""

    cache: int
    group: int
    keys: bytes
    wait_ms: int = 1000


class ReserveKeys(Message):
    """Slots for new keys. Commit and Abort take positions in this list of keys."""

    cache: int
    group: int
    keys: bytes
    wait_ms: int = 50


# -- regions: memory of the engine's own ----------------------------------------------------------------------------


class Register(Message):
    """Sent instead of Hello on a connection of its own, with one fd: `rows` rows of `stride` bytes at `offset`."""

    instance: str
    name: str
    """Names the region within the instance."""
    offset: int
    stride: int
    rows: int
    scope: str = ""
    session: int = 0
    """The Welcome's, of the connection that the region belongs to; 0: the only one that this process has."""


class Registered(Message):
    """Reply to Register."""

    region: int
    mapped: bool
    """True where the fd is sealed against shrinking and mapped; false where I/O goes by preadv/pwritev."""


HANDLE_BYTES: Final = 64
UUID_BYTES: Final = 16


class Exported(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A stretch of GPU memory as one process tells another of it."""

    uuid: bytes
    """The GPU's, 16 bytes; zeros where the CPU is in a GPU's place."""
    handle: bytes
    """The allocation's CUDA IPC handle, 64 bytes; empty where a descriptor comes along instead."""
    allocation: int
    """Bytes of the whole allocation."""
    offset: int
    size: int
    chunk: int = 0
    """For a descriptor: names the chunk within the exporting process, so that it is mapped once."""

    def check(self) -> None:
        """Raise bad_request naming the first field that cannot be."""
        wrong = (
            ("uuid", len(self.uuid) != UUID_BYTES),
            ("handle", len(self.handle) not in {0, HANDLE_BYTES}),
            ("allocation", not 0 < self.allocation < 1 << 48),
            ("offset", not 0 <= self.offset < self.allocation),
            ("size", not 0 < self.size <= self.allocation - self.offset),
        )
        for field, is_wrong in wrong:
            if is_wrong:
                raise KvtierError(Code.BAD_REQUEST, "not a stretch of GPU memory", f"exported.{field}")


class MapDevice(Message):
    """Sent instead of Hello on a connection of its own: how to map the device's memory. Replies DeviceMapped."""

    instance: str
    scope: str = ""


class DeviceMapped(Message):
    """Reply to MapDevice; with an empty handle the descriptor of a VMM chunk (or a memfd) comes along by SCM_RIGHTS.

    The arena is the stretch's first `size` bytes; UseDevice's token is the 16 bytes after them.
    """

    arena: int
    size: int
    exported: Exported


class UseDevice(Message):
    """This process maps the device's memory, as the token shows that it read there. Replies Ok."""

    token: bytes


class Plane(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One layer's K, its V, or its fused rows, in blocks of `tokens` tokens: places and strides in bytes."""

    memory: int
    """Which of the message's stretches it is in."""
    layer: int
    offset: int
    """Of the first block's first row in that stretch."""
    blocks: int
    heads: int
    tokens: int
    row: int
    """Bytes of one head of one token, contiguous."""
    block_stride: int
    head_stride: int
    token_stride: int


class RegisterKv(Message):
    """Sent instead of Hello on a connection of its own: the engine's own paged KV in GPU memory. Replies Registered.

    A descriptor comes along for each stretch without a handle, in order. Loads and stores name blocks as rows.
    """

    instance: str
    name: str
    """Names the region within the instance."""
    memory: tuple[Exported, ...]
    planes: tuple[Plane, ...]
    """By layer; of one layer K before V."""
    tokens: tuple[bytes, ...]
    """What each stretch begins with, 1..64 bytes, unchanged until the reply: they are read back."""
    scope: str = ""
    session: int = 0
    """As in Register."""


class Unregister(Message):
    """Forget the region; refused with busy while transfers run."""

    region: int


class Load(Message):
    """Copy items into rows of a region: of `lease`'s pages, or of `keys`. Each row gets one item of `group`.

    rows: int64 row numbers, one per item, -1 to skip. The reply is the only word that the daemon will not write
    there any more.
    """

    region: int
    group: int
    rows: bytes
    lease: int = 0
    first: int = 0
    cache: int = 0
    keys: bytes = b""
    wait_ms: int = 10000


class Loaded(Message):
    """Reply: one byte per row, 1 where the item's verified bytes are there."""

    done: bytes


class Store(Message):
    """Copy rows of a region into the cache under `keys`, or into `reservation`'s pages from `first` on, and commit."""

    region: int
    group: int
    rows: bytes
    reservation: int = 0
    first: int = 0
    cache: int = 0
    keys: bytes = b""
    wait_ms: int = 10000


class Stored(Message):
    """Reply: one byte per row, 1 where the item is stored (or was already)."""

    done: bytes
    refused: str = ""


class Cancel(Message):
    """Stop the Load or Store sent as request id `request`; its own reply comes first, then Ok."""

    request: int


# -- state of the whole ---------------------------------------------------------------------------------------------


class Flush(Message):
    """Reply Ok when everything committed before is durable; no_space or io where it cannot be."""

    cache: int = 0
    """0: every cache of the instance."""
    wait_ms: int = 60000


class Stat(Message):
    """Numbers of the daemon that any engine may see."""


class Info(Message):
    """Reply to Stat and the admin verbs: a plain tree of names and values."""

    data: dict[str, object]


class Durable(Message):
    """Event: the first `pages` pages of the reservation are on disk and synced."""

    reservation: int
    pages: int


# -- admin socket only ------------------------------------------------------------------------------------------------


class Status(Message):
    """Everything about tiers, caches, instances and counters."""


class Caches(Message):
    """One row per cache."""


class Tree(Message):
    """Nodes of one cache (id by hex prefix), depth first, at most `limit`."""

    cache: str
    depth: int = 8
    limit: int = 1000
    width: int = 1 << 20
    """Children shown of a node, the most recently used first."""


class Check(Message):
    """Run the invariants now; the reply lists what is broken."""


class Metrics(Message):
    """Every counter, gauge and histogram, for kvtierctl top and the HTTP port."""


class Prompt(Message):
    """How an operator names a prompt: exactly one of tokens, request, session, chain and keys."""

    cache: str = ""
    """Beginning of the cache's id in hex; may be empty where there is one of the kind, and for request and session."""
    tokens: bytes = b""
    """int32 token ids, little-endian."""
    request: str = ""
    """The engine's own id of a recent request (Match.request)."""
    session: str = ""
    """The engine's id of a conversation (Match.session): its latest request."""
    chain: bytes = b""
    """Chain key of the prompt's last page."""
    keys: bytes = b""
    """Opaque keys of a keyed cache, concatenated, root first."""
    group: int = 0
    """Their group."""


class Explain(Message):
    """What of a prompt matches, from which tier, where it diverges, what was evicted. Replies Info."""

    of: Prompt


class Requests(Message):
    """The latest requests that engines gave an id, latest first: what Explain and the like can name. Replies Info."""

    session: str = ""
    """Only those of this conversation."""
    limit: int = 100


class Spans(Message):
    """The sampled requests since the last time, for whoever exports them. Replies Info."""


class Pin(Message):
    """Hold what matches of a prompt in host for `ttl_s` seconds. Pins of lower priority (0..100) make room."""

    of: Prompt
    ttl_s: float = 3600.0
    priority: int = 50


class Unpin(Message):
    """End a pin; 0: all."""

    pin: int = 0


class Pins(Message):
    """List the pins."""


class Warm(Message):
    """Bring what matches of a prompt to host, for people: the reply comes when it is there. Replies Info."""

    of: Prompt
    wait_ms: int = 60000


class Evict(Message):
    """Take a prompt's own pages out of `tier`: device or host (slower tiers keep them) or all. Replies Info."""

    of: Prompt
    tier: str = "host"
    wait_ms: int = 60000


class Remove(Message):
    """Empty one cache; forget it where no engine has it open. Replies Info."""

    cache: str


class Purge(Message):
    """Empty every cache of a scope, an adapter or a tenant's salt; what is given must all fit. Replies Info."""

    scope: str = ""
    adapter: str = ""
    salt: bytes = b""


class Curve(Message):
    """Hits against capacity for the traffic just seen. Replies Info."""

    add: tuple[int, ...] = ()
    """What so many bytes more of the fastest tier would have hit, too."""


class Route(Message):
    """Which host of the fleet a prompt is cheapest on. A session stays where it was while that is not too busy."""

    of: Prompt
    session: str = ""


class Set(Message):
    """Change live settings, all or none, until they are read again; empty: show them. Replies Info."""

    values: dict[str, str] = {}


class DiskUsage(Message):
    """How full and how scattered the disk tier is, and what each cache holds there. Replies Info."""


class DiskScrub(Message):
    """Re-read every copy on disk, of one cache (beginning of its id) or all; drop what is wrong. Replies Info."""

    cache: str = ""
    wait_ms: int = 600000


class DiskVerify(Message):
    """Compare catalogue, cells and indexes; changes nothing. Replies Info."""


class DiskCompact(Message):
    """Gather free cells into whole slabs, and write the catalogue without its free pages. Replies Info."""


class DiskPurge(Message):
    """Empty one cache, or all that scope, adapter and salt fit, and discard their bytes on disk. Replies Info."""

    cache: str = ""
    scope: str = ""
    adapter: str = ""
    salt: bytes = b""


class Export(Message):
    """Begin to export the pages that a prompt matches, or (with a cache alone) a whole cache. Replies Info."""

    of: Prompt


class ExportNext(Message):
    """The next bytes of an export's file. Replies Chunk."""

    export: int


class Chunk(Message):
    """Reply to ExportNext: up to 1 MiB."""

    data: bytes
    last: bool = False


class ExportEnd(Message):
    """Give an export up."""

    export: int


class Import(Message):
    """Begin to import a file with this header (its record's meta) into a trust scope. Replies Info."""

    header: bytes
    scope: str = ""
    """Empty: the scope that the file names."""


class ImportRun(Message):
    """A run record's meta; the reply says whether its payload is wanted."""

    number: int
    run: bytes


class ImportData(Message):
    """The next bytes of the wanted payload. Replies Info: pages stored, once it is whole."""

    number: int
    data: bytes


class ImportEnd(Message):
    """The file has ended. Replies Info: pages by what became of them."""

    number: int


FIRST_ADMIN: Final = 96

VERBS: Final[dict[type[Message], int]] = {
    Hello: 1,
    Bye: 2,
    Ping: 3,
    Open: 4,
    Reset: 5,
    Register: 6,
    Unregister: 7,
    Unmapped: 8,
    MapDevice: 9,
    UseDevice: 10,
    RegisterKv: 11,
    Match: 16,
    Acquire: 17,
    Release: 18,
    Forget: 19,
    Prefetch: 20,
    Reserve: 21,
    Commit: 22,
    Abort: 23,
    Hint: 24,
    Push: 25,
    Order: 26,
    Agree: 27,
    Exists: 32,
    AcquireKeys: 33,
    ReserveKeys: 34,
    Load: 48,
    Store: 49,
    Cancel: 50,
    Flush: 64,
    Stat: 65,
    Durable: 80,
    Status: 96,
    Caches: 97,
    Tree: 98,
    Check: 99,
    Metrics: 100,
    Set: 101,
    Explain: 102,
    Pin: 103,
    Unpin: 104,
    Pins: 105,
    Warm: 106,
    Evict: 107,
    Remove: 108,
    Purge: 109,
    Curve: 110,
    Route: 111,
    Requests: 116,
    Spans: 117,
    DiskUsage: 120,
    DiskScrub: 121,
    DiskVerify: 122,
    DiskCompact: 123,
    DiskPurge: 124,
    Export: 125,
    ExportNext: 126,
    ExportEnd: 127,
    Import: 128,
    ImportRun: 129,
    ImportData: 130,
    ImportEnd: 131,
}
"""Verb number of each request and event; a reply carries its request's number."""

ADMIN: Final = frozenset(kind for kind, number in VERBS.items() if number >= FIRST_ADMIN)
"""Verbs served on the admin socket only."""

ERROR_VERB: Final = 0
_REQUESTS = {number: msgspec.msgpack.Decoder(cls, strict=True) for cls, number in VERBS.items()}
_encoder = msgspec.msgpack.Encoder()
Reply = TypeVar("Reply", bound=Message)


class Header(NamedTuple):
    """A decoded frame header."""

    length: int
    verb: int
    request: int


def frame(verb: int, request: int, body: Message) -> bytes:
    """One frame, ready to send."""
    raw = _encoder.encode(body)
    if len(raw) > MAX_BODY:
        raise KvtierError(Code.BAD_REQUEST, f"body of {len(raw)} bytes is over the limit of {MAX_BODY}", "length")
    return HEADER.pack(len(raw), VERSION, 0, verb, request) + raw


def request_frame(body: Message, request: int) -> bytes:
    """A request (or event) frame of the verb that `body` stands for."""
    return frame(VERBS[type(body)], request, body)


def framed(message: Message, request: int) -> bytes:
    """The frame of a request whose values a user chose; raises bad_request for one that cannot be said."""
    try:
        return request_frame(message, request)
    except (TypeError, ValueError, OverflowError) as exc:
        raise bad(f"{type(message).__name__}{_unsayable(message)}", f"what the protocol can say ({exc})") from exc


def _unsayable(message: Message) -> str:
    """The first field that cannot be encoded; empty where each by itself can."""
    for field in msgspec.structs.fields(message):
        try:
            _encoder.encode(getattr(message, field.name))
        except (TypeError, ValueError, OverflowError):
            return f".{field.name}"
    return ""


def parse_header(raw: bytes | bytearray | memoryview, max_body: int = MAX_BODY) -> Header:
    """Header of a frame; raises version or bad_request before anything is buffered for it."""
    length, version, reserved, verb, request = HEADER.unpack(raw)
    if version != VERSION:
        raise KvtierError(Code.VERSION, f"expected protocol version {VERSION}, got {version}", "version")
    if reserved:
        raise KvtierError(Code.BAD_REQUEST, f"expected 0, got {reserved}", "reserved")
    if length > max_body:
        raise KvtierError(Code.BAD_REQUEST, f"expected at most {max_body} bytes, got {length}", "length")
    return Header(length, verb, request)


def decode_request(verb: int, body: bytes | bytearray | memoryview) -> Message:
    """The request struct in a frame; raises bad_request naming the path of the field that is wrong."""
    decoder = _REQUESTS.get(verb)
    if decoder is None:
        raise KvtierError(Code.BAD_REQUEST, f"verb {verb} is not known to protocol version {VERSION}", "verb")
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise KvtierError(Code.BAD_REQUEST, str(exc), f"verb {verb}") from None


def _code(name: str) -> Code:
    """The Code of that name; internal for one that this version does not know."""
    try:
        return Code(name)
    except ValueError:
        return Code.INTERNAL


def decode_reply(verb: int, body: bytes | bytearray | memoryview, expect: type[Reply]) -> Reply:
    """The reply struct in a frame; raises the KvtierError that an error reply carries."""
    if verb == ERROR_VERB:
        error = _decoded(Error, body)
        raise KvtierError(_code(error.code), error.message, error.field)
    return _decoded(expect, body)


_reply_decoder = functools.cache(functools.partial(msgspec.msgpack.Decoder, strict=True))


def _decoded(expect: type[Reply], body: bytes | bytearray | memoryview) -> Reply:
    """The reply, or internal when it is not what was expected."""
    try:
        reply: Reply = _reply_decoder(expect).decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise KvtierError(Code.INTERNAL, f"reply is not a {expect.__name__}: {exc}", "reply") from None
    return reply
