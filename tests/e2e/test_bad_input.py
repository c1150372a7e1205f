"""docs/errors.md, row by row: what is wrong is made wrong for real, and the line that is printed is the one there."""

import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import forked
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support import DAPO, REPOSITORY, small_model

from dapo_rl import cli
from dapo_rl.data.arithmetic import problems
from dapo_rl.memory.model_size import KNOWN
from dapo_rl.memory.sizes import run_sizes
from dapo_rl.models.load import TINY
from dapo_rl.run import backend
from dapo_rl.run import build_policy as learners
from dapo_rl.train.checkpoint import MANIFEST, _own_checksum, _write_manifest

pytestmark = pytest.mark.slow

QUICK = [
    "log.report=false",
    "train.steps=1",
    "train.mini_batches=1",
    "train.epochs_per_step=1",
    "sampling.prompts_per_step=2",
    "sampling.group_size=4",
    "data.train.size=100",
    "data.eval=null",
    "eval.every=null",
]
LIKE_THE_DEMO = ["sampling.max_new_tokens=56", "train.lr=2e-4"]
"""For runs of another model or other data, which do not have the demo's settings."""


SAMPLES = r"(; t| T)he samples of this step are in \S+\.parquet, which `dapo board \S+` shows\.?"
"""What the page says of errors in a step."""


@dataclass(frozen=True)
class Row:
    printed: str
    """With … for what differs from case to case."""
    code: int

    def matches(self, text):
        parts = [re.escape(part) for part in self.printed.split("…")]
        return re.fullmatch(".*".join(parts), re.sub(SAMPLES, "", text)) is not None


def rows():
    """The table's rows by their first cell."""
    table = {}
    for line in (REPOSITORY / "docs" / "errors.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 3 and cells[2].isdecimal():
            assert cells[0] not in table, f"twice: {cells[0]}"
            table[cells[0]] = Row(cells[1].strip("`").strip(), int(cells[2]))
    return table


@dataclass(frozen=True)
class Case:
    prepare: Callable[["Place"], list[str]]
    begins: bool = False
    """The mistake shows when the run has begun: it leaves a run directory."""
    more: bool = False
    """The traceback of a user's own function follows the line."""


CASES: dict[str, Case] = {}


def case(name, **kind):
    def add(prepare):
        assert name not in CASES
        CASES[name] = Case(prepare, **kind)
        return prepare

    return add


class Place:
    """An empty directory for a case, and what cases need there."""

    def __init__(self, path, monkeypatch, finished):
        self.path, self.monkeypatch, self._finished = path, monkeypatch, finished
        self.processes = []

    def write(self, name, content):
        path = self.path / name
        path.write_bytes(content) if isinstance(content, bytes) else path.write_text(content)
        return name

    def lines(self, *values, name="data.jsonl"):
        return self.write(name, "".join(json.dumps(value) + "\n" for value in values))

    def model(self, without=(), change=None, **config):
        """The embedded model in a directory, with files left out, changed, or other settings in config.json."""
        shutil.copytree(TINY, self.path / "model", copy_function=shutil.copy)
        for name in without:
            (self.path / "model" / name).unlink()
        for name, function in (change or {}).items():
            path = self.path / "model" / name
            path.write_bytes(function(path.read_bytes()))
        if config:
            path = self.path / "model" / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return "model.name=model"

    def reward(self, text):
        self.write("rewards.py", text)
        return ["train", *QUICK, "reward.verifier=rewards.py:score", "--run", "run"]

    def finished(self):
        """A run of two steps, with a checkpoint after each, and the model and data that it was begun with."""
        shutil.copytree(self._finished, self.path, dirs_exist_ok=True)
        return self.path / "run"

    def resumed(self):
        self.finished()
        return ["train", "--run", "run", "--resume", "train.steps=3"]

    def edit(self, name, old, new):
        text = (self.path / name).read_text()
        assert text.count(old) == 1
        self.write(name, text.replace(old, new))

    def vouch_for(self, checkpoint, **changes):
        """A manifest for the files as they are now."""
        (checkpoint / MANIFEST).unlink()
        _write_manifest(checkpoint, int(checkpoint.name.removeprefix("step-")))
        manifest = json.loads((checkpoint / MANIFEST).read_text()) | changes
        manifest = {key: value for key, value in manifest.items() if value is not None}
        (checkpoint / MANIFEST).write_text(json.dumps(manifest | {"sha256": _own_checksum(manifest)}))

    def hold(self, run):
        """Another process that writes the run directory."""
        code = "import sys; from pathlib import Path; from dapo_rl.base.lock import acquire; "
        code += "acquire(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
        process = subprocess.Popen(
            [sys.executable, "-c", code, run], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.processes.append(process)
        assert process.stdout.readline() == "held\n"

    def out_of_memory(self, tokens):
        """A GPU that holds the update of so many tokens."""
        load = backend.load_model

        def hook(_module, _args, inputs, _output):
            if torch.is_grad_enabled() and inputs["input_ids"].numel() > tokens:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        def loaded(settings):
            model, tokenizer = load(settings)
            model.model.register_forward_hook(hook, with_kwargs=True)
            return model, tokenizer

        self.monkeypatch.setattr(backend, "load_model", loaded)

    def gpu(self, gibibytes, model):
        """A GPU of this size, and a model as large as this one."""

        def sizes(config, _model, longest):
            size = KNOWN[model]
            how = {"bfloat16": True, "trained": size.parameters, "longest": longest}
            return run_sizes(config, size, gibibytes << 30, **how)

        self.monkeypatch.setattr(learners, "_sizes_on_gpu", sizes)


def dapo(*words):
    """The command, in this process: code, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before, sys.argv = sys.argv, ["dapo", *map(str, words)]
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        sys.argv = before
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return ended.value.code, out.getvalue(), err.getvalue()


def contents(directory):
    """Digests of all files: a run and its checkpoints have 27 MB, and an exception may keep them."""
    files = [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
    return {path: hashlib.sha256(path.read_bytes()).digest() for path in files}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("finished")
    place = Place(directory, None, None)
    words = [*QUICK, *LIKE_THE_DEMO, place.model(), f"data.train={place.lines(*problems(50))}"]
    before = Path.cwd()
    os.chdir(directory)
    try:
        code, _, err = dapo("train", *words, "train.steps=2", "checkpoint.every=1", "--run", "run")
    finally:
        os.chdir(before)
    assert code == 0, err
    return directory


@pytest.fixture
def here(tmp_path, monkeypatch, finished):
    place = Place(tmp_path / "here", monkeypatch, finished)
    place.path.mkdir()
    monkeypatch.chdir(place.path)
    yield place
    for process in place.processes:
        process.kill()  # the end of its input may be held open by verifiers' processes
        process.communicate(timeout=60)


def test_every_row_has_a_case_and_every_case_a_row():
    assert list(rows()) == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_row(name, here):
    row, case = rows()[name], CASES[name]
    words = case.prepare(here)
    before = contents(here.path)
    code, out, err = dapo(*words)
    assert code == row.code, err
    if row.code == 0:
        assert any(row.matches(line.strip()) for line in out.splitlines()), out
        assert err == ""
        return
    check_error(row, err, case.more)
    assert "Traceback" not in out
    if not case.begins:
        assert contents(here.path) == before
        assert not (here.path / "runs").exists()


def check_error(row, err, more=False):
    first, *others = err.splitlines()
    assert row.matches(first), first
    assert first.startswith("dapo: ")
    assert bool(others) == more, err


@pytest.mark.parametrize(
    "name", ["a setting that does not exist", "truncated weights", "a reward function that raises every time"]
)
def test_row_as_a_process(name, here):
    """What the other tests run in their own process, as a user does."""
    result = forked.run([DAPO, *CASES[name].prepare(here)], timeout=120)
    assert result.returncode == rows()[name].code
    check_error(rows()[name], result.stderr, CASES[name].more)


# Settings


@case("a setting that does not exist")
def _(_here):
    return ["train", "algo.clip_hihg=0.3"]


@case("a setting under another library's name")
def _(_here):
    return ["train", "train.learning_rate=1e-6"]


@case("a setting that only another library has")
def _(_here):
    return ["train", "output_dir=out"]


@case("a value of the wrong type")
def _(_here):
    return ["train", "train.steps=ten"]


@case("a boolean where a number is expected")
def _(_here):
    return ["train", "train.lr=true"]


@case("a value out of range")
def _(_here):
    return ["train", "train.lr=0"]


@case("a number that is not finite")
def _(_here):
    return ["train", "train.lr=1e400"]


@case("a whole number of more than 64 bits")
def _(_here):
    return ["train", f"seed={10**30}"]


@case("a value that is not one of the choices")
def _(_here):
    return ["train", "sampling.surplus=cary"]


@case("a list where a single value is expected")
def _(_here):
    return ["train", "seed=[1, 2]"]


@case("a section without a key")
def _(_here):
    return ["train", "train=3"]


@case("an override without a key")
def _(_here):
    return ["train", "=3"]


@case("an option with the name of a setting")
def _(_here):
    return ["train", "--seed", "3"]


@case("a key with a part missing")
def _(_here):
    return ["train", ".lr=3"]


@case("settings that contradict each other")
def _(_here):
    return ["train", "train.mini_batches=7"]


@case("an engine that does not exist")
def _(_here):
    return ["train", "engine=nativ"]


@case("a custom engine that does not exist")
def _(here):
    here.write("engines.py", "class Mine: ...")
    return ["train", *QUICK, "engine=engines.py:Mien", "--run", "run"]


@case("a custom engine that is not a class")
def _(here):
    here.write("engines.py", "Mine = 3")
    return ["train", *QUICK, "engine=engines.py:Mine", "--run", "run"]


@case("a custom engine that raises", more=True)
def _(here):
    here.write("engines.py", "def Mine(*_, **__): raise ConnectionError('no server')")
    return ["train", *QUICK, "engine=engines.py:Mine", "--run", "run"]


@case("a custom engine without a required method")
def _(here):
    here.write(
        "engines.py",
        "class Mine:\n    def __init__(self, *_, **__): ...\n    def submit(self, request): ...\n"
        "    def poll(self): return []\n",
    )
    return ["train", *QUICK, "engine=engines.py:Mine", "--run", "run"]


@case("an evaluation on the training file")
def _(place):
    data = place.lines({"prompt": "1+1=?", "answer": "2"})
    return ["train", f"data.train={data}", f"data.eval=./{data}"]


@case("an evaluation on a copy of training prompts")
def _(place):
    rows = [{"prompt": "1+1=?", "answer": "2"}, {"prompt": "1+2=?", "answer": "3"}]
    return ["train", f"data.train={place.lines(*rows)}", f"data.eval={place.lines(rows[0], name='other.jsonl')}"]


@case("an evaluation with nothing to evaluate on")
def _(_here):
    return ["train", "data.eval=null"]


@case("two recipes")
def _(_here):
    return ["train", "a.yaml", "b.yaml"]


@case("a recipe that does not exist")
def _(here):
    here.write("mine.yaml", "seed: 1\n")
    return ["train", "mien.yaml"]


@case("a recipe's name that does not exist")
def _(here):
    return ["train", "gsm8k-qwen2.5-1.5"]


@case("a recipe that is not YAML")
def _(here):
    return ["train", here.write("recipe.yaml", "seed: 1\ntrain: [1, 2\n")]


@case("a recipe with a duplicate key")
def _(here):
    return ["train", here.write("recipe.yaml", "train:\n  lr: 1e-6\nseed: 1\ntrain:\n  steps: 3\n")]


@case("a recipe with a key both nested and dotted")
def _(here):
    return ["train", here.write("recipe.yaml", "train:\n  lr: 1e-6\ntrain.lr: 2e-6\n")]


@case("a recipe that is not a mapping")
def _(here):
    return ["train", here.write("recipe.yaml", "- train\n- lr\n")]


@case("a recipe that is binary")
def _(here):
    return ["train", here.write("recipe.yaml", b"\x80\x81\xff\x00")]


@case("a recipe that is a directory")
def _(here):
    (here.path / "recipe.yaml").mkdir()
    return ["train", "recipe.yaml"]


@case("a recipe that is a device")
def _(_here):
    return ["train", "/dev/zero"]


@case("a recipe that is too large")
def _(here):
    return ["train", here.write("recipe.yaml", "# much\n" * 40_000)]


@case("a recipe whose merges expand too far")
def _(here):
    lines = [f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 20)]
    return ["train", here.write("recipe.yaml", "a0: &a0 {x: 1}\n" + "".join(lines))]


@case("a recipe whose anchor contains itself")
def _(here):
    return ["train", here.write("recipe.yaml", "train: &a\n  lr: *a\n")]


@case("a recipe with a date where text is expected")
def _(here):
    return ["train", here.write("recipe.yaml", "model:\n  name: 2024-01-31\n")]


# Data


@case("a data file that does not exist")
def _(here):
    here.lines({"prompt": "1+1=?"}, name="train.jsonl")
    return ["train", "data.train=tarin.jsonl"]


@case("a recipe's data file that does not exist")
def _(here):
    return ["train", "gsm8k-qwen2.5-1.5b"]


@case("a recipe without data")
def _(here):
    return ["train", here.write("mine.yaml", "model: {name: org/model}\n")]


@case("a list of data files without brackets")
def _(here):
    here.lines({"prompt": "1+1=?"}, name="a.jsonl")
    return ["train", "data.train=a.jsonl,b.jsonl"]


@case("a row with an image")
def _(here):
    rows = [{"prompt": "How many?", "answer": "2", "images": images} for images in (None, ["cat.png"])]
    return ["train", f"data.train={here.lines(*rows)}"]


@case("an empty data file")
def _(here):
    return ["train", f"data.train={here.write('data.jsonl', '')}"]


@case("a data file with one line that is not JSON")
def _(here):
    here.write("data.jsonl", '{"prompt": "1+1=?\\n", "answer": "2"}\n{oops\n')
    return ["train", *QUICK, *LIKE_THE_DEMO, "data.train=data.jsonl", "sampling.dynamic=false"]


@case("a data file without any JSON")
def _(here):
    return ["train", f"data.train={here.write('data.jsonl', 'hello' + chr(10))}"]


@case("an unsupported file format")
def _(here):
    return ["train", f"data.train={here.write('data.csv', 'prompt,answer' + chr(10))}"]


@case("no prompt column")
def _(here):
    return ["train", f"data.train={here.lines({'text': '1+1=?', 'answer': '2'})}"]


@case("no answer column")
def _(here):
    return ["train", f"data.train={here.lines({'prompt': '1+1=?', 'result': '2'})}"]


@case("a column in the settings that the data does not have")
def _(here):
    return ["train", f"data.train={here.lines({'prompt': '1+1=?', 'answer': '2'})}", "data.answer_key=solution"]


@case("a data file with one ground truth that is not text")
def _(here):
    given = [row | {"answer": row["answer"].encode()} for row in problems(20)]
    given[1]["answer"] = b"\x89PNG"
    pq.write_table(pa.Table.from_pylist(given), here.path / "data.parquet")
    return ["train", *QUICK, *LIKE_THE_DEMO, "data.train=data.parquet", "--run", "run"]


@case("prompts that are all too long")
def _(here):
    data = here.lines({"prompt": "1+" * 50 + "1=?", "answer": "51"})
    return ["train", f"data.train={data}", "data.max_prompt_tokens=32"]


@case("a damaged parquet file")
def _(here):
    pq.write_table(pa.table({"prompt": ["1+1=?"] * 100, "answer": ["2"] * 100}), here.path / "data.parquet")
    whole = (here.path / "data.parquet").read_bytes()
    return ["train", f"data.train={here.write('data.parquet', whole[:-50])}"]


@case("an unknown reasoning-gym task")
def _(_here):
    return ["train", "data.train=reasoning_gym:chain_sums"]


@case("an unknown parameter of a data source")
def _(_here):
    return ["train", "data.train.sise=100"]


@case("a misspelt data source")
def _(_here):
    return ["train", "data.train=aritmetic"]


@case("a hub data set without a network")
def _(here):
    pytest.importorskip("datasets")
    here.monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    return ["train", "data.train=someone/sums"]


@case("a hub data set without the package datasets")
def _(here):
    here.monkeypatch.setitem(sys.modules, "datasets", None)
    return ["train", "data.train=someone/sums"]


# Models


@case("a model directory that does not exist")
def _(here):
    here.model()
    return ["train", "model.name=./modle", "data.train=arithmetic"]


@case("a model that is a file")
def _(here):
    return ["train", f"model.name={here.write('model.safetensors', b'')}", "data.train=arithmetic"]


@case("a model directory without config.json")
def _(here):
    return ["train", here.model(without=["config.json"]), "data.train=arithmetic"]


@case("a model directory without weights")
def _(here):
    return ["train", here.model(without=["model.safetensors"]), "data.train=arithmetic"]


@case("truncated weights")
def _(here):
    return [
        "train",
        here.model(change={"model.safetensors": lambda weights: weights[: len(weights) // 2]}),
        "data.train=arithmetic",
    ]


@case("weights that are not finite")
def _(here):
    return [
        "train",
        here.model(change={"model.safetensors": lambda weights: weights[:-400] + b"\xff" * 400}),
        "data.train=arithmetic",
    ]


@case("weights whose shapes differ from config.json")
def _(here):
    return ["train", here.model(hidden_size=64), "data.train=arithmetic"]


@case("weights missing for some layers")
def _(here):
    return ["train", here.model(num_hidden_layers=9), "data.train=arithmetic"]


@case("an architecture unknown to transformers")
def _(here):
    return ["train", here.model(model_type="nonsense"), "data.train=arithmetic"]


@case("a vision-language model")
def _(here):
    return ["train", *QUICK, here.model(model_type="qwen2_5_vl", architectures=None), "data.train=arithmetic"]


@case("an architecture that is not a causal language model")
def _(here):
    return ["train", here.model(model_type="t5", architectures=["T5ForConditionalGeneration"]), "data.train=arithmetic"]


@case("a model that needs custom code")
def _(here):
    return ["train", here.model(model_type="own", auto_map={"AutoConfig": "own.Config"}), "data.train=arithmetic"]


@case("a tokenizer that needs custom code")
def _(here):
    change = {"tokenizer_config.json": lambda _: b'{"tokenizer_class": "Own", "auto_map": ["own.Tokenizer", null]}'}
    return ["train", here.model(change=change), "data.train=arithmetic"]


@case("pickled weights that contain more than tensors")
def _(here):
    name = here.model(without=["model.safetensors"])
    torch.save({"path": here.path}, here.path / "model" / "pytorch_model.bin")
    return ["train", name, "data.train=arithmetic"]


@case("an invalid end-of-sequence token")
def _(here):
    return [
        "train",
        here.model(change={"generation_config.json": lambda _: b'{"eos_token_id": "</s>"}'}),
        "data.train=arithmetic",
    ]


@case("a model context that is too short")
def _(here):
    return ["train", here.model(max_position_embeddings=32), "sampling.max_new_tokens=56", "data.train=arithmetic"]


@case("a hub model without a network")
def _(here):
    here.monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    return ["train", "model.name=someone/model", "data.train=arithmetic"]


@case("a machine without a GPU")
def _(here):
    here.monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return ["train", "model.device=cuda"]


@case("a model without a tokenizer")
def _(here):
    return ["train", here.model(without=["tokenizer.json"]), "data.train=arithmetic"]


@case("a truncated tokenizer file")
def _(here):
    return ["train", here.model(change={"tokenizer.json": lambda text: text[:100]}), "data.train=arithmetic"]


@case("a tokenizer without a chat template, for chat messages")
def _(here):
    data = here.lines({"prompt": [{"role": "user", "content": "1+1=?"}], "answer": "2"})
    return ["train", here.model(without=["chat_template.jinja"]), f"data.train={data}"]


@case("a tokenizer without an end-of-sequence token")
def _(here):
    def without_eos(text):
        settings = json.loads(text)
        del settings["eos_token"]
        return json.dumps(settings).encode()

    return ["train", here.model(change={"tokenizer_config.json": without_eos}), "data.train=arithmetic"]


# Rewards


@case("a verifier that does not exist")
def _(_here):
    return ["train", "reward.verifier=maths"]


@case("a verifier twice in a list")
def _(_here):
    return ["train", "reward.verifier=[math, exact, math]"]


@case("a weight that is not a number")
def _(_here):
    return ["train", "reward.verifier=[math, {verifier: exact, weight: high}]"]


@case("a reward function that logs NaN", begins=True, more=True)
def _(here):
    lines = ("def score(completions, log_metric):", "    log_metric('m', float('nan'))", "    return [1.0] * 4", "")
    return here.reward("\n".join(lines))


@case("a minor reward", begins=True)
def _(here):
    here.write("length.py", "def size(completions):\n    return [len(text) / 100 for text in completions]\n")
    verifier = "[math, {verifier: length.py:size, weight: 0.2}]"
    return ["train", *QUICK, f"reward.verifier={verifier}", "--run", "run"]


@case("a reward file that does not exist")
def _(here):
    here.write("rewards.py", "")
    return ["train", "reward.verifier=reward.py:score"]


@case("a reward file without the named function")
def _(here):
    here.write("rewards.py", "def score(prompts, completions): ...\n")
    return ["train", "reward.verifier=rewards.py:scroe"]


@case("a reward file that cannot be imported")
def _(here):
    return here.reward("import nothing_of_that_name\n")


@case("a class instead of a reward function")
def _(here):
    return here.reward("class score:\n    def __call__(self, prompts, completions): ...\n")


@case("a reward function with an unknown signature")
def _(here):
    return here.reward("def score(text): ...\n")


@case("the gym verifier with data from another source")
def _(_here):
    return ["train", *QUICK, "reward.verifier=gym", "--run", "run"]


@case("a reward function that raises every time", begins=True, more=True)
def _(here):
    return here.reward("def score(prompts, completions, **columns):\n    return [1 / 0 for _ in completions]\n")


@case("a reward function that returns text", begins=True)
def _(here):
    return here.reward("def score(prompts, completions, **columns):\n    return ['good' for _ in completions]\n")


@case("a reward function that returns NaN", begins=True)
def _(here):
    return here.reward(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return float('nan')\n"
    )


@case("a reward function that returns too few scores", begins=True)
def _(here):
    return here.reward("def score(prompts, completions, **columns):\n    return [1.0]\n")


@case("a reward function that needs a column the data does not have", begins=True, more=True)
def _(here):
    return here.reward("def score(prompts, completions, solution):\n    return [1.0 for _ in completions]\n")


@case("a verifier object that raises every time", begins=True, more=True)
def _(here):
    return here.reward(
        "class Judge:\n    def __call__(self, prompt, samples):\n        return [1 / 0 for _ in samples]\n\n\n"
        "score = Judge()\n"
    )


@case("a verifier whose verdict has an invalid score", begins=True)
def _(here):
    return here.reward(
        "from dapo_rl.types import Verdict\n\n\ndef score(prompt, samples):\n"
        "    return [Verdict(float('inf'), True, 'correct') for _ in samples]\n"
    )


@case("a verifier that keeps killing its parent process", begins=True)
def _(here):
    words = here.reward(
        "import os, time\n\n\ndef score(prompts, completions, **columns):\n"
        "    os.kill(os.getppid(), 9)\n    time.sleep(60)\n"
    )
    return [*words, "reward.workers=1"]


@case("a reward function that sometimes raises", begins=True)
def _(here):
    words = here.reward(
        "def score(prompts, completions, answer, **columns):\n    return [1.0 / (int(one) > 5) for one in answer]\n"
    )
    return [*words, "sampling.dynamic=false", "reward.max_error_share=1"]


@case("a custom filter that calls sys.exit", begins=True)
def _(here):
    words = here.reward(
        "import sys\n\n\ndef score(completions):\n    return [float(len(text)) for text in completions]\n\n\n"
        "def keep(group):\n    sys.exit(0)\n"
    )
    return [*words, "sampling.dynamic=false", "sampling.filter=rewards.py:keep"]


OWN = "import sys\n\n\ndef score(completions):\n    return [float(len(text)) for text in completions]\n\n\n"


@case("a custom loss that returns the wrong shape", begins=True)
def _(here):
    words = here.reward(f"{OWN}def loss(new_logps, old_logps, advantages, mask):\n    return new_logps.mean()\n")
    return [*words, "sampling.dynamic=false", "algo.loss=rewards.py:loss"]


@case("a custom loss that calls sys.exit", begins=True, more=True)
def _(here):
    words = here.reward(f"{OWN}def loss(new_logps, old_logps, advantages, mask):\n    sys.exit(0)\n")
    return [*words, "sampling.dynamic=false", "algo.loss=rewards.py:loss"]


@case("a custom advantage function that returns NaN", begins=True)
def _(here):
    words = here.reward(f"{OWN}def advantages(rewards, mask):\n    return rewards * float('nan')\n")
    return [*words, "sampling.dynamic=false", "algo.advantage=rewards.py:advantages"]


@case("a model that is never correct", begins=True)
def _(here):
    words = here.reward("def score(prompts, completions, **columns):\n    return [0.0 for _ in completions]\n")
    return [*words, "sampling.cap=4"]


GRADED = "def score(prompts, completions, **columns):\n    return [-len(text) / 100 for text in completions]\n"


@case("graded scores", begins=True)
def _(here):
    return here.reward(GRADED)


@case("graded scores, compared by correctness", begins=True)
def _(here):
    return [*here.reward(GRADED), "sampling.cap=4", "sampling.metric=correct"]


# Runs and checkpoints


@case("a run directory that already contains a run")
def _(here):
    here.finished()
    return ["train", *QUICK, "--run", "run"]


@case("a run directory that is a file")
def _(here):
    here.write("run", "")
    return ["train", *QUICK, "--run", "run"]


@case("a run directory that cannot be written")
def _(here):
    return ["train", *QUICK, "--run", "/proc/run"]


@case("a run directory that is in use")
def _(here):
    words = here.resumed()
    here.hold(here.path / "run")
    return words


@case("--resume without a run")
def _(_here):
    return ["train", "--resume"]


@case("--resume of a directory without a run")
def _(here):
    (here.path / "run").mkdir()
    return ["train", "--resume", "--run", "run"]


@case("--resume with different settings")
def _(here):
    here.finished()
    return ["train", "--run", "run", "--resume", "algo.clip_high=0.3"]


@case("--resume with an edited config.yaml")
def _(here):
    words = here.resumed()
    here.edit("run/config.yaml", "lr: 0.0002", "lr: 1e-5")
    return words


@case("--resume with an edit of config.yaml that needs a new run")
def _(here):
    words = here.resumed()
    here.edit("run/config.yaml", "clip_high: 0.28", "clip_high: 0.3")
    return words


@case("--resume without config.yaml", begins=True)
def _(here):
    words = here.resumed()
    (here.path / "run" / "config.yaml").unlink()
    return words


@case("--resume with a truncated config.yaml and no checkpoints")
def _(here):
    words = here.resumed()
    shutil.rmtree(here.path / "run" / "checkpoints")
    text = (here.path / "run" / "config.yaml").read_text()
    here.write("run/config.yaml", text[: text.index("algo:")])
    return words


@case("--resume with fewer steps than already made")
def _(here):
    here.finished()
    return ["train", "--run", "run", "--resume", "train.steps=1"]


@case("--resume with a changed model")
def _(here):
    words = here.resumed()
    small_model().save_pretrained(here.path / "model")
    return words


@case("--resume with changed data")
def _(here):
    words = here.resumed()
    here.lines(*problems(40))
    return words


@case("a damaged checkpoint after an intact one", begins=True)
def _(here):
    words = here.resumed()
    (here.path / "run" / "checkpoints" / "step-2" / "optimizer.pt").write_bytes(b"")
    return words


@case("a checkpoint with non-finite weights after an intact one", begins=True)
def _(here):
    words = here.resumed()
    path = here.path / "run" / "checkpoints" / "step-2"
    # The model came in bfloat16, and so model/ has it; a run resumes from the weights in float32.
    weights = torch.load(path / "weights.pt", weights_only=True)
    weights["model.norm.weight"][3] = float("inf")
    torch.save(weights, path / "weights.pt")
    here.vouch_for(path)
    return words


@case("a checkpoint with an invalid state")
def _(here):
    words = here.resumed()
    path = here.path / "run" / "checkpoints" / "step-2"
    progress = json.loads((path / "progress.json").read_text())
    progress["step"] = "two"
    (path / "progress.json").write_text(json.dumps(progress))
    here.vouch_for(path)
    return words


@case("a checkpoint from an older version")
def _(here):
    words = here.resumed()
    for path in (here.path / "run" / "checkpoints").glob("step-*"):
        state = {name: json.loads((path / f"{name}.json").read_text()) for name in ("progress", "stream", "random")}
        (path / "state.json").write_text(json.dumps(state))
        here.vouch_for(path, format=None)
    return words


@case("a log with an invalid line")
def _(here):
    words = here.resumed()
    log = here.path / "run" / "metrics.jsonl"
    log.write_text(re.sub(r'"acc/mean": [0-9.]+', '"acc/mean": "good"', log.read_text()))
    return words


@case("checkpoints that are all damaged")
def _(here):
    words = here.resumed()
    for path in (here.path / "run" / "checkpoints").glob("step-*/stream.json"):
        path.unlink()
    return words


@case("a run that diverges", begins=True)
def _(_here):
    words = ["train.mini_batches=2", "train.lr=1e30", "train.warmup_steps=0"]
    return ["train", *QUICK, *words, "--run", "run"]


# Clusters


@case("several ranks without a cluster")
def _(_here):
    return ["train", *QUICK, "cluster.ranks=2", "--run", "run"]


@case("--resume of a run of one process on ranks")
def _(here):
    here.finished()
    return ["train", "--run", "run", "--resume", "cluster.backend=ray"]


# Memory


@case("out of GPU memory in an update", begins=True)
def _(here):
    here.out_of_memory(120)
    return ["train", *QUICK, "sampling.dynamic=false", "--run", "run"]


@case("out of GPU memory for one sample", begins=True)
def _(here):
    here.out_of_memory(1)
    return ["train", *QUICK, "sampling.dynamic=false", "--run", "run"]


@case("a run that cannot fit on the GPU")
def _(here):
    here.gpu(24, "qwen2.5-1.5b")
    return ["train", *QUICK, "--run", "run"]


@case("a KV cache too small for one sequence")
def _(_here):
    return ["train", *QUICK, "sampling.kv_memory_gib=0.00001", "--run", "run"]


# Environments


def environment(here, code, *words):
    here.write("mine.py", code)
    return ["train", *QUICK, *words, "--run", "run"]


LOOK_UP = """
def look_up(word{hint}) -> str:
    \'\'\'Looks up a word.

    Args:
        word: The word.
    \'\'\'
    return word
"""
CALLS = "    await client.chat.completions.create(model='policy', messages=task['messages'])\n"


@case("an environment that does not exist")
def _(_here):
    return ["train", *QUICK, "env.name=geuss"]


@case("an environment without step")
def _(here):
    return environment(here, "class Game:\n    def open(self, prompt, seed): ...", "env.name=mine.py:Game")


@case("an environment whose step takes no turn")
def _(here):
    return environment(here, "class Game:\n    def step(self): ...", "env.name=mine.py:Game")


@case("options that the environment does not take")
def _(_here):
    return ["train", *QUICK, "env.name=guess", "env.options.highest=9"]


@case("two environments")
def _(_here):
    return ["train", *QUICK, "env.name=guess", "env.tools=calculator"]


@case("a tool without type hints")
def _(here):
    return environment(here, LOOK_UP.format(hint=""), "env.tools=mine.py:look_up")


@case("two tools of one name")
def _(_here):
    return ["train", *QUICK, "env.tools=[calculator, calculator]"]


@case("a tool name that no model can write")
def _(here):
    code = LOOK_UP.format(hint=": str") + "look_up.__name__ = 'look up'\n"
    return environment(here, code, "env.tools=mine.py:look_up")


@case("a tool name that the chat template cannot express")
def _(here):
    code = LOOK_UP.format(hint=": str") + "look_up.__name__ = 'look-up'\n"
    model = here.model()
    here.write("model/chat_template.jinja", TOOL_TEMPLATE)
    return environment(here, code, "env.tools=mine.py:look_up", model, *LIKE_THE_DEMO)


TOOL_TEMPLATE = """{{ tools | tojson if tools }}{% for message in messages %}{{ message.content }}
{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name | replace('-', '_') }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endfor %}"""


@case("a model that knows no tools")
def _(here):
    model = here.model()
    here.write("model/chat_template.jinja", "{% for message in messages %}{{ message.content }}{% endfor %}")
    return ["train", *QUICK, "env.tools=calculator", model, *LIKE_THE_DEMO]


@case("a tool format that does not exist")
def _(_here):
    return ["train", *QUICK, "env.tools=calculator", "env.tool_format=hermess"]


@case("an MCP server that does not start")
def _(_here):
    return ["train", *QUICK, "env.mcp=no-such-server"]


@case("an agent that does not exist")
def _(_here):
    return ["train", *QUICK, "env.agent=no-such-agent --fast"]


@case("an agent that does not take a client")
def _(here):
    return environment(here, "def solve(task): ...", "env.agent=mine.py:solve")


@case("an agent that never calls the endpoint", begins=True)
def _(here):
    return environment(here, "async def solve(task, client): return 1.0", "env.agent=mine.py:solve")


@case("a reward that is NaN", begins=True)
def _(here):
    code = "class Game:\n    def step(self, turn): return float('nan')"
    return environment(here, code, "env.name=mine.py:Game")


@case("an agent whose reward is not a number", begins=True)
def _(here):
    return environment(here, f"async def solve(task, client):\n{CALLS}", "env.agent=mine.py:solve")


@case("an environment that raises every time", begins=True, more=True)
def _(here):
    return environment(here, "class Game:\n    def step(self, turn): return {}['board']", "env.name=mine.py:Game")
