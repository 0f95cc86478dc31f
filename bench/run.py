"""Runs every bench and writes bench/RESULTS.md.

    python bench/run.py [--rivals] [--only index] [--out FILE]

A bench is a file bench_*.py beside this one that takes --json, --rivals, --rounds, --seed and --tiny.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
from measure import LEGEND, Row, markdown

HERE = Path(__file__).resolve().parent
LIBRARIES = ("numpy", "msgspec", "uvloop", "xxhash", "lmdb", "zstandard")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Run every bench and write bench/RESULTS.md.")
    parser.add_argument("--rivals", action="store_true", help="measure other projects too, in venvs made for them")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that the benches run")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of each measurement (0: each bench's own)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="NAMES", help="such as index,host")
    parser.add_argument("--out", type=Path, default=HERE / "RESULTS.md")
    return parser.parse_args()


def flags(args: argparse.Namespace) -> list[str]:
    """What is passed on to each bench."""
    switches = [f"--{name}" for name in ("rivals", "tiny") if getattr(args, name)]
    return [*switches, f"--rounds={args.rounds}", f"--seed={args.seed}"]


def run(bench: Path, passed: list[str]) -> tuple[list[Row], list[str]]:
    """Rows of a bench and what it skipped; its output is shown as it comes."""
    with tempfile.TemporaryDirectory() as home:
        rows = Path(home) / "rows.json"
        command = [sys.executable, str(bench), f"--json={rows}", *passed]
        skipped = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                if line.startswith("skipped: "):
                    skipped.append(line.removeprefix("skipped: ").strip())
        if process.returncode:
            return [], [f"{bench.name}: it ended with exit code {process.returncode}"]
        return msgspec.json.decode(rows.read_bytes(), type=list[Row]), skipped


def about() -> list[str]:
    """What the numbers were measured on, and how."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return [
        f"- Machine: {models[0] if models else platform.machine()}, {cores} cores, {memory:.0f} GiB",
        f"- System: {platform.system()} {platform.release()}, load {os.getloadavg()[0]:.1f} at the end",
        f"- Python {platform.python_version()}, {', '.join(libraries())}",
        f"- Command: `{' '.join(['python', 'bench/run.py', *sys.argv[1:]])}` (`make bench BENCH_ARGS=...`)",
        f"- Commit: {commit() or 'no checkout'}",
    ]


def libraries() -> list[str]:
    """Libraries that the numbers depend on, with versions."""
    found = []
    for name in LIBRARIES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit that was measured; empty outside a checkout."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def main() -> None:
    """Run them, write the file; exit code 1 where a bench failed."""
    args = arguments()
    wanted = set(filter(None, args.only.split(",")))
    parts, failed = [], False
    for bench in sorted(HERE.glob("bench_*.py")):
        name = bench.stem.removeprefix("bench_")
        if wanted and name not in wanted:
            continue
        rows, skipped = run(bench, flags(args))
        failed |= not rows
        parts += [f"## {name}\n", markdown(rows)]
        if skipped:
            parts.append("Not measured:\n" + "".join(f"\n- {line}" for line in skipped) + "\n")
    args.out.write_text("\n".join(["# Results\n", "\n".join(about()) + "\n", LEGEND + ".\n", *parts]))
    print(f"wrote {args.out}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
