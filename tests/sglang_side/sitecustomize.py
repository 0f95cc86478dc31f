"""Lets the CUDA wheel of SGLang run on a CPU, in every process of it: what it needs of packages that have no CPU build.

Stand-ins for `sgl_kernel` and `torchvision` (no function of theirs is called), for streams and events (everything is
in order on a CPU), for pinned memory, and for the two copies between paged KV and host pages of the layout
page_first_direct. HiCache itself, its pools, threads and trees are SGLang's own.
"""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

STAND_INS = {"torchvision", "sgl_kernel"}


class Anything(type):
    """A class of any name, for annotations and base classes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})

    def __call__(cls, *args: Any, **options: Any) -> Any:
        raise RuntimeError(f"{cls.__name__} has no CPU build")

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


class Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".", maxsplit=1)[0] in STAND_INS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Module:
        module = Module(spec.name)
        module.__path__ = []
        module.__version__ = "0.0.0"
        return module

    def exec_module(self, module: Any) -> None:
        pass


class Event:
    """Everything before it is over."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class Stream:
    """Runs at once."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Runtime:
    """Nothing is pinned."""

    def cudaHostRegister(self, *args: Any) -> int:  # noqa: N802 - CUDA's name
        return 0

    def cudaHostUnregister(self, *args: Any) -> int:  # noqa: N802
        return 0


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    """Host pages of one layer to paged KV."""
    for at in range(0, len(src_indices), page_size):
        page = int(src_indices[at]) // page_size
        for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
            dst[dst_indices[at : at + page_size]] = src[page, layer_id]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Paged KV of all layers, K's first, to host pages."""
    layers = len(src_ptrs) // 2
    for at in range(0, len(src_indices), page_size):
        page = int(dst_indices[at]) // page_size
        for half, dst in enumerate(dst_ptrs):
            for layer, src in enumerate(src_ptrs[half * layers : (half + 1) * layers]):
                dst[page, layer] = src[src_indices[at : at + page_size]]


def rotary() -> None:
    """What SGLang imports of vLLM's for a rotary embedding on no device that it knows, and does not call on a CPU."""
    if importlib.util.find_spec("vllm") is None:
        for name in ("vllm", "vllm._custom_ops"):
            sys.modules[name] = Module(name)
            sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)


def install() -> None:
    sys.meta_path.insert(0, Finder())
    rotary()
    import torch

    # SGLang imports these only where there is CUDA; elsewhere the names are looked up here.
    builtins.transfer_kv_per_layer_direct_pf_lf = transfer_kv_per_layer_direct_pf_lf
    builtins.transfer_kv_all_layer_direct_lf_pf = transfer_kv_all_layer_direct_lf_pf
    torch.cuda.cudart = Runtime
    torch.cpu.Event, torch.cpu.Stream = Event, Stream
    torch.cpu.current_stream = lambda device=None: Stream()


install()
