import json
import random
import sys
import types

import numpy
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dapo_rl.config import DataSettings, SourceSettings
from dapo_rl.data import PromptStream, build_prompts, load_rows
from dapo_rl.data.overlap import check_apart
from dapo_rl.errors import UserError


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def fails(source, message, **options):
    with pytest.raises(UserError, match=message) as caught:
        load_rows(source, **options)
    assert "\n" not in str(caught.value)


def test_jsonl_rows_are_numbered_by_line_and_bad_lines_are_told(tmp_path):
    path = write(
        tmp_path / "mixed.jsonl",
        b'\xef\xbb\xbf{"prompt": "a", "n": 1}\n'
        b"\n"
        b'{"prompt": "b", "tags": ["x", {"y": null}]}\r\n'
        b'{"prompt": \n'
        b"[1, 2]\n"
        b'{"prompt": "\xff"}\n'
        b'{"prompt": "\\ud800"}\n'
        b'{"prompt": "c"}',
    )
    rows = load_rows(path)
    assert [(r.number, r.where, r.columns) for r in rows.good] == [
        (1, "mixed.jsonl:1", {"prompt": "a", "n": 1}),
        (3, "mixed.jsonl:3", {"prompt": "b", "tags": ["x", {"y": None}]}),
        (8, "mixed.jsonl:8", {"prompt": "c"}),
    ]
    assert [str(b) for b in rows.bad] == [
        "mixed.jsonl:4: not valid JSON: Expecting value at column 1; a line holds one object",
        "mixed.jsonl:5: not a JSON object but a list; a line holds one object",
        "mixed.jsonl:6: not UTF-8",
        "mixed.jsonl:7: it has text that is not valid Unicode (half of a surrogate pair)",
    ]


def test_a_json_file_holds_lines_too(tmp_path):
    path = write(tmp_path / "data.JSON", '{"prompt": "a"}\n{"prompt": "b"}\n')
    assert [r.columns["prompt"] for r in load_rows(str(path)).good] == ["a", "b"]


def test_lines_that_break_parsers_are_bad_rows(tmp_path):
    deep = '{"a":' * 200_000 + "1" + "}" * 200_000
    path = write(tmp_path / "odd.jsonl", f'{deep}\n{{"a": {"9" * 5000}}}\n{{"a": 1}}\n')
    rows = load_rows(path)
    assert [(b.number, b.why.split(":")[0]) for b in rows.bad] == [(1, "nested too deeply"), (2, "not valid JSON")]
    assert [r.columns for r in rows.good] == [{"a": 1}]


lines = st.one_of(
    st.binary(max_size=40),
    st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=6,
    ).map(lambda value: json.dumps(value).encode()),
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(lines, max_size=8))
def test_whatever_the_lines_each_is_a_row_or_a_reason(tmp_path, written):
    path = write(tmp_path / "fuzz.jsonl", b"\n".join(written))
    rows = load_rows(path)
    seen = {r.number: r.columns for r in rows.good}
    reasons = {b.number: b.why for b in rows.bad}
    assert not seen.keys() & reasons.keys()
    for number, line in enumerate(b"\n".join(written).removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        assert (number in seen or number in reasons) == bool(line.strip())
        if number in seen:
            assert json.dumps(seen[number]) == json.dumps(json.loads(line))
    assert all(why and "\n" not in why for why in reasons.values())


def test_a_missing_file_names_the_nearest(tmp_path):
    write(tmp_path / "gsm8k-train.jsonl", "{}")
    write(tmp_path / "gsm8k-train.txt", "{}")
    fails(
        tmp_path / "gsm8k-trian.jsonl",
        r"data\.train: .*gsm8k-trian\.jsonl: no such file; did you mean .*train\.jsonl\?",
    )
    fails(tmp_path / "zzz.parquet", r"zzz\.parquet: no such file$", key="data.eval")
    fails(tmp_path / "none" / "a.jsonl", r"no such file; there is no directory .*none$")
    fails("~nobody-at-all/a.jsonl", r"no such file; there is no directory ~nobody-at-all$")
    check_apart("~nobody-at-all/a.jsonl", "~nobody-at-all/b.jsonl")
    (tmp_path / "dir.jsonl").mkdir()
    fails(tmp_path / "dir.jsonl", "not a file")


def test_a_source_that_is_no_known_format_says_which_are(tmp_path):
    for name in ("train.csv", "data/train.arrow", "./folder", "a/b/c", str(write(tmp_path / "noname", ""))):
        fails(name, r"unsupported format; use one of \.jsonl, \.json, \.parquet")


def test_a_misspelt_generator_does_not_go_to_the_hub():
    for name in ("arithmetc", "Arithmetic", "reasoning_gym", "reasoning-gym:", ""):
        fails(name, r"did you mean arithmetic or reasoning_gym:NAME\?")


def test_a_file_takes_no_parameters(tmp_path):
    path = write(tmp_path / "a.jsonl", "{}")
    fails(SourceSettings(source=str(path), split="train"), r"data\.train\.split: a file has no such parameter")
    fails(SourceSettings(source=str(path), wieght=2), r"data\.train\.wieght: .* parameter; did you mean weight\?$")


def test_parquet_gives_plain_values_without_the_index_of_pandas(tmp_path):
    table = pyarrow.table(
        {
            "prompt": [[{"role": "user", "content": "1+1"}], None],
            "n": pyarrow.array([7, None], pyarrow.int32()),
            "a.b": ["x", "y"],
            "__index_level_0__": [3, 4],
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    rows = load_rows(tmp_path / "t.parquet")
    assert [(r.number, r.where) for r in rows.good] == [(0, "t.parquet:row 0"), (1, "t.parquet:row 1")]
    assert [r.columns for r in rows.good] == [
        {"prompt": [{"role": "user", "content": "1+1"}], "n": 7, "a.b": "x"},
        {"prompt": None, "n": None, "a.b": "y"},
    ]


def test_a_corrupt_parquet_file_is_one_line(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["some text"] * 500}), tmp_path / "good.parquet")
    whole = (tmp_path / "good.parquet").read_bytes()
    for at, part in enumerate((b"", b"PAR1", whole[:-20], whole[: len(whole) // 2], b"x" * 100)):
        fails(write(tmp_path / f"{at}.parquet", part), r"\d\.parquet: cannot be read as parquet: ")
    not_utf8 = pyarrow.array([b"\xff"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": not_utf8}), tmp_path / "9.parquet")
    fails(tmp_path / "9.parquet", r"9\.parquet: cannot be read as parquet: .*utf-8")
    rng = random.Random("parquet")
    refused = 0
    for _ in range(40):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        try:
            load_rows(write(tmp_path / "damaged.parquet", bytes(damaged)))
        except UserError as error:
            refused += "\n" not in str(error)
    assert refused > 5


def test_times_that_python_does_not_have_are_one_line(tmp_path):
    for number, column in enumerate(
        (
            pyarrow.array([10**15], pyarrow.timestamp("s")),
            pyarrow.array([2**31 - 1], pyarrow.int32()).cast(pyarrow.date32()),
            pyarrow.array([0], pyarrow.timestamp("us", tz="Nowhere/Else")),
        )
    ):
        path = tmp_path / f"{number}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"prompt": ["p"], "time": column}), path)
        fails(path, rf"{number}\.parquet: cannot be read as parquet: ")


def test_rows_in_memory_become_plain():
    values = [
        {
            "prompt": numpy.array([{"role": "user", "content": numpy.str_("hi")}], dtype=object),
            "number": numpy.int64(3),
            "share": numpy.float64(0.5),
            "yes": numpy.bool_(True),
            "grid": numpy.arange(4).reshape(2, 2),
            "pair": (1, numpy.float32(2)),
            "by_node": {1: "a"},
        },
        "not a mapping",
        {3: "odd column"},
    ]
    rows = load_rows(values)
    (row,) = rows.good
    expected = {
        "prompt": [{"role": "user", "content": "hi"}],
        "number": 3,
        "share": 0.5,
        "yes": True,
        "grid": [[0, 1], [2, 3]],
        "pair": (1, 2.0),
        "by_node": {1: "a"},
    }
    assert row.columns == expected
    assert repr(row.columns) == repr(expected)  # NumPy's numbers compare equal, and print differently
    assert type(row.columns["prompt"][0]["content"]) is str
    assert [str(b) for b in rows.bad] == [
        "row 1: not a mapping of columns but a str",
        "row 2: the column name 3 is not a string",
    ]
    looped = {}
    looped["self"] = looped
    assert [b.why for b in load_rows([looped]).bad] == ["nested too deeply"]
    fails({"prompt": "a"}, "expected a source or a list of rows, got dict")
    fails(5, "expected a source or a list of rows, got int")


def test_whole_numbers_that_a_checkpoint_cannot_hold_are_bad_rows(plain_tokenizer):
    rows = load_rows([{"prompt": "p", "n": 10**4200}, {"prompt": "p", "n": [10**5000]}])
    assert [str(row) for row in rows.bad] == ["row 1: it has a whole number of 16,610 bits"]
    assert PromptStream(build_prompts(rows, plain_tokenizer, DataSettings()).prompts).state()["prompts"] == 1


def test_a_hugging_face_dataset_is_rows():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}])
    assert [r.columns for r in load_rows(data).good] == [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]
    assert [type(r.columns["n"]) for r in load_rows(data.with_format("numpy")).good] == [int, int]
    fails(datasets.DatasetDict(train=data), "expected a source or a list of rows, got DatasetDict")


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the `datasets` package that records what it is asked for."""
    asked = []

    def load_dataset(path, **options):
        asked.append((path, options))
        if options["split"] is None:
            return {"train": [], "test": []}
        if path == "org/gone":
            raise ConnectionError("Couldn't reach 'org/gone'\non the Hub")
        return [{"prompt": "a"}, {"prompt": "b"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr("dapo_rl.data.sources.hub_problem", lambda: None)
    return asked


def test_any_other_name_is_asked_of_the_hub(hub):
    rows = load_rows("org/data-v1.5")
    assert [(r.where, r.columns) for r in rows.good] == [
        ("org/data-v1.5:row 0", {"prompt": "a"}),
        ("org/data-v1.5:row 1", {"prompt": "b"}),
    ]
    load_rows(SourceSettings(source="gsm8k", split="test", name="main", revision="abc"))
    assert hub == [
        ("org/data-v1.5", {"split": "train"}),
        ("gsm8k", {"split": "test", "name": "main", "revision": "abc"}),
    ]


def test_what_the_hub_refuses_is_one_line(hub):
    fails("org/gone", r"data\.train: org/gone: cannot be loaded from the hub: Couldn't reach 'org/gone' on the Hub$")
    fails(SourceSettings(source="org/data", split=None), r"data\.train\.split: org/data has train, test; name one")


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    fails("org/data", r"org/data: hub data needs datasets: pip install 'dapo-rl\[datasets\]'")
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    fails("reasoning_gym:leg_counting", r"needs reasoning-gym: pip install 'dapo-rl\[gym\]'")


@pytest.mark.slow
def test_loading_imports_neither_torch_nor_an_extra():
    import subprocess

    code = (
        "import sys, dapo_rl.data as d; d.load_rows('arithmetic');"
        "print([m for m in ('torch', 'transformers', 'datasets', 'reasoning_gym', 'pyarrow') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"


def test_the_real_datasets_library_loads_by_name(tmp_path, monkeypatch):
    """`json` is a name that needs no network: the parameters go to `datasets.load_dataset`."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": "1+2", "answer": "3"}\n')
    rows = load_rows(SourceSettings(source="json", data_files=str(file), cache_dir=str(tmp_path / "cache")))
    assert [row.columns["answer"] for row in rows.good] == ["2", "3"]
    assert rows.good[1].where == "json:row 1"
