"""What names the weights of SGLang's engines, and whose pages are refused: from configurations, without SGLang."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier.types import KvtierError
from sglangkit import module
from weightkit import safetensors

MODEL = {
    "quantization": None, "load_format": "auto", "dtype": "auto", "json_model_override_args": "{}",
    "quantization_param_path": None, "model_impl": "auto", "model_loader_extra_config": "{}",
    "model_config_parser": "auto", "decrypted_config_file": None, "decrypted_draft_config_file": None,
    "modelopt_quant": None, "modelopt_checkpoint_restore_path": None, "quantize_and_serve": False,
    "rl_quant_profile": None, "qsa_indexer_dtype": "auto", "revision": None, "context_length": None,
    "download_dir": None,
}  # fmt: skip
SPEC = {
    "speculative_algorithm": None, "speculative_draft_model_quantization": None, "speculative_draft_load_format": None,
    "speculative_draft_kv_cache_dtype": None, "uno_lora_path": None, "speculative_draft_model_path": None,
    "speculative_draft_model_revision": None,
}  # fmt: skip
MOE = {"kt_weight_path": None, "kt_method": None, "kt_num_gpu_experts": None}
MAMBA = {
    "mamba_ssm_dtype": None, "enable_int8_mamba_checkpoint": False, "enable_mamba_cache_stochastic_rounding": False,
}  # fmt: skip


class Side:
    """SGLang's settings, and the module that reads them."""

    def __init__(self, folder: Path) -> None:
        self.folder = safetensors(folder / "m.safetensors", {"a": np.ones((4, 8), "<f4")}).parent
        self.model = SimpleNamespace(**MODEL, model_path=str(folder))
        self.spec = SimpleNamespace(**SPEC)
        self.moe, self.mamba = SimpleNamespace(**MOE), SimpleNamespace(**MAMBA)
        self.dllm = SimpleNamespace(dllm_algorithm=None)
        self.lora = SimpleNamespace(enable_lora=False)
        self.configured(architectures=["LlamaForCausalLM"])

    def configured(self, **settings: Any) -> None:
        """What the model's configuration says."""
        (self.folder / "config.json").write_text(json.dumps(settings))


@pytest.fixture
def side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Side]:
    """Settings of one model, beside modules that have SGLang's names."""
    made = Side(tmp_path / "m")
    members = {
        "configs.model_config": {"is_audio_model": lambda _: False,
                                 "is_multimodal_model": lambda classes: "SeeingForCausalLM" in classes},
        "runtime_context": {
            "get_model": lambda: made.model, "get_spec": lambda: made.spec, "get_lora": lambda: made.lora,
            "get_exec": lambda: SimpleNamespace(moe=made.moe, mamba=made.mamba, dllm=made.dllm),
            "get_device": lambda: SimpleNamespace(random_seed=0),
        },
    }  # fmt: skip
    for place, names in members.items():
        vars(module(monkeypatch, place)).update(names)
    monkeypatch.delitem(sys.modules, "kvtier.engines.sglang.settings", raising=False)
    made.settings = importlib.import_module("kvtier.engines.sglang.settings")
    yield made
    del sys.modules["kvtier.engines.sglang.settings"]


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("model", "model_loader_extra_config", '{"pattern": "b"}'), ("model", "modelopt_quant", "fp8"),
        ("model", "rl_quant_profile", "/profile"), ("model", "model_config_parser", "mistral"),
        ("model", "quantize_and_serve", True), ("model", "modelopt_checkpoint_restore_path", "/calibrated"),
        ("spec", "speculative_draft_model_quantization", "fp8"), ("spec", "uno_lora_path", "/lora"),
        ("moe", "kt_weight_path", "/experts"), ("moe", "kt_method", "AMXINT4"), ("moe", "kt_num_gpu_experts", 4),
        ("mamba", "enable_int8_mamba_checkpoint", True), ("mamba", "mamba_ssm_dtype", "bfloat16"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("said", ["", "weights of May"])
def test_every_setting_that_changes_what_is_computed_is_in_the_fingerprint(
    side: Side, part: str, name: str, value: Any, said: str
):
    """Of the same files: experts from elsewhere and quantized, other online quantization, another loader's settings."""
    want = side.settings.fingerprint(said)
    assert side.settings.fingerprint(said) == want
    setattr(getattr(side, part), name, value)
    assert side.settings.fingerprint(said) != want


@pytest.mark.parametrize("said", ["", "weights of May"])
def test_engines_that_differ_in_nothing_but_speed_share(side: Side, said: str):
    """Threads of the loader's."""
    want = side.settings.fingerprint(said)
    side.model.model_loader_extra_config = '{"enable_multithread_load": true, "num_threads": 64}'
    assert side.settings.fingerprint(said) == want


def test_the_class_that_computes_is_in_the_fingerprint(side: Side):
    """The same weights under another architecture's name, in the file or said over it."""
    found = {side.settings.fingerprint("")}
    side.model.json_model_override_args = '{"architectures": ["LlamaBidirectionalModel"]}'
    found.add(side.settings.fingerprint(""))
    side.model.json_model_override_args = "{}"
    side.configured(architectures=["LlamaBidirectionalModel"])
    found.add(side.settings.fingerprint(""))
    assert len(found) == 3


@pytest.mark.parametrize("said", ["", "weights of May"])
def test_a_rope_of_the_longest_sequence_that_is_said_over_the_file_counts(side: Side, said: str):
    """Its factors are chosen by the context's length."""
    side.model.json_model_override_args = '{"rope_scaling": {"rope_type": "longrope"}}'
    found = set()
    for length in (1000, 2000):
        side.model.context_length = length
        found.add(side.settings.fingerprint(said))
    assert len(found) == 2


def test_weights_that_are_not_read_from_the_models_files_are_refused_unless_named(side: Side):
    """What another instance sends is not what lies in the folder."""
    side.model.load_format = "remote_instance"
    with pytest.raises(KvtierError, match="load_format"):
        side.settings.fingerprint("")
    assert side.settings.fingerprint("weights of May")


class Hub:
    """What the hub's client finds on this host: by name, revision and cache (None: its own), a folder."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, folders: dict[tuple[str, str | None, str | None], Path]
    ) -> None:
        self.folders, self.asked = folders, list[tuple[str, str | None, str | None]]()
        monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=self.found))

    def found(self, name: str, revision: str | None, cache_dir: str | None, local_files_only: bool) -> str:
        assert local_files_only
        self.asked.append((name, revision, cache_dir))
        return str(self.folders[name, revision, cache_dir])


def test_weights_are_looked_up_where_sglang_downloads_them(side: Side, monkeypatch: pytest.MonkeyPatch):
    """With the draft's own revision; ModelScope's are in no cache of the hub's."""
    names = [("my/model", "a"), ("my/draft", "b")]
    hub = Hub(monkeypatch, {(*each, where): side.folder for each in names for where in (None, "/elsewhere")})
    side.model.model_path, side.model.revision, side.model.download_dir = "my/model", "a", "/elsewhere"
    side.spec.speculative_draft_model_path, side.spec.speculative_draft_model_revision = "my/draft", "b"
    assert side.settings.fingerprint("")
    assert set(hub.asked) == set(hub.folders)
    monkeypatch.setenv("SGLANG_USE_MODELSCOPE", "1")
    with pytest.raises(KvtierError, match="ModelScope"):
        side.settings.fingerprint("")


def test_a_download_folder_has_weights_and_no_configuration(
    side: Side, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """SGLang has that from the hub's own cache: what it says of images and of the class counts all the same."""
    apart = safetensors(tmp_path / "apart" / "m.safetensors", {"a": np.zeros((4, 8), "<f4")}).parent
    Hub(monkeypatch, {("my/model", None, None): side.folder, ("my/model", None, "/elsewhere"): apart})
    side.model.model_path, side.model.download_dir = "my/model", "/elsewhere"
    found = set()
    for name in ("LlamaForCausalLM", "LlamaBidirectionalModel"):
        side.configured(architectures=[name])
        side.settings.refuse("", "")
        found.add(side.settings.fingerprint(""))
    assert len(found) == 2
    side.configured(vision_config={"layers": 2})
    with pytest.raises(KvtierError, match="30 bits"):
        side.settings.refuse("", "")


def test_weights_that_lie_in_the_hubs_own_cache_are_found_beside_a_download_folder(
    side: Side, monkeypatch: pytest.MonkeyPatch
):
    """SGLang downloads nothing then, so that its download folder may not have the model at all."""
    Hub(monkeypatch, {("my/model", None, None): side.folder})
    want = side.settings.fingerprint("")
    side.model.model_path, side.model.download_dir = "my/model", "/elsewhere"
    assert side.settings.fingerprint("") == want


@pytest.mark.parametrize("rope", [{}, {"rope_scaling": {"rope_type": "longrope"}}])
def test_named_weights_are_the_same_wherever_their_files_lie(
    side: Side, monkeypatch: pytest.MonkeyPatch, rope: dict[str, Any]
):
    """In a folder, in the hub's cache, or in an object store, with no configuration on this host."""
    side.configured(architectures=["LlamaForCausalLM"], **rope)
    found = {side.settings.fingerprint("weights of May")}
    Hub(monkeypatch, {("my/model", None, None): side.folder})
    for side.model.model_path in ("my/model", "s3://models/mine"):
        found.add(side.settings.fingerprint("weights of May"))
    assert len(found) == 1


def test_named_weights_of_a_plain_rope_are_the_same_for_every_context_length(
    side: Side, monkeypatch: pytest.MonkeyPatch
):
    """In the hub's cache too, which has their configuration."""
    Hub(monkeypatch, {("my/model", None, None): side.folder})
    side.model.model_path, found = "my/model", set()
    for side.model.context_length in (None, 1000):
        found.add(side.settings.fingerprint("weights of May"))
    assert len(found) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"image_token_id": 7},
        {"thinker_config": {"audio_config": {"layers": 2}}},
        {"architectures": ["SeeingForCausalLM"]},
    ],
)
def test_models_that_take_media_are_refused_wherever_they_say_so(side: Side, settings: dict[str, Any]):
    """At the top, within a part of theirs (Qwen Omni), or by SGLang's own list of classes only (Phi-4)."""
    side.settings.refuse("", "")
    side.configured(**settings)
    with pytest.raises(KvtierError, match="30 bits"):
        side.settings.refuse("", "")
    side.settings.refuse("", "never")
    side.settings.refuse("weights of May", "")
    side.configured(vision_config=None)
    side.settings.refuse("", "")


def test_diffusion_is_refused(side: Side):
    """A token's KV depends on those of its block that follow."""
    side.dllm.dllm_algorithm = "LowConfidence"
    with pytest.raises(KvtierError, match="dllm_algorithm"):
        side.settings.refuse("weights of May", "never")


def test_engines_of_one_process_have_two_names_and_ranks_one():
    """What an engine's weights became is filed under its name: another's must not be found there."""
    torch = pytest.importorskip("torch")
    engine_name = importlib.import_module("kvtier.engines.sglang.naming").engine_name
    assert engine_name() != engine_name()
    store = torch.distributed.HashStore()
    names = set()
    for _ in range(2):  # as two ranks would
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        names.add(engine_name())
        torch.distributed.destroy_process_group()
    assert len(names) == 1
