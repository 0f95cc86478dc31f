"""The verb `completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from kvtier.control.call import Call, Data, verb


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@verb
@click.pass_context
def completion(ctx: click.Context, call: Call, show: bool, shell: str) -> Data:
    """Print a shell's completion script: `eval "$(kvtierctl completion bash)"`."""
    del call
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(ctx.find_root().command, {}, "kvtierctl", "_KVTIERCTL_COMPLETE").source()
    if show:
        click.echo(script)
    return {"shell": shell, "script": script}
