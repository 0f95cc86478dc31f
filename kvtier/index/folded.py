"""Nodes as disk has them: of a large catalogue few are ever looked into, and the others cost little this way."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Protocol

from kvtier.index.node import Node
from kvtier.types import Tier


class Stored(Protocol):
    """Consecutive pages that only disk has."""

    pages: int

    @property
    def last(self) -> int:
        """The handle of the last page."""

    def first_key(self, stride: int) -> bytes:
        """The key of the first page."""

    def unfold(self) -> tuple[bytes, bytes, array[int], Sequence[array[int]]]:
        """Page keys, chain keys, handles (every group's) and sums per group. Called once."""


class _Folded:
    """An attribute that unfolds its node."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, node: FoldedNode, owner: type) -> Any:
        node.unfold()
        return getattr(node, self._name)


class FoldedNode(Node):
    """A node that becomes a plain one when one of the attributes below is first read. Nobody has noted it so far."""

    __slots__ = ()

    at: Any = _Folded()
    chain: Any = _Folded()
    edge: Any = _Folded()
    sums: Any = _Folded()

    @property
    def last(self) -> int:
        """The handle of the last page on disk."""
        handle: int = self.stored[-1].last
        return handle

    def unfold(self) -> None:
        """Become a plain node."""
        parts = [each.unfold() for each in self.stored]
        node = self._plain()
        node.edge = b"".join(keys for keys, _, _, _ in parts)
        node.chain = b"".join(chains for _, chains, _, _ in parts)
        groups = len(node.sums)
        for group in range(groups):
            node.at[Tier.DISK * groups + group], node.sums[group] = array("q"), array("Q")
        for _, _, handles, sums in parts:
            for group in range(groups):
                node.at[Tier.DISK * groups + group] += handles
                node.sums[group] += sums[group]

    def _plain(self) -> Any:
        del self.stored
        self.__class__ = Node  # type: ignore[assignment]
        return self


def folded(parent: Node, stored: list[Stored], pages: int, groups: int) -> FoldedNode:
    """A new leaf, published, as disk has it."""
    node: Any = Node(parent, b"", parent.depth + parent.pages, pages, groups, 0.0)
    node.stored, node.live = stored, pages
    node.__class__ = FoldedNode
    return node  # type: ignore[no-any-return]
