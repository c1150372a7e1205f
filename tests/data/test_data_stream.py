from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_rl.data import PromptStream
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt

light = settings(max_examples=60, deadline=None)
sizes = st.integers(1, 12)
seeds = st.integers(0, 2**40)


def prompts(count):
    return [Prompt(id=str(n), text=f"text {n}", token_ids=(n,)) for n in range(count)]


def ids(stream, count):
    return [stream.draw().id for _ in range(count)]


def saved(stream):
    with TemporaryDirectory() as directory:
        stream.save(Path(directory))
        return (Path(directory) / "stream.json").read_text()


@light
@given(sizes, seeds)
def test_every_epoch_is_a_permutation(size, seed):
    stream = PromptStream(prompts(size), seed)
    for epoch in range(4):
        drawn = []
        for at in range(size):
            assert stream.epoch == epoch
            assert stream.epochs_drawn == pytest.approx(epoch + at / size)
            drawn.append(stream.draw().id)
        assert Counter(drawn) == Counter(str(n) for n in range(size))


def test_epochs_and_seeds_differ():
    stream = PromptStream(prompts(50), 0)
    first, second = ids(stream, 50), ids(stream, 50)
    assert first != second
    assert first != [str(n) for n in range(50)]
    assert first != ids(PromptStream(prompts(50), 1), 50)
    assert first == ids(PromptStream(prompts(50), 0), 50)


def test_the_order_of_a_seed_never_changes():
    assert "".join(ids(PromptStream(prompts(6), 0), 12)) == "351204501432"


def test_the_order_of_an_epoch_does_not_depend_on_the_prompts():
    stream = PromptStream(prompts(20), 3)
    renamed = [replace(p, id=f"x{p.id}", text="other") for p in prompts(20)]
    assert [f"x{name}" for name in ids(stream, 40)] == ids(PromptStream(renamed, 3), 40)


actions = st.lists(st.one_of(st.just("draw"), st.lists(st.integers(0, 11), max_size=3)), max_size=40)


@light
@given(sizes, seeds, actions, st.integers(0, 40), st.sampled_from([0, 3]))
def test_resuming_at_any_point_gives_the_same_sequence(size, seed, history, more, drawn_before):
    data = prompts(size)
    stream = PromptStream(data, seed)
    for action in history:
        if action == "draw":
            stream.draw()
        else:
            stream.push_front([data[n % size] for n in action])
    resumed = PromptStream(prompts(size), seed)
    ids(resumed, drawn_before)
    with TemporaryDirectory() as directory:
        stream.save(Path(directory))
        resumed.load(Path(directory))
    assert resumed.epoch == stream.epoch
    assert ids(resumed, more) == ids(stream, more)
    assert saved(resumed) == saved(stream)


@light
@given(sizes, seeds, st.integers(0, 30), st.lists(st.integers(0, 11), max_size=5))
def test_pushed_prompts_come_first_and_the_stream_goes_on_unchanged(size, seed, before, pushed):
    data = prompts(size)
    stream, undisturbed = PromptStream(data, seed), PromptStream(data, seed)
    assert ids(stream, before) == ids(undisturbed, before)
    again = [data[n % size] for n in pushed]
    stream.push_front(again)
    assert ids(stream, len(again)) == [p.id for p in again]
    assert ids(stream, 2 * size) == ids(undisturbed, 2 * size)


def test_a_later_push_goes_before_an_earlier_one():
    data = prompts(4)
    stream = PromptStream(data)
    stream.push_front(data[:2])
    stream.push_front(data[2:])
    assert ids(stream, 4) == ["2", "3", "0", "1"]


def test_it_is_an_endless_iterator():
    stream = PromptStream(prompts(3), 7)
    again = PromptStream(prompts(3), 7)
    assert [p.id for _, p in zip(range(10), stream, strict=False)] == ids(again, 10)


def test_other_data_or_another_seed_is_one_line(tmp_path):
    PromptStream(prompts(5), 2).save(tmp_path)
    other_text = [*prompts(4), Prompt(id="4", text="changed", token_ids=(4,))]
    other_id = [*prompts(4), Prompt(id="5", text="text 4", token_ids=(4,))]
    other_answer = [*prompts(4), replace(prompts(5)[4], answer="changed")]
    other_column = [*prompts(4), replace(prompts(5)[4], columns={"level": 2})]
    # The same characters, cut elsewhere.
    moved = [*prompts(4), Prompt(id="4t", text="ext 4", token_ids=(4,))]
    for data, seed, message in (
        (prompts(6), 2, r"data\.train has 6 prompts, the checkpoint was written with 5; resume with the same data"),
        (other_text, 2, r"data\.train has different prompts or answers than the checkpoint"),
        (other_id, 2, r"data\.train has different prompts or answers than the checkpoint"),
        (other_answer, 2, r"data\.train has different prompts or answers than the checkpoint"),
        (other_column, 2, r"data\.train has different prompts or answers than the checkpoint"),
        (moved, 2, r"data\.train has different prompts or answers than the checkpoint"),
        (prompts(5)[::-1], 2, r"data\.train has different prompts or answers than the checkpoint"),
        (prompts(5), 3, r"seed 3 draws prompts in a different order than the checkpoint; resume with seed=2"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            PromptStream(data, seed).load(tmp_path)
        assert "\n" not in str(caught.value)


def test_columns_that_json_cannot_represent_are_compared_as_far_as_they_go(tmp_path):
    def stream(level):
        return PromptStream([replace(prompts(1)[0], columns={"table": {(0, 1): object(), "level": level}, "set": {1}})])

    stream(2).save(tmp_path)
    stream(2).load(tmp_path)
    with pytest.raises(UserError, match="different prompts or answers"):
        stream(3).load(tmp_path)


def test_what_cannot_be_drawn_from_is_refused():
    with pytest.raises(UserError, match="no prompts to draw from"):
        PromptStream([])
    with pytest.raises(ValueError, match="not unique"):
        PromptStream([*prompts(2), prompts(1)[0]])
    stranger = Prompt(id="stranger", text="", token_ids=())
    with pytest.raises(ValueError, match="prompt stranger is not in the stream"):
        PromptStream(prompts(2)).push_front([stranger])


def test_a_prompt_that_rests_is_left_out_for_its_epochs(tmp_path):
    stream = PromptStream(prompts(4), seed=3)
    first = [stream.draw() for _ in range(2)]
    stream.skip(first[0], epochs=2)
    stream.save(tmp_path)
    epochs = [[stream.draw().id for _ in range(n)] for n in (2, 3, 3, 4)]
    assert all(first[0].id not in ids for ids in epochs[:3])
    assert first[0].id in epochs[3]
    resumed = PromptStream(prompts(4), seed=3)
    resumed.load(tmp_path)
    assert [resumed.draw().id for _ in range(12)] == [name for ids in epochs for name in ids]
    for prompt in prompts(4):
        stream.skip(prompt, epochs=5)
    assert stream.draw().id in {p.id for p in prompts(4)}


def test_when_all_prompts_rest_nobody_waits_for_the_epochs_to_pass():
    """As with an endless `skip_solved_epochs`, when all prompts are solved."""
    stream = PromptStream(prompts(4), seed=3)
    stream.draw()
    for number, prompt in enumerate(prompts(4)):
        stream.skip(prompt, epochs=10**9 + number // 2)
    assert {stream.draw().id for _ in range(2)} == {"0", "1"}
    assert stream.epoch == 10**9 + 1
    assert {stream.draw().id for _ in range(4)} == {"0", "1", "2", "3"}
