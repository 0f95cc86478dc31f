"""The peer tier: pages that other hosts hold. What they hold is a hint; every byte is checked before it is served."""
