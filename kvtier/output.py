"""What this package's programs print, and what they say where it cannot be printed."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator

import click


@contextlib.contextmanager
def printing(program: str) -> Iterator[None]:
    """What a program prints goes out, or is given up with a sentence and exit code 1; a pipe closed early is no news.

    What a terminal's encoding has no characters for, such as a request's id, is printed in escapes.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
    except OSError as exc:
        if exc.errno != errno.EPIPE:
            with contextlib.suppress(OSError):  # it may be full, too
                click.echo(f"{program}: {exc}", err=True)
        sys.exit(1)
    finally:
        _forget()


def _forget() -> None:
    """Drop what could not be printed: Python would try once more as it ends, say so and change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


def show(program: str, text: str) -> None:
    """Print a text as it is, as programs do that only do that."""
    with printing(program):
        click.echo(text, nl=False)
