"""The flat index of a keyed cache: opaque keys, existence per key, any order of arrival, holes.

A key is a node of one page under the root, so copies, leases and eviction are those of every index. An engine that
touches a request's keys deepest first and the root last makes plain LRU equal leaf-first LRU.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.identity import CacheSpec
from kvtier.index.base import Index
from kvtier.index.node import Node
from kvtier.index.order import Order, Warmth


class KeyedIndex(Index):
    """Pages of one cache by (group, key)."""

    def __init__(
        self, spec: CacheSpec, root_chain: bytes, orders: Mapping[int, Order], heat: Warmth | None = None
    ) -> None:
        super().__init__(spec, root_chain, orders, heat)
        self.stride = spec.stride + 1

    @staticmethod
    def name(group: int, key: bytes) -> bytes:
        """The key within the index: no two groups share one."""
        return bytes((group,)) + key

    def find(self, name: bytes) -> Node | None:
        """The node of a key, published or not."""
        children = self.root.children
        return None if children is None or self.closed else children.get(name)

    def ensure(self, name: bytes, now: float) -> Node:
        """The node of a key, made unpublished if there was none."""
        node = self.find(name)
        if node is None:
            node = Node(self.root, name, 0, 1, self.groups, now)
            self._attach(self.root, name, node)
            self.nodes += 1
            self.pages += 1
        return node
