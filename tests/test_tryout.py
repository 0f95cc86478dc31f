"""`kvtierctl try` with engines that are there already."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llamacppkit import PYTHON as LLAMACPP
from llamacppkit import needs_llamacpp
from vllmkit import PYTHON, needs_vllm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def tried(engine: str, python: Path | None = None) -> str:
    """What it prints."""
    more = [] if python is None else ["--python", str(python)]
    command = [sys.executable, "-m", "kvtier.ctl", "try", engine, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=350)
    assert not done.returncode, done.stderr
    return done.stdout


def test_try_transformers_shows_a_hit_of_a_second_process():
    """The second process loads 992 of 1,000 tokens, and the user is told what to write.

    A Python that has transformers already is used as it is: no gigabytes are fetched.
    """
    pytest.importorskip("transformers")
    out = tried("transformers")
    assert "first engine: 0 of 1000 tokens" in out
    assert "second engine: 992 of 1000 tokens" in out
    assert "attach(model, tokenizer)" in out


@needs_vllm
def test_try_vllm_shows_a_hit_of_a_second_engine():
    """The same with vLLM, and its line for the command."""
    out = tried("vllm", PYTHON)
    assert "first engine: 0 of 1000 tokens" in out
    assert "second engine: 992 of 1000 tokens" in out
    assert "--kv-transfer-config" in out


@needs_llamacpp
def test_try_llamacpp_shows_a_hit_of_a_second_process():
    """The same with llama.cpp: whole pages of 64 tokens."""
    out = tried("llamacpp", LLAMACPP)
    assert "first engine: 0 of 1000 tokens" in out
    assert "second engine: 960 of 1000 tokens" in out
    assert "kvtier.engines.llamacpp.attach(llm)" in out
