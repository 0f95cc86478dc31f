"""lifeboatcache's file tier with BLAKE3: a file a chunk, each checked when it is read.

Arguments: page bytes, pages a round, seed.
"""

import os
import shutil
import sys

from disk_files import Files
from lines import folder, serve


class Lifeboat(Files):
    """Chunks through its store."""

    def __init__(self, stack):
        page, pages, seed = map(int, sys.argv[1:4])
        top = folder(stack)
        os.environ["LIFEBOAT_CACHE_HOME"] = str(top)
        super().__init__(stack, top / "kv", page, pages)
        import blake3  # noqa: F401 - without it the store hashes with blake2b, at half the speed
        from lifeboat_cache.config.schema import LifeboatConfig
        from lifeboat_cache.core import ChunkKey
        from lifeboat_cache.integrations.lifeboat_store import LifeboatStore

        tier = {"name": "disk", "type": "filesystem", "enabled": True, "path": str(self.home), "capacity_gb": 50}
        self.config = LifeboatConfig.model_validate({"storage": {"tiers": [tier]}})
        self.make, self.key = LifeboatStore, ChunkKey
        self.kv = self.make(self.config)
        self.seed = seed
        self.data = [os.urandom(page) for _ in range(pages)]
        self.out = [memoryview(bytearray(page)) for _ in range(pages)]

    def name(self, page):
        """A chunk's key."""
        return self.key(f"{self.seed}-{self.round}-{page}".encode().ljust(32, b"-"), "bench")

    def store(self, share):
        """Store chunks and have the queue written."""
        for page in share:
            self.kv.store(self.name(page), self.data[page], tokens=64)
            self.kv.flush()

    def load(self, share):
        """Read chunks, each checked."""
        for page in share:
            if not self.kv.load_into(self.name(page), self.out[page]):
                raise ValueError(f"chunk {page} is missing")

    def forget(self, round_):
        """Begin with an empty folder again."""
        if round_:
            shutil.rmtree(self.home, ignore_errors=True)
            self.home.mkdir(parents=True)
            self.kv = self.make(self.config)


serve(Lifeboat)
