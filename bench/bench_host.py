"""How fast an engine in another process stores, loads and looks up pages through the real daemon.

    python bench/bench_host.py [--rivals] [--json FILE]

Limits: memcpy of the same bytes between buffers of the same sizes, a round trip of the same bytes over a bare Unix
socket. A put with checksum is the whole of it: match, reserve, copy, commit, and the daemon's word; without, the copy
into reserved slots alone. A get is acquire, copy, release.
"""

from __future__ import annotations

from host_daemon import kvtierd
from host_matching import crowd, matching
from host_moving import Rate, moving
from measure import Bench


def main() -> None:
    """Run every measurement."""
    bench = Bench("host", "How fast an engine stores, loads and looks up pages through the daemon.")
    with kvtierd() as where:
        matching(bench, where)
        crowd(bench, where)
    usual = [Rate(32 << 10, 4096), Rate(2 << 20, 64), Rate(32 << 20, 4)]
    for size in [Rate(32 << 10, 32), Rate(1 << 20, 2)] if bench.tiny else usual:
        moving(bench, size)
    bench.finish()


if __name__ == "__main__":
    main()
