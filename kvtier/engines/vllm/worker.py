"""The workers' side of KvtierConnector: copies between vLLM's paged KV and the daemon's memory."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final

import msgspec
import numpy as np

from kvtier.client import Cache, Client, Lease, Reservation
from kvtier.client.layout import Bytes
from kvtier.engines.vllm import reload, served
from kvtier.engines.vllm.formats import changed, ranks_of, slices_of, spec_of
from kvtier.engines.vllm.messages import Blocks, Done, Formats, Load, Plan, Save, Weights
from kvtier.engines.vllm.planes import NULL_BLOCK, Plane
from kvtier.types import KvtierError, stretches

COPY_S: Final = 0.004
"""Loads between steps copy so long in each step, so that requests that run wait no longer."""

_log = logging.getLogger("kvtier.vllm")


class Worker:
    """One tensor-parallel rank: loads what the scheduler has leased, saves into what it has reserved."""

    def __init__(self, client: Client, vllm_config: Any, kv_cache_config: Any) -> None:
        if getattr(vllm_config, "lora_config", None) is not None:
            served.watch()
        self._client = client
        self._configs = (vllm_config, kv_cache_config)
        self._pool = ThreadPoolExecutor(2, "kvtier")
        self._copier = ThreadPoolExecutor(1, "kvtier-save")
        self._copies: list[Future[None]] = []
        """Blocks are read until these are over."""
        self._told: deque[tuple[str, int]] = deque()
        """What threads have to tell: (counter, or served or dropped; number)."""
        self._pending: deque[Load] = deque()
        self._done = Done()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._failures = 0
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
        backends = {layers[name].get_attn_backend().get_name() for name in names if name in layers}
        self.spec = spec_of(vllm_config, kv_cache_config, backends, str(kv_cache_config.kv_cache_layout))
        self._slices = slices_of(self.spec, rank // self._replicas, shards)
        self._open = (rank, vllm_config.parallel_config.tensor_parallel_size)
        self._moves_before_fence = bool(getattr(vllm_config, "use_v2_model_runner", False))
        """vLLM's second model runner zeroes and copies blocks before it says that a step begins."""
        self._planes = [
            Plane([tensors[name] for name in group.layer_names], kv_cache_config.num_blocks, spec, part)
            for group, spec, part in zip(
                kv_cache_config.kv_cache_groups, self.spec.groups, self._slices or [None] * len(names), strict=False
            )
        ]
        self._cache = self._opened(0)
        reload.watch()
        self._writes = reload.count()

    def formats(self) -> Formats:
        """For the scheduler's side: the cache."""
        return Formats(msgspec.msgpack.encode(self.spec), self._replicas)

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
            self._cache = self._opened(plan.epoch)
        for load in plan.loads:
            if load.later:
                self._pending.append(load)
            elif not self._load(load):
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
        for share in plan.drops:
            held = self._adopt(share)
            if self._planes[0].on_cpu:
                self._copier.submit(self._drop, held)  # after what is still being copied into it
            else:
                self._drop(held)
        for save in plan.saves:
            held = self._adopt(save.share)
            if isinstance(held, Reservation) and not held.writes:
                continue  # a replica of this rank writes it
            if not sound or not isinstance(held, Reservation) or not self._has(save.weights):
                self._give_up(save, held)
            elif not self._planes[0].on_cpu:
                self._copy(save, held)  # in the order of the stream that computes
            else:
                self._copies = [copy for copy in self._copies if not copy.done()]
                self._copies.append(self._copier.submit(self._copy, save, held))
        if self._moves_before_fence:
            self.fence()

    def between(self) -> None:
        """Go on with loads that no step waits for, for a few milliseconds."""
        until = time.monotonic() + COPY_S
        while self._pending and time.monotonic() < until:
            load = self._pending.popleft()
            self._received.add(load.request)
            if not self._load(load):
                self._failed.add(load.request)

    def fence(self) -> None:
        """Return when nothing reads or writes vLLM's blocks any more but what a coming step says."""
        copies, self._copies = self._copies, []
        wait(copies)

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
        self._pool.shutdown()
        self._client.close()

    # -- copies --------------------------------------------------------------------------------------------------

    def _load(self, load: Load) -> bool:
        """Whether every page of a lease is in its blocks."""
        lease = self._adopt(load.share)
        try:
            good = (
                isinstance(lease, Lease)
                and self._has(load.weights)
                and all(self._load_group(lease, group, load.first, row) for group, row in enumerate(load.blocks))
            )
        except KvtierError as exc:
            _log.warning("a lease cannot be read: %s", exc)
            good = False
        self._done.leases[load.lease] += 1
        self.counts["loads"] += 1
        self.counts["loads_failed"] += not good
        return good

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

    def _load_group(self, lease: Lease, group: int, first: int, row: Sequence[int]) -> bool:
        """Whether the pages that a group keeps blocks for are all there and right."""
        plane = self._planes[group]
        for begin, end in stretches(row, NULL_BLOCK):
            at = begin
            for pages in self._pages(lease, group, first + begin, end - begin):
                pages.flags.writeable = True  # torch takes no other; it is only read
                plane.load(row[at : at + len(pages)], pages)
                at += len(pages)
            if at < end:
                return False
            self.counts["pages_loaded"] += end - begin
        return not lease.lost

    def _pages(self, lease: Lease, group: int, first: int, count: int) -> Iterator[Bytes]:
        """Rows of whole items: in place, or where one lies in several slots, copied together."""
        if self._cache.groups[group].slots_per_item == 1:
            yield from lease.views(group, first, count)
            return
        for page in range(first, first + count):
            item = np.empty((1, self.spec.groups[group].item_bytes), np.uint8)
            if not lease.read(group, page, item[0]):
                return
            yield item

    def _copy(self, save: Save, held: Reservation) -> None:
        """Copy a save out, and have it committed."""
        try:
            done = all(self._copy_group(held, group, save.first, row) for group, row in enumerate(save.blocks))
        except Exception:  # noqa: BLE001 - the thread goes on with the next
            _log.exception("a save is given up")
            done = False
        if done:
            self._pool.submit(self._commit, held)
        else:
            self._give_up(save, held)

    def _copy_group(self, held: Reservation, group: int, first: int, row: Sequence[int]) -> bool:
        """Whether this process's part of every page of a group is in its slots."""
        plane = self._planes[group]
        if self._cache.groups[group].slots_per_item > 1:
            wanted = [at for at in range(len(row)) if held.wants(group, first + at)]
            if any(row[at] == NULL_BLOCK for at in wanted):
                return False
            for at in wanted:
                item = np.empty((1, self.spec.groups[group].item_bytes), np.uint8)
                plane.save(row[at : at + 1], item)
                held.write(group, first + at, plane.mine(item[0]))
            self._told.append(("pages_saved", len(wanted)))
            return not held.lost
        for at, pages in held.views(group, first, len(row)):
            blocks = row[at : at + len(pages)]
            if NULL_BLOCK in blocks:
                return False
            plane.save(blocks, pages)
            self._told.append(("pages_saved", len(pages)))
        return not held.lost

    def _give_up(self, save: Save, held: Lease | Reservation | None) -> None:
        """A save that will not be."""
        self._told += [("saves_dropped", 1), ("dropped", save.reservation)]
        self._drop(held)

    def _drop(self, held: Lease | Reservation | None) -> None:
        """Say that this process will not write into a reservation."""
        if isinstance(held, Reservation):
            self._pool.submit(held.abort)

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
