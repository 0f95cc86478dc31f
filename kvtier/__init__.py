"""kvtier: a sidecar daemon that keeps the KV cache of LLM inference servers in four tiers."""

__version__ = "0.1.0"
