"""Data of any content: prompts that a model can read, or one line; never another error."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzzing import fuzz
from hypothesis import example, given
from hypothesis import strategies as st
from support import tokenizer

from dapo_rl.config import DataSettings, SourceSettings
from dapo_rl.data import build_prompts, load_rows
from dapo_rl.errors import UserError

ROWS = [
    {"prompt": "1+1=?", "answer": "2"},
    {"prompt": [{"role": "user", "content": "2+2=?"}], "reward_model": {"ground_truth": "4", "style": "rule"}},
    {"question": "é😀", "answer": 7, "extra_info": {"index": [1, 2.5, None]}},
]
VALID_JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()

characters = st.characters(codec=None)  # with halves of surrogate pairs
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**300, 10**310)
    | st.floats()
    | st.text(characters, max_size=12)
)
messages = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "tool", ""]) | leaves,
        "content": leaves | st.lists(leaves),
    }
)
columns = st.sampled_from(
    ["prompt", "question", "problem", "answer", "reward_model", "ground_truth", "solution", "data_source", "x.y", ""]
)


def nested(leaf):
    return st.recursive(
        leaf,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(characters, max_size=4), inner, max_size=3),
        max_leaves=6,
    )


json_rows = st.dictionaries(columns, nested(leaves) | st.lists(messages, max_size=3), max_size=4)
python_rows = st.dictionaries(
    columns | st.integers() | st.none(),
    nested(leaves | st.binary(max_size=4) | st.dates() | st.just(object()) | st.sets(st.integers(), max_size=2)),
    max_size=4,
)
data_settings = st.builds(
    DataSettings,
    prompt_key=st.sampled_from(["prompt", "question", "reward_model.style", "x.y", ""]),
    answer_key=st.sampled_from([None, "answer", "reward_model.ground_truth", "x..y"]),
    system_prompt=st.sampled_from([None, "", "Think."]),
    chat_template=st.sampled_from(["auto", "always", "never"]),
    max_prompt_tokens=st.sampled_from([1, 8, 1024]),
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def read(source, settings=None, needs_answer=False):
    """Prompts that can be tokenized and written down, or one line."""
    settings = settings or DataSettings()
    try:
        prompts = build_prompts(load_rows(source), tokenizer(), settings, needs_answer)
    except UserError as error:
        line = str(error)
    else:
        line = None
    if line is not None:
        assert line.startswith("data.train")
        return None
    (prompts.report() or "").encode()
    for prompt in prompts.prompts:
        assert 0 < len(prompt.token_ids) <= settings.max_prompt_tokens
        prompt.text.encode()
        (prompt.answer or "").encode()
        assert not needs_answer or prompt.answer.strip()
    assert len(prompts.prompts) + len(prompts.bad) + prompts.too_long == prompts.rows
    return prompts


def changed(data, valid):
    """A valid file with spans of it overwritten, cut out, or put in."""
    content = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    return bytes(content)


@fuzz(60)
@given(st.binary(max_size=80) | st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")))
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_any_bytes_are_prompts_or_one_line(directory, suffix, content):
    path = directory / f"data{suffix}"
    path.write_bytes(content)
    read(path)


@fuzz(120)
@given(st.data())
def test_changed_lines_are_prompts_or_one_line(directory, data):
    path = directory / "changed.jsonl"
    path.write_bytes(changed(data, VALID_JSONL))
    read(path)


@pytest.fixture(scope="module")
def valid_parquet(directory):
    table = {"prompt": ["1+1=?", "2+2=?"] * 20, "answer": ["2", "4"] * 20, "extra": [{"a": [1, 2]}, None] * 20}
    pq.write_table(pa.table(table), directory / "valid.parquet")
    return (directory / "valid.parquet").read_bytes()


@fuzz(120)
@given(st.data())
def test_changed_parquet_is_prompts_or_one_line(directory, valid_parquet, data):
    path = directory / "changed.parquet"
    path.write_bytes(changed(data, valid_parquet))
    read(path)


@pytest.mark.slow
@fuzz(200)
@given(st.lists(json_rows, max_size=4), data_settings, st.booleans())
@example([{"prompt": "\ud800"}], DataSettings(), False)
@example([{"prompt": "x", "answer": "\udc00"}], DataSettings(), True)
@example([{"prompt": "x", "answer": 10**5000}], DataSettings(), True)
@example([{"prompt": "x", "answer": float("nan")}], DataSettings(), True)
@example([{"prompt": "x", "extra": {"\ud800": 1}}], DataSettings(), False)
@example([{"prompt": [{"role": "user", "content": "x", "tool_calls": [1]}]}], DataSettings(), False)
def test_rows_of_odd_values_are_prompts_or_one_line(directory, rows, settings, needs_answer):
    path = directory / "rows.jsonl"
    # A number of more digits than Python writes cannot come from a file; in memory it can.
    if not any(isinstance(row.get("answer"), int) and row["answer"] > 10**4000 for row in rows):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        read(path, settings, needs_answer)
    read(rows, settings, needs_answer)


@fuzz(120)
@given(st.lists(python_rows | leaves | st.lists(st.integers(), max_size=2), max_size=4), data_settings)
def test_objects_in_memory_are_prompts_or_one_line(rows, settings):
    read(rows, settings)


@fuzz(80)
@given(
    st.sampled_from(
        ["arithmetic", "reasoning_gym:chain_sum", "reasoning_gym:", "data.jsonl", ".parquet", "~", "a\0b.json"]
    ),
    st.dictionaries(
        st.sampled_from(["size", "seed", "split", "min_terms", "max_terms", "min_digits", "other"]),
        st.integers(-5, 20) | st.none() | st.text(max_size=3) | st.lists(st.integers(), max_size=2) | st.floats(),
        max_size=3,
    ),
)
def test_any_parameters_of_a_source_are_prompts_or_one_line(source, parameters):
    parameters = {"size": 3, **parameters}
    read(SourceSettings(source=source, **parameters))
