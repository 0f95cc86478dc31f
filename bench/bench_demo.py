"""Time to the first token of the demo's requests: SmolLM2-135M under transformers, four ways through the same prompts.

    python bench/bench_demo.py [--json FILE] [--tiny]

The median of all requests of a way (chat turns, few-shot batch, forks), beside that of the engine without kvtier.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
from pathlib import Path

from measure import OURS, Bench, skipped
from rich.console import Console

from kvtier.demo.__main__ import WAYS, four_ways


def main() -> None:
    """Run the demo's ways once."""
    bench = Bench("demo", __doc__ or "")
    try:
        import torch

        from kvtier.demo import model, scenario
    except ImportError as exc:
        skipped("demo", exc)
    else:
        torch.set_num_threads(1)
        asked = scenario.requests()[: 4 if bench.tiny else None]
        with tempfile.TemporaryDirectory() as home, contextlib.redirect_stderr(io.StringIO()):
            ways, broken = four_ways(Console(file=io.StringIO()), model.load(), asked, Path(home))
        assert not broken, broken
        times = {name: statistics.median(answer.ttft_s * 1e3 for answer in answers) for name, answers in ways.items()}
        for name, took in times.items():
            case = f"first token, median of {len(asked)} requests, {WAYS[name]}"
            bench.add(case, "ms", {OURS: [took], WAYS["without"]: [times["without"]]}, limit=WAYS["without"])
    bench.finish()


if __name__ == "__main__":
    main()
