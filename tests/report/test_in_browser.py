"""The page in a real browser: drawn, read, zoomed by pointer and keys, live; it asks nobody for anything."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser import complaints, cut_off, opened, requests, visit
from made_runs import make_run, make_trace, record_of, write_lines

from moeclipse.report.page import write_page
from moeclipse.report.run import read_run
from moeclipse.report.serve import make_server, port_of

EVIL = "<img src=x onerror=alert(1)>"


def points(driver: Any, chart: str) -> int:
    """Moves and lines of the first curve of a chart."""
    script = (
        "return document.querySelector(arguments[0] + ' path').getAttribute('d').split(/[ML]/).length - 1"
    )
    return int(driver.execute_script(script, f"#{chart}"))


def labels(driver: Any, chart: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0] + ' text')].map((one) => one.textContent)"
    return list(driver.execute_script(script, f"#{chart}"))


def said(driver: Any, chart: str) -> str:
    return str(
        driver.execute_script("return document.getElementById(arguments[0]).nextSibling.textContent", chart)
    )


def painted(driver: Any, chart: str) -> int:
    """How many colours a canvas shows."""
    script = """
        const canvas = document.querySelector(arguments[0] + ' canvas');
        const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        const found = new Set();
        for (let at = 0; at < data.length; at += 4) found.add(data.slice(at, at + 4).join());
        return found.size;
    """
    return int(driver.execute_script(script, f"#{chart}"))


def soon(driver: Any, holds: Callable[[], bool], what: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, 30).until(lambda _: holds(), what)


def made(folder: Path) -> Path:
    run = make_run(folder, steps=40, eval_loss=2.0, name=EVIL.replace('"', ""), notes=[EVIL])
    make_trace(run)
    write_page([read_run(run)], run / "report.html")
    return run / "report.html"


def check_page(driver: Any, steps: int) -> None:
    """Charts have their points, pointer and keys work, and nothing is asked for or complained of."""
    from selenium.webdriver import ActionChains, Keys
    from selenium.webdriver.common.by import By

    assert points(driver, "loss") == steps
    whole = labels(driver, "loss")
    chart = driver.find_element(By.ID, "loss")
    ActionChains(driver).move_to_element(chart).perform()
    soon(driver, lambda: said(driver, "loss").startswith("step "), "hovering reads")
    drag = ActionChains(driver).move_to_element_with_offset(chart, -100, 0).click_and_hold()
    drag.move_by_offset(150, 0).release().perform()
    soon(driver, lambda: labels(driver, "loss") != whole, "dragging zooms")
    chart.send_keys(Keys.ESCAPE)
    soon(driver, lambda: labels(driver, "loss") == whole, "Escape shows all")
    chart.send_keys(Keys.HOME, Keys.ARROW_RIGHT)
    assert said(driver, "loss").startswith("step 2: training ")
    chart.send_keys("+")
    soon(driver, lambda: labels(driver, "loss") != whole, "plus zooms")
    timeline = driver.find_element(By.ID, "timeline-A")
    timeline.send_keys(Keys.ARROW_DOWN, Keys.ARROW_UP)
    assert "measured, rank 0, compute: " in said(driver, "timeline-A")
    assert painted(driver, "timeline-A") > 5
    assert painted(driver, "loads-A-heat") > 5
    heat = driver.find_element(By.ID, "loads-A-heat")
    heat.send_keys(Keys.ARROW_RIGHT)
    assert "times the mean" in said(driver, "loads-A-heat") or "no rows" in said(driver, "loads-A-heat")
    table = driver.find_element(By.CSS_SELECTOR, "#table-loss summary")
    table.send_keys(Keys.ENTER)
    rows = "#table-loss tbody tr"
    soon(driver, lambda: len(driver.find_elements(By.CSS_SELECTOR, rows)) == steps, "a table lies behind it")
    assert complaints(driver) == []
    assert requests(driver) == []


def test_a_page_is_drawn_read_and_zoomed(tmp_path: Path) -> None:
    page = made(tmp_path / "run")
    with opened() as driver:
        visit(driver, page)
        assert driver.title.startswith(EVIL)
        assert driver.find_element("tag name", "h1").text == EVIL
        check_page(driver, 40)
        unnamed = """return [...document.querySelectorAll('.chart')]
            .filter((one) => !one.getAttribute('aria-label') || one.tabIndex !== 0).length"""
        assert driver.execute_script(unnamed) == 0, "every chart takes the keyboard and has a name"


def several(folder: Path, count: int) -> Path:
    """Runs of unequal length on one page, with names that are long."""
    exchange = [{"steps": 2, "chunks": 1, "rule": "measured", "measured_ms": 1.0, "predicted_ms": 1.5}] * 2
    for number in range(count):
        name = f"run-{number}-with-quite-a-long-name-for-a-small-window"
        run = make_run(folder / f"run{number}", name=name)
        lines = [record_of(step, eval_loss=3.0 - 0.01 * step) for step in range(20 + 9 * number)]
        write_lines(run / "metrics.jsonl", lines)
        (run / "summary.json").write_text(json.dumps({"window": "steps 3 to 19", "exchange": exchange}))
        make_trace(run)
    runs = [read_run(folder / f"run{number}") for number in range(count)]
    write_page(runs, folder / "report.html")
    return folder / "report.html"


@pytest.mark.parametrize(
    "count", [1, 2, pytest.param(4, marks=pytest.mark.full), pytest.param(9, marks=pytest.mark.full)]
)
def test_nothing_is_cut_off_in_windows_of_any_width(tmp_path: Path, count: int) -> None:
    page = several(tmp_path, count)
    with opened() as driver:
        visit(driver, page)
        if count < 5:  # a table of twenty columns scrolls
            opening = (
                "for (const one of ['loss', 'numbers']) document.getElementById(`table-${one}`).open = true"
            )
            driver.execute_script(opening)
        for width in (400, 800, 1400, 2000):
            assert cut_off(driver, width) == [], f"{width} pixels"
        assert complaints(driver) == []


def test_one_step_is_a_bar_and_has_no_fractions(tmp_path: Path) -> None:
    write_page([read_run(make_run(tmp_path / "run", steps=1))], tmp_path / "report.html")
    with opened() as driver:
        visit(driver, tmp_path / "report.html")
        assert not complaints(driver)
        script = "return [...document.querySelectorAll('polygon')].map((one) => one.getBBox().width)"
        widths = driver.execute_script(script)
        assert widths
        assert min(widths) > 20
        assert "0.6" not in labels(driver, "loss")


def test_runs_with_the_same_window_share_a_sentence(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"run{number}", steps=20 + 5 * (number == 1)) for number in range(3)]
    write_page([read_run(run) for run in runs], tmp_path / "report.html")
    with opened() as driver:
        visit(driver, tmp_path / "report.html")
        told = driver.execute_script("return document.querySelector('section .note').textContent")
        assert told.startswith("A, C: times are means of steps 4 to 20; B: times are means of steps 4 to 25.")


def choose(driver: Any, select: str, value: str) -> None:
    from selenium.webdriver.support.ui import Select

    Select(driver.find_element("id", select)).select_by_value(value)


def test_runs_of_unequal_length_are_read_at_equal_places(tmp_path: Path) -> None:
    page = several(tmp_path, 3)
    with opened() as driver:
        visit(driver, page)
        told = driver.find_element("id", "part-equal").text
        assert "After 20 steps" in told
        assert "After 40.96 k tokens" in told
        assert "worse" not in driver.find_element("css selector", ".card").text, "no verdict on unequal runs"
        chart = driver.find_element("id", "loss")
        chart.send_keys("\ue010")  # End: only the longest run is there
        assert said(driver, "loss").startswith("step 38: C training ")
        assert "A training" not in said(driver, "loss")
        choose(driver, "axis", "tokens")
        soon(driver, lambda: "tokens" in labels(driver, "loss"), "curves over tokens")
        driver.find_element("id", "loss").send_keys("\ue010")
        assert said(driver, "loss").startswith("77.82 k tokens: C training ")
        choose(driver, "picked", "B")
        soon(driver, lambda: bool(driver.find_elements("id", "part-timeline-B")), "details of another run")
        assert not driver.find_elements("id", "part-timeline-A")
        assert complaints(driver) == []


def test_curves_are_smoothed_and_drawn_on_a_logarithmic_axis(tmp_path: Path) -> None:
    page = several(tmp_path, 1)
    with opened() as driver:
        visit(driver, page)
        before, paths = labels(driver, "norm"), "return document.querySelectorAll('#norm path').length"
        assert driver.execute_script(paths) == 1
        choose(driver, "smooth", "10")
        soon(driver, lambda: driver.execute_script(paths) == 2, "the raw curve stays beside the smooth one")
        driver.find_element("css selector", "#part-norm button.log").click()
        soon(driver, lambda: "(logarithmic)" in labels(driver, "norm"), "a logarithmic axis")
        assert labels(driver, "norm") != before
        assert complaints(driver) == []


EMPTY_FRAMES = """return [...document.querySelectorAll('section')]
    .filter((one) => one.offsetHeight && !one.querySelector('h2 ~ *:not(details:not([open]))'))
    .map((one) => one.id)"""
LINES_OF_KINDS = """return [...document.querySelectorAll('#part-events-A td:nth-child(2)')].map((cell) => {
    const words = document.createRange();
    words.selectNodeContents(cell);
    return `${cell.textContent} ${words.getClientRects().length}`;
})"""


def test_a_printed_page_has_no_empty_frames_and_no_torn_words(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", notes=["plan of step 9: " + "some layers changed, " * 20])
    write_page([read_run(folder)], folder / "report.html")
    with opened() as driver:
        driver.set_window_size(720, 900)
        visit(driver, folder / "report.html")
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        assert driver.execute_script(EMPTY_FRAMES) == []
        assert set(driver.execute_script(LINES_OF_KINDS)) == {"placement 1"}, "each is in one line"


def test_a_live_page_follows_and_keeps_what_was_chosen(tmp_path: Path) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    run = make_run(tmp_path / "run", steps=20)
    server = make_server([run])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with opened() as driver:
            visit(driver, f"http://127.0.0.1:{port_of(server)}/")
            chart = driver.find_element("id", "loss")
            chart.send_keys("+")
            zoomed = labels(driver, "loss")
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record_of(20)) + "\n")
            WebDriverWait(driver, 60).until(lambda _: "21 of" in driver.find_element("id", "top").text)
            WebDriverWait(driver, 60).until(lambda _: labels(driver, "loss") == zoomed)
            assert driver.execute_script("return document.activeElement.id") == "loss"
            assert complaints(driver) == []
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.full
def test_the_page_of_a_fresh_run(tmp_path: Path) -> None:
    from browser import missing

    if why := missing():
        pytest.skip(why)
    command = [sys.executable, "-m", "moeclipse", "train", "--run.dir", str(tmp_path), "--run.name", "fresh"]
    command += [
        "--run.steps",
        "12",
        "--trace",
        "3",
        "--run.device",
        "cpu",
        "--eval.samples",
        "8",
        "--eval.share",
        "0.1",
        "--eval.every",
        "4",
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    command = [sys.executable, "-m", "moeclipse", "report", str(tmp_path / "fresh")]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    for dark in (False, True):
        with opened(dark=dark) as driver:
            visit(driver, tmp_path / "fresh" / "report.html")
            check_page(driver, 12)
            driver.set_window_size(1200, 4200)
            driver.save_screenshot(str(tmp_path / f"{'dark' if dark else 'light'}.png"))
