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
PANELS = ("flow", "charts", "samples", "errors", "processes", "waits", "ring", "versions", "timeline", "bus")
COUNT = "document.querySelectorAll('{}').length"
SHOWN = [
    "reward", "parts of the reward", "length, tokens", "tokens trained per second", "learning rate",
    "gradient norm before clipping", "flat groups and cut answers, share", "KL, nats per token",
    "entropy, nats per token", "effective sample size, share", "age, steps", "log-prob. difference engine/trainer",
]
PLOT_NAMES = "[...document.querySelectorAll('.plot:not([hidden]) h3')].map((head) => head.firstChild.textContent)"
DRAWN = f"{COUNT.format('#graph .name')} >= 4 && {PLOT_NAMES}.length === {len(SHOWN)}"
REWARD = "charts.plots[1]"
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
    scene.paths.samples.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
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
        await page.value(f"{REWARD}.place.focus()")
        await page.press("ArrowLeft")
        assert "step 39: all 0.39, trained 0.195" in await page.value(f"{REWARD}.place.getAttribute('aria-label')")
        await page.until("timeline.lines.length === 1")
        await page.value("timeline.canvas.focus()")
        await page.press("ArrowLeft")
        await page.until(TEXT.format("#span-said") + ".startsWith('rollout/0, 1.0 s ago')")
        await page.press("p")
        assert "held" in await page.value(TEXT.format("#link"))

    visit(scene, started, keys)


def test_a_model_is_chosen_by_link_and_by_key(scene: Scene, started: Start) -> None:
    judge, other = scene.beside("judge"), "document.querySelector('#models a:not([aria-current])')"
    chosen = "(typeof newest !== 'undefined' && newest && newest.web.model)"  # a page may be half loaded

    async def look(page: Page, url: str) -> None:
        assert await page.until(f"{other}.textContent") == "judge"
        await page.value(f"{other}.focus()")
        with open(judge.metrics, "ab") as file:
            file.write(metrics_line(4))
        await page.until("document.querySelector('#models').textContent.includes('4/200')")
        assert await page.value("document.activeElement.textContent") == "judge", "a picture takes the focus away"
        await page.value("document.activeElement.click()")
        await page.until(f"{chosen} === 'judge' && charts.plots[1].plot.data[0].at(-1) === 4")
        assert await page.value("location.search") == "?model=judge"
        assert " · judge" in await page.value(TEXT.format("#headline"))
        assert await page.value("document.querySelector('#models a[aria-current]').textContent") == "judge"
        await page.press("m")
        await page.until(f"{chosen} === 'solver' && charts.plots[1].plot.data[0].at(-1) === 40")
        await page.press("?")
        assert "the next model" in await page.value("document.getElementById('help').innerText")

    visit(scene, started, look)


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
        await page.until("charts.plots[1].plot.data[0].at(-1) === 41")

    visit(scene, started, look)


def choose(name: str, value: str) -> str:
    """A script that sets a choice of the curves as a person does."""
    how = "checked = true" if not value else f"value = '{value}'"
    box = f"choices.elements['{name}']"
    return f"{box}.{how}; {box}.dispatchEvent(new Event('change', {{bubbles: true}}))"


def test_curves_without_news_are_left_out_and_validation_comes_first(scene: Scene, started: Start) -> None:
    async def look(page: Page, url: str) -> None:
        assert await page.value(PLOT_NAMES) == SHOWN  # no validation yet, n_min never moves, no KL to a reference
        with open(scene.paths.validation, "a") as file:
            for name in ("", "hard"):
                row = {"round": 10, "version": 10, "val/reward": 0.25, "samples": 4, "time": 1_700_000_005.0}
                file.write(json.dumps({**row, **({"set": name} if name else {})}) + "\n")
        await page.until(f"{PLOT_NAMES}[0] === 'validation, mean reward'")
        label = await page.value("charts.plots[0].place.getAttribute('aria-label')")
        assert label == "validation, mean reward, step 10: validation 0.25, hard 0.25"
        assert "exact 0.4, format 1" in await page.value("charts.plots[2].place.getAttribute('aria-label')")

    visit(scene, started, look)


def test_curves_are_smoothed_logarithmic_and_over_the_clock(scene: Scene, started: Start) -> None:
    async def look(page: Page, url: str) -> None:
        await page.value(choose("window", "5"))
        smooth, raw = await page.value(f"[1, 3].map((at) => {REWARD}.plot.data[at].at(-1))")
        assert (round(smooth, 6), raw) == (0.38, 0.4)  # the mean of steps 36 to 40, and step 40
        await page.value(choose("over", "time"))
        assert await page.value(f"{REWARD}.plot.data[0].at(-1)") == 1_700_000_020.0
        await page.value(choose("log", ""))
        assert await page.value(f"{REWARD}.plot.scales.y.distr") == 3
        assert await page.value("charts.plots[7].plot.data[2].every((share) => share === null)")  # no logarithm of 0

    visit(scene, started, look)


def test_errors_of_an_earlier_start_stand_apart(scene: Scene, started: Start) -> None:
    earlier = {"time": json.loads(scene.paths.run_json.read_text())["started"] - 50, "process": "learner",
               "severity": "error", "where": "learner", "text": "of yesterday", "trace": ""}
    with open(scene.paths.errors, "a") as file:
        file.write(json.dumps(earlier) + "\n")

    async def look(page: Page, url: str) -> None:
        await page.until(TEXT.format("#errors-now") + ".includes('sample 7 is poison')")
        assert "of yesterday" not in await page.value(TEXT.format("#errors-now"))
        assert "of yesterday" in await page.value(TEXT.format("#errors-before ul"))
        assert await page.value(TEXT.format("#errors-before summary")) == "1 before this start of the run"

    visit(scene, started, look)


def test_on_a_phone_a_finger_reaches_every_panel(scene: Scene, started: Start) -> None:
    async def look(page: Page, url: str) -> None:
        await page.look(390, 844, "light")
        await page.open(url)
        await page.until(DRAWN)
        heights = await page.value("[...document.querySelectorAll('nav button')].map((one) => one.offsetHeight)")
        assert len(heights) == len(PANELS) and min(heights) >= 40
        for at, panel in enumerate(PANELS):
            await page.value(f"document.querySelectorAll('nav button')[{at}].click()")
            assert await page.value("document.activeElement.id") == panel
        assert await page.value("$('charts').offsetTop < $('flow').offsetTop")
        assert await page.value("$('bus').querySelector('details').open")

    visit(scene, started, look)
