"""What a column's type makes of a ground truth and of a prompt: text as a reader would write it, or a reason."""

import array
import datetime as dt
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import make_sample

from dapo_rl.config import DataSettings, RewardSettings
from dapo_rl.data import build_prompts, load_rows
from dapo_rl.rewards import ExactVerifier

NOT_TEXT = b"\x89PNG\xff"
USER = {"role": "user", "content": "1+1?"}


class NoText:
    pass


def build(rows, tokenizer, **settings):
    return build_prompts(load_rows(rows), tokenizer, DataSettings(**settings))


def one(row, tokenizer, **settings):
    (prompt,) = build([row], tokenizer, **settings).prompts
    return prompt


ANSWERS = [
    ("42", "42"),
    # Bytes are text.
    (b"42", "42"),
    (bytearray(b"42"), "42"),
    (memoryview(b"42"), "42"),
    (np.bytes_(b"42"), "42"),
    ("π ≈ 3".encode(), "π ≈ 3"),
    (b"\xef\xbb\xbf42", "42"),
    (b"42\0\0\0", "42"),
    (b"so 2.\n#### 1,234", "1234"),
    (b"", ""),
    # Whole numbers, whatever holds them.
    (42, "42"),
    (42.0, "42"),
    (-42.0, "-42"),
    (-0.0, "0"),
    (10**25, "10000000000000000000000000"),
    (1e22, "10000000000000000000000"),
    (np.int64(42), "42"),
    (np.uint8(42), "42"),
    (np.float64(42), "42"),
    (np.array(42), "42"),
    (Decimal("42.00"), "42"),
    (Decimal("1E+2"), "100"),
    (Decimal("-0.0"), "0"),
    # Others.
    (0.5, "0.5"),
    (0.1, "0.1"),
    (1e-7, "0.0000001"),
    (np.float32(0.1), "0.1"),
    (np.float16(0.1), "0.1"),
    (np.longdouble("0.25"), "0.25"),
    (Decimal("3.50"), "3.5"),
    (Decimal("1E-999999999"), "1E-999999999"),
    (Fraction(1, 3), "1/3"),
    (float("inf"), "inf"),
    (True, "True"),
    (np.False_, "False"),
    # Dates.
    (dt.date(2024, 1, 31), "2024-01-31"),
    (dt.datetime(2024, 1, 31), "2024-01-31"),
    (dt.datetime(2024, 1, 31, 7, 5), "2024-01-31 07:05:00"),
    (dt.datetime(2024, 1, 31, tzinfo=dt.UTC), "2024-01-31 00:00:00+00:00"),
    (dt.time(7, 5), "07:05:00"),
    (pd.Timestamp("2024-01-31"), "2024-01-31"),
    (np.datetime64("2024-01-31"), "2024-01-31"),
    (np.datetime64("2024-01-31T07:05:00", "ns"), "2024-01-31 07:05:00"),
    # Lists and mappings, as Python writes them.
    (["x", 1], "['x', 1]"),
    ([b"x", [b"y"]], "['x', ['y']]"),
    (np.array([b"x"]), "['x']"),
    ({"a": b"x"}, "{'a': 'x'}"),
    (array.array("i", [1, 2]), "[1, 2]"),
    # What is missing.
    (None, None),
    (float("nan"), None),
    (np.float32("nan"), None),
    (Decimal("NaN"), None),
    (Decimal("sNaN"), None),
    (pd.NA, None),
    (pd.NaT, None),
    (np.datetime64("NaT"), None),
]


@pytest.mark.parametrize("nested", [False, True], ids=["answer", "reward_model.ground_truth"])
@pytest.mark.parametrize(("value", "text"), ANSWERS, ids=[f"{type(v).__name__}-{text}"[:40] for v, text in ANSWERS])
def test_the_ground_truth_as_text(plain_tokenizer, value, text, nested):
    row = {"reward_model": {"ground_truth": value}} if nested else {"answer": value}
    assert one({"prompt": "p", **row}, plain_tokenizer).answer == text
    key = "reward_model.ground_truth" if nested else "answer"
    assert one({"prompt": "p", **row}, plain_tokenizer, answer_key=key).answer == text


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (NOT_TEXT, "the ground truth is bytes that are not UTF-8 text"),
        (bytearray(NOT_TEXT), "the ground truth is bytes that are not UTF-8 text"),
        ([b"x", NOT_TEXT], "a part of the ground truth is bytes that are not UTF-8 text"),
        (NoText(), "the ground truth is a NoText, which has no text"),
    ],
)
def test_a_ground_truth_that_is_no_text_is_a_reason(plain_tokenizer, value, why):
    built = build([{"prompt": "a", "answer": value}, {"prompt": "b", "answer": "1"}], plain_tokenizer)
    assert [str(bad) for bad in built.bad] == [f"row 0: {why}"]
    assert [prompt.answer for prompt in built.prompts] == ["1"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"1+1?", "1+1?"),
        (bytearray(b"1+1?"), "1+1?"),
        (np.bytes_(b"1+1?"), "1+1?"),
        ("1·1?".encode(), "1·1?"),
        ([{"role": b"user", "content": b"1+1?"}], "<s>[user]1+1?</s>[assistant]"),
        ([{"role": "user", "content": b"1+1?", "name": None, "image": NOT_TEXT}], "<s>[user]1+1?</s>[assistant]"),
    ],
)
def test_the_prompt_as_text(chat_tokenizer, value, text):
    prompt = one({"prompt": value}, chat_tokenizer)
    assert prompt.text == text
    if prompt.messages is not None:
        assert prompt.messages == (USER,)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (NOT_TEXT, "'prompt' is bytes that are not UTF-8 text"),
        (b"", "'prompt' is empty"),
        (b" \n", "'prompt' is empty"),
        (
            [USER, {"role": "user", "content": NOT_TEXT}],
            "the 'content' of message 1 of 'prompt' is bytes that are not UTF-8 text",
        ),
        (42, "'prompt' is a int, not a string or a list of messages"),
        (dt.date(2024, 1, 31), "'prompt' is a date, not a string or a list of messages"),
    ],
)
def test_a_prompt_that_is_no_text_is_a_reason(chat_tokenizer, value, why):
    built = build([{"prompt": value}, {"prompt": "fine"}], chat_tokenizer)
    assert [str(bad) for bad in built.bad] == [f"row 0: {why}"]


def test_the_data_source_as_text(plain_tokenizer):
    assert one({"prompt": "p", "data_source": b"math_dapo"}, plain_tokenizer).data_source == "math_dapo"
    assert one({"prompt": "p", "data_source": 5}, plain_tokenizer).data_source == ""
    built = build([{"prompt": "p", "data_source": NOT_TEXT}, {"prompt": "p"}], plain_tokenizer)
    assert [bad.why for bad in built.bad] == ["'data_source' is bytes that are not UTF-8 text"]


def test_other_columns_keep_their_bytes(plain_tokenizer):
    columns = one({"prompt": "p", "blob": NOT_TEXT, "raw": b"text"}, plain_tokenizer).columns
    assert columns == {"blob": NOT_TEXT, "raw": b"text"}


TYPES = [
    (pa.binary(), [b"42", None], ["42", None]),
    (pa.large_binary(), [b"42"], ["42"]),
    (pa.binary(4), [b"42\0\0"], ["42"]),
    (pa.dictionary(pa.int32(), pa.binary()), [b"42"], ["42"]),
    (pa.dictionary(pa.int32(), pa.string()), ["42"], ["42"]),
    (pa.int64(), [42, None], ["42", None]),
    (pa.float64(), [42.0, 0.1, None], ["42", "0.1", None]),
    (pa.float32(), [42.0, 0.1, None, float("nan")], ["42", "0.1", None, None]),
    (pa.decimal128(10, 2), [Decimal("42.00"), Decimal("0.50")], ["42", "0.5"]),
    (pa.bool_(), [True, False], ["True", "False"]),
    (pa.date32(), [dt.date(2024, 1, 31)], ["2024-01-31"]),
    (pa.timestamp("ns"), [dt.datetime(2024, 1, 31)], ["2024-01-31"]),
    (pa.timestamp("us"), [dt.datetime(2024, 1, 31, 7)], ["2024-01-31 07:00:00"]),
    (pa.null(), [None], [None]),
]


@pytest.mark.parametrize(("kind", "values", "texts"), TYPES, ids=[str(kind) for kind, _, _ in TYPES])
def test_parquet_columns(plain_tokenizer, tmp_path, kind, values, texts):
    column = pa.array(values, kind)
    pq.write_table(pa.table({"prompt": ["p"] * len(values), "answer": column}), tmp_path / "data.parquet")
    built = build(tmp_path / "data.parquet", plain_tokenizer)
    assert [prompt.answer for prompt in built.prompts] == texts


def test_narrow_floats_inside_of_structs_and_lists(plain_tokenizer, tmp_path):
    inner = pa.struct([("ground_truth", pa.float32()), ("all", pa.list_(pa.float32()))])
    values = [{"ground_truth": 0.1, "all": [0.2, None]}, {"ground_truth": 42.0, "all": None}]
    table = pa.table({"prompt": ["p", "q"], "reward_model": pa.array(values, inner)})
    pq.write_table(table, tmp_path / "data.parquet")
    first, second = build(tmp_path / "data.parquet", plain_tokenizer).prompts
    assert (first.answer, second.answer) == ("0.1", "42")
    assert first.columns["reward_model"]["all"] == [0.2, None]


def test_a_whole_parquet_file_of_bytes_in_the_format_of_verl(chat_tokenizer, tmp_path):
    message = pa.struct([("role", pa.binary()), ("content", pa.binary())])
    schema = pa.schema(
        [
            ("prompt", pa.list_(message)),
            ("reward_model", pa.struct([("ground_truth", pa.binary()), ("style", pa.binary())])),
            ("data_source", pa.binary()),
        ]
    )
    row = {
        "prompt": [{"role": b"user", "content": b"1+1?"}],
        "reward_model": {"ground_truth": b"2", "style": b"rule"},
        "data_source": b"math_dapo",
    }
    bad = row | {"reward_model": {"ground_truth": NOT_TEXT, "style": b"rule"}}
    pq.write_table(pa.Table.from_pylist([row, bad], schema=schema), tmp_path / "data.parquet")
    built = build(tmp_path / "data.parquet", chat_tokenizer)
    (prompt,) = built.prompts
    assert (prompt.answer, prompt.data_source, prompt.messages) == ("2", "math_dapo", (USER,))
    assert [str(row) for row in built.bad] == ["data.parquet:row 1: the ground truth is bytes that are not UTF-8 text"]


def test_a_right_answer_to_a_truth_in_bytes_is_right(plain_tokenizer):
    prompt = one({"prompt": "p", "answer": b"42"}, plain_tokenizer)
    verdicts = ExactVerifier(RewardSettings())(prompt, [make_sample(text="42"), make_sample(text="b'42'")])
    assert [verdict.correct for verdict in verdicts] == [True, False]
