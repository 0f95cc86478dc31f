"""The store: caches over tiers. Verbs call into it on the loop thread; bytes move in the mover's threads."""

from kvtier.store.store import Store

__all__ = ["Store"]
