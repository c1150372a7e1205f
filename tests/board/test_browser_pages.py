"""In a real browser: ablations, evaluations, failed runs, the queue of the Lab, and a board shown to others."""

import json
import re
import socket
import threading
from contextlib import contextmanager

import pytest
import uvicorn
from board_reports import ARMS, make_ablation, make_evaluation, png
from board_runs import HOSTILE, make_run
from test_browser import (  # noqa: F401  (`browser` and `quick_jobs` are fixtures)
    CHROMIUM,
    DESKTOP,
    PHONE,
    TOKEN,
    browser,
    drawn,
    expect,
    opened,
    quick_jobs,
    served,
    wait_until,
)

from dapo_rl.board import routes
from dapo_rl.board.catalogue import Catalogue
from dapo_rl.board.launcher import Launcher

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="the browser tests need Chromium: apt-get install chromium"),
]
LONG = "a-name-that-somebody-gave-to-a-run-" * 4
LAST_RUN = f"study/{ARMS[1]}/seed-1"
RECIPE = (
    "preset: dapo\nmodel: {name: tiny}\ndata: {train: arithmetic, eval: arithmetic}\n"
    "sampling: {prompts_per_step: 2, group_size: 4, max_new_tokens: 40}\noverlong: {cache_length: 8}\n"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("pages")
    make_ablation(root / "study")
    make_evaluation(root / "exam", second=f"runs/{LONG}/model")
    make_run(root / f"{LONG}seed-1")
    failed = make_run(root / "failed").path
    error = {
        "time": 1.8e9,
        "step": 4,
        "kind": "KeyError",
        "message": "<b>no</b> answer",
        "traceback": "line 7\nKeyError",
    }
    (failed / "error.json").write_text(json.dumps(error))
    notes = [{"time": 1.8e9, "step": step, "text": f"note <i>{step}</i>"} for step in (0, 3)]
    (failed / "notes.jsonl").write_text("".join(json.dumps(note) + "\n" for note in notes))
    (root / "recipe.yaml").write_text(RECIPE)
    return root


@pytest.fixture
def address(root):
    with served(root) as url:
        yield url


def test_an_ablation(browser, address):  # noqa: F811
    with opened(browser, address) as page:
        row = page.locator('tr[data-report="study"]')
        expect(row).to_contain_text("ablation 2 arms, 2 seeds")
        expect(row).to_contain_text("70.0 %")
        expect(page.locator(".bar .hint").first).to_contain_text("6 of 6 runs · 1 ablation · 1 evaluation")
        row.click()
        expect(page.locator("h2")).to_have_text("study")
        assert page.url.endswith("#/ablation?name=study")
        expect(page.locator("nav a[aria-current]")).to_have_text("Runs")
        wait_until(lambda: drawn(page, "eval/accuracy") > 100)
        expect(page.locator('[data-metric="eval/accuracy"] .value')).to_have_text(
            ["0.45 (0.4 to 0.5)", "0.7 (0.65 to 0.75)"]
        )
        expect(page.locator(".legend .key")).to_have_text(["algo.clip_high=0.2", "algo.clip_high=0.28"])
        table = page.locator(".results table").first
        expect(table.locator("tbody tr").nth(1)).to_contain_text("+25.0 (all equal)")
        wait_until(lambda: page.evaluate("document.querySelector('.picture img').naturalWidth") == 60)
        expect(page.locator("table.of-runs tbody tr")).to_have_count(4)
        page.locator(f'table.of-runs tr[data-run="{LAST_RUN}"] a').click()
        expect(page.locator("tr.picked")).to_have_attribute("data-run", LAST_RUN)
        expect(page.locator(".legend")).to_have_text(LAST_RUN)
        page.go_back()
        page.get_by_label("Back to the list").click()
        page.get_by_label("Filter runs").fill("ablation")
        expect(page.locator("table.runs tbody tr")).to_have_count(1)


def test_the_picture_is_fetched_when_it_changes(browser, root, address):  # noqa: F811
    with opened(browser, address, "#/ablation?name=study") as page:
        expect(page.locator(".picture img")).to_be_visible()
        wait_until(lambda: page.evaluate("document.querySelector('.picture img').naturalWidth") == 60)
        fetched = []
        page.on("request", lambda request: fetched.append(request.url) if "/api/picture" in request.url else None)

        def draw_again():
            with page.expect_response(re.compile("/api/arms")):
                page.evaluate(
                    """async () => {
                        const names = performance.getEntriesByType("resource").map((entry) => entry.name);
                        const { tell } = await import(names.find((name) => name.includes("/store.js")));
                        tell(new Set(["ablation study"]));
                    }"""
                )
            page.wait_for_timeout(300)

        for _ in range(2):
            draw_again()
        assert fetched == []
        (root / "study" / "ablation.png").write_bytes(png(width=70))
        draw_again()
        wait_until(lambda: page.evaluate("document.querySelector('.picture img').naturalWidth") == 70)
        assert len(fetched) == 1


def test_the_band_covers_the_range_over_seeds(browser, address):  # noqa: F811
    """Colour between the lowest and the highest seed, none above it."""
    with opened(browser, address, "#/ablation?name=study") as page:
        wait_until(lambda: drawn(page, "eval/accuracy") > 100)
        alphas = page.evaluate(
            """() => {
                const canvas = document.querySelector('[data-metric="eval/accuracy"] canvas');
                const context = canvas.getContext("2d");
                const x = Math.round(canvas.width * 0.5);
                const column = context.getImageData(x, 0, 1, canvas.height).data;
                const tinted = [];
                for (let y = 0; y < canvas.height; y++) {
                    const [r, g, b, a] = column.slice(4 * y, 4 * y + 4);
                    if (a > 10 && a < 90 && Math.max(r, g, b) - Math.min(r, g, b) > 40) tinted.push(y);
                }
                return [tinted.length, canvas.height];
            }"""
        )
        assert 0.1 < alphas[0] / alphas[1] < 0.6


def test_charts_of_a_view_that_was_left_are_not_drawn(browser, address):  # noqa: F811
    """Each would be kept by those that share its pointer, for as long as the page is open."""
    left = "(key) => uPlot.sync(key).plots.filter((plot) => !plot.root.isConnected).length"
    with opened(browser, address, "#/ablation?name=study") as page:
        wait_until(lambda: drawn(page, "eval/accuracy") > 100)
        page.evaluate(
            """async () => {
                const names = performance.getEntriesByType("resource").map((entry) => entry.name);
                const { tell } = await import(names.find((name) => name.includes("/store.js")));
                for (let i = 0; i < 6; i++) {
                    tell(new Set(["ablation study"])); // the second time, it is drawn 2 s later
                    await new Promise((resolve) => setTimeout(resolve, 50));
                }
            }"""
        )
        page.get_by_role("link", name="Runs", exact=True).click()
        page.wait_for_timeout(2300)
        assert page.evaluate(left, "arms") == 0
        held = []
        page.route(re.compile("/api/evaluations"), lambda route: held.append(route))
        page.get_by_role("tab", name="Evaluation").click()
        wait_until(lambda: page.evaluate("1") and held)
        page.get_by_role("tab", name="Curves").click()
        with page.expect_response(re.compile("/api/evaluations")):
            held[0].continue_()
        page.wait_for_timeout(300)
        assert page.evaluate(left, "steps") == 0


def test_an_evaluation(browser, address):  # noqa: F811
    with opened(browser, address) as page:
        page.locator('tr[data-report="exam"] a').click()
        first = page.locator('table.figures tr[data-metric="avg@2"] td')
        expect(first.first).to_have_text(re.compile(r"^25\.0 % \(.+ % to .+ %\)$"))
        expect(first.last).to_contain_text("75.0 %")
        metrics = page.locator("table.figures tbody th")
        expect(metrics).to_have_text(["avg@2", "pass@1", "pass@2", "cons@2", "tokens", "cut off", "generated"])
        change = page.locator('table.differences tr[data-metric="avg@2"]')
        expect(change).to_contain_text("+50.0 %")
        expect(change.locator("td").last).to_have_text("0.125")
        wait_until(lambda: page.evaluate("document.querySelector('.picture img').naturalWidth") == 60)
        page.get_by_text("settings", exact=True).click()
        expect(page.locator("table.settings")).to_contain_text("eval.temperature")


def test_only_a_small_p_is_marked(browser, root):  # noqa: F811
    report = make_evaluation(root / "other")
    for row, p in zip(report["comparisons"], (0.04, 0.05, None), strict=False):
        row["p"] = p
    (root / "other" / "evaluation.json").write_text(json.dumps(report))
    with served(root) as address:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{address}#/evaluation?name=other")
        cells = page.locator("table.differences tr[data-metric] td:last-child")
        expect(cells.first).to_have_text("0.040")
        assert cells.evaluate_all("all => all.slice(0, 3).map((cell) => cell.classList.contains('clear'))") == [
            True,
            False,
            False,
        ]
        context.close()


def test_a_page_of_nothing(browser, root):  # noqa: F811
    with served(root) as address:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{address}#/evaluation?name=../exam")
        expect(page.locator(".empty")).to_have_text("there is no run ../exam here")
        context.close()


def test_a_failed_run(browser, address):  # noqa: F811
    with opened(browser, address, "#/runs?run=failed") as page:
        row = page.locator('tr[data-run="failed"]')
        expect(row.locator(".state")).to_have_text("failed")
        expect(row.locator(".trouble")).to_have_text("KeyError: <b>no</b> answer")
        card = page.locator('[data-failure="failed"]')
        expect(card).to_contain_text("failed at step 4")
        expect(card.locator("p")).to_have_text("KeyError <b>no</b> answer")
        expect(card.locator("pre")).to_be_hidden()
        card.get_by_text("traceback").click()
        expect(card.locator("pre")).to_have_text("line 7\nKeyError")
        notes = page.locator('[data-notes="failed"]')
        expect(notes.locator("li").first).to_be_hidden()
        notes.locator("summary").click()
        expect(notes.locator("li")).to_have_text(["step 0note <i>0</i>", "step 3note <i>3</i>"])
        page.get_by_role("tab", name="Settings").click()
        expect(notes.locator("li").first).to_be_visible()  # stays open
        page.get_by_label("Show failed").uncheck()
        expect(page.locator(".failure, .notes")).to_have_count(0)
        assert page.locator("main b:text-is('no')").count() == 0


def test_hostile_names_in_reports(browser, tmp_path):  # noqa: F811
    make_evaluation(tmp_path / "exam", second=HOSTILE)
    report = json.loads((tmp_path / "exam" / "evaluation.json").read_text())
    report["data"] = report["models"][0]["model"] = HOSTILE
    report["settings"] = {HOSTILE: HOSTILE}
    (tmp_path / "exam" / "evaluation.json").write_text(json.dumps(report))
    make_ablation(tmp_path / "study", seeds=1)
    for file in ("plan.json", "ablation.json"):
        found = json.loads((tmp_path / "study" / file).read_text())
        found["recipe"] = found["arms"][0]["label"] = found["arms"][0]["part"] = HOSTILE
        (tmp_path / "study" / file).write_text(json.dumps(found))
    with served(tmp_path) as address, opened(browser, address) as page:
        for name, kind in (("exam", "evaluation"), ("study", "ablation")):
            page.goto(f"{address}#/{kind}?name={name}")
            expect(page.locator("h2")).to_have_text(name)
            expect(page.locator("main")).to_contain_text("⟨U+202E⟩gnihtemos")
            assert page.evaluate("window.owned") is None
            assert page.locator("main script, main style, main img:not(.picture img)").count() == 0
        assert page.evaluate("getComputedStyle(document.body).display") == "block"


def test_the_queue(browser, tmp_path, quick_jobs):  # noqa: F811
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    folder = f"{tmp_path.name}/recipe.yaml"
    with served(tmp_path) as address, opened(browser, address, f"#token={TOKEN}") as page:
        page.locator("nav").get_by_role("link", name="Lab", exact=True).click()
        page.get_by_label("Recipe").select_option(folder)
        expect(page.locator("form")).to_contain_text("Trains tiny")
        expect(page.get_by_role("switch", name="Overlong Filtering")).not_to_be_checked()
        page.get_by_label("steps").fill("5000")
        page.get_by_label("held-out prompts").fill("2")
        for count in range(1, 4):
            page.get_by_role("button", name="Start the run").click()
            expect(page.locator(".job")).to_have_count(count)
        queue = page.locator(".queue li")
        expect(page.locator(".queue h3")).to_have_text("Queue: 2 runs wait")
        assert [queue.nth(i).get_attribute("data-job") for i in (0, 1)] == ["lab-002", "lab-003"]
        expect(queue.first.locator(".sooner")).to_be_disabled()
        queue.nth(1).locator(".sooner").click()
        expect(queue.first).to_have_attribute("data-job", "lab-003")
        page.get_by_label("remove lab-002").click()
        expect(queue).to_have_count(1)
        first = page.locator('[data-job="lab-001"]')
        expect(first).to_contain_text(folder)
        expect(first).to_contain_text(re.compile(r"step [1-9]\d* of 5000"), timeout=180_000)
        first.get_by_role("button", name="stop").click()
        expect(first.locator(".state")).to_have_text("stopped", timeout=120_000)
        expect(page.locator('[data-job="lab-003"] .state')).to_have_text(re.compile("starting|running"))
        expect(queue).to_have_count(0)
    assert list((tmp_path / "lab-001" / "checkpoints").glob("step-*"))
    assert not (tmp_path / "lab-002").exists()


def test_a_click_on_stop_while_the_run_writes(browser, tmp_path):  # noqa: F811
    with served(tmp_path) as address, opened(browser, address, f"#token={TOKEN}") as page:
        page.locator("nav").get_by_role("link", name="Lab", exact=True).click()
        expect(page.get_by_role("button", name="Start the run")).to_be_enabled()
        expect(page.get_by_role("switch")).to_have_count(5)

        def says(tail):
            page.evaluate(
                """async (tail) => {
                    const names = performance.getEntriesByType("resource").map((entry) => entry.name);
                    const { store, tell } = await import(names.find((name) => name.includes("/store.js")));
                    store.jobs = [{ name: "lab-001", state: "running", recipe: "demo", place: null, tail }];
                    tell(new Set());
                }""",
                tail,
            )

        says("step 1")
        page.get_by_label("stop lab-001").hover()
        page.mouse.down()
        says("step 2")
        page.route(re.compile("/api/lab/stop"), lambda route: route.fulfill(json={}))
        with page.expect_request(re.compile("/api/lab/stop")):
            page.mouse.up()
        page.get_by_text("output").click()
        expect(page.locator(".job pre")).to_have_text("step 2")


def test_the_recipe_that_is_shown_is_the_one_that_starts(browser, tmp_path):  # noqa: F811
    """Of recipes that are chosen one after another, as with the arrow keys, the last one counts."""
    for name, steps in (("one", 11), ("two", 22)):
        (tmp_path / f"{name}.yaml").write_text(f"{RECIPE}train: {{steps: {steps}}}\n")
    with served(tmp_path) as address, opened(browser, address, f"#token={TOKEN}") as page:
        page.locator("nav").get_by_role("link", name="Lab", exact=True).click()
        expect(page.get_by_label("steps")).to_have_value("40")
        held = []
        page.route(re.compile(r"/api/lab\?"), lambda route: held.append(route))
        page.route(re.compile("/api/lab/start"), lambda route: route.fulfill(json={"name": "none"}))
        recipes = page.get_by_label("Recipe")
        for name in ("one", "two"):
            recipes.select_option(f"{tmp_path.name}/{name}.yaml")
        for route, name in zip(held, ("one", "two"), strict=True):
            with page.expect_response(re.compile(rf"/api/lab\?.*{name}\.yaml")):
                route.continue_()
        expect(recipes).to_have_value(f"{tmp_path.name}/two.yaml")
        expect(page.get_by_label("steps")).to_have_value("22")
        with page.expect_request(re.compile("/api/lab/start")) as asked:
            page.get_by_role("button", name="Start the run").click()
        assert asked.value.post_data_json["recipe"] == f"{tmp_path.name}/two.yaml"
        assert asked.value.post_data_json["steps"] == 22


def test_a_recipe_that_cannot_be_started_says_why(browser, tmp_path):  # noqa: F811
    (tmp_path / "part.yaml").write_text("model: {name: tiny}\n")
    with served(tmp_path) as address, opened(browser, address, f"#token={TOKEN}", refused=True) as page:
        lab = page.locator("nav").get_by_role("link", name="Lab", exact=True)
        lab.click()
        expect(page.get_by_role("switch")).to_have_count(5)
        page.get_by_label("Recipe").select_option(f"{tmp_path.name}/part.yaml")
        problem = page.locator("form > .problem")
        expect(problem).to_contain_text("data.train is not set")
        expect(page.get_by_role("switch")).to_have_count(0)  # those were the demo's
        with page.expect_response(re.compile(r"/api/lab\?")):
            page.get_by_role("button", name="Start the run").click()
        expect(problem).to_contain_text("data.train is not set")
        page.get_by_role("link", name="Runs", exact=True).click()
        lab.click()
        expect(page.get_by_label("Recipe")).to_have_value("demo")  # another can be chosen


@contextmanager
def shown_to_others(directory, lab=None):
    listening = socket.create_server(("127.0.0.1", 0))
    app = routes.create_app(Catalogue([directory]), lab, TOKEN, "0.0.0.0")
    instance = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1, lifespan="off"))
    thread = threading.Thread(target=instance.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    finally:
        instance.should_exit = True
        thread.join()


def test_a_board_shown_to_others(browser, root):  # noqa: F811
    with shown_to_others(root) as address:
        stranger = browser.new_context()
        page = stranger.new_page()
        assert page.goto(address).status == 403
        expect(page.locator("body")).to_have_text("this board needs a token: open it at the address that it printed\n")
        stranger.close()
        with opened(browser, address, f"?token={TOKEN}") as page:
            expect(page.locator('tr[data-run="failed"]')).to_contain_text("failed")
            assert TOKEN not in page.url
            assert page.evaluate("document.cookie") == ""  # a script cannot read it
            expect(page.locator("nav").get_by_role("link", name="Lab", exact=True)).to_be_hidden()
            page.reload()
            expect(page.locator('tr[data-run="failed"]')).to_contain_text("failed")
            page.goto(f"{address}#/lab")
            expect(page.locator("table.runs")).to_be_visible()
            expect(page.locator("form")).to_have_count(0)


def test_others_who_may_start_runs(browser, root):  # noqa: F811
    with shown_to_others(root, Launcher(root)) as address, opened(browser, address, f"?token={TOKEN}#/lab") as page:
        expect(page.get_by_role("button", name="Start the run")).to_be_enabled()
        assert page.url.endswith("/#/lab")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_long_names_fit(browser, address, size):  # noqa: F811
    """Nothing is wider than the screen, and a name that is cut has a tooltip with the whole."""
    name = f"{LONG}seed-1"
    views = {
        f"runs?run={name}": "table.runs tr.picked .long",
        f"runs?run={name}&tab=evaluations": ".grid.tables h3 .long",
        "ablation?name=study": "h2 .long",
        "evaluation?name=exam": "table.figures th:last-child .long",
        "lab": ".legend .key:last-child .long",
    }
    for view, wanted in views.items():
        with opened(browser, address, f"#/{view}", size=size) as page:
            found = page.locator(wanted).first
            expect(found).to_be_visible()
            page.wait_for_timeout(300)
            assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], view
            box = found.bounding_box()
            assert box["x"] >= 0, view
            assert box["x"] + box["width"] <= size["width"], view
            assert found.get_attribute("title") == found.text_content(), view
            for table in page.locator("table.runs, .grid.tables table, table.figures, table.differences").all():
                if table.is_visible():  # fits its card without scrolling
                    assert table.evaluate("t => t.scrollWidth - t.parentElement.clientWidth") <= 0, view


def test_the_engines_of_a_run_on_a_cluster(browser, tmp_path):  # noqa: F811
    run = make_run(tmp_path / "runs" / "cluster", **{"cluster.backend": "ray", "cluster.engines": 2})
    figures = {
        "queue": (12, 0),
        "version": (1233, 1234),
        "tokens_per_s": (1234.0, 56.0),
        "busy": (0.914, 1.0),
        "lost": (0, 2),
    }
    run.append_metrics(4, {f"engine/{i}/{name}": values[i] for name, values in figures.items() for i in (0, 1)})
    ranks = {"tokens": (51200, 49800), "busy": (0.5, 0.499), "memory_gib": (71.25, 70.0)}
    run.append_metrics(5, {f"rank/{i}/{name}": values[i] for name, values in ranks.items() for i in (0, 1)})
    make_run(tmp_path / "runs" / "plain")
    with served(tmp_path / "runs") as address, opened(browser, address, "#/runs?run=cluster") as page:
        page.get_by_role("tab", name="Cluster").click()
        rows = page.locator(".grid.tables tbody tr")
        expect(rows).to_have_count(4)
        expect(rows.nth(0).locator("td")).to_have_text(["0", "1.2 k", "91 %", "12", "1233", "0"])
        expect(rows.nth(1).locator("td")).to_have_text(["1", "56", "100 %", "0", "1234", "2"])
        expect(rows.nth(2).locator("td")).to_have_text(["0", "51.2 k", "50 %", "71.3"])
        expect(rows.nth(3).locator("td")).to_have_text(["1", "49.8 k", "50 %", "70.0"])
        page.get_by_label("Show cluster").uncheck()
        page.get_by_label("Show plain").check()
        expect(page.get_by_role("tab", name="Cluster")).to_have_count(0)
