import json
import os
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import ids

from dapo_rl.config import DataSettings, SourceSettings
from dapo_rl.data import build_prompts, chat, copies, load_rows, once_each
from dapo_rl.data.chat import PromptReader
from dapo_rl.errors import UserError

USER = {"role": "user", "content": "1+1?"}
VERL = {
    "data_source": "math_dapo",
    "prompt": [USER],
    "ability": "MATH",
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"index": 5, "split": None},
}


def build(rows, tokenizer, **data):
    return build_prompts(load_rows(rows), tokenizer, DataSettings(**data))


def one(row, tokenizer, **data):
    (prompt,) = build([row], tokenizer, **data).prompts
    return prompt


def characters(text):
    """The ids of plain characters by the vocabulary's rule: newline is 3, space 4, and so on."""
    return tuple(3 if c == "\n" else ord(c) - 28 for c in text)


class TestText:
    def test_a_string_stays_plain_with_the_special_tokens_of_the_tokenizer(self, plain_tokenizer, chat_tokenizer):
        for tokenizer in (plain_tokenizer, chat_tokenizer):
            prompt = one({"prompt": "3+8=?\n", "answer": "11"}, tokenizer)
            assert prompt.text == "3+8=?\n"
            assert ids(prompt) == (1, *characters("3+8=?\n"))
            assert prompt.messages is None

    def test_an_eos_that_the_tokenizer_appends_goes_and_one_in_the_text_stays(self, make_tokenizer):
        closing = make_tokenizer(closes_with_eos=True)
        assert closing("a")["input_ids"] == [1, *characters("a"), 2]
        assert ids(one({"prompt": "a"}, closing)) == (1, *characters("a"))
        assert ids(one({"prompt": "a</s>"}, make_tokenizer())) == (1, *characters("a"), 2)

    @pytest.mark.slow
    def test_messages_take_the_template_and_no_second_bos(self, chat_tokenizer):
        prompt = one({"prompt": [USER]}, chat_tokenizer)
        assert prompt.text == "<s>[user]1+1?</s>[assistant]"
        assert ids(prompt) == (1, *characters("[user]1+1?"), 2, *characters("[assistant]"))
        assert prompt.messages == (USER,)

    def test_a_last_message_by_the_assistant_is_continued(self, chat_tokenizer):
        prompt = one({"prompt": [USER, {"role": "assistant", "content": "Well,"}]}, chat_tokenizer)
        assert prompt.text == "<s>[user]1+1?</s>[assistant]Well,"

    def test_always_makes_a_string_one_message(self, chat_tokenizer):
        prompt = one({"prompt": "1+1?"}, chat_tokenizer, chat_template="always")
        assert (prompt.text, prompt.messages) == ("<s>[user]1+1?</s>[assistant]", None)

    def test_never_joins_messages_with_a_blank_line(self, chat_tokenizer):
        row = {"prompt": [{"role": "system", "content": "Be brief."}, USER]}
        prompt = one(row, chat_tokenizer, chat_template="never")
        assert prompt.text == "Be brief.\n\n1+1?"
        assert ids(prompt) == (1, *characters("Be brief.\n\n1+1?"))

    def test_a_system_prompt_is_a_message_with_a_template_and_a_paragraph_without(
        self, plain_tokenizer, chat_tokenizer
    ):
        assert one({"prompt": "1+1?"}, chat_tokenizer, system_prompt="Think.").text == (
            "<s>[system]Think.</s>[user]1+1?</s>[assistant]"
        )
        assert one({"prompt": "1+1?"}, plain_tokenizer, system_prompt="Think.").text == "Think.\n\n1+1?"
        never = one({"prompt": [USER]}, chat_tokenizer, system_prompt="Think.", chat_template="never")
        assert never.text == "Think.\n\n1+1?"

    def test_a_system_message_of_the_data_stays_and_none_is_added(self, chat_tokenizer):
        own = {"role": "system", "content": "Own."}
        prompt = one({"prompt": [own, USER]}, chat_tokenizer, system_prompt="Think.")
        assert prompt.text == "<s>[system]Own.</s>[user]1+1?</s>[assistant]"
        added = one({"prompt": [USER]}, chat_tokenizer, system_prompt="Think.")
        assert added.messages == ({"role": "system", "content": "Think."}, USER)

    @pytest.mark.parametrize(
        ("row", "mode", "what"),
        [({"prompt": [USER]}, "auto", "the prompts are chat messages"), ({"prompt": "a"}, "always", "=always")],
    )
    def test_a_missing_template_is_one_line(self, plain_tokenizer, row, mode, what):
        with pytest.raises(UserError, match=rf"{what}, but the tokenizer has no chat template; .*=never"):
            one(row, plain_tokenizer, chat_template=mode)

    def test_a_template_that_refuses_a_row_is_a_reason(self, make_tokenizer):
        strict = make_tokenizer(
            "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}ok"
        )
        rows = [{"prompt": [{"role": "system", "content": "x"}, USER]}, {"prompt": [USER]}]
        built = build(rows, strict)
        assert [p.id for p in built.prompts] == ["1"]
        assert [str(b) for b in built.bad] == ["row 0: the chat template rejects it: System role not supported"]


class TestColumns:
    def test_verl_loads_as_it_is(self, chat_tokenizer):
        prompt = one(VERL, chat_tokenizer)
        assert (prompt.id, prompt.answer, prompt.data_source) == ("0", "2", "math_dapo")
        assert prompt.columns == {k: v for k, v in VERL.items() if k != "prompt"}

    @pytest.mark.parametrize(
        ("row", "key", "answer"),
        [
            ({"reward_model": {"ground_truth": "a"}, "answer": "b"}, None, "a"),
            ({"ground_truth": "d", "solution": "c", "answer": "b"}, None, "b"),
            ({"ground_truth": "d", "solution": "c"}, None, "c"),
            ({"ground_truth": "d", "answer": None}, None, "d"),
            ({"reward_model": "no mapping", "answer": "b"}, None, "b"),
            ({"other": "x"}, None, None),
            ({"answer": float("nan")}, None, None),
            ({"answer": "b", "extra": {"deep": {"er": "e"}}}, "extra.deep.er", "e"),
            ({"a.b": "dotted name", "a": {"b": "inner"}}, "a.b", "dotted name"),
            ({"final": None}, "final", None),
            ({"answer": 72}, None, "72"),
            ({"answer": 0.5}, None, "0.5"),
            ({"answer": ["x", 1]}, None, "['x', 1]"),
            ({"answer": "so 2.\n#### 1,234,567"}, None, "1234567"),
            ({"answer": "#### 3\nno:\n####  -4 \r\n"}, None, "-4"),
            ({"answer": "#### (1,2)"}, None, "(1,2)"),
            ({"answer": "no mark: #### 5"}, None, "no mark: #### 5"),
        ],
    )
    def test_where_the_answer_is(self, plain_tokenizer, row, key, answer):
        assert one({"prompt": "p", **row}, plain_tokenizer, answer_key=key).answer == answer

    def test_where_the_prompt_is(self, plain_tokenizer):
        both = {"question": "q", "problem": "p"}
        assert one(both, plain_tokenizer).text == "q"
        assert one({"problem": "p"}, plain_tokenizer).text == "p"
        assert one({"prompt": None, **both}, plain_tokenizer).text == "q"
        assert one({"prompt": "x", **both}, plain_tokenizer, prompt_key="problem").text == "p"
        assert (
            one({"prompt": "x", "extra_info": {"raw": "r"}}, plain_tokenizer, prompt_key="extra_info.raw").text == "r"
        )

    def test_every_column_but_the_prompt_is_handed_on(self, plain_tokenizer):
        assert one({"prompt": "p", "question": "q", "n": 1}, plain_tokenizer).columns == {"question": "q", "n": 1}
        named = one({"question": "q", "prompt": "x"}, plain_tokenizer, prompt_key="question")
        assert named.columns == {"question": "q", "prompt": "x"}

    def test_the_source_stands_in_for_a_data_source(self, plain_tokenizer, tmp_path):
        path = tmp_path / "mine.jsonl"
        path.write_text('{"prompt": "a"}\n')
        assert one({"prompt": "a"}, plain_tokenizer).data_source == ""
        (prompt,) = build_prompts(load_rows(str(path)), plain_tokenizer, DataSettings()).prompts
        assert prompt.data_source == str(path)


class TestReport:
    BAD = (
        ({"prompt": ""}, "'prompt' is empty"),
        ({"prompt": "  \n"}, "'prompt' is empty"),
        ({"prompt": []}, "'prompt' is empty"),
        ({"prompt": [{"role": "user", "content": ""}]}, "'prompt' is empty"),
        ({"prompt": 5}, "'prompt' is a int, not a string or a list of messages"),
        ({"prompt": {"role": "user"}}, "'prompt' is a dict, not a string or a list of messages"),
        ({"prompt": ["a"]}, "message 0 of 'prompt' is a str, not {role, content}"),
        ({"prompt": [USER, {"role": "user"}]}, "message 1 of 'prompt' has no text as its 'content'"),
        ({"prompt": [{"role": None, "content": "a"}]}, "message 0 of 'prompt' has no text as its 'role'"),
        ({"text": "a", "n": 1}, "no 'prompt' column; it has text, n"),
        ({}, "no 'prompt' column; it has no column at all"),
    )

    def test_every_bad_row_has_its_reason(self, chat_tokenizer):
        built = build([*(row for row, _ in self.BAD), {"prompt": "fine"}], chat_tokenizer)
        assert [p.id for p in built.prompts] == [str(len(self.BAD))]
        assert [b.why for b in built.bad] == [why for _, why in self.BAD]

    def test_a_named_answer_column_that_is_missing_is_a_reason(self, plain_tokenizer):
        built = build([{"prompt": "a", "gold": "1"}, {"prompt": "b"}], plain_tokenizer, answer_key="gold")
        assert [p.answer for p in built.prompts] == ["1"]
        assert [str(b) for b in built.bad] == ["row 1: no 'gold' column (data.answer_key); it has prompt"]

    def test_nothing_to_report(self, plain_tokenizer):
        assert build([{"prompt": "a"}], plain_tokenizer).report() is None

    def test_the_report_has_ten_lines_and_a_count(self, plain_tokenizer, tmp_path):
        lines = ['{"x": 1}', "{", *['{"prompt": ""}'] * 11, '{"prompt": "abc"}', *['{"prompt": "abcd"}'] * 2]
        path = tmp_path / "f.jsonl"
        path.write_text("\n".join(lines))
        # One token for `<s>`, then one for each character.
        built = build_prompts(load_rows(path, key="data.eval"), plain_tokenizer, DataSettings(max_prompt_tokens=4))
        assert [(p.id, p.text) for p in built.prompts] == [("14", "abc")]
        assert built.too_long == 2
        report = built.report().split("\n")
        assert report[0] == ("data.eval: 13 of 16 rows skipped, 2 prompts over data.max_prompt_tokens 4 dropped")
        assert report[1] == "  f.jsonl:1: no 'prompt' column; it has x"
        assert report[2].startswith("  f.jsonl:2: not valid JSON")
        assert report[10:] == ["  f.jsonl:10: 'prompt' is empty", "  and 3 more"]

    def test_no_prompt_at_all_is_one_line(self, plain_tokenizer, tmp_path):
        path = tmp_path / "f.jsonl"
        path.write_text('{"x": 1}\n' * 5 + '{"prompt": "abcd"}\n')
        with pytest.raises(UserError) as caught:
            build_prompts(load_rows(path), plain_tokenizer, DataSettings(max_prompt_tokens=4))
        assert str(caught.value) == (
            f"data.train: {path}: none of 6 rows gives a prompt: 1 prompt is over data.max_prompt_tokens 4; "
            "5 rows are bad: f.jsonl:1: no 'prompt' column; it has x; f.jsonl:2: no 'prompt' column; it has x; "
            "f.jsonl:3: no 'prompt' column; it has x; …"
        )
        path.write_text("\n")
        with pytest.raises(UserError, match=r"f\.jsonl: no rows$"):
            build_prompts(load_rows(path), plain_tokenizer, DataSettings())

    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["role", "content", "ground_truth", "x"]), inner, max_size=3)
        ),
        max_leaves=8,
    )
    names = st.sampled_from(["prompt", "question", "answer", "reward_model", "data_source", "extra_info", "x"])

    @pytest.mark.slow
    @settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        st.lists(st.dictionaries(names, values, max_size=4), max_size=4),
        st.sampled_from(["auto", "always", "never"]),
        st.sampled_from([None, "System."]),
    )
    def test_whatever_the_values_a_row_is_a_prompt_or_a_reason(self, tmp_path, chat_tokenizer, rows, mode, system):
        path = tmp_path / "fuzz.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in [*rows, {"prompt": "fine"}]))
        built = build_prompts(
            load_rows(path),
            chat_tokenizer,
            DataSettings(chat_template=mode, system_prompt=system, max_prompt_tokens=40),
        )
        used = [int(p.id) for p in built.prompts] + [b.number for b in built.bad]
        assert len(set(used)) == len(used) == len(rows) + 1 - built.too_long
        for prompt in built.prompts:
            assert 0 < len(prompt.token_ids) <= 40
            assert prompt.answer is None or type(prompt.answer) is str
        assert (built.report() is None) == (len(built.prompts) == len(rows) + 1)


class TestRealData:
    @pytest.mark.slow
    def test_gsm8k(self, shared_file, plain_tokenizer):
        rows = load_rows(shared_file("gsm8k-test.jsonl"))
        built = build_prompts(rows, plain_tokenizer, DataSettings(prompt_key="question", max_prompt_tokens=2048))
        assert (len(built.prompts), built.report(), copies(built.prompts)) == (1319, None, 1)
        first = built.prompts[0]
        assert first.text.startswith("Janet’s ducks lay 16 eggs per day.")
        assert (first.id, first.answer) == ("1", "18")
        assert first.columns["answer"].endswith("#### 18")
        assert all(re.fullmatch(r"-?\d+(\.\d+)?", p.answer) for p in built.prompts)
        assert built.prompts == build_prompts(rows, plain_tokenizer, DataSettings(max_prompt_tokens=2048)).prompts

    def test_gsm8k_thousands(self, shared_file, plain_tokenizer):
        rows = load_rows(shared_file("gsm8k-train.jsonl"))
        marked = [r.columns["answer"].split("#### ")[1] for r in rows.good]
        commas = [at for at, answer in enumerate(marked) if "," in answer]
        assert (len(rows.good), len(commas)) == (7473, 79)
        few = load_rows([rows.good[at].columns for at in commas])
        answers = [p.answer for p in build_prompts(few, plain_tokenizer, DataSettings()).prompts]
        assert answers == [marked[at].replace(",", "") for at in commas]

    def test_aime_in_the_format_of_verl(self, shared_file, chat_tokenizer):
        rows = load_rows(shared_file("aime-2024.parquet"))
        built = build_prompts(rows, chat_tokenizer, DataSettings(max_prompt_tokens=4096))
        assert (len(built.prompts), built.report()) == (960, None)
        first = built.prompts[0]
        assert (first.id, first.answer, first.data_source) == ("0", "540", "math_dapo")
        assert first.text.startswith("<s>[user]Solve the following math problem step by step.")
        assert first.text.endswith('after "Answer:".</s>[assistant]')
        assert first.messages[0]["role"] == "user"
        assert first.columns["reward_model"] == {"ground_truth": "540", "style": "rule-lighteval/MATH_v2"}
        assert first.columns["extra_info"]["index"] == 2
        assert set(first.columns) == {"data_source", "ability", "reward_model", "extra_info"}
        assert copies(built.prompts) == 32
        assert copies(built.prompts[:-1]) == 1
        problems = once_each(built.prompts)
        assert (len(problems), len({p.text for p in problems}), problems[0]) == (30, 30, built.prompts[0])


def test_arithmetic_from_end_to_end(plain_tokenizer):
    rows = load_rows(SourceSettings(source="arithmetic", size=8))
    built = build_prompts(rows, plain_tokenizer, DataSettings())
    assert [p.id for p in built.prompts] == [str(n) for n in range(8)]
    for prompt in built.prompts:
        assert prompt.answer == str(eval(prompt.text.removesuffix("=?\n")))
        assert (prompt.data_source, ids(prompt)) == ("arithmetic", (1, *characters(prompt.text)))


def test_copies_are_what_every_count_is_a_multiple_of(plain_tokenizer):
    def of(texts):
        return copies(build([{"prompt": text} for text in texts], plain_tokenizer).prompts)

    assert [of("aabb"), of("aabbbb"), of("aab"), of("abc"), copies([])] == [2, 2, 1, 1, 1]
    same_text = [{"prompt": "a", "answer": answer} for answer in ("1", "2")]
    assert copies(build(same_text, plain_tokenizer).prompts) == 1


def test_problems_once_each_in_the_order_of_the_file(plain_tokenizer):
    def of(texts):
        return "".join(p.text for p in once_each(build([{"prompt": t} for t in texts], plain_tokenizer).prompts))

    assert [of("baba"), of("abba"), of("aab"), of("cab")] == ["ba", "ab", "aab", "cab"]


def test_prompts_are_tokenized_in_one_call_and_those_that_come_again_once(plain_tokenizer, monkeypatch):
    calls = []
    original = type(plain_tokenizer).__call__
    monkeypatch.setattr(
        type(plain_tokenizer), "__call__", lambda self, text, **o: calls.append(text) or original(self, text, **o)
    )
    built = build([{"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}], plain_tokenizer)
    assert (calls, [p.text for p in built.prompts]) == ([["a", "b"]], ["a", "b", "a"])


@pytest.mark.parametrize("mode", ["auto", "never"])
@pytest.mark.parametrize("closes_with_eos", [False, True])
def test_prompts_read_together_are_those_read_one_by_one(
    make_tokenizer, chat_tokenizer, monkeypatch, mode, closes_with_eos
):
    monkeypatch.setattr(chat, "AT_A_TIME", 3)
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    tokenizer = make_tokenizer(chat_tokenizer.chat_template, closes_with_eos)
    settings = DataSettings(chat_template=mode)
    messages = [({"role": "user", "content": text},) for text in ("hello", "a b", "x</s>")]
    prompts = ["one", "two", "one", *messages, "three</s>", "four", messages[0]]
    reader = PromptReader(tokenizer, settings)
    together = reader.read(prompts)
    assert "TOKENIZERS_PARALLELISM" not in os.environ
    assert together == [reading for each in prompts for reading in reader.read([each])]


def test_a_row_without_a_ground_truth_is_bad_where_one_is_needed(plain_tokenizer):
    rows = load_rows([{"prompt": "a", "answer": "1"}, {"prompt": "b"}, {"prompt": "c", "answer": " "}])
    assert len(build_prompts(rows, plain_tokenizer, DataSettings()).prompts) == 3
    built = build_prompts(rows, plain_tokenizer, DataSettings(), needs_answer=True)
    assert [p.text for p in built.prompts] == ["a"]
    assert "row 1: no ground truth to compare with" in built.report()
