"""What a model's configuration says that changes no byte of its KV."""

from __future__ import annotations

from typing import Final

VOLATILE: Final = frozenset({"_name_or_path", "name_or_path", "transformers_version", "architectures", "torch_dtype"})
"""Where a model came from, not what it computes."""
