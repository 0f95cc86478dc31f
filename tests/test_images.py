"""Prompts with images: placeholders are alike, what they stand for is not, and page keys say so."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hfkit import GREEDY, PAGE, Place, attached, enlarged, plain, prompt
from kvtier.engines.images import Images, placeholder
from kvtier.types import KvtierError

pytestmark = pytest.mark.usefixtures("one_thread")

TOKEN = 299
TEXT = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
EYES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8}


def llava() -> Any:
    """Images of 24 x 24 as nine tokens."""
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**EYES, image_size=24),
        text_config=transformers.LlamaConfig(**TEXT), image_token_index=TOKEN,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config)


def qwen() -> Any:
    """Images of any size, whose tokens have places in three dimensions."""
    eyes = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 8, "mlp_ratio": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = transformers.Qwen2VLConfig(
        vision_config=eyes, text_config=TEXT | {"rope_parameters": rope}, image_token_id=TOKEN, video_token_id=298,
        vision_start_token_id=297, vision_end_token_id=296,
    )  # fmt: skip
    return transformers.Qwen2VLForConditionalGeneration(config)


def smolvlm() -> Any:
    """Images of 32 x 32 as four tokens, with a mask of their pixels."""
    config = transformers.SmolVLMConfig(
        vision_config=EYES | {"image_size": 32}, text_config=transformers.LlamaConfig(**TEXT), image_token_id=TOKEN,
        scale_factor=2,
    )  # fmt: skip
    return transformers.SmolVLMForConditionalGeneration(config)


MODELS = {"llava": llava, "qwen": qwen, "smolvlm": smolvlm}
TOKENS = {"llava": 9, "qwen": 6, "smolvlm": 4}
EACH = [pytest.param(kind, marks=pytest.mark.slow if kind == "smolvlm" else ()) for kind in MODELS]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """One of each kind."""
    torch.manual_seed(0)
    return {kind: enlarged(make()) for kind, make in MODELS.items()}


def pixels(kind: str, ids: Any, seeds: list[int], *, wide: bool = False) -> dict[str, Any]:
    """What a processor gives for seeded images; `wide`: Qwen's are twice as wide."""
    made = []
    for seed in seeds:
        noise = torch.Generator().manual_seed(seed)
        size = {"llava": (1, 3, 24, 24), "qwen": (48 if wide else 24, 384), "smolvlm": (1, 1, 3, 32, 32)}[kind]
        made.append(torch.rand(size, generator=noise) * 4)
    if kind == "qwen":
        grid = torch.tensor([[1, 4, 12 if wide else 6]] * len(seeds))
        types = (ids == TOKEN).int()
        return {"pixel_values": torch.cat(made), "image_grid_thw": grid, "mm_token_type_ids": types}
    if kind == "smolvlm":
        mask = torch.ones(1, len(seeds), 32, 32, dtype=torch.int64)
        return {"pixel_values": torch.cat(made, 1), "pixel_attention_mask": mask}
    return {"pixel_values": torch.cat(made)}


def with_images(kind: str, tokens: int, at: list[int], *, wide: bool = False) -> Any:
    """A prompt with placeholders from some columns on."""
    ids = prompt(tokens) % 290 + 2
    for column in at:
        ids[0, column : column + TOKENS[kind] * (1 + wide)] = TOKEN
    return ids


@pytest.mark.parametrize("kind", EACH)
def test_two_images_under_one_prompt_never_hit_each_other(models: dict[str, Any], place: Place, kind: str):
    """Only what lies before the image is shared; the same image hits whole; the tokens are those of each image."""
    model, ids, seen = models[kind], with_images(kind, 100, [36]), []
    for instance in range(2):
        kv = attached(model, place, f"engine {instance}")
        with kv.client:
            for seed, hit in ((1, 96 * instance), (2, 96 * instance or 32)):
                images = pixels(kind, ids, [seed])
                got = kv.generate(ids, **GREEDY, **images)
                assert torch.equal(got, plain(model, ids, **images))
                assert kv.last.hit_tokens == hit
                seen.append(got)
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("kind", EACH)
def test_a_request_goes_on_before_an_image_that_is_not_whole(models: dict[str, Any], place: Place, kind: str):
    """The page in which an image ends differs in its text: loaded is what lies before the image, to the token."""
    kv = attached(models[kind], place)
    ids = with_images(kind, 100, [48 - 2])
    other = ids.clone()
    other[0, 48 - 2 + TOKENS[kind] :] = prompt(100, 7)[0, 48 - 2 + TOKENS[kind] :] % 290 + 2
    with kv.client:
        for row, hit in ((ids, 0), (other, 46)):
            images = pixels(kind, row, [1])
            assert torch.equal(kv.generate(row, **GREEDY, **images), plain(kv.model, row, **images))
            assert kv.last.hit_tokens == hit


@pytest.mark.parametrize("kind", EACH)
def test_a_next_turn_with_another_image_keeps_what_it_can(models: dict[str, Any], place: Place, kind: str):
    """Two images, then a third: the first two are not computed again where an image can be computed alone."""
    kv = attached(models[kind], place)
    turns = (([20, 50], 80, 0), ([20, 50, 84], 110, 20 if kind == "qwen" else 80))
    with kv.client:
        for at, tokens, hit in turns:
            ids = with_images(kind, 110, at)[:, :tokens]
            images = pixels(kind, ids, list(range(len(at))))
            assert torch.equal(kv.generate(ids, **GREEDY, **images), plain(kv.model, ids, **images))
            assert kv.last.hit_tokens == hit


def test_places_after_an_image_are_not_those_of_the_last_prompt(models: dict[str, Any], place: Place):
    """Hits of a narrow image, a wide one and text alone in any order: each continues at its own place."""
    kv = attached(models["qwen"], place)
    narrow, wide = with_images("qwen", 100, [20]), with_images("qwen", 100, [20], wide=True)
    requests = [
        (narrow, pixels("qwen", narrow, [1])),
        (wide, pixels("qwen", wide, [1], wide=True)),
        (prompt(100, 5) % 290 + 2, {}),
    ]
    with kv.client:
        for ids, images in (requests[at] for at in (0, 1, 2, 0, 2, 1, 0)):
            got = kv.generate(ids, **GREEDY, **images)
            hit = kv.last.hit_tokens
            models["qwen"].model.rope_deltas = None
            assert torch.equal(got, plain(kv.model, ids, **images))
        assert hit == 96


def test_a_batch_of_text_alone_is_served_like_any_other(models: dict[str, Any], place: Place):
    """Where no images come, a model that could see has rows and padding as others have."""
    kv = attached(models["llava"], place)
    ids, mask = torch.zeros((2, 70), dtype=torch.int64), torch.zeros((2, 70), dtype=torch.int64)
    for row, tokens in enumerate((70, 50)):
        ids[row, 70 - tokens :], mask[row, 70 - tokens :] = prompt(tokens, row)[0] % 290 + 2, 1
    want = kv.model.generate(ids, attention_mask=mask, **GREEDY)
    with kv.client:
        for hit in (0, 64 + 44):
            assert torch.equal(kv.generate(ids, mask, **GREEDY), want)
            assert kv.last.hit_tokens == hit


def test_images_that_do_not_go_with_the_tokens_are_refused_by_name(models: dict[str, Any], place: Place):
    """Images of a batch, without placeholders, with types that say something else."""
    kv = attached(models["qwen"], place)
    ids = with_images("qwen", 50, [20])
    images = pixels("qwen", ids, [1])
    with kv.client:
        for bad_ids, given, match in (
            (ids.repeat(2, 1), images, "pixel_values.*one sequence"),
            (prompt(50) % 290 + 2, {"pixel_values": images["pixel_values"]}, "input_ids.*placeholders"),
            (ids, images | {"mm_token_type_ids": torch.zeros_like(ids)}, "mm_token_type_ids"),
        ):
            with pytest.raises(KvtierError, match=match):
                kv.generate(bad_ids, **GREEDY, **given)


def row(*runs: tuple[int, int], tokens: int = 64) -> Any:
    """A row of tokens with placeholders in some stretches."""
    ids = torch.arange(tokens)
    for start, end in runs:
        ids[start:end] = TOKEN
    return ids


def test_a_page_is_named_by_the_images_in_it_and_where_they_begin():
    """A later image changes no earlier page; another content, another place or another order changes its own."""
    one, two = torch.rand(1, 3, 8, 8), torch.rand(1, 3, 8, 8)

    def extras(pictures: list[Any], *runs: tuple[int, int]) -> dict[int, bytes]:
        return Images(TOKEN, row(*runs), {"pixel_values": torch.cat(pictures)}).extras(PAGE)

    base = extras([one], (10, 20))
    assert base.keys() == {0, 1}
    assert {page: base[page] for page in base} == {p: extras([one, two], (10, 20), (40, 50))[p] for p in base}
    assert not set(base.values()) & set(extras([two], (10, 20)).values())
    assert not set(base.values()) & set(extras([one], (11, 21)).values())
    swapped = extras([two, one], (10, 20), (40, 50))
    assert not set(swapped.values()) & set(extras([one, two], (10, 20), (40, 50)).values())


@pytest.mark.parametrize(
    ("runs", "pixels", "more"),
    [
        ([(0, 8), (20, 24), (40, 44)], (3, 3, 8, 8), {}),  # two side by side, one in pieces
        ([(0, 4), (20, 24)], (3, 3, 8, 8), {}),
        ([(0, 4), (20, 24)], (2, 3, 8, 8), {"image_sizes": [[8, 4], [8, 8]]}),
        ([(0, 6), (20, 26)], (8, 9), {"image_grid_thw": [[1, 2, 2], [1, 1, 4]]}),
        ([(0, 4), (20, 28)], (8, 9), {"image_grid_thw": [[1, 2, 2], [1, 1, 4]]}),
    ],
)
def test_where_nobody_knows_which_image_is_where_all_are_one(
    runs: list[tuple[int, int]], pixels: tuple[int, ...], more: dict[str, Any]
):
    """Each of the images is then part of every name, unless each surely has the tokens of its stretch."""
    known = runs == [(0, 6), (20, 26)]
    given = {name: torch.tensor(value) for name, value in more.items()} | {"pixel_values": torch.rand(pixels)}
    before = Images(TOKEN, row(*runs), given).extras(PAGE)
    given["pixel_values"][-1] += 1
    after = Images(TOKEN, row(*runs), given).extras(PAGE)
    assert (before[0] == after[0]) == known
    assert before[max(before)] != after[max(after)]


def test_models_that_see_nothing_have_no_placeholder():
    """The token comes from the configuration, by either of its names."""
    assert placeholder(transformers.LlamaConfig()) is None
    assert placeholder(transformers.LlavaConfig(image_token_index=7)) == 7
