"""Models that keep recurrent state beside KV: state points of the same path as the pages, and never another's."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hfkit import GREEDY, PAGE, Place, attached, enlarged, plain, prompt
from kvtier.client import page_keys
from kvtier.engines.dynamic import layout_of, new_cache

pytestmark = pytest.mark.usefixtures("one_thread")

COMMON = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gated delta net": ("Qwen3Next", {
        "head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2, "num_experts": 2,
        "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    }),
    "short convolutions": ("Lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "attention and mamba in each layer": ("FalconH1", MAMBA | {"mamba_d_ssm": 128}),
    "mamba2 between attention": ("Bamba", MAMBA | {"attn_layer_indices": [1, 3], "attn_rotary_emb": 16}),
    "mamba between attention": ("Jamba", {
        "attn_layer_offset": 1, "attn_layer_period": 2, "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    }),
}  # fmt: skip
FIRST = "gated delta net"
EACH = [
    pytest.param(kind, marks=() if kind == FIRST else pytest.mark.slow, id=kind.replace(" ", "-")) for kind in KINDS
]
LOGITS = {"return_dict_in_generate": True, "output_logits": True}


def hybrid(kind: str, seed: int = 0) -> Any:
    """A model of four layers, some of which keep state."""
    name, more = KINDS[kind]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**(COMMON | more))
    return enlarged(getattr(transformers, f"{name}ForCausalLM")(config))


def logits(out: Any) -> Any:
    """[tokens, vocabulary] of a `generate` that gives them."""
    return torch.stack(out.logits)


@pytest.fixture(scope="module")
def model() -> Any:
    """The model that most tests share."""
    return hybrid(FIRST)


@pytest.mark.parametrize("kind", EACH)
def test_a_second_engine_goes_on_from_the_state_of_the_first(place: Place, kind: str):
    """Tokens as without kvtier; a fresh engine loads 96 of 100 tokens and gives the very logits of the one before."""
    model = hybrid(kind)
    ids, outs = prompt(100), []
    want = plain(model, ids)
    for hit in (0, 96):
        kv = attached(model, place, f"engine {hit}")
        with kv.client:
            outs.append(kv.generate(ids, **GREEDY, **LOGITS))
            assert kv.last.hit_tokens == hit
    assert torch.equal(outs[0].sequences, want)
    assert torch.equal(outs[1].sequences, want)
    assert torch.equal(logits(outs[0]), logits(outs[1]))


@pytest.mark.parametrize("kind", EACH)
def test_a_state_comes_back_bit_for_bit(kind: str):
    """Every tensor of every layer that keeps state, of each row, through its bytes into an empty cache."""
    model = hybrid(kind)
    layout = layout_of(model, PAGE)
    cache, back = new_cache(model), new_cache(model)
    with torch.no_grad():
        model(input_ids=torch.cat([prompt(50), prompt(50, 2)]), cache=cache)
    taken = layout.states.take(cache)
    layout.states.put(back, [layout.states.pack(taken, row) for row in range(2)])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(layout.states.take(back), taken, strict=True))
    assert layout.states.pack(taken, 0).numel() == layout.states.group.item_bytes


def test_the_next_turn_goes_on_from_the_end_of_the_answer(model: Any, place: Place):
    """A conversation: the answer's last whole page has a state point too, taken while it was generated."""
    kv = attached(model, place)
    with kv.client:
        first = kv.generate(prompt(40), max_new_tokens=40, do_sample=False)  # 79 tokens are computed: 4 pages
        again = torch.cat([first, prompt(10, seed=2)], dim=1)
        assert torch.equal(kv.generate(again, **GREEDY), plain(model, again))
        assert kv.last.hit_tokens == 64


def test_where_prompts_part_a_state_point_is_kept(model: Any, place: Place):
    """The second prompt of three that share 48 tokens finds their pages and no state; the third resumes there."""
    kv = attached(model, place)
    with kv.client:
        for seed, hit in ((2, 0), (3, 0), (4, 48)):
            ids = torch.cat([prompt(50), prompt(50, seed=seed)], dim=1)
            assert torch.equal(kv.generate(ids, **GREEDY), plain(model, ids))
            assert kv.last.hit_tokens == hit


def test_long_prompts_have_points_on_their_way(model: Any, place: Place):
    """Who parts from the only prompt before resumes at the deepest of the points at doubling depths."""
    kv = attached(model, place)
    with kv.client:
        kv.generate(prompt(300), **GREEDY)
        ids = torch.cat([prompt(300)[:, :250], prompt(40, seed=2)], dim=1)
        assert torch.equal(kv.generate(ids, **GREEDY), plain(model, ids))
        assert kv.last.hit_tokens == 128


def test_pages_beyond_a_state_point_are_not_used(model: Any, place: Place):
    """Pages of 96 tokens whose only state is that of 32: 32 are loaded, and the logits are those of resuming there.

    A state of another position never goes with pages, and pages without any are nothing.
    """
    kv, ids = attached(model, place), prompt(100)
    layout, cache, short = kv.layout, new_cache(model), new_cache(model)
    with torch.no_grad():
        model(input_ids=ids[:, :32], cache=short)
        model(input_ids=ids[:, :96], cache=cache)
        state = layout.states.pack(layout.states.take(short), 0)
    with kv.client:
        path = kv.cache.match(page_keys(kv.spec, ids[0, :96].numpy()))
        with path.reserve(0, 6, [(1, [1])]) as held:
            held.write_pages(0, 0, layout.export(cache, 0, 6).numpy())
            held.write(1, 1, state.numpy())
            assert held.commit() == 6
        assert torch.equal(kv.generate(ids, **GREEDY), plain(model, ids))
        assert kv.last.hit_tokens == 32


def test_a_state_that_rots_in_memory_is_computed_again(model: Any, place: Place):
    """One bit of a state point in the daemon's memory: no hit, the same tokens."""
    ids = prompt(100)
    kv = attached(model, place)
    with kv.client:
        kv.generate(ids, **GREEDY)
        path = kv.cache.match(page_keys(kv.spec, ids[0, :96].numpy()))
        with path.acquire() as lease:
            assert lease.pages == 6
            ctypes.memset(lease.view(1, 5).ctypes.data, 0x55, 1)  # the mapping is shared with the daemon
        assert torch.equal(kv.generate(ids, **GREEDY), plain(model, ids))
        assert kv.last.hit_tokens == 0


def test_a_batch_resumes_where_every_row_has_a_state(model: Any, place: Place):
    """Rows whose pages end at the same columns hit together; rows whose do not are computed, and right."""
    kv = attached(model, place)
    for lengths, hits in (((100, 68), (0, 96 - 32 + 96)), ((100, 70), (0, 0))):
        ids, mask = torch.zeros((2, 100), dtype=torch.int64), torch.zeros((2, 100), dtype=torch.int64)
        for row, tokens in enumerate(lengths):
            ids[row, 100 - tokens :], mask[row, 100 - tokens :] = prompt(tokens, seed=sum(lengths) + row)[0], 1
        want = model.generate(ids, attention_mask=mask, **GREEDY)
        for hit in hits:
            assert torch.equal(kv.generate(ids, mask, **GREEDY), want)
            assert kv.last.hit_tokens == hit
    kv.client.close()


def test_a_static_cache_shares_states_with_a_dynamic_one(model: Any, place: Place):
    """The same tokens from either, each with what the other left."""
    ids = prompt(100)
    kv = attached(model, place)
    with kv.client:
        for kind, hit in (("static", 0), ("dynamic", 96), ("static", 96)):
            assert torch.equal(kv.generate(ids, **GREEDY, cache_implementation=kind), plain(model, ids))
            assert kv.last.hit_tokens == hit
