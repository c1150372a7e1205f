"""An engine of the user's own: by its name in a setting, as a class, as an object; a run does with it what it does
with ours."""

import sys

import pytest
import torch
from safetensors.torch import load_file
from support import SMALL, make_sample, small_model, tokenizer, weights_of

from dapo_rl import Config, DAPOTrainer, UserError
from dapo_rl.cli import DEFAULT_RECIPE
from dapo_rl.config import SamplingSettings
from dapo_rl.engines.build import build_engine
from dapo_rl.engines.custom import CustomEngine
from dapo_rl.engines.hf import HFEngine
from dapo_rl.engines.native.engine import NativeEngine
from dapo_rl.engines.protocol import Completion, EngineInputs, Request, SamplingParams
from dapo_rl.models.load import load_model
from dapo_rl.types import Trajectory

SOURCE = '''
from dapo_rl.engines.native.engine import NativeEngine

class Mine(NativeEngine):
    """Ours, made as an engine of one's own is."""

    def __init__(self, model, tokenizer, settings, *, dtype, longest):
        super().__init__(model, tokenizer, dtype=dtype, longest=longest, max_batch=settings.max_batch)
        self.closed = 0

    def close(self):
        self.closed += 1
'''
QUICK = [*SMALL, "data.eval=null", "eval.every=null", "train.steps=1", "train.warmup_steps=0", "train.lr=1e-3"]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The class, in a module that can be imported, and in the current directory."""
    (tmp_path / "own_engine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import own_engine

    yield own_engine.Mine
    del sys.modules["own_engine"]


def trained(path, *overrides, **arguments):
    """The weights after a step, and the settings that were written down."""
    config = Config.load(DEFAULT_RECIPE, [*QUICK, "sampling.max_batch=64", *overrides])
    with DAPOTrainer(config=config, run_dir=path, **arguments) as trainer:
        engine = getattr(trainer._run.engine, "engine", None)  # ours has none inside
        trainer.train()
    written = Config.load(path / "config.yaml")
    return load_file(path / "model" / "model.safetensors"), written, engine


@pytest.mark.slow
def test_a_run_with_an_engine_of_ones_own_is_the_run_with_ours(tmp_path, mine):
    ours, config, _ = trained(tmp_path / "ours")
    assert config.engine == "native"
    model, its_tokenizer = load_model(config.model)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # it gets the policy's weights before it samples
    held = mine(model, its_tokenizer, config.sampling, dtype=torch.float32, longest=128)
    for name, words, arguments in (
        ("own_engine:Mine", ["engine=own_engine:Mine"], {}),
        ("own_engine.py:Mine", ["engine=own_engine.py:Mine"], {}),
        ("own_engine:Mine", [], {"engine": mine}),
        ("own_engine:Mine", [], {"engine": held}),
    ):
        path = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        weights, config, engine = trained(path, *words, **arguments)
        assert config.engine == name
        assert type(engine).__name__ == "Mine"
        assert (engine is held) == ("engine" in arguments and arguments["engine"] is held)
        assert engine.closed == 1
        for key, tensor in ours.items():
            assert torch.equal(tensor, weights[key]), (name, key)


@pytest.mark.slow
def test_a_part_that_fails_after_the_engine_closes_it(tmp_path, mine):
    made = []

    def factory(*arguments, **named):
        made.append(mine(*arguments, **named))
        return made[0]

    with pytest.raises(UserError, match="no module 'nowhere'"):
        trained(tmp_path / "run", "sampling.filter=nowhere:f", engine=factory)
    assert [engine.closed for engine in made] == [1]


def build(named, **options):
    inputs = EngineInputs(small_model(), tokenizer(), SamplingSettings(), torch.float32, 40, options=options)
    return build_engine(named, inputs)


def test_options_are_arguments_of_the_class():
    made = {}

    def make(model, tokenizer, settings, *, dtype, longest, pace=1):
        made.update(pace=pace, longest=longest)
        return build("hf")

    build(make, pace=3)
    assert made == {"pace": 3, "longest": 40}
    with pytest.raises(UserError, match=r"make raised TypeError: .*unexpected keyword argument 'speed'"):
        build(make, speed=3)


def test_names():
    assert type(build("native")) is NativeEngine
    assert type(build("hf")) is HFEngine
    with pytest.raises(UserError, match=r"^engine: there is no engine 'nativ'; did you mean native\?$"):
        build("nativ")
    with pytest.raises(
        UserError, match=r"^engine: 'ours' is not one of native, hf, vllm; one of your own is named mod"
    ):
        Config.load(None, ["engine=ours"])
    assert Config.load(None, ["engine=some.module:Class"]).engine == "some.module:Class"


def test_what_is_given_and_is_no_engine_is_one_line(tmp_path, mine):
    def closed(*_, **__):
        return Closed()

    class Closed:
        count = 0

        def close(self):
            Closed.count += 1

    config = Config.load(DEFAULT_RECIPE, QUICK)
    for given, said in (
        (3, r"^engine: expected an engine, or a class or function that makes one .*, got 3 \(int\)$"),
        (closed, r"^engine: .*closed: Closed has no method submit; "),
        (lambda: None, r"^engine: .*<lambda> raised TypeError: .*got an unexpected keyword argument 'dtype'"),
    ):
        with pytest.raises(UserError, match=said) as caught:
            DAPOTrainer(config=config, run_dir=tmp_path / "run", engine=given)
        assert "\n" not in str(caught.value)
    assert Closed.count == 1


def request(name="a", count=2):
    return Request(name, (5, 6, 7), count, SamplingParams(max_new_tokens=4, ignore_eos=True), seed=1)


@pytest.mark.parametrize(
    ("method", "does", "said"),
    [
        ("poll", lambda *_: 1 / 0, "poll raised ZeroDivisionError: division by zero"),
        ("poll", lambda *_: sys.exit(0), "poll raised SystemExit: 0"),
        ("poll", lambda *_: None, "poll returned NoneType, not a list of Completion"),
        ("poll", lambda *_: ["text"], "poll returned str in its list, not a list of Completion"),
        ("poll", lambda *_: [], "poll returned nothing while 1 requests are unfinished"),
        ("poll", lambda *_: [Completion("b", 0, make_sample())], "poll returned sample 0 of b unasked"),
        ("poll", lambda *_: [Completion("a", 0, make_sample())] * 2, "poll returned sample 0 of a unasked"),
        ("take_unfinished", lambda *_: [request("b")], "take_unfinished gave back other samples of b than are"),
        ("cancel", lambda *_: None, "cancel returned NoneType, not the number of tokens lost"),
        ("receive", lambda *_: None, "receive left version at 0; set self.version = version"),
    ],
)
def test_what_an_engine_does_wrong_is_one_line_that_names_the_method(method, does, said):
    class Wrong(HFEngine):
        pass

    setattr(Wrong, method, lambda self, *arguments: does(*arguments))
    engine = CustomEngine(Wrong(small_model(), tokenizer(), 8), "mine.py:Wrong")
    engine.submit(request())
    arguments = {"poll": (), "take_unfinished": (), "cancel": (["a"],), "receive": (3, weights_of(small_model()))}[
        method
    ]
    with pytest.raises(UserError) as caught:
        getattr(engine, method)(*arguments)
    assert str(caught.value).startswith(f"engine: mine.py:Wrong.{said}")
    assert "\n" not in str(caught.value)


def test_what_an_engine_does_not_give_back_has_to_come_by_the_next_poll():
    class Forgetful(HFEngine):
        def take_unfinished(self):
            return []

        def poll(self, timeout_s=None):
            return super().poll() if self.remembers else []

    for remembers in (True, False):
        inner = Forgetful(small_model(), tokenizer(), 8)
        inner.remembers = remembers
        engine = CustomEngine(inner, "mine.py:Forgetful")
        engine.submit(request())
        assert engine.take_unfinished() == []
        if remembers:
            assert [(done.request_id, done.index) for done in engine.poll(0.0)] == [("a", 0), ("a", 1)]
            continue
        with pytest.raises(UserError) as caught:
            engine.poll(0.0)
        said = "engine: mine.py:Forgetful.take_unfinished gave back other samples of a than are unfinished"
        assert str(caught.value).startswith(said)


def test_an_engine_without_a_version_is_one_line():
    class Bare(HFEngine):
        version = None

        def __init__(self):
            pass

    with pytest.raises(UserError, match=r"^engine: x: Bare has no version; set self.version = 0$"):
        CustomEngine(Bare(), "x")


def answered(**changes):
    return Trajectory(**{"token_ids": [5, 6], "logps": [-1, -2], "text": "t", "finish_reason": "stop"} | changes)


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ("text", "a str instead of a Sample"),
        (answered(token_ids=[], logps=[]), "0 tokens; it has 1 to 4 (max_new_tokens)"),
        (answered(token_ids=range(5), logps=[-1] * 5), "5 tokens; it has 1 to 4 (max_new_tokens)"),
        (answered(token_ids=[5, 999]), "token ids outside 0 to 99"),
        (answered(token_ids=[-1, 5]), "token ids outside 0 to 99"),
        (answered(logps=[float("nan"), -1]), "log-probabilities that are not finite and at most 0"),
        (answered(logps=[0.5, -1]), "log-probabilities that are not finite and at most 0"),
        (answered(versions=1), "versions outside 0 to 0, the engine's own"),
        (answered(finish_reason="eos"), "text str and finish_reason 'eos'; they are str, and stop or length"),
        (answered(text=b"t"), "text bytes and finish_reason 'stop'; they are str, and stop or length"),
    ],
)
def test_a_sample_that_cannot_be_is_one_line_that_says_why(sample, said):
    class Wrong(HFEngine):
        def poll(self, timeout_s=None):
            return [Completion("a", 1, sample)]

    engine = CustomEngine(Wrong(small_model(), tokenizer(), 8), "mine.py:Wrong", vocabulary=100)
    engine.submit(request())
    with pytest.raises(UserError) as caught:
        engine.poll()
    assert str(caught.value) == f"engine: mine.py:Wrong.poll returned sample 1 of a with {said}"


@pytest.mark.parametrize(
    ("keeps", "kept_ids", "said"),
    [
        (True, None, "no column kept_ids; sampling.keep_mask needs one, [tokens, 3], with −1 after the last kept id"),
        (True, [[5], [6]], "kept_ids of the shape [2, 1], not [2, 3] (top_k)"),
        (True, [[5, 100, -1], [6, 0, -1]], "kept_ids outside −1 to 99"),
        (True, [[5, -2, -1], [6, 0, -1]], "kept_ids outside −1 to 99"),
        (True, [[5, 6, -1], [5, -1, -1]], "kept_ids without the sampled token"),
        (False, [[5, 6, -1], [6, -1, -1]], "a column kept_ids, which sampling.keep_mask=false does not have"),
        (True, [[5, 6, -1], [6, -1, -1]], None),
        (False, None, None),
    ],
)
def test_kept_ids_are_there_if_they_are_asked_for(keeps, kept_ids, said):
    sample = answered(kept_ids=kept_ids)

    class Mine(HFEngine):
        def poll(self, timeout_s=None):
            return [Completion("a", 0, sample)]

    engine = CustomEngine(Mine(small_model(), tokenizer(), 8), "mine.py:Mine", vocabulary=100)
    engine.submit(Request("a", (5, 6), 1, SamplingParams(4, top_k=3, keep_mask=keeps), seed=1))
    if said is None:
        assert engine.poll() == [Completion("a", 0, sample)]
        return
    with pytest.raises(UserError) as caught:
        engine.poll()
    assert str(caught.value) == f"engine: mine.py:Mine.poll returned sample 0 of a with {said}"
