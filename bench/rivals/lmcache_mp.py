"""LMCache's multiprocess server with engine-driven transfers over shared memory, through its own bench client.

Arguments: page bytes, pages a round, seed. A page is one chunk; a lookup is of as many tokens as asked for.
"""

import os
import sys
from pathlib import Path

from lines import daemon, free_port, listens, median_us, seconds, serve, wait_for

os.environ.update(LMCACHE_TRACK_USAGE="false", DO_NOT_TRACK="1", LMCACHE_DISABLE_BANNER="1", LMCACHE_LOG_LEVEL="ERROR")
BLOCK = 16
BIN = Path(sys.executable).parent


class LMCache:
    """One worker's paged KV on the CPU, and the server that keeps chunks of it."""

    def __init__(self, stack):
        page, pages, seed = map(int, sys.argv[1:4])
        heads, layers, chunk = shape(page)
        blocks = pages * chunk // BLOCK
        port, http = free_port(), free_port()
        flags = ["--supported-transfer-mode", "engine_driven", "--shm-name", f"kvtier_rival_{os.getpid()}"]
        flags += ["--l1-size-gb", "1", "--eviction-policy", "LRU", "--disable-observability", "--host", "127.0.0.1"]
        where = ["--port", port, "--http-host", "127.0.0.1", "--http-port", http, "--chunk-size", chunk]
        daemon(stack, [BIN / "lmcache", "server", *where, *flags])
        wait_for(lambda: listens(port), 50)
        from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
        from lmcache.cli.commands.bench.server_bench.config import BenchConfig

        spec = f"(2,{2 * blocks + 2},{BLOCK},{heads},128):float16:{layers}"
        tokens = pages * chunk
        fields = ("cpu", "engine_driven", 1, False, tokens, spec, 2 * blocks + 2, BLOCK)
        self.client = ServerBenchClient(
            BenchConfig(f"tcp://127.0.0.1:{port}", f"http://127.0.0.1:{http}", *fields), lambda _: None
        )
        self.client.start()
        stack.callback(self.client.close)
        self.sequence, self.tokens = seed, tokens
        self.put()

    def put(self):
        """Seconds to store a round of pages of a new prompt."""
        self.sequence += 1
        self.request = self.client.create_request(self.sequence, f"r{self.sequence}", "bench")
        self.client.lookup(self.request)
        results = []
        took = seconds(lambda: results.append(self.client.store(self.request, 0, self.request.num_full_tokens)))
        self.sums = self.client.compute_checksums(self.request, 0, self.request.num_full_tokens)
        self.client.end_session(self.request)
        if not results[0].succeeded:
            raise ValueError("the store failed")
        return took

    def get(self):
        """Seconds to retrieve them; LMCache's own checksums are compared. The lookup before is not counted."""
        full = self.request.num_full_tokens
        again = self.client.create_request(self.sequence, f"g{self.sequence}", "bench")
        if not self.client.lookup(again).is_full_hit:
            raise ValueError("the prompt is missing")
        self.client.zero_destination(again, 0, full)
        results = []
        took = seconds(lambda: results.append(self.client.retrieve(again, 0, full)))
        sums = self.client.compute_checksums(again, 0, full)
        self.client.end_session(again)
        if not results[0].succeeded or sums != self.sums:
            raise ValueError("got other bytes back")
        return took

    def lookup(self, pages, calls):
        """Microseconds to look the stored prompt up; `pages` is the other rivals' measure."""
        del pages

        def ask():
            self.sequence += 1
            request = self.client.create_request(self.stored, f"l{self.sequence}", "bench")
            if not self.client.lookup(request).is_full_hit:
                raise ValueError("the prompt is missing")
            self.client.end_session(request)

        self.stored = self.request.sequence_id
        return median_us([ask] * calls)


def shape(page):
    """KV heads, layers and tokens a chunk for so many bytes a chunk."""
    for chunk, heads, layers in ((256, 1, 1), (16, 4, 1), (16, 8, 32), (256, 8, 32)):
        if chunk * heads * layers * 512 == page:
            return heads, layers, chunk
    raise ValueError(f"no shape for pages of {page} bytes")


serve(LMCache)
