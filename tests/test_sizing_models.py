"""Bytes of KV to the byte: 55 models, 22 configs, every attention family."""

import importlib.util
import json
from pathlib import Path

import pytest

from kvtier.sizing.families import READERS, Reading, read_config
from kvtier.sizing.models import expand, find, load, table
from kvtier.sizing.spec import Rule

GOLDEN = json.loads((Path(__file__).parent / "golden_sizing.json").read_text())

REFERENCE_GIB = {
    "Meta-Llama-3.1-8B": 16.000, "Meta-Llama-3.1-70B": 40.000, "Qwen3-32B": 32.000, "DeepSeek-V3": 8.578,
    "DeepSeek-V3.2": 9.561, "Kimi-K2-Instruct": 8.578, "Kimi-K3": 3.794, "GLM-5": 12.226, "GLM-5.2": 11.307,
    "gpt-oss-120b": 4.504, "Gemma-4-31B-IT-NVFP4": 10.781, "Qwen3.5-27B": 8.143, "Qwen3.5-397B-A17B": 3.929,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 0.796, "Llama-4-Scout-17B-16E-Instruct": 7.125, "MiniMax-M2.5": 31.000,
    "MiniMax-M3": 16.781, "MiMo-V2-Flash": 2.836, "Step-3.7-Flash": 6.064,
    "Llama-3_3-Nemotron-Super-49B-v1": 24.500, "DeepSeek-V4-Flash": 0.432, "Mixtral-8x22B-v0.1": 28.000,
}  # fmt: skip
"""KV of 128K tokens that the reference implementation found from these checkpoints' configs."""


@pytest.mark.parametrize("name", GOLDEN)
def test_a_model_keeps_the_reference_bytes(name):
    """Slope, fixed part and 131,072 tokens, to the byte, from the row's own config."""
    spec = load(name).spec
    assert [float(spec.slope), spec.fixed, spec.payload(131072)] == GOLDEN[name]


@pytest.mark.parametrize("name", REFERENCE_GIB)
def test_a_config_file_gives_the_reference_column(name, tmp_path):
    """The same from a config.json on disk, nested as multimodal checkpoints nest it."""
    config = expand(find(name)["config"])
    for text in (config, {"model_type": "wrapper", "text_config": config}):
        (tmp_path / "config.json").write_text(json.dumps(text))
        spec = load(str(tmp_path)).spec
        assert round(spec.payload(131072) / 2**30, 3) == REFERENCE_GIB[name]


def test_published_configs_give_the_reference_column():
    """The same from the published config.json files, where a package that ships them is installed."""
    if importlib.util.find_spec("aiconfigurator_core") is None:
        pytest.skip("aiconfigurator-core is not installed: no published configs to read")
    folder = Path(importlib.util.find_spec("aiconfigurator_core").submodule_search_locations[0]) / "model_configs"
    for name, gib in REFERENCE_GIB.items():
        (path,) = folder.glob(f"*--{name}_config.json")
        assert round(load(str(path)).spec.payload(131072) / 2**30, 3) == gib, name


def test_the_table_has_the_models_and_no_name_twice():
    """At least the 55 rows, every name and alias leading to one row."""
    names = [n for row in table() for n in (row["name"], *row.get("aliases", ()))]
    assert len(table()) >= 55
    assert len(names) == len(set(names))
    assert all(find(row["name"]) is row for row in table())


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("deepseek-ai/DeepSeek-V3", "DeepSeek-V3/R1 (bf16)"),
        ("qwen3-32b", "Qwen3-32B"),
        ("google/gemma-3-27b-it", "Gemma-3-27B"),
    ],
)
def test_a_hugging_face_id_finds_its_row(given, found):
    """Owner, case and the endings that change nothing of the cache are ignored."""
    assert find(given)["name"] == found


def test_bare_bytes_per_token_of_the_seed():
    """7B MHA keeps 524,288 bytes a token, 70B GQA-8 327,680."""
    assert load("Llama-2-7B").spec.slope == 524288
    assert load("Llama-3.1-70B").spec.slope == 327680


def gqa(**fields):
    return {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512} | fields


CASES = {
    "heads stand in for missing kv heads": (gqa(), 2 * 8 * 64 * 4, 0),
    "head_dim wins over hidden/heads": (gqa(num_key_value_heads=2, head_dim=128), 2 * 2 * 128 * 4, 0),
    "falcon's head count is ignored where it is multi-query": (
        {"model_type": "falcon", "num_hidden_layers": 2, "num_attention_heads": 71, "hidden_size": 4544,
         "num_kv_heads": 71, "multi_query": True}, 2 * 64 * 4, 0),
    "falcon with the new architecture is grouped": (
        {"model_type": "falcon", "num_hidden_layers": 2, "num_attention_heads": 128, "hidden_size": 8192,
         "num_kv_heads": 8, "multi_query": True, "new_decoder_architecture": True}, 2 * 8 * 64 * 4, 0),
    "a window that is switched off is none": (
        gqa(model_type="qwen2", sliding_window=4096, use_sliding_window=False), 2 * 8 * 64 * 4, 0),
    "a window with use_sliding_window starts at max_window_layers": (
        gqa(model_type="qwen2", sliding_window=128, use_sliding_window=True, max_window_layers=1),
        8 * 64 * 4, 128 * 8 * 64 * 4),
    "a window without a schedule proves nothing": (gqa(sliding_window=128), 2 * 8 * 64 * 4, 0),
    "mistral's window holds in all layers": (
        gqa(model_type="mistral", num_key_value_heads=8, sliding_window=128, max_position_embeddings=32768), 0,
        2 * 128 * 8 * 64 * 4),
    "a window as long as the context is none": (
        gqa(model_type="mistral", num_key_value_heads=8, sliding_window=32768, max_position_embeddings=32768),
        2 * 8 * 64 * 4, 0),
    "layer_types win over the model's habit": (
        gqa(model_type="gemma3_text", num_key_value_heads=1, head_dim=64, sliding_window=64,
            layer_types=["full_attention", "sliding_attention"]), 64 * 4, 64 * 64 * 4),
    "a pattern string of EXAONE": (
        gqa(model_type="exaone4", num_hidden_layers=4, sliding_window=64, sliding_window_pattern="LLLG"),
        8 * 64 * 4, 3 * 64 * 8 * 64 * 4),
    "CLA keeps KV in every second layer": (gqa(model_type="hunyuan_v1_moe", use_cla=True, cla_share_factor=2),
                                           8 * 64 * 4, 0),
    "MPT's KV heads sit in attn_config": (
        {"model_type": "mpt", "n_layers": 2, "n_heads": 8, "d_model": 512, "attn_config": {"kv_n_heads": 2}},
        2 * 2 * 64 * 4, 0),
    "keys wider than values": (
        gqa(model_type="mimo_v2_flash", num_key_value_heads=1, head_dim=192, v_head_dim=128, sliding_window=8,
            hybrid_layer_pattern=[0, 0]), 2 * (192 + 128) * 2, 0),
    "MiMo's sliding layers have twice the heads where a config does not say": (
        gqa(model_type="mimo_v2_flash", num_key_value_heads=1, head_dim=192, v_head_dim=128, sliding_window=8,
            layer_types=["full_attention", "sliding_attention"]), (192 + 128) * 2, 8 * 2 * (192 + 128) * 2),
    "llama 4 by no_rope_layers": (
        gqa(model_type="llama4_text", num_key_value_heads=1, head_dim=64, attention_chunk_size=16,
            no_rope_layers=[1, 0]), 64 * 4, 16 * 64 * 4),
    "Falcon-H1 has both in every layer": (
        gqa(model_type="falcon_h1", num_key_value_heads=2, mamba_n_heads=4, mamba_d_ssm=256, mamba_d_state=16,
            mamba_n_groups=1), 2 * 2 * 64 * 4, 2 * (4 * 64 * 16 * 4 + (256 + 32) * 3 * 2)),
    "Bamba by attention layer indices": (
        gqa(model_type="bamba", num_key_value_heads=2, attn_layer_indices=[1], mamba_n_heads=16, mamba_expand=2,
            mamba_d_state=16), 2 * 64 * 4, 16 * 64 * 16 * 4 + (1024 + 32) * 3 * 2),
    "Mamba alone grows by nothing": (
        {"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 64, "state_size": 16, "expand": 2}, 0,
        2 * (128 * 16 * 4 + 128 * 3 * 2)),
    "Mamba-2 alone": (
        {"model_type": "mamba2", "num_hidden_layers": 2, "num_heads": 4, "head_dim": 64, "state_size": 16,
         "n_groups": 1, "hidden_size": 128}, 0, 2 * (4 * 64 * 16 * 4 + (256 + 32) * 3 * 2)),
    "LFM2's short convolutions": (
        gqa(model_type="lfm2", layer_types=["conv", "full_attention"], conv_L_cache=3), 8 * 64 * 4, 512 * 3 * 2),
    "short convolutions, attention by number": (
        gqa(model_type="lfm2", full_attn_idxs=[1, 1], conv_L_cache=3), 8 * 64 * 4, 512 * 3 * 2),
    "index keys of layers named by type": (
        gqa(model_type="minimax_m3_vl_text", layer_types=["full_attention", "minimax_m3_sparse"], index_head_dim=128,
            index_n_heads=4, index_topk_blocks=16, index_block_size=128), 2 * 8 * 64 * 4 + 128 * 2, 0),
    "T5 keeps the encoder once": (
        {"model_type": "t5", "num_layers": 6, "num_decoder_layers": 2, "num_heads": 8, "d_kv": 64, "d_model": 512,
         "n_positions": 100}, 2 * 8 * 64 * 4, 2 * 100 * 8 * 64 * 4),
    "Llama Vision's cross layers keep the image": (
        gqa(model_type="mllama_text_model", num_hidden_layers=3, num_key_value_heads=2, cross_attention_layers=[1]),
        2 * 2 * 64 * 4, 6404 * 2 * 64 * 4),
    "an all-softmax attn_type_list is plain": (gqa(model_type="minimax_m2", attn_type_list=[1, 1]), 2 * 8 * 64 * 4, 0),
    "LongCat has two latents a layer": (
        gqa(model_type="longcat_flash", kv_lora_rank=512, qk_rope_head_dim=64), 2 * 2 * 576 * 2, 0),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_families_follow_their_rules(case):
    """Bytes a token and fixed bytes of small configs, worked out by hand."""
    config, slope, fixed = CASES[case]
    spec = read_config(config)
    assert (spec.slope, spec.fixed) == (slope, fixed)


def test_layer_types_of_deepseek_v4_mean_the_same_as_its_ratios():
    """A config that transformers saved gives what the published one gives."""
    own = expand(find("DeepSeek-V4-Flash")["config"])
    names = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    saved = own | {"compress_ratios": None, "layer_types": [names[ratio] for ratio in own["compress_ratios"]]}
    assert read_config(saved).components == read_config(own).components


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"num_hidden_layers": 2}, "model_type"),
        (gqa(model_type="brand_new"), "model_type"),
        (gqa(num_hidden_layers="2"), "num_hidden_layers"),
        (gqa(num_attention_heads=0), "num_attention_heads"),
        ({"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8}, "hidden_size"),
        ({"model_type": "x", "text_config": {"model_type": "llama", "num_attention_heads": 8, "hidden_size": 512}},
         "text_config.num_hidden_layers"),
        (gqa(layer_types=["full_attention", "quantum_attention"]), "layer_types[1]"),
        (gqa(layer_types=["full_attention", "linear_attention"]), "layer_types[1]"),
        (gqa(layer_types=["full_attention"]), "layer_types"),
        (gqa(kv_lora_rank=512), "kv_lora_rank"),
        (gqa(ssm_state_size=16), "ssm_state_size"),
        (gqa(model_type="deepseek_v3", qk_rope_head_dim=64), "kv_lora_rank"),
        (gqa(model_type="nemotron_h", hybrid_override_pattern="M?"), "hybrid_override_pattern[1]"),
        (gqa(model_type="nemotron-nas", block_configs=[{"attention": {}}, {}]),
         "block_configs[0].attention.n_heads_in_group"),
        (gqa(model_type="deepseek_v4", head_dim=512, sliding_window=128, compress_ratios=[4, 7], index_head_dim=128),
         "compress_ratios[1]"),
        (gqa(model_type="glm_moe_dsa", kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128,
             indexer_types=["full", "odd"]), "indexer_types[1]"),
        (gqa(model_type="minimax_text_01"), "attn_type_list"),
        (gqa(model_type="minimax_text_01", attn_type_list=["a"] * 2), "attn_type_list"),
        (gqa(attn_type_list=3), "attn_type_list"),
        (gqa(layer_types=[["full_attention"]] * 2), "layer_types"),
        (gqa(sliding_window=8, sliding_window_pattern=[1]), "sliding_window_pattern"),
        (gqa(model_type="mistral", sliding_window=8, max_position_embeddings="8k"), "max_position_embeddings"),
        (gqa(model_type="nemotron-nas", block_configs=[1, 2]), "block_configs"),
        *((gqa(model_type="nemotron-nas", block_configs=[{"attention": {"n_heads_in_group": group}}] * 2),
           "block_configs[0].attention.n_heads_in_group") for group in ("x", -4, 10**9)),
        (gqa(model_type="nemotron-nas",
             block_configs=[{"attention": {"n_heads_in_group": 1, "window_length": -1}}] * 2),
         "block_configs[0].attention.window_length"),
        (gqa(model_type="minimax_m3", sparse_attention_config=[1]), "sparse_attention_config"),
        *((gqa(model_type="minimax_m3", moe_layer_freq=[1, 1],
               sparse_attention_config={"use_sparse_attention": True, name: wrong}), f"sparse_attention_config.{name}")
          for name in ("sparse_index_dim", "sparse_topk_blocks", "sparse_block_size") for wrong in ([1], -8)),
        *((gqa(model_type="kimi_linear", kv_lora_rank=512, qk_rope_head_dim=64, linear_attn_config={
            "full_attn_layers": [1], "kda_layers": [2], "head_dim": 128, "num_heads": 32, name: wrong}),
           f"linear_attn_config.{name}")
          for name, wrong in (("num_heads", [[]]), ("num_heads", -1), ("head_dim", "x"), ("kda_layers", "2"))),
        (gqa(model_type="minimax_m3_vl_text", layer_types=["full_attention", "sliding_attention"]), "layer_types[1]"),
        (gqa(model_type="lfm2_moe", conv_L_cache=3), "layer_types"),
        *((gqa(model_type="lfm2", conv_L_cache=3, full_attn_idxs=wrong), "full_attn_idxs")
          for wrong in ([[1]], [2], 1)),
        (gqa(model_type="mpt", attn_config={"kv_n_heads": -8}), "attn_config.kv_n_heads"),
        (gqa(model_type="mpt", attn_config=5), "attn_config"),
        (gqa(model_type="mpt", attn_config={"kv_n_heads": "x"}), "attn_config.kv_n_heads"),
        (gqa(model_type="nemotron_h", hybrid_override_pattern=5), "hybrid_override_pattern"),
        (gqa(num_hidden_layers=10**30), "num_hidden_layers"),
        (gqa(max_position_embeddings=-5), "max_position_embeddings"),
        (gqa(max_position_embeddings="8k"), "max_position_embeddings"),
        (gqa(model_type="mistral", sliding_window="wide"), "sliding_window"),
        (gqa(model_type="gemma3_text", sliding_window=8, sliding_window_pattern=-2), "sliding_window_pattern"),
        (gqa(model_type="gemma3_text", sliding_window=8, sliding_window_pattern=2.5), "sliding_window_pattern"),
        (gqa(model_type="gemma3n_text", num_kv_shared_layers=2), "num_kv_shared_layers"),
        (gqa(model_type="qwen3_next", mamba_ssm_dtype="float8", linear_num_key_heads=1, linear_num_value_heads=1,
             linear_key_head_dim=1, linear_value_head_dim=1), "mamba_ssm_dtype"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_field(config, field):
    """Fail closed: an unknown architecture, layer kind or missing number names its field."""
    with pytest.raises(Exception) as caught:
        read_config(config)
    assert caught.value.field == field
    assert "expected" in str(caught.value)


def test_assume_full_bounds_an_unknown_model_from_above():
    """--assume-full counts every layer as full attention and says that it is a bound."""
    spec = read_config(gqa(model_type="brand_new", num_key_value_heads=2), Reading(assume_full=True))
    assert spec.slope == 2 * 2 * 64 * 4
    assert spec.bound
    assert "upper bound" in spec.notes[0]


@pytest.mark.parametrize("name", ["gpt-oss-120b", "Gemma-4-31B", "Qwen3.5-27B", "MiMo-V2-Flash", "Llama-4-Scout"])
def test_the_upper_bound_is_above_the_truth(name):
    """What an unknown name costs is never less than what the family is known to keep, far enough out."""
    config = expand(find(name)["config"])
    bound = read_config(config | {"model_type": "brand_new"}, Reading(assume_full=True))
    assert bound.slope >= read_config(config).slope


@pytest.mark.parametrize(
    ("dtype", "d", "of_bf16"),
    [
        ("fp8", 128, 0.5), ("fp8_head", 64, 0.53125), ("fp8_head", 128, 0.515625), ("fp8_head", 256, 0.5078125),
        ("mxfp8", 128, 0.515625), ("nvfp4", 128, 0.28125), ("int4_g128", 128, 0.265625), ("int4_g64", 128, 0.28125),
        ("int4_g32", 128, 0.3125), ("q8_0", 128, 0.53125), ("q4_0", 128, 0.28125),
    ],
)  # fmt: skip
def test_quantized_kv_counts_its_scales(dtype, d, of_bf16):
    """'KV4' is 0.27-0.31 of bf16, not a quarter."""
    config = gqa(head_dim=d)
    assert read_config(config, Reading(dtype)).slope == of_bf16 * read_config(config).slope


def test_latent_precisions_have_their_own_layouts():
    """MLA in plain fp8 has 576 bytes a token and layer, packed for sparse attention 656; index keys have 132."""
    assert load("DeepSeek-V3", Reading("fp8")).spec.slope == 61 * 576
    assert load("DeepSeek-V3.2", Reading("fp8_ds_mla")).spec.slope == 61 * (656 + 132)
    assert load("DeepSeek-V3.2", Reading(index_dtype="bf16")).spec.slope == 61 * (1152 + 256)
    assert load("DeepSeek-V4-Flash", Reading("bf16")).spec.components[0].unit_bytes == 1024
    with pytest.raises(Exception, match="kv-dtype"):
        load("Llama-3.1-8B", Reading("fp8_ds_mla"))


def test_draft_layers_count_when_asked():
    """DeepSeek's MTP adds one of 61 layers; a model without draft layers refuses."""
    assert load("DeepSeek-V3", Reading(draft=True)).spec.slope == 62 * 1152
    with pytest.raises(Exception, match="draft"):
        load("Llama-3.1-8B", Reading(draft=True))


def test_one_number_a_token_would_be_wrong_for_more_than_half():
    """Windows, chunks, states and encoder entries make most rows two-parameter models."""
    assert sum(load(name).spec.fixed > 0 for name in GOLDEN) == 29


def test_each_reader_is_used():
    """No reader of the registry is dead: every family has a row or a case above."""
    used = {expand(row["config"])["model_type"] for row in table()} | {c[0]["model_type"] for c in CASES.values()}
    assert {READERS[kind] for kind in used if kind in READERS} == set(READERS.values())


def test_parameters_counted_from_a_config_are_close(tmp_path):
    """Within 3 % of the published count, for dense, mixture, latent, searched and recurrent models."""
    extra = {
        "Llama-3.1-8B": {"intermediate_size": 14336, "vocab_size": 128256},
        "Qwen3-32B": {"intermediate_size": 25600, "vocab_size": 151936},
        "Mixtral-8x22B": {"intermediate_size": 16384, "vocab_size": 32000, "num_local_experts": 8,
                          "num_experts_per_tok": 2},
        "DeepSeek-V3": {"intermediate_size": 18432, "vocab_size": 129280, "moe_intermediate_size": 2048,
                        "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
                        "first_k_dense_replace": 3, "q_lora_rank": 1536},
        "gpt-oss-120b": {"intermediate_size": 2880, "vocab_size": 201088, "num_local_experts": 128,
                         "num_experts_per_tok": 4},
        "Nemotron-3-Nano-30B-A3B": {"intermediate_size": 1856, "vocab_size": 131072, "moe_intermediate_size": 1856,
                                    "n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 1,
                                    "moe_shared_expert_intermediate_size": 3712},
    }  # fmt: skip
    for name, fields in extra.items():
        written = expand(find(name)["config"]) | fields | {"tie_word_embeddings": False}
        (tmp_path / "config.json").write_text(json.dumps(written))
        got = load(str(tmp_path))
        assert got.params == pytest.approx(find(name)["params_b"] * 1e9, rel=0.03), name
        assert got.active == pytest.approx(find(name)["active_b"] * 1e9, rel=0.13), name


COUNTED = {
    "gemma3_text": (3.88, 3.88, {"num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4,
                    "head_dim": 256, "hidden_size": 2560, "intermediate_size": 10240, "vocab_size": 262208}),
    "gemma3n_text": (6.84, 4.4, {"num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 2,
                     "head_dim": 256, "hidden_size": 2048, "intermediate_size": [16384] * 35, "vocab_size": 262400,
                     "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256}),
    "llama": (1.67, 1.4, {"num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
              "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 131072, "tie_word_embeddings": False}),
    "deepseek_v4": (284.3, 12.7, {"num_hidden_layers": 43, "num_attention_heads": 64, "head_dim": 512,
                    "hidden_size": 4096, "sliding_window": 128, "index_head_dim": 128, "vocab_size": 129280,
                    "compress_ratios": [128, 128, *[4, 128] * 20, 4], "q_lora_rank": 1024, "o_lora_rank": 1024,
                    "o_groups": 8, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6,
                    "moe_intermediate_size": 2048, "mlp_layer_types": [*["hash_moe"] * 3, *["moe"] * 40],
                    "tie_word_embeddings": False}),
    "ernie4_5_moe": (21.83, 3.35, {"num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4,
                     "hidden_size": 2560, "intermediate_size": 12288, "vocab_size": 103424, "moe_num_experts": 64,
                     "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2,
                     "moe_layer_start_index": 1}),
    "longcat_flash": (560.6, 31.3, {"num_layers": 28, "num_attention_heads": 64, "hidden_size": 6144,
                      "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "vocab_size": 131072,
                      "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048, "n_routed_experts": 512,
                      "moe_topk": 12, "tie_word_embeddings": False}),
    "dbrx": (131.6, 36.5, {"n_layers": 40, "n_heads": 48, "d_model": 6144, "vocab_size": 100352,
             "attn_config": {"kv_n_heads": 8}, "tie_word_embeddings": False,
             "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}}),
    "mamba": (0.13, 0.13, {"num_hidden_layers": 24, "hidden_size": 768, "state_size": 16, "vocab_size": 50280}),
    "gpt2": (0.124, 0.124, {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257}),
}  # fmt: skip


@pytest.mark.parametrize("kind", COUNTED)
def test_parameters_are_counted_in_each_familys_own_names(kind, tmp_path):
    """Tied embeddings once, experts under any name, layers of which each has a width; a mixture is what has experts."""
    total, active, fields = COUNTED[kind]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind} | fields))
    got = load(str(tmp_path))
    assert (got.params, got.active) == pytest.approx((total * 1e9, active * 1e9), rel=0.06)
    assert got.mixture == (kind in ("deepseek_v4", "ernie4_5_moe", "longcat_flash", "dbrx"))


def test_rows_of_dense_models_are_no_mixtures():
    """Embeddings that no token multiplies with make a model smaller in use, not a mixture."""
    assert not load("Gemma-3n-E4B").mixture
    assert not load("Llama-3.2-1B").mixture
    assert load("Mixtral-8x7B").mixture


def test_weights_are_read_from_the_files_beside_a_config(tmp_path):
    """An index or the safetensors files themselves tell the weights' size."""
    (tmp_path / "config.json").write_text(json.dumps(gqa(num_key_value_heads=2)))
    (tmp_path / "a.safetensors").write_bytes(bytes(1000))
    assert load(str(tmp_path)).weights_bytes == 1000
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 12345}}))
    assert load(str(tmp_path)).weights_bytes == 12345


def test_a_checkpoint_that_declares_its_kv_precision_is_noted(tmp_path):
    """NVFP4 weights come with FP8 KV: the number stays bf16 and a note says so."""
    (tmp_path / "config.json").write_text(json.dumps(gqa()))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"kv_cache_quant_algo": "FP8"}}))
    assert "FP8" in load(str(tmp_path)).spec.notes[0]
    assert not load(str(tmp_path), Reading("fp8")).spec.notes
    inline = gqa(quantization_config={"kv_cache_scheme": {"num_bits": 8, "type": "float"}})
    assert "8-bit" in read_config(inline).notes[0]


def test_unreadable_configs_are_refused(tmp_path):
    """A path that is no JSON object, or is not there, names `model`."""
    (tmp_path / "config.json").write_text("{")
    for name in (str(tmp_path), str(tmp_path / "gone.json"), "./nowhere"):
        with pytest.raises(Exception, match="model: expected"):
            load(name)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(Exception, match="JSON object"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(gqa(intermediate_size="wide")))
    with pytest.raises(Exception, match="intermediate_size: expected"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(gqa()))
    for beside in ("hf_quant_config.json", "model.safetensors.index.json"):
        for text in ("{", "[1]"):
            (tmp_path / beside).write_text(text)
            with pytest.raises(Exception, match=f"{beside}: expected"):
                load(str(tmp_path))
        (tmp_path / beside).unlink()


def test_a_name_that_is_nearly_right_is_told_so():
    """The error lists what comes close."""
    with pytest.raises(Exception, match=r"near: .*Qwen3"):
        load("Qwen3-9B")


def test_only_known_rules_are_used():
    """Every component of every model follows one of the rules, with a span where the rule has one."""
    for name in GOLDEN:
        for c in load(name).spec.components:
            assert (c.span > 0) == (c.rule in (Rule.WINDOW, Rule.CHUNK, Rule.RING, Rule.EVERY, Rule.ENCODER)), (name, c)
