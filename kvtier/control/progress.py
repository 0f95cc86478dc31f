"""A bar on standard error while the daemon works on something long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

from kvtier import wire
from kvtier.control.call import Call, Data

POLL_S = 0.2
R = TypeVar("R", bound=wire.Message)


def ask_long(
    call: Call,
    message: wire.Message,
    reply: type[R],
    left: Callable[[Data], int],
    wait_s: float,
    console: Console | None = None,
) -> R:
    """The reply to a request that may take `wait_s`; `left` reads from status what is still to do.

    The bar is drawn only where standard error is a terminal. Raises as Admin.ask.
    """
    console = console or Console(stderr=True)
    with call.admin(wait_s) as admin:
        if not console.is_terminal:
            return admin.ask(message, reply)
        answer: list[R] = []
        failed: list[BaseException] = []

        def wait() -> None:
            try:
                answer.append(admin.ask(message, reply))
            except BaseException as exc:  # noqa: BLE001 - raised again below
                failed.append(exc)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(type(message).__name__.lower(), total=None)
            total = 0
            while thread.is_alive():
                todo = left(call.info(wire.Status()))
                total = max(total, todo)
                bar.update(task, total=total or None, completed=total - todo)
                thread.join(POLL_S)
        if failed:
            raise failed[0]
        return answer[0]
