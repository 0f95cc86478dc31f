"""The daemon that bench_host.py measures, and the caches it makes there."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvtier.demo.daemon import Daemon
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.types import Kind

PAGE = 64
"""Tokens a page."""
PATIENCE_MS = 20_000


@contextlib.contextmanager
def kvtierd() -> Iterator[Path]:
    """The socket of a daemon of the bench's own, without a disk tier."""
    with tempfile.TemporaryDirectory() as home, Daemon(Path(home), host="1GiB", disk="0") as daemon:
        yield daemon.socket


def spec_of(name: str, page_bytes: int) -> CacheSpec:
    """A cache with pages of so many bytes."""
    return CacheSpec(name, bytes(16), "bfloat16", PAGE, (GroupSpec(Kind.FULL, 1, 1, page_bytes),))
