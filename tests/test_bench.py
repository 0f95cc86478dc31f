"""Every bench runs at tiny sizes and writes rows that others can read; rivals that do not run here are named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "bench"
BENCHES = sorted(path.stem for path in BENCH.glob("bench_*.py"))

pytestmark = pytest.mark.skipif(not BENCHES, reason="benches are run from a checkout")


class Row(msgspec.Struct):
    """What readers of the JSON rely on."""

    bench: str
    case: str
    value: float
    unit: str
    limit: float | None
    ratio: float | None
    rivals: dict[str, float]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """A bench as `make bench` would run it, with this checkout's package."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580, check=False
    )


def rows_of(done: subprocess.CompletedProcess[str], file: Path) -> list[Row]:
    """The rows of a bench that ended well."""
    assert done.returncode == 0, done.stdout + done.stderr
    return msgspec.json.decode(file.read_bytes(), type=list[Row])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow, pytest.mark.timeout(600)] if n != "bench_index" else ())
        for n in BENCHES  # that of engines starts three of them, where vLLM is there
    ],
)
def test_a_bench_writes_rows_of_positive_numbers(name: str, tmp_path: Path) -> None:
    """Each row has a value, and where it names a limit the ratio is value over limit; a difference may be below 0."""
    file = tmp_path / "rows.json"
    rows = rows_of(run(f"bench/{name}.py", "--tiny", f"--json={file}"), file)
    assert rows
    assert {row.bench for row in rows} == {name.removeprefix("bench_")}
    assert len({row.case for row in rows}) == len(rows)
    assert all(row.unit and (row.value > 0 or row.unit == "% more") for row in rows)
    assert all((row.limit is None) == (row.ratio is None) for row in rows)
    assert all(row.ratio == pytest.approx(row.value / row.limit) for row in rows if row.limit is not None)
    assert any(row.limit is not None for row in rows)


def test_the_runner_writes_the_tables_with_machine_and_command(tmp_path: Path) -> None:
    """RESULTS.md says what was measured on what, by which command."""
    out = tmp_path / "RESULTS.md"
    done = run("bench/run.py", "--tiny", "--only=index", f"--out={out}")
    assert done.returncode == 0, done.stdout + done.stderr
    text = out.read_text()
    for part in ("# Results", "- Machine:", "- Python", "--tiny --only=index", "- Commit:", "## index", "memcmp"):
        assert part in text
    assert "## host" not in text


@pytest.fixture
def rival(monkeypatch: pytest.MonkeyPatch) -> object:
    """The module that runs rivals."""
    monkeypatch.syspath_prepend(str(BENCH))
    import rival

    return rival


def test_a_rival_without_its_program_is_refused_by_name(rival) -> None:
    """What is missing is said, and nothing is installed."""
    absent = rival.Rival("Nothing", "nothing", "nothing.py", programs=("no-such-program-here",))
    with pytest.raises(rival.RivalFailed, match="no-such-program-here is not installed"):
        rival.Running(absent)


def test_a_rival_that_fails_says_why_and_leaves_no_process(rival, tmp_path: Path, monkeypatch) -> None:
    """An error in its process comes back as its reason; the process is reaped."""
    monkeypatch.setattr(rival, "SCRIPTS", tmp_path)
    (tmp_path / "wrong.py").write_text(
        f"import sys; sys.path.append({str(BENCH / 'rivals')!r})\n"
        "from lines import serve\n"
        "class Wrong:\n"
        "    def __init__(self, stack): pass\n"
        "    def double(self, number): return 2 * number\n"
        "    def fail(self): raise ValueError('no such luck')\n"
        "serve(Wrong)\n"
    )
    with rival.Running(rival.Rival("Wrong", "wrong", "wrong.py")) as running:
        assert running.ask("double", number=21) == 42
        with pytest.raises(rival.RivalFailed, match="no such luck"):
            running.ask("fail")
    assert running._process.returncode is not None


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> object:
    """The module that benches share."""
    monkeypatch.syspath_prepend(str(BENCH))
    import measure

    return measure


def test_a_rival_that_fails_midway_is_left_out_and_the_rest_goes_on(measure, capsys) -> None:
    """One project's crash costs its own column only."""
    numbers = iter([1.0])

    def rival() -> float:
        for number in numbers:
            return number
        raise measure.RivalFailed("gone")

    samples = measure.interleave({"kvtier": lambda: 2.0, "rival": rival}, 3)
    assert samples == {"kvtier": [2.0, 2.0, 2.0], "rival": [1.0]}
    assert "skipped: rival: gone" in capsys.readouterr().out


def test_a_median_says_how_sure_it_is(measure) -> None:
    """The bounds are the numbers between which the true median lies in 95 of 100 cases."""
    assert measure.middle([float(n) for n in range(100)]) == (49.5, 40.0, 59.0)
    assert measure.middle([3.0]) == (3.0, 3.0, 3.0)


def test_the_best_of_a_rate_is_its_highest_and_of_a_time_its_lowest(measure) -> None:
    """Ratios and targets follow the unit's direction."""
    target = measure.Target("ratio", ">=", 0.75)
    samples = {"kvtier": [3.0, 4.0], "memcpy": [8.0, 5.0], "rival": [1.0, 2.0]}
    rate = measure.make_row("b", "c", "GB/s", samples, limit="memcpy", target=target)
    assert (rate.value, rate.worst, rate.limit, rate.ratio, rate.rivals) == (4.0, 3.0, 8.0, 0.5, {"rival": 2.0})
    assert rate.met is False
    time = measure.make_row("b", "c", "us", samples, limit="memcpy", target=measure.Target("value", "<=", 3))
    assert (time.value, time.worst, time.limit, time.ratio, time.rivals) == (3.0, 4.0, 5.0, 0.6, {"rival": 1.0})
    assert time.met is True
