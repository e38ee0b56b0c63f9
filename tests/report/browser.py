"""A real browser for tests: Debian's Chromium with its driver, where both are installed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = (("chromium", "chromedriver"), ("google-chrome", "chromedriver"))


def missing() -> str:
    """Why no browser can be had; nothing where one can."""
    if not any(shutil.which(browser) and shutil.which(driver) for browser, driver in NAMES):
        return "needs Chromium and its driver (Debian: chromium, chromium-driver)"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "needs selenium (pip install selenium)"
    return ""


@contextmanager
def opened(width: int = 1200, height: int = 900, *, dark: bool = False) -> Iterator[Any]:
    """A driver of selenium that keeps what the page says and asks for."""
    if why := missing():
        pytest.skip(why)
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = next(path for name, _ in NAMES if (path := shutil.which(name)))
    for word in (
        "--headless=new",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--window-size={width},{height}",
    ):
        options.add_argument(word)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        wishes = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in wishes.items()]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        yield driver
    finally:
        driver.quit()


def visit(driver: Any, page: Path | str) -> None:
    """Open a page and wait until it has drawn itself."""
    from selenium.webdriver.support.ui import WebDriverWait

    driver.get(page.resolve().as_uri() if isinstance(page, Path) else page)
    script = "return document.documentElement.dataset.ready === '1' && !!document.querySelector('.chart svg')"
    WebDriverWait(driver, 60).until(lambda _: driver.execute_script(script))


CUT = """
    const wide = window.innerWidth + 1, found = [];
    if (document.documentElement.scrollWidth > wide) found.push('the page scrolls sideways');
    for (const one of document.querySelectorAll('body *:not(option)')) {
        if (one.closest('svg, .skip, thead') || !one.getClientRects().length) continue;
        const at = one.getBoundingClientRect();
        const name = `${one.tagName}.${one.className}: ${one.textContent.slice(0, 40)}`;
        if (at.right > wide || at.left < -1) found.push(`outside of the window: ${name}`);
        if (one.clientWidth && one.scrollWidth > one.clientWidth + 1)
            found.push(`wider than its box: ${name}`);
    }
    for (const svg of document.querySelectorAll('.chart svg')) {
        const box = svg.getBoundingClientRect();
        for (const text of svg.querySelectorAll('text')) {
            const at = text.getBoundingClientRect();
            if (at.left < box.left - 1 || at.right > box.right + 1)
                found.push(`cut off: ${svg.parentNode.id}: ${text.textContent}`);
        }
    }
    return found;
"""
FITTED = """return [...document.querySelectorAll('.chart svg')]
    .every((one) => Math.floor(one.parentNode.clientWidth) === Number(one.getAttribute('width')))"""


def cut_off(driver: Any, width: int, height: int = 900) -> list[str]:
    """What does not fit, or only by scrolling sideways, in a window of so many pixels."""
    from selenium.webdriver.support.ui import WebDriverWait

    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    WebDriverWait(driver, 60).until(lambda _: driver.execute_script(FITTED))
    return list(driver.execute_script(CUT))


def complaints(driver: Any) -> list[str]:
    """What stands in the console."""
    return [entry["message"] for entry in driver.get_log("browser")]


def requests(driver: Any) -> list[str]:
    """Addresses that were asked for, but for the page and data inside it."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [
        one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"
    ]
    return [url for url in sent if not url.startswith(("file:", "data:"))]
