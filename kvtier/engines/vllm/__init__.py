"""vLLM on kvtier: KvtierConnector, which owns the copies, and KvtierSecondaryTier, below vLLM's own host tier."""
