"""Sends events over ZMQ in a thread of its own, in vLLM's format, keeps the latest for replay.

XPUB: three frames, the topic (empty), the number of the batch (8 bytes, big-endian) and MessagePack of [time, events,
rank]. ROUTER: a request is the first number wanted, the answer every kept batch from there as (number, batch), then the
number -1, which is missing where the reader has too much unread. Who asks for batches that are not kept any more gets
what is kept, and everything is announced anew. Who subscribes, or connects again, gets a batch at once: its number says
what was missed, which nobody would learn who heard nothing more.

A life of the daemon numbers its batches from the time of its start, in microseconds: to whoever heard the life before,
that is a gap, and what it then asks for begins with "nothing holds". Numbers that began at 0 could go on just where the
listener had stopped, who would believe for ever what ended with that life.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np
import zmq

from kvtier.events.feed import Cleared, Event, Removed, Stored
from kvtier.identity import CHAIN_BYTES

KEPT: Final = 10_000
"""Batches that can be replayed,"""
KEPT_BYTES: Final = 256 << 20
"""as far as they are no more than that together: a batch may name the tokens of many long prompts."""
BACKLOG: Final = 4096
"""Batches that wait for the thread; beyond that the rest is dropped, and everything is announced anew."""
MAX_TOPIC: Final = 1024
"""Bytes that a subscription may have."""
MOST_AT_ONCE: Final = 256
"""Subscriptions that are read before something else is done."""
END: Final = (-1).to_bytes(8, "big", signed=True)
_log = logging.getLogger("kvtier.events")


class Publisher:
    """Two sockets and the thread that has them."""

    def __init__(self, publish: str, replay: str, announce: Callable[[], None]) -> None:
        """Bind the endpoints (`replay` may be empty); `announce()` asks for everything anew. Raises zmq.ZMQError."""
        self._context = zmq.Context()
        self._announce = announce
        self._batches: deque[tuple[float, list[Event]]] = deque()
        self._kept: deque[tuple[int, zmq.Frame]] = deque()
        """As frames: whoever asks for them and does not read shares them, and takes no memory of his own."""
        self._kept_bytes = 0
        self._first = self._next = time.time_ns() // 1000
        self._lost = False
        self._closing = False
        try:
            self._out = self._bound(zmq.XPUB, publish)
            self._replay = self._bound(zmq.ROUTER, replay) if replay else None
            self._bell = self._bound(zmq.PULL, "inproc://bell")
            self._ring = self._context.socket(zmq.PUSH)
            self._ring.connect("inproc://bell")
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kvtier-events", daemon=True)
        self._thread.start()

    def _bound(self, kind: int, endpoint: str) -> Any:
        sock = self._context.socket(kind)
        sock.linger = 0
        if kind == zmq.XPUB:
            sock.sndhwm = BACKLOG
            sock.xpub_verbose = True  # all that subscribe are told, not the first one only
            sock.maxmsgsize = MAX_TOPIC
        elif kind == zmq.ROUTER:
            sock.sndhwm = KEPT + 1
            sock.router_mandatory = True  # what does not fit is said, not left out in the middle
        sock.bind(endpoint)
        return sock

    def send(self, when: float, events: list[Event]) -> None:
        """Take a batch; never waits."""
        if len(self._batches) >= BACKLOG:
            self._lost = True
        else:
            self._batches.append((when, events))
        self._wake()

    def _wake(self) -> None:
        try:
            self._ring.send(b"", zmq.NOBLOCK)
        except zmq.Again:
            return  # it rings already

    def close(self) -> None:
        """Send what waits and end."""
        self._closing = True
        self._wake()
        self._thread.join()
        self._ring.close()
        self._context.destroy(linger=0)

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for sock in filter(None, (self._bell, self._out, self._replay)):
            poller.register(sock, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._bell in ready:
                self._bell.recv()
                self._publish()
                if self._closing:
                    return
            if self._out in ready:
                self._welcome()
            if self._replay in ready:
                self._answer()

    def _welcome(self) -> None:
        """Send a batch of nothing where somebody has subscribed."""
        fresh = False
        for _ in range(MOST_AT_ONCE):
            try:
                fresh |= self._out.recv(zmq.NOBLOCK)[:1] == b"\x01"
            except zmq.Again:
                break
        if fresh and self._next > self._first:  # else the first batch, "nothing holds", is still to come
            self._put(time.time(), [])

    def _publish(self) -> None:
        """Send every batch that waits."""
        while self._batches:
            self._put(*self._batches.popleft())
        if self._lost:
            self._lost = False
            _log.warning("events were dropped; everything is announced anew")
            self._announce()

    def _put(self, when: float, events: list[Event]) -> None:
        """Number, keep and send a batch."""
        payload = zmq.Frame(encode(when, events))
        self._keep(payload)
        self._out.send_multipart((b"", self._next.to_bytes(8, "big"), payload), copy=False)
        self._next += 1

    def _keep(self, payload: zmq.Frame) -> None:
        """Keep the next batch for replays; the oldest go."""
        self._kept.append((self._next, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > KEPT or (self._kept_bytes > KEPT_BYTES and len(self._kept) > 1):
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer(self) -> None:
        """Replay from a number on; a request that is no number is ignored."""
        assert self._replay is not None
        who, *_, asked = self._replay.recv_multipart()
        if len(asked) != 8:
            return
        first = int.from_bytes(asked, "big")
        if first > self._next or (self._kept and max(first, self._first) < self._kept[0][0]):
            self._announce()
        rest = [(number.to_bytes(8, "big"), payload) for number, payload in self._kept if number >= first]
        try:
            for frames in (*rest, (END, b"")):
                self._replay.send_multipart((who, b"", *frames), zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as exc:  # it left, or does not read what it asked for: without the end it asks again
            _log.info("a replay ended early: %s", exc)


def encode(when: float, events: list[Event]) -> bytes:
    """One batch as vLLM packs it."""
    return msgspec.msgpack.encode([when, [_packed(event) for event in events], 0])


def _packed(event: Event) -> dict[str, Any]:
    if isinstance(event, Cleared):
        return {"type": "AllBlocksCleared"}
    if isinstance(event, Removed):
        return {"type": "BlockRemoved", "block_hashes": _hashes(event.chains), "medium": event.medium}
    assert isinstance(event, Stored)
    return {
        "type": "BlockStored",
        "block_hashes": _hashes(event.chains),
        "parent_block_hash": _hashes(event.parent)[0] if event.parent else None,
        "token_ids": np.frombuffer(event.keys, "<i4").tolist(),
        "block_size": event.page_tokens,
        "lora_id": None,
        "medium": event.medium,
        "lora_name": None,
    }


def _hashes(chains: bytes) -> list[int]:
    """Names of pages as numbers: the first 8 bytes of their chain keys."""
    found: list[int] = np.frombuffer(chains, "<u8")[:: CHAIN_BYTES // 8].tolist()
    return found
