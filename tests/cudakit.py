"""Compiles cuda/ with whatever compiler is here, and runs what comes out on the CPU."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import ptx
from kvtier.device.kernels import Launch, Source, launch
from kvtier.device.ops import Op
from kvtier.sources import source
from ptxparse import Kernel, parse

FLAGS = ("-std=c++17", "-ftz=true")
"""As cupy compiles: it adds -ftz=true whatever one asks for."""
ARCHES = (80, 90, 100, 120)
SOURCES = [
    Source("pages.cu"),
    Source("sums.cu"),
    *(
        Source("quant.cu", (f"ELEMENT={element}", f"CODEC={codec}"))
        for element in ("Bf16", "Fp16")
        for codec in ("Fp8", "Int8", "Int4")
    ),
]


def nvcc() -> str | None:
    """The nvcc that is here, or None."""
    return shutil.which("nvcc")


@functools.cache
def nvrtc() -> Any:
    """NVRTC's library as the wheels nvidia-cuda-nvrtc(-cu12) bring it, or None."""
    spec = importlib.util.find_spec("nvidia")
    for home in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(home).glob("*/lib/libnvrtc.so.*")):
            if "builtins" not in path.name and ".alt." not in path.name:
                return ctypes.CDLL(str(path))
    return None


def compilers() -> list[str]:
    """Names of the compilers that are here."""
    return [name for name, found in (("nvrtc", nvrtc()), ("nvcc", nvcc())) if found]


def _nvrtc_compile(text: str, what: Source, arch: str, more: tuple[str, ...]) -> tuple[bytes, str]:
    """The PTX or cubin that NVRTC makes, and its log."""
    library, program, size = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    assert not library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), what.file.encode(), 0, None, None)
    options = [f"-arch={arch}", *FLAGS, *(f"-D{d}" for d in what.defines), *more]
    failed = library.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*map(str.encode, options))
    )
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    assert not failed, log.value.decode()
    kind = "CUBIN" if arch.startswith("sm_") else "PTX"
    getattr(library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
    out = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{kind}")(program, out)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return out.raw, log.value.decode()


def _nvcc_compile(text: str, what: Source, arch: str, more: tuple[str, ...]) -> tuple[bytes, str]:
    """The PTX or cubin that nvcc makes, and its log."""
    kind = "-cubin" if arch.startswith("sm_") else "-ptx"
    with tempfile.TemporaryDirectory() as home:
        out, code = Path(home) / "out", Path(home) / what.file
        code.write_text(text)
        defines = [f"-D{d}" for d in what.defines]
        command = [
            nvcc(),
            kind,
            f"-arch={arch}",
            *FLAGS,
            *defines,
            *more,
            str(code),
            "-o",
            str(out),
        ]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr
        return out.read_bytes(), done.stderr


@functools.cache
def ptx_text(compiler: str, what: Source, arch: int) -> str:
    """What the compiler emits for one architecture."""
    return to_ptx(compiler, what, arch, source("cuda", what.file).read_text())


def to_ptx(compiler: str, what: Source, arch: int, text: str) -> str:
    """The PTX of a source that may differ from the one in cuda/."""
    made = _nvrtc_compile if compiler == "nvrtc" else _nvcc_compile
    return made(text, what, f"compute_{arch}", ())[0].rstrip(b"\0").decode()


@functools.cache
def kernels(compiler: str, what: Source, arch: int) -> dict[str, Kernel]:
    """The same, ready to run."""
    return parse(ptx_text(compiler, what, arch))


def cubin_log(compiler: str, what: Source, arch: int) -> str:
    """What ptxas says of registers and spills."""
    text = source("cuda", what.file).read_text()
    if compiler == "nvrtc":
        return _nvrtc_compile(text, what, f"sm_{arch}", ("--ptxas-options=-v",))[1]
    return _nvcc_compile(text, what, f"sm_{arch}", ("-Xptxas", "-v"))[1]


def place(made: Launch, memory: ptx.Memory) -> list[int]:
    """A launch's arguments with its tables in memory."""
    return [memory.put(arg) if isinstance(arg, np.ndarray) else arg for arg in made.args]


def run(
    op: Op, memory: ptx.Memory, compiler: str, arch: int, blocks: int = 0, found: dict[str, Kernel] | None = None
) -> ptx.Traffic:
    """Do an operation with the kernel that `launch` picks, on the CPU; `found` has kernels in place of cuda/'s."""
    made = launch(op, 2, blocks)
    kernel = (found or kernels(compiler, made.source, arch))[made.name]
    return ptx.Run(kernel, memory, made.grid, made.block, place(made, memory)).go()
