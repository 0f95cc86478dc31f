"""kvtierctl: what operators ask of a running daemon. Exit codes: 0 ok, 1 refused or unhealthy, 2 usage or no daemon."""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from pathlib import Path
from typing import Final

import click

from kvtier import __version__
from kvtier.control.call import SECONDS, Call, Data, Group, Refused, verb, waiting


class Lazy(Group):
    """Adds groups of other modules without importing them before they are used."""

    more: Final = {
        "caches": ("kvtier.control.whole", "caches", "One row per cache."),
        "completion": ("kvtier.control.completion", "completion", "Print a shell's completion script."),
        "dashboard": ("kvtier.control.dashboard", "dashboard", "Print the dashboard's address, with its token."),
        "curve": ("kvtier.control.curve", "curve", "Hits against capacity for the traffic just seen."),
        "disk": ("kvtier.control.disk", "disk", "Look after the disk tier: usage, scrub, verify, compact, purge."),
        "doctor": ("kvtier.control.doctor", "doctor", "Check what this host gives the daemon, and what to change."),
        "evict": ("kvtier.control.prompts", "evict", "Take a prompt out of host, or out of every tier."),
        "explain": ("kvtier.control.prompts", "explain", "Why a prompt is served as it is."),
        "export": ("kvtier.control.carry", "export", "Write a prefix or a cache to a file."),
        "flush": ("kvtier.control.whole", "flush", "Wait until everything committed is durable."),
        "import": ("kvtier.control.carry", "import_", "Bring the pages of an export file to this host."),
        "pin": ("kvtier.control.prompts", "pin", "Hold a prompt in host for a time."),
        "pins": ("kvtier.control.prompts", "pins", "List the pins."),
        "policies": ("kvtier.replay.cli", "policies", "List the eviction policies."),
        "prefetch": ("kvtier.control.prompts", "prefetch", "Bring a prompt to host."),
        "probe": ("kvtier.sizing.cli", "probe", "Measure this host's links for `size`."),
        "purge": ("kvtier.control.whole", "purge", "Empty all caches of a scope, an adapter or a tenant."),
        "requests": ("kvtier.control.prompts", "requests", "List recent requests by their ids."),
        "replay": ("kvtier.replay.cli", "replay", "Replay a request trace through the store."),
        "route": ("kvtier.control.route", "route", "Which host a prompt is cheapest on."),
        "set": ("kvtier.control.settings", "set_", "Show or change live settings."),
        "size": ("kvtier.sizing.cli", "size", "Work out memory, bandwidth and capacity."),
        "top": ("kvtier.control.top", "top", "What happens now, every second."),
        "tree": ("kvtier.control.whole", "tree", "Cached prefixes of one cache."),
        "try": ("kvtier.control.tryout", "tryout", "Try an engine on kvtier: venv, daemon and all."),
        "unpin": ("kvtier.control.prompts", "unpin", "End pins."),
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all verbs."""
        return sorted([*super().list_commands(ctx), *(name for name in self.more if self._found(name))])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """The verb of that name; for help, of another module only its name and what it is for."""
        if name in self.more and self._found(name):
            return click.Command(name, short_help=self.more[name][2])
        return super().get_command(ctx, name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The verb that was called."""
        if args[0] in self.more and self._found(args[0]):
            module, attribute, _ = self.more[args[0]]
            return args[0], getattr(importlib.import_module(module), attribute), args[1:]
        return super().resolve_command(ctx, args)

    def _found(self, name: str) -> bool:
        """Whether the module is installed."""
        module = self.more[name][0]
        try:
            return importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            return False


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--socket", "path", type=click.Path(path_type=Path, readable=False), help="Admin socket of the daemon.")
@click.option(
    "--timeout", "timeout_s", type=SECONDS, default=10.0, show_default=True, help="Seconds to wait for an answer."
)
@click.version_option(__version__, prog_name="kvtierctl")
@click.pass_context
def main(ctx: click.Context, path: Path | None, timeout_s: float) -> None:
    """Look into a running kvtierd and the cache that it keeps."""
    from kvtier.paths import admin_path, socket_path  # noqa: PLC0415

    if any(name.startswith("KVTIER_") for name in os.environ.keys() - {"KVTIER_CONFIG", "KVTIER_SOCKET"}):
        _refuse_misspelt()
    ctx.obj = Call(path or admin_path(socket_path()), timeout_s)


def _refuse_misspelt() -> None:
    """A variable that is nearly one of ours names another daemon, maybe: nothing is asked of this one."""
    from kvtier.config import strangers  # noqa: PLC0415 - keeps --help quick
    from kvtier.types import KvtierError  # noqa: PLC0415

    try:
        strangers()
    except KvtierError as exc:
        raise Refused(exc.data(), f"{exc.code.value}: {exc}") from None


@main.command()
@verb
def status(call: Call, show: bool) -> Data:
    """Tiers, engines and counters."""
    from kvtier import views, wire  # noqa: PLC0415

    data = call.info(wire.Status())
    if show:
        views.status(data)
    return data


@main.command()
@click.option("--count", type=click.IntRange(1), default=1, show_default=True, help="Round trips.")
@verb
def ping(call: Call, show: bool, count: int) -> Data:
    """Round trips through the serving loop."""
    from kvtier import wire  # noqa: PLC0415

    times = []
    with call.admin() as admin:
        for _ in range(count):
            start = time.perf_counter()
            admin.ask(wire.Ping(), wire.Ok)
            times.append(round((time.perf_counter() - start) * 1e6, 1))
            if show:
                click.echo(f"{times[-1]:.0f} us")
    return {"round_trips_us": times}


@main.command()
@waiting(600.0)
@verb
def check(call: Call, show: bool, wait_s: float) -> Data:
    """Check the daemon's invariants now; exit code 1 when one is broken.

    It is done in slices: engines go on being served.
    """
    from kvtier import wire  # noqa: PLC0415
    from kvtier.control.progress import ask_long  # noqa: PLC0415

    data: Data = ask_long(call, wire.Check(), wire.Info, lambda _: 0, wait_s).data
    broken = data["broken"]
    if show:
        for line in broken:
            click.echo(line)
        click.echo(f"{len(broken)} broken" if broken else "ok")
        if data.get("changed"):
            click.echo(f"in use meanwhile, so that totals were not compared: {', '.join(data['changed'])}")
    return {**data, "healthy": not broken}


if __name__ == "__main__":
    main()
