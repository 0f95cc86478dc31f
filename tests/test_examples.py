"""What is not kvtierctl in the README and docs/: make, pip, units, engines' command lines, Python and TOML.

tests/test_commands.py has kvtierctl's commands, and the list of what is not run whole here, with the reasons.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from click.testing import CliRunner

from enginekv import EngineKv, Shape
from kvtier import config
from kvtier.client import Client, page_keys
from kvtier.ctl import main
from kvtier.demo.daemon import Daemon
from kvtier.device.host import HostBuffer, HostDevice
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.policy import load
from kvtier.sizing.hardware import Hardware
from kvtier.types import Kind, Tier
from test_commands import ALL, ROOT, fences
from test_sizing_cli import requests
from vllmkit import PYTHON as VLLM
from vllmkit import environment, needs_vllm

in_checkout = pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="make and pip work in a checkout")


def starting(*words: str) -> list[str]:
    """Commands of the documents that begin so."""
    found = [line for line in ALL if line.startswith(words)]
    assert found
    return found


def blocks(page: str, language: str) -> list[str]:
    """A page's blocks in a language."""
    return [text for path, kind, text in fences() if (path.name, kind) == (page, language)]


def stand_in(folder: Path, name: str, text: str) -> None:
    """A command of that name."""
    (folder / name).write_text("#!/bin/bash\n" + text)
    (folder / name).chmod(0o755)


def bash(line: str, folder: Path, cwd: Path = ROOT, **env: str) -> str:
    """What a line says as it is written, with the commands in the folder before all others."""
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **env}
    done = subprocess.run(
        ["bash", "-c", "set -e\n" + line], cwd=cwd, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, (line, done.stdout, done.stderr)
    return done.stdout


# -- a shell's --------------------------------------------------------------------------------------------------------


@in_checkout
@pytest.mark.parametrize("line", starting("make "))
def test_make_has_each_target_and_what_it_runs(tmp_path: Path, line: str) -> None:
    """As written, but for -n: what would be run is printed, and the scripts and modules in it are there."""
    said = bash(line, tmp_path, MAKEFLAGS="n")
    scripts = re.findall(r"(?<=\s)\.ci/[\w-]+(?=[\s$])", " " + said)
    assert scripts or "pytest" in said or "kvtier.demo" in said, said
    assert all(list(ROOT.glob(script.rstrip("-") + "*")) for script in scripts), said


@in_checkout
@pytest.mark.slow
@pytest.mark.parametrize("line", starting("pip install"))
def test_pip_takes_a_checkout(tmp_path: Path, line: str) -> None:
    """As written, but that pip installs nothing, fetches nothing, and says what it would have installed."""
    stand_in(tmp_path, "pip", f'exec "{sys.executable}" -m pip "$@"\n')
    words = {"DRY_RUN": "1", "NO_DEPS": "1", "NO_INDEX": "1", "NO_BUILD_ISOLATION": "false"}
    said = bash(line, tmp_path, **{f"PIP_{name}": value for name, value in words.items()})
    assert re.search(r"Would install kvtier-\d", said), said


SYSTEM = {
    "install": 'last="$SYSTEM${@: -1}"; case $last in */) mkdir -p "$last";; *) mkdir -p "${last%/*}";; esac\n'
    'exec /usr/bin/install "${@:1:$#-1}" "$last"\n',
    "systemd-sysusers": 'exec /usr/bin/systemd-sysusers --root="$SYSTEM" "$@"\n',
    "systemd-tmpfiles": 'exec /usr/bin/systemd-tmpfiles --root="$SYSTEM" "$@"\n',
    "systemctl": 'exec /usr/bin/systemctl --root="$SYSTEM" "${@/--now/--quiet}"\n',
}
"""The same programs for a system that lies in a folder, and is not running."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders to others")
@pytest.mark.skipif(not Path("/usr/bin/systemctl").exists(), reason="no systemd is installed")
def test_the_units_go_into_a_system_as_written(tmp_path: Path) -> None:
    """All lines in turn: the files are there, the user and its folders are made, the service is wanted at the start."""
    system, folder = tmp_path / "system", tmp_path / "bin"
    (system / "etc").mkdir(parents=True)
    folder.mkdir()
    for name, text in SYSTEM.items():
        stand_in(folder, name, text)
    for line in starting("install -m", "systemctl"):
        bash(line, folder, SYSTEM=str(system))
    assert re.search(r"^kvtier:", (system / "etc" / "passwd").read_text(), re.MULTILINE)
    wanted = system / "etc" / "systemd" / "system"
    assert {path.name for path in (ROOT / "systemd").glob("kvtierd*")} <= {path.name for path in wanted.iterdir()}
    assert (wanted / "multi-user.target.wants" / "kvtierd.service").is_symlink()
    made = re.findall(r"^[dD] +(/\S+)", (ROOT / "systemd" / "kvtier.tmpfiles.conf").read_text(), re.MULTILINE)
    assert made
    assert all((system / path.lstrip("/")).is_dir() for path in made)


TOLD = f'exec "{sys.executable}" -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@"\n'
"""A program that prints what it was told."""


def told(line: str, folder: Path) -> list[str]:
    """The words that an engine gets from a shell."""
    name = shlex.split(line)[0]
    stand_in(folder, name, TOLD)
    return json.loads(bash(line, folder))


def classes(said: dict[str, Any]) -> list[tuple[str, str]]:
    """(module, class) of this package that a configuration names."""
    every = (said, *said.get("kv_connector_extra_config", {}).get("secondary_tiers", []))
    modules = ("kv_connector_module_path", "module_path", "linker_module_path")
    named = [(next((each[key] for key in modules if key in each), ""), each) for each in every]
    names = ("kv_connector", "class_name", "linker", "type")
    return [(module, next(each[key] for key in names if key in each)) for module, each in named if module]


def test_engines_are_told_classes_that_there_are(tmp_path: Path) -> None:
    """Through a real shell, with a program that prints its words in the engine's place: JSON, and what it names."""
    root, seen = Path(importlib.import_module("kvtier").__file__ or "").parent.parent, set()
    for line in starting("vllm serve", "python -m sglang"):
        words = told(line, tmp_path)
        assert words[-2] in {
            "--kv-transfer-config", "--hicache-storage-backend-extra-config", "--unified-cache-external-linker-config"
        }  # fmt: skip
        for module, name in classes(json.loads(words[-1])):
            assert f"class {name}(" in (root / (module.replace(".", "/") + ".py")).read_text()
            seen.add(name)
    assert seen == {"KvtierConnector", "KvtierSecondaryTier", "KvtierHiCache", "KvtierLinker"}


PARSED = """
import json, sys
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
ServeSubcommand().subparser_init(parser.add_subparsers())
found = []
for words in json.loads(sys.argv[1]):
    given = parser.parse_args(words)
    made = EngineArgs.from_cli_args(given).kv_transfer_config
    assert given.model_tag == "MODEL" and isinstance(made, KVTransferConfig)
    found.append(KVConnectorFactory.get_connector_class(made).__name__)
print(json.dumps(found))
"""
"""vLLM's own reading of command lines, and the classes that it would make."""


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_vllm_itself_takes_the_words(tmp_path: Path) -> None:
    """The real parser of `vllm serve`, where vLLM is installed: connectors that it finds."""
    every = sorted({*starting("vllm serve")})
    words = json.dumps([told(line, tmp_path) for line in every])
    done = subprocess.run([VLLM, "-c", PARSED, words], env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    named = [json.loads(shlex.split(line)[-1])["kv_connector"] for line in every]
    assert json.loads(done.stdout.splitlines()[-1]) == named


@pytest.mark.parametrize("page", ["fleet.md", "sizing.md"])
def test_settings_in_the_documents_are_taken(tmp_path: Path, page: str) -> None:
    """The daemon's and the planner's own readers take every TOML block."""
    (tmp_path / "redis").touch(mode=0o600)
    made = blocks(page, "toml")
    assert made
    for text in made:
        (tmp_path / "any.toml").write_text(text)
        if page == "fleet.md":
            assert config.load(tmp_path / "any.toml", {}).peers.secrets == "/etc/kvtier/secrets"
        else:
            assert Hardware(tmp_path / "any.toml").gpu("My GPU").memory == 48 << 30


# -- Python's ---------------------------------------------------------------------------------------------------------


def test_every_python_block_is_run_below() -> None:
    """One more block fails here until there is a test that runs it."""
    counts = {path.name: len(blocks(path.name, "python")) for path, kind, _ in fences() if kind == "python"}
    assert counts == {"README.md": 1, "engines.md": 3, "gpu.md": 2, "operating.md": 1}


def run(text: str, space: dict[str, Any]) -> dict[str, Any]:
    """Run a block as it is written."""
    exec(compile(text, "<document>", "exec"), space)
    return space


def chatting() -> Any:
    """A tokenizer over bytes, with a template of chats that is longer than a page."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    told = "Answer shortly. " * 10
    template = told + "{% for each in messages %}{{ each.content }}{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_transformers_as_the_readme_and_its_page_have_it(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both blocks as written, but that a small model comes from the hub: the second hits what the first stored."""
    transformers = pytest.importorskip("transformers")
    from kvtier.demo.model import random_model

    monkeypatch.setenv("KVTIER_SOCKET", str(daemon.socket))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda _: random_model().model)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda _: chatting())
    space = run(blocks("README.md", "python")[0], {})
    first = space["kv"]
    assert first.last.hit_tokens == 0
    assert first.last.stored_pages > 1
    assert "Use(" in capsys.readouterr().out
    run(blocks("engines.md", "python")[0], space)
    assert space["kv"].last.hit_tokens >= 64
    for each in (first, space["kv"]):
        each.close()


def test_llama_cpp_as_its_page_has_it() -> None:
    """As written, with something in llama.cpp's place: what is called of it is known, and what is called of ours fits.

    tests/test_llamacpp.py makes the same calls where it is installed.
    """
    with mock.patch.dict(sys.modules, llama_cpp=mock.MagicMock()) as modules:
        attach = importlib.import_module("kvtier.engines.llamacpp").attach
        with mock.patch("kvtier.engines.llamacpp.attach", mock.create_autospec(attach)) as ours:
            run(blocks("engines.md", "python")[1], {})
        made = modules["llama_cpp"].Llama
    made.assert_called_once_with("model.gguf", n_ctx=8192)
    ours.assert_called_once_with(made.return_value)


def test_an_engine_of_ones_own_as_its_page_has_it(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """As written: a prompt that is cached whole is loaded but for its last page, and comes back right."""
    monkeypatch.setenv("KVTIER_SOCKET", str(daemon.socket))
    loaded: list[np.ndarray] = []

    def compute(tokens: list[int], rows: np.ndarray) -> np.ndarray:
        loaded.append(rows)
        width = space["kv"].item_bytes
        pages = [np.full(width, token, np.uint8) for token in tokens[::16][: len(tokens) // 16]]
        return np.stack(pages[len(rows) :]) if len(rows) < len(pages) else np.empty((0, width), np.uint8)

    space: dict[str, Any] = run(blocks("engines.md", "python")[2], {"digest": b"d" * 16, "compute": compute})
    with space["client"]:
        for tokens in ([*range(64)], [*range(64)], [*range(70)], [*range(10)], []):
            space["prefill"](tokens)
    assert [len(rows) for rows in loaded] == [0, 3, 4, 0, 0]
    assert [set(page.tolist()) for page in loaded[2]] == [{0}, {16}, {32}, {48}]


def test_the_shuttle_as_the_page_on_gpus_has_it(daemon: Daemon) -> None:
    """As written, on the CPU in a GPU's place: the pages are stored with the device's sums and come back right."""
    shape, pages, page_tokens = Shape("LBNHC", 2, 20, 4, 8, (16, 16), 2), 3, 16
    memory: list[HostBuffer] = []

    def take(size: int) -> tuple[int, np.ndarray]:
        memory.append(HostBuffer(size))
        return memory[0].address, memory[0].data

    engine_kv = EngineKv(shape, take)
    engine_kv.bytes[:] = np.random.default_rng(0).integers(0, 256, len(engine_kv.bytes), np.uint8)
    made = engine_kv.plan(page_tokens)
    spec = CacheSpec("m", b"f" * 16, "bfloat16", page_tokens, (made.group,))
    keys = page_keys(spec, np.arange(pages * page_tokens, dtype=np.int32))
    block_ids = [3, 1, 4, 15, 9, 2]
    with Client(daemon.socket, instance="engine", verify="always", timeout_s=10.0) as client:
        cache, engine = client.open(spec), HostDevice().stream()
        space = {
            "bases": [engine_kv.address + layer * engine_kv.strides["L"] for layer in range(shape.layers)],
            "shape": [shape.blocks, shape.heads, shape.tokens, sum(shape.dims)],
            "strides": [engine_kv.strides[axis] for axis in "BHNC"], "dims": shape.dims, "itemsize": shape.item,
            "page_tokens": page_tokens, "group": made.group, "part": None, "codec": "none",
            "path": cache.match(keys), "pages": pages, "block_ids": block_ids,
            "engine": engine, "engine_stream": 0, "kv_is_computed": engine.record(),
        }  # fmt: skip
        with mock.patch("kvtier.device.find.open_device", return_value=(HostDevice(), "")):
            run(blocks("gpu.md", "python")[1], space)
        with cache.match(keys).acquire(wait_ms=5000) as lease:
            assert lease.pages == pages
            for page in range(pages):
                stored = lease.view(0, page)
                assert np.array_equal(stored, engine_kv.page(block_ids[2 * page : 2 * page + 2]))
        space["shuttle"].close()


def test_running_pages_as_the_page_on_gpus_has_them(tmp_path: Path) -> None:
    """As written, on the CPU in a GPU's place: a prompt whose first page is cached, and pages that are decoded."""
    spec = CacheSpec("m", b"f" * 16, "bfloat16", 16, (GroupSpec(Kind.FULL, layers=2, heads=2, cell_bytes=512),))
    keys = [page_keys(spec, np.arange(16 * page, 16 * page + 16, dtype=np.int32)) for page in range(4)]
    flags = ["--device-which=cpu", "--device-bytes=16MiB"]
    with (
        Daemon(tmp_path, host="16MiB", disk="16MiB", flags=flags) as daemon,
        Client(daemon.socket, instance="engine", timeout_s=10.0) as client,
    ):
        cache = client.open(spec)
        with cache.match(keys[0]).reserve(0, 1) as held:
            held.write(0, 0, np.ones(spec.groups[0].item_bytes, np.uint8))
            assert held.commit() == 1
        assert client.map_device()
        run(
            blocks("gpu.md", "python")[0],
            {
                "cache": cache, "prompt": keys[:1], "keys_of_whole_pages": b"".join, "pages": 3,
                "full_pages": list(enumerate(keys))[1:], "stream": HostDevice().stream(),
            },
        )  # fmt: skip
        assert cache.match(b"".join(keys)).pages == 4


def test_a_policy_of_ones_own_as_the_guide_has_it(tmp_path: Path) -> None:
    """The file is taken as a policy, ranks as it says, and is replayed beside LRU."""
    (tmp_path / "dear.py").write_text(blocks("operating.md", "python")[0])
    (tmp_path / "TRACE").write_text(requests(10, 3))
    words = ["replay", str(tmp_path / "TRACE"), "--policy", str(tmp_path / "dear.py"), "--policy", "lru", "--json"]
    done = CliRunner().invoke(main, [*words, "--capacity", "20%"])
    assert done.exit_code == 0, done.output
    own, lru = json.loads(done.stdout)
    assert own["requests"] == lru["requests"] == 30
    ranks = load(str(tmp_path / "dear.py"))(Tier.HOST)
    old_and_deep, young = SimpleNamespace(time=0.0, depth=1000), SimpleNamespace(time=59.0, depth=0)
    assert ranks.rank(None, old_and_deep) > ranks.rank(None, young)
    assert config.load(None, {"KVTIER_POLICY": str(tmp_path / "dear.py")}).policy == str(tmp_path / "dear.py")
