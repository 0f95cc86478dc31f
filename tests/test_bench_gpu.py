"""bench/gpu.py is one command everywhere: it says what it would do without a GPU, and its own code runs on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvtier import quant
from kvtier.device.find import open_device

BENCH = Path(__file__).resolve().parent.parent / "bench" / "gpu.py"

pytestmark = pytest.mark.skipif(not BENCH.exists(), reason="benches are run from a checkout")


def run(*args: str) -> str:
    """What the bench prints; it must end well."""
    command = [sys.executable, str(BENCH), *args]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(not open_device().reason, reason="there is a GPU: it would be measured")
def test_without_a_gpu_it_says_what_it_would_do():
    """The reason, and every step of what a machine with a GPU would run; exit code 0."""
    out = run()
    assert out.startswith("no GPU: ")
    assert out.count("\n") == 12
    for what in (
        "4 KB to 64 MB",
        "pinned copy",
        "device memcpy",
        "at once",
        "first layer",
        "hit",
        "decode",
        "by the daemon",
        "comes back",
    ):
        assert what in out, what


def test_tiny_runs_every_step_on_whatever_is_there(tmp_path: Path):
    """Each step checks, measures and gives a row, on the CPU in a GPU's place too."""
    rows = tmp_path / "rows.json"
    out = run("--tiny", f"--json={rows}")
    assert "check: every byte is as numpy has it, dequantized values too" in out
    made = msgspec.json.decode(rows.read_bytes())
    cases = [row["case"] for row in made]
    errors = {row["case"]: row for row in made if row["unit"] == "of its bound"}
    assert len(errors) == len(quant.CODECS)
    assert all(row["met"] and row["value"] == row["limit"] > 0.1 for row in errors.values())
    assert len(cases) == len(set(cases))
    for word in (
        "gather int4-kivi",
        "scatter none pages of 4 KiB",
        "sums",
        "load pages of 64 KiB",
        "store blocks of 28 KiB",
        "at once",
        "first layers are there",
        "store by the daemon, blocks of 64 KiB, slots in host",
        "load by the daemon, blocks of 64 KiB, slots in host",
        "store by the daemon, blocks of 4 KiB, slots in device",
        "load by the daemon, blocks of 4 KiB, slots in device",
        "brought down to host by the daemon, blocks of 64 KiB",
        "brought up to the device by the daemon, blocks of 4 KiB",
        "hit to the first layers, pages in host",
        "hit to the first layers, pages on the device",
        "beside a load staged",
        "beside a load few",
        "beside a load on the engine's own stream",
        "beside a load by the daemon",
    ):
        assert any(word in case for case in cases), word


def test_a_step_that_fails_costs_no_other_its_rows():
    """The first run on a GPU tells of all that works there, and of all that does not, and ends with 1."""
    code = (
        "import gpu, gpu_daemon\n"
        "def row(case):\n"
        "    return gpu.make_row('gpu', case, 'ms', {'kvtier': [1.0]})\n"
        "def fails(*_):\n"
        "    yield row('before it failed')\n"
        "    raise RuntimeError('an illegal memory access')\n"
        "gpu.check = gpu.link = fails\n"
        "gpu.within = gpu.overlap = gpu_daemon.launched = gpu_daemon.engines = lambda *_: [row('well')]\n"
        "gpu.main()\n"
    )
    paths = os.pathsep.join([str(BENCH.parent), str(BENCH.parents[1])])
    command = [sys.executable, "-c", code, "--tiny"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}, timeout=60)
    assert done.returncode == 1
    assert "failed: check, link" in done.stderr
    assert done.stderr.count("an illegal memory access") == 2
    assert done.stdout.count("| before it failed |") == 2
    assert done.stdout.count("| well |") == 4
