"""Samples in a real browser: the sorted list, search with marks, two side by side, keys, and downloads."""

import csv
import io
import json
import re
import struct
import xml.etree.ElementTree as ET
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from board_runs import HOSTILE, finish, kept, make_group, make_run, metrics_of
from support import REPOSITORY
from test_browser import CHROMIUM, DESKTOP, PHONE, browser, expect, opened, served  # noqa: F401

from dapo_rl.runs.directory import GroupRow, RunDirectory
from dapo_rl.types import Verdict

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="the browser tests need Chromium: apt-get install chromium"),
]


@pytest.fixture
def runs(tmp_path):
    run = make_run(tmp_path / "runs" / "a", text="Is it A+B? a+b is (2)")
    finish(run, {"trained": 1, "total": 1})
    run.report_path.write_bytes(b"\x89PNG as it is")
    return tmp_path / "runs"


@pytest.fixture
def address(runs):
    with served(runs) as url:
        yield url


def rows_shown(page):
    return page.locator(".list .group")


def test_the_list_of_samples_is_sorted_and_filtered(browser, address):  # noqa: F811
    with opened(browser, address, "#/groups?run=a&step=2&list=samples") as page:
        rows = rows_shown(page)
        expect(rows).to_have_count(4)
        assert [row.get_attribute("data-key") for row in rows.all()] == ["20.0", "20.1", "21.0", "21.1"]
        page.get_by_label("Sort samples by").select_option("reward")
        expect(rows.first).to_have_attribute("data-key", "20.1")
        expect(rows.first).to_contain_text("wrong")
        expect(rows.first).to_contain_text("reward −1.25 · 3 tokens")
        page.get_by_label("Reverse the order").click()
        expect(rows.first).to_have_attribute("data-key", "21.0")
        expect(rows.first).to_contain_text("score +1.00")  # not trained on
        page.get_by_label("Most reward").fill("0.9")
        expect(rows).to_have_count(2)
        expect(page.locator(".filters .hint")).to_have_text("2 of 4 samples")
        page.locator(".filters").get_by_role("button", name="wrong").click()
        expect(rows).to_have_count(1)
        rows.first.click()
        expect(page.locator('.detail [data-sample="1"]')).to_have_attribute("aria-current", "")
        expect(page.locator(".question small")).to_have_text("draw 20 · p20")
        page.get_by_label("Most reward").fill("-7")
        expect(page.locator(".list")).to_have_text("No sample passes these filters.")


def test_a_filter_that_a_step_does_not_offer_hides_nothing(browser, runs, address):  # noqa: F811
    run = make_run(runs / "b", steps=1)
    run.write_rollouts(2, [GroupRow(make_group(20, [("2", True)] * 2), "all_correct")], 0)
    with opened(browser, address, "#/groups?run=b&step=1&list=samples") as page:
        page.locator(".filters").get_by_role("button", name="wrong").click()
        expect(rows_shown(page)).to_have_count(1)
        page.get_by_label("Next step").click()
        expect(page.locator(".filters .chip")).to_have_text(["right 2"])
        expect(page.locator(".filters .hint")).to_have_text("2 of 2 samples")
        expect(rows_shown(page)).to_have_count(2)


def test_a_long_list_is_shown_a_page_at_a_time(browser, runs, address):  # noqa: F811
    run = make_run(runs / "long", steps=1)
    run.write_rollouts(1, [GroupRow(make_group(n, [("2", True)]), "all_correct") for n in range(150)], 0)
    with opened(browser, address, "#/groups?run=long&step=1&list=samples") as page:
        rows = rows_shown(page)
        expect(rows).to_have_count(100)
        rows.nth(99).click()
        expect(page.locator(".question small")).to_have_text("draw 99 · p99")
        page.keyboard.press("j")  # reads on
        expect(rows).to_have_count(150)
        expect(page.locator(".question small")).to_have_text("draw 100 · p100")
        assert page.get_by_role("button", name="more").count() == 0


def test_every_occurrence_is_marked_and_can_be_stepped_through(browser, address):  # noqa: F811
    with opened(browser, address, "#/groups?run=a&step=2&draw=20") as page:
        page.get_by_label("Colour tokens by").select_option("none")
        text = page.locator('[data-sample="0"] .text')
        page.get_by_label("Search", exact=True).fill("A+b")
        status = page.locator(".occurrences .hint")
        expect(status).to_have_text("2 matches")
        expect(text.locator("mark")).to_have_text(["A+B", "a+b"])
        page.get_by_label("Search", exact=True).press("Enter")
        expect(status).to_have_text("1 of 2")
        page.get_by_label("Next occurrence").click()
        expect(page.locator("mark.current")).to_have_text("a+b")
        page.get_by_label("Next occurrence").click()  # around
        expect(status).to_have_text("1 of 2")
        page.get_by_label("Previous occurrence").click()
        expect(status).to_have_text("2 of 2")
        page.get_by_label("Search", exact=True).fill("(2)")
        expect(text.locator("mark")).to_have_text(["(2)"])
        page.get_by_label("Search", exact=True).fill("2")  # response, both answers' truth, answer
        expect(page.locator(".question mark")).to_have_text(["2"])
        expect(page.locator('[data-sample="0"] .answer mark')).to_have_text(["2"])
        page.get_by_label("Search", exact=True).fill(".*[")
        expect(status).to_have_text("0 matches")
        page.get_by_label("all steps").check()
        page.get_by_label("Search", exact=True).fill("a+b")
        expect(page.locator(".hit")).to_have_count(3)
        page.locator(".group").nth(1).click()  # a group without any
        expect(status).to_have_text("0 matches")
        page.get_by_label("Search", exact=True).press("Enter")  # opens the first hit
        expect(page.get_by_label("Step number")).to_have_value("3")
        expect(status).to_have_text("2 matches")
        page.get_by_label("Search", exact=True).fill("")
        expect(page.locator("mark")).to_have_count(0)
        expect(text).to_have_text("Is it A+B? a+b is (2)")


def test_marks_span_tokens_and_survive_a_change_of_colour(browser, address):  # noqa: F811
    with opened(browser, address, "#/groups?run=a&step=2&draw=20") as page:
        pieces = page.locator('[data-sample="0"] .tok')
        expect(pieces).to_have_text(["#", "$", "%"])
        page.get_by_label("Search", exact=True).fill("#$")
        expect(page.locator(".occurrences .hint")).to_have_text("2 matches")  # one in each sample
        marks = page.locator('[data-sample="0"] .text mark')
        expect(marks).to_have_text(["#", "$"])
        page.get_by_label("Colour tokens by").select_option("entropy")
        assert page.locator('[data-sample="0"] .tok.violet').count() == 3
        expect(marks).to_have_text(["#", "$"])
        expect(pieces).to_have_text(["#", "$", "%"])
        page.get_by_label("Next occurrence").click()
        expect(page.locator("mark.current")).to_have_text(["#", "$"])


def test_marks_in_hostile_text(browser, runs, address):  # noqa: F811
    make_run(runs / "bad", text=HOSTILE)
    with opened(browser, address, "#/groups?run=bad&step=1&draw=10") as page:
        page.get_by_label("Colour tokens by").select_option("none")
        page.get_by_label("Search", exact=True).fill("<img src=x")
        expect(page.locator('[data-sample="0"] .text mark')).to_have_text(["<img src=x"])
        expect(page.locator(".hit mark")).to_have_text(["<img src=x"])
        page.get_by_role("button", name="samples", exact=True).click()
        expect(rows_shown(page).locator("mark").first).to_have_text("<img src=x")
        page.get_by_label("Colour tokens by").select_option("logp")  # draws the open samples and their marks again
        page.wait_for_timeout(100)
        expect(rows_shown(page).locator("mark").first).to_have_text("<img src=x")
        assert page.locator("main img, main script, main style").count() == 0
        assert page.evaluate("window.owned") is None


def test_two_samples_side_by_side(browser, address):  # noqa: F811
    with opened(browser, address, "#/groups?run=a&step=2&draw=20") as page:
        page.get_by_label("Compare step 2 · draw 20 · sample 0").click()
        expect(page.locator(".tray")).to_contain_text("Pick another sample")
        page.get_by_label("Next step").click()
        expect(page.get_by_label("Step number")).to_have_value("3")
        page.get_by_label("Compare step 3 · draw 30 · sample 1").click()
        page.get_by_role("button", name="side by side").click()
        pair = page.locator(".compare .sample")
        expect(pair).to_have_count(2)
        expect(pair.nth(0)).to_contain_text("step 2 · draw 20 · sample 0 · 3 tokens")
        expect(pair.nth(0)).to_contain_text("reward +0.75")
        expect(pair.nth(1)).to_contain_text("wrong")
        expect(page.locator(".compare .bar")).to_contain_text("the same prompt; the responses are the same")
        assert pair.nth(0).locator(".tok.warm").count() == 3  # by surprise
        page.locator(".compare").get_by_label("Colour tokens by").select_option("advantage")
        assert pair.nth(1).locator(".tok.bad").count() == 3
        boxes = [each.bounding_box() for each in pair.all()]
        assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
        assert page.url.endswith("&a=2.20.0&b=3.30.1")
        page.reload()
        expect(pair).to_have_count(2)
        page.keyboard.press("Escape")
        expect(page.locator(".compare")).to_have_count(0)
        expect(page.locator(".group")).to_have_count(2)


def test_differences_are_marked(browser, runs, address):  # noqa: F811
    run = make_run(runs / "two", steps=1)
    first, second = make_group(1, [("x", True)], ids=(5, 6, 7)), make_group(2, [("y", False)], ids=(5, 9, 7))
    run.write_rollouts(1, [kept(first), kept(second)], 0)
    with opened(browser, address, "#/groups?run=two&step=1&a=1.1.0&b=1.2.0") as page:
        expect(page.locator(".compare .bar")).to_contain_text("the first token agrees; 1 and 1 tokens differ")
        pair = page.locator(".compare .sample")
        for each in pair.all():
            classes = [token.get_attribute("class") for token in each.locator(".tok").all()]
            assert ["different" in cls for cls in classes] == [False, True, False]
        page.get_by_label("mark differences").uncheck()
        expect(page.locator(".tok.different")).to_have_count(0)
        expect(page.locator(".compare .question")).to_have_count(2)  # two groups


def test_the_differences_are_the_fewest(browser, address):  # noqa: F811
    """Against the longest common subsequence by dynamic programming."""
    with opened(browser, address) as page:
        wrong = page.evaluate(
            """async () => {
                const { differences } = await import("/static/compare.js");
                let seed = 1;
                const random = (n) => (seed = (seed * 48271) % 2147483647) % n;
                for (let round = 0; round < 500; round++) {
                    const [a, b] = [0, 1].map(() => Array.from({ length: random(12) }, () => "abc"[random(3)]));
                    const [only, other] = differences(a, b);
                    const left = a.filter((_, i) => !only.has(i)).join();
                    if (left !== b.filter((_, i) => !other.has(i)).join()) return [a, b];
                    const best = [...a, 0].map(() => Array(b.length + 1).fill(0));
                    for (let i = a.length - 1; i >= 0; i--)
                        for (let j = b.length - 1; j >= 0; j--)
                            best[i][j] = a[i] === b[j] ? best[i + 1][j + 1] + 1
                                : Math.max(best[i + 1][j], best[i][j + 1]);
                    if (a.length - only.size !== best[0][0]) return [a, b];
                }
                return null;
            }"""
        )
        assert wrong is None


def test_keys(browser, address):  # noqa: F811
    with opened(browser, address, "#/groups?run=a&step=2") as page:
        current = page.locator(".detail .sample[aria-current]")
        expect(page.locator(".sample")).to_have_count(2)
        page.keyboard.press("j")
        expect(current).to_have_attribute("data-sample", "0")
        page.keyboard.press("ArrowRight")
        expect(current).to_have_attribute("data-sample", "1")
        page.keyboard.press("j")  # into the next group
        expect(page.locator(".question small")).to_have_text("draw 21 · p21")
        expect(current).to_have_attribute("data-sample", "0")
        page.keyboard.press("k")
        expect(page.locator(".question small")).to_have_text("draw 20 · p20")
        expect(current).to_have_attribute("data-sample", "1")
        page.keyboard.press("c")
        expect(page.locator(".tray")).to_contain_text("draw 20 · sample 1")
        page.keyboard.press("k")
        expect(current).to_have_attribute("data-sample", "0")
        page.keyboard.press("c")
        expect(page.locator(".compare .sample")).to_have_count(2)
        page.keyboard.press("Escape")
        expect(page.locator(".compare")).to_have_count(0)
        page.keyboard.press("]")
        expect(page.get_by_label("Step number")).to_have_value("3")
        page.keyboard.press("[")
        expect(page.get_by_label("Step number")).to_have_value("2")
        page.keyboard.press("s")
        expect(rows_shown(page)).to_have_count(4)
        page.keyboard.press("s")
        expect(page.get_by_label("Sort samples by")).to_have_value("reward")
        expect(rows_shown(page).first).to_have_attribute("data-key", "20.1")
        page.keyboard.press("S")
        expect(rows_shown(page).first).to_have_attribute("data-key", "21.0")
        page.keyboard.press("?")
        expect(page.get_by_role("dialog")).to_contain_text("next sample")
        documented = (REPOSITORY / "docs" / "board.md").read_text().split("## Keys")[1].split("## ")[0]
        assert {*page.locator("kbd").all_text_contents()} == {*re.findall(r"`(.+?)`", documented)}
        page.keyboard.press("]")  # not while the keys are shown
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_be_hidden()
        page.keyboard.press("/")
        search = page.get_by_label("Search", exact=True)
        expect(search).to_be_focused()
        page.keyboard.type("js?[]c")  # text in a field, not keys
        expect(search).to_have_value("js?[]c")
        expect(page.get_by_label("Step number")).to_have_value("2")
        expect(page.get_by_role("dialog")).to_be_hidden()
        page.keyboard.press("Escape")
        expect(search).not_to_be_focused()


def test_a_chosen_group_stays_while_the_run_goes_on(browser, runs, address):  # noqa: F811
    run = make_run(runs / "live", steps=2)

    def next_step(step):
        run.write_rollouts(step, [kept(make_group(10 * step, [("2", True), ("3", False)]))], 0)
        run.append_metrics(step, metrics_of(step))

    with opened(browser, address, "#/groups?run=live") as page:
        step = page.get_by_label("Step number")
        expect(step).to_have_value("2")
        next_step(3)
        expect(step).to_have_value("3")  # follows
        page.locator(".group[data-draw='30']").click()
        next_step(4)
        expect(page.get_by_label("Step", exact=True)).to_have_attribute("max", "3")
        expect(step).to_have_value("3")
        expect(page.locator(".question small")).to_have_text("draw 30 · p30")


def test_the_newest_step_is_followed_from_view_to_view(browser, runs, address):  # noqa: F811
    run = make_run(runs / "live", steps=2)

    def next_step(step):
        run.write_rollouts(step, [kept(make_group(10 * step, [("2", True), ("3", False)]))], 0)
        run.append_metrics(step, metrics_of(step))

    with opened(browser, address, "#/groups?run=live&list=samples") as page:
        step, shown = page.get_by_label("Step number"), page.locator(".question small")
        expect(shown).to_have_text("draw 20 · p20")
        page.get_by_label("Light or dark").click()
        expect(shown).to_have_text("draw 20 · p20")
        next_step(3)
        expect(step).to_have_value("3")
        expect(shown).to_have_text("draw 30 · p30")
        page.get_by_role("link", name="Runs").click()
        next_step(4)
        page.get_by_role("link", name="Groups").click()
        expect(step).to_have_value("4")
        expect(shown).to_have_text("draw 40 · p40")
        page.get_by_label("Previous step").click()
        page.get_by_role("link", name="Runs").click()
        page.get_by_role("link", name="Groups").click()
        expect(step).to_have_value("3")


def test_a_group_chosen_while_the_next_step_is_on_its_way(browser, runs, address):  # noqa: F811
    run = make_run(runs / "live", steps=2)
    with opened(browser, address, "#/groups?run=live") as page:
        step = page.get_by_label("Step number")
        expect(page.locator(".question small")).to_have_text("draw 20 · p20")
        held = []
        page.route(re.compile(r"/api/groups\?.*step=3"), lambda route: held.append(route))
        run.write_rollouts(3, [kept(make_group(30, [("2", True), ("3", False)]))], 0)
        run.append_metrics(3, metrics_of(3))
        expect(step).to_have_value("3")
        page.locator(".group[data-draw='20']").click()
        expect(step).to_have_value("2")
        for route in held:
            route.continue_()
        expect(page.locator(".question small")).to_have_text("draw 20 · p20")
        expect(page.locator(".group[aria-current=true]")).to_have_attribute("data-draw", "20")


def test_unknown_columns_and_a_group_without_signal(browser, runs, address):  # noqa: F811
    path = next((runs / "a" / "rollouts").glob("*2.parquet"))
    table = pq.read_table(path)
    place = table.column_names.index("advantage")
    table = table.set_column(place, "advantage", pa.array([0.0] * 4))
    table = table.append_column("reward/format", pa.array([0.25, -1.0, None, None]))
    pq.write_table(table.append_column("extra/<b>", pa.array(["<i>x</i>", None, None, None])), path)
    with opened(browser, address, "#/groups?run=a&step=2&draw=20") as page:
        extra = page.locator(".sample dl.extra")
        expect(extra).to_have_count(2)
        expect(extra.nth(0).locator("dt")).to_have_text(["reward/format", "extra/<b>"])
        expect(extra.nth(0).locator("dd")).to_have_text(["0.25", "<i>x</i>"])
        expect(extra.nth(1)).to_have_text("reward/format−1")
        expect(page.locator(".question .chip")).to_have_text("no signal")
        expect(page.locator(".question")).to_contain_text("all advantages are 0")
        expect(page.locator(".question")).not_to_contain_text("differ")


def test_one_token_is_singular(browser, runs, address):  # noqa: F811
    run = make_run(runs / "short", steps=1)
    run.write_rollouts(1, [GroupRow(make_group(1, [("2", True)], ids=(5,)), "all_correct")], 0)
    with opened(browser, address, "#/groups?run=short&step=1") as page:
        expect(rows_shown(page)).to_contain_text("1 of 1 right · 1 token")
        expect(page.locator(".sample")).to_contain_text("sample 0 · 1 token")
        assert "1 tokens" not in page.locator("main").text_content()


def download(page, menu, kind):
    menu.locator("summary").click()
    with page.expect_download() as info:
        menu.get_by_text(kind, exact=True).click()
    return info.value.suggested_filename, info.value.path().read_bytes()


def test_downloads_of_a_chart(browser, address):  # noqa: F811
    with opened(browser, address, theme="dark") as page:
        page.wait_for_selector('[data-metric="acc/mean"] canvas')
        expect(page.locator('[data-metric="acc/mean"] .value')).to_have_text(["0.3"])
        menu = page.locator('[data-metric="acc/mean"] details.save')
        name, content = download(page, menu, "CSV")
        assert name == "acc-mean.csv"
        lines = list(csv.DictReader(io.StringIO(content.decode())))
        assert [(line["run"], line["step"], line["value"]) for line in lines] == [
            ("a", "1", "0.1"),
            ("a", "2", "0.2"),
            ("a", "3", "0.3"),
        ]
        name, content = download(page, menu, "SVG")
        assert name == "acc-mean.svg"
        picture = ET.fromstring(content)
        texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
        assert texts[:2] == ["acc/mean", "a"]  # the title and the legend
        assert {"step", "share of correct samples", "0.1", "0.2", "0.3"} <= set(texts)
        assert picture.find("{http://www.w3.org/2000/svg}rect").get("fill") == "#ffffff"
        lines = picture.findall(".//{http://www.w3.org/2000/svg}g/{http://www.w3.org/2000/svg}polyline")
        assert [len(line.get("points").split()) for line in lines] == [3, 3]
        assert {line.get("stroke") for line in lines} == {"#3b6fd4"}  # the colour for light paper
        name, content = download(page, menu, "PNG")
        assert (name, struct.unpack(">II", content[16:24])) == ("acc-mean.png", (2160, 1260))


@pytest.mark.parametrize("mode", ["groups", "samples"])
def test_a_step_that_is_written_again_is_shown_again(browser, runs, address, mode):  # noqa: F811
    """A resumed run writes the steps after its checkpoint again."""
    with opened(browser, address, f"#/groups?run=a&step=2&draw=20&sample=0&list={mode}") as page:
        page.get_by_label("Colour tokens by").select_option("none")
        text = page.locator('.detail [data-sample="0"] .text')
        expect(text).to_have_text("Is it A+B? a+b is (2)")
        RunDirectory(runs / "a").write_rollouts(2, [kept(make_group(20, [("I know 2", True), ("no", False)]))])
        page.evaluate(
            """async () => {
                const names = performance.getEntriesByType("resource").map((entry) => entry.name);
                const { tell } = await import(names.find((name) => name.includes("/store.js")));
                tell(new Set(["a"]));
            }"""
        )
        expect(text).to_have_text("I know 2")
        assert "step=2&draw=20&sample=0" in page.url


def test_a_picture_of_hostile_names(browser, runs, address):  # noqa: F811
    make_run(runs / "<script>&\u202e")
    with opened(browser, address) as page:
        expect(page.locator('[data-metric="acc/mean"] .value')).to_have_count(2)
        _, content = download(page, page.locator('[data-metric="acc/mean"] details.save'), "SVG")
        texts = [element.text for element in ET.fromstring(content).iter("{http://www.w3.org/2000/svg}text")]
        assert "<script>&⟨U+202E⟩" in texts


def test_downloads_of_the_ledger_and_the_report(browser, address):  # noqa: F811
    with opened(browser, address, "#/ledger?run=a") as page:
        page.wait_for_selector("figure canvas")
        menu = page.locator("figure details.save")
        name, content = download(page, menu, "CSV")
        assert (name, content.decode()) == (
            "tokens-per-step.csv",
            "step,trained on,all right\r\n1,6,6\r\n2,6,6\r\n3,6,6\r\n",
        )
        _, content = download(page, menu, "SVG")
        bars = ET.fromstring(content).findall(".//{http://www.w3.org/2000/svg}g/{http://www.w3.org/2000/svg}rect")
        assert len(bars) == 6
        assert len({bar.get("height") for bar in bars}) == 1
        page.get_by_role("link", name="Runs").click()
        name, content = download(page, page.locator(".bar details.save"), "report.png of a")
        assert (name, content) == ("a-report.png", b"\x89PNG as it is")


def test_downloads_of_rows_honour_the_filters(browser, address):  # noqa: F811
    with opened(browser, address, "#/groups?run=a&step=2&list=samples") as page:
        expect(rows_shown(page)).to_have_count(4)
        page.locator(".filters").get_by_role("button", name="wrong").click()
        expect(rows_shown(page)).to_have_count(1)
        with page.expect_download() as info:
            page.get_by_role("link", name="JSONL").click()
        rows = [json.loads(line) for line in info.value.path().read_text().splitlines()]
        assert [(row["draw"], row["sample"]) for row in rows] == [(20, 1)]


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_samples_fit(browser, address, size):  # noqa: F811
    with opened(browser, address, size=size) as page:
        views = {
            "step=2&list=samples": ".list .group >> visible=true",
            "step=2&draw=20&sample=1&list=samples": ".detail .sample",
            "step=2&a=2.20.0&b=3.30.1": ".compare .sample",
        }
        for view, element in views.items():
            page.goto(f"{address}#/groups?run=a&{view}")
            expect(page.locator(element).first).to_be_visible()
            page.wait_for_timeout(300)
            assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], view
        pair = [each.bounding_box() for each in page.locator(".compare .sample").all()]
        assert (pair[1]["y"] >= pair[0]["y"] + pair[0]["height"]) == (size is PHONE)


def test_a_card_speaks_of_an_answer_only_if_the_reward_extracts_one(browser, runs, address):  # noqa: F811
    run = make_run(runs / "failed", steps=1)
    three = make_group(7, [("a", False), ("b", False), ("c", True)])
    wrong = Verdict(0.25, False, "wrong")
    verdicts = (wrong, Verdict(-1.0, False, "unparseable"), three.verdicts[2])
    rows = [GroupRow(replace(three, verdicts=verdicts), "unfinished")]
    rows.append(GroupRow(replace(make_group(8, [("d", True)]), verdicts=()), "unfinished"))
    run.write_rollouts(1, rows)
    with opened(browser, address, "#/groups?run=failed&step=1&draw=7") as page:
        cards = [page.locator(f'.detail [data-sample="{n}"]') for n in range(3)]
        expect(cards[0]).to_contain_text("wrong")
        expect(cards[0].locator(".answer")).to_have_count(0)
        expect(cards[1].locator(".answer")).to_have_text("answer none found")
        expect(cards[2].locator(".answer")).to_have_text("answer 2")
        expect(page.locator(".list")).to_contain_text("unfinished")
    with opened(browser, address, "#/groups?run=failed&step=1&draw=8") as page:
        expect(page.locator('.detail [data-sample="0"]')).to_contain_text("not judged: the run failed first")
        expect(page.locator(".group[data-draw='8'] .marks i")).to_have_attribute("class", "failed")
        page.keyboard.press("l")
        expect(page.locator("[data-key='8.0'] .marks i")).to_have_attribute("class", "failed")
