"""The dashboard of a real daemon in a real browser: what it shows, by keys alone, wide and at a phone's width."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from browser import Page, browsing, chromium
from kvtier.client import Client
from kvtier.demo.daemon import Daemon
from test_dashboard import BRANCH, BRANCHES, SPEC, STEM, Board, answers, board, fill, until
from test_metrics import free_port

__all__ = ["board"]

browser = pytest.mark.skipif(chromium() is None, reason="no Chromium is installed")
FOCUSED = "document.activeElement.getAttribute('aria-label')"
BOXES = "document.querySelectorAll('#icicle .box').length"
STOP = """(() => {
  const at = document.activeElement, style = getComputedStyle(at), box = at.getBoundingClientRect();
  return at === document.body ? null : {
    what: at.id || at.getAttribute('aria-labelledby') || (at.node ? 'tree' : at.textContent),
    ring: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2,
    inside: box.width > 0 && box.top < innerHeight && box.bottom > 0 && box.left < innerWidth && box.right > 0,
  };
})()"""
"""Where the focus is, and whether a person sees it."""
OPERABLE = """[...document.querySelectorAll('a[href], button:not(:disabled), select, input, [tabindex="0"]')]
  .filter((each) => each.offsetParent !== null).length"""
CLIPPED = """[...document.querySelectorAll('body *')]
  .filter((each) => !each.closest('.scroll, #icicle, svg, select, .track') && each.scrollWidth > each.clientWidth + 1)
  .filter((each) => getComputedStyle(each).display !== 'inline').map((each) => each.outerHTML.slice(0, 200))"""
"""What is wider than the place that it has."""


async def tab(page: Page, *, back: bool = False) -> str:
    """Press Tab; what has the focus then, which a person sees."""
    await page.press("Tab", shift=back)
    stop = await page.run(STOP)
    if stop is None:
        return ""
    assert stop["ring"], stop
    assert stop["inside"], stop
    return stop["what"]


async def tab_to(page: Page, what: str) -> None:
    """Press Tab until something has the focus."""
    passed = [""]
    while passed[-1] != what:
        assert len(passed) < 40, passed
        passed.append(await tab(page))


async def pin_here(page: Page) -> None:
    """Pin what is focused in the tree: its button is the next stop."""
    pins = await page.run("document.querySelectorAll('#pins button').length")
    assert await tab(page) == "Pin for an hour"
    await page.press("Enter")
    await page.until(f"document.querySelectorAll('#pins button').length == {pins + 1}")


async def keyboard(page: Page, board: Board) -> None:
    """Go through the page, walk the tree, zoom in and out, log in, pin and unpin, by keys alone."""
    await page.until(f"{BOXES} == {BRANCHES + 1}")
    passed = [await tab(page)]
    while (stop := await tab(page)) and stop != passed[0]:
        passed.append(stop)
    assert passed == [
        "add", "peers-title", "cache", "tree", "top-title", "engines-title", "pins-title", "token", "Use",
    ]  # fmt: skip
    assert len(passed) == await page.run(OPERABLE)
    await tab_to(page, "tree")
    assert (await page.run(FOCUSED)).startswith(f"Tokens 0 to {4 * STEM}:")
    await page.press("ArrowDown")
    first = await page.run(FOCUSED)
    await page.press("ArrowRight")
    second = await page.run(FOCUSED)
    assert first.startswith(f"Tokens {4 * STEM} to {4 * (STEM + BRANCH)}:"), first
    assert second.startswith(f"Tokens {4 * STEM} to {4 * (STEM + BRANCH)}:")
    await page.press("ArrowLeft")
    await page.press("ArrowUp")
    assert (await page.run(FOCUSED)).startswith(f"Tokens 0 to {4 * STEM}:")
    await page.press("ArrowDown")
    await page.press("Enter")
    assert await page.run(BOXES) == 1
    assert await tab(page, back=True) == "out"
    await page.press("Enter")
    assert await page.run(BOXES) == BRANCHES + 1
    assert (await page.run(STOP))["what"] == "tree"
    await page.press("Escape")
    assert await page.run(BOXES) == BRANCHES + 1
    assert await page.run("document.querySelectorAll('#node button').length") == 0
    await tab_to(page, "token")
    await page.type(board.token)
    await page.press("Enter")
    await page.until("document.getElementById('login').hidden")
    await page.until(f"{STOP}?.what == 'pins-title'")
    await tab_to(page, "tree")
    await pin_here(page)
    await tab(page, back=True)
    await page.press("ArrowDown")
    await pin_here(page)
    await tab_to(page, "Unpin")
    await page.press("Enter")
    await page.until("document.querySelectorAll('#pins button').length == 1")
    assert (await page.run(STOP))["what"] == "Unpin", "the focus went with the button"
    await page.press("Enter")
    await page.until("document.querySelectorAll('#pins button').length == 0")
    assert (await page.run(STOP))["what"] == "pins-title"


@browser
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_page_works_in_a_browser_by_keyboard_and_at_phone_width(board: Board, tmp_path: Path) -> None:
    """Numbers, chart and tree appear; keys walk, zoom and pin; 390 pixels hold it; no script complains."""

    async def visit() -> None:
        async with browsing(tmp_path) as page:
            await page.open(f"http://127.0.0.1:{board.port}/")
            await keyboard(page, board)
            assert await page.run("document.querySelectorAll('#tiers [role=meter]').length") == 2
            assert await page.run("document.querySelectorAll('#top tbody tr').length") == BRANCHES + 1
            await page.until("document.querySelectorAll('#curve polyline').length == 1")
            assert "host as it is" in await page.run("document.getElementById('curve-text').textContent")
            assert "none configured" in await page.run("document.getElementById('peers').textContent")
            for width, height in ((1280, 900), (390, 844)):
                await page.resize(width, height)
                await page.until(f"innerWidth == {width} && document.documentElement.scrollWidth <= {width}")
                assert await page.run(CLIPPED) == []
                await page.picture(tmp_path / f"{width}.png")
            assert page.faults == []
            os.kill(board.daemon.pid, signal.SIGSTOP)
            try:
                await page.until("document.getElementById('state').className == 'bad'")
            finally:
                os.kill(board.daemon.pid, signal.SIGCONT)
            await page.until("document.getElementById('state').className == ''")

    asyncio.run(visit())


@browser
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_page_works_by_mouse_and_follows_what_is_cached(tmp_path: Path) -> None:
    """Opened before anything is cached it fills by itself; what was clicked stays chosen on the way to its button."""
    port = free_port()

    async def visit(daemon: Daemon) -> None:
        async with browsing(tmp_path) as page:
            board = Board(daemon, port)
            await page.open(board.address_path.read_text().strip())
            await page.until("document.getElementById('top').textContent.includes('nothing is cached')")
            with Client(daemon.socket, instance="engine", timeout_s=10.0) as client:
                fill(client.open(SPEC))
            await page.until(f"{BOXES} == {BRANCHES + 1}")
            await page.mouse("document.querySelector('#icicle .box')", click=True)
            await page.until("!!document.activeElement.node")
            await page.mouse("document.querySelector('#node button')", click=True)
            await page.until("document.querySelectorAll('#pins button').length == 1")
            assert await page.run("document.querySelector('#pins tbody').textContent.includes('40')"), "the stem"
            await page.mouse("document.querySelector('#pins button')", click=True)
            await page.until("document.querySelectorAll('#pins button').length == 0")
            assert page.faults == []

    with Daemon(tmp_path, host="64MiB", disk="128MiB", flags=[f"--http-port={port}"]) as daemon:
        until(lambda: answers(Board(daemon, port)))
        asyncio.run(visit(daemon))
        assert daemon.stop() == 0, daemon.log.read_text()[-2000:]
