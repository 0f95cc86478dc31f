"""Small transformers models on kvtier, for tests that compare what they give with and without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvtier.client import Client

PAGE = 16
GREEDY = {"max_new_tokens": 12, "do_sample": False}


class Place(NamedTuple):
    """A daemon, and a salt that keeps this test's KV apart from that of others."""

    socket: Path
    salt: bytes


def enlarged(model: Any) -> Any:
    """A seeded model with weights so large that rounding does not choose its tokens."""
    import torch

    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim == 2:
                tensor.mul_(4)
    return model.eval()


def prompt(tokens: int, seed: int = 1) -> Any:
    """A row of seeded token ids."""
    import torch

    return torch.from_numpy(np.random.default_rng(seed).integers(2, 300, (1, tokens)))


def plain(model: Any, ids: Any, **options: Any) -> Any:
    """What transformers gives without kvtier."""
    import torch

    return model.generate(ids, attention_mask=torch.ones_like(ids), **(GREEDY | options))


def attached(model: Any, place: Place, instance: str | None = None, **more: Any) -> Any:
    """The model on the daemon, by a client of its own."""
    from kvtier.engines.transformers import attach

    fields = {"name": "tiny", "page_tokens": PAGE, "salt": place.salt}
    return attach(model, client=Client(place.socket, instance=instance), **(fields | more))
