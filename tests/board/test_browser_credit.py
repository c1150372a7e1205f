"""A critic in a real browser: values and advantages over the tokens of a sample, its curves, and value pre-training."""

import json
import xml.etree.ElementTree as ET

import pytest
from board_runs import HOSTILE, credited, kept, make_critic_run, make_group, make_run
from test_browser import CHROMIUM, DESKTOP, PHONE, browser, drawn, expect, opened, served, wait_until  # noqa: F401
from test_browser_samples import download

from dapo_rl.runs.directory import GroupRow

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="the browser tests need Chromium: apt-get install chromium"),
]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def runs(tmp_path):
    make_critic_run(tmp_path / "runs" / "vapo")
    return tmp_path / "runs"


@pytest.fixture
def address(runs):
    with served(runs) as url:
        yield url


def tints(page):
    return [token.get_attribute("class") for token in page.locator('[data-sample="0"] .tok').all()]


def strengths(page):
    script = "(all) => all.map((token) => token.style.getPropertyValue('--a'))"
    return page.locator('[data-sample="0"] .tok').evaluate_all(script)


def test_tokens_by_value_and_advantage(browser, address):  # noqa: F811
    with opened(browser, address, "#/groups?run=vapo&step=3&draw=30") as page:
        chooser = page.get_by_label("Colour tokens by")
        expect(page.locator(".sample")).to_have_count(2)
        chooser.select_option("advantage")
        assert tints(page) == ["tok good", "tok good", "tok bad"]
        assert strengths(page) == ["0.500", "0.375", "1.000"]  # of the largest
        expect(page.locator(".key-line")).to_have_text("worse than the critic expectedbetter")
        chooser.select_option("value")
        assert tints(page) == ["tok bad", "tok good", "tok good"]
        assert strengths(page) == ["0.667", "0.333", "1.000"]
        expect(page.locator(".key-line")).to_contain_text("the critic expects a negative reward")
        facts = page.locator('[data-sample="0"] .tok').nth(2).get_attribute("title")
        assert "value +0.750 · advantage −1.000" in facts
        expect(page.locator('[data-sample="0"] .sums')).to_contain_text("mean advantage −0.04")
        page.locator(".group").nth(1).click()  # its rewards do not differ
        expect(page.locator(".question")).to_contain_text("The critic gave each token an advantage")
        expect(page.locator(".question")).not_to_contain_text("differ")


def test_the_chart_of_a_sample(browser, address):  # noqa: F811
    with opened(browser, address, "#/groups?run=vapo&step=3&draw=30") as page:
        sample = page.locator('[data-sample="0"]')
        chart = sample.locator(".credit")
        expect(chart.locator(".axes small")).to_have_text(["+0.75", "0", "−1.00"])
        # From +0.75 at the top to −1 at the bottom, 0 is at 42.857 of 100.
        zero, span = 100 * 0.75 / 1.75, 100 / 1.75
        line = chart.locator("path.value").get_attribute("d")
        numbers = [float(part) for part in line.replace("M", " ").replace("L", " ").replace("H", " ").split()]
        heights = [zero - span * value for value in (-0.5, 0.25, 0.75)]
        assert numbers == pytest.approx([0, heights[0], 1, 1, heights[1], 2, 2, heights[2], 3])
        assert [chart.locator(f"path.{cls}").get_attribute("d").count("M") for cls in ("good", "bad")] == [2, 1]
        label = chart.locator("svg").get_attribute("aria-label")
        assert label == "Value and advantage over 3 tokens: value −0.50 at the first token, +0.75 at the last"
        reading = chart.locator(".reading")
        expect(reading).to_have_text("value −0.50 at the first token, +0.75 at the last")
        box = chart.locator(".area").bounding_box()
        page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 5)
        expect(reading).to_have_text("token 2 $ value +0.25 · advantage +0.38")
        expect(sample.locator(".tok.pointed")).to_have_text("$")
        page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 5)
        expect(sample.locator(".tok.pointed")).to_have_text("%")
        sample.locator(".tok").first.hover()
        expect(reading).to_have_text("token 1 # value −0.50 · advantage +0.50")
        shown = chart.locator(".cursor").bounding_box()
        assert shown["x"] == pytest.approx(box["x"], abs=1)
        assert shown["width"] == pytest.approx(box["width"] / 3, abs=1)
        page.mouse.move(2, 2)
        expect(reading).to_have_text("value −0.50 at the first token, +0.75 at the last")
        expect(page.locator(".tok.pointed")).to_have_count(0)
        page.get_by_label("Colour tokens by").select_option("none")  # no tokens to point at
        page.mouse.move(box["x"] + 5, box["y"] + 5)
        expect(reading).to_contain_text("token 1")


def test_side_by_side(browser, address):  # noqa: F811
    with opened(browser, address, "#/groups?run=vapo&step=3&a=3.30.0&b=4.40.1") as page:
        expect(page.locator(".compare .credit path.value")).to_have_count(2)
        page.locator(".compare").get_by_label("Colour tokens by").select_option("value")
        expect(page.locator(".compare .text .tok.good")).to_have_count(4)


def test_without_a_critic_nothing_of_it_shows(browser, runs, address):  # noqa: F811
    run = make_run(runs / "dapo", steps=2)
    rows = [credited(kept(make_group(1, [("2", True)]))), GroupRow(make_group(2, [("2", True)]), "stale")]
    run.write_rollouts(2, rows, None)
    with opened(browser, address, "#/groups?run=dapo&step=1&draw=10") as page:
        expect(page.locator(".sample")).to_have_count(2)
        expect(page.locator(".credit")).to_have_count(0)
        expect(page.get_by_label("Colour tokens by").locator("option")).to_have_text(
            ["no colour", "advantage", "surprise (−log p)", "ratio", "clipped: no gradient", "entropy"]
        )
        expect(page.locator('[data-sample="0"] .sums')).to_contain_text("advantage +1.00")
        expect(page.locator(".sums").first).not_to_contain_text("mean")
        page.goto(f"{address}#/groups?run=dapo&step=2&draw=2")  # a dropped group of a step with a critic
        expect(page.locator(".question")).to_contain_text("draw 2")
        expect(page.locator(".credit")).to_have_count(0)


def test_curves_of_the_critic_and_value_pretraining(browser, runs, address):  # noqa: F811
    make_run(runs / "dapo", steps=8)
    with opened(browser, address, theme="light") as page:
        page.get_by_label("Show dapo").uncheck()
        wait_until(lambda: drawn(page, "critic/vf_explained_var") > 100)
        expect(page.locator('[data-metric="critic/vf_explained_var"] .value')).to_have_text(["0.25"])
        expect(page.locator('[data-metric="critic/vf_loss"] .value')).to_have_text(["0.125"])
        key = page.locator(".swatch", has_text="value pre-training")
        expect(key).to_have_text("value pre-training: the policy is not trained yet")
        # Steps 1 to 8 span the chart: shaded as far as step 2.5, in every chart.
        for metric in ("critic/vf_explained_var", "acc/mean"):
            wait_until(lambda metric=metric: shaded_share(page, metric) == pytest.approx(1.5 / 7, abs=0.02))
        menu = page.locator('[data-metric="critic/vf_loss"] details.save')
        picture = ET.fromstring(download(page, menu, "SVG")[1])
        assert "value pre-training" in [element.text for element in picture.iter(f"{SVG}text")]
        assert len(list(picture.iter(f"{SVG}polygon"))) == 1
        page.get_by_label("Show dapo").check()
        page.get_by_label("Show vapo").uncheck()
        expect(key).to_have_count(0)
        for metric in ("critic/vf_explained_var", "critic/vf_loss"):
            expect(page.locator(f'[data-metric="{metric}"]')).to_be_hidden()
        wait_until(lambda: shaded_share(page, "acc/mean") == 0)


def shaded_share(page, metric):
    """The grey part of a chart's width, along a row of pixels close to its lower edge; None if it is not drawn."""
    return page.evaluate(
        """(metric) => {
            const chart = document.querySelector(`[data-metric="${metric}"]`);
            const canvas = chart?.querySelector("canvas");
            if (!canvas?.clientWidth || !chart.querySelector(".u-over")?.clientWidth) return null;
            const scale = canvas.width / canvas.clientWidth;
            const over = chart.querySelector(".u-over").getBoundingClientRect();
            const box = canvas.getBoundingClientRect();
            const [left, width] = [(over.left - box.left) * scale, over.width * scale];
            const row = Math.round((over.bottom - box.top) * scale) - 4;
            const pixels = canvas.getContext("2d").getImageData(left, row, width, 1).data;
            let grey = 0;
            for (let i = 0; i < pixels.length; i += 4) {
                const [red, green, blue, alpha] = pixels.slice(i, i + 4);
                if (Math.abs(red - 136) < 6 && red === green && red === blue && alpha > 20 && alpha < 64) grey++;
            }
            return grey / (pixels.length / 4);
        }""",
        metric,
    )


def test_hostile_tokens_in_the_reading(browser, runs, address):  # noqa: F811
    """The vocabulary of a model can hold anything."""
    run = make_run(runs / "bad", steps=1, **{"model.name": "x"})
    run.write_rollouts(1, [credited(kept(make_group(1, [("2", True)])))], None)
    (run.path / "model").mkdir()
    words = {HOSTILE: 5, "<img src=x onerror='window.owned=4'>": 6, "\u202e": 7, "a": 0}
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": words, "unk_token": "a"}}
    (run.path / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    with opened(browser, address, "#/groups?run=bad&step=1&draw=1") as page:
        expect(page.locator(".sample")).to_have_count(1)
        box = page.locator(".credit .area").bounding_box()
        for share, said in ((0.2, "<script>window.owned = 1</script>"), (0.5, "<img src=x"), (0.9, "⟨U+202E⟩")):
            page.mouse.move(box["x"] + share * box["width"], box["y"] + 5)
            expect(page.locator(".credit .piece")).to_contain_text(said)
        assert page.evaluate("window.owned") is None
        assert page.locator("main img, main script, main style").count() == 0


def test_a_long_sample_is_drawn_with_fewer_bars(browser, runs, address):  # noqa: F811
    """2,500 tokens: of three in a row, the largest advantage is drawn."""
    with opened(browser, address) as page:
        found = page.evaluate(
            """async () => {
                const { creditChart } = await import("/static/credit.js");
                const n = 2500;
                const sample = { pieces: Array.from({ length: n }, () => ["x", 1]), value: Array(n).fill(0.5),
                                 advantages: Array(n).fill(0.125) };
                sample.advantages[1501] = -0.5;
                sample.value[4] = null;
                const chart = creditChart(sample, document.createElement("div"));
                const d = (cls) => chart.querySelector(`path.${cls}`).getAttribute("d");
                return [d("good").match(/M/g).length, d("bad"), d("value").match(/M/g).length];
            }"""
        )
        assert found == [833, "M1500 50V100H1503V50Z", 1]


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_critic_fits(browser, address, size):  # noqa: F811
    with opened(browser, address, size=size) as page:
        for view, element in {
            "groups?run=vapo&step=3&draw=30&sample=0": ".credit .area",
            "groups?run=vapo&step=3&a=3.30.0&b=4.40.1": ".compare .credit .area",
            "runs": '[data-metric="critic/vf_loss"] canvas',
        }.items():
            page.goto(f"{address}#/{view}")
            expect(page.locator(element).first).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], view
