"""The index: which pages are cached, where their copies are, who holds them, which go first. Pure: no I/O, no clock."""

from kvtier.index.base import Cut, Index
from kvtier.index.copies import Dropped
from kvtier.index.keyed import KeyedIndex
from kvtier.index.node import Hold, Node
from kvtier.index.order import ANY, Order
from kvtier.index.radix import Found, RadixIndex

__all__ = ["ANY", "Cut", "Dropped", "Found", "Hold", "Index", "KeyedIndex", "Node", "Order", "RadixIndex"]
