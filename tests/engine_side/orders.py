"""How a process with an engine does what a test tells it: orders come in as lines of JSON, and answers go out so."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

ANSWER = "\x1eanswer "
"""What a line begins with that is an answer: engines print on their own account."""


def serve(engine: Any) -> None:
    """Call what each order names in `do` until the input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints must not mix with the answers
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = {"ok": getattr(engine, order.pop("do"))(**order)}
        except Exception as exc:  # noqa: BLE001 - the test is told
            answer = {"error": f"{type(exc).__name__}: {exc}", "trace": traceback.format_exc()}
        out.write(ANSWER + json.dumps(answer) + "\n")
        out.flush()
