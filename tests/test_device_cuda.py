"""The CUDA device where there is cupy but no GPU: its calls are cupy's, and their failures are ours."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="cupy is not installed")
if cupy.is_available():
    pytest.skip("there is a GPU: tests/test_gpu.py runs it", allow_module_level=True)

import driverkit
from kvtier.device import cuda
from kvtier.device.base import Facts
from kvtier.device.find import open_device
from kvtier.device.host import HostBuffer, HostDevice
from kvtier.device.libcuda import LibCuda
from kvtier.device.ops import summed
from kvtier.types import Code, KvtierError


@pytest.fixture
def device() -> Any:
    """A CudaDevice that was never opened."""
    made = cuda.CudaDevice.__new__(cuda.CudaDevice)
    made.ordinal, made.facts, made._modules, made.node = 0, Facts("none", bytes(16), 1, 90), {}, None
    return made


def test_without_a_driver_the_cpu_takes_its_place():
    """Looking for a GPU does not raise: it gives the CPU, and the reason."""
    found = open_device()
    assert isinstance(found.device, HostDevice)
    assert "no CUDA driver" in found.reason
    assert "cudaError" in found.reason


def test_a_cupy_that_cannot_be_imported_is_a_reason():
    """It makes its folder for kernels when it is imported, in a home that may be read-only: the CPU takes its place."""
    code = "from kvtier.device.find import open_device; print(open_device().reason)"
    environment = {"HOME": "/proc/nowhere", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("cupy cannot be imported: "), done.stderr


def test_a_gpu_that_does_not_open_is_a_reason(monkeypatch: pytest.MonkeyPatch):
    """Another process has it for itself, say: the CPU takes its place, and the driver's words say why."""
    monkeypatch.setattr(cuda, "missing", lambda: "")
    found = open_device()
    assert isinstance(found.device, HostDevice)
    assert "opening the GPU: cudaError" in found.reason


CALLS: dict[str, Callable[[Any], Any]] = {
    "open": lambda device: cuda.CudaDevice(),
    "stream": lambda device: device.stream(urgent=True),
    "take": lambda device: device.take(4096),
    "pin": lambda device: device.pin(4096),
    "register": lambda device: device.register(np.zeros(4096, np.uint8)),
    "unregister": lambda device: device.unregister(np.zeros(4096, np.uint8)),
    "copy": lambda device: device.copy(0, 0, 4, device.adopt(0)),
    "record": lambda device: device.adopt(0).record(),
    "synchronize": lambda device: device.adopt(0).synchronize(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_fails_says_what_it_was_doing(name: str, device: Any):
    """Each call reaches cupy with arguments that it takes, and the driver's refusal comes back as io."""
    with pytest.raises(KvtierError, match="cudaError") as caught:
        CALLS[name](device)
    assert caught.value.code is Code.IO


RAW: dict[str, Callable[[], Any]] = {
    "malloc": lambda: cuda.runtime.malloc(64),
    "free": lambda: cuda.runtime.free(64),
    "hostAlloc": lambda: cuda.runtime.hostAlloc(64, cuda.MAPPED),
    "freeHost": lambda: cuda.runtime.freeHost(64),
    "hostRegister": lambda: cuda.runtime.hostRegister(64, 64, cuda.MAPPED),
    "hostUnregister": lambda: cuda.runtime.hostUnregister(64),
    "streamCreateWithPriority": lambda: cuda.runtime.streamCreateWithPriority(cuda.runtime.streamNonBlocking, -1),
    "streamSynchronize": lambda: cuda.runtime.streamSynchronize(0),
    "streamWaitEvent": lambda: cuda.runtime.streamWaitEvent(0, 0),
    "eventCreateWithFlags": lambda: cuda.runtime.eventCreateWithFlags(
        cuda.runtime.eventDisableTiming | cuda.runtime.eventBlockingSync
    ),
    "eventRecord": lambda: cuda.runtime.eventRecord(0, 0),
    "eventSynchronize": lambda: cuda.runtime.eventSynchronize(0),
    "memcpyAsync": lambda: cuda.runtime.memcpyAsync(0, 0, 4, cuda.runtime.memcpyDefault, 0),
    "deviceGetAttribute": lambda: cuda.runtime.deviceGetAttribute(cuda.HOST_TABLES, 0),
    "deviceGetPCIBusId": lambda: cuda.runtime.deviceGetPCIBusId(0),
    "getDeviceProperties": lambda: cuda.runtime.getDeviceProperties(0),
}


@pytest.mark.parametrize("name", RAW)
def test_cupy_has_the_calls_that_are_used(name: str):
    """Every runtime call that kvtier makes exists in this cupy and takes its arguments: only the driver is missing."""
    with pytest.raises(cuda.runtime.CUDARuntimeError):
        RAW[name]()


def test_an_event_that_cannot_be_asked_is_not_done():
    """A status that is no success is not taken for one."""
    assert cuda.runtime.eventQuery(0) != 0


def test_a_launch_hands_over_words_of_8_bytes():
    """Cupy's launchKernel takes the very arguments that are passed: it goes as far as looking for the driver."""
    words = (ctypes.c_uint64 * 2)(1, 2)
    places = (ctypes.c_void_p * 2)(ctypes.addressof(words), ctypes.addressof(words) + 8)
    with pytest.raises((RuntimeError, KvtierError), match=r"libcuda|cudaError|CUDA_ERROR"), cuda.faults("a launch"):
        cupy.cuda.driver.launchKernel(0, 1, 1, 1, 32, 1, 1, 0, 0, ctypes.addressof(places), 0)


class Never:
    """An event that is not reached."""

    done = False

    def synchronize(self, timeout_s: float | None = None) -> bool:
        assert timeout_s is not None, "waits for ever"
        return False


def test_tables_that_a_stuck_launch_holds_are_not_waited_for_for_ever():
    """The ring is full of a launch that does not end: whoever needs room gets an error, which makes the device sick."""
    tables = cuda.Tables.__new__(cuda.Tables)
    tables.host = tables.there = HostBuffer(4096)
    tables._at, tables._used = 0, deque()
    tables._room(4096)
    tables.sent(Never())
    with pytest.raises(KvtierError, match="did not end a launch"):
        tables._room(4096)


class Runtime:
    """Cupy's runtime as it answers where there is a GPU, by what it notes of each call."""

    eventDisableTiming, eventBlockingSync, streamNonBlocking = 2, 1, 1  # noqa: N815 - cupy's names
    CUDARuntimeError = cuda.runtime.CUDARuntimeError

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        """What was called in which thread."""

    def getDeviceProperties(self, ordinal: int) -> dict[str, Any]:  # noqa: N802
        """A uuid ends at its first zero byte, as Cython makes bytes of an array of chars."""
        return {"name": b"a GPU", "uuid": b"\x90\x01", "major": 9, "minor": 0, "multiProcessorCount": 132}

    def deviceGetPCIBusId(self, ordinal: int) -> str:  # noqa: N802
        return "0000:3B:00.0"

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> int:
            self.calls.append((name, threading.get_ident()))
            return 4096

        return call


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Runtime]:
    """A device by such a runtime and the driver of tests/vmm_driver.c."""
    driverkit.use(monkeypatch)
    runtime = Runtime()
    monkeypatch.setattr(cuda, "runtime", runtime)
    monkeypatch.setattr(cuda, "Tables", lambda device: None)
    return cuda.CudaDevice(1), runtime


def test_a_gpu_keeps_all_bytes_of_its_uuid(opened: tuple[Any, Runtime]):
    """One in sixteen has a zero within, and cupy's own answer ends there: what names it in frames has all 16."""
    device, _ = opened
    assert len(device.facts.uuid) == 16
    assert LibCuda().ordinal(device.facts.uuid) == 1


def test_events_and_streams_that_go_in_any_thread_leave_it_the_gpu_that_it_had(opened: tuple[Any, Runtime]):
    """The runtime would make a context on the first GPU in a thread that never said which: it is not asked there."""
    device, runtime = opened
    held = [device.stream()]
    held.append(held[0].record())
    library, before = LibCuda(), LibCuda()._cuda.vmm_dropped()
    seen = []

    def let_go() -> None:
        held.clear()
        seen.append(driverkit.current(library))

    thread = threading.Thread(target=let_go)
    thread.start()
    thread.join()
    assert [name for name, ident in runtime.calls if ident == thread.ident] == []
    assert library._cuda.vmm_dropped() - before == 2
    assert seen == [0]


@pytest.mark.parametrize("error", [RuntimeError("Failed to find CUDA headers"), PermissionError("kernel_cache")])
def test_a_kernel_that_cannot_be_made_is_io(opened: tuple[Any, Runtime], monkeypatch: pytest.MonkeyPatch, error: Any):
    """No NVRTC, no headers, no folder for what is compiled: refused by name, as what the driver refuses."""

    def fail(**_: Any) -> Any:
        raise error

    monkeypatch.setattr(cuda.cupy, "RawModule", fail)
    with pytest.raises(KvtierError, match=f"compiling sums.cu: {error}") as caught:
        opened[0].compile([summed(np.zeros(1, np.uint64), 4096, 0)])
    assert caught.value.code is Code.IO


def test_a_kernel_is_looked_up_once(opened: tuple[Any, Runtime], monkeypatch: pytest.MonkeyPatch):
    """Each look-up asks the driver anew, which a launch must not pay for."""
    asked = []

    def get_function(name: str) -> Any:
        asked.append(name)
        return SimpleNamespace(kernel=SimpleNamespace(ptr=77))

    monkeypatch.setattr(cuda.cupy, "RawModule", lambda **_: SimpleNamespace(get_function=get_function))
    op = summed(np.zeros(1, np.uint64), 4096, 0)
    opened[0].compile([op, op])
    opened[0].compile([op])
    assert asked == ["sum_slots"]


def test_shared_memory_is_whole_blocks_of_the_drivers(opened: tuple[Any, Runtime]):
    """A handle shares the blocks of 2 MiB that an allocation lies in: nothing else of this process is in them."""
    device, runtime = opened
    library, at, sizes = LibCuda(), ctypes.c_uint64(), []

    def malloc(size: int) -> int:
        sizes.append(size)
        with library.current(1):
            library.call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size))
        return at.value

    runtime.malloc = malloc
    shared = device.share((3 << 20) + 4096)
    assert sizes == [4 << 20]
    told = shared.exported
    assert (told.allocation, told.offset, told.size) == (4 << 20, 0, (3 << 20) + 4096)
    with library.current(1):
        library.call("cuMemFree_v2", at)
