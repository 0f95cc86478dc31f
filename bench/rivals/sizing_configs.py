"""Published config.json files as aiconfigurator-core ships them. Run by bench_sizing.py in a venv of its own."""

import importlib.util
import json
from pathlib import Path

from lines import serve


class Configs:
    """Configs by checkpoint name."""

    def __init__(self, stack):
        del stack
        spec = importlib.util.find_spec("aiconfigurator_core")
        self.folder = Path(spec.submodule_search_locations[0]) / "model_configs"

    def config(self, name):
        """The config of a checkpoint."""
        (path,) = self.folder.glob(f"*--{name}_config.json")
        return json.loads(path.read_text())


serve(Configs)
