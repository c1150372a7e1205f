"""Downloads of an ablation's charts in a real browser."""

import xml.etree.ElementTree as ET

import pytest
from board_reports import make_ablation
from test_browser import CHROMIUM, browser, drawn, opened, served, wait_until  # noqa: F401  (`browser` is a fixture)
from test_browser_samples import download

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="the browser tests need Chromium: apt-get install chromium"),
]
SVG = "{http://www.w3.org/2000/svg}"


def test_the_curves_of_arms_are_saved_with_their_bands(browser, tmp_path):  # noqa: F811
    make_ablation(tmp_path / "study")
    with served(tmp_path) as address, opened(browser, address, "#/ablation?name=study", theme="dark") as page:
        wait_until(lambda: drawn(page, "eval/accuracy") > 100)
        menu = page.locator('[data-metric="eval/accuracy"] details.save')
        name, content = download(page, menu, "CSV")
        lines = content.decode().splitlines()
        assert (name, lines[0]) == ("eval-accuracy.csv", "arm,metric,step,mean,low,high")
        # Two seeds a tenth apart, a quarter more in the second arm.
        values = [[float(cell) for cell in line.split(",")[2:]] for line in lines[1:]]
        expected = [
            (step, base + 0.05, base, base + 0.1)
            for arm in (0, 0.25)
            for step in (0, 2, 4)
            for base in [arm + step / 10]
        ]
        assert values == [pytest.approx(row) for row in expected]
        _, content = download(page, menu, "SVG")
        picture = ET.fromstring(content)
        assert [len(band.get("points").split()) for band in picture.iter(f"{SVG}polygon")] == [6, 6]
        assert [band.get("fill") for band in picture.iter(f"{SVG}polygon")] == ["#3b6fd4", "#d9822b"]
        texts = [element.text for element in picture.iter(f"{SVG}text")]
        assert texts[:3] == ["eval/accuracy", "algo.clip_high=0.2", "algo.clip_high=0.28"]
        _, content = download(page, menu, "PNG")
        assert content.startswith(b"\x89PNG")
