"""The scheduler's side of KvtierConnector: matches, leases and reservations, none of which a step waits for.

Verbs run in threads. A step waits a few milliseconds in all for what it has asked; what is not there by then is asked
for again in a later step (a lookup) or given up (a save). While the daemon is away everything is a miss.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final

import msgspec

from kvtier.client import Cache, Client, Path, Reservation
from kvtier.engines.vllm.asked import Asked, given, loaded_from
from kvtier.engines.vllm.finding import Finder
from kvtier.engines.vllm.formats import changed
from kvtier.engines.vllm.holdings import Holdings
from kvtier.engines.vllm.keys import Keys
from kvtier.engines.vllm.media import Media
from kvtier.engines.vllm.messages import Done, Formats, Load, Plan, Save, booted
from kvtier.engines.vllm.outcomes import outcome
from kvtier.engines.vllm.planes import NULL_BLOCK
from kvtier.identity import CacheSpec
from kvtier.types import Kind, Tier, bad

STEP_S: Final = 0.003
"""What one step waits for the daemon, all requests together."""
TOKEN_S: Final = 10e-6
"""And more for each token that it computes: far less than computing it takes, and time for what it is to save."""
LOOKUPS: Final = 32
"""Threads that look up: each waits for the disk with one request."""
THREADS: Final = 8
"""And that ask for room: none of them keeps a look-up waiting."""
RESERVE_MS: Final = 500
"""Giving pages back may wait so long for room to be made; meanwhile steps go on."""
LATER_BYTES: Final = 32 << 20
"""A load of more is copied between steps, so that requests that run do not wait for it."""

_log = logging.getLogger("kvtier.vllm")


class Scheduler:
    """Decides what is loaded and saved; owns leases and reservations, which workers adopt."""

    def __init__(self, client: Client, world: int) -> None:
        self._client = client
        self._world = world
        self._pool = ThreadPoolExecutor(LOOKUPS, "kvtier-find")
        self._room = ThreadPoolExecutor(THREADS, "kvtier-room")
        self._held = Holdings()
        self._media = Media()
        self._asked: dict[str, Asked] = {}
        self._loads: list[Load] = []
        self._read: set[int] = set()
        """Blocks that were to be saved since the last fence: workers may still be reading them."""
        self._heard: dict[int, int] = {}
        self._left_s = STEP_S
        self._cache: Cache | None = None
        self._resets = 0
        self._stale = False
        """Workers' weights were written, and nobody has said so yet."""
        self._changed = ""
        """Once the weights have changed: what no other engine calls its cache."""
        self.counts: Counter[str] = Counter()

    def agree(self, formats: Sequence[Formats]) -> None:
        """Open the cache that all workers have opened; raises bad_request where they differ, or are elsewhere."""
        if {each.host for each in formats} != {booted()}:
            raise bad("workers", "all on the host of vLLM's scheduler, as its daemon's memory is")
        specs = {each.spec for each in formats}
        if len(specs) != 1:
            raise bad("workers", "KV of one format", len(specs))
        spec = msgspec.msgpack.decode(specs.pop(), type=CacheSpec)
        self._finder = Finder(Keys(spec))
        self._size = spec.page_tokens
        self._item_bytes = sum(group.item_bytes for group in spec.groups)
        self._one_group = len(spec.groups) == 1
        self._replicated = any(each.replicas > 1 for each in formats)  # one may compute with what another lacks
        self._states = {number for number, group in enumerate(spec.groups) if group.kind is Kind.STATE}
        """Groups that keep recurrent state: only blocks that a step has ended at hold any."""
        self._cache = self._client.open(spec)
        self._device = all(each.device for each in formats) and self._client.map_device()
        """Whether leases and reservations may name slots of the daemon's device tier."""

    # -- lookups -------------------------------------------------------------------------------------------------

    def begin(self, request: Any) -> None:
        """A request has come: bring what of it is on disk to host while it waits, and lease nothing yet."""
        shown = self._media.show(request)
        if request.resumable:  # a streaming session may take tokens back, and shows more later
            self._media.blind()
        elif self._cache is not None and not self._stale:
            asked = Asked(request, Path(self._cache, request.request_id, ""), shown)
            self._asked[request.request_id] = asked
            shown.items.add_done_callback(lambda _: self._warm(asked))

    def _warm(self, asked: Asked) -> None:
        """Match a request for the first time; in any thread."""
        with contextlib.suppress(RuntimeError):  # the engine ends
            asked.warming = self._pool.submit(self._finder.warm, asked, self._whole_pages(asked.request))

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed` that can be loaded, and whether between steps; None: ask again."""
        asked = self._asked.get(request.request_id)
        if asked is None or not asked.loads:
            return 0, False
        if not self._over(asked.shown.items):
            return None, False
        if asked.lease is not None:
            self._client.link.look()
            if asked.lease.lost:  # while the request waited for blocks
                self._let_go(asked)
        if asked.lease is None:
            if asked.lookup is None:
                if asked.warming is not None and not self._over(asked.warming):
                    return None, False
                self._drop_reservation(asked)
                if Finder.nothing(asked, self._whole_pages(request)):
                    return 0, False
                asked.lookup = self._pool.submit(self._finder.find, asked, self._whole_pages(request))
            if not self._over(asked.lookup):
                return None, False
            asked.lease = outcome(asked.lookup, None)
            if asked.lease is None:
                asked.lookup = None
                return 0, False
        pages = min(asked.lease.pages, self._whole_pages(request))
        tokens = max(0, pages * self._size - computed)
        return tokens, bool(tokens) and self._later(tokens)

    def _later(self, tokens: int) -> bool:
        """Whether a load goes between steps: large ones, and all where only whole requests can be said to fail."""
        return self._replicated or not self._one_group or tokens // self._size * self._item_bytes > LATER_BYTES

    def _whole_pages(self, request: Any) -> int:
        """Pages of the tokens that a request has, leaving one token to compute."""
        return (int(request.num_tokens) - 1) // self._size

    # -- loads ---------------------------------------------------------------------------------------------------

    def allocated(self, request: Any, table: Sequence[Sequence[int]], tokens: int) -> None:
        """Blocks are there for `tokens` more tokens than vLLM had itself: plan their load, or let go."""
        asked = self._asked.get(request.request_id)
        if asked is None:
            return
        lease = asked.lease
        if lease is None or not tokens:  # vLLM may go on while a look-up runs
            self._let_go(asked)
            return
        asked.lease = asked.lookup = None
        pages = min(lease.pages, self._whole_pages(request))
        first = pages - tokens // self._size
        blocks = tuple(list(row[first:pages]) for row in table)
        self._loads.append(
            Load(request.request_id, lease.number, lease.share(), first, blocks, self._later(tokens), asked.weights)
        )
        self._held.lend(lease, self._world)
        asked.plan = (first, pages)
        self.counts["tokens_hit"] += tokens

    def sources(self, request: Any, tokens: int) -> dict[Tier, int]:
        """Tokens of the load by the tier that the pages were in."""
        asked = self._asked.get(request.request_id)
        found = {} if asked is None else loaded_from(asked, self._size)
        return found if sum(found.values()) == tokens else {}

    # -- saves ---------------------------------------------------------------------------------------------------

    def plan(self, output: Any) -> Plan:
        """What the workers do in this step."""
        loads, self._loads = tuple(self._loads), []
        fence = self._reused(output, loads)
        self._left_s += TOKEN_S * output.total_num_scheduled_tokens
        saves = self._saves(output) if self._cache is not None else ()
        self._left_s = STEP_S
        epoch = self._cache.epoch if self._cache is not None else 0
        computes = bool(output.total_num_scheduled_tokens)
        heard = dict(self._heard)
        return Plan(self._changed, epoch, self._resets, computes, fence, loads, saves, self._held.drops(), heard)

    def _reused(self, output: Any, loads: Sequence[Load]) -> bool:
        """Whether blocks that may still be being saved are given to something else in this step.

        vLLM does not say of every block that it moves a state to; there, all saves end before the next step.
        """
        if not self._read:
            return False
        if not self._states and all(self._read.isdisjoint(row) for row in given(output, loads)):
            return False
        self._read.clear()
        return True

    def _saves(self, output: Any) -> tuple[Save, ...]:
        """Pages that are complete after this step: reserve them all at once, then see which are granted in time.

        A request that goes on and keeps its blocks is saved with its next step: nobody waits.
        """
        ends = self._ends(output)
        for name, end in ends.items():
            asked = self._asked[name]
            shown = asked.shown.items.done()
            if asked.reserving is None and end > asked.saved and asked.saves and shown:
                table = output.kv_connector_block_state.get_block_ids(name)
                asked.reserving = self._room.submit(self._reserve, asked, end, table)
        saves = []
        for name in ends:
            asked = self._asked[name]
            if asked.reserving is None or (self._one_group and asked.goes_on and not asked.reserving.done()):
                continue
            sure = self._media.sure(asked.shown)
            if sure is None or not self._over(asked.reserving):  # an item of this name may be another in this step
                continue
            if not sure:
                asked.saves = False
                self._drop_reservation(asked)
                continue
            held, asked.reserving = outcome(asked.reserving, None), None
            if held is None:
                asked.saves = False
                continue
            save = self._save(asked, held, output.kv_connector_block_state.get_block_ids(name), ends[name])
            saves += [save] if save else []
        return tuple(saves)

    def _ends(self, output: Any) -> dict[str, int]:
        """Pages of each scheduled request whose KV is certain after this step and whose tokens are known now.

        Of those only that have more than they had, or wait for slots: most of a step's requests add a token to a page.
        """
        cached, scheduled, size = output.scheduled_cached_reqs, output.num_scheduled_tokens, self._size
        before = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        before += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        ends = {}
        for name, computed in before:
            asked, end = self._asked.get(name), computed + scheduled[name]
            if asked is not None and (end // size > asked.saved or asked.reserving is not None):
                drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
                ends[name] = min(end - drafts, asked.request.num_tokens) // size
        return ends

    def _reserve(self, asked: Asked, end: int, table: Sequence[Sequence[int]]) -> Reservation:
        """Slots for the pages that are not there yet, up to `end`; in a thread."""
        with asked.lock:
            self._finder.extend(asked, end)
            path = asked.path
            first = max(path.pages, min(asked.saved, path.pages + path.pending))
            asked.saved = max(first, end)
            if first >= end or not asked.saves:
                return Reservation(path.cache, first, None)
            asked.wants = [
                (group, [page for page in range(first, end) if row[page] != NULL_BLOCK])
                for group, row in enumerate(table)
                if group in self._states or NULL_BLOCK in row[first:end]
            ]
            held = path.reserve(first, end - first, asked.wants, wait_ms=RESERVE_MS, device=self._device)
            asked.saved = first + held.pages if held.pages else end  # nothing granted: not before the next page
            return held

    def _save(self, asked: Asked, held: Reservation, table: Sequence[Sequence[int]], end: int) -> Save | None:
        """What the workers write; None where nothing was granted, or pages of it are not computed (any more).

        Where no worker was there when it was granted, as after a restart of the daemon's, the daemon takes the
        scheduler for the writer: given up, which also makes the workers join, and asked for again. So it is where a
        block that was there when it was asked for is not any more, as those of states soon are.
        """
        if not held.pages:
            return None
        there = dict(asked.wants)
        pages = range(held.start, held.start + held.pages)
        gone = any(row[page] == NULL_BLOCK for group, row in enumerate(table) for page in there.get(group, pages))
        if held.writes or gone or held.start + held.pages > end:
            asked.saved = held.start
            self._held.abort(held)
            return None
        self._held.promise(held)
        blocks = tuple(list(row[held.start : held.start + held.pages]) for row in table)
        self._read.update(*blocks)
        self._read.discard(NULL_BLOCK)
        self.counts["pages_reserved"] += held.pages
        return Save(held.number, held.share(), held.start, blocks, asked.weights)

    # -- what comes back -----------------------------------------------------------------------------------------

    def heard(self, done: Done) -> None:
        """What workers have told."""
        self._held.heard(done)
        if done.strange:
            self._finder.keys.distrust(done.strange)
        if done.changed == self._resets:
            self._stale = True
            self._end_all()
        self._heard |= done.failures

    def failed(self, names: set[str]) -> None:
        """Loads between steps failed: these requests are computed."""
        for name in names:
            if name in self._asked:
                self._asked[name].loads = False

    def finished(self, name: str) -> None:
        """A request is over, however it ended."""
        asked = self._asked.pop(name, None)
        if asked is not None:
            self._drop_reservation(asked)
            self._let_go(asked)
            self._room.submit(Finder.forget, asked)  # which waits for what a thread asks for the request

    def reset(self, *, kept: bool = False) -> bool:
        """The weights have changed, to what nobody can say: this engine's KV is its own from now on.

        Others keep what they share; KV that this engine has made with its old weights is neither served to it nor
        stored any more. `kept`: vLLM goes on with such KV, so that nothing is known of what comes until it does not.
        """
        self._end_all()
        self._stale = kept
        if kept:
            _log.warning("vLLM keeps KV from before the reset: nothing is cached until one succeeds")
            return False
        self._resets += 1
        if self._cache is not None and self._changed:
            self._cache.reset()
        elif self._cache is not None:
            self._changed = secrets.token_hex(16)
            self._cache = self._client.open(changed(self._cache.spec, self._changed))
        return True

    def _end_all(self) -> None:
        """Neither load nor save anything for the requests that are there."""
        for asked in self._asked.values():
            asked.saves = asked.loads = False
            self._drop_reservation(asked)
            self._let_go(asked)

    def take_counts(self) -> dict[str, int]:
        """Counters since the last call."""
        counts, self.counts = self.counts, Counter()
        return dict(counts)

    def close(self) -> None:
        """Let go of everything."""
        self._media.close()
        for pool in (self._pool, self._room):
            pool.shutdown(cancel_futures=True)
        self._held.close()
        self._client.close()

    # -- threads -------------------------------------------------------------------------------------------------

    def _over(self, future: Future[Any]) -> bool:
        """Whether a thread is through, waiting for what is left of this step's few milliseconds."""
        if future.done():
            return True
        began = time.monotonic()
        done, _ = wait([future], self._left_s)
        self._left_s = max(0.0, self._left_s - (time.monotonic() - began))
        return bool(done)

    def _drop_reservation(self, asked: Asked) -> None:
        """Give up what was reserved for a request and not handed to the workers."""
        if asked.reserving is not None:
            if not asked.reserving.cancel():
                asked.reserving.add_done_callback(self._held.abort_found)
            asked.reserving = None

    def _let_go(self, asked: Asked) -> None:
        """Give back what is leased for a request, or will be once its look-up is over."""
        if asked.lease is not None:
            self._held.release(asked.lease)
        elif asked.lookup is not None and not asked.lookup.cancel():
            asked.lookup.add_done_callback(self._held.release_found)
        asked.lease = asked.lookup = None
