"""Reading runs, groups and the ledger."""

import math
import os
import socket

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from board_runs import append_line, finish, kept, make_group, make_run, metrics_of
from tokenizers import Tokenizer

from dapo_rl.board.catalogue import Catalogue, NoSuchRunError
from dapo_rl.board.detokenize import EMBEDDED, pieces, tokenizer_of
from dapo_rl.board.files import UnreadableError
from dapo_rl.board.groups import group_of, groups_of, own_parts, search
from dapo_rl.board.ledger import ledger
from dapo_rl.config import Config


def test_runs_are_found_below_a_directory_and_named_after_it(tmp_path):
    make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "runs" / "ablate" / "dapo" / "seed-0")
    make_run(tmp_path / "other" / "a")
    (tmp_path / "runs" / "nothing").mkdir()
    found = Catalogue([tmp_path / "runs", tmp_path / "other", tmp_path / "runs" / "a"]).runs()
    assert list(found) == ["a", "ablate/dapo/seed-0", "other/a"]
    assert list(Catalogue([tmp_path / "runs" / "a"]).runs()) == ["a"]


@pytest.mark.parametrize("name", ["../a", "a/../../b", "/etc", "", "a\x00", "a/rollouts"])
def test_a_name_that_is_not_listed_is_no_run(tmp_path, name):
    make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "b")
    with pytest.raises(NoSuchRunError):
        Catalogue([tmp_path / "runs"]).find(name)


def test_links_that_lead_out_are_not_followed(tmp_path):
    run = make_run(tmp_path / "runs" / "a")
    secret = tmp_path / "secret.parquet"
    run.rollout(1).rename(secret)
    run.rollout(1).symlink_to(secret)
    (tmp_path / "runs" / "b").symlink_to(tmp_path)
    catalogue = Catalogue([tmp_path / "runs"])
    assert list(catalogue.runs()) == ["a"]
    assert catalogue.find("a").rollout(1) is None
    assert catalogue.find("a").rollout(2) is not None


def test_the_row_of_a_run(tmp_path):
    run = make_run(tmp_path / "a", steps=4, **{"algo.clip_high": 0.2, "seed": 7})
    finish(run, {"trained": 24, "total": 48})
    row = Catalogue([tmp_path]).find("a").row()
    assert (row["step"], row["steps"], row["seed"], row["state"]) == (4, 4, 7, "finished")
    assert (row["before"], row["accuracy"]) == (0.25, 0.5)
    assert row["correct"] == pytest.approx((0.1 + 0.2 + 0.3 + 0.4) / 4)
    assert (row["tokens"], row["seconds"]) == (48, 9)
    assert row["techniques"] == ["Soft Overlong Punishment", "Token-level Loss", "Dynamic Sampling"]


def test_the_state_of_a_run(tmp_path):
    run = make_run(tmp_path / "a")
    entry = Catalogue([tmp_path]).find("a")
    assert entry.state == "stopped"
    lock = run.path / ".lock"
    lock.write_text(f"{os.getpid()} {socket.gethostname()}\n")
    assert entry.state == "running"
    lock.write_text(f"{2**22 + 1} {socket.gethostname()}\n")  # no such process
    assert entry.state == "stopped"


def test_a_run_that_was_resumed_is_not_what_it_was_when_it_ended(tmp_path):
    """A run leaves its summary until it ends again; one that is killed first never writes another."""
    run = make_run(tmp_path / "a")
    finish(run, {"trained": 18, "total": 36})
    entry = Catalogue([tmp_path]).find("a")
    assert (entry.row()["state"], entry.row()["seconds"], entry.row()["tokens"]) == ("finished", 9, 36)
    run.write_config(Config.load(None, ["train.steps=50"]))
    lock = run.path / ".lock"
    for words, state in ((f"{os.getpid()} {socket.gethostname()}\n", "running"), ("", "stopped")):
        lock.write_text(words)
        run.append_metrics(4 + (state == "stopped"), metrics_of(4))
        row = entry.row()
        assert (row["state"], row["seconds"]) == (state, 2.0 * row["step"])
        assert row["tokens"] == 12 * row["step"]
        assert not ledger(entry)["final"]


def test_settings_that_cannot_be_read_leave_a_run_in_the_list(tmp_path):
    run = make_run(tmp_path / "a")
    run.config_path.write_text("preset: [")
    row = Catalogue([tmp_path]).find("a").row()
    assert (row["step"], row["preset"], row["techniques"]) == (3, None, None)


def test_the_groups_of_a_step(tmp_path):
    run = make_run(tmp_path / "a")
    kept, dropped = groups_of(run.rollout(2))
    assert (kept["draw"], kept["fate"], kept["tokens"], kept["truth"]) == (20, "kept", 6, "2")
    assert [(s["correct"], s["reward"], s["advantage"]) for s in kept["samples"]] == [
        (True, 0.75, 1),
        (False, -1.25, -1),
    ]
    assert dropped["fate"] == "all_correct"
    assert [s["reward"] for s in dropped["samples"]] == [None, None]


def test_prompts_are_told_apart_by_what_they_do_not_share():
    """All that a chat template puts around them would be all that a narrow list shows."""

    def templated(question):
        return (
            f"<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|assistant|>\n"
        )

    asked = [templated("What is 12 + 3?"), templated("What is 12 + 3?"), templated("What is 17 - 3?")]
    assert own_parts(asked) == ["… 12 + 3?<|im_end|>", "… 12 + 3?<|im_end|>", "… 17 - 3?<|im_end|>"]
    assert own_parts(asked[:2]) == asked[:2]
    assert own_parts(["1+1=?\n", "1+2=?\n"]) == ["1+1=?\n", "1+2=?\n"]
    assert own_parts([]) == []
    assert own_parts(["", asked[0]]) == ["", asked[0]]
    shared = "a word " * 10
    assert own_parts([shared, shared + "more"]) == ["… ", "… more"]


def test_one_group_with_its_tokens(tmp_path):
    make_run(tmp_path / "a")
    run = Catalogue([tmp_path]).find("a")
    group = group_of(run, run.rollout(1), 10)
    assert [s["response"] for s in group["samples"]] == ["I think 2", "no idea"]
    first = group["samples"][0]
    assert (first["length_penalty"], first["score"], first["answer"]) == (-0.25, 1, "2")
    assert "".join(text for text, _ in first["pieces"]) == Tokenizer.from_file(str(EMBEDDED)).decode([5, 6, 7])
    assert first["logp"] == [-0.5, -1, -1.5]
    assert group_of(run, run.rollout(1), 99) is None


def test_ratio_clipping_and_entropy_of_tokens(tmp_path):
    make_run(tmp_path / "a")
    entry = Catalogue([tmp_path]).find("a")
    group = group_of(entry, entry.rollout(1), 10)
    assert group["colours"] == ["logp", "ratio", "clipped", "entropy"]
    right, wrong = group["samples"]
    assert right["ratio"] == pytest.approx([1, 1.5, 0.5], rel=1e-4)
    assert right["clipped"] == [0, 1, 0]
    assert wrong["clipped"] == [0, 0, 2]
    assert wrong["entropy"] == pytest.approx([0.1, 0.2, 0.3], rel=1e-4)
    dropped = group_of(entry, entry.rollout(1), 11)
    assert dropped["colours"] == ["logp"]


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([0, 0, 0], [0, 0, 0]),
        ([3, 2, 1], [3, 2, 1]),
        ([1], [1, None, None]),  # of another length than the tokens
        ([1, None, 2, 2, 2], [1, None, 2]),
    ],
)
def test_clipping_is_what_the_update_recorded(tmp_path, values, shown):
    """Whatever the ratios and the settings say."""
    run = make_run(tmp_path / "a", **{"algo.clip_high": 0.9, "algo.clip_low": 0.9})
    table = pq.read_table(run.rollout(1))
    place = table.column_names.index("clipped")
    recorded = pa.array([values, None, None, None], pa.list_(pa.int8()))
    pq.write_table(table.set_column(place, "clipped", recorded), run.rollout(1))
    entry = Catalogue([tmp_path]).find("a")
    first, second = group_of(entry, entry.rollout(1), 10)["samples"]
    assert first["clipped"] == shown
    assert "clipped" not in second


@pytest.mark.parametrize("sign", [1, -1])
def test_a_ratio_too_large_or_small_to_show_is_one_of_e_to_the_50(tmp_path, sign):
    run = make_run(tmp_path / "a")
    table = pq.read_table(run.rollout(1))
    place = table.column_names.index("train_logps")
    # Sampled with −0.5, −1 and −1.5; the last is no probability at all.
    trained = pa.array([[-0.5 + sign * 49, -1 + sign * 900, -math.inf]] * 4, pa.list_(pa.float32()))
    pq.write_table(table.set_column(place, "train_logps", trained), run.rollout(1))
    entry = Catalogue([tmp_path]).find("a")
    ratios = group_of(entry, entry.rollout(1), 10)["samples"][0]["ratio"]
    assert ratios[:2] == pytest.approx([math.exp(sign * 49), math.exp(sign * 50)], rel=1e-4, abs=0)
    assert ratios[2] is None


def test_rollouts_that_do_not_record_clipping_offer_no_colour_for_it(tmp_path):
    run = make_run(tmp_path / "a")
    pq.write_table(pq.read_table(run.rollout(1)).drop_columns(["clipped"]), run.rollout(1))
    entry = Catalogue([tmp_path]).find("a")
    group = group_of(entry, entry.rollout(1), 10)
    assert group["colours"] == ["logp", "ratio", "entropy"]
    assert all("clipped" not in sample for sample in group["samples"])


def test_a_file_that_is_no_table_says_so(tmp_path):
    run = make_run(tmp_path / "a")
    run.rollout(1).write_bytes(b"PAR1 but not really")
    with pytest.raises(UnreadableError, match=r"step-000001\.parquet: not a table of rollouts"):
        groups_of(run.rollout(1))
    other = run.rollout(2)
    pq.write_table(pa.table({"draw": [1], "response": ["x"]}), other)  # of another version
    assert groups_of(other)[0]["samples"] == [dict.fromkeys(["correct", "status", "score", "reward", "advantage"])]


def test_search_goes_from_the_newest_step_to_the_first(tmp_path):
    make_run(tmp_path / "a", text="Wait, 50% of <b>İt</b> is 2")
    run = Catalogue([tmp_path]).find("a")
    assert [(h["step"], h["draw"], h["sample"]) for h in search(run, "wait, 50%", [1, 2, 3])["hits"]] == [
        (3, 30, 0),
        (2, 20, 0),
        (1, 10, 0),
    ]
    prompts = search(run, "1+1", [2])["hits"]  # once for a group, whose samples share it
    assert [(h["draw"], h["sample"], h["text"]) for h in prompts] == [(20, 0, "1+1=?"), (21, 0, "1+1=?")]
    assert search(run, "nowhere", [1, 2, 3]) == {"hits": [], "cut": False, "left": 0, "next": None}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ab" + "needle" + "c" * 100, "ab" + "needle" + "c" * 60),
        ("a" * 60 + "needle", "a" * 60 + "needle"),
        ("b" + "a" * 60 + "needle" + "c" * 60 + "d", "a" * 60 + "needle" + "c" * 60),
    ],
)
def test_a_hit_is_shown_with_the_text_around_it(tmp_path, text, shown):
    make_run(tmp_path / "a", steps=1, text=text)
    (hit,) = search(Catalogue([tmp_path]).find("a"), "needle", [1])["hits"]
    assert hit["text"] == shown


def test_a_long_search_says_where_it_stopped(tmp_path, monkeypatch):
    make_run(tmp_path / "a", steps=5)
    monkeypatch.setattr("dapo_rl.board.groups.SEARCH_SECONDS", -1)
    found = search(Catalogue([tmp_path]).find("a"), "idea", [1, 2, 3, 4, 5])
    assert [hit["step"] for hit in found["hits"]] == [5]
    assert (found["left"], found["next"]) == (4, 4)


def test_a_search_with_many_hits_says_that_there_are_more(tmp_path, monkeypatch):
    run = make_run(tmp_path / "a", steps=3)
    run.rollout(2).write_bytes(b"not a table")
    entry = Catalogue([tmp_path]).find("a")
    assert [hit["step"] for hit in search(entry, "idea", [1, 2, 3])["hits"]] == [3, 1]
    monkeypatch.setattr("dapo_rl.board.groups.HITS", 1)
    found = search(entry, "1+1", [1, 2, 3])
    assert (len(found["hits"]), found["cut"], found["next"]) == (1, True, 2)


def test_the_ledger_of_a_run_that_ended_is_its_own(tmp_path):
    run = make_run(tmp_path / "a")
    finish(run, {"trained": 18, "all_correct": 18, "total": 36})
    account = ledger(Catalogue([tmp_path]).find("a"))
    assert account["totals"] == {"trained": 18, "all_correct": 18, "total": 36}
    assert account["bars"] == [{"step": s, "tokens": {"kept": 6, "all_correct": 6}} for s in (1, 2, 3)]


def test_the_ledger_of_a_run_that_goes_on_is_of_the_log(tmp_path):
    run = make_run(tmp_path / "a")
    append_line(
        run, step=4, **{"sampling/tokens_generated": 100, "sampling/tokens_trained": 60, "sampling/wasted_share": 0.3}
    )
    account = ledger(Catalogue([tmp_path]).find("a"))
    assert account["totals"] == {"trained": 78, "dropped": 48, "waiting": 10, "total": 136}
    assert not account["final"]


def test_the_bars_of_many_steps_are_some_of_them(tmp_path, monkeypatch):
    make_run(tmp_path / "a", steps=20)
    monkeypatch.setattr("dapo_rl.board.ledger.BARS", 6)
    account = ledger(Catalogue([tmp_path]).find("a"))
    assert [bar["step"] for bar in account["bars"]] == [1, 5, 9, 13, 17, 20]
    assert account["steps"] == 20


def test_the_bars_follow_a_step_that_a_resumed_run_replaces(tmp_path):
    run = make_run(tmp_path / "a")
    entry = Catalogue([tmp_path]).find("a")
    before = ledger(entry)["bars"]
    run.write_rollouts(2, [kept(make_group(20, [("2", True)]))])
    assert ledger(entry)["bars"] == [before[0], {"step": 2, "tokens": {"kept": 3}}, before[2]]


def test_tokens_of_one_character_are_one_piece():
    tokenizer = Tokenizer.from_file(str(EMBEDDED))
    text = "a é 日 Answer: 1"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    cut = pieces(tokenizer, ids)
    assert "".join(piece for piece, _ in cut) == text
    assert sum(count for _, count in cut) == len(ids)
    assert next(count for piece, count in cut if "日" in piece) == 3


def test_bytes_that_are_no_text_do_not_hold_up_the_rest():
    tokenizer = Tokenizer.from_file(str(EMBEDDED))
    half = tokenizer.encode("日", add_special_tokens=False).ids[:1]
    letters = tokenizer.encode("ab", add_special_tokens=False).ids
    cut = pieces(tokenizer, half * 20 + letters + half)
    assert sum(count for _, count in cut) == 21 + len(letters)
    assert "b" in "".join(piece for piece, _ in cut)
    assert pieces(tokenizer, [10**6, *letters])[-1][0].endswith("b")


def test_without_a_tokenizer_tokens_are_their_numbers(tmp_path):
    make_run(tmp_path / "a", **{"model.name": "somebody/model"})
    run = Catalogue([tmp_path]).find("a")
    assert tokenizer_of(run) is None
    group = group_of(run, run.rollout(1), 10)
    assert group["samples"][0]["pieces"] == [["[5]", 1], ["[6]", 1], ["[7]", 1]]
    assert not group["decoded"]


def rollout_bomb(path, **columns):
    rows = len(next(iter(columns.values())))
    pq.write_table(pa.table({"draw": pa.array([0] * rows, pa.int64()), **columns}), path, compression="zstd")
    assert path.stat().st_size < 50_000


def test_a_small_file_of_many_gigabytes_is_refused_in_one_line(tmp_path, monkeypatch):
    run = make_run(tmp_path / "a")
    once = pa.DictionaryArray.from_arrays(pa.array([0] * 5000, pa.int32()), pa.array(["x" * (1 << 20)]))
    rollout_bomb(run.rollout(1), prompt=once, response=once)
    many = pa.ListArray.from_arrays(pa.array([0, 40_000_000], pa.int32()), pa.nulls(40_000_000, pa.int32()))
    rollout_bomb(run.rollout(2), token_ids=many)
    for step in (1, 2):
        with pytest.raises(
            UnreadableError, match=f"step-00000{step}.parquet: too large to show: it decodes to more than"
        ):
            groups_of(run.rollout(step))
    board = Catalogue([tmp_path]).find("a")
    assert search(board, "x", [1, 3])["hits"] == []
    assert [bar["step"] for bar in ledger(board)["bars"]] == [1, 3]  # of the first only the outcomes are read


def test_a_group_of_too_many_tokens_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("dapo_rl.board.groups.MOST_TOKENS", 5)
    run = make_run(tmp_path / "a")
    with pytest.raises(UnreadableError, match=r"step-000001.parquet: too large to show: the group has 6 tokens"):
        group_of(Catalogue([tmp_path]).find("a"), run.rollout(1), 10)


def test_a_group_is_found_in_any_row_group(tmp_path):
    run = make_run(tmp_path / "a")
    before = groups_of(run.rollout(1))
    pq.write_table(pq.read_table(run.rollout(1)), run.rollout(1), row_group_size=1)
    board = Catalogue([tmp_path]).find("a")
    assert groups_of(run.rollout(1)) == before
    for group in before:
        found = group_of(board, run.rollout(1), group["draw"])
        assert (found["prompt_id"], len(found["samples"])) == (group["prompt_id"], len(group["samples"]))
    assert group_of(board, run.rollout(1), 99) is None


def test_occurrences_are_counted_up_to_a_number(tmp_path, monkeypatch):
    monkeypatch.setattr("dapo_rl.board.groups.MOST_COUNTED", 3)
    make_run(tmp_path / "a", steps=1, text="x x x x x x")
    (hit,) = search(Catalogue([tmp_path]).find("a"), "x", [1])["hits"]
    assert hit["count"] == 3


def test_a_run_of_another_machine_is_running_as_long_as_it_is_locked(tmp_path):
    """Its processes are not visible from here."""
    make_run(tmp_path / "a")
    (tmp_path / "a" / ".lock").write_text(f"{2**22 + 1} another-machine")
    assert Catalogue([tmp_path]).find("a").row()["state"] == "running"
    (tmp_path / "a" / ".lock").write_text(f"{2**22 + 1} {socket.gethostname()}")
    assert Catalogue([tmp_path]).find("a").row()["state"] == "stopped"
