"""Episodes in a real browser: the conversation, its colours, filters, search, hostile text, sizes and themes."""

import pytest
from board_episodes import ATTACK, SUM, call, episode, group_of_episodes, make_episode_run, write_forked
from board_runs import make_run
from test_browser import CHROMIUM, DESKTOP, PHONE, browser, drawn, expect, opened, served, wait_until  # noqa: F401

from dapo_rl.runs.directory import GroupRow

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="the browser tests need Chromium: apt-get install chromium"),
]
GROUP = "#/groups?run=a&step=1&draw=1"


@pytest.fixture
def runs(tmp_path):
    make_episode_run(tmp_path / "runs" / "a")
    return tmp_path / "runs"


@pytest.fixture
def address(runs):
    with served(runs) as url:
        yield url


def turns_of(page, sample):
    return page.locator(f'.detail [data-sample="{sample}"]').get_by_role("list", name="Conversation").locator(".turn")


def test_an_episode_is_a_conversation(browser, address):  # noqa: F811
    with opened(browser, address, GROUP) as page:
        turns = turns_of(page, 0)
        expect(turns).to_have_count(3)
        expect(turns.nth(0)).to_contain_text("turn 1")
        expect(turns.nth(0).locator(".call")).to_contain_text("calls calculator")
        expect(turns.nth(0).locator(".call dt")).to_have_text(["expression"])
        expect(turns.nth(0).locator(".call dd")).to_have_text(["12 * (3 + 4)"])
        expect(turns.nth(1)).to_contain_text("environment2 tokens · 0.8 s")
        expect(turns.nth(1)).to_contain_text("result of calculator")
        expect(turns.nth(1).locator("pre")).to_have_text(["84"])
        expect(turns.nth(2)).to_contain_text("turn 2")
        expect(turns.nth(2).locator(".chip.good")).to_have_text("reward +1.00")
        mistaken = page.locator('.detail [data-sample="1"]')
        expect(mistaken.locator(".facts")).to_contain_text("3 turns · 3 tool calls · 6.5 s in the environment")
        expect(mistaken.locator(".facts .chip")).to_have_text("1 tool error")
        expect(mistaken).to_contain_text("out of turns")
        first, _, both, *_ = turns_of(page, 1).all()
        expect(first.locator(".chip.bad")).to_have_text("reward −0.50")
        expect(first.locator(".call pre")).to_have_text(['{"expression": 12 *'])  # as it was written
        expect(both.locator(".call")).to_have_count(2)
        expect(both.locator(".call").nth(0).locator("dd")).to_contain_text("for i in range(3):\n    x += i")
        expect(both.locator(".call").nth(1).locator("dt")).to_have_text(["query", "limit"])
        page.goto(f"{address}#/groups?run=a&step=1&draw=2")
        expect(page.locator(".detail .sample")).to_contain_text("3 tokens")
        expect(page.locator(".talk")).to_have_count(0)


def test_the_policys_tokens_are_coloured_and_the_environments_are_grey(browser, address):  # noqa: F811
    with opened(browser, address, GROUP) as page:
        mine, theirs = turns_of(page, 0).nth(0), turns_of(page, 0).nth(1)
        expect(mine).to_contain_text("turn 1")
        assert mine.locator(".tok.warm").count() > 10
        assert "log p" in mine.locator(".tok").nth(1).get_attribute("title")
        assert theirs.locator(".tok").count() == 0
        theirs.get_by_text("as tokens").click()
        expect(theirs.locator(".tok")).to_have_text(["8", "4"])
        assert theirs.locator(".tok:is(.warm, .good, .bad, .violet)").count() == 0
        assert "log p" not in theirs.locator(".tok").first.get_attribute("title")
        colour = "element => getComputedStyle(element).color"
        muted, ink = theirs.locator(".tok").first.evaluate(colour), mine.locator(".tok").first.evaluate(colour)
        assert muted != ink
        page.get_by_label("Colour tokens by").select_option("advantage")
        assert mine.locator(".tok.good").count() == mine.locator(".tok").count()
        theirs.get_by_text("as tokens").click()
        assert theirs.locator(".tok.good").count() == 0
        page.get_by_label("Colour tokens by").select_option("none")
        expect(mine.locator(".tok")).to_have_count(0)
        expect(mine.locator("> pre")).to_have_text("I ask.\n")  # without the call, which follows
        expect(mine.locator(".call dd")).to_have_text(["12 * (3 + 4)"])


def test_samples_are_filtered_by_tool_error_and_turns(browser, address):  # noqa: F811
    with opened(browser, address, "#/groups?run=a&step=1&list=samples") as page:
        rows = page.locator(".list .group")
        expect(rows).to_have_count(4)
        expect(rows.nth(1)).to_contain_text("3 turns · 3 tool calls · 1 tool error")
        tools = page.get_by_role("group", name="Tools")
        tools.get_by_role("button", name="calculator 2").click()
        expect(rows).to_have_count(2)
        tools.get_by_role("button", name="tool errors 2").click()
        expect(rows).to_have_count(1)
        tools.get_by_role("button", name="calculator 2").click()
        expect(rows).to_have_count(2)
        page.get_by_label("Least turns").fill("3")
        expect(rows).to_have_count(1)
        expect(rows.first).to_have_attribute("data-key", "1.1")
        tools.get_by_role("button", name="tool errors 2").click()
        page.get_by_label("Least turns").fill("")
        page.get_by_label("Sort samples by").select_option("turns")
        expect(rows.first).to_have_attribute("data-key", "2.0")


def test_single_turns_have_no_filters_of_episodes(browser, runs, address):  # noqa: F811
    make_run(runs / "plain")
    with opened(browser, address, "#/groups?run=plain&step=1&list=samples") as page:
        expect(page.locator(".list .group")).to_have_count(4)
        expect(page.get_by_label("Least turns")).to_be_hidden()
        expect(page.get_by_role("group", name="Tools").locator("button")).to_have_count(0)


def test_the_search_marks_what_was_said(browser, address):  # noqa: F811
    with opened(browser, address, GROUP) as page:
        expect(turns_of(page, 1)).to_have_count(5)
        page.get_by_label("Search", exact=True).fill("parentheses")
        expect(page.locator(".occurrences .hint")).to_have_text("4 matches")
        expect(turns_of(page, 1).nth(3).locator("mark")).to_have_count(4)
        page.get_by_label("Search", exact=True).fill("order of")  # in tokens and in arguments, but marked once
        expect(page.locator(".occurrences .hint")).to_have_text("1 match")
        page.get_by_label("Colour tokens by").select_option("none")
        expect(page.locator(".occurrences .hint")).to_have_text("1 match")
        expect(turns_of(page, 1).nth(2).locator(".call mark")).to_have_text(["order of"])


def test_long_turns_are_drawn_in_parts(browser, runs, address):  # noqa: F811
    run = make_episode_run(runs / "long")
    calls = [call("python", {"code": "y" * 4987 + ' print("out")'})]
    long = [
        {"role": "assistant", "content": "1+2=3;" * 400},
        {"role": "user", "content": "z" * 3000 + " the end"},
        {"role": "assistant", "content": "5+6=11", "tool_calls": calls},
    ]
    whole = episode(long).replace(text="only the messages have what is searched")
    run.write_rollouts(1, [GroupRow(group_of_episodes(1, whole), "kept")], 0)
    with opened(browser, address, "#/groups?run=long&step=1&draw=1") as page:
        first, answer, last = (turns_of(page, 0).nth(n) for n in range(3))
        expect(first.locator(".tok")).to_have_count(1500)
        expect(last.locator(".tok")).to_have_count(0)
        first.get_by_role("button", name="more token").click()
        expect(first.locator(".tok")).to_have_count(2400)
        expect(answer).not_to_contain_text("the end")
        answer.get_by_role("button", name="show 1,008 more characters").click()
        expect(answer).to_contain_text("the end")
        expect(last.get_by_role("button", name="show 3,000 more characters")).to_be_visible()
        page.get_by_label("Search", exact=True).fill("the end")
        expect(answer.locator("mark")).to_have_text(["the end"])
        page.get_by_label("Colour tokens by").select_option("none")
        page.get_by_label("Search", exact=True).fill('print("out")')
        expect(last.locator(".call mark")).to_have_text(['print("out")'])


def test_hostile_text_stays_text(browser, address):  # noqa: F811
    with opened(browser, address, "#/groups?run=a&step=1&draw=3&list=samples") as page:
        expect(turns_of(page, 0)).to_have_count(3)
        for colouring in ("logp", "none"):
            page.get_by_label("Colour tokens by").select_option(colouring)
            expect(turns_of(page, 0).nth(0).locator(".call")).to_have_count(2)
            turns_of(page, 0).nth(1).get_by_text("as tokens").click()
            text = page.locator(".talk").inner_text()
            assert text.count("<script>window.owned = 1</script>") >= 6
            assert "⟨U+202E⟩" in text
            assert not any(character in text for character in "\u202e\u200b\x00\x1b")
        expect(page.get_by_role("group", name="Tools").locator("button")).to_have_count(6)
        page.get_by_role("group", name="Tools").locator("button", has_text="<script>").click()
        expect(page.locator(".list .group")).to_have_count(1)
        assert page.locator("main img, main script, main style").count() == 0
        assert page.evaluate("window.owned") is None


def test_an_episode_that_forked_is_one_conversation_after_another(browser, runs, address):  # noqa: F811
    run = make_episode_run(runs / "forked")
    write_forked(run)
    with opened(browser, address, "#/groups?run=forked&step=1&draw=1") as page:
        turns, begun = turns_of(page, 0), page.locator(".detail .trajectory")
        expect(begun.locator("b")).to_have_text([f"trajectory {n} of 3" for n in (1, 2, 3)])
        expect(turns.locator(".line > b")).to_have_text([
            *("turn 1", "environment", "turn 2", "environment", "turn 3"), "turn 4",
            *("turn 5", "environment", "turn 6"),
        ])  # fmt: skip
        order = "elements => elements.map(e => e.className.split(' ')[0])"
        assert page.locator(".talk > li").evaluate_all(order) == [
            "trajectory", *["turn"] * 5, "trajectory", "turn", "trajectory", *["turn"] * 3,
        ]  # fmt: skip
        begun.nth(1).get_by_text("prompt").click()
        expect(begun.nth(1).locator("pre")).to_contain_text("Answer: 15")
        page.get_by_label("Search", exact=True).fill("parentheses")
        expect(turns.nth(3).locator("mark")).to_have_count(4)


def test_hostile_text_of_a_fork_stays_text(browser, runs, address):  # noqa: F811
    write_forked(make_episode_run(runs / "forked"), ATTACK)
    with opened(browser, address, "#/groups?run=forked&step=1&draw=1") as page:
        for colouring in ("logp", "none"):
            page.get_by_label("Colour tokens by").select_option(colouring)
            page.locator(".detail .trajectory").nth(1).get_by_text("prompt").click()
            text = page.locator(".talk").inner_text()
            assert text.count("<script>window.owned = 1</script>") >= 6
            assert "⟨U+202E⟩" in text
            assert not any(character in text for character in "\u202e\u200b\x00\x1b")
        assert page.locator("main img, main script, main style").count() == 0
        assert page.evaluate("window.owned") is None


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_conversation_fits(browser, address, size, theme):  # noqa: F811
    with opened(browser, address, size=size, theme=theme) as page:
        for view in ("list=samples", "draw=1", "draw=3", "a=1.1.0&b=1.1.1"):
            page.goto(f"{address}#/groups?run=a&step=1&{view}")
            shown = ".list .group" if "list" in view else ".compare .turn" if "b=" in view else ".detail .turn"
            expect(page.locator(f"{shown} >> visible=true").first).to_be_visible()
            page.wait_for_timeout(300)
            assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], view
            inside = "elements => elements.every(e => e.scrollWidth <= e.clientWidth + 1)"
            assert page.locator(".episode .text").evaluate_all(inside), view


def test_two_episodes_side_by_side(browser, address):  # noqa: F811
    with opened(browser, address, "#/groups?run=a&step=1&a=1.1.0&b=1.1.1") as page:
        pair = page.locator(".compare .sample")
        expect(pair).to_have_count(2)
        expect(pair.nth(0).locator(".turn")).to_have_count(3)
        expect(pair.nth(1).locator(".turn")).to_have_count(5)
        assert pair.nth(1).locator(".tok.different").count() > 50


def test_a_critics_chart_points_at_the_tokens_of_a_turn(browser, runs, address):  # noqa: F811
    run = make_episode_run(runs / "critic")
    whole = episode(SUM)
    values = [i / 100 for i in range(len(whole.token_ids))]
    credited = whole.replace(values=values, advantages=values, scalars={"reward": 1.0, "length_penalty": 0.0})
    run.write_rollouts(1, [GroupRow(group_of_episodes(1, credited), "kept")], 0)
    with opened(browser, address, "#/groups?run=critic&step=1&draw=1") as page:
        last = turns_of(page, 0).nth(2).locator(".tok").last
        last.hover()
        expect(last).to_have_class("tok warm pointed")
        expect(page.locator(".credit .reading")).to_contain_text(f"value +{values[-1]:.2f}")
        area = page.locator(".credit .area").bounding_box()
        page.mouse.move(area["x"] + area["width"] - 1, area["y"] + 5)
        expect(last).to_have_class("tok warm pointed")
        page.mouse.move(area["x"] + 1, area["y"] + 5)
        expect(turns_of(page, 0).nth(0).locator(".tok").first).to_have_class("tok warm pointed")


def test_curves_of_episodes(browser, runs, address):  # noqa: F811
    with opened(browser, address, "#/runs?run=a") as page:
        for metric in ("env/turns", "env/tool_calls", "env/tool_errors", "env/wait_s", "env/forks", "env/failed"):
            wait_until(lambda metric=metric: drawn(page, metric) > 20)
        expect(page.locator('[data-metric="env/wait_s"] .value')).to_have_text(["1.25"])
    make_run(runs / "b")
    (runs / "a" / "metrics.jsonl").unlink()
    with opened(browser, address) as page:
        wait_until(lambda: drawn(page, "acc/mean") > 20)
        expect(page.locator('[data-metric="env/turns"]')).to_be_hidden()
