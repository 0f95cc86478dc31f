"""Runs the demo: four ways through the same requests, and the checks. Exit code 0 and `demo: ok` only if all hold."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}

from rich.console import Console

from kvtier import __version__
from kvtier.output import printing

if TYPE_CHECKING:
    from kvtier.demo.model import Subject
    from kvtier.demo.run import Answer
    from kvtier.demo.scenario import Request

PAGE_TOKENS: Final = 32
HOST, DISK = "64MiB", "512MiB"
WAYS: Final = {
    "without": "without kvtier",
    "cold": "cold: an empty daemon",
    "warm": "warm: another engine",
    "restart": "after kill -9 and restart",
}


def main() -> None:
    """Run all, print, and exit 1 naming what did not hold."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    logging.basicConfig(level="ERROR")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 130)
    began = time.monotonic()
    console.print(f"kvtier {__version__}: loading the model")
    import torch  # noqa: PLC0415 - takes seconds: after the first line is out

    from kvtier.demo import checks, model, scenario, show  # noqa: PLC0415

    # More threads would share the cores with the daemon and with whoever else is here, and wait for each other.
    torch.set_num_threads(1)
    subject, asked = model.load(), scenario.requests()
    console.print(f"{subject.title}; one of {os.cpu_count()} cores; tiers: host {HOST}, disk {DISK}")
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as home:
        ways, broken = four_ways(console, subject, asked, Path(home))
    console.print(show.turns(ways, asked), show.summary(ways))
    broken += checks.same_tokens(ways, asked)
    broken += checks.shared_prefixes_hit(ways, asked, PAGE_TOKENS)
    broken += checks.everything_hits("warm", ways, asked, PAGE_TOKENS)
    broken += checks.everything_hits("restart", ways, asked, PAGE_TOKENS)
    broken += checks.comes_from_disk(ways["restart"])
    said = subject.decode(ways["restart"][9].tokens)
    console.print(f"{len(asked)} requests, four ways, {time.monotonic() - began:.0f} s; one answer: {said!r}")
    for sentence in broken:
        console.print(f"failed: {sentence}", markup=False)
    console.print("demo: failed" if broken else "demo: ok")
    sys.exit(bool(broken))


def four_ways(
    console: Console, subject: Subject, asked: Sequence[Request], home: Path
) -> tuple[dict[str, list[Answer]], list[str]]:
    """Answers of each way, and what was wrong with the daemon itself."""
    from kvtier.client import Client  # noqa: PLC0415
    from kvtier.demo import run, show  # noqa: PLC0415
    from kvtier.demo.daemon import Daemon  # noqa: PLC0415
    from kvtier.engines.transformers import attach  # noqa: PLC0415

    ways: dict[str, list[Answer]] = {}
    broken: list[str] = []
    with show.progress(console) as progress, Daemon(home, host=HOST, disk=DISK) as daemon:
        for name, title in WAYS.items():
            task = progress.add_task(title, total=len(asked), note="")

            def seen(answer: Answer, task: object = task) -> None:
                note = f"{answer.ttft_s * 1e3:4.0f} ms, {answer.use.hit_ratio:4.0%} loaded"
                progress.update(task, advance=1, note=note)  # type: ignore[arg-type]

            if name == "restart":
                daemon.kill()
                daemon.start()
            if name == "without":
                ways[name] = run.run(subject, asked, None, seen)
                continue
            with Client(daemon.socket, instance=f"demo {name}", timeout_s=5.0) as client:
                kv = attach(subject.model, client=client, name="demo", page_tokens=PAGE_TOKENS)
                ways[name] = run.run(subject, asked, kv, seen)
                if not kv.cache.flush():
                    broken.append(f"{name}: not everything became durable")
        broken += daemon.broken_invariants()
        if daemon.stop():
            broken.append(f"the daemon did not end well: {daemon.log.read_text()[-1000:]}")
    return ways, broken


if __name__ == "__main__":
    with printing("demo"):
        main()
