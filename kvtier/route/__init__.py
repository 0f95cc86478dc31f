"""Which request goes next, and to which host. Pure: no clock, no sockets."""

from kvtier.route.order import order
from kvtier.route.score import Sessions, View, Weights, cost, rank

__all__ = ["Sessions", "View", "Weights", "cost", "order", "rank"]
