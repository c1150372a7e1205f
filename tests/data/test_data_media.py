"""Rows with images, video, audio or tools are refused; no run trains on their text alone."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo_rl.config import DataSettings
from dapo_rl.data import load_rows, training_prompts
from dapo_rl.data.rows import make_row
from dapo_rl.errors import UserError

TEXT = {"prompt": "How many?", "answer": "2"}


def chat(*parts):
    return {"prompt": [{"role": "system", "content": "Look."}, {"role": "user", "content": list(parts)}]}


def picture():
    image = pytest.importorskip("PIL.Image")
    return image.new("RGB", (2, 2))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (TEXT | {"image": "cat.png"}, "the column 'image' has an image, and images are not supported"),
        (TEXT | {"images": [{"bytes": b"x", "path": None}]}, "the column 'images' has an image"),
        (TEXT | {"Images": ["a.png", None]}, "the column 'Images' has an image"),
        (TEXT | {"videos": ["a.mp4"]}, "the column 'videos' has a video, and videos are not supported"),
        (TEXT | {"audio": {"array": [0.1], "sampling_rate": 8}}, "has audio, and audio is not supported"),
        (TEXT | {"figure": {"bytes": b"x", "path": "a.png"}}, "the column 'figure' has an image"),
        (TEXT | {"figures": [{"bytes": b"x", "path": "a.png"}]}, "the column 'figures' has an image"),
        (TEXT | {"multi_modal_data": {"image": ["a.png"]}}, "the column 'multi_modal_data' has an image"),
        (TEXT | {"multi_modal_data": {"image": [], "video": "a.mp4"}}, "the column 'multi_modal_data' has a video"),
        (TEXT | {"tools": [{"type": "function"}]}, "has tools, which are not taken from rows; name them in env.tools"),
        (TEXT | {"tools": '[ {"type": "function"}]'}, "the column 'tools' has tools"),
        (chat({"type": "image"}, {"type": "text", "text": "How many?"}), "message 1 of 'prompt' has an image"),
        (chat({"type": "image_url", "image_url": {"url": "x"}}), "message 1 of 'prompt' has an image"),
        (chat({"type": "input_audio", "input_audio": {}}), "message 1 of 'prompt' has audio"),
        (chat({"type": "text", "text": "a"}, {"type": "video", "video": "x"}), "message 1 of 'prompt' has a video"),
    ],
)
def test_a_row_with_media_is_refused_by_place(row, message, plain_tokenizer):
    with pytest.raises(UserError) as error:
        load_rows([TEXT, row])
    assert str(error.value).startswith(f"data.train: row 1: {message}" if message.startswith(("the", "me")) else "data")
    assert message in str(error.value)
    endless = iter([TEXT, *[dict(row) for _ in range(1500)]])
    with pytest.raises(UserError, match=r"^data.train: row 1: "):
        training_prompts(endless, plain_tokenizer, DataSettings())


def from_pandas(row):
    return pa.Table.from_pylist([row]).to_pandas().to_dict("records")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (TEXT | {"figures": [{"bytes": b"x", "path": None}]}, "the column 'figures' has an image"),
        (TEXT | {"tools": [{"type": "function"}]}, "the column 'tools' has tools"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "message 0 of 'prompt' has an image"),
    ],
)
def test_lists_that_pandas_made_arrays_are_searched_too(row, message):
    with pytest.raises(UserError, match=f"^data.train: row 0: {message}"):
        load_rows(from_pandas(row))


def test_lists_that_pandas_made_arrays_may_be_empty():
    empty = pa.array([[]], pa.list_(pa.int64()))
    table = pa.table({"prompt": ["a"], "images": [[]], "videos": empty, "multi_modal_data": [{"image": [], "n": 1}]})
    assert len(load_rows(table.to_pandas().to_dict("records")).good) == 1


def test_an_image_as_an_object_is_refused():
    for row in (TEXT | {"figure": picture()}, TEXT | {"figure": [picture()]}, TEXT | {"image": picture()}):
        with pytest.raises(UserError, match=r"^data.train: row 0: the column '(figure|image)' has an image"):
            load_rows([row])


def test_a_data_set_with_an_image_feature_is_refused():
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"prompt": datasets.Value("string"), "picture": datasets.Image()})
    rows = datasets.Dataset.from_dict({"prompt": ["a"], "picture": [picture()]}, features=features)
    with pytest.raises(UserError, match=r"^data.train: row 0: the column 'picture' has an image"):
        load_rows(rows)


def test_a_file_is_refused_by_its_row(tmp_path):
    rows = [TEXT | {"images": None}, TEXT | {"images": [{"bytes": b"x", "path": None}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "vlm.parquet")
    with pytest.raises(UserError, match=r"^data.train: vlm.parquet:row 1: the column 'images' has an image, and"):
        load_rows(str(tmp_path / "vlm.parquet"))


@pytest.mark.parametrize(
    "value", [None, [], "", "  ", [None], {}, {"bytes": None, "path": None}, [{"bytes": None, "path": ""}], False, 0]
)
def test_an_empty_column_is_fine(value):
    assert make_row(0, "row 0", TEXT | {"images": value, "image": value}).columns["prompt"] == "How many?"


def test_other_columns_are_fine():
    row = TEXT | {"image_id": "7", "imagery": "a red house", "extra_info": {"path": "a", "index": 1}, "scores": [1.0]}
    assert make_row(0, "row 0", row).columns == row
