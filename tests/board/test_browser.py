"""The page in a real browser: each view, a run that goes on, the Lab, hostile text, sizes and themes."""

import os
import re
import shutil
import socket
import subprocess
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import forked
import one_browser
import pytest
import uvicorn
import yaml
from board_runs import HOSTILE, finish, make_run, metrics_of

from dapo_rl.base import process
from dapo_rl.board import routes
from dapo_rl.board.catalogue import Catalogue
from dapo_rl.board.launcher import Launcher

sync_api = pytest.importorskip("playwright.sync_api", reason="the browser tests need Playwright")
expect = sync_api.expect
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="the browser tests need Chromium: apt-get install chromium"),
]
TOKEN = "token-of-the-test"
DESKTOP, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
TINTS = ("good", "bad", "warm", "violet")
PATIENCE_MS = 20_000
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def browser():
    if not one_browser.launched:
        playwright = one_browser.ends.enter_context(sync_api.sync_playwright())
        # Root may not use Chromium's sandbox; the pages are our own.
        sandbox = ["--no-sandbox"] if os.getuid() == 0 else []
        # All pages have one process, which an empty page keeps: to start another takes longer than a page.
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=[*sandbox, "--renderer-process-limit=1"])
        one_browser.ends.callback(launched.close)
        launched.new_context().new_page()
        one_browser.launched.append(launched)
    return one_browser.launched[0]


@pytest.fixture
def runs(tmp_path):
    finish(make_run(tmp_path / "runs" / "first"), {"trained": 18, "all_correct": 18, "total": 36})
    make_run(tmp_path / "runs" / "second", text=HOSTILE, **{"algo.clip_high": 0.2, "seed": 1})
    return tmp_path / "runs"


@pytest.fixture
def quick_jobs(monkeypatch):
    """The Lab's runs start in milliseconds."""
    monkeypatch.setattr(process, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": forked.Popen}))


@contextmanager
def served(directory):
    lab = Launcher(directory)
    listening = socket.create_server(("127.0.0.1", 0))
    app = routes.create_app(Catalogue([directory]), lab, TOKEN)
    instance = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1, lifespan="off"))
    thread = threading.Thread(target=instance.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    finally:
        lab.queue.close()
        instance.should_exit = True
        thread.join()


@contextmanager
def opened(browser, address, hash_="", size=DESKTOP, theme="light", refused=False):
    """A page as in a new browser; whatever goes wrong in it, or is fetched from elsewhere, fails the test. With
    `refused`, the console may have errors: browsers log each request that the server refuses."""
    context = browser.contexts[0]
    context.clear_cookies()
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.set_viewport_size(size)
    page.emulate_media(color_scheme=theme)
    storage = context.new_cdp_session(page)
    storage.send("Storage.clearDataForOrigin", {"origin": address.rstrip("/"), "storageTypes": "all"})
    storage.send("Network.clearBrowserCache")
    storage.detach()
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    counts = ("error",) if not refused else ()
    page.on("console", lambda message: problems.append(message.text) if message.type in counts else None)
    page.on("request", lambda request: None if request.url.startswith(address) else problems.append(request.url))
    page.goto(address + hash_)
    page.wait_for_selector("main :is(.card, .empty, form)")
    try:
        yield page
        assert problems == []
    finally:
        page.close()


@pytest.fixture
def address(runs):
    with served(runs) as url:
        yield url


def drawn(page, metric):
    """How many pixels of a chart have colour."""
    return page.evaluate(
        """(metric) => {
            const canvas = document.querySelector(`[data-metric="${metric}"] canvas`);
            if (!canvas?.width || !canvas.height) return 0;
            const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            let count = 0;
            for (let i = 0; i < pixels.length; i += 4) {
                const colour = pixels.slice(i, i + 3);
                if (Math.max(...colour) - Math.min(...colour) > 60) count++;
            }
            return count;
        }""",
        metric,
    )


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


def test_runs(browser, address):
    with opened(browser, address) as page:
        names = page.locator("table.runs tbody td:nth-child(2)")
        expect(names).to_have_text(["second", "first"])  # the newest first
        wait_until(lambda: drawn(page, "acc/mean") > 100)
        expect(page.locator('[data-metric="acc/mean"] .value')).to_have_text(["0.3", "0.3"])
        page.get_by_role("button", name="run", exact=True).click()
        expect(names).to_have_text(["first", "second"])
        page.get_by_label("Filter runs").fill("fir")
        expect(names).to_have_text(["first"])
        expect(page.locator('tr[data-run="first"]')).to_contain_text("finished")
        page.get_by_label("Show first").uncheck()
        expect(page.locator(".legend")).to_have_text("second")


def test_settings_and_evaluation(browser, address):
    with opened(browser, address) as page:
        page.get_by_role("tab", name="Settings").click()
        expect(page.locator("table.settings tbody th")).to_have_text(["seed", "algo.clip_high"])
        expect(page.locator("table.settings td.other")).to_have_text(["1", "0.2"])
        page.get_by_label("only differences").uncheck()
        expect(page.locator("table.settings tbody tr").first).to_have_text(re.compile("preset"))
        assert page.locator("table.settings tbody tr").count() > 60
        assert page.locator("table.settings tr.different").count() == 2
        page.get_by_role("tab", name="Evaluation").click()
        tables = page.locator(".grid.tables tbody")
        expect(tables.first).to_contain_text("25.0 %")  # before the first step, from the summary
        expect(tables.first).to_contain_text("50.0 %")


def test_groups(browser, address):
    with opened(browser, address, "#/groups?run=first&step=2") as page:
        expect(page.locator(".group")).to_have_count(2)
        expect(page.locator(".question pre")).to_have_text("1+1=?")
        sample = page.locator('[data-sample="0"]')
        expect(sample).to_contain_text("reward +0.75 = +1.00 answer, −0.25 length")
        expect(sample).to_contain_text("advantage +1.00")
        expect(sample).to_contain_text("answer 2")
        assert page.locator('[data-sample="0"] .tok.warm').count() == 3
        chooser = page.get_by_label("Colour tokens by")
        chooser.select_option("advantage")
        assert page.locator('[data-sample="0"] .tok.good').count() == 3
        assert page.locator('[data-sample="1"] .tok.bad').count() == 3
        for colouring, tints in {
            "ratio": {"good": 1, "bad": 1},
            "clipped": {"warm": 1},
            "entropy": {"violet": 3},
        }.items():
            chooser.select_option(colouring)
            seen = {tint: page.locator(f'[data-sample="0"] .tok.{tint}').count() for tint in TINTS}
            assert {tint: count for tint, count in seen.items() if count} == tints
        facts = [page.locator(f'[data-sample="{s}"] .tok').nth(n).get_attribute("title") for s, n in ((0, 1), (1, 2))]
        assert "ratio 1.500" in facts[0]
        assert facts[0].endswith(" · clipped high (clip_high)")
        assert facts[1].endswith(" · clipped low (clip_low)")
        chooser.select_option("none")
        expect(sample.locator(".text")).to_have_text("I think 2")
        page.locator(".chips").get_by_text("all right").click()
        expect(page.locator(".group")).to_have_count(1)
        page.locator(".group").click()
        expect(page.locator(".question")).to_contain_text("Dropped: every sample is right")
        page.get_by_label("Search", exact=True).fill("IDEA")
        expect(page.locator(".hit")).to_have_count(1)
        page.get_by_label("all steps").check()
        expect(page.locator(".hit")).to_have_count(3)
        page.locator(".hit").first.click()
        expect(page.get_by_label("Step number")).to_have_value("3")
        page.get_by_label("Previous step").click()
        expect(page.get_by_label("Step number")).to_have_value("2")


def test_an_address_of_a_run_that_is_not_there_says_so(browser, address):
    """The menu of runs shows its name as well, and not that of another run."""
    for view in ("groups", "groups?list=samples", "ledger"):
        hash_ = f"#/{view}{'&' if '?' in view else '?'}run=gone"
        with opened(browser, address, hash_, refused=True) as page:
            expect(page.locator("main")).to_contain_text("there is no run gone here")
            expect(page.get_by_label("Run", exact=True)).to_have_value("gone")
            page.get_by_label("Run", exact=True).select_option("second")
            expect(page.locator("main")).not_to_contain_text("there is no run")
            assert "run=second" in page.url


def test_a_step_whose_groups_were_deleted(browser, address, runs):
    make_run(runs / "pruned", steps=5, **{"log.keep_rollouts": 3})
    with opened(browser, address, "#/groups?run=pruned&step=1&draw=10") as page:
        expect(page.locator(".list")).to_have_text(
            "The groups of step 1 were deleted: log.keep_rollouts=3 keeps those of the newest steps."
        )
        expect(page.get_by_label("Step number")).to_have_value("1")
        expect(page.locator(".detail")).to_have_text("Choose a group.")
        page.get_by_label("Next step").click()
        expect(page.get_by_label("Step number")).to_have_value("3")
        expect(page.locator(".group")).to_have_count(2)
        page.get_by_label("Step number").fill("2")
        page.get_by_label("Step number").blur()
        expect(page.locator(".list")).to_contain_text("The groups of step 2 were deleted")
        page.get_by_label("Step number").fill("99")
        page.get_by_label("Step number").blur()
        expect(page.get_by_label("Step number")).to_have_value("5")
        expect(page.locator(".group")).to_have_count(2)
        page.goto(f"{address}#/ledger?run=pruned")
        expect(page.locator("figcaption")).to_contain_text("3 of 5 steps: the others have no rollout file")


def test_ledger(browser, address):
    with opened(browser, address, "#/ledger?run=first") as page:
        expect(page.locator(".totals h3")).to_have_text("36 tokens generated")
        expect(page.locator(".share")).to_have_text(
            [re.compile(r"50\.0 %\s*trained on"), re.compile(r"50\.0 %\s*all right")]
        )
        expect(page.locator("figure .reading")).to_contain_text("trained on 6")
        page.get_by_label("Run").select_option("second")
        expect(page.locator(".totals")).to_contain_text("so far")


def test_a_run_that_goes_on(browser, address, runs):
    run = make_run(runs / "live", steps=2)
    (run.path / ".lock").write_text(f"{os.getpid()} {socket.gethostname()}\n")
    with opened(browser, address) as page:
        row = page.locator('tr[data-run="live"]')
        expect(row).to_contain_text("running")
        expect(row).to_contain_text("2 / 2")
        stop = threading.Event()

        def write():
            for step in range(3, 60):
                if stop.wait(0.1):
                    return
                run.append_metrics(step, metrics_of(step))

        writer = threading.Thread(target=write)
        writer.start()
        try:
            reading = page.locator('[data-metric="actor/entropy"] .value')
            expect(row.locator(".progress")).to_have_text(re.compile(r"^(1\d|[2-5]\d) "))
            before = reading.last.text_content()
            expect(reading.last).not_to_have_text(before)
        finally:
            stop.set()
            writer.join()
        (run.path / ".lock").unlink()
        expect(row).to_contain_text("stopped")


def test_what_a_run_that_goes_on_logs_and_draws_is_offered(browser, address, runs):
    run = make_run(runs / "live", steps=1)
    with opened(browser, address, "#/runs?run=live") as page:
        offered = page.get_by_label("Add a metric").locator("option")
        expect(offered.first).to_have_text("add a curve…")
        assert "own/metric" not in offered.all_text_contents()
        run.append_metrics(2, {**metrics_of(2), "own/metric": 1.0, "data/a/accuracy": 0.5, "data/b/accuracy": 1.0})
        expect(offered.get_by_text("own/metric")).to_have_count(1)
        expect(page.locator('[data-metric="data/b/accuracy"] .value')).to_have_text("1")
        menu = page.locator(".bar details.save")
        expect(menu).to_have_count(0)
        run.report_path.write_bytes(b"\x89PNG as it is")
        run.append_metrics(3, metrics_of(3))
        menu.locator("summary").click()
        expect(menu).to_contain_text("report.png of live")


def test_a_hundred_thousand_steps(browser, address, runs):
    run = make_run(runs / "long", steps=1)
    with run.metrics_path.open("w") as file:
        file.writelines(f'{{"step": {s}, "acc/mean": {s / 1e5}, "actor/entropy": 1.5}}\n' for s in range(1, 100_001))
    with opened(browser, address) as page:
        expect(page.locator('tr[data-run="long"]')).to_contain_text("100000")
        expect(page.locator("main")).to_contain_text("100,000 steps")
        wait_until(lambda: drawn(page, "acc/mean") > 100)
        url = "/api/curves?run=long&metric=acc/mean&points=600"
        curves = page.evaluate("(url) => fetch(url).then((answer) => answer.json())", url)
        assert len(curves["long"]["acc/mean"]["raw"][0]) <= 602
        chart = page.locator('[data-metric="acc/mean"] .u-over')
        box = chart.bounding_box()
        across = box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + 0.4 * box["width"], across)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.6 * box["width"], across, steps=5)
        with page.expect_request(lambda request: "first=" in request.url) as zoom:
            page.mouse.up()
        first, last = (int(re.search(rf"{edge}=(\d+)", zoom.value.url)[1]) for edge in ("first", "last"))
        assert 35_000 < first < 45_000
        assert 55_000 < last < 65_000
        expect(page.locator("main")).to_contain_text("double-click shows all steps again")
        chart.dblclick()
        expect(page.locator("main")).to_contain_text("100,000 steps")


def test_a_run_of_many_sources(browser, address, runs):
    """Each has a curve, and together they are more than the server takes in a request."""
    run = make_run(runs / "mixed", steps=1)
    sources = [f"data/subject-{number:02d}/accuracy" for number in range(57)]
    run.append_metrics(2, {**metrics_of(2), **dict.fromkeys(sources, 0.5)})
    with opened(browser, address) as page:
        expect(page.locator('[data-metric="acc/mean"] .value').last).to_have_text("0.2")
        expect(page.locator(f'[data-metric="{sources[-1]}"] .value')).to_have_text("0.5")


def test_the_ticks_of_an_axis_have_all_their_digits(browser, address):
    """Rounded to three, 1005 read 1010, and 1.25 M tokens 1.3 M."""
    with opened(browser, address) as page:
        ticks = [0, -2.5, 1000, 1005, 1010, 9999.5, 10_000, 12_345, 102_500, 1.25e6, -3e9, 2e15, 0.30000000000000004]
        ticks += [0.9995, 1.25e-4]
        shown = page.evaluate(
            """async (ticks) => {
                const names = performance.getEntriesByType("resource").map((entry) => entry.name);
                const { BASE } = await import(names.find((name) => name.includes("/charts.js")));
                const [x, y] = BASE().axes;
                return [x.values(null, ticks), y.values(null, ticks)];
            }""",
            ticks,
        )
        texts = ["0", "−2.5", "1000", "1005", "1010", "9999.5", "10 k", "12.345 k", "102.5 k", "1.25 M", "−3 G"]
        texts += ["2000 T", "0.3", "0.9995", "1.25e-4"]
        assert shown[1] == texts
        assert shown[0] == [text if float(tick).is_integer() else "" for text, tick in zip(texts, ticks, strict=True)]


def test_an_address_that_is_about_to_be_shown_is_not_overwritten(browser, address):
    """A view notes its state when an answer arrives; of a new address, the browser tells a little later."""
    with opened(browser, address, "#/groups?run=first&step=1") as page:
        expect(page.locator(".group").first).to_be_visible()
        page.evaluate(
            """async () => {
                const names = performance.getEntriesByType("resource").map((entry) => entry.name);
                const { remember } = await import(names.find((name) => name.includes("/store.js")));
                location.hash = "#/runs";
                remember("groups", { run: "first", step: 2 });
            }"""
        )
        expect(page.locator("table.runs")).to_be_visible()
        assert page.url.endswith("#/runs")


@pytest.mark.parametrize("view", ["nothing", "toString", "__proto__"])
def test_an_address_of_no_view_is_that_of_the_runs(browser, address, view):
    with opened(browser, address, f"#/{view}") as page:
        expect(page.locator("table.runs")).to_be_visible()


def test_a_view_that_was_left_does_not_change_the_address(browser, address):
    """Answers and updates that it was waiting for come later."""
    with opened(browser, address, "#/ledger?run=first") as page:
        page.evaluate(
            """async () => {
                const names = performance.getEntriesByType("resource").map((entry) => entry.name);
                const { tell } = await import(names.find((name) => name.includes("/store.js")));
                for (let i = 0; i < 6; i++) {
                    tell(new Set(["first"])); // the second time, it is drawn 2.5 s later
                    await new Promise((resolve) => setTimeout(resolve, 50));
                }
            }"""
        )
        page.get_by_role("link", name="Runs").click()
        expect(page.locator("table.runs")).to_be_visible()
        page.wait_for_timeout(2600)
        assert page.url.endswith("#/runs")
        held = []
        page.route(re.compile("/api/steps"), lambda route: held.append(route))
        page.get_by_role("link", name="Groups").click()
        wait_until(lambda: page.evaluate("1") and held)
        page.get_by_role("link", name="Runs").click()
        expect(page.locator("table.runs")).to_be_visible()
        with page.expect_response(re.compile("/api/steps")):
            held[0].continue_()
        page.wait_for_timeout(300)
        assert page.url.endswith("#/runs")


def test_hostile_text_changes_nothing(browser, runs):
    # In the names of metrics and settings too, not only in what the model wrote.
    run = runs / "second"
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "eval/<img src=x onerror=window.owned=3>": 1, "acc/mean": 0.5}\n')
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["data"]["system_prompt"] = HOSTILE.replace("\x00", "").replace("\x1b", "")
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    with served(runs) as address, opened(browser, address, "#/groups?run=second&step=1&draw=10") as page:
        page.get_by_label("Colour tokens by").select_option("none")
        text = page.locator('[data-sample="0"] .text')
        shown = text.text_content()
        assert "<script>window.owned = 1</script>" in shown
        assert "⟨U+202E⟩gnihtemos⟨U+202C⟩⟨U+0000⟩⟨U+001B⟩[31m⟨U+200B⟩⟨U+2066⟩" in shown
        page.get_by_label("Search", exact=True).fill("onerror")
        expect(page.locator(".hit")).to_have_count(1)
        page.get_by_role("link", name="Runs").click()
        page.get_by_role("tab", name="Settings").click()
        expect(page.locator("table.settings")).to_contain_text("⟨U+202E⟩gnihtemos")
        page.get_by_role("tab", name="Evaluation").click()
        expect(page.locator(".grid.tables")).to_contain_text("<img src=x")
        assert page.evaluate("window.owned") is None
        assert page.evaluate("getComputedStyle(document.body).display") == "block"
        assert page.locator("main script, main style, main img").count() == 0


def test_the_lab_starts_a_real_run_and_stops_it(browser, address, runs, quick_jobs):
    with opened(browser, address, f"#token={TOKEN}") as page:
        assert TOKEN not in page.url
        page.get_by_role("link", name="Lab").click()
        page.get_by_role("switch", name="Clip-Higher").uncheck()
        page.get_by_label("steps").fill("50")
        page.get_by_label("held-out prompts").fill("2")
        page.get_by_role("button", name="Start the run").click()
        job = page.locator('[data-job="lab-001"]')
        expect(job).to_contain_text("starting")
        expect(job).to_contain_text(re.compile(r"step [1-9]\d* of 50"), timeout=180_000)
        expect(page.locator(".legend")).to_contain_text("lab-001")
        expect(page.locator('[data-metric="acc/mean"] .value')).to_have_count(3)
        job.get_by_role("button", name="stop").click()
        expect(job.locator(".state")).to_have_text("stopped", timeout=120_000)
        expect(job.locator("pre")).to_contain_text("stopping: saving the run")
    settings = yaml.safe_load((runs / "lab-001" / "config.yaml").read_text())
    assert (settings["algo"]["clip_high"], settings["sampling"]["dynamic"], settings["train"]["steps"]) == (
        0.2,
        True,
        50,
    )
    assert (runs / "lab-001" / "summary.json").is_file()


def test_the_lab_changes_any_setting(browser, address, runs):
    (runs.parent / "sums.yaml").write_text("model: {name: tiny}\ndata: {train: arithmetic}\ntrain: {lr: 3.0e-5}\n")
    with opened(browser, address, f"#token={TOKEN}") as page:
        page.get_by_role("link", name="Lab").click()
        own = f"{runs.parent.name}/sums.yaml"
        page.get_by_label("Recipe").select_option(own)
        setting, value = page.get_by_label("Setting", exact=True), page.get_by_label("Value")
        changed, found = page.get_by_label("Changed settings"), page.locator(".settings .found")
        expect(value).to_be_disabled()
        setting.fill("learning rate")
        expect(found.first).to_have_text("train.lr")
        found.first.click()
        expect(page.locator(".settings .about")).to_contain_text("AdamW's learning rate. In the recipe: 3e-05.")
        value.fill("much")
        page.get_by_role("button", name="change").click()
        expect(page.locator(".settings .problem")).to_contain_text("train.lr: input should be a valid number")
        expect(changed.locator("li")).to_have_count(0)
        value.fill("0.001")
        value.press("Enter")
        expect(changed).to_contain_text("train.lr=0.001")
        setting.fill("sampling.dynamic")
        value.fill("false")
        value.press("Enter")
        expect(changed.locator("li")).to_have_count(2)
        page.get_by_label("Undo sampling.dynamic").click()
        with page.expect_request(re.compile("/api/lab/check")) as asked:
            setting.fill("seed")
            value.fill("7")
            value.press("Enter")
        assert asked.value.post_data_json["settings"] == {"train.lr": "0.001", "seed": "7"}
        assert asked.value.post_data_json["recipe"] == own


def test_the_lab_shows_the_newest_run_or_says_that_there_is_none(browser, address, tmp_path):
    with opened(browser, address, "#/lab") as page:
        expect(page.locator(".legend")).to_contain_text("second")
        wait_until(lambda: drawn(page, "acc/mean") > 50)
        expect(page.locator('[data-metric="response_length/mean"]')).to_be_hidden()
    (tmp_path / "none").mkdir()
    with served(tmp_path / "none") as empty, opened(browser, empty, "#/lab") as page:
        expect(page.locator(".lab .empty")).to_have_text("The curves of a run appear here when it has started.")
        expect(page.locator(".lab .chart").first).to_be_hidden()


def test_without_the_token_the_lab_only_shows(browser, address):
    with opened(browser, address, "#/lab") as page:
        expect(page.get_by_role("button", name="Start the run")).to_be_disabled()
        expect(page.locator(".gate")).to_be_visible()
        page.locator("#lab-token").fill(TOKEN)
        page.locator("#lab-token").blur()
        expect(page.get_by_role("button", name="Start the run")).to_be_enabled()
        expect(page.locator(".gate")).to_be_hidden()


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_sizes_and_themes(browser, address, size, theme, tmp_path):
    """Nothing is wider than the screen, and text stands out from what is behind it."""
    with opened(browser, address, size=size, theme=theme) as page:
        for view in ("runs", "groups?run=second&step=1&draw=10", "ledger", "lab"):
            page.goto(f"{address}#/{view}")
            page.wait_for_selector("main .card")
            page.wait_for_timeout(500)
            page.screenshot(path=tmp_path / f"{view[:4]}.png")
            assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], view
        style = "getComputedStyle(document.body)"
        ink, ground = page.evaluate(f"[{style}.color, {style}.backgroundColor]")
        bright = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ink, ground)]
        assert (bright[0] > bright[1]) == (theme == "dark")
        assert abs(bright[0] - bright[1]) > 400


def test_the_theme_can_be_chosen_and_stays(browser, address):
    with opened(browser, address, theme="light") as page:
        page.get_by_label("Light or dark").click()
        page.reload()
        page.wait_for_selector("main .card")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
