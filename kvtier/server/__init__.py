"""The daemon's sockets: who connects, what they ask, and the bounds that keep one from hurting others."""

from kvtier.server.limits import Limits
from kvtier.server.server import Server

__all__ = ["Limits", "Server"]
