"""Headless Chromium over its own protocol: open a page, run a script in it, press keys, take its picture."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--remote-debugging-port=0", "--hide-scrollbars",
)  # fmt: skip
PATIENCE_S = 60.0


def chromium() -> str | None:
    """The browser's path, where there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self._at = (0.0, 0.0)
        self.faults: list[str] = []
        """What scripts threw, and what the page complained of."""

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its result."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=PATIENCE_S)
            if message.get("method") in {"Runtime.exceptionThrown", "Log.entryAdded"}:
                self.faults.append(json.dumps(message["params"])[:500])
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]

    async def open(self, url: str, width: int = 1200, height: int = 900) -> None:
        """Load an address at a size: what is asked of the page next finds it whole."""
        await self.call("Runtime.enable")
        await self.call("Log.enable")
        await self.call("Page.enable")
        await self.resize(width, height)
        await self.call("Page.navigate", url=url)
        await self.until("location.href != 'about:blank' && document.readyState == 'complete'")

    async def resize(self, width: int, height: int) -> None:
        """Give the page another size in pixels."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    async def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        reply = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    async def until(self, script: str) -> Any:
        """The value of an expression once it is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := await self.run(script)):
            assert time.monotonic() < deadline, f"never: {script}; {self.faults}"
            await asyncio.sleep(0.1)
        return value

    async def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key."""
        code = {"Enter": 13, "Escape": 27, "Tab": 9}.get(key, 0)
        text = {"text": "\r"} if key == "Enter" else {}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, **common, **text)

    async def mouse(self, what: str, *, click: bool = False) -> None:
        """Move the mouse to the middle of an element, in steps from where it is; click there."""
        x, y = await self.run(
            f"(() => {{ const at = {what}; at.scrollIntoView({{ block: 'nearest' }});"
            "const b = at.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        (x0, y0), self._at = self._at, (x, y)
        for part in (0.2, 0.4, 0.6, 0.8, 1.0):
            place = {"x": x0 + part * (x - x0), "y": y0 + part * (y - y0)}
            await self.call("Input.dispatchMouseEvent", type="mouseMoved", **place)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def type(self, text: str) -> None:
        """Type a text where the focus is."""
        await self.call("Input.insertText", text=text)

    async def picture(self, path: Path) -> None:
        """Write what the page looks like, all of it."""
        reply = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(reply["data"]))


@contextlib.asynccontextmanager
async def browsing(folder: Path) -> AsyncIterator[Page]:
    """A fresh browser with one empty tab, ended after use."""
    command = [str(chromium()), *FLAGS, f"--user-data-dir={folder / 'browser'}", "about:blank"]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet)
    try:
        told, deadline = folder / "browser" / "DevToolsActivePort", time.monotonic() + PATIENCE_S
        while not told.exists() or not told.read_text():
            assert time.monotonic() < deadline, "the browser does not start"
            await asyncio.sleep(0.1)
        port = told.read_text().split()[0]
        async with ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as reply:
                tab = next(each for each in await reply.json() if each["type"] == "page")
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=64 << 20) as socket:
                yield Page(socket)
    finally:
        process.kill()
        await process.wait()
