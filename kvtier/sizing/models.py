"""The built-in table of models, and configs of checkpoints on this disk."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.sizing.families import AS_IS, Reading, read_config
from kvtier.sizing.params import estimate, mixture
from kvtier.sizing.spec import Spec
from kvtier.types import bad


class Model(NamedTuple):
    """A model as the planner needs it."""

    spec: Spec
    config: Mapping[str, Any]
    params: float
    active: float
    weights_dtype: str
    sure: str
    """high, medium-high, medium, or for a config that the user gave: config, low for an upper bound."""
    source: str
    weights_bytes: int = 0
    """Bytes of the checkpoint on disk, 0 where unknown."""
    mixture: bool = False
    """Whether a token uses a part of the experts only."""
    how: Reading = AS_IS
    """How the config was read."""


def expand(value: Any) -> Any:
    """Lists that the table writes short: {"runs": [[x, n], ...]} and {"head": [...], "cycle": [...], "length": n}."""
    if isinstance(value, list):
        return [expand(v) for v in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"runs"}:
        return [x for x, n in value["runs"] for _ in range(n)]
    if value.keys() == {"head", "cycle", "length"}:
        head, cycle, length = value["head"], value["cycle"], value["length"]
        return (head + cycle * -(-length // len(cycle)))[:length]
    return {key: expand(v) for key, v in value.items()}


@functools.cache
def table() -> tuple[dict[str, Any], ...]:
    """Rows of the built-in table."""
    text = resources.files("kvtier.sizing").joinpath("models.json").read_text()
    return tuple(json.loads(text)["models"])


_SUFFIX = re.compile(r"-(instruct|it|chat|hf|base|thinking|bf16|preview|\d{4})$")


def _plainly(name: str) -> str:
    """A name without its owner, case and the endings that change nothing of the cache."""
    short = name.rsplit("/", 1)[-1].lower().replace("_", "-").replace(" ", "-").removeprefix("meta-")
    while (cut := _SUFFIX.sub("", short)) != short:
        short = cut
    return short


def find(name: str) -> dict[str, Any]:
    """The row of a name, an alias or a Hugging Face id; raises KvtierError naming what comes close."""
    for row in table():
        if name in (row["name"], *row.get("aliases", ())):
            return row
    wanted = _plainly(name)
    for row in table():
        if wanted in {_plainly(n) for n in (row["name"], *row.get("aliases", ()))}:
            return row
    near = [row["name"] for row in table() if wanted[:6] and _plainly(row["name"]).startswith(wanted[:6])]
    hint = f" (near: {'; '.join(near[:4])})" if near else ""
    raise bad("model", f"a config.json, a folder with one, or a name of `size model --list`{hint}", name)


def load(name: str, how: Reading = AS_IS) -> Model:
    """The model of a path or a table name; raises KvtierError naming the field that is wrong."""
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        return _from_disk(path, how)
    if path.suffix == ".json" or name.startswith((".", "~")) or path.is_absolute():
        raise bad("model", "a config.json that exists", name)
    row = find(name)
    config = expand(row["config"])
    spec = read_config(config, how._replace(kv_dtype=how.kv_dtype or row.get("kv_dtype", "")), row["name"])
    return Model(
        spec,
        config,
        round(row["params_b"] * 1e9),
        round(row["active_b"] * 1e9),
        row["weights"],
        row["sure"],
        row["source"],
        mixture=row.get("mixture", row["active_b"] < 0.9 * row["params_b"]),
        how=how,
    )


def _from_disk(path: Path, how: Reading) -> Model:
    """A checkpoint's own config; parameters counted from it, weights from the files beside it."""
    config = _object(path, "model")
    spec = read_config(config, how, path.parent.name if path.name == "config.json" else path.stem)
    spec = spec._replace(notes=spec.notes + _declared_kv(path, how))
    total, active = estimate(config, spec)
    sure = "low" if spec.bound else "config"
    weights = _declared_weights(config)
    return Model(spec, config, total, active, weights, sure, str(path), _weights_beside(path), mixture(config), how)


def _object(path: Path, field: str) -> dict[str, Any]:
    """The JSON object in a file. Raises bad_request."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as exc:
        raise bad(field, f"a readable JSON config ({exc})", str(path)) from None
    if not isinstance(found, dict):
        raise bad(field, "a JSON object", str(path))
    return found


def _declared_kv(path: Path, how: Reading) -> tuple[str, ...]:
    """A note where a quantized checkpoint says what KV precision it was calibrated for."""
    beside = path.with_name("hf_quant_config.json")
    if how.kv_dtype or not beside.is_file():
        return ()
    quantization = _object(beside, beside.name).get("quantization")
    declared = quantization.get("kv_cache_quant_algo") if isinstance(quantization, Mapping) else None
    return (f"hf_quant_config.json declares {declared} KV; engines may follow it: see --kv-dtype",) if declared else ()


def _declared_weights(config: Mapping[str, Any]) -> str:
    """The weights' precision that the config declares."""
    quantization = config.get("quantization_config")
    method = str(quantization.get("quant_method", "")) if isinstance(quantization, Mapping) else ""
    return {"fp8": "fp8", "mxfp4": "mxfp4", "awq": "int4", "gptq": "int4", "modelopt": "nvfp4"}.get(method, "bf16")


def _weights_beside(path: Path) -> int:
    """Bytes of the safetensors files beside a config; an index tells them before the files are here."""
    index = path.with_name("model.safetensors.index.json")
    if index.is_file():
        metadata = _object(index, index.name).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, Mapping) else 0
        if isinstance(total, int) and total > 0:
            return total
    return sum(f.stat().st_size for f in path.parent.glob("*.safetensors"))
