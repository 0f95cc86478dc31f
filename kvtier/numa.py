"""NUMA nodes as /sys shows them, and where memory is taken: never a GPU's own, a node without CPUs on Grace."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kvtier.linux import call

NODES: Final = Path("/sys/devices/system/node")
DEVICES: Final = Path("/sys/bus/pci/devices")
MOST_NODES: Final = 1024

_MPOL_BIND: Final = 2
_Mask = ctypes.c_ulong * (MOST_NODES // 64)


class Node(NamedTuple):
    """A NUMA node that has CPUs, and its memory."""

    number: int
    bytes: int


def cpu_nodes(nodes: Path = NODES) -> list[Node]:
    """Nodes with CPUs and memory in ascending order; nodes of GPU memory have no CPUs and are left out."""
    return [node for node in _nodes(nodes) if (nodes / f"node{node.number}" / "cpulist").read_text().strip()]


def places(nodes: Path = NODES) -> list[Node]:
    """Nodes that memory is to be bound to, so that it lies on no other; none where there is but one place for it."""
    return cpu_nodes(nodes) if len(_nodes(nodes)) > 1 else []


def node_of(pci: str, devices: Path = DEVICES, nodes: Path = NODES) -> int | None:
    """The node with CPUs that a device on the PCI bus is at, or nearest to; None where nobody says."""
    at = {node.number for node in cpu_nodes(nodes)}
    try:
        own = int((devices / pci.lower() / "numa_node").read_text())
        if own < 0 or not at or own in at:
            return own if own in at else None
        far = (nodes / f"node{own}" / "distance").read_text().split()
    except (OSError, ValueError):
        return None
    known = sorted(int(folder.name[4:]) for folder in nodes.glob("node[0-9]*"))
    return min(at, key=lambda node: (int(far[known.index(node)]), node))


def bind(address: int, size: int, node: int) -> bool:
    """Whether the kernel took a node for all pages to come of a range."""
    where, length = ctypes.c_void_p(address), ctypes.c_ulong(size)
    return call("mbind", where, length, _MPOL_BIND, _mask(node), MOST_NODES + 1, 0)


@contextlib.contextmanager
def memory_on(node: int | None) -> Iterator[None]:
    """What this thread takes within, the kernel takes from a node, where it may; None: as ever."""
    mode, mask = ctypes.c_int(), _Mask()
    bound = (
        node is not None
        and call("get_mempolicy", ctypes.byref(mode), mask, MOST_NODES, None, 0)
        and call("set_mempolicy", _MPOL_BIND, _mask(node), MOST_NODES + 1)
    )
    try:
        yield
    finally:
        if bound:
            call("set_mempolicy", mode.value, mask if any(mask) else None, MOST_NODES + 1)


def _nodes(nodes: Path) -> list[Node]:
    """All nodes that have memory."""
    found = []
    for folder in nodes.glob("node[0-9]*"):
        total = next((line.split() for line in (folder / "meminfo").read_text().splitlines() if "MemTotal" in line), [])
        if total and int(total[-2]):
            found.append(Node(int(folder.name[4:]), int(total[-2]) << 10))
    return sorted(found)


def _mask(node: int) -> ctypes.Array[ctypes.c_ulong]:
    mask = _Mask()
    mask[node // 64] = 1 << node % 64
    return mask
