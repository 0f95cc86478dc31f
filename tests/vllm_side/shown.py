"""What page keys are made of requests with images, by vLLM's own classes and codec; prints JSON."""

from __future__ import annotations

import json
import sys

import torch
from vllm import SamplingParams
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvtier.engines.vllm.keys import Keys
from kvtier.engines.vllm.media import Media
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.types import Kind

SPEC = CacheSpec("m", b"f" * 32, "x", 32, (GroupSpec(Kind.FULL, 1, 1, 4096),), extras=True)


def request(name: str, value: float) -> Request:
    """A request with one image of a name and pixels, as it comes to the scheduler."""
    fields = {
        "pixel_values": torch.full((3, 4), value, dtype=torch.bfloat16), "image_grid_thw": torch.tensor([1, 2, 2]),
        "sizes": [torch.ones(2), torch.ones(3)], "seconds": 2.0,
    }  # fmt: skip
    data = MultiModalKwargsItem(
        {field: MultiModalFieldElem(data=each, field=MultiModalBatchedField()) for field, each in fields.items()}
    )
    place = PlaceholderRange(offset=4, length=8, is_embed=torch.ones(8, dtype=torch.bool))
    image = MultiModalFeatureSpec(data=data, modality="image", identifier=name, mm_position=place, mm_hash=name)
    sent = EngineCoreRequest(
        request_id="r", prompt_token_ids=list(range(100)), mm_features=[image], pooling_params=None, arrival_time=0.0,
        sampling_params=SamplingParams(max_tokens=1), lora_request=None, cache_salt=None, data_parallel_rank=None,
    )  # fmt: skip
    got = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(sent))
    return Request.from_engine_core_request(got, None)


def main() -> None:
    """For each (name, pixels): the keys of three pages, and whether what is computed may be stored."""
    media, keys, out = Media(), Keys(SPEC), []
    for name, value in json.loads(sys.argv[1]):
        each = request(name, value)
        shown = media.show(each)
        said = keys.said(each, shown)
        out.append([keys.of(each, said, 0, 3).hex(), media.sure(shown)])
    sys.stdout.write(json.dumps(out) + "\n")
    media.close()


if __name__ == "__main__":
    main()
