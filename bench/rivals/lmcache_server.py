"""LMCache's multiprocess server, for vLLM engines that attach to it by LMCacheMPConnector."""

import os
import sys
from pathlib import Path

from lines import daemon, free_port, listens, serve, wait_for

os.environ.update(LMCACHE_TRACK_USAGE="false", DO_NOT_TRACK="1", LMCACHE_DISABLE_BANNER="1", LMCACHE_LOG_LEVEL="ERROR")


class Server:
    """Keeps chunks of 32 tokens in shared memory: vLLM's block on a CPU."""

    def __init__(self, stack):
        self.number, http = free_port(), free_port()
        flags = ["--supported-transfer-mode", "engine_driven", "--shm-name", f"kvtier_rival_{os.getpid()}"]
        flags += ["--l1-size-gb", "1", "--eviction-policy", "LRU", "--disable-observability", "--chunk-size", "32"]
        where = ["--host", "127.0.0.1", "--port", self.number, "--http-host", "127.0.0.1", "--http-port", http]
        daemon(stack, [Path(sys.executable).parent / "lmcache", "server", *where, *flags])
        wait_for(lambda: listens(self.number), 50)

    def port(self):
        """Where it listens."""
        return self.number


serve(Server)
