"""`python -m kvtier.sizing`: the planner without the rest of kvtierctl."""

from __future__ import annotations

import click

from kvtier.output import printing
from kvtier.sizing.cli import probe, size


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Plan KV memory: `size` calculates, `probe` measures this host."""


main.add_command(size)
main.add_command(probe)

if __name__ == "__main__":
    with printing("kvtier.sizing"):
        main(prog_name="python -m kvtier.sizing")
