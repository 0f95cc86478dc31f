"""What an engine of SGLang's is called: by all of its ranks alike, and by no other engine ever."""

from __future__ import annotations

import secrets
import socket
from typing import Final

import torch

KEY: Final = "kvtier engine"


def engine_name() -> str:
    """This engine's name, which its ranks agree on through the store that they met by.

    Their parent does not tell engines apart: one process may start several.
    """
    name = secrets.token_hex(16)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        store = torch.distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - torch shows it nowhere else
        name = store.compare_set(KEY, "", name).decode()
    return f"{socket.gethostname()[:48]}-{name}"
