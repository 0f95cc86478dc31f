"""Adapters that attach inference engines; each imports its engine lazily."""
