"""Which way the connector copies: by kernels on the GPU that vLLM's KV is on, beside its stream of now; or by torch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier.demo.daemon import Daemon
from kvtier.device import paths
from kvtier.device.find import Found
from kvtier.device.host import HostDevice
from kvtier.device.shuttle import Way
from kvtier.identity import GroupSpec
from kvtier.types import Code, Kind, KvtierError
from lazydevice import LazyDevice, Site
from test_vllm_kernels import Story
from vllmstub import adapters
from weightkit import safetensors

torch = pytest.importorskip("torch")

ORDINAL = 1
"""Of the GPU that these tests have."""


@pytest.fixture
def vllm() -> Iterator[Any]:
    """The adapters' modules."""
    with adapters("scheduler", "messages", "worker", "kernels", "ways") as modules:
        yield modules


class LazyGpu(LazyDevice):
    """A lazy device that an engine has streams on, which have handles."""

    def adopt(self, handle: int) -> Any:
        return self.streams[handle]


class OnGpu(torch.Tensor):
    """KV that says it is on that GPU."""

    device = SimpleNamespace(type="cuda", index=ORDINAL)


@pytest.fixture
def machine(vllm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A machine with a GPU: driver and torch's stream are stand-ins, what is between them is the adapter's own."""
    here = SimpleNamespace(device=LazyGpu(0), stream=0, asked=[])

    def find(ordinal: int) -> Found:
        here.asked.append(ordinal)
        return Found(here.device, "")

    def current(ordinal: int) -> Any:
        here.asked.append(ordinal)
        return SimpleNamespace(cuda_stream=here.stream)

    monkeypatch.setattr(vllm.ways, "open_device", find)
    monkeypatch.setattr(vllm.ways, "state_path", lambda: tmp_path)
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(paths, "SIZES", (4096,))
    monkeypatch.setattr(paths, "COUNTS", (1,))
    return here


# -- a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [None, 0, 3])
def test_the_gpu_is_that_of_the_kv_and_the_stream_that_of_now(
    vllm: Any, machine: SimpleNamespace, tmp_path: Path, index: int | None
):
    """VLLM may compute on another stream in another step; the ways are measured once and kept for the next engine."""
    streams = [machine.device.stream() for _ in range(2)]
    device, stream_of, choose = vllm.ways.engine_device(SimpleNamespace(type="cuda", index=index))
    assert device is machine.device
    for machine.stream in (1, 0):
        assert stream_of() is streams[machine.stream]
    assert set(machine.asked) == {index or 0}
    assert choose(True, 4096, 1) in Way
    (table,) = tmp_path.glob("paths-*.json")
    kept = table.read_bytes()
    vllm.ways.engine_device(SimpleNamespace(type="cuda", index=index))
    assert table.read_bytes() == kept


class OnMachine(Story):
    """The same story, where the adapter finds everything itself."""

    copy = "auto"
    machine: SimpleNamespace

    def make(self, seed: int, without: Site | None) -> LazyDevice:
        self.machine.device, self.machine.stream = LazyGpu(seed, without), 0
        return self.machine.device

    def reach(self, vllm: Any) -> None:
        del vllm
        self.blocks = self.blocks.as_subclass(OnGpu)


def test_kv_on_a_gpu_goes_by_kernels_in_any_legal_order_of_work(
    vllm: Any, daemon: Daemon, machine: SimpleNamespace, tmp_path: Path
):
    """Found as vLLM's worker finds it: what is saved, reused and loaded is right beside the stream that computes."""
    weights = safetensors(tmp_path / "m" / "m.safetensors", {"a": np.ones((4, 8), "<f4")}).parent
    OnMachine.machine = machine
    for seed in range(4):
        told = OnMachine(vllm, daemon, weights, seed)
        try:
            assert type(told.worker._copies).__name__ == "KernelCopies"
            assert not told.tell(), seed
        finally:
            told.close()
    assert set(machine.asked) == {ORDINAL}


def test_what_is_no_gpu_of_ours_goes_by_torch(
    vllm: Any, machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Another maker's device, and a GPU that cupy does not find: said at start."""
    with pytest.raises(KvtierError, match="no kernels for xpu"):
        vllm.ways.engine_device(SimpleNamespace(type="xpu", index=0))
    monkeypatch.setattr(vllm.ways, "open_device", lambda _: Found(machine.device, "cupy is not installed"))
    pool = ThreadPoolExecutor(1)
    tensors = [[torch.zeros(8, 2, 4, 16).as_subclass(OnGpu)]]
    group = GroupSpec(Kind.FULL, 1, 2, 4 * 16 * 4)
    made = vllm.ways.copies_of(tensors, 8, (group,), (None,), pool)
    assert type(made).__name__ == "TorchCopies"
    assert not made.aside  # in the order of vLLM's stream
    assert "cupy is not installed" in caplog.text
    pool.shutdown()


# -- which way ---------------------------------------------------------------------------------------------------------


def test_kv_on_the_cpu_goes_by_torch_unless_it_is_said(vllm: Any):
    """`auto` is torch here; `kernels` has the CPU's device do it; anything else is refused by name."""
    tensors, group = [[torch.zeros(8, 2, 4, 16)]], GroupSpec(Kind.FULL, 1, 2, 4 * 16 * 4)
    pool = ThreadPoolExecutor(1)
    kinds = [type(vllm.ways.copies_of(tensors, 8, (group,), (None,), pool, way)).__name__ for way in vllm.ways.WAYS]
    assert kinds == ["TorchCopies", "KernelCopies", "TorchCopies"]
    with pytest.raises(KvtierError, match="auto, kernels, torch"):
        vllm.ways.copies_of(tensors, 8, (group,), (None,), pool, "fast")
    pool.shutdown()


@pytest.mark.parametrize("kind", ["driver", "compiler"])
def test_what_keeps_kernels_from_it_is_said_and_torch_does_it(
    vllm: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
):
    """No driver, no compiler: a warning at start, and copies by torch; never in a step."""
    group = GroupSpec(Kind.FULL, 1, 2, 4 * 16 * 4)
    pool = ThreadPoolExecutor(1)

    class Elsewhere(vllm.ways.Plane):
        """A plane of another device."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.on_cpu = False

    monkeypatch.setattr(vllm.ways, "Plane", Elsewhere)

    class Uncompiled(HostDevice):
        """A device beside which there is no NVRTC."""

        def compile(self, ops: Any) -> None:
            raise RuntimeError("no NVRTC here")

    tensors, said = [[torch.zeros(8, 2, 4, 16)]], "no CUDA driver" if kind == "driver" else "no NVRTC"

    def device(_: Any) -> Any:
        if kind == "driver":
            raise KvtierError(Code.IO, "cupy finds no CUDA driver or no GPU")
        made = Uncompiled() if kind == "compiler" else HostDevice()
        return made, made.stream, Way.STAGED

    monkeypatch.setattr(vllm.ways, "engine_device", device)
    made = vllm.ways.copies_of(tensors, 8, (group,), (None,), pool)
    assert type(made).__name__ == "TorchCopies"
    assert said in caplog.text
    with pytest.raises((KvtierError, RuntimeError), match=said):
        vllm.ways.copies_of(tensors, 8, (group,), (None,), pool, "kernels")
    pool.shutdown()
