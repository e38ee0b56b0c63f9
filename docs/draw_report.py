"""Draw the pictures of docs/report.md: the page of a run, in Chromium.

moeclipse train --run.steps 120 --trace 30 --eval.share 0.1 --eval.samples 8 --eval.every 20
python docs/draw_report.py runs/NAME        # needs chromium, chromium-driver, selenium
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "report")]
WIDTH, HEIGHT = 1000, 860


def draw(run: Path) -> None:
    from browser import opened, visit

    from moeclipse.report.page import write_page
    from moeclipse.report.run import read_run

    with TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        write_page([read_run(run)], page)
        with opened(WIDTH, HEIGHT) as driver:
            visit(driver, page)
            driver.save_screenshot(str(ROOT / "docs" / "report-light.png"))
        with opened(WIDTH, HEIGHT, dark=True) as driver:
            visit(driver, page)
            part = driver.find_element("id", "part-timeline-A")
            part.screenshot(str(ROOT / "docs" / "report-dark.png"))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    draw(Path(sys.argv[1]))
