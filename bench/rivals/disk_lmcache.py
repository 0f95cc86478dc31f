"""LMCache's fs_native tier with O_DIRECT, by its own bench: 8 keys a submit, two submits in flight, no checksum.

Arguments: page bytes, pages a round, seed.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from disk_files import Files
from lines import folder, seconds, serve

KEYS, IN_FLIGHT = 8, 2
BIN = Path(sys.executable).parent / "lmcache"
QUIET = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "LMCACHE_LOG_LEVEL": "ERROR"}


class Native(Files):
    """One run of the bench stores and loads; `get` gives the load of the last one."""

    def __init__(self, stack):
        page, pages, _ = map(int, sys.argv[1:4])
        self.top = folder(stack)
        super().__init__(stack, self.top / "kv", page, pages)
        self.rounds = max(pages // (KEYS * IN_FLIGHT), 1)
        self.put()

    def put(self):
        """Seconds of the stores, and of syncing the file system after them."""
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir()
        adapter = json.dumps({"type": "fs_native", "base_path": str(self.home), "use_odirect": True})
        out = self.top / "out.json"
        shape = [
            "--num-keys",
            KEYS,
            "--in-flight",
            IN_FLIGHT,
            "--data-size-kb",
            self.page >> 10,
            "--rounds",
            self.rounds,
        ]
        more = ["--warmup-rounds", 0, "--l1-align-bytes", 4096, "--format", "json", "--output", out, "-q"]
        words = [BIN, "bench", "l2", "--l2-adapter", adapter, *shape, *more]
        subprocess.run(list(map(str, words)), check=True, env={**os.environ, **QUIET}, stdout=subprocess.DEVNULL)
        synced = seconds(self.sync)
        found = json.loads(out.read_text())["metrics"].values()
        took = {each["operation"]: self.seconds(each) for each in found if each.get("operation") in {"Store", "Load"}}
        self.loaded = took["Load"]
        return took["Store"] + synced

    def seconds(self, found):
        """What as many pages as asked for would take at this rate."""
        if found["total_success"] != found["total_keys"]:
            raise ValueError(f"{found['operation']}: {found['total_success']} of {found['total_keys']} keys")
        return found["duration_avg_ms"] / 1e3 * found["rounds"] * self.pages / found["total_keys"]

    def get(self):
        """Seconds of the loads, which pass the page cache by."""
        return self.loaded


serve(Native)
