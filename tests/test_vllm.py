"""Real vLLM engines on kvtier: the same tokens as without, hits that survive everything, never foreign KV."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier import wire
from kvtier.control.call import Admin
from kvtier.demo.daemon import Daemon
from storekit import KINDS, maker
from vllmkit import ATTACH, EVERY, PAGE, Engine, connector, kernels, make_model, needs_vllm, prompt, texts, tier

pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.timeout(600)]

HOST, DISK = "256MiB", "512MiB"
BOUND_S = 20.0
"""What a request may take while the daemon does what it should not; without, it takes a tenth of a second."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny models."""
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "llama", "llama")
    make_model(folder / "gemma", "gemma")
    make_model(folder / "other" / "llama", "llama", seed=1)
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon whose invariants hold when the test is over."""
    with Daemon(tmp_path / "home", host=HOST, disk=DISK) as running:
        yield running
        if running.running:
            assert idle(running)


@pytest.fixture(autouse=True)
def _home_folder(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()


def idle(daemon: Daemon) -> bool:
    """Whether nobody holds anything soon after the last engine went, and every invariant holds."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if not daemon.broken_invariants() and not json.loads(control(daemon, "status", "--json"))["instances"]:
            return True
        time.sleep(0.2)
    return False


def control(daemon: Daemon, *verb: str) -> str:
    """What kvtierctl prints."""
    admin = str(daemon.socket.with_name("admin.sock"))
    command = [sys.executable, "-m", "kvtier.ctl", "--socket", admin, *verb]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attach", ATTACH)
def test_a_fresh_engine_and_a_restarted_daemon_give_the_same_bits(
    models: Path, home: Daemon, tmp_path: Path, attach: str, dtype: str
):
    """192 of 200 tokens are loaded; tokens and logprobs are those of the engine that computed them.

    So it is for prompts of a whole number of pages, one more and one less, for equal prompts at the same time, and for
    a next turn, whose answer of the last turn is cached too.
    """
    lengths = [200, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 3 * PAGE + 1]
    prompts = [prompt(n, seed) for seed, n in enumerate(lengths, 11)]
    options = {"model": models / "llama", "attach": ATTACH[attach](home.socket), "dtype": dtype}
    with Engine(tmp_path / "log", **options) as cold:
        want = [cold.generate([each])[0] for each in prompts]
        left = 1 if attach == "connector" else 0  # vLLM's own host tier loads all and computes the last token again
        whole = [(n - left) // PAGE * PAGE for n in lengths]
        kept(cold, prompts, whole)
        twins = cold.generate([prompt(150, 5)] * 3)
        assert texts(twins)[0] == texts(twins)[1] == texts(twins)[2]
        turn = prompts[0] + cold.generate([prompts[0]], tokens=40)[0]["tokens"]
        again = cold.again([prompts[0]])[0]
        assert (again["cached"], again["logprobs"]) == (192, want[0]["logprobs"])
    home.stop()
    home.start()
    with Engine(tmp_path / "log", **options) as fresh:
        got = [fresh.generate([each])[0] for each in prompts]
        assert [each["cached"] for each in got] == whole
        assert [each["tokens"] for each in got] == [each["tokens"] for each in want]
        assert [each["logprobs"] for each in got] == [each["logprobs"] for each in want]
        assert texts(fresh.generate([prompt(150, 5)] * 3)) == texts(twins)
        assert fresh.generate([turn + prompt(20)])[0]["cached"] == 224


@pytest.mark.parametrize("attach", ATTACH)
def test_a_sliding_window_model_gives_the_same_bits_with_hits(models: Path, home: Daemon, tmp_path: Path, attach: str):
    """Three KV cache groups: a fresh engine loads what each group needs, and what it gives is what was computed."""
    options = {"model": models / "gemma", "attach": ATTACH[attach](home.socket)}
    prompts = [prompt(200), prompt(96, 3), prompt(40, 9)]
    whole = [192, 64, 32]
    with Engine(tmp_path / "log", **options) as cold:
        assert cold.tell("layout")["groups"] == 3
        want = [cold.generate([each])[0] for each in prompts]
        kept(cold, prompts, whole)
    with Engine(tmp_path / "log", **options) as fresh:
        got = [fresh.generate([each])[0] for each in prompts]
    assert [each["cached"] for each in got] == whole
    assert [(each["tokens"], each["logprobs"]) for each in got] == [(w["tokens"], w["logprobs"]) for w in want]


@pytest.mark.parametrize(
    ("kind", "attach", "size"), [("lfm2", "connector", 32), ("lfm2", "tier", 32), ("qwen3next", "connector", 544)]
)
def test_a_model_with_recurrent_state_gives_the_same_bits_with_hits(
    models: Path, home: Daemon, tmp_path: Path, kind: str, attach: str, size: int
):
    """Short convolutions, gated delta nets (bfloat16 on a CPU): a fresh engine loads pages and the state at their end.

    What it gives is what was computed, bit for bit, and it goes on from the end of the answer as well. The states of
    the gated delta nets lie in several slots.
    """
    dtype = "float32" if kind == "lfm2" else "bfloat16"
    options = {"model": models / kind, "attach": ATTACH[attach](home.socket), "dtype": dtype, "max_model_len": 1024}
    make_model(models / kind, kind)
    prompts = [prompt(600, 3), prompt(500, 4), prompt(97, 5), prompt(40, 6)]
    whole = [(len(each) - 1) // size * size for each in prompts]
    with Engine(tmp_path / "log", **options) as cold:
        assert cold.tell("layout")["groups"] == 2
        want = [cold.generate([each])[0] for each in prompts]
        turn = prompts[1] + cold.generate([prompts[1]], tokens=60)[0]["tokens"]
        kept(cold, [*prompts, turn], [*whole, 544])
    with Engine(tmp_path / "log", **options) as fresh:
        got = [fresh.generate([each])[0] for each in prompts]
        assert [each["cached"] for each in got] == whole
        assert [(each["tokens"], each["logprobs"]) for each in got] == [(w["tokens"], w["logprobs"]) for w in want]
        assert fresh.generate([turn + prompt(20)])[0]["cached"] == 544


@pytest.mark.parametrize("kind", ["llama", "gemma", "lfm2"])
def test_copies_by_kernels_give_the_same_bits(models: Path, home: Daemon, tmp_path: Path, kind: str):
    """What torch saved kernels load, what they saved torch loads: tokens and logprobs are those that were computed."""
    make_model(models / kind, kind)
    one, other = prompt(200), prompt(170, 3)
    options = {"model": models / kind}
    with Engine(tmp_path / "log", **options, attach=connector(home.socket)) as torch:
        want = torch.generate([one])[0]
        kept(torch, [one], [192])
    with Engine(tmp_path / "log", **options, attach=kernels(home.socket)) as engine:
        got = engine.generate([one])[0]
        assert (got["cached"], got["tokens"], got["logprobs"]) == (192, want["tokens"], want["logprobs"])
        want = engine.generate([other])[0]
        assert want["cached"] == 0
        kept(engine, [other], [160])
        again = engine.again([other])[0]
        assert (again["tokens"], again["logprobs"]) == (want["tokens"], want["logprobs"])
    with Engine(tmp_path / "log", **options, attach=connector(home.socket)) as torch:
        got = torch.generate([other])[0]
        assert (got["cached"], got["tokens"], got["logprobs"]) == (160, want["tokens"], want["logprobs"])


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_use_the_daemons_device_tier(models: Path, tmp_path: Path, kind: str):
    """Pages are computed into the daemon's device memory and read there; who does not map it has them from host.

    What they give is what vLLM's own prefix cache gives, bit for bit: both compute the same tokens after the same KV.
    """
    maker(kind)
    flags = [f"--device-which={'cpu' if kind == 'cpu' else 'cuda:0'}", "--device-bytes=64MiB"]
    more = {} if kind == "cpu" else {"dtype": "bfloat16", "gpu_memory_utilization": 0.3}
    options = {"model": models / "llama", **more}
    with Daemon(tmp_path / "home", host=HOST, disk=DISK, flags=flags) as home:
        with Engine(tmp_path / "log", **options, attach=kernels(home.socket, device=True)) as engine:
            engine.generate([prompt(200)])
            kept(engine, [prompt(200)], [192])
            want = engine.generate([prompt(200)])[0]
            again = engine.again([prompt(200)])[0]
            assert (again["tokens"], again["logprobs"]) == (want["tokens"], want["logprobs"])
            assert json.loads(control(home, "status", "--json"))["tiers"]["device"]["used_bytes"] > 0
        with Engine(tmp_path / "log", **options, attach=connector(home.socket, copy="torch")) as torch:
            got = torch.generate([prompt(200)])[0]
            assert (got["cached"], got["tokens"], got["logprobs"]) == (192, want["tokens"], want["logprobs"])
        assert idle(home)


@pytest.mark.parametrize("attach", ["connector", "kernels"])
def test_tensor_parallel_engines_share_pages_with_others(models: Path, home: Daemon, tmp_path: Path, attach: str):
    """Two ranks write their heads of each page; they, and an engine of one rank, load them and give the same tokens."""
    options = {"model": models / "llama", "attach": EVERY[attach](home.socket)}
    both = {"tensor_parallel_size": 2, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
    with Engine(tmp_path / "log", **options, **both) as two:
        want = two.generate([prompt(200)])
        kept(two, [prompt(200)], [192])
        assert texts(two.again([prompt(200)])) == texts(want)
    with Engine(tmp_path / "log", **options) as one:
        got = one.generate([prompt(200)])
    assert got[0]["cached"] == 192
    assert texts(got) == texts(want)


@pytest.mark.parametrize("attach", ATTACH)
def test_a_daemon_that_is_killed_stopped_or_corrupt_is_a_miss(models: Path, home: Daemon, tmp_path: Path, attach: str):
    """The same text within a bounded time, whatever happens to the daemon between requests and during them."""
    prompts = [prompt(200, seed) for seed in range(3, 9)]
    with Engine(tmp_path / "log", model=models / "llama", attach=ATTACH[attach](home.socket)) as engine:
        want = texts([engine.generate([each])[0] for each in prompts])

        def same(hits: bool | None = None) -> None:
            began = time.monotonic()
            got = engine.again(prompts)
            assert texts(got) == want
            assert {each["reason"] for each in got} == {"length"}
            assert time.monotonic() - began < BOUND_S
            if hits is not None:
                assert any(each["cached"] for each in got) == hits

        same(hits=True)
        flush(home)
        home.kill()
        same()
        home.start()
        wait_for(lambda: any(each["cached"] for each in engine.again(prompts[:1])), engine)
        os.kill(home.pid, signal.SIGSTOP)
        same()
        os.kill(home.pid, signal.SIGCONT)
        for moment in (0.0, 0.01, 0.03, 0.1, 0.3):  # during requests
            threading.Timer(moment, os.kill, (home.pid, signal.SIGSTOP)).start()
            same()
            os.kill(home.pid, signal.SIGCONT)
            same()
            threading.Timer(moment, home.kill).start()
            same()
            time.sleep(0.3)
            home.start()
        flush(home)
        home.stop()
        corrupt(home)
        home.start()
        time.sleep(6)  # the engine tries again after at most 5 s
        same(hits=False if attach == "connector" else None)  # vLLM's host tier has the last few itself
        assert not home.broken_invariants()


def flush(daemon: Daemon) -> None:
    """Wait until everything is on disk."""
    time.sleep(1)  # a commit that was just sent
    control(daemon, "flush")


def kept(engine: Engine, prompts: list[list[int]], cached: list[int]) -> None:
    """Wait until so many tokens of prompts are kept: an engine drops what it finds no room for at once."""
    wait_for(lambda: [engine.again([each])[0]["cached"] for each in prompts] == cached, engine)


def wait_for(true: Any, engine: Engine) -> None:
    """Wait until the engine has found the daemon again."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, engine.log.read_text()[-2000:]
        time.sleep(0.5)


def corrupt(daemon: Daemon) -> None:
    """Flip a bit in every 2 KiB of the payload on disk."""
    raw = np.fromfile(daemon.home / "disk" / "extents", np.uint8)
    raw[::2048] ^= 0x40
    raw.tofile(daemon.home / "disk" / "extents")


@pytest.mark.parametrize("attach", ATTACH)
def test_an_engine_killed_in_mid_save_leaves_nothing_behind(models: Path, home: Daemon, tmp_path: Path, attach: str):
    """After kill -9 nothing is held, every invariant is true, and what a fresh engine gives is right."""
    options = {"model": models / "llama", "attach": ATTACH[attach](home.socket), "max_num_batched_tokens": 64}
    prompts = [prompt(400, seed) for seed in range(3, 13)]
    with Engine(tmp_path / "log", **options) as engine:
        engine.generate([prompt(40)])
        engine.order("generate", prompts=prompts, tokens=60)
        began, deadline = pages(home), time.monotonic() + 60
        while pages(home) < began + 8:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        engine.kill()
    assert idle(home)
    with Engine(tmp_path / "log", **options) as fresh:
        warm = fresh.generate(prompts[:1])[0]
        fresh.tell("reset", connector=True)
        cold = fresh.generate(prompts[:1])[0]
    assert warm["tokens"] == cold["tokens"]
    assert cold["cached"] == 0


def pages(daemon: Daemon) -> int:
    """Pages that the daemon has."""
    with Admin(daemon.socket.with_name("admin.sock"), 10) as admin:
        return admin.ask(wire.Status(), wire.Info).data["pages"]


@pytest.mark.parametrize(
    ("kind", "attach"),
    [("llama", "connector"), ("llama", "tier"), ("llama", "kernels"), ("gemma", "connector"), ("gemma", "kernels")],
)
def test_preemption_chunks_and_aborts_change_no_token(
    models: Path, home: Daemon, tmp_path: Path, kind: str, attach: str
):
    """Room for three requests of eight, prompts cut into chunks, requests that end early: all tokens as one by one."""
    options = {"model": models / kind, "attach": EVERY[attach](home.socket)}
    blocks = {"llama": 24, "gemma": 40}[kind]
    tight = {"num_gpu_blocks_override": blocks, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    prompts = [prompt(100 + 17 * seed, seed) for seed in range(3, 11)]
    with Engine(tmp_path / "log", **options) as alone:
        want = texts([alone.generate([each], tokens=100, salts=["alone"])[0] for each in prompts])
    with Engine(tmp_path / "log", **options, **tight) as engine:
        for _ in range(3):
            assert texts(engine.again(prompts, tokens=100)) == want
        assert engine.tell("metrics")["vllm:num_preemptions"] > 0
        for steps in (1, 3, 7, 30):
            assert engine.tell("reset")
            assert engine.tell("abort", prompts=prompts, aborted=4, steps=steps, tokens=100) == want[4:]
        assert texts(engine.again(prompts, tokens=100)) == want


def test_what_changes_kv_is_never_shared(models: Path, home: Daemon, tmp_path: Path):
    """Another salt, other weights under one name, another type, another page size, weights changed in place: no hit.

    An engine with the first one's weights shares with it all the same, and not with what it became.
    """
    with Engine(tmp_path / "log", model=models / "llama", attach=connector(home.socket)) as engine:
        want = engine.generate([prompt(200)])
        assert engine.again([prompt(200)], salts=["alice"])[0]["cached"] == 0
        wait_for(lambda: engine.again([prompt(200)], salts=["alice"])[0]["cached"] == 192, engine)
        assert engine.again([prompt(200)], salts=["bob"])[0]["cached"] == 0
        engine.tell("scale", layer=0, by=1.5)
        assert engine.tell("reset", connector=True)
        changed = engine.generate([prompt(200)])
        assert changed[0]["cached"] == 0
        assert texts(changed) != texts(want)
        wait_for(lambda: engine.again([prompt(200)])[0]["cached"] == 192, engine)
    others = ("other/llama", {}), ("llama", {"dtype": "bfloat16"}), ("llama", {"block_size": 64}), ("llama", {})
    for model, other in others:
        with Engine(tmp_path / "log", model=models / model, attach=connector(home.socket), **other) as engine:
            got = engine.generate([prompt(200)])
        same = model == "llama" and not other
        assert got[0]["cached"] == (192 if same else 0), (model, other)
        assert not same or texts(got) == texts(want)


def test_adapters_share_only_with_the_very_same_weights(models: Path, home: Daemon, tmp_path: Path):
    """LoRA: not with the model alone, and not with another adapter of the same name and path."""
    options = {"model": models / "llama", "attach": connector(home.socket), "enable_lora": True, "max_lora_rank": 8}
    lora = make_model(tmp_path / "adapter", "adapter")
    with Engine(tmp_path / "log", **options) as engine:
        base = engine.generate([prompt(200)])
        tuned = engine.again([prompt(200)], lora=str(lora))
        assert tuned[0]["cached"] == 0
        assert texts(tuned) != texts(base)
        wait_for(lambda: engine.again([prompt(200)], lora=str(lora))[0]["cached"] == 192, engine)
    with Engine(tmp_path / "log", **options) as engine:
        fresh = engine.generate([prompt(200)], lora=str(lora))
    assert fresh[0]["cached"] == 192
    assert texts(fresh) == texts(tuned)
    make_model(lora, "adapter", seed=1)
    with Engine(tmp_path / "log", **options) as engine:
        assert engine.generate([prompt(200)], lora=str(lora))[0]["cached"] == 0
        assert texts(engine.again([prompt(200)])) == texts(base)


def test_the_tier_shares_nothing_that_changes_kv(models: Path, home: Daemon, tmp_path: Path):
    """The same for the secondary tier: salts, weights in place, other weights, another type."""
    with Engine(tmp_path / "log", model=models / "llama", attach=tier(home.socket)) as engine:
        engine.generate([prompt(200)])
        assert engine.again([prompt(200)], salts=["alice"])[0]["cached"] == 0
        engine.tell("scale", layer=0, by=1.5)
        assert engine.tell("reset", connector=True)
        assert engine.generate([prompt(200)])[0]["cached"] == 0
    for model, other in (("other/llama", {}), ("llama", {"dtype": "bfloat16"})):
        with Engine(tmp_path / "log", model=models / model, attach=tier(home.socket), **other) as engine:
            assert engine.generate([prompt(200)])[0]["cached"] == 0


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_a_page_that_rots_in_memory_is_computed_again(models: Path, home: Daemon, tmp_path: Path, kind: str):
    """One flipped bit in the daemon's memory: the load fails, the request is computed, the text is the same.

    So it is where vLLM can say which blocks were not loaded, and where it can only be told of whole requests.
    """
    with Engine(tmp_path / "log", model=models / kind, attach=connector(home.socket)) as engine:
        want = engine.generate([prompt(200)])
        wait_for(lambda: engine.again([prompt(200)])[0]["cached"] == 192, engine)
        assert flip_a_bit_of_every_page(home) > 0
        for _ in range(2):
            assert texts(engine.again([prompt(200)])) == texts(want)
    assert "checksum mismatch" in (tmp_path / "log").read_text()


def flip_a_bit_of_every_page(daemon: Daemon) -> int:
    """Write into the daemon's arena what no client may: pages that are served differ from their checksums."""
    fds = Path(f"/proc/{daemon.pid}/fd").iterdir()
    number = next(fd for fd in fds if "memfd:" in str(fd.readlink()) and fd.stat().st_size == 256 << 20)
    with number.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        raw = np.frombuffer(memory, np.uint8)
        used = np.flatnonzero(raw.reshape(-1, 4096).any(axis=1))
        raw.reshape(-1, 4096)[used, 100] ^= 1
        del raw
    return len(used)
