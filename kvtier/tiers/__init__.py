"""The tiers: each owns its bytes and says where they are."""
