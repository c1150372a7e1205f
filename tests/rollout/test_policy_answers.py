"""The policy as its own judge: the embedded model answers, through the engines of a run."""

import json

import pytest
from support import Prompts, ScriptedEngine, make_prompt, make_sample, weights_of

from dapo_rl.config import Config, ModelSettings, RewardSettings, SamplingSettings
from dapo_rl.engines.build import build_engine
from dapo_rl.engines.protocol import Completion, Engine, EngineInputs, Request, SamplingParams
from dapo_rl.engines.token_sampling import derive_seed
from dapo_rl.envs import OneTurn
from dapo_rl.errors import StopRequested, UserError
from dapo_rl.evals.sampling import answer
from dapo_rl.models.load import load_model
from dapo_rl.rewards import build_verifier
from dapo_rl.rewards.pool import VerifierPool
from dapo_rl.rollout.episodes import Episodes
from dapo_rl.rollout.policy_answers import longest_question, policy_of, use_as_judge
from dapo_rl.rollout.sampler import Sampler
from dapo_rl.types import Trajectory

pytestmark = pytest.mark.slow  # chat templates are rendered in a process

ASKS = "{prompt}{response}\n1+2=?"
"""The embedded model does a sum after whatever it reads."""


def write(path, **changes):
    judge = {"endpoint": "policy", "prompt": ASKS, "parse": "([0-9])", "max_tokens": 12} | changes
    path.write_text(json.dumps({k: v for k, v in judge.items() if v is not None}), encoding="utf-8")
    return path


def embedded():
    return load_model(ModelSettings(name="tiny", device="cpu"))


class Watched(Engine):
    """An engine that remembers what it was asked for, and what it had to do at the time."""

    def __init__(self, engine):
        self.engine, self.requests, self.open, self.together = engine, [], set(), []

    def __getattribute__(self, name):
        own = ("engine", "requests", "open", "together", "submit", "poll", "cancel", "take_unfinished")
        if name in own or name.startswith("__"):
            return object.__getattribute__(self, name)
        return getattr(self.engine, name)

    def submit(self, request):
        self.requests.append(request)
        self.open.add(request.id)
        self.engine.submit(request)

    def poll(self, timeout_s=None):
        if self.open:
            self.together.append({name.partition("-")[0] for name in self.open})
        done = self.engine.poll(timeout_s)
        self.open -= {each.request_id for each in done if not each.request_id.startswith("draw")}
        return done

    def cancel(self, ids):
        self.open -= set(ids)
        return self.engine.cancel(ids)

    def take_unfinished(self):
        self.open.clear()
        return self.engine.take_unfinished()


class Setting:
    """A judge, its file, and the engine that answers."""

    def __init__(self, path, name="native", verifier=None, context=None, **changes):
        self.path = write(path / "judge.yaml", **changes)
        self.config = Config.load("demo", [f"reward.verifier={self.path}"])
        given = RewardSettings(verifier=verifier or str(self.path), workers=0)
        self.pool = VerifierPool(build_verifier(given), given)
        self.model, self.tokenizer = embedded()
        context = context or longest_question(self.pool, self.tokenizer, self.config, self.model, 100)
        settings, dtype = SamplingSettings(max_new_tokens=56), next(self.model.parameters()).dtype
        made = build_engine(name, EngineInputs(self.model, self.tokenizer, settings, dtype, context))
        self.engine = Watched(made)
        use_as_judge(self.pool, self.engine, self.tokenizer, self.config, context)

    def asked(self, text, limit=12, temperature=0.0, seed=0):
        """What the engine says if it is asked directly."""
        ids = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        params = SamplingParams(limit, temperature)
        self.engine.engine.submit(Request("mine", ids, 1, params, seed=seed))
        (done,) = self.engine.engine.poll()
        return done.sample

    def judge(self, *texts, prompt="1+1=?\n"):
        return self.pool(make_prompt("p", prompt), [Trajectory.of_text(text) for text in texts])


def digits(text):
    return [float(each) for each in text if each in "0123456789"]


@pytest.mark.parametrize("name", ["native", "hf"])
def test_marks_are_read_from_what_the_engine_says(tmp_path, name):
    setting = Setting(tmp_path, name)
    verdicts = setting.judge("7", "2+2", "7")
    said = [setting.asked(f"1+1=?\n{text}\n1+2=?") for text in ("7", "2+2")]
    expected = [digits(sample.text)[-1] for sample in said]
    assert [verdict.score for verdict in verdicts] == [*expected, expected[0]]
    assert [verdict.correct for verdict in verdicts] == [score > 0.5 for score in (*expected, expected[0])]
    figures = setting.pool.figures()
    assert (figures["judge/calls"], figures["judge/cached"], figures["judge/errors"]) == (2, 1, 0)
    asked = setting.engine.requests
    assert [request.count for request in asked] == [1, 1]
    read = sum(len(request.prompt_ids) for request in asked)
    assert figures["judge/tokens"] == read + sum(len(sample.token_ids) for sample in said)


def test_replies_hold_for_one_version_of_the_weights(tmp_path):
    setting = Setting(tmp_path)
    before = setting.judge("7", "2+2")
    assert setting.judge("7", "2+2") == before
    assert len(setting.engine.requests) == 2
    other, _ = embedded()
    for weight in other.parameters():
        weight.data.mul_(0.7)
    setting.engine.receive(1, weights_of(other))
    after = setting.judge("7", "2+2")
    assert len(setting.engine.requests) == 4
    said = [digits(setting.asked(f"1+1=?\n{text}\n1+2=?").text) for text in ("7", "2+2")]
    assert [verdict.score for verdict in after if not verdict.failed] == [each[-1] for each in said if each]
    assert after != before


def test_nonsense_is_a_counted_error_and_with_a_temperature_is_asked_again(tmp_path):
    greedy = Setting(tmp_path, parse="grade (x)", scale={"x": 1})
    (verdict,) = greedy.judge("7")
    assert verdict.status == "error"
    assert "judge.yaml: nothing in its reply matches 'grade (x)'" in verdict.detail
    assert (greedy.pool.figures()["judge/errors"], len(greedy.engine.requests)) == (1, 1)
    for temperature in (1.0, "none"):  # that of the run
        drawn = Setting(tmp_path, parse="grade (x)", scale={"x": 1}, temperature=temperature, retries=3)
        (verdict,) = drawn.judge("7")
        assert verdict.status == "error"
        figures = drawn.pool.figures()
        assert (figures["judge/errors"], figures["judge/calls"]) == (1, 4)
        assert len({request.seed for request in drawn.engine.requests}) == 4
        assert {request.params.temperature for request in drawn.engine.requests} == {1.0}


def test_random_replies_follow_from_the_seed(tmp_path):
    random = {"temperature": 1.0, "max_tokens": 20, "retries": 0}
    setting = Setting(tmp_path, **random)
    first = setting.judge("7", "2+2")
    for text, request, verdict in zip(("7", "2+2"), setting.engine.requests, first, strict=True):
        reply = setting.asked(f"1+1=?\n{text}\n1+2=?", 20, 1.0, request.seed).text
        assert verdict.score == digits(reply)[-1]
    assert len({request.seed for request in setting.engine.requests}) == 2
    assert Setting(tmp_path, **random).judge("7", "2+2") == first


def test_a_question_that_is_too_long_is_not_asked(tmp_path):
    setting = Setting(tmp_path, context=40)
    short, long = setting.judge("7", "1" * 60)
    assert not short.failed
    assert long.status == "error"
    assert "its question has 74 tokens, of a context of 40" in long.detail
    assert len(setting.engine.requests) == 1
    (request,) = setting.engine.requests
    assert request.longest <= 40


def test_a_reply_has_as_many_tokens_as_there_is_room(tmp_path):
    setting = Setting(tmp_path, context=30, max_tokens=None)
    setting.judge("7")
    assert [request.longest for request in setting.engine.requests] == [30]


def test_a_question_is_read_as_a_chat_message_without_the_system_prompt_of_the_data(tmp_path):
    setting = Setting(tmp_path)
    for words, text in (
        ([], "<bos>1+1=?\n7\n1+2=?\n"),
        (["data.system_prompt=Do sums."], "<bos>1+1=?\n7\n1+2=?\n"),
        (["data.chat_template=never"], "<bos>1+1=?\n7\n1+2=?"),
    ):
        config = Config.load("demo", [f"reward.verifier={setting.path}", *words])
        use_as_judge(setting.pool, setting.engine, setting.tokenizer, config, 100)
        setting.judge("7")
        assert setting.tokenizer.decode(setting.engine.requests[-1].prompt_ids) == text


def test_a_judge_without_an_engine_is_one_line(tmp_path):
    given = RewardSettings(verifier=str(write(tmp_path / "judge.yaml")), workers=0)
    with pytest.raises(UserError, match=r"^.*judge\.yaml: endpoint: policy: there is no engine here to answer$"):
        VerifierPool(build_verifier(given), given)(make_prompt("p"), [Trajectory.of_text("7")])


def test_a_budget_stops(tmp_path):
    setting = Setting(tmp_path, budget={"calls": 1})
    with pytest.raises(StopRequested, match=r"judge\.yaml: budget\.calls: 1 calls are spent"):
        setting.judge("7", "8")
    assert setting.pool.stopped.startswith(str(setting.path))
    assert len(setting.engine.requests) == 1
    assert not policy_of(setting.pool).has_questions


def test_a_stop_leaves_the_engine_empty_and_the_questions_waiting(tmp_path):
    setting = Setting(tmp_path)
    expected = setting.judge("7", "2+2")
    setting.engine.receive(1, weights_of(setting.model))
    ticket = setting.pool.submit(make_prompt("p", "1+1=?\n"), [Trajectory.of_text(text) for text in ("7", "2+2")])

    def stop():
        raise StopRequested

    policy = policy_of(setting.pool)
    with pytest.raises(StopRequested):
        policy.answer(stop)
    assert setting.engine.take_unfinished() == []
    assert policy.has_questions
    assert not ticket.done()
    assert ticket.result() == expected


@pytest.mark.parametrize("restarts", [True, False])
def test_an_interrupted_question_is_in_the_budget_once(tmp_path, restarts):
    def stop():
        raise StopRequested

    setting = Setting(tmp_path, budget={"calls": 2})
    setting.pool.begin(tmp_path)
    setting.pool.submit(make_prompt("p", "1+1=?\n"), [Trajectory.of_text(text) for text in ("7", "2+2")])
    with pytest.raises(StopRequested):
        policy_of(setting.pool).answer(stop)
    if restarts:
        setting = Setting(tmp_path, budget={"calls": 2})
        setting.pool.begin(tmp_path)
    assert len(setting.judge("7", "2+2")) == 2
    assert setting.pool.figures()["judge/calls"] == 2
    with pytest.raises(StopRequested, match=r"budget\.calls: 2 calls are spent"):
        setting.judge("9")


def test_questions_that_were_given_up_are_not_asked(tmp_path):
    setting = Setting(tmp_path)
    ticket = setting.pool.submit(make_prompt("p", "1+1=?\n"), [Trajectory.of_text("7")])
    policy = policy_of(setting.pool)
    policy.forget()
    policy.answer(lambda: None)
    assert setting.engine.requests == []
    assert ticket.done()
    assert not setting.judge("7")[0].failed


def episodes_of(setting, waits, size=3):
    def request(draw, prompt, version):
        params = SamplingParams(40, 1.0)
        return Request(f"draw-{draw}", prompt.token_ids, size, params, derive_seed(0, draw))

    return Episodes(
        setting.engine, OneTurn(setting.pool), request, longest=40, waits=waits, policy=policy_of(setting.pool)
    )


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("extra", [[], ["math"]])
def test_the_engine_answers_between_two_polls_of_samples(tmp_path, waits, extra):
    """Verdicts that are read while samples are under way, and at the end, when questions alone are left."""
    verifier = [str(write(tmp_path / "judge.yaml")), *extra] if extra else None
    setting = Setting(tmp_path, verifier=verifier)
    episodes = episodes_of(setting, waits)
    episodes.submitted = True
    for draw in range(6):
        episodes.start(draw, make_prompt(f"p{draw}", f"{draw}+5=?\n", answer=str(draw + 5)))
    groups, tokens, early = {}, 0, 0
    while len(episodes):
        if episodes.generating:
            tokens += episodes.poll()
        read = episodes.judging >= 2 or not episodes.generating
        for group in episodes.finish(judge_all=read):
            early += episodes.generating
            groups[group.draw] = group
    tokens += episodes.drain()
    assert early >= 2
    assert {len(kinds) for kinds in setting.engine.together} == {1}, "samples and judges were together in the engine"
    assert tokens == sum(group.tokens for group in groups.values())
    for draw, group in groups.items():
        for sample, verdict in zip(group.samples, group.verdicts, strict=True):
            reply = setting.asked(f"{draw}+5=?\n{sample.text}\n1+2=?").text
            assert verdict.failed == (not digits(reply))
            if not verdict.failed:
                assert verdict.parts[0].score == digits(reply)[-1]
                assert len(verdict.parts) == 1 + len(extra)


def test_judges_change_no_sample(tmp_path):
    """Samples that are put back into the engine are those of a run without a judge."""
    setting = Setting(tmp_path)
    judged, alone = {}, {}
    for found, every in ((judged, 1), (alone, 99)):
        episodes = episodes_of(setting, waits=True)
        episodes.submitted = True
        for draw in range(4):
            episodes.start(draw, make_prompt(f"p{draw}", f"{draw}+5=?\n"))
        while len(episodes):
            if episodes.generating:
                episodes.poll()
            read = episodes.judging >= every or not episodes.generating
            found |= {group.draw: group for group in episodes.finish(judge_all=read)}
    texts = [
        {draw: [sample.text for sample in group.samples] for draw, group in each.items()} for each in (judged, alone)
    ]
    assert texts[0] == texts[1]
    assert {draw: group.verdicts for draw, group in judged.items()} == {d: g.verdicts for d, g in alone.items()}


def test_an_evaluation_asks_in_portions_and_leaves_nothing_behind(tmp_path):
    setting = Setting(tmp_path)
    prompts = [make_prompt(f"p{draw}", f"{draw}+5=?\n") for draw in range(8)]

    def answers(**portions):
        return answer(setting.engine, setting.pool, prompts, SamplingParams(40, 1.0), 2, 0, **portions)

    whole = {group.draw: group for group in answers()}
    phases = portions_of(setting.engine.together)
    assert phases == ["eval", "judge"]
    setting.engine.together.clear()
    setting.engine.receive(1, weights_of(setting.model))
    for group in answers(at_a_time=4):
        assert group.verdicts == whole[group.draw].verdicts
        assert [sample.text for sample in group.samples] == [sample.text for sample in whole[group.draw].samples]
    assert portions_of(setting.engine.together).count("judge") > 1
    setting.engine.receive(2, weights_of(setting.model))
    policy = policy_of(setting.pool)

    def stop():
        if policy.has_questions:
            raise StopRequested

    with pytest.raises(StopRequested):
        list(answers(check=stop))
    assert setting.engine.take_unfinished() == []
    assert not policy.has_questions


def portions_of(together):
    """What the engine worked on, one after the other."""
    kinds = [next(iter(kinds)) for kinds in together]
    return [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]


def test_a_pause_gives_questions_up_and_a_continued_batch_asks_again(tmp_path):
    setting = Setting(tmp_path)
    episodes = episodes_of(setting, waits=True)
    episodes.submitted = True
    episodes.start(0, make_prompt("p0", "0+5=?\n"))
    while episodes.generating:
        episodes.poll()
    assert policy_of(setting.pool).has_questions
    episodes.drain()
    (unread,) = episodes.pause()
    assert unread.verdicts is None
    assert not policy_of(setting.pool).has_questions
    episodes.unpause([unread])
    (group,) = episodes.finish(judge_all=True)
    assert len(group.verdicts) == 3
    assert not any(verdict.failed for verdict in group.verdicts)


@pytest.mark.parametrize("lengths", [(3, 40), (40, 3)])
def test_outcomes_do_not_depend_on_which_group_ends_first(tmp_path, lengths):
    """The engines of a cluster finish groups in any order. The scores of one group are all the same, and those of the
    other show that scores are graded."""
    setting = Setting(tmp_path, prompt="{response}")
    texts = {"draw-0": "55", "draw-1": "34", "draw-2": "12"}

    def script(request):
        if request.id.startswith("judge"):
            return [make_sample(2, text=setting.tokenizer.decode(request.prompt_ids))]
        return [make_sample((*lengths, 3)[int(request.id[-1])], text=text) for text in texts[request.id]]

    engine = ScriptedEngine(script)
    use_as_judge(setting.pool, engine, setting.tokenizer, setting.config, 100)
    settings = SamplingSettings(group_size=2, max_staleness=0)
    sampler = Sampler(Prompts(), engine, setting.pool, SamplingParams(100), settings, cap=9, seed=0)
    fill = sampler.fill(2)
    assert [group.draw for group in fill.kept] == [1, 2]
    assert [(group.draw, outcome) for group, outcome in fill.dropped] == [(0, "all_correct")]


class EndsWhenTaken(ScriptedEngine):
    """Finishes what it has when it is asked to give it back, as an engine in another process can."""

    def take_unfinished(self):
        unfinished = super().take_unfinished()
        own = [request for request in unfinished if request.id == self.ends]
        self.done = [
            Completion(request.id, i, sample) for request in own for i, sample in enumerate(self._samples[request.id])
        ]
        return [request for request in unfinished if request not in own]

    def poll(self, timeout_s=None):
        done, self.done = getattr(self, "done", []), []
        return done or super().poll(timeout_s)


def test_samples_that_end_when_the_engine_is_taken_are_counted(tmp_path):
    setting = Setting(tmp_path)

    def script(request):
        if request.id.startswith("judge"):
            return [make_sample(2, text="7")]
        return [make_sample(3 + 20 * int(request.id[-1]), text=f"{request.id} {i}") for i in range(3)]

    engine = EndsWhenTaken(script)
    engine.ends = "draw-1"
    setting.engine = engine
    use_as_judge(setting.pool, engine, setting.tokenizer, setting.config, 100)
    episodes = episodes_of(setting, waits=True)
    episodes.submitted = True
    for draw in range(2):
        episodes.start(draw, make_prompt(f"p{draw}"))
    tokens, groups = episodes.poll(), []
    groups += episodes.finish(judge_all=True)
    assert [group.draw for group in groups] == [0, 1]
    assert tokens == groups[0].tokens
    assert episodes.drain() == groups[1].tokens == 69
