"""A llama.cpp context that does what it is told by JSON lines; runs in the venv that has llama-cpp-python.

Each line is {"do": name, ...} (engine_side/orders.py). `start` loads the model.
"""

from __future__ import annotations

import hashlib
from typing import Any

from orders import serve


class Engine:
    """One Llama; each public method is a thing that can be told."""

    def start(self, model: str, socket: str | None, salt: str = "", exact: bool = False, **options: Any) -> Any:
        """Load the model, and attach it where there is a socket."""
        from llama_cpp import Llama

        defaults = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
        self.llm = Llama(model, **(defaults | options))
        self.kv = None
        return {} if socket is None else self.attach(socket, salt, exact)

    def attach(self, socket: str, salt: str = "", exact: bool = False) -> dict[str, Any]:
        """Attach it."""
        from kvtier.client import Client
        from kvtier.engines.llamacpp import attach

        client = Client(socket, verify="always")
        self.kv = attach(self.llm, client=client, salt=salt.encode(), exact=exact)
        return {}

    def generate(self, prompt: list[int], tokens: int = 8) -> dict[str, Any]:
        """A greedy continuation, the digest of the last logits, and what came from kvtier."""
        out: list[int] = []
        for token in self.llm.generate(prompt, temp=0.0, top_k=1):
            out.append(token)
            if len(out) == tokens:
                break
        return {"tokens": out, "logits": self._logits(), "hit": self.kv.last.hit_tokens if self.kv else 0}

    def evaluate(self, prompt: list[int], cut: int, tokens: int = 8) -> dict[str, Any]:
        """The same as computed in two parts, as an engine does that has loaded the first."""
        self.forget()
        self.llm.eval(prompt[:cut])
        return self.generate(prompt, tokens)

    def interrupt(self, prompt: list[int]) -> dict[str, Any]:
        """Ask for a continuation and press Ctrl-C while llama.cpp takes the state that was found."""
        import llama_cpp

        take = llama_cpp.llama_state_seq_set_data

        def interrupted(*args: Any) -> int:
            take(*args)
            raise KeyboardInterrupt

        llama_cpp.llama_state_seq_set_data = interrupted
        try:
            self.generate(prompt)
        except KeyboardInterrupt:
            return {}
        finally:
            llama_cpp.llama_state_seq_set_data = take
        raise AssertionError("nothing was loaded")

    def forget(self) -> dict[str, Any]:
        """Empty the context."""
        self.llm.reset()
        self.llm._ctx.kv_cache_clear()
        return {}

    def complete(self, text: str, **options: Any) -> dict[str, Any]:
        """What `create_completion` gives for a text."""
        done = self.llm.create_completion(text, temperature=0.0, **options)["choices"][0]
        return {"text": done["text"], "reason": done["finish_reason"], "hit": self.kv.last.hit_tokens}

    def _logits(self) -> str:
        import numpy as np

        row = np.ctypeslib.as_array(self.llm._ctx.get_logits(), shape=(self.llm.n_vocab(),))
        return hashlib.sha256(row.tobytes()).hexdigest()


if __name__ == "__main__":
    serve(Engine())
