"""The stores beside kvtier in bench_host.py: what to install, and how they are asked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from measure import Bench, RivalFailed, Subject, skipped
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


@contextlib.contextmanager
def running(bench: Bench, page_bytes: int, pages: Callable[[Rival], int]) -> Iterator[dict[str, Running]]:
    """The rivals that were asked for and run here, by name."""
    with contextlib.ExitStack() as stack:
        found = {}
        for rival in RIVALS if bench.rivals else ():
            try:
                found[rival.name] = stack.enter_context(Running(rival, page_bytes, pages(rival), bench.seed))
            except RivalFailed as exc:
                skipped(rival.name, exc)
        yield found


def moving(rivals: dict[str, Running], op: str, total: int) -> dict[str, Subject]:
    """Rounds of `put` or `get` in GB/s."""
    return {f"{op} {name}": lambda r=rival: total / r.ask(op) / 1e9 for name, rival in rivals.items()}
