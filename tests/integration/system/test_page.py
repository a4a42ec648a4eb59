"""The live page of a running system, in a browser: what it shows is what `trefoil status --json` says."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.integration.system.conftest import Serving
from tests.support.browser import CHROMIUM, Page, browser

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(CHROMIUM is None, reason="needs the Debian package chromium"),
]
SHOWN = """
(() => {
  const texts = (name, within = document) =>
    [...within.querySelectorAll(`[data-value=${name}]`)].map((e) => e.textContent);
  const devices = [...document.querySelectorAll("[data-device]")];
  return {
    carbon: texts("carbon"), rate: texts("rate"), p95: texts("p95"), accuracy: texts("accuracy"),
    grams: texts("grams"), withheld: texts("withheld"), saving: texts("saving"),
    devices: devices.map((e) => [e.dataset.device, texts("state", e)[0], texts("clock", e)[0], texts("variant", e)]),
  };
})()
"""
WIDE, NARROW = 1280, 400


def said(status: dict[str, Any]) -> dict[str, Any]:
    """What the page shows, from the document of `trefoil status`."""
    whole = [row for row in status["served"]["by_class"] if not row["slo_class"]]
    saving = status["saving"]

    def texts(name: str, form: str) -> list[str]:
        return ["-" if row[name] is None else form.format(row[name]) for row in whole]

    pct = saving["saving_pct"]
    return {
        "carbon": [f"{one['intensity_g_per_kwh']:.0f}" for one in status["carbon"]],
        "rate": texts("rate_per_s", "{:.1f}"),
        "p95": texts("latency_ms_p95", "{:.0f}"),
        "accuracy": texts("accuracy", "{:.4f}"),
        "grams": ["-" if saving["grams"] is None else f"{saving['grams']:,.2f}"],
        "withheld": [saving["withheld"] or saving["unknown"]] if pct is None else [],
        "saving": [] if pct is None else [f"{abs(pct):.1f} % {'less' if pct >= 0 else 'more'}"],
        "devices": [device(one) for node in status["nodes"] for one in node["devices"]],
    }


def device(one: dict[str, Any]) -> list[Any]:
    """A device's name, state, clock and variants, in the order of its slices."""
    slices = sorted(one["slices"], key=lambda each: each["key"]["start"])
    variants = ["+".join(hosted["variant"] for hosted in each["hosted"]) for each in slices]
    return [one["device"], one["state"].lower(), f"{one['clock_mhz']} MHz", variants]


async def as_status_says(page: Page, serving: Serving) -> dict[str, Any]:
    """The page's values, once they are those of a status before or after it; meters and rates move meanwhile."""
    async with asyncio.timeout(120):
        before = said(await asyncio.to_thread(serving.system.ask, "status"))
        while True:
            shown = await page.value(SHOWN)
            after = said(await asyncio.to_thread(serving.system.ask, "status"))
            if all(shown[name] in (before[name], after[name]) for name in shown):
                return dict(shown)
            before = after


async def test_the_page_shows_what_status_says_and_follows_a_step_of_carbon(serving: Serving, tmp_path: Path) -> None:
    link = (await asyncio.to_thread(serving.system.ask, "status"))["page"]
    assert link == serving.system.started["page"]
    async with browser(tmp_path) as page:
        for width in (WIDE, NARROW):
            await page.open(link, width)
            await page.until("document.querySelector('[data-value=carbon]') !== null")
            shown = await as_status_says(page, serving)
            assert [name for name, *_ in shown["devices"]] == ["node0/gpu0", "node0/gpu1"]
            assert all(variants for *_, variants in shown["devices"])
            fits = await page.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
            assert fits, f"nothing is cut at {width} px"
        first = shown["carbon"][0]
        await page.until(f"document.querySelector('[data-value=carbon]').textContent !== '{first}'")
        assert (await as_status_says(page, serving))["carbon"] != [first]
        assert page.errors == []
        await page.picture(tmp_path / "page.png")
        assert await page.value("document.getElementById('silence').hidden")
