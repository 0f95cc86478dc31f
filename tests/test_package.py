"""What a user gets: the wheel, installed away from the checkout, with its data files and commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvtier import __version__
from kvtier.sources import names, source
from kvtier.types import KvtierError

ROOT = Path(__file__).resolve().parent.parent
in_checkout = pytest.mark.skipif(not (ROOT / "kvtier" / "__init__.py").exists(), reason="builds from a checkout")


def run(*command: str | Path, cwd: Path) -> str:
    """Output of a command that must succeed, with nothing of this process's Python path in its environment."""
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    done = subprocess.run(
        command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from this checkout."""
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    return next(out.glob("*.whl"))


@in_checkout
@pytest.mark.slow
def test_wheel_carries_every_data_file_of_the_checkout(wheel: Path):
    """CUDA sources and policies lie inside the package in the wheel, and nothing else of the checkout does."""
    inside = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("cuda", "policies"):
        shipped = {
            f"kvtier/{folder}/{path.name}" for path in (ROOT / folder).iterdir() if path.suffix in {".cu", ".py"}
        }
        assert shipped <= inside
    assert "kvtier/cuda/__init__.py" not in inside
    assert {name.split("/")[0] for name in inside} == {"kvtier", f"kvtier-{__version__}.dist-info"}


@in_checkout
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_wheel_works_in_a_clean_environment(wheel: Path, tmp_path: Path):
    """`pip install kvtier.whl` brings all it needs: its commands run where no checkout is importable."""
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    python = venv / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        python,
        "install",
        "-q",
        wheel,
        cwd=tmp_path,
    )
    where = run(python, "-c", "import kvtier; print(kvtier.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(venv)
    for command in ("kvtierctl", "kvtierd"):
        assert __version__ in run(venv / "bin" / command, "--version", cwd=tmp_path)
    shutil.rmtree(venv)


def test_source_finds_what_names_lists():
    """Every file that `names` lists can be had by `source`, wherever this package was installed."""
    for folder in ("cuda", "policies"):
        for name in names(folder):
            assert source(folder, name).is_file()


@pytest.mark.parametrize("name", ["../types.py", "nothing.cu", "", "."])
def test_source_refuses_what_is_not_a_file_of_the_folder(name: str):
    """A name that leaves the folder or that nobody ships is refused by name."""
    with pytest.raises(KvtierError, match="name"):
        source("cuda", name)
