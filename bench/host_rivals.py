"""The stores beside kvtier in bench_host.py: what to install, and how they are asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from measure import Bench, RivalFailed, Samples, Subject, interleave, skipped
from rival import Rival, Running

LMCACHE = (
    ("torch==2.13.0",),
    (
        "numpy<=2.2.6", "numba", "pyyaml", "msgspec", "blake3", "psutil", "pyzmq", "aiohttp", "aiofile", "aiofiles",
        "fastapi", "httpx", "httpx2", "uvicorn", "httptools", "sortedcontainers", "cachetools",
        "prometheus_client<=0.24.1", "safetensors", "py-cpuinfo", "nvtx", "opentelemetry-api<=1.40.0",
        "opentelemetry-sdk", "opentelemetry-exporter-otlp", "opentelemetry-exporter-prometheus<=0.61b0",
        "cryptography", "redis", "grpcio>=1.78", "protobuf<7,>=6.31.1",
    ),
    (
        "--no-deps", "transformers>=5.4", "tokenizers", "huggingface_hub>=1.5", "regex", "tqdm", "packaging",
        "hf-xet", "filelock", "typer", "shellingham", "rich", "pygments", "markdown-it-py", "mdurl",
    ),
    ("--no-deps", "lmcache==0.5.6"),
)  # fmt: skip
"""By itself it would install CUDA's torch; these are what its server needs on a CPU."""

RIVALS = (
    Rival("openlake 0.8.1 local", "openlake", "openlake_local.py", (("openlake-vllm==0.8.1", "numpy"),)),
    Rival(
        "Mooncake 0.3.13 shm",
        "mooncake",
        "mooncake_shm.py",
        (("mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy"),),
    ),
    Rival("LMCache 0.5.6 MP shm", "lmcache", "lmcache_mp.py", LMCACHE),
    Rival("Redis unix", "redis", "redis_unix.py", programs=("redis-server",)),
)


def beside(
    bench: Bench,
    samples: Samples,
    page_bytes: int,
    pages: Callable[[Rival], int],
    ours: Mapping[str, Subject],
    theirs: Callable[[str, Running], dict[str, Subject]],
) -> None:
    """Add rounds of each rival that was asked for and runs here to the samples, between rounds of `ours`.

    One at a time: several of them spin while they are idle.
    """
    for rival in RIVALS if bench.rivals else ():
        try:
            with Running(rival, page_bytes, pages(rival), bench.seed) as running:
                found = interleave({**ours, **theirs(rival.name, running)}, bench.rounds(7))
        except RivalFailed as exc:
            skipped(f"{rival.name}, pages of {page_bytes:,} bytes", exc)
            continue
        for name, numbers in found.items():
            samples.setdefault(name, []).extend(numbers)
