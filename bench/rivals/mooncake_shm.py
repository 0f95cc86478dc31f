"""Mooncake Store on one host: master, real client, and a dummy client that shares memory with it.

Arguments: page bytes, pages a round, seed. The engine's pages lie in memory that Mooncake allocated.
"""

import ctypes
import os
import sys
from pathlib import Path

import numpy as np
from lines import daemon, free_port, listens, median_us, seconds, serve, wait_for

BIN = Path(sys.executable).parent
SEGMENT = 1 << 30


class Mooncake:
    """Objects by key; the real client copies."""

    def __init__(self, stack):
        page, pages, seed = map(int, sys.argv[1:4])
        master, client = free_port(), free_port()
        local = {"MC_TCP_BIND_ADDRESS": "127.0.0.1"}
        flags = ["--rpc_address=127.0.0.1", f"--metrics_port={free_port()}", "--metrics_host=127.0.0.1"]
        daemon(stack, [BIN / "mooncake_master", f"--rpc_port={master}", "--default_kv_lease_ttl=500", *flags], **local)
        wait_for(lambda: listens(master))
        flags = [f"--global_segment_size={SEGMENT >> 20}MB", "--metadata_server=P2PHANDSHAKE", "--protocol=tcp"]
        where = ["--host=127.0.0.1", f"--port={client}", f"--master_server_address=127.0.0.1:{master}"]
        daemon(stack, [BIN / "mooncake_client", *where, *flags], **local)
        wait_for(lambda: listens(client))
        from mooncake.store import MooncakeDistributedStore

        self.store = MooncakeDistributedStore()
        self.random = np.random.default_rng(seed)
        size = page * pages
        if self.store.setup_dummy(2 * size + (64 << 20), 256 << 20, f"127.0.0.1:{client}"):
            raise OSError("setup_dummy failed")
        self.at = self.store.alloc_from_mem_pool(2 * size)
        self.store.register_buffer(self.at, 2 * size)
        memory = (ctypes.c_uint8 * (2 * size)).from_address(self.at)
        self.source, self.target = np.frombuffer(memory, np.uint8).reshape(2, size)
        self.source[:] = self.random.integers(0, 256, size, np.uint8)
        self.starts, self.sizes, self.size = [self.at + n * page for n in range(pages)], [page] * pages, size
        for _ in range(SEGMENT // size + 1):  # touch the whole segment
            self.put()

    def put(self):
        """Seconds to put a round of pages under new keys."""
        self.keys = [self.random.bytes(16).hex() for _ in self.sizes]
        results = []
        took = seconds(lambda: results.extend(self.store.batch_put_from(self.keys, self.starts, self.sizes)))
        if failed := [code for code in results if code]:
            raise ValueError(f"{len(failed)} of {len(results)} puts failed, first with {failed[0]}")
        return took

    def get(self):
        """Seconds to get them back; the bytes are compared."""
        self.target[:] = 0
        starts = [start + self.size for start in self.starts]
        took = seconds(lambda: self.store.batch_get_into(self.keys, starts, self.sizes))
        if not np.array_equal(self.source, self.target):
            raise ValueError("got other bytes back")
        return took

    def lookup(self, pages, calls):
        """Microseconds to ask for so many keys that are there."""
        keys = self.keys[:pages]
        if self.store.batch_is_exist(keys) != [1] * pages:
            raise ValueError("keys are missing")
        return median_us([lambda: self.store.batch_is_exist(keys)] * calls)


serve(Mooncake)
os._exit(0)  # its threads do not end by themselves
