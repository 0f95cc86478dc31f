"""What `kvtierctl try transformers` runs: one prompt in a fresh process; prints what came from kvtier as JSON.

`trial.py SOCKET MODEL`, MODEL the folder of a causal language model; where it is not there a small seeded one is used.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from kvtier.client import Client
from kvtier.demo.model import random_model
from kvtier.engines.transformers import attach

TOKENS = 1000


def main() -> None:
    """Generate one token."""
    socket, folder = sys.argv[1], Path(sys.argv[2])
    model = AutoModelForCausalLM.from_pretrained(folder).eval() if folder.exists() else random_model().model
    ids = torch.tensor([[(i * i) % 200 + 10 for i in range(TOKENS)]])
    with Client(socket) as client:
        kv = attach(model, client=client)
        began = time.perf_counter()
        kv.generate(ids, max_new_tokens=1, do_sample=False)
        took = time.perf_counter() - began
    sys.stdout.write(json.dumps({"prompt": TOKENS, "hit": kv.last.hit_tokens, "ttft_s": took}) + "\n")


if __name__ == "__main__":
    main()
