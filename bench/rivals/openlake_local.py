"""openlake's daemon with its client's shared-memory slab. Arguments: page bytes, pages a round, seed."""

import os
import sys
from pathlib import Path

import numpy as np
import openlake_client
from lines import daemon, folder, free_port, listens, median_us, seconds, serve, wait_for

HEADER = 54  # of each slot
KEY = 54  # bytes of a key
SLAB_GB = 1
FILES = Path(openlake_client.__file__).parent


class Openlake:
    """Pages by key; the client copies, the daemon keeps the index."""

    def __init__(self, stack):
        page, pages, seed = map(int, sys.argv[1:4])
        home, port = folder(stack), free_port()
        config = (FILES / "configs" / "kv_local.toml").read_text()
        config = config.replace("127.0.0.1:9400", f"127.0.0.1:{port}").replace(":9000", f":{free_port()}")
        config = config.replace("cpu_ram_frac     = 0.5", f"capacity_gb = {SLAB_GB}")
        (home / "config.toml").write_text(config)
        before = self.slabs()
        stack.callback(lambda: [slab.unlink() for slab in self.slabs() - before])
        daemon(stack, [FILES / "openlaked", "--config", home / "config.toml"])
        wait_for(lambda: listens(port))
        self.client = openlake_client.Client("local", 2_048 + os.getpid() % 1_000)
        self.client.attach(f"127.0.0.1:{port}", 0, page + HEADER)
        self.random = np.random.default_rng(seed)
        self.source = self.random.integers(0, 256, (pages, page), np.uint8)
        self.target = np.zeros_like(self.source)
        for each in (self.source, self.target):
            self.client.register_memory(each.ctypes.data, each.nbytes)
        self.sizes = [[page]] * pages
        for _ in range((SLAB_GB << 30) // self.source.nbytes + 1):  # touch the whole slab
            self.put()

    @staticmethod
    def slabs():
        """Slabs in shared memory: the daemon leaves its own behind."""
        return set(Path("/dev/shm").glob("openlake*"))

    @staticmethod
    def addresses(array):
        """One list of segments a page."""
        return [[array[at].ctypes.data] for at in range(len(array))]

    def put(self):
        """Seconds to put a round of pages under new keys."""
        self.keys = [self.random.bytes(KEY) for _ in self.sizes]
        results = []
        took = seconds(
            lambda: results.extend(self.client.put_batch(self.keys, self.addresses(self.source), self.sizes))
        )
        if min(results) < 0:
            raise ValueError(f"puts failed: {results[:4]}")
        return took

    def get(self):
        """Seconds to get them back; the bytes are compared."""
        self.target[:] = 0
        took = seconds(lambda: self.client.get_batch(self.keys, self.addresses(self.target), self.sizes))
        if not np.array_equal(self.source, self.target):
            raise ValueError("got other bytes back")
        return took

    def lookup(self, pages, calls):
        """Microseconds to ask for so many keys that are there."""
        keys = self.keys[:pages]
        if self.client.batch_is_exist(keys) != [1] * pages:
            raise ValueError("keys are missing")
        return median_us([lambda: self.client.batch_is_exist(keys)] * calls)


serve(Openlake)
