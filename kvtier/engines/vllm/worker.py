"""The workers' side of KvtierConnector: copies between vLLM's paged KV and the daemon's memory."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final

import msgspec

from kvtier.client import Cache, Client, Lease, Reservation
from kvtier.engines.vllm import reload, served
from kvtier.engines.vllm.copies import Arrival, Arrived, Loading
from kvtier.engines.vllm.formats import changed, ranks_of, slices_of, spec_of
from kvtier.engines.vllm.messages import Blocks, Done, Formats, Plan, Save, Weights
from kvtier.engines.vllm.planes import NULL_BLOCK
from kvtier.engines.vllm.ways import copies_of
from kvtier.types import KvtierError

COPY_S: Final = 0.004
"""Loads between steps copy so long in each step, so that requests that run wait no longer."""
PART_BYTES: Final = 16 << 20
"""Of such a load: after so much the clock is looked at."""

LEFT: Final = 4
"""Caches of before the latest resets that are remembered."""

_log = logging.getLogger("kvtier.vllm")


class Worker:
    """One tensor-parallel rank: loads what the scheduler has leased, saves into what it has reserved."""

    def __init__(
        self, client: Client, vllm_config: Any, kv_cache_config: Any, copy: str = "auto", *, device: bool = False
    ) -> None:
        """`copy`: how pages are copied (`ways.WAYS`). `device`: use the daemon's device tier where kernels copy."""
        if getattr(vllm_config, "lora_config", None) is not None:
            served.watch()
        self._client = client
        self._way = copy
        self._wants_device = device
        self._configs = (vllm_config, kv_cache_config)
        self._pool = ThreadPoolExecutor(2, "kvtier")
        self._copier = ThreadPoolExecutor(1, "kvtier-save")
        self._ends: list[Callable[[], None]] = []
        """What gives the memory of copies back."""
        self._reading: list[Future[None]] = []
        """Blocks are read until these are over."""
        self._told: deque[tuple[str, int]] = deque()
        """What threads have to tell: (counter, or served or dropped; number)."""
        self._pending: deque[Loading] = deque()
        """Loads between steps, as far as they were not begun."""
        self._arriving: list[Loading] = []
        """Loads whose leases are in use, and those between steps that are not over."""
        self._done = Done()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._failures = 0
        self._left: deque[Cache] = deque(maxlen=LEFT)
        """What the cache was before resets: slots of it may still have to be given back."""
        self._changed = ""
        self._resets = 0
        self._computed = True
        """Whether there is KV of since the last reset; before the first, the cache's name says which weights."""
        self._stale = False
        """Weights were written, and the scheduler's side was not told: nothing is loaded or saved until it is."""
        self.counts: Counter[str] = Counter()

    def register(self, tensors: dict[str, Any]) -> None:
        """Learn where the KV lies, and open the cache that it belongs to."""
        vllm_config, kv_cache_config = self._configs
        self._replicas, shards = ranks_of(vllm_config, kv_cache_config)
        rank = vllm_config.parallel_config.rank % vllm_config.parallel_config.tensor_parallel_size
        layers = vllm_config.compilation_config.static_forward_context
        names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
        backends = {name: layers[name].get_attn_backend().get_name() for name in names if name in layers}
        self.spec = spec_of(vllm_config, kv_cache_config, backends, str(kv_cache_config.kv_cache_layout))
        self._slices = slices_of(self.spec, rank // self._replicas, shards)
        self._part = max(1, PART_BYTES * shards // sum(group.item_bytes for group in self.spec.groups))
        self._open = (rank, vllm_config.parallel_config.tensor_parallel_size)
        self._moves_before_fence = bool(getattr(vllm_config, "use_v2_model_runner", False))
        """vLLM's second model runner zeroes and copies blocks before it says that a step begins."""
        groups = [[tensors[name] for name in group.layer_names] for group in kv_cache_config.kv_cache_groups]
        parts = self._slices or (None,) * len(groups)
        blocks = kv_cache_config.num_blocks
        self._free()
        self._copies = copies_of(groups, blocks, self.spec.groups, parts, self._copier, self._way)
        self._ends.append(self._copies.close)
        self._cache = self._opened(0)
        self._device = self._wants_device and bool(self._copies.uuid) and self._maps()
        reload.watch(vllm_config.model_config)
        self._writes = reload.count()

    def _free(self) -> None:
        """Let go of what copies have taken, if any has."""
        while self._ends:
            self._ends.pop()()

    def _maps(self) -> bool:
        """Whether the daemon's device memory is mapped here, on this GPU, for KV whose items lie in one slot each."""
        one = bool(self._cache.groups) and all(group.slots_per_item == 1 for group in self._cache.groups)
        mapped = one and self._client.map_device(self._copies.uuid)
        if not mapped:
            _log.warning("pages go by host memory: %s", self._client.device.reason if one else "no daemon, or states")
        return mapped

    def formats(self) -> Formats:
        """For the scheduler's side: the cache."""
        return Formats(msgspec.msgpack.encode(self.spec), self._replicas, self._device)

    def _opened(self, epoch: int) -> Cache:
        rank, world = self._open
        spec = changed(self.spec, self._changed) if self._changed else self.spec
        return self._client.open(spec, rank=rank, world=world, slices=self._slices, epoch=epoch)

    # -- a step --------------------------------------------------------------------------------------------------

    def load(self, plan: Plan) -> None:
        """Load what this step computes with; queue what may come between steps."""
        self._notice_writes(plan)
        if plan.changed != self._changed or plan.epoch > self._cache.epoch:
            self._changed = plan.changed
            self._left.append(self._cache)
            self._cache = self._opened(plan.epoch)
        for load in plan.loads:
            loading = Loading(load)
            self._arriving.append(loading)
            if load.later:
                self._pending.append(loading)
                continue
            self._load(loading, load.pages)
            if not loading.good:
                self._bad_blocks |= {block for row in load.blocks for block in row if block != NULL_BLOCK}
                self._failures += 1
                self._done.failures[self._open[0]] = self._failures

    def save(self, plan: Plan) -> None:
        """Have this step's pages copied out and committed.

        Nothing that was planned before the scheduler knew of a failed load: such a step has computed with KV that is
        not there. No step waits for the copies, but one in which a block that they read is given to something else,
        and each where vLLM would write into such a block before it says so.
        """
        sound = plan.heard.get(self._open[0], 0) == self._failures
        caches = (self._cache, *self._left)
        for share in plan.drops:
            self._copier.submit(self._drop_share, share, caches)  # after what is still being copied into it
        for save in plan.saves:
            held = self._adopt(save.share)
            if isinstance(held, Reservation) and not held.writes:
                continue  # a replica of this rank writes it
            if not sound or not isinstance(held, Reservation) or not self._has(save.weights):
                self._give_up(save, held)
            else:
                self._save(save, held)
        if self._moves_before_fence:
            self.fence()

    def between(self) -> None:
        """Go on with loads that no step waits for, for a few milliseconds."""
        until = time.monotonic() + COPY_S
        while self._pending and time.monotonic() < until:
            self._load(self._pending[0], self._part)
            if self._pending[0].begun:
                self._pending.popleft()
        arriving, self._arriving = self._arriving, []
        for loading in arriving:
            if not loading.here():
                self._arriving.append(loading)
                continue
            load = loading.load
            self._done.leases[load.lease] += 1
            if load.later:
                self._received.add(load.request)
                self._failed |= set() if loading.good else {load.request}

    def fence(self) -> None:
        """What vLLM does next may write into any block but those that a coming step says."""
        self._copies.fence()
        reading, self._reading = self._reading, []
        wait(reading)

    # -- what is told --------------------------------------------------------------------------------------------

    def take_received(self) -> tuple[set[str], set[str]]:
        """Requests whose loads between steps are over, and those of them that failed."""
        received, self._received = self._received, set()
        failed, self._failed = self._failed, set()
        return received, failed

    def take_bad_blocks(self) -> set[int]:
        """Blocks that were to be loaded in this step and were not."""
        found, self._bad_blocks = self._bad_blocks, set()
        return found

    def take_done(self) -> Done | None:
        """What the scheduler's side waits for."""
        done, self._done = self._done, Done()
        while self._told:
            what, number = self._told.popleft()
            if what == "served":
                done.served.add(number)
            elif what == "dropped":
                done.dropped.add(number)
            else:
                self.counts[what] += number
        return done if done != Done() else None

    def take_counts(self) -> dict[str, int]:
        """Counters since the last call."""
        counts, self.counts = self.counts, Counter()
        return dict(counts)

    def close(self) -> None:
        """End what runs, and let go."""
        self._copier.shutdown()
        self._free()
        self._pool.shutdown()
        self._client.close()

    # -- copies --------------------------------------------------------------------------------------------------

    def _load(self, loading: Loading, pages: int) -> None:
        """Begin to copy the next pages of a lease, at most so many, into their blocks."""
        load, first = loading.load, loading.done
        lease = self._adopt(load.share)
        arrival: Arrival = Arrived(0, good=False)
        try:
            if isinstance(lease, Lease) and self._has(load.weights):
                blocks = blocks_of(load.blocks, first, first + pages)
                arrival = self._copies.load(lease, load.first + first, blocks, later=load.later)
        except KvtierError as exc:
            _log.warning("a lease cannot be read: %s", exc)
        loading.add(arrival, min(pages, load.pages - first))
        self.counts["loads"] += loading.begun
        self.counts["loads_failed"] += not arrival.good
        self.counts["pages_loaded"] += arrival.pages

    def _notice_writes(self, plan: Plan) -> None:
        """Weights that were written between two steps are another model's, unless all was forgotten meanwhile."""
        writes = reload.count()
        if plan.resets != self._resets:
            self._stale = self._computed = False
        elif writes != self._writes and self._computed:
            self._stale = True
            _log.warning("weights were written: nothing is cached until reset_prefix_cache(reset_connector=True)")
        self._resets, self._writes, self._computed = plan.resets, writes, self._computed or plan.computes
        if self._stale:
            self._done.changed = plan.resets

    def _has(self, weights: Weights | None) -> bool:
        """Whether this process computes with the weights that keys were made of: the model's, and an adapter's."""
        if self._stale:
            return False
        if weights is None or served.serves(*weights):
            return True
        if served.known(weights.number):  # else it was not needed yet, and the request is computed
            self._done.strange.add(weights.number)
        return False

    def _adopt(self, share: bytes) -> Lease | Reservation | None:
        """What the scheduler's side holds; None where it is of another epoch by now."""
        try:
            return self._cache.adopt(share)
        except KvtierError as exc:
            _log.warning("nothing is read or written: %s", exc)
            return None

    def _save(self, save: Save, held: Reservation) -> None:
        """Begin to copy a save out; a thread ends it and has it committed."""
        try:
            ended = self._copies.save(held, save.first, save.blocks)
        except KvtierError as exc:  # its memory cannot be mapped: no reason to end the engine's step
            _log.warning("a save is given up: %s", exc)
            self._give_up(save, held)
            return
        future = self._copier.submit(self._end, save, held, ended)
        if self._copies.aside:
            self._reading = [copy for copy in self._reading if not copy.done()]
            self._reading.append(future)

    def _end(self, save: Save, held: Reservation, ended: Callable[[], int | None]) -> None:
        """What a save brought, in the thread."""
        try:
            pages = ended()
        except Exception:  # noqa: BLE001 - the thread goes on with the next
            _log.exception("a save is given up")
            pages = None
        if pages is None:
            self._give_up(save, held)
        else:
            self._told.append(("pages_saved", pages))
            self._pool.submit(self._commit, held)

    def _give_up(self, save: Save, held: Lease | Reservation | None) -> None:
        """A save that will not be."""
        self._told += [("saves_dropped", 1), ("dropped", save.reservation)]
        self._drop(held)

    def _drop(self, held: Lease | Reservation | None) -> None:
        """Say that this process will not write into a reservation."""
        if isinstance(held, Reservation):
            self._pool.submit(held.abort)

    def _drop_share(self, share: bytes, caches: Sequence[Cache]) -> None:
        """The same of what the scheduler's side gave up, in the thread, whichever of some epochs it is of."""
        for cache in caches:
            with contextlib.suppress(KvtierError):  # not of this one
                self._drop(cache.adopt(share))
                return

    def _commit(self, held: Reservation) -> None:
        """Say that it is written; in a thread of its own, as the daemon sums it before it answers."""
        try:
            if held.commit() >= held.pages:
                self._told.append(("served", held.number))
        except KvtierError as exc:
            _log.warning("a commit was refused: %s", exc)


def blocks_of(table: Sequence[Sequence[int]], first: int, end: int) -> Blocks:
    """The blocks of pages [first, end) in every group."""
    return tuple(row[first:end] for row in table)
