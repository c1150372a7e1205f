"""The table of runs in a real browser: runs that cannot be read, and thousands of them."""

import json
import os
import shutil

import pytest
from board_runs import finish, kept, make_group, make_run, metrics_of
from test_browser import CHROMIUM, PHONE, browser, expect, opened, served  # noqa: F401  (`browser` is a fixture)

from dapo_rl.runs.directory import RunDirectory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="the browser tests need Chromium: apt-get install chromium"),
]


def test_a_run_that_cannot_be_read_says_so_in_its_row(browser, tmp_path):  # noqa: F811
    finish(make_run(tmp_path / "good"), {"trained": 18, "total": 36})
    bad = make_run(tmp_path / "bad")
    bad.config_path.write_text("train: {<img src=x onerror=owned()>: 1}\n")
    bad.summary_path.write_text("[]")
    with served(tmp_path) as address:
        for size in (None, PHONE):
            with opened(browser, address, **({"size": size} if size else {})) as page:
                trouble = page.locator('tr[data-run="bad"] .trouble')
                expect(trouble).to_contain_text("<img src=x onerror=owned()>: no such setting")
                expect(trouble).to_contain_text("summary.json: not an object but a list")
                expect(page.locator('tr[data-run="good"] .trouble')).to_have_count(0)
                expect(page.locator('tr[data-run="good"]')).to_contain_text("50.0 %")
                assert page.locator("main img").count() == 0
                if size:
                    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        with opened(browser, address) as page:
            bad.summary_path.write_text(json.dumps({"finished": True}))
            expect(page.locator('tr[data-run="bad"] .state')).to_have_text("finished")
            page.get_by_label("Filter runs").fill("no such setting")
            expect(page.locator("table.runs tbody tr")).to_have_count(1)


def test_a_click_on_a_run_that_goes_on(browser, tmp_path):  # noqa: F811
    """A step that ends while the button of the mouse is down does not take the click away, or the focus."""
    run = make_run(tmp_path / "live")
    with served(tmp_path) as address, opened(browser, address) as page:
        row, box = page.locator('tr[data-run="live"]'), page.get_by_label("Show live")
        box.hover()
        page.mouse.down()
        run.append_metrics(4, metrics_of(4))
        expect(row.locator(".progress")).to_contain_text("4 /")
        page.mouse.up()
        expect(box).not_to_be_checked()
        expect(row).not_to_have_class("picked")
        box.focus()
        run.append_metrics(5, metrics_of(5))
        expect(row.locator(".progress")).to_contain_text("5 /")
        page.keyboard.press("Space")
        expect(box).to_be_checked()


def test_the_curves_of_a_run_that_is_deleted_go(browser, tmp_path):  # noqa: F811
    for name in ("one", "two"):
        make_run(tmp_path / name)
    with served(tmp_path) as address, opened(browser, address) as page:
        values = page.locator('[data-metric="acc/mean"] .value')
        expect(values).to_have_count(2)
        shutil.rmtree(tmp_path / "one")
        expect(page.locator(".legend")).to_have_text("two")
        expect(values).to_have_count(1)
        shutil.rmtree(tmp_path / "two")
        expect(page.locator("main")).to_contain_text("Pick a run in the table.")


def test_a_run_that_starts_can_be_chosen(browser, tmp_path):  # noqa: F811
    make_run(tmp_path / "one")
    with served(tmp_path) as address, opened(browser, address, "#/groups") as page:
        chosen = page.get_by_label("Run", exact=True)
        for name, view in (("two", "Groups"), ("three", "Ledger")):
            page.get_by_role("link", name=view).click()
            expect(chosen).to_have_value("one")
            make_run(tmp_path / name)
            expect(chosen.locator(f"option[value={name}]")).to_be_attached()
            expect(chosen).to_have_value("one")


def test_two_thousand_runs(browser, tmp_path):  # noqa: F811
    for number in range(2000):
        run = tmp_path / f"run-{number:04d}"
        run.mkdir()
        (run / "config.yaml").write_text(f"seed: {number}\n")
        (run / "metrics.jsonl").write_text('{"step": 1, "acc/mean": 0.5}\n')
        os.utime(run / "config.yaml", (1e9 + number, 1e9 + number))
    with served(tmp_path) as address, opened(browser, address) as page:
        lines = page.locator("table.runs tbody tr")
        expect(page.locator(".bar .hint").first).to_have_text("2000 of 2000 runs · 4 picked")
        expect(lines.first).to_have_attribute("data-run", "run-1999")
        expect(page.locator(".state.reading")).to_have_count(0)
        few = lines.count()
        assert few < 200
        lines.last.scroll_into_view_if_needed()
        expect(lines.nth(few + 5)).to_be_attached()
        # A line that has not changed is the same element as before.
        page.evaluate("document.querySelector('tr[data-run=\"run-1998\"]').kept = true")
        with (tmp_path / "run-1999" / "metrics.jsonl").open("a") as file:
            file.write('{"step": 77}\n')
        expect(lines.first).to_contain_text("77")
        assert page.evaluate("document.querySelector('tr[data-run=\"run-1998\"]').kept")
        page.get_by_label("Filter runs").fill("run-0007")
        expect(lines).to_have_count(1)


def test_the_first_run_comes_up_by_itself(browser, tmp_path):  # noqa: F811
    with served(tmp_path) as address, opened(browser, address) as page:
        expect(page.locator("main")).to_contain_text("No runs yet")
        make_run(tmp_path / "new", 0, **{"train.steps": 5})
        expect(page.locator('tr[data-run="new"].picked')).to_have_count(1)
        page.get_by_role("link", name="Groups").click()
        expect(page.locator("main")).to_contain_text("No run has recorded its groups yet")
        run = RunDirectory.open(tmp_path / "new")
        run.write_rollouts(1, [kept(make_group(10, [("2", True), ("3", False)]))])
        run.append_metrics(1, metrics_of(1))
        expect(page.locator(".question")).to_contain_text("1+1=?")
