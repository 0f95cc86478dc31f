"""The file tiers beside kvtier's disk tier in bench_disk.py, at equal durability: theirs is synced too."""

from __future__ import annotations

from host_rivals import LMCACHE
from measure import Bench, RivalFailed, Samples, Subject, interleave, skipped
from rival import Rival, Running

RIVALS = (
    Rival("lifeboatcache 0.1.11 + BLAKE3", "lifeboat", "disk_lifeboat.py", (("lifeboatcache==0.1.11", "blake3"),)),
    Rival("vLLM 0.33 fs tier", "vllm-fs", "disk_vllm.py", (("--no-deps", "vllm==0.33.0"),)),
    Rival("LMCache 0.5.6 fs_native O_DIRECT", "lmcache", "disk_lmcache.py", LMCACHE),
)


def beside(bench: Bench, writes: Samples, reads: Samples, page: int, total: int, ours: tuple[Subject, Subject]) -> None:
    """Add rounds of each rival that was asked for and runs here, between rounds of our own."""
    pages = total // page
    for rival in RIVALS if bench.rivals else ():
        try:
            with Running(rival, page, pages, bench.seed) as running:

                def speed(op: str, running: Running = running) -> float:
                    return total / running.ask(op) / 1e9

                found = interleave({"kvtier": ours[0], rival.name: lambda: speed("put")}, bench.rounds(3))
                back = interleave({"kvtier": ours[1], rival.name: lambda: speed("get")}, bench.rounds(3))
        except RivalFailed as exc:
            skipped(f"{rival.name}, pages of {page >> 10} KiB", exc)
            continue
        writes[rival.name], reads[rival.name] = found[rival.name], back[rival.name]
