"""Windows of pass rates: which prompts they leave, and what is said of files that have none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_rl.config import Config, DataSettings, SourceSettings
from dapo_rl.data import PromptSet, build_prompts, held_out_prompts, load_rows, stream_of, training_prompts
from dapo_rl.errors import UserError

RATES = [0.0, 0.1, 0.5, 0.9, 1.0]


class Endless:
    """Rows without a length."""

    def __init__(self, rows):
        self._rows = rows

    def __iter__(self):
        return iter(self._rows)


def rows(rates=RATES, key="pass_rate"):
    return [{"prompt": f"p{n}", key: rate} for n, rate in enumerate(rates)]


def build(source, tokenizer, **settings) -> PromptSet:
    return build_prompts(load_rows(source), tokenizer, DataSettings(**settings))


def texts(prompts):
    return [prompt.text for prompt in prompts]


def test_a_window_includes_its_bounds_and_is_reported(plain_tokenizer):
    found = build(rows(), plain_tokenizer, pass_rate=(0.1, 0.9))
    assert texts(found.prompts) == ["p1", "p2", "p3"]
    assert [prompt.id for prompt in found.prompts] == ["1", "2", "3"]
    assert found.report() == "data.train: 3 of 5 prompts with a pass rate in data.pass_rate 0.1–0.9"
    assert found.counts() == {"train_prompts": 3, "too_long": 0, "bad_rows": 0, "outside_pass_rate": 2}
    everything = build(rows(), plain_tokenizer)
    assert texts(everything.prompts) == ["p0", "p1", "p2", "p3", "p4"]
    assert everything.report() is None
    assert "outside_pass_rate" not in everything.counts()


@given(st.lists(st.integers(0, 8), min_size=1, max_size=20), st.integers(0, 8), st.integers(0, 8))
def test_a_stream_and_a_list_leave_the_same_prompts(plain_tokenizer, right, low, high):
    """Texts such as 3/8 are POLARIS's pass rates."""
    source = rows([f"{n}/8" for n in right], "difficulty")
    window = (min(low, high) / 8, max(low, high) / 8)
    settings = DataSettings(pass_rate=window, pass_rate_key="difficulty")
    expected = [f"p{at}" for at, n in enumerate(right) if window[0] <= n / 8 <= window[1]]
    if not expected:
        for each in (source, Endless(source)):
            with pytest.raises(UserError, match=r"outside data\.pass_rate .* can be widened"):
                training_prompts(each, plain_tokenizer, settings)
        return
    assert texts(training_prompts(source, plain_tokenizer, settings).prompts) == expected
    stream = stream_of(training_prompts(Endless(source), plain_tokenizer, settings), 0)
    assert [stream.draw().text for _ in range(2 * len(expected))] == expected * 2
    resumed = stream_of(training_prompts(Endless(source), plain_tokenizer, settings), 0)
    resumed.restore(stream.state())
    assert resumed.counts() == stream.counts()
    assert resumed.draw().text == stream.draw().text == expected[0]
    assert stream.counts()["outside_pass_rate"] + stream.counts()["train_prompts"] >= 2 * len(right)


def test_a_nested_column_whose_name_has_dots(plain_tokenizer):
    source = [{"prompt": str(rate), "extra_info": {"rates": {"Qwen-1.5B": rate}}} for rate in RATES]
    found = build(source, plain_tokenizer, pass_rate=(0.2, 0.6), pass_rate_key="extra_info.rates.Qwen-1.5B")
    assert texts(found.prompts) == ["0.5"]


def test_held_out_prompts_need_no_pass_rate(plain_tokenizer):
    settings = DataSettings(pass_rate=(0.4, 0.6))
    assert len(held_out_prompts([{"prompt": "p"}], plain_tokenizer, settings, False, None).prompts) == 1


def test_each_source_of_a_list_says_what_is_left(plain_tokenizer, tmp_path):
    paths = []
    for name, rates in (("a", "0.5, 1"), ("b", "0.1, 0.6, 0.7")):
        paths.append(str(tmp_path / f"{name}.jsonl"))
        lines = (f'{{"prompt": "{rate}", "pass_rate": {rate}}}\n' for rate in rates.split(", "))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    listed = [SourceSettings(source=path, weight=1) for path in paths]
    found = training_prompts(listed, plain_tokenizer, DataSettings(pass_rate=(0.5, 0.65)))
    assert texts(found.prompts) == ["0.5", "0.6"]
    assert found.report().splitlines() == [
        f"data.train: {paths[0]}: 1 of 2 prompts with a pass rate in data.pass_rate 0.5–0.65",
        f"data.train: {paths[1]}: 1 of 3 prompts with a pass rate in data.pass_rate 0.5–0.65",
    ]
    assert found.counts()["outside_pass_rate"] == 3
    with pytest.raises(UserError, match=r"b\.jsonl: none of 3 rows gives a prompt: 3 prompts have pass rates outside"):
        training_prompts(paths, plain_tokenizer, DataSettings(pass_rate=(0.9, 1)))


def test_a_file_without_pass_rates(plain_tokenizer, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "p", "difficulty": 3}\n')
    for source in (path, Endless([{"prompt": "p", "difficulty": 3}])):
        with pytest.raises(UserError) as caught:
            training_prompts(source, plain_tokenizer, DataSettings(pass_rate=(0, 1)))
        assert str(caught.value).startswith("data.pass_rate: data.train")
        for part in ("no column 'pass_rate'", "--scores", "data.pass_rate_key names another of prompt, difficulty"):
            assert part in str(caught.value)


def test_a_row_without_a_pass_rate_is_skipped_and_named(plain_tokenizer):
    found = build([*rows([0.5, None]), {"prompt": "q"}], plain_tokenizer, pass_rate=(0, 1))
    assert texts(found.prompts) == ["p0"]
    assert [row.where for row in found.bad] == ["row 1", "row 2"]
    assert "data.pass_rate_key" in found.bad[0].why


def test_a_missing_value_of_pandas_is_no_pass_rate(plain_tokenizer):
    found = build(rows([0.5, float("nan")]), plain_tokenizer, pass_rate=(0, 1))
    assert (texts(found.prompts), [row.where for row in found.bad]) == (["p0"], ["row 1"])
    with pytest.raises(UserError, match="has no column 'pass_rate'"):
        build(rows([float("nan")] * 2), plain_tokenizer, pass_rate=(0, 1))


@pytest.mark.parametrize("value", [1.5, -0.1, 12, 10**400, True, "many", "3/0", float("inf"), "nan", [0.5]])
def test_what_is_no_pass_rate(plain_tokenizer, value):
    with pytest.raises(UserError, match=r"data\.pass_rate_key: row 1: 'pass_rate' is .*, not a pass rate from 0 to 1"):
        build(rows([0.5, value]), plain_tokenizer, pass_rate=(0, 1))


@pytest.mark.parametrize("window", ["[0.9, 0.1]", "[-0.1, 0.5]", "[0.5, 1.1]", "[.nan, 1]"])
def test_what_is_no_window(window):
    with pytest.raises(UserError, match=r"data\.pass_rate[.:]"):
        Config.load(None, [f"data.pass_rate={window}"])
