"""`kvtierctl try` with engines that are there already."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from llamacppkit import PYTHON as LLAMACPP
from llamacppkit import needs_llamacpp
from vllmkit import PYTHON, needs_vllm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def tried(engine: str, python: Path | None = None, more: Sequence[str] = ()) -> str:
    """What it prints."""
    which = [] if python is None else ["--python", str(python)]
    command = [sys.executable, "-m", "kvtier.ctl", "try", engine, *which, *more]
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


def built() -> bool:
    """Whether pip has kept a wheel of the release that is tried: else it compiles for ten minutes and more."""
    command = [sys.executable, "-m", "pip", "cache", "list", "llama_cpp_python"]
    return "0.3.36" in subprocess.run(command, capture_output=True, text=True, check=False).stdout


@pytest.mark.skipif(not built(), reason="pip has no wheel of llama-cpp-python 0.3.36: `make engines` builds one")
def test_try_llamacpp_makes_a_venv_of_its_own_and_needs_nothing_else(tmp_path: Path):
    """Venv, daemon, engine, hit, and what to write; the second time the venv is there."""
    for _ in range(2):
        out = tried("llamacpp", more=["--folder", str(tmp_path / "venv")])
        assert "second engine: 960 of 1000 tokens" in out
        assert "kvtier.engines.llamacpp.attach(llm)" in out
    assert (tmp_path / "venv" / "bin" / "python").exists()


def test_try_says_what_it_cannot_do_without(tmp_path: Path):
    """No compiler: said at once, not after a minute of pip's."""
    command = [sys.executable, "-m", "kvtier.ctl", "try", "llamacpp", "--folder", str(tmp_path / "venv")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PATH": str(tmp_path)}, timeout=60)
    assert done.returncode
    assert "C++ compiler" in done.stderr
    assert not (tmp_path / "venv").exists()


@needs_llamacpp
def test_try_llamacpp_shows_a_hit_of_a_second_process():
    """The same with llama.cpp: whole pages of 64 tokens."""
    out = tried("llamacpp", LLAMACPP)
    assert "first engine: 0 of 1000 tokens" in out
    assert "second engine: 960 of 1000 tokens" in out
    assert "kvtier.engines.llamacpp.attach(llm)" in out
