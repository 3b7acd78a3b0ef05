"""The page of `busrl monitor --web` in a real Chromium: sizes, themes, keys, what is red, and a silent console."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Awaitable, Callable
from itertools import product

import pytest
from chromium import PROGRAM, Page, chromium
from monitor_scene import Scene, metrics_line
from test_monitor_web import Site

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed")]
Start = Callable[..., "subprocess.Popen[str]"]
EVIL = "<img src=x onerror='window.taken = 1'><script>window.taken = 2</script><b>bold</b>"
PANELS = ("flow", "processes", "waits", "ring", "versions", "charts", "timeline", "samples", "bus", "errors")
COUNT = "document.querySelectorAll('{}').length"
DRAWN = f"{COUNT.format('#graph .name')} >= 4 && {COUNT.format('.plot canvas')} === 6"
BEYOND = """PANELS.map((id) => [id, $(id).getBoundingClientRect(), $(id).offsetHeight])
  .filter(([id, box, height]) => box.right > innerWidth || !height).map(([id]) => id)"""
NAMES = "[...document.querySelectorAll('#graph .name')].map((one) => one.textContent)"
TEXT = "document.querySelector('{}').textContent"


def visit(scene: Scene, started: Start, what: Callable[[Page, str], Awaitable[None]]) -> None:
    """Look at the scene with a browser; its console must stay silent."""
    samples = [
        {"step": step, "uid": step, "group": step, "prompt": f"Q{step} {EVIL}", "completion": f"A{step} {EVIL}",
         "reward": 0.5, "tokens": 5, "version_runs": [[step - 1, 3], [step, 2]], "rewards_of_group": [0.5, 1.0],
         "logprob_gap": {"mean": 0.01, "most": 0.03, "at": 4, "each": [0.0, 0.01, 0.0, 0.01, -0.03]}}
        for step in (38, 39, 40)
    ]
    scene.paths.samples.write_text("".join(json.dumps(one) + "\n" for one in samples))
    site = Site(started("monitor", str(scene.paths.root), "--web"))

    async def browse() -> None:
        async with chromium() as page:
            await page.look(1280, 900, "light")
            await page.open(site.url)
            await page.until(DRAWN)
            await what(page, site.url)
            assert page.console == []

    asyncio.run(browse())


def test_it_fits_both_widths_in_both_themes(scene: Scene, started: Start) -> None:
    async def look(page: Page, url: str) -> None:
        grounds = set()
        for width, theme in product((1280, 390), ("light", "dark")):
            await page.look(width, 900, theme)
            await page.open(url)
            await page.until(DRAWN)
            assert await page.value("document.documentElement.scrollWidth") <= width
            assert await page.value(BEYOND) == []
            grounds.add((theme, await page.value("getComputedStyle(document.body).backgroundColor")))
            assert "rollout" in await page.until(NAMES)
        assert len(grounds) == 2 and len({ground for _, ground in grounds}) == 2

    visit(scene, started, look)


def test_it_goes_by_keyboard(scene: Scene, started: Start) -> None:
    async def keys(page: Page, url: str) -> None:
        await page.press("Tab")
        assert await page.value("document.activeElement.className") == "skip"
        for key, panel in zip("1234567890", PANELS, strict=True):
            await page.press(key)
            assert await page.value("document.activeElement.id") == panel
        await page.until("document.querySelectorAll('#list button').length === 3")
        for key, step in (("j", 39), ("j", 38), ("j", 38), ("k", 39)):
            await page.press(key)
            assert f"step {step}" in await page.value(TEXT.format("#sample p"))
        assert "at most 0.030, at token 5" in await page.value(TEXT.format("#sample"))
        await page.press("?")
        assert await page.value("document.getElementById('help').open")
        await page.press("Escape")
        assert not await page.value("document.getElementById('help').open")
        await page.value("document.querySelector('.plot').focus()")
        await page.press("ArrowLeft")
        assert "step 39: 0.390" in await page.value("document.querySelector('.plot').getAttribute('aria-label')")
        await page.until("timeline.lines.length === 1")
        await page.value("timeline.canvas.focus()")
        await page.press("ArrowLeft")
        await page.until(TEXT.format("#span-said") + ".startsWith('rollout/0, 1.0 s ago')")
        await page.press("p")
        assert "held" in await page.value(TEXT.format("#link"))

    visit(scene, started, keys)


def test_texts_of_a_model_are_never_markup(scene: Scene, started: Start) -> None:
    async def look(page: Page, url: str) -> None:
        await page.until("document.querySelectorAll('#list button').length === 3")
        assert EVIL in await page.value(TEXT.format("#sample .answer"))
        assert await page.value(f"document.images.length + {COUNT.format('main script, main pre b')}") == 0
        assert await page.value("window.taken ?? 'nothing'") == "nothing"
        parts = "[...document.querySelectorAll('.strip:not(.gaps) i')]"
        assert await page.value(f"{parts}.map((i) => i.style.flexGrow) + ''") == "3,2"

    visit(scene, started, look)


def test_what_does_not_move_is_red_and_what_comes_is_drawn(scene: Scene, started: Start) -> None:
    async def look(page: Page, url: str) -> None:
        assert await page.value("document.querySelectorAll('#graph .blocked').length") == 0
        scene.ring.activity("stuck", 0.01)
        await page.until(COUNT.format("#graph g.blocked") + " === 2")  # the process, and what it should take
        assert "rollout/0: no progress for" in await page.value(TEXT.format("#blocked"))
        red = "getComputedStyle(document.querySelector('#graph .blocked rect')).stroke"
        assert await page.value(red) == "rgb(195, 38, 29)"
        with open(scene.paths.metrics, "ab") as file:
            file.write(metrics_line(41))
        await page.until("charts.plots[0].plot.data[0].at(-1) === 41")

    visit(scene, started, look)
