"""A real kvtierd and an engine that stores through it, both in one trace: says on stdout what became durable.

`python -m tests.daemonwriter FOLDER SEED SECONDS [FAULT]`: the folder is the disk tier's. Lines: `+ n pages`, prompt n
is durable; `- n`, it is to be evicted (said before it is asked for); `= pid` the daemon is ready.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kvtier import wire
from kvtier.client import Client
from kvtier.control.call import Admin
from tests.diskwriter import say
from tests.engines import content, spec, tokens

CAPACITY = 8 << 20
PER_RUN = 200
"""Prompts of one run at most: they fit the disk, whatever earlier runs left there."""
SPEC = spec()
ITEM = SPEC.groups[0].item_bytes
ROOT = Path(__file__).resolve().parent.parent


def prompt(n: int) -> bytes:
    """Page keys of a prompt; two of three have a beginning in common with others."""
    pages = random.Random(n).randint(1, 12)
    own = tokens(*range(1000 * n + 1000, 1000 * n + 1000 + pages))
    return own if n % 3 == 0 else tokens(*range(n % 7 + 1)) + own


def start(folder: Path, home: Path, fault: list[str]) -> subprocess.Popen:
    """The daemon, with one step of its writes left out where a fault is named."""
    module = ["-m", "kvtier.daemon"]
    if fault:
        leave_out = f"from tests.diskwriter import skip; skip({fault[0]!r}); from kvtier.daemon import main; main()"
        module = ["-c", leave_out]
    flags = [
        f"--socket-path={home / 'd.sock'}",
        f"--disk-path={folder}",
        f"--disk-bytes={CAPACITY}",
        "--policy=lru",  # a full disk gives up what earlier runs left: nothing that this one said is durable
    ]
    with (home / "log").open("wb") as log:
        words = [sys.executable, *module, *flags, "--http-port=0", "--host-bytes=16MiB", "--host-slab-bytes=1MiB"]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, cwd=ROOT)


class Load:
    """Prompts stored, flushed and evicted at random."""

    def __init__(self, client: Client, home: Path, seed: int) -> None:
        self.cache = client.open(SPEC)
        self.admin = Admin(home / "admin.sock", 30.0)
        self.rng = random.Random(seed)
        self.next = seed * PER_RUN
        self.loose: list[int] = []
        self.durable: list[int] = []

    def put(self, evict: Callable[[], None] | None = None) -> None:
        """Store one prompt, of which the first pages may be there; evict something just before it is committed."""
        n, self.next = self.next, self.next + 1
        keys = prompt(n)
        pages = len(keys) // SPEC.stride
        with self.cache.match(keys).reserve(0, pages) as reserved:
            for page in range(reserved.pages):
                if reserved.view(0, page) is not None:
                    reserved.write(0, page, content(keys[: (page + 1) * SPEC.stride], 0, ITEM))
            if evict is not None:
                evict()
            if reserved.pages == pages and reserved.commit() == pages:
                self.loose.append(n)

    def flush(self) -> None:
        """What was stored so far is durable, and said so."""
        if self.cache.flush(20.0):
            for n in self.loose:
                say("+", n, len(prompt(n)) // SPEC.stride)
            self.durable += self.loose
            self.loose.clear()

    def evict(self) -> None:
        """Take prompts that share nothing out of every tier, so that their cells are used again."""
        for n in [n for n in self.durable if n % 3 == 0][:4]:
            self.durable.remove(n)
            say("-", n)
            of = wire.Prompt(self.cache.cache_id.hex(), tokens=prompt(n))
            self.admin.ask(wire.Evict(of, "all", 10_000), wire.Info)


def main() -> None:
    """Store for a while."""
    folder, seed, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        daemon = start(folder, home, sys.argv[4:])
        try:
            with Client(home / "d.sock", instance="writer", timeout_s=30.0) as client:
                while not client.ping():
                    assert daemon.poll() is None, (home / "log").read_text()
                    time.sleep(0.05)
                load = Load(client, home, seed)
                say("=", daemon.pid)
                end = time.monotonic() + seconds
                while time.monotonic() < end and load.next < (seed + 1) * PER_RUN:
                    for _ in range(load.rng.randint(1, 6)):
                        load.put()
                    load.flush()
                    if load.rng.random() < 0.7:
                        load.put(load.evict)  # what it writes may take the cells that are being freed
                say("=", load.next - seed * PER_RUN, "prompts")
        finally:
            daemon.terminate()
            daemon.wait(60)


if __name__ == "__main__":
    main()
