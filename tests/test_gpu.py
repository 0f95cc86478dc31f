"""The device tests on a real GPU: the same cases, the same answers. Run with -m gpu where there is one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash

from enginekv import EngineKv, Shape, numbers
from kvtier import quant
from kvtier.device import host
from kvtier.device.find import open_device
from kvtier.device.layout import Plan
from kvtier.device.ops import moves, summed
from kvtier.device.shuttle import Shuttle, Way
from test_kernels import LAYOUTS, ODD, QUANTIZED, put_odd_values

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> Any:
    """The GPU, or a skip that says why there is none."""
    device, reason = open_device()
    if reason:
        pytest.skip(reason)
    return device


class Scene:
    """KV in GPU memory with a twin in host memory, and pinned slots with theirs."""

    def __init__(self, gpu: Any, shape: Shape, page_tokens: int, name: str = "none", element: str = "bf16") -> None:
        self.gpu, self.stream = gpu, gpu.stream()
        self.theirs = EngineKv(shape, self.device_memory)
        self.ours = EngineKv(shape, self.host_memory)
        size = len(self.ours.bytes)
        raw = numbers(size, 0, element) if name != "none" else np.random.default_rng(0).integers(0, 256, size)
        self.ours.bytes[:] = raw
        self.plan, self.twin = (kv.plan(page_tokens, name, element) for kv in (self.theirs, self.ours))
        count = shape.blocks // self.plan.per
        self.ids = np.random.default_rng(1).permutation(shape.blocks)[: count * self.plan.per]
        item = self.plan.group.item_bytes
        step = -(-item // 4096) * 4096
        self.pinned, self.expected = gpu.pin(step * count), host.HostBuffer(step * count)
        offsets = np.arange(count, dtype=np.uint64) * np.uint64(step)
        self.slots = offsets + np.uint64(self.pinned.address)
        self.twin_slots = offsets + np.uint64(self.expected.address)
        self.pinned.data[:] = 0
        self.send()

    def device_memory(self, size: int) -> tuple[int, np.ndarray]:
        self.there, self.mirror = self.gpu.take(size), self.gpu.pin(size)
        return self.there.address, self.mirror.data

    def host_memory(self, size: int) -> tuple[int, np.ndarray]:
        self.here = host.HostBuffer(size)
        return self.here.address, self.here.data

    def send(self) -> None:
        """The twin's bytes into GPU memory."""
        self.mirror.data[:] = self.ours.bytes
        self.gpu.copy(self.there.address, self.mirror.address, self.there.bytes, self.stream)
        self.stream.synchronize()

    def fetch(self) -> np.ndarray:
        """What is in GPU memory."""
        self.gpu.copy(self.mirror.address, self.there.address, self.there.bytes, self.stream)
        self.stream.synchronize()
        return self.mirror.data

    def do(self, *, to_slots: bool, layers: tuple[int, int] | None = None, blocks: int = 0) -> None:
        """The same operation on both sides."""
        layers = layers or (0, self.plan.layers)
        for op in moves(self.plan, self.slots, self.ids, layers, to_slots=to_slots):
            self.gpu.launch(op, self.stream, blocks)
        for op in moves(self.twin, self.twin_slots, self.ids, layers, to_slots=to_slots):
            host.do(op)
        self.stream.synchronize()


def both_ways(at: Scene, **how: Any) -> None:
    """Gather and scatter leave the same bytes on both sides."""
    at.do(to_slots=True, **how)
    assert np.array_equal(at.pinned.data, at.expected.data)
    at.ours.bytes[:] = 7
    at.send()
    at.do(to_slots=False, **how)
    assert np.array_equal(at.fetch(), at.ours.bytes)


@pytest.mark.parametrize("name", LAYOUTS)
def test_gather_and_scatter_are_exact(name: str, gpu: Any):
    """The twin of test_kernels: every layout moves bit for bit, straight to and from pinned memory."""
    both_ways(Scene(gpu, *LAYOUTS[name]))


@pytest.mark.parametrize("element", ["bf16", "fp16"])
@pytest.mark.parametrize("name", quant.CODECS)
@pytest.mark.parametrize("shape", QUANTIZED)
def test_quantization_is_numpys_bit_for_bit(shape: str, name: str, element: str, gpu: Any):
    """The twin of test_kernels: codes, scales and what comes back."""
    both_ways(Scene(gpu, *QUANTIZED[shape], name, element))


@pytest.mark.parametrize("layers", [(0, 1), (1, 3)])
def test_layers_can_move_alone(layers: tuple[int, int], gpu: Any):
    """The twin of test_kernels: a launch for some layers touches no others, on either side."""
    both_ways(Scene(gpu, *LAYOUTS["mla"]), layers=layers)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("name", ["nhd", "one-head-blocks-of-1"])
def test_few_thread_blocks_do_the_whole_work(name: str, blocks: int, gpu: Any):
    """The twin of test_kernels: a copy that leaves the engine most of the GPU moves the same bytes."""
    both_ways(Scene(gpu, *LAYOUTS[name]), blocks=blocks)


@pytest.mark.parametrize("element", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["fp8", "int8", "int4-kivi"])
def test_odd_values_quantize_as_numpy_does(name: str, element: str, gpu: Any):
    """The twin of test_kernels: codes and scales are the same, and so is what comes back but for which NaN it is."""
    at = Scene(gpu, *ODD, name, element)
    put_odd_values(at.ours.bytes, element)
    at.send()
    at.do(to_slots=True)
    assert np.array_equal(at.pinned.data, at.expected.data)
    at.do(to_slots=False)
    back, want = (quant.widen(data.view(np.uint16), element) for data in (at.fetch(), at.ours.bytes))
    assert np.isnan(want).any()
    assert np.array_equal(back, want, equal_nan=True)


def test_kernels_keep_their_values_in_registers(gpu: Any):
    """The twin of test_kernels: what the driver loaded for this GPU has no local memory, whoever compiled it."""
    from kvtier.device.cuda import cupy

    scenes = [Scene(gpu, *LAYOUTS["nhd"]), *(Scene(gpu, *QUANTIZED["nhd"], name) for name in quant.CODECS)]
    for at in scenes:
        at.do(to_slots=True)
        at.do(to_slots=False)
    local = cupy.cuda.driver.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
    got = {what: cupy.cuda.driver.funcGetAttribute(local, int(kernel.ptr)) for what, kernel in gpu._kernels.items()}
    assert got
    assert not any(got.values()), got


@pytest.mark.parametrize("size", [248, 1032, 32 * 1024, 1 << 20])
def test_sums_are_the_hosts_xxh3(size: int, gpu: Any):
    """The twin of test_kernels: sums of slots in device memory."""
    count, stream = 40, gpu.stream()
    pinned, there, sums = gpu.pin(size * count), gpu.take(size * count), gpu.pin(8 * count)
    pinned.data[:] = np.random.default_rng(0).integers(0, 256, size * count, np.uint8)
    gpu.copy(there.address, pinned.address, size * count, stream)
    gpu.launch(summed(there.address + np.arange(count) * size, size, sums.address), stream)
    stream.synchronize()
    rows = pinned.data.reshape(count, size)
    assert sums.data.view(np.uint64).tolist() == [xxhash.xxh3_64_intdigest(row) for row in rows]


@pytest.mark.parametrize(
    "way",
    [
        {"stage_bytes": 1 << 16, "pieces": 2},
        {"stage_bytes": 1 << 17, "sums": True},
        {"stage_bytes": 1 << 17, "way": Way.BATCHED},
        {"direct": True},
        {"way": Way.FEW},
    ],
)
def test_pages_go_out_and_come_back(way: dict, gpu: Any):
    """The twin of test_device_streams: through staging or straight, pages arrive whole, and summed."""
    at = Scene(gpu, Shape("LBNHC", 4, 64, 4, 16, (64, 64), 2), 32)
    plan: Plan = at.plan
    shuttle = Shuttle(gpu, plan, **way)
    stored = shuttle.store(at.ids, at.slots)
    stored.wait()
    for number, slot in enumerate(at.slots):
        blocks = at.ids[number * plan.per : (number + 1) * plan.per].tolist()
        start = int(slot) - at.pinned.address
        assert np.array_equal(at.pinned.data[start : start + plan.group.item_bytes], at.ours.page(blocks))
    before = at.ours.bytes.copy()
    at.ours.bytes[:] = 7
    at.send()
    loaded = shuttle.load(at.ids, at.slots)
    loaded.wait()
    assert np.array_equal(at.fetch(), before)
    if stored.sums is not None:
        assert np.array_equal(stored.sums, loaded.sums)
    shuttle.close()


def test_running_out_of_gpu_memory_is_said_by_name(gpu: Any):
    """More memory than any GPU has is refused as no_space, and the device works on."""
    from kvtier.types import Code, KvtierError

    with pytest.raises(KvtierError) as caught:
        gpu.take(1 << 50)
    assert caught.value.code is Code.NO_SPACE
    both_ways(Scene(gpu, *LAYOUTS["nhd"]))
