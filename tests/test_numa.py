"""Host memory is taken near the GPU and never on a node of GPU memory: the rules on trees like /sys, the calls here."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from kvtier.device.host import HostDevice
from kvtier.identity import Shape
from kvtier.numa import bind, cpu_nodes, memory_on, node_of, places
from kvtier.store.carrier import Carrier
from kvtier.tiers.host import HostTier

MIB = 1 << 20
ARENA_SHIFT = 44
GPU = "0009:01:00.0"


def tree(folder: Path, nodes: Mapping[int, tuple[str, int, str]], numa_node: int | None = None) -> tuple[Path, Path]:
    """/sys's folders of PCI devices and of nodes; a node's CPUs, its memory in KiB, and distances."""
    for number, (cpus, kib, distance) in nodes.items():
        at = folder / "node" / f"node{number}"
        at.mkdir(parents=True)
        (at / "cpulist").write_text(cpus + "\n")
        (at / "meminfo").write_text(f"Node {number} MemTotal: {kib} kB\nNode {number} MemFree: 1 kB\n")
        (at / "distance").write_text(distance + "\n")
    if numa_node is not None:
        (folder / "devices" / GPU).mkdir(parents=True)
        (folder / "devices" / GPU / "numa_node").write_text(f"{numa_node}\n")
    return folder / "devices", folder / "node"


TWO = {0: ("0-3", 100 << 10, "10 21"), 1: ("4-7", 300 << 10, "21 10")}
GRACE = {0: ("0-71", 480 << 10, "10 80"), 1: ("", 96 << 10, "80 10"), **dict.fromkeys(range(2, 9), ("", 0, ""))}
"""A Grace Hopper: its GPU's memory is a node without CPUs, and there are empty ones for its partitions."""
PAIR = {
    0: ("0-71", 480 << 10, "10 40 80 120"), 1: ("72-143", 480 << 10, "40 10 120 80"),
    2: ("", 96 << 10, "80 120 10 160"), 3: ("", 96 << 10, "120 80 160 10"),
}  # fmt: skip
"""Two of them."""


def test_nodes_of_gpu_memory_are_left_out(tmp_path: Path):
    """Only nodes with CPUs and memory count, in order, with their sizes."""
    nodes = {0: ("0-3", 100, ""), 10: ("8-9", 300, ""), 2: ("", 900, ""), 3: ("4-7", 0, "")}
    _, where = tree(tmp_path, nodes)
    assert cpu_nodes(where) == [(0, 100 << 10), (10, 300 << 10)]
    assert cpu_nodes(tmp_path / "absent") == []


@pytest.mark.parametrize(
    ("nodes", "numa_node", "want"),
    [
        (TWO, 1, 1),
        (TWO, 0, 0),
        (TWO, -1, None),  # firmware that does not say
        (TWO, None, None),  # no such device
        (GRACE, 0, 0),
        (GRACE, 1, 0),  # the GPU is said to be at its own memory
        (PAIR, 3, 1),
        (PAIR, 2, 0),
        ({}, 0, None),
    ],
)
def test_the_node_of_a_gpu_is_the_nearest_one_with_cpus(tmp_path: Path, nodes: dict, numa_node: int | None, want):
    """Whatever /sys says of a GPU, its node has CPUs; where it says nothing there is none."""
    assert node_of(GPU.upper(), *tree(tmp_path, nodes, numa_node)) == want


def test_memory_is_bound_wherever_there_is_another_place_for_it(tmp_path: Path):
    """One CPU node beside GPU memory is bound to; one node alone needs no binding, and no /sys breaks nothing."""
    assert [node.number for node in places(tree(tmp_path / "grace", GRACE)[1])] == [0]
    assert [node.number for node in places(tree(tmp_path / "two", TWO)[1])] == [0, 1]
    assert places(tree(tmp_path / "one", {0: ("0-3", 100, "10")})[1]) == []
    assert places(tmp_path / "absent") == []


@pytest.mark.parametrize(("near", "want"), [(None, 4), (0, 12), (1, 0)])
def test_slabs_are_taken_near_the_gpu_first(tmp_path: Path, near: int | None, want: int):
    """16 of 16 slabs on the GPU's node while that has room, 3/4 of its memory; without a GPU by the nodes' memory."""
    nodes = {0: ("0-3", 16 << 10, "10 21"), 1: ("4-7", 48 << 10, "21 10")}
    _, where = tree(tmp_path, nodes)
    tier = HostTier(16 * MIB, slab_bytes=MIB, hugepages="never", prefault=False, nodes=where, near=near)
    handles = tier.pool("a", Shape((MIB // 16,), (1,))).alloc(0, 256)
    assert len(handles) == 256
    assert sum(handle >> ARENA_SHIFT == 0 for handle in handles) == 16 * want
    assert tier.check() == []
    tier.close()


def test_what_is_warmed_is_where_slabs_will_be_taken(tmp_path: Path):
    """With prefault the GPU's node is warmed first, and no node is asked for more than the others at the same load."""
    _, where = tree(tmp_path, {0: ("0-3", 64 << 10, "10 21"), 1: ("4-7", 64 << 10, "21 10")})
    for near, want in ((0, [16, 0]), (None, [8, 8])):
        tier = HostTier(16 * MIB, slab_bytes=MIB, hugepages="never", nodes=where, near=near)
        tier.arenas("a")
        assert tier.settle()
        grounds = tier._space._scopes["a"]
        assert [ground.warm.bytes // MIB for ground in grounds] == want
        assert tier.check() == []
        tier.close()


def test_the_kernel_takes_the_node_of_this_machine_or_says_no():
    """Binding works where the kernel allows it; a node that is not there is refused; nothing breaks either way."""
    data = np.frombuffer(mmap.mmap(-1, 4 * MIB), np.uint8)
    assert bind(data.ctypes.data, len(data), 0) in {True, False}
    assert not bind(data.ctypes.data, len(data), 777)
    data[::4096] = 1
    for node in (None, 0, 777):
        with memory_on(node):
            assert np.ones(MIB, np.uint8).sum() == MIB
    assert np.ones(MIB, np.uint8).sum() == MIB


async def test_a_device_that_is_on_no_bus_has_no_node():
    """The CPU in a GPU's place: host memory is used as without a device."""
    carrier = Carrier(HostDevice, 4096)
    assert carrier.node is None
    carrier.close()


@pytest.mark.gpu
async def test_the_node_of_a_real_gpu_has_cpus():
    """Where /sys knows the GPU that is here, its node is one that has CPUs, and pinned memory is taken there."""
    from storekit import gpu

    device = gpu()
    node = node_of(device.facts.pci)
    assert node is None or node in {one.number for one in cpu_nodes()}
    pinned = device.pin(MIB)
    pinned.data[:] = 1
    assert pinned.data.sum() == MIB
    pinned.free()
