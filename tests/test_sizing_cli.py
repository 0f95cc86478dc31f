"""The commands: fixed forms, refusals, and every command of the documentation."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvtier.sizing.__main__ import main
from kvtier.sizing.cli import probe, size
from kvtier.sizing.models import table

DOCS = Path(__file__).resolve().parent.parent / "docs" / "sizing.md"
GOLDEN = json.loads((Path(__file__).parent / "golden_sizing.json").read_text())
INTEGERS = ("bytes_per_token", "fixed_bytes", "bytes_at_tokens", "engine_bytes_at_tokens", "stored_bytes_at_tokens")


def requests(users=30, turns=5, block=512):
    """Mooncake lines of users who take turns after one system prompt."""
    lines = []
    for turn in range(turns):
        for user in range(users):
            ids = [0] + [1 + user * 100 + k for k in range(8 * (turn + 1))]
            lines.append({"timestamp": 1000 * len(lines), "input_length": block * len(ids) + 5, "output_length": 200,
                          "hash_ids": ids})  # fmt: skip
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a command line in a folder of its own that holds a trace, away from this user's hardware file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "trace.jsonl").write_text(requests())

    def go(line, ok=0):
        result = CliRunner().invoke(main, shlex.split(line))
        assert result.exit_code == ok, (line, result.output, result.exception)
        return result.output

    return go


def test_the_fixed_form_of_size_model(run):
    """Integers under their five names, and a tag for each under sources."""
    out = json.loads(run("size model gpt-oss-120b --kv-dtype bf16 --tokens 128Ki --json"))
    assert all(type(out[key]) is int for key in INTEGERS)
    assert [out[key] for key in INTEGERS] == [36864, 4718592, 4836556800, 9663676416, 4836556800]
    assert {out["sources"][key] for key in INTEGERS} <= {"exact", "measured", "assumed"}
    assert out["sources"]["bytes_per_token"] == "exact"
    assert out["sources"]["engine_bytes_at_tokens"] == "assumed"


def test_the_fixed_form_answers_for_every_row(run):
    """All 55 reference rows through the command, by name, to the byte."""
    for name, (slope, fixed, at_128k) in GOLDEN.items():
        out = json.loads(run(f"size model {shlex.quote(name)} --json"))
        assert (out["bytes_per_token"], out["fixed_bytes"], out["bytes_at_tokens"]) == (int(slope), fixed, at_128k)


def test_engines_names_of_precisions_are_understood(run):
    """bfloat16, fp8_e4m3 and auto mean bf16, fp8 and the model's own."""
    for given, used in (("bfloat16", "bf16"), ("fp8_e4m3", "fp8"), ("auto", "bf16")):
        assert json.loads(run(f"size model Llama-3.1-8B --kv-dtype {given} --json"))["kv_dtype"] == used


def test_tokens_are_echoed_as_the_integer_used(run, monkeypatch):
    """128k is 128000 in the answer, and what is too large for a float is whole."""
    monkeypatch.setenv("COLUMNS", "120")
    assert json.loads(run("size model Llama-3.1-8B --tokens 128k --json"))["tokens"] == 128_000
    many = 2**60 + 1
    assert f"{many:,}" in run(f"size model Llama-3.1-8B --tokens {many}")


def test_a_split_that_engines_refuse_is_told(run):
    """Ranks that do not divide the query heads can be counted, but no engine starts so."""
    for command in ("model", "fit"):
        assert "3 ranks do not divide 32 query heads" in run(f"size {command} Llama-3.1-8B --tp 3")
        assert "query heads" not in run(f"size {command} Llama-3.1-8B --tp 16")
    assert "query heads" not in run("size model MiniMax-Text-01 --tp 4")


def test_headings_are_whole_however_many_links_there_are(run, monkeypatch):
    """A table with more columns than fit breaks their names, and cuts none; nor does a narrow terminal."""
    assert "\u2026" not in run("size breakeven Qwen3-8B")
    monkeypatch.setenv("COLUMNS", "40")
    narrow = run("size breakeven Qwen3-8B")
    assert "worth_keeping_object_s " in narrow
    assert "\u2026" not in narrow


def test_no_room_for_kv_is_told(run):
    """A device tier of no bytes is no surprise without a word."""
    assert "device: no room for KV" in run("size tiers Llama-3.1-70B --rate 1")
    assert "no room" not in run("size tiers Llama-3.1-8B --rate 1")


def test_the_fixed_form_of_size_seed(run):
    """A list of rows with claim, printed, exact and verdict, holding the golden vectors."""
    rows = json.loads(run("size seed --json"))
    assert all({"claim", "printed", "exact", "verdict"} <= row.keys() for row in rows)
    assert {row["verdict"] for row in rows} == {"exact", "rounded", "unit", "wrong"}
    exact = [row["exact"] for row in rows]
    whole = [524288, 327680, 68719476736, 1073741824, 2684354560, 576716800000, 524288000, 52428800000, 523763712000]
    assert set(whole) <= set(exact)
    for number in (5.7344e13, 1.14688e14, 1.14688e15, 114.688, 22.9376, 57.344, 229.376, 2.29376, 124.688, 32.9376,
                   3.7856, 237.376, 30.9376, 7.6727, 85.899, 21.475, 5.369, 107.374, 26.844, 0.25,
                   0.908182):  # fmt: skip
        assert any(x == pytest.approx(number, rel=1e-4) for x in exact), number


def test_the_cost_of_a_hit_is_causal_unless_asked(run):
    """The seed's 80 % is wrong causally and exact in its own account."""
    for cost, verdict in (("causal", "wrong"), ("seed", "exact")):
        rows = json.loads(run(f"size seed --model-cost {cost} --json"))
        (row,) = [r for r in rows if r["claim"] == "saved by h = 0.8 of 131072"]
        assert row["verdict"] == verdict
        assert row["exact"] == pytest.approx(0.686 if cost == "causal" else 0.8, abs=1e-3)
    assert "wrong" in run("size seed")


def test_a_refusal_names_its_field_and_exits_1(run, tmp_path):
    """An unknown architecture; --assume-full turns it into a bound that is tagged so."""
    config = {"model_type": "brand_new", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "model_type: expected" in run("size model config.json", ok=1)
    out = json.loads(run("size model . --assume-full --json"))
    assert out["bytes_per_token"] == 2 * 8 * 64 * 4
    assert out["sources"]["bytes_per_token"] == "assumed"


@pytest.mark.parametrize(
    ("line", "ok", "says"),
    [
        ("size model", 0, "Llama-3.1-8B"),
        ("size model nothing-like-it", 1, "model: expected"),
        ("size model Llama-3.1-8B --tokens 128K", 2, "tokens: expected"),
        ("size model Llama-3.1-8B --kv-dtype fp3", 2, "kv-dtype"),
        ("size model Llama-3.1-8B --observed 1:2", 2, "MAXLEN:POOL:TOKENS"),
        ("size model Llama-3.1-8B --page 0", 1, "page: expected"),
        ("size model gpt-oss-120b --tp 8 --dcp 2", 1, "dcp: expected 1"),
        ("size fit Llama-3.1-8B --gpu Z80", 1, "gpu: expected one of"),
        ("size fit Llama-3.1-8B --shared 9k", 1, "shared: expected at most"),
        ("size fit Llama-3.1-8B --pool 3G", 2, "pool: expected bytes"),
        ("size fit Llama-3.1-8B --hardware gone.toml", 1, "hardware: expected"),
        ("size breakeven Llama-3.1-8B --link carrier-pigeon", 1, "link: expected"),
        ("size breakeven Llama-3.1-8B --price gold=1", 1, "price: expected one of gpu"),
        ("size transfer Llama-3.1-8B --cached 2048", 1, "cached: expected less"),
        ("size tiers Llama-3.1-8B --host 1GB --hits 0.5", 1, "hits: expected"),
        ("size model Llama-3.1-8B --block 0", 2, "'--block': 0 is not in the range"),
        ("size model Llama-3.1-8B --tp 4 --dcp 8", 1, "dcp: expected a divisor of tp=4"),
        ("size model Llama-3.1-8B --kv-dtype fp8_ds_mla", 1, "kv-dtype: expected another precision"),
        ("size model Llama-3.1-8B --observed 32Ki:1GiB:0", 2, "'--observed': tokens: expected at least one"),
        ("size model Llama-3.1-8B --observed 32Ki:1G:5", 2, "'--observed': bytes: expected bytes with a unit"),
        ("size fit Llama-3.1-8B --in 0", 2, "'--in': prompt: expected at least one token"),
        ("size fit Llama-3.1-8B --rate nan", 2, "rate: expected a number of 0 or more"),
        ("size fit Llama-3.1-8B --dp 0", 2, "'--dp': 0 is not in the range"),
        ("size breakeven Llama-3.1-8B --link 0GB/s", 1, "link: expected a rate"),
        ("size breakeven Llama-3.1-8B --price gpu=inf", 1, "price gpu: expected a number"),
        ("size breakeven Llama-3.1-8B --tp 2 --dcp 4", 1, "dcp: expected a divisor of tp=2"),
        ("size transfer Llama-3.1-8B --nics 0", 2, "'--nics': 0 is not in the range"),
        ("size fit Llama-3.1-8B --hit nan", 2, "'--hit': expected a number"),
        ("size trace trace.jsonl --model Llama-3.1-8B --warmup nan", 2, "'--warmup': expected a number"),
        ("size model Llama-3.1-8B --pp 33", 1, "pp: expected at most the 32 layers"),
        ("size tiers Llama-3.1-8B --hits nan", 1, "hits: expected one ratio"),
        ("size tiers Mistral-7B-v0.1 --checkpoint-every 0 --host 1GB", 1, "checkpoint-every: expected a distance"),
        ("size trace trace.jsonl --model Llama-3.1-8B --limit -1", 2, "'--limit': -1 is not in the range"),
        ("size trace trace.jsonl --model Llama-3.1-8B --html gone/page.html", 1, "html: expected a file"),
        ("size trace gone.jsonl --model Llama-3.1-8B", 1, "trace: expected"),
        ("size trace trace.jsonl --model Mistral-7B-v0.1 --checkpoint-every 0", 1, "checkpoint-every: expected"),
    ],
)
def test_wrong_input_is_told(run, line, ok, says):
    """What was wrong, in a line; 1 for what is refused, 2 for what cannot be read."""
    assert says in run(line, ok)


def commands():
    """Command lines of the documentation's code blocks."""
    return re.findall(r"^kvtierctl (.*)$", DOCS.read_text(), re.MULTILINE)


@pytest.mark.parametrize("line", commands())
def test_each_documented_command_runs(run, line):
    """As text and as JSON, from what the page says."""
    assert run(line)
    assert json.loads(run(f"{line} --json"))["sources"]


ANSWERS = {
    1: lambda out: 0 < out[0]["hit"] < out[0]["ceiling"] and out[0]["what_if"][4]["change"] == "+64 GiB host",
    2: lambda out: out[0]["hit"] == pytest.approx(out[1]["hit"], abs=0.02),
    3: lambda out: {"utilization_needed", "little_requests", "prefill_load"} <= out[0].keys(),
    4: lambda out: out[0]["planned_tokens"] == pytest.approx(42_656, rel=1e-3),
    5: lambda out: out[0]["fitted_bytes_per_token"] < 4000 and out[0]["fitted_fixed_bytes"] > 2**30,
    6: lambda out: out[0]["bottleneck"] == "ceiling" and out[0]["tiers"][1]["hit"] == 0,
    7: lambda out: out[0]["fits"] is False and out[0]["max_context_tokens"] < 32_768,
    8: lambda out: out[0]["host_memory_needed"] < out[0]["host_memory_limit"] == 2**41,
    9: lambda out: out[0]["tiers"][2]["write_load"] > 1 and 0 < out[0]["tiers"][1]["retention_s"] < 60,
    10: lambda out: [row["verdict"] for row in out[0]["links"]] == ["load", "recompute", "recompute"],
    11: lambda out: out[1]["engine_rank_bytes_at_tokens"] == out[1]["stored_bytes_at_tokens"],
}


@pytest.mark.parametrize("number", ANSWERS)
def test_each_operators_question_is_answered(run, number):
    """The numbers that the answer points to are there and say what it says."""
    text = DOCS.read_text().split(f"\n### {number}. ")[1].split("\n### ")[0]
    lines = re.findall(r"^kvtierctl (.*)$", text, re.MULTILINE)
    assert lines
    assert ANSWERS[number]([json.loads(run(f"{line} --json")) for line in lines])


def test_the_page_has_eleven_questions_and_all_commands():
    """Every question of operators, and every command of the group, is on the page."""
    text = DOCS.read_text()
    assert [int(n) for n in re.findall(r"^### (\d+)\. ", text, re.MULTILINE)] == list(range(1, 12))
    assert all(f"`size {name}`" in text for name in size.commands)


def test_every_option_says_what_it_is():
    """No command and no option of the planner is without help."""
    for command in (*size.commands.values(), probe):
        assert command.help
        for param in command.params:
            assert isinstance(param, click.Argument) or param.help, (command.name, param.name)


def test_a_trace_page_is_written(run, tmp_path):
    """--html writes one file with two plots."""
    run("size trace trace.jsonl --model Llama-3.1-8B --device 20GB --host 50GB --html page.html")
    assert (tmp_path / "page.html").read_text().count("<svg") == 2


def test_trace_options_change_what_is_counted(run):
    """Warm-up, coarser blocks, fewer requests, inclusive tiers and a given duration all show in the answer."""
    line = "size trace trace.jsonl --model Llama-3.1-8B --device 20GB --host 50GB --json"
    whole = json.loads(run(line))
    assert json.loads(run(f"{line} --warmup 0.5"))["hit"] > whole["hit"]
    assert json.loads(run(f"{line} --limit 10"))["requests"] == 10
    assert json.loads(run(f"{line} --coarsen 2"))["unique_blocks"] < whole["unique_blocks"]
    assert json.loads(run(f"{line} --inclusive"))["hit"] <= whole["hit"]
    assert json.loads(run(f"{line} --duration 10s"))["seconds"] == 10
    assert json.loads(run(f"{line} --no-belady"))["belady"] is None


def test_states_are_resumed_at_points_alone(run, tmp_path):
    """Asked twice, ten blocks of a model with recurrent state are found up to the last point; others whole."""
    line = {"timestamp": 0, "input_length": 5120, "output_length": 1, "hash_ids": list(range(10))}
    (tmp_path / "twice.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps(line | {'timestamp': 9})}\n")
    for model, every, hit in (("Qwen3.5-27B", 4096, 0.4), ("Qwen3.5-27B", 1000, 0.5), ("Llama-3.1-8B", 4096, 0.5)):
        asked = f"size trace twice.jsonl --model {model} --tp 4 --host 64GiB --checkpoint-every {every} --json"
        out = json.loads(run(asked))
        assert (out["hit"], out["ceiling"], out["belady"]) == (hit, hit, hit), (model, every)


def test_tiers_take_their_hits_from_a_trace(run):
    """`tiers --trace` and `trace` agree."""
    places = "--device 20GB --host 50GB --json"
    one = json.loads(run(f"size tiers Llama-3.1-8B --trace trace.jsonl --ram 1TiB {places}"))
    two = json.loads(run(f"size trace trace.jsonl --model Llama-3.1-8B {places}"))
    assert [row["hit"] for row in one["tiers"]] == [row["hit"] for row in two["tiers"]]


def test_measured_links_replace_defaults(run, tmp_path):
    """A file at the usual place is read without being named, and its numbers are tagged measured."""
    folder = tmp_path / "config" / "kvtier"
    folder.mkdir(parents=True)
    links = "".join(
        f'[link.{name}]\nread = "1GB/s"\nwrite = "1GB/s"\nt0 = "1us"\nsource = "measured"\n'
        for name in ("h2d", "disk", "memcpy")
    )
    (folder / "hardware.toml").write_text(links)
    out = json.loads(run("size tiers Llama-3.1-8B --rate 50 --hits 0.1,0.2,0.3 --host 1TB --disk 1TB --ram 2TB --json"))
    assert out["sources"]["tiers"]["read_load"] == "measured"
    assert out["tiers"][1]["read_load"] == pytest.approx(50 * 8192 * 0.2 * 131072 / 1e9)
    assert any("host memory copies 1.0 GB/s" in note for note in out["notes"])


@pytest.mark.parametrize(("model", "ranks", "faster"), [("Llama-3.1-70B", 4, 4), ("DeepSeek-V3", 8, 1)])
def test_each_rank_loads_over_its_own_link(run, model, ranks, faster):
    """Four ranks bring their heads at four times the speed of one; each of eight brings all of a latent."""
    line = f"size trace trace.jsonl --model {model} --device 0B --host 900TB --host-link 1MB/s --json --tp "
    one, many = (json.loads(run(line + str(n)))["ttft"][2]["p95_s"] for n in (1, ranks))
    assert one / many == pytest.approx(faster, rel=0.01)
    line = f"size tiers {model} --device 640GB --host 64TB --host-link 1GB/s --hits 0,0.5 --json --tp "
    one, many = (json.loads(run(line + str(n)))["tiers"][1]["read_load"] for n in (1, ranks))
    assert one / many == pytest.approx(faster, rel=0.01)


def test_a_log_tells_the_pool_of_one_rank(run):
    """Qwen3-14B at TP 2 has twice the tokens in the same pool a GPU, as the engine logs it."""
    one, two = (json.loads(run(f"size model Qwen3-14B --tp {n} --observed 32768:6.51GiB:42656 --json")) for n in (1, 2))
    assert one["planned_tokens"] == 42663
    assert two["planned_tokens"] == 2 * 42663 or two["planned_tokens"] == 2 * 42663 + 1


def test_the_planner_needs_nothing_but_click_and_rich():
    """Neither numpy nor anything else of the daemon is imported by the arithmetic or by --json."""
    code = (
        "import sys\n"
        "from kvtier.sizing.__main__ import main\n"
        "main(['size', 'model', 'Llama-3.1-8B', '--json'], standalone_mode=False)\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'numpy', 'rich', 'zstandard', 'msgspec', 'asyncio'}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines()[-1] == "[]"


def test_the_table_lists_all_models(run):
    """`size model --list` names every row."""
    assert len(json.loads(run("size model --list --json"))["models"]) == len(table())
