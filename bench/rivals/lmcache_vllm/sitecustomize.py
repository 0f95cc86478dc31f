"""Lets vLLM 0.32 start where LMCache has imported llvmlite: vLLM asks every object of every module for `vars`.

llvmlite's library answers each name that is asked of it with a function, `__dict__` too, which
vllm.triton_utils.dispatcher._rebind_kernels takes for a dictionary.
"""

import contextlib

with contextlib.suppress(ImportError):
    from llvmlite.binding import ffi

    kind = type(ffi.lib)
    answer = kind.__getattr__

    def of_the_library(self, name):
        """What it answered, but for Python's own names."""
        if name.startswith("__"):
            raise AttributeError(name)
        return answer(self, name)

    kind.__getattr__ = of_the_library
