"""What must hold in the demo; each check gives the sentences that say where it does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvtier.demo.run import Answer
from kvtier.demo.scenario import Request

Ways = Mapping[str, Sequence[Answer]]


def same_tokens(ways: Ways, asked: Sequence[Request]) -> Iterator[str]:
    """Every way gives the tokens of the first, request by request."""
    (first, want), *others = ways.items()
    for name, answers in others:
        for request, ours, theirs in zip(asked, answers, want, strict=True):
            if ours.prompt != theirs.prompt or ours.tokens != theirs.tokens:
                yield f"{request.part}, {request.label}: {name} gives other tokens than {first}"


def shared_prefixes_hit(ways: Ways, asked: Sequence[Request], page_tokens: int) -> Iterator[str]:
    """The cold way computes no page twice: what an earlier request of the run has had, this one loads."""
    known: set[tuple[int, ...]] = set()
    for request, answer in zip(asked, ways["cold"], strict=True):
        ends = range(page_tokens, len(answer.prompt), page_tokens)
        want = sum(tuple(answer.prompt[:end]) in known for end in ends) * page_tokens
        if answer.use.hit_tokens != want:
            yield f"{request.part}, {request.label}: cold loads {answer.use.hit_tokens} tokens, {want} were stored"
        computed = answer.prompt + answer.tokens[:-1]
        known |= {tuple(computed[:end]) for end in range(page_tokens, len(computed) + 1, page_tokens)}


def everything_hits(name: str, ways: Ways, asked: Sequence[Request], page_tokens: int) -> Iterator[str]:
    """A way that comes after the cold one loads every whole page of every prompt but the last token's."""
    for request, answer in zip(asked, ways[name], strict=True):
        want = (len(answer.prompt) - 1) // page_tokens * page_tokens
        if answer.use.hit_tokens != want:
            yield f"{request.part}, {request.label}: {name} loads {answer.use.hit_tokens} tokens of {want}"


def comes_from_disk(answers: Sequence[Answer]) -> Iterator[str]:
    """The first request after the restart is served from disk: memory was lost with the process."""
    if not answers[0].use.tiers or {tier for tier, _ in answers[0].use.tiers} != {"disk"}:
        yield f"after the restart the first hit lay in {answers[0].use.tiers or 'no tier'}, not on disk"
