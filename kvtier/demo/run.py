"""Makes the demo's requests one after another, with or without kvtier, and keeps what came out and how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from kvtier.demo.model import Subject
from kvtier.demo.scenario import Request
from kvtier.engines.transformers import Attached, Use


class Answer(NamedTuple):
    """What one request gave."""

    prompt: list[int]
    tokens: list[int]
    ttft_s: float
    """From the call to the first new token, look-up and load included."""
    use: Use


class Stopwatch:
    """A transformers streamer that notes when the first new token comes."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._puts = 0
        self.ttft_s = 0.0

    def put(self, value: Any) -> None:
        """Called with the prompt, then with every new token."""
        del value
        self._puts += 1
        if self._puts == 2:
            self.ttft_s = time.perf_counter() - self._began

    def end(self) -> None:
        """Called after the last token."""


def run(
    subject: Subject, asked: Sequence[Request], kv: Attached | None, seen: Callable[[Answer], None]
) -> list[Answer]:
    """Answers in order; `seen` gets each as it comes. Without `kv` it is plain transformers."""
    answers: list[Answer] = []
    for request in asked:
        before = answers[request.parent] if request.parent >= 0 else None
        prompt = (before.prompt + before.tokens if before else []) + subject.encode(request.text)
        answers.append(_answer(subject, request, prompt, kv))
        seen(answers[-1])
    return answers


def _answer(subject: Subject, request: Request, prompt: list[int], kv: Attached | None) -> Answer:
    """One request."""
    ids = torch.tensor([prompt])
    options: dict[str, Any] = {"max_new_tokens": request.new_tokens, "do_sample": request.seed is not None}
    if request.seed is not None:
        options |= {"temperature": 0.9, "top_k": 50}
        torch.manual_seed(request.seed)
    watch = Stopwatch()
    generate = kv.generate if kv else subject.model.generate
    out = generate(ids, attention_mask=torch.ones_like(ids), streamer=watch, **options)
    return Answer(prompt, out[0, len(prompt) :].tolist(), watch.ttft_s, kv.last if kv else Use(len(prompt)))
