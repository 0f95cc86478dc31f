"""Time to the first token against the share of the prompt that is cached; what kvtier costs where nothing is.

    python bench/bench_engines.py [--json FILE] [--rounds N] [--seed N] [--tiny]

A Llama of ten layers with random weights (float32, one thread). transformers runs here, vLLM in the venv of
`make engines` (or KVTIER_VLLM_PYTHON): alone, with KvtierConnector, and with its own file system tier, in turns. Alone
means that its own prefix cache is emptied before each request, as for one that comes to another engine or late.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine_replays import AGENT, CHAT, PAGE, SMALL, Prompts, Shape, replay
from measure import OURS, Bench, RivalFailed, Target, interleave, skipped
from rival import SCRIPTS, Rival, Running

from kvtier.demo.daemon import Daemon

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9)
COST = Target("value", "<=", 0.3)
WAIT_S = 30.0
LMCACHE = "LMCache 0.5.6 MP with vLLM"
PACKAGES = (
    ("--no-deps", "lmcache==0.5.6"),
    ("sortedcontainers", "aiofile", "aiofiles", "nvtx", "py-cpuinfo", "numba", "redis",
     "opentelemetry-exporter-prometheus<=0.61b0"),
)  # fmt: skip
"""What its connector and server need beside vLLM's own packages."""
ROW = 3
"""Prompts in a turn, where what kvtier takes is measured."""
AGAIN = ", started again"
CLOCKED = "kvtier, clocked"
"""The same engine while it notes what the connector's methods take, which is some time itself."""
EMPTY = "an empty connector"
"""In the place of kvtier's, in the same engines."""
TOGETHER = 8
"""Prompts that come at once."""
SAVED_S = 0.3
RESETS = 100
"""Times that an engine is asked to empty its own prefix cache."""


def main() -> None:
    """Measure both engines."""
    bench = Bench("engines", __doc__ or "")
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as home:
        try:
            folder = model(Path(home) / "model", layers=2 if bench.tiny else 10)
        except ImportError as exc:
            skipped("engines", exc)
            folder = None
        for name, engine in (("transformers", transformers), ("vLLM", vllm)) if folder else ():
            (Path(home) / name).mkdir()
            with Daemon(Path(home) / name, host="1GiB", disk="1GiB") as daemon:
                try:
                    with engine(folder, daemon, Path(home), rivals=bench.rivals) as subjects:
                        measure(bench, name, subjects)
                except (ImportError, FileNotFoundError) as exc:
                    skipped(name, exc)
    bench.finish()


def model(folder: Path, layers: int) -> Path:
    """The bench's model in a folder: the shape of SmolLM2-135M with fewer layers and words."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=4096, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


Ask = Callable[..., dict[str, float]]
"""Gives the first token of a prompt: s, cached, and of kvtier's own part inside_s and, where known, inside_cpu_s.

vLLM's is asked with several prompts too, which come at once, and gives the same of all their tokens.
"""


def measure(bench: Bench, name: str, subjects: dict[str, Ask]) -> None:
    """Shares, costs, conversations; `subjects` are kvtier, the engine alone, and what else it has."""
    prompts = Prompts(64 if bench.tiny else 512, bench.seed)
    for ask in subjects.values():
        ask(prompts.fresh())
    trunk(subjects[OURS], prompts)
    for share in SHARES:
        shares(bench, name, subjects, prompts, share)
    if name == "vLLM":  # transformers takes five seconds for a prompt. Not before: it pushes out what is shared above
        overhead(bench, name, subjects, prompts, bench.rounds(16))
        overhead(bench, name, subjects, Prompts(3 * prompts.length, bench.seed + 1), bench.rounds(6))
        workload(bench, name, subjects, prompts, bench.rounds(8))
    for kind, shape in (("chat", SMALL),) if bench.tiny else (("chat", CHAT), ("agents", AGENT)):
        runs = {
            subject: replays(ask, shape)
            for subject, ask in subjects.items()
            if not subject.endswith((AGAIN, EMPTY, CLOCKED))
        }
        samples = interleave(runs, bench.rounds(2))
        bench.add(f"{name}: first token, mean over {kind}", "ms", samples, limit=f"{name} alone")


def replays(ask: Ask, shape: Shape) -> Callable[[], float]:
    """Each call replays conversations that nobody has had: milliseconds to the first token of a turn, on average."""
    seeds = itertools.count(1000)
    return lambda: statistics.mean(ask(prompt)["s"] * 1e3 for prompt in replay(shape, next(seeds)))


def trunk(ask: Ask, prompts: Prompts) -> None:
    """Store what later prompts share: an engine does not wait long for room, the next request finds it."""
    deadline = time.monotonic() + WAIT_S
    while not ask(prompts.trunk)["cached"]:
        if time.monotonic() > deadline:
            raise FileNotFoundError("nothing was ever stored")
        time.sleep(0.2)


def shares(bench: Bench, name: str, subjects: dict[str, Ask], prompts: Prompts, share: float) -> None:
    """The first token where a share of the prompt is cached; and what kvtier costs where nothing is."""
    inside: list[dict[str, float]] = []
    ask = subjects[OURS] if share else subjects.get(CLOCKED, subjects[OURS])

    def ours() -> float:
        got = ask(prompts.sharing(share))
        assert got["cached"] == int(prompts.length * share) // PAGE * PAGE, (share, got)
        inside.append(got)
        return got["s"] * 1e3

    alone = f"{name} alone"
    samples = interleave({OURS: ours, alone: lambda: subjects[alone](prompts.fresh())["s"] * 1e3}, bench.rounds(5))
    bench.add(f"{name}: first token, {share:.0%} of {prompts.length} tokens cached", "ms", samples, limit=alone)
    if not share:
        part(bench, f"{name}: kvtier's part of the first token", inside)


def part(bench: Bench, what: str, inside: list[dict[str, float]]) -> None:
    """What kvtier's own methods take of what the engine's thread does, where nothing is cached."""
    for field, of in (("inside_s", "time"), ("inside_cpu_s", "processor time of the engine's thread")):
        if field in inside[0]:
            costs = [max(got[field], 1e-9) / got["s"] * 100 for got in inside]
            bench.add(f"{what}, {of}", "%", {OURS: costs}, target=COST)


def workload(bench: Bench, name: str, subjects: dict[str, Ask], prompts: Prompts, rounds: int) -> None:
    """The same of requests that come at once and are never asked again, from the first to all tokens of the last.

    Saves go on while the next prompts are computed, as in an engine that has work.
    """
    turns = [[prompts.fresh() for _ in range(2 * TOGETHER)] for _ in range(rounds)]
    inside: list[dict[str, float]] = []

    def computing(subject: str) -> Callable[[], float]:
        mine = iter(turns)

        def turn() -> float:
            row = next(mine)
            took = subjects[subject](*row[:TOGETHER])["s"] + subjects[subject + AGAIN](*row[TOGETHER:])["s"]
            time.sleep(SAVED_S)
            return took

        return turn

    def clocked() -> float:
        got = subjects[CLOCKED](*[prompts.fresh() for _ in range(TOGETHER)])
        inside.append(got)
        time.sleep(SAVED_S)
        return got["s"]

    samples = interleave({each: computing(each) for each in (OURS, EMPTY)} | {CLOCKED: clocked}, rounds)
    what = f"{TOGETHER} prompts of {prompts.length} tokens at once, none cached"
    bench.compare(f"{name}: kvtier against {EMPTY}, {what}", samples, EMPTY, COST)
    part(bench, f"{name}: kvtier's part of {what}", inside)


def overhead(bench: Bench, name: str, subjects: dict[str, Ask], prompts: Prompts, rounds: int) -> None:
    """What kvtier takes of an engine's time where nothing is ever used again, in many short turns.

    Against the very same engines with a connector that does nothing in kvtier's place: two processes that run the same
    differ by more than what is looked for. And both against engines without any connector. All compute the same
    prompts, a few in a row: what is still being saved of one is paid for by the next. Before the next turn all is
    saved. Each has two engines, as those that were started first may be slower for good.
    """
    turns = [[prompts.fresh() for _ in range(2 * ROW)] for _ in range(rounds)]
    alone = f"{name} alone"
    ran: dict[str, list[float]] = {OURS: [], EMPTY: [], alone: []}

    def computing(subject: str) -> Callable[[], float]:
        mine = iter(turns)

        def turn() -> float:
            row, got = next(mine), []
            for again, part in (("", row[:ROW]), (AGAIN, row[ROW:])):
                got += [subjects[subject + again](prompt) for prompt in part]
                time.sleep(SAVED_S)
            ran[subject].append(statistics.mean(each["cpu_s"] for each in got))
            return statistics.mean(each["s"] for each in got)

        return turn

    samples = interleave({each: computing(each) for each in ran}, len(turns))
    nothing = f"nothing of {prompts.length} tokens cached"
    for more, times in (("", samples), (", processor time of the engine's thread", ran)):
        bench.compare(f"{name}: first token with kvtier against {EMPTY}, {nothing}{more}", times, EMPTY, COST)
        bench.compare(f"{name}: first token with kvtier against alone, {nothing}{more}", times, alone)
        empty = {OURS: times[EMPTY], alone: times[alone]}
        bench.compare(f"{name}: first token with {EMPTY} against alone, {nothing}{more}", empty, alone)


@contextlib.contextmanager
def transformers(folder: Path, daemon: Daemon, home: Path, *, rivals: bool) -> Iterator[dict[str, Ask]]:
    """In this process."""
    del home, rivals
    import torch
    from transformers import AutoModelForCausalLM

    from kvtier.client import Client
    from kvtier.engines.transformers import attach

    torch.set_num_threads(1)
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()

    def alone(prompt: list[int]) -> dict[str, float]:
        ids = torch.tensor([prompt])
        began = time.perf_counter()
        loaded.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
        return {"s": time.perf_counter() - began, "cached": 0}

    with Client(daemon.socket) as client:
        kv = attach(loaded, client=client, page_tokens=PAGE)

        def ours(prompt: list[int]) -> dict[str, float]:
            began = time.perf_counter()
            kv.generate(torch.tensor([prompt]), max_new_tokens=1, do_sample=False)
            took, use = time.perf_counter() - began, kv.last
            return {"s": took - use.store_s, "inside_s": use.load_s, "cached": use.hit_tokens}

        yield {OURS: ours, "transformers alone": alone}


@contextlib.contextmanager
def vllm(folder: Path, daemon: Daemon, home: Path, *, rivals: bool) -> Iterator[dict[str, Ask]]:
    """Engines in processes of their own, of which one works at a time."""
    from vllmkit import PYTHON, Engine, connector, tier

    if not PYTHON.exists():
        raise FileNotFoundError(f"no vLLM at {PYTHON}: `make engines`")
    files = tier(daemon.socket, host_bytes=8 << 20)
    files["kv_connector_extra_config"]["secondary_tiers"] = [{"type": "fs", "root_dir": str(home / "files")}]
    alone = "vLLM alone"
    attached = {OURS: connector(daemon.socket), alone: None, "vLLM's fs tier": files}
    attached |= {alone + AGAIN: None, OURS + AGAIN: connector(daemon.socket)}  # the other way round
    with contextlib.ExitStack() as stack:
        engines = {name: Engine(home / "log", folder, attach, max_model_len=2048) for name, attach in attached.items()}
        for engine in engines.values():
            stack.callback(engine.kill)
        for again in ("", AGAIN):
            engines[EMPTY + again] = engines[OURS + again]
        engines[CLOCKED] = engines[OURS]
        if rivals:
            with contextlib.suppress(RivalFailed):
                engines["LMCache MP"] = lmcache(stack, folder, home)

        def ask(name: str, *prompts: list[int]) -> dict[str, float]:
            engine = engines[name]
            try:
                if name.startswith((OURS, EMPTY)):
                    engine.tell("attach", on=name.startswith(OURS))
                    engine.tell("clock", on=name == CLOCKED)
                for _ in range(RESETS):
                    if engine.tell("reset"):
                        if len(prompts) > 1:
                            return engine.tell("together", prompts=prompts)
                        return engine.tell("first_token", prompt=prompts[0])
                    engine.tell("first_token", prompt=[5, 6, 7])  # LMCache gives blocks back with later steps
                    engine.tell("settle")
            except AssertionError as exc:
                raise RivalFailed(str(exc).strip().splitlines()[-1]) from None
            raise RivalFailed("its blocks are never freed")

        yield {name: functools.partial(ask, name) for name in engines}


def lmcache(stack: contextlib.ExitStack, folder: Path, home: Path) -> Any:
    """An engine on LMCache's server. Raises RivalFailed, after saying why.

    Its other connector, LMCacheConnectorV1, goes on without a cache on a CPU: CreateGPUConnector raises "No supported
    cpu connector found".
    """
    from vllmkit import PYTHON, SIDE, Engine, paths

    rival = Rival(LMCACHE, "lmcache-vllm", "lmcache_server.py", PACKAGES, beside=str(site_of(PYTHON)))
    try:
        port = stack.enter_context(Running(rival)).ask("port")
        attach = {
            "kv_connector": "LMCacheMPConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
        }  # fmt: skip
        env = {"PYTHONPATH": paths(SCRIPTS / "lmcache_vllm", SIDE), "DO_NOT_TRACK": "1"}
        engine = Engine(home / "lmcache", folder, attach, env, rival.python(), max_model_len=2048)
        stack.callback(engine.kill)
        engine.tell("first_token", prompt=[5, 6, 7])
    except (RivalFailed, AssertionError) as exc:
        skipped(LMCACHE, str(exc).strip().splitlines()[-1])
        raise RivalFailed(str(exc)) from None
    return engine


def site_of(python: Path) -> Path:
    """Where an environment keeps its packages."""
    return next((python.parent.parent / "lib").glob("python*")) / "site-packages"


if __name__ == "__main__":
    main()
