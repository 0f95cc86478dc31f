"""Synthetic requests for engines: prompts that share a part, and conversations of people and of agents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

PAGE = 32


class Shape(NamedTuple):
    """Conversations at once that begin alike and grow with each turn; all numbers are tokens but the first two."""

    conversations: int
    turns: int
    begin: int
    """What all of them begin with: a system prompt, or tools."""
    more: tuple[int, int]
    """What a turn adds, at least and at most: the last answer and a message, or what a tool gave."""


CHAT = Shape(2, 4, 96, (48, 160))
AGENT = Shape(2, 5, 384, (64, 256))
SMALL = Shape(2, 2, 64, (32, 64))


class Prompts:
    """Prompts of one length that share a given part of their tokens, and nothing else with each other."""

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self._random = np.random.default_rng(seed)
        self.trunk = self.fresh()

    def fresh(self) -> list[int]:
        """A prompt that nobody has seen."""
        return tokens(self._random, self.length)

    def sharing(self, part: float) -> list[int]:
        """One whose first part is the trunk's."""
        at = int(self.length * part) // PAGE * PAGE
        return self.trunk[:at] + self.fresh()[at:]


def tokens(random: np.random.Generator, count: int) -> list[int]:
    """Seeded token ids of the bench's model."""
    return [int(token) for token in random.integers(3, 2000, count)]


def replay(shape: Shape, seed: int) -> Iterator[list[int]]:
    """The prompts of conversations that take turns, each with all that was said in it before."""
    random = np.random.default_rng(seed)
    begin = tokens(random, shape.begin)
    said = [list(begin) for _ in range(shape.conversations)]
    for _ in range(shape.turns):
        for mine in said:
            mine.extend(tokens(random, int(random.integers(*shape.more))))
            yield list(mine)
