"""A CUDA driver for processes without a GPU: tests/vmm_driver.c, built once a run."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from kvtier.device.libcuda import LibCuda

HERE = Path(__file__).parent
_homes: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def built() -> Path:
    """The folder of a libcuda.so.1, for LD_LIBRARY_PATH; skips where no C compiler is."""
    cc, nvcc = shutil.which("gcc"), shutil.which("nvcc")
    if cc is None:
        pytest.skip("no C compiler is here")
    _homes.append(tempfile.TemporaryDirectory())
    out = Path(_homes[-1].name) / "libcuda.so.1"
    include = sorted(Path("/usr/local").glob("cuda*/include/cuda.h")) if nvcc else []
    flags = [f"-I{include[-1].parent}"] if include else []
    command = [cc, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", *flags, "-o", str(out), str(HERE / "vmm_driver.c")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out.parent


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """LibCuda finds that driver in this process."""
    load = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: load(str(built() / name)))


def context(library: LibCuda, ordinal: int = 0) -> int:
    """Have a GPU in this thread, as an engine's has; the context."""
    made = ctypes.c_void_p()
    library.call("cuDevicePrimaryCtxRetain", ctypes.byref(made), ordinal)
    library.call("cuCtxSetCurrent", made)
    return made.value or 0


def current(library: LibCuda) -> int:
    """The context of this thread; 0: none."""
    found = ctypes.c_void_p()
    library.call("cuCtxGetCurrent", ctypes.byref(found))
    return found.value or 0
