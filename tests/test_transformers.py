"""The transformers adapter on a real, small, seeded model: same bytes, same tokens, never another model's KV."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hfkit import GREEDY, PAGE, Place, attached, enlarged, plain, prompt
from kvtier.client import Client
from kvtier.demo.daemon import Daemon
from kvtier.engines.dynamic import Layout, cache_argument, layout_of, new_cache, rope_kind
from kvtier.engines.fingerprint import fingerprint, version
from kvtier.engines.images import Images
from kvtier.engines.transformers import attach
from kvtier.types import KvtierError

pytestmark = pytest.mark.usefixtures("one_thread")


def llama(seed: int = 0, dtype: Any = None, **more: Any) -> Any:
    """A Llama of two layers whose weights are large enough that rounding does not choose its tokens."""
    fields = {
        "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": None,
        "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(fields | more)))
    return enlarged(model).to(dtype or torch.float32)


@pytest.fixture(scope="module")
def model() -> Any:
    """The model that most tests share; they must not change it."""
    return llama()


def fill(model: Any, ids: Any, cache: Any) -> None:
    """Compute the KV of a row of tokens."""
    with torch.no_grad():
        model(input_ids=ids, **{cache_argument(model): cache})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("first", "pages"), [(0, 1), (0, 5), (2, 3)])
def test_pages_carry_a_cache_bit_for_bit(dtype: str, first: int, pages: int):
    """Exported pages, loaded into an empty cache, are the very keys and values of the tokens they cover."""
    model = llama(dtype=getattr(torch, dtype))
    layout = layout_of(model, PAGE)
    cache, back = new_cache(model), new_cache(model)
    fill(model, prompt(5 * PAGE + 3), cache)
    layout.load(back, [layout.export(cache, first, pages)], [0], pages * PAGE)
    span = slice(first * PAGE, (first + pages) * PAGE)
    for ours, theirs in zip(back.layers, cache.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys[:, :, span])
        assert torch.equal(ours.values, theirs.values[:, :, span])


def test_a_cell_is_the_keys_of_its_tokens_and_then_the_values(model: Any):
    """The canonical page: layer-major, then head; in each cell K rows of all tokens and then V rows."""
    layout = layout_of(model, PAGE)
    cache = new_cache(model)
    fill(model, prompt(2 * PAGE), cache)
    page = layout.export(cache, 1, 1).numpy().view("<f4").reshape(2, 2, 2, PAGE, 16)
    for number, layer in enumerate(cache.layers):
        for head in range(2):
            assert np.array_equal(page[number, head, 0], layer.keys[0, head, PAGE:])
            assert np.array_equal(page[number, head, 1], layer.values[0, head, PAGE:])


def test_keys_and_values_may_have_different_widths():
    """A cell holds K rows of one width and V rows of another, as in expanded MLA."""
    layout = Layout(4, 3, 6, 2, torch.float32, dict.fromkeys(range(2), torch.device("cpu")))
    cache, back = transformers.DynamicCache(), transformers.DynamicCache()
    for number in range(2):
        cache.update(torch.rand(1, 3, 9, 6), torch.rand(1, 3, 9, 2), number)
    assert layout.group.item_bytes == 2 * 3 * 4 * (6 + 2) * 4
    layout.load(back, [layout.export(cache, 0, 2)], [0], 8)
    for ours, theirs in zip(back.layers, cache.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys[:, :, :8])
        assert torch.equal(ours.values, theirs.values[:, :, :8])


@pytest.mark.usefixtures("no_leaks")
def test_a_second_engine_loads_what_the_first_computed(model: Any, place: Place):
    """Another engine instance gets the prompt's pages from the daemon and generates the same tokens as without."""
    ids = prompt(100)
    want = plain(model, ids)
    for hit in (0, 96):  # 99 tokens may be loaded: one is left to compute
        kv = attached(model, place, f"engine {hit}")
        with kv.client:
            assert torch.equal(kv.generate(ids, **GREEDY), want)
            assert kv.last.hit_tokens == hit
            assert kv.last.prompt_tokens == 100


def test_loaded_kv_is_what_was_computed(model: Any, place: Place):
    """Through the daemon and its memory, keys and values come back bit for bit."""
    kv = attached(model, place)
    ids = prompt(96)
    with kv.client:
        kv.generate(ids, **GREEDY)
        path = kv.cache.match(_keys(ids[0, :80]))
        cache, want = new_cache(model), new_cache(model)
        assert kv._load([path], [0], cache, Images(None, ids[0], {})) == 80
        path.close()
    fill(model, ids, want)
    for ours, theirs in zip(cache.layers, want.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys[:, :, :80])
        assert torch.equal(ours.values, theirs.values[:, :, :80])


def test_generated_tokens_are_stored_too(model: Any, place: Place):
    """The next turn of a conversation also finds the answer of the last one."""
    kv = attached(model, place)
    with kv.client:
        first = kv.generate(prompt(40), max_new_tokens=40, do_sample=False)  # KV of 79 tokens: 4 pages
        assert kv.last.stored_pages == 4
        again = torch.cat([first, prompt(10, seed=2)], dim=1)
        assert torch.equal(kv.generate(again, **GREEDY), plain(model, again))
        assert kv.last.hit_tokens == 64


def test_branches_share_their_common_pages(model: Any, place: Place):
    """Two prompts that part ways in the third page share two pages, and each keeps its own answer."""
    kv = attached(model, place)
    with kv.client:
        for seed, hit in ((2, 0), (3, 32), (2, 64)):
            ids = torch.cat([prompt(40), prompt(30, seed=seed)], dim=1)
            assert torch.equal(kv.generate(ids, **GREEDY), plain(model, ids))
            assert kv.last.hit_tokens == hit


def test_sampling_with_a_seed_gives_the_same_continuations(model: Any, place: Place):
    """One prefix, several seeded continuations: each as without kvtier, the prefix computed once."""
    kv = attached(model, place)
    ids = prompt(70)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20}
    with kv.client:
        for seed in range(4):
            torch.manual_seed(seed)
            want = plain(model, ids, **options)
            torch.manual_seed(seed)
            assert torch.equal(kv.generate(ids, **(GREEDY | options)), want)
            assert kv.last.hit_tokens == (64 if seed else 0)


def test_without_a_daemon_it_generates_the_same(model: Any, tmp_path: Any):
    """A daemon that is not there costs nothing but the hit."""
    with Client(tmp_path / "nobody.sock") as client:
        kv = attach(model, client=client, page_tokens=PAGE)
        ids = prompt(50)
        assert torch.equal(kv.generate(ids, **GREEDY), plain(model, ids))
        assert kv.last.hit_tokens == kv.last.stored_pages == 0


@pytest.mark.timeout(60)
def test_a_daemon_killed_between_requests_is_a_miss_and_its_disk_a_hit(model: Any, daemon: Daemon):
    """After kill -9 requests go on; after a restart what was durable is loaded; the same tokens throughout."""
    kv = attached(model, Place(daemon.socket, b""))
    ids = prompt(100)
    want = plain(model, ids)
    with kv.client:
        kv.generate(ids, **GREEDY)
        assert kv.cache.flush()
        daemon.kill()
        assert torch.equal(kv.generate(ids, **GREEDY), want)
        assert kv.last.hit_tokens == 0
        daemon.start()
    fresh = attached(model, Place(daemon.socket, b""))
    with fresh.client:
        assert torch.equal(fresh.generate(ids, **GREEDY), want)
        assert fresh.last.hit_tokens == 96
        assert fresh.last.tiers == (("disk", 6),)


def gemma() -> Any:
    """Two of four layers see 32 tokens."""
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, sliding_window=32, layer_types=kinds * 2,
        bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return enlarged(transformers.Gemma3ForCausalLM(config))


def test_a_sliding_window_model_gives_the_same_tokens_from_any_branch(place: Place):
    """Prompts longer than the window, continued and branched off inside it: hits, and what transformers gives."""
    model = gemma()
    kv = attached(model, place)
    with kv.client:
        for tokens, seed, hit in ((100, 2, 0), (100, 2, 96), (60, 3, 32), (100, 4, 48)):
            ids = torch.cat([prompt(50), prompt(tokens - 50, seed=seed)], dim=1)
            assert torch.equal(kv.generate(ids, **GREEDY), plain(model, ids))
            assert kv.last.hit_tokens == hit if seed != 3 else kv.last.hit_tokens >= hit


@pytest.mark.parametrize("windowed", [False, True])
def test_a_static_cache_is_filled_and_given_back_like_any_other(model: Any, place: Place, windowed: bool):
    """cache_implementation="static": the same tokens, and pages that a dynamic cache shares, window or not."""
    ids = prompt(100)
    model = gemma() if windowed else model
    kv = attached(model, place)
    with kv.client:
        for kind, hit in (("static", 0), ("static", 96), ("dynamic", 96), ("static", 96)):
            assert torch.equal(kv.generate(ids, **GREEDY, cache_implementation=kind), plain(model, ids))
            assert kv.last.hit_tokens == hit


def test_a_static_cache_of_a_windowed_model_gives_the_kv_of_every_token(place: Place):
    """Not of the last ones alone: what is stored from it is what a dynamic cache holds."""
    model, ids = gemma(), prompt(128)
    kv = attached(model, place)
    with kv.client:
        kv.generate(ids, **GREEDY, cache_implementation="static")
        path = kv.cache.match(_keys(ids[0, :112]))
        cache, want = new_cache(model), new_cache(model)
        assert kv._load([path], [0], cache, Images(None, ids[0], {})) == 112
        path.close()
    fill(model, ids, want)
    for ours, theirs in zip(cache.layers, want.layers, strict=True):
        assert torch.allclose(ours.keys, theirs.keys[:, :, :112], atol=1e-5)
        assert torch.allclose(ours.values, theirs.values[:, :, :112], atol=1e-5)


def test_weights_that_changed_are_noticed_even_where_the_first_look_was_cut_short(place: Place, monkeypatch):
    """A digest that ends by an exception leaves no cache of the old weights in use."""
    model = gemma()
    kv = attached(model, place)
    with kv.client:
        kv.generate(prompt(64), **GREEDY)
        with torch.inference_mode():
            model.lm_head.weight.data.mul_(1.5)
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        before = kv.spec.fingerprint
        with monkeypatch.context() as patch:
            patch.setattr("kvtier.engines.transformers.fingerprint", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                kv.generate(prompt(64), **GREEDY)
        assert torch.equal(kv.generate(prompt(64), **GREEDY), plain(model, prompt(64)))
        assert kv.last.hit_tokens == 0
        assert kv.spec.fingerprint != before


def _interrupted(*_: Any, **__: Any) -> bytes:
    raise KeyboardInterrupt


def test_a_batch_padded_on_the_left_shares_pages_with_single_prompts(model: Any, place: Place):
    """Rows of several lengths: what transformers gives for the batch, from pages that single prompts have stored."""
    lengths, rows = (100, 70, 33), []
    kv = attached(model, place)
    ids, mask = torch.zeros((3, 100), dtype=torch.int64), torch.zeros((3, 100), dtype=torch.int64)
    for row, tokens in enumerate(lengths):
        ids[row, 100 - tokens :], mask[row, 100 - tokens :] = prompt(tokens, seed=row + 5)[0], 1
        rows.append(prompt(tokens, seed=row + 5))
    want = model.generate(ids, attention_mask=mask, **GREEDY)
    with kv.client:
        assert torch.equal(kv.generate(ids, mask, **GREEDY), want)
        assert kv.last.hit_tokens == 0
        # Row 0 has 96 tokens from column 0 on, row 1 64 from 30 on, row 2 32 from 67 on: 94 columns for all.
        assert torch.equal(kv.generate(ids, mask, **GREEDY), want)
        assert kv.last.hit_tokens == 94 + 64 + 27
        for row, tokens in zip(rows, lengths, strict=True):
            assert torch.equal(kv.generate(row, **GREEDY), plain(model, row))
            assert kv.last.hit_tokens == (tokens - 1) // PAGE * PAGE


@pytest.mark.parametrize("tokens", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE])
def test_prompts_of_any_length_leave_a_token_to_compute(model: Any, place: Place, tokens: int):
    """Shorter than a page, a whole number of pages, one more: the same tokens cold and warm."""
    kv = attached(model, place)
    ids = prompt(tokens)
    with kv.client:
        for warm in (False, True):
            assert torch.equal(kv.generate(ids, **GREEDY), plain(model, ids))
            assert kv.last.hit_tokens == warm * ((tokens - 1) // PAGE) * PAGE


def test_other_weights_under_one_name_never_hit(model: Any, place: Place):
    """Same name, same shapes, other seed: not one page is shared."""
    ids = prompt(100)
    ours, theirs = attached(model, place), attached(llama(seed=5), place)
    with ours.client, theirs.client:
        ours.generate(ids, **GREEDY)
        assert torch.equal(theirs.generate(ids, **GREEDY), plain(theirs.model, ids))
        assert theirs.last.hit_tokens == 0


@pytest.mark.parametrize(
    "other", [{"salt": b"alice"}, {"dtype": "bfloat16"}, {"page_tokens": 32}, {"name": "other"}, {"rope_theta": 5e4}]
)
def test_another_format_or_salt_never_hits(model: Any, place: Place, other: dict[str, Any]):
    """What changes a byte of KV, or who may read it, is another cache."""
    ids = prompt(100)
    mine = attached(model, place)
    other = dict(other)
    theta = {"rope_type": "default", "rope_theta": other.pop("rope_theta", 1e4)}
    their_model = llama(dtype=getattr(torch, other.pop("dtype", "float32")), rope_parameters=theta)
    theirs = attached(their_model, place, **other)
    with mine.client, theirs.client:
        mine.generate(ids, **GREEDY)
        theirs.generate(ids, **GREEDY)
        assert theirs.last.hit_tokens == 0
        mine.generate(ids, **GREEDY)
        assert mine.last.hit_tokens == 96


def test_weights_changed_in_place_never_meet_their_old_kv(place: Place):
    """An optimizer's step between two requests: the second finds nothing, and gives what the new weights give."""
    model = llama()
    kv = attached(model, place)
    ids = prompt(100)
    with kv.client:
        kv.generate(ids, **GREEDY)
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight[0, 7] += 1.0  # an element that no sample reads
        assert torch.equal(kv.generate(ids, **GREEDY), plain(model, ids))
        assert kv.last.hit_tokens == 0
        kv.generate(ids, **GREEDY)
        assert kv.last.hit_tokens == 96


def test_reset_forgets_in_every_engine(model: Any, place: Place):
    """After `reset` neither this engine nor another one with the same weights finds the old KV."""
    ids = prompt(100)
    kv = attached(model, place)
    with kv.client:
        kv.generate(ids, **GREEDY)
        kv.reset()
        other = attached(model, place)
        with other.client:
            other.generate(ids, **GREEDY)
            assert other.last.hit_tokens == 0
        for hit in (0, 96):
            kv.generate(ids, **GREEDY)
            assert kv.last.hit_tokens == hit


def test_fingerprint_follows_weights_and_settings_only():
    """Equal weights give equal digests wherever they came from; other weights, types, settings and depths do not."""
    same = llama()
    same.config._name_or_path = "somewhere/else"
    assert fingerprint(llama()) == fingerprint(same)
    others = [llama(seed=1), llama(dtype=torch.bfloat16), llama(rms_norm_eps=1e-3), llama(num_hidden_layers=3)]
    digests = {fingerprint(model, exact=exact) for model in (same, *others) for exact in (False, True)}
    assert len(digests) == 10


def test_exact_fingerprint_sees_a_single_element():
    """The exact digest reads every byte."""
    model = llama()
    before, number = fingerprint(model, exact=True), version(model)
    with torch.no_grad():
        model.lm_head.weight[3, 3] += 1
    assert fingerprint(model, exact=True) != before
    assert version(model) != number


REFUSED = {
    "inputs_embeds": torch.zeros(1, 4, 64), "pixel_values": torch.zeros(1, 3, 8, 8), "position_ids": torch.zeros(1, 4),
    "past_key_values": None, "num_beams": 2, "num_return_sequences": 3, "cache_implementation": "quantized",
    "use_cache": False, "prompt_lookup_num_tokens": 1, "assistant_model": None, "assistant_early_exit": 1,
    "use_mtp": True, "custom_generate": None, "token_healing": True,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_inputs_that_tokens_do_not_identify_are_refused_by_name(model: Any, tmp_path: Any, name: str):
    """Images, embeddings, positions, foreign caches, beams, guesses: an error that names them, not a wrong hit."""
    with Client(tmp_path / "nobody.sock") as client:
        kv = attach(model, client=client, page_tokens=PAGE)
        with pytest.raises(KvtierError, match=name):
            kv.generate(prompt(40), **{name: REFUSED[name]})


@pytest.mark.parametrize(
    ("ids", "mask", "match"),
    [
        (torch.zeros(1, 0, dtype=torch.int64), None, "input_ids"),
        ("text", None, "tokenizer"),
        (torch.zeros(1, 4, dtype=torch.int64), torch.tensor([[1, 1, 1, 0]]), "attention_mask"),
        (torch.zeros(1, 4, dtype=torch.int64), torch.tensor([[1, 0, 1, 1]]), "attention_mask"),
        (torch.zeros(2, 4, dtype=torch.int64), torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]), "attention_mask"),
    ],
)
def test_padding_elsewhere_and_text_without_tokenizer_are_refused(
    model: Any, tmp_path: Any, ids: Any, mask: Any, match: str
):
    """Rows without holes are what can be named by their tokens."""
    with Client(tmp_path / "nobody.sock") as client:
        kv = attach(model, client=client, page_tokens=PAGE)
        with pytest.raises(KvtierError, match=match):
            kv.generate(ids, mask, **GREEDY)


def test_a_model_in_training_is_refused(tmp_path: Any):
    """Dropout would be stored as if it were KV."""
    model = llama()
    with Client(tmp_path / "nobody.sock") as client:
        kv = attach(model, client=client, page_tokens=PAGE)
        model.train()
        with pytest.raises(KvtierError, match="model: expected evaluation mode"):
            kv.generate(prompt(10), **GREEDY)


def test_models_whose_kv_cannot_be_shared_are_refused_by_name(tmp_path: Any):
    """Recurrent state alone and ropes that depend on the whole length: named at attach, not wrong later."""
    config = transformers.Mamba2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, state_size=8, n_groups=1
    )
    linear = transformers.Mamba2ForCausalLM(config)
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with Client(tmp_path / "nobody.sock") as client:
        for model, match in (
            (linear.eval(), "recurrent state alone"),
            (llama(rope_parameters=dynamic), "rope"),
        ):
            with pytest.raises(KvtierError, match=match):
                attach(model, client=client)


def test_rope_kinds_are_found_in_nested_settings():
    """Per-layer rope settings are searched too."""
    assert rope_kind({"full": {"rope_type": "longrope"}, "sliding": {"rope_type": "default"}}) == "longrope"
    assert rope_kind({"rope_type": "llama3"}) == rope_kind(None) == ""


def _keys(tokens: Any) -> bytes:
    """Page keys of a row of tokens."""
    return tokens.numpy().astype("<i4").tobytes()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_switching_scaling_or_merging_an_adapter_never_serves_the_kv_of_another(place: Place):
    """A LoRA, whose switches leave every weight alone: each state of it has KV of its own, and finds that again."""
    peft = pytest.importorskip("peft")
    model = llama()
    options = {"r": 4, "target_modules": ["k_proj", "v_proj"], "init_lora_weights": False}
    tuned = peft.get_peft_model(model, peft.LoraConfig(**options), "red").eval()
    tuned.add_adapter("blue", peft.LoraConfig(**options))
    kv = attached(tuned, place)
    ids = prompt(4 * PAGE)
    layer = model.model.layers[0].self_attn.k_proj

    def hits(times: int) -> list[int]:
        """Tokens that came from the cache, time after time."""
        found = []
        for _ in range(times):
            assert torch.equal(kv.generate(ids, **GREEDY), plain(tuned, ids))
            found.append(kv.last.hit_tokens)
        return found

    assert hits(2) == [0, 3 * PAGE]
    tuned.set_adapter("blue")
    assert hits(2) == [0, 3 * PAGE]
    with tuned.disable_adapter():
        assert hits(2) == [0, 3 * PAGE]
    layer.set_scale("blue", 3.0)
    assert hits(2) == [0, 3 * PAGE]
    tuned.set_adapter("red")
    assert hits(1) == [0], "filed under the weights' whole bytes since the first switch"
    tuned.set_adapter("blue")
    assert hits(1) == [3 * PAGE]
    tuned.merge_adapter()
    assert hits(1) == [0]
    kv.client.close()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_learnt_prompt_is_refused(place: Place):
    """Virtual tokens have KV that no token id names."""
    peft = pytest.importorskip("peft")
    with pytest.raises(KvtierError, match="learnt prompt"):
        attached(
            peft.get_peft_model(llama(), peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")), place
        )
