"""TRL's example scripts, changed by the diffs of docs/from-trl.md, train; and the page's tables are the code's."""

import functools
import json
import random
import re
import sys
from pathlib import Path

import pytest
import tool_model
import torch
from grpo_fields import decisions
from support import REPOSITORY

import dapo_rl
from dapo_rl.config import RewardSettings
from dapo_rl.errors import UserError
from dapo_rl.models.load import TINY
from dapo_rl.rewards import as_verifier
from dapo_rl.types import Prompt, Trajectory

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")
trl_rewards = pytest.importorskip("trl.rewards")

TRAINER = dapo_rl.DAPOTrainer
PAGE = REPOSITORY / "docs" / "from-trl.md"
SCRIPTS = Path(__file__).parent / "trl_scripts"
SMALL = ["--max_steps", "2", "--num_generations", "4", "--per_device_train_batch_size", "8"]
SMALL += ["--max_completion_length", "24", "--learning_rate", "1e-4"]
ON_CPU = ["--use_cpu", "--bf16", "False", "--model_name_or_path", "tiny", "--output_dir", "out", *SMALL]
FILL = {"sampling.on_cap": "fill", "sampling.cap": 4}
"""Rewards for boxed answers are all zero with a model that does not box its answers."""

TEMPLATE = """{{ tools | map(attribute='function.name') | join if tools }}{% for message in messages %}
{{ message.content }}
{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{% endfor %}{% endfor %}{{ '' if enable_thinking }}"""
"""With a place for tools, and an argument."""


def rows(count=24):
    numbers = random.Random(0)
    for _ in range(count):
        a, b = numbers.randint(2, 40), numbers.randint(2, 40)
        yield f"{a}+{b}=?", a + b


def local_data_set(path, *_, split=None, **__):
    """Data with the columns of the hub's data sets."""
    if "tldr" in path:
        made = [{"prompt": f"{question}\n", "completion": ""} for question, _ in rows()]
    elif "gsm8k" in path:
        made = [{"question": question, "answer": f"#### {answer}"} for question, answer in rows()]
    elif path.endswith("biogrid"):
        made = [{"gene": gene, "partner": partner} for gene, partner in (("A", "B"), ("B", "C"))]
    elif path.endswith("biogrid_qa"):
        made = [{"question": f"Does the gene {gene} act on B?", "answer": "B"} for gene in "ABCD"]
    elif "Numina" in path:
        made = [{"problem": question, "solution": f"${a}$", "messages": []} for question, a in rows()]
    else:
        made = [{"prompt": [{"role": "user", "content": question}], "solution": f"${a}$"} for question, a in rows()]
    whole = datasets.Dataset.from_list(made)
    if isinstance(split, list):
        return [whole, whole.select(range(4))]
    return whole if split else datasets.DatasetDict(train=whole, test=whole.select(range(4)))


def patched(name):
    """A script after the diff that the page shows for it: TRL's own if it is installed with it, or one of its shape."""
    installed = Path(trl.__file__).parent / "scripts" / name
    text = (installed if installed.is_file() else SCRIPTS / name).read_text()
    (diff,) = [diff for diff in re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.S) if f"--- {name}\n" in diff]
    for hunk in diff.split("@@\n")[1:]:
        lines = hunk.splitlines()
        old = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
        new = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
        assert text.count(old) == 1, f"{name}: {old}"
        text = text.replace(old, new)
    return text


@pytest.fixture
def run_script(tmp_path, monkeypatch):
    """Runs a script's text with local data and the embedded model; returns its trainers with their summaries."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", local_data_set)

    def run(text, argv=(), config=None, name="tiny"):
        made = []

        class Small(TRAINER):
            def __init__(self, model, *arguments, **options):
                super().__init__(name, *arguments, config=config or FILL, **options)

            def train(self, *arguments, **options):
                made.append((self, super().train(*arguments, **options)))

        monkeypatch.setattr(dapo_rl, "DAPOTrainer", Small)
        monkeypatch.setattr(sys, "argv", ["script.py", *argv])
        # Without its main module, dataclasses of the script could not resolve their annotations.
        monkeypatch.setitem(sys.modules["__main__"].__dict__, "__name__", "__main__")
        exec(compile(text, "script.py", "exec"), {"__name__": "__main__"})
        return made

    return run


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["readme.py", "unique_characters.py"])
def test_quickstarts_without_arguments(name, run_script):
    config = {**FILL, "train.steps": 2, "sampling.prompts_per_step": 2, "sampling.group_size": 4}
    ((_, summary),) = run_script(patched(name), config={**config, "sampling.max_new_tokens": 24})
    assert summary["steps"] == 2
    if name == "unique_characters.py":
        assert summary["metrics"]["reward/mean"] > 1, "the number of different characters"


@pytest.fixture
def small_args(monkeypatch):
    """`GRPOConfig` with the fields of `ON_CPU`, for scripts without arguments."""
    fields = {"use_cpu": True, "bf16": False, "max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 8}
    monkeypatch.setattr(trl, "GRPOConfig", functools.partial(trl.GRPOConfig, max_completion_length=24, **fields))


@pytest.mark.slow
def test_the_quickstart_with_a_grpo_config(run_script, small_args, capsys):
    ((trainer, summary),) = run_script(patched("reward_len.py"))
    assert summary["steps"] == 2
    assert trainer.run_dir == Path("Qwen2-0.5B-GRPO")
    assert (trainer.run_dir / "model" / "config.json").is_file()
    shown = capsys.readouterr().out
    assert "2 prompts × 4 samples per step, 2 steps; Dynamic Sampling on" in shown
    assert "ignored" not in shown, "logging_steps=10 is the default"


@pytest.mark.slow
def test_the_script_behind_trl_grpo(run_script, capsys, monkeypatch):
    pushed = []
    monkeypatch.setattr(
        "dapo_rl.trainer.push_folder", lambda folder, name, _, **options: pushed.append((name, options))
    )
    words = ["--dataset_name", "trl-lib/DeepMath-103K", "--reward_funcs", "accuracy_reward", "think_format_reward"]
    words += ["--reward_weights", "1.0", "0.5", "--eval_strategy", "steps", "--eval_steps", "1"]
    words += ["--push_to_hub", "--hub_model_id", "me/model", "--hub_private_repo", "True"]
    ((trainer, summary),) = run_script(patched("grpo.py"), [*ON_CPU, *words])
    assert summary["steps"] == 2
    assert [evaluation["step"] for evaluation in summary["evaluations"]] == [0, 1, 2]
    assert trainer.config.eval.samples == 4
    assert "Model saved to out.\n" in capsys.readouterr().out
    assert Path("out/config.json").is_file()
    options = {"private": True, "token": None, "revision": None}
    assert pushed == [("me/model", options)] * 2, "after training, and by the script itself"
    with pytest.raises(RuntimeError, match="closed"):
        trainer.evaluate()


@pytest.mark.slow
def test_continuous_batching_with_lora(run_script):
    words = ["--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj"]
    ((trainer, summary),) = run_script(patched("grpo_continuous_batching.py"), [*ON_CPU, *words])
    assert summary["steps"] == 2
    assert (trainer.config.model.lora.rank, trainer.config.model.lora.targets) == (4, ("q_proj", "v_proj"))
    saved = peft.LoraConfig.from_pretrained("out")
    assert (saved.r, saved.lora_dropout, trainer.config.model.lora.dropout) == (4, 0.05, 0.05)


@pytest.mark.slow
def test_two_reward_functions_and_a_refused_field(run_script):
    ((trainer, summary),) = run_script(patched("gspo.py"), ON_CPU)
    assert summary["steps"] == 2
    assert trainer.config.eval.every is None
    with pytest.raises(UserError, match=r"args: repetition_penalty=1\.5: there is no repetition penalty"):
        run_script(patched("gspo.py"), [*ON_CPU, "--repetition_penalty", "1.5"])


@pytest.mark.slow
def test_two_reward_functions_that_are_normalised_apart(run_script):
    apart = ("--multi_objective_aggregation", "normalize_then_sum")
    ((trainer, summary),) = run_script(patched("gspo.py"), [*ON_CPU, *apart])
    assert summary["steps"] == 2
    assert trainer.config.decouples_rewards


@pytest.mark.slow
def test_an_agent_with_a_tool(run_script, tmp_path):
    queries = ("select * from interactions", "select * from interactions where gene = 'A'", "select nothing")
    calls = [{"name": "query", "arguments": {"sql": sql}} for sql in queries]
    tool_model.save(tmp_path / "model", [f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls])
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    # As in TRL, reward functions do not see results that leave the policy no room to answer.
    config = {
        **FILL,
        "sampling.stop": ["</tool_call>"],
        "sampling.max_new_tokens": 64,
        "env.max_observation_tokens": 400,
    }
    ((_, summary),) = run_script(patched("grpo_agent.py"), ON_CPU, config, str(tmp_path / "model"))
    assert summary["steps"] == 2
    metrics = summary["metrics"]
    assert metrics["env/failed"] == 0
    assert 0 < metrics["env/tool_errors"] < metrics["env/tool_calls"], "one of the queries is wrong"
    assert metrics["reward/mean"] > 0.1, "evidence was found"


@pytest.mark.slow
def test_an_environment_with_a_reward(run_script, small_args, tmp_path):
    calls = [{"name": "echo", "arguments": {"message": "x" * length}} for length in (10, 20)]
    tool_model.save(tmp_path / "model", [f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls])
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    config = {**FILL, "sampling.stop": ["</tool_call>"], "env.max_observation_tokens": 400}
    ((_, summary),) = run_script(patched("echo.py"), (), config, str(tmp_path / "model"))
    assert summary["steps"] == 2
    metrics = summary["metrics"]
    assert metrics["env/failed"] == metrics["env/tool_errors"] == 0
    assert 0 < metrics["reward/mean"] <= 2, "a tenth of the last message's length"


@pytest.mark.slow
def test_a_peft_model_is_trained_in_place_and_resumed(tmp_path):
    def reward(completions, **_):
        return [float(len(completion)) for completion in completions]

    def trainer(steps):
        args = trl.GRPOConfig(
            output_dir=str(tmp_path / "run"), use_cpu=True, bf16=False, max_steps=steps, num_generations=4,
            per_device_train_batch_size=8, max_completion_length=16, learning_rate=1e-3, beta=0.01,
            lr_scheduler_type="constant")  # fmt: skip
        torch.manual_seed(0)
        base = dapo_rl.models.load.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8))
        data = local_data_set("trl-lib/tldr", split="train")
        return model, dapo_rl.DAPOTrainer(model, reward, args, data)

    model, first = trainer(1)
    before = weights(model)
    with first:
        first.train()
    changed = {name for name, value in weights(model).items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if ".lora_B." in name}, "A has no gradient while B is zero"
    model, second = trainer(2)
    with second:
        assert second.train(resume_from_checkpoint=True)["steps"] == 2
        with pytest.raises(UserError, match="resume_from_checkpoint: elsewhere is not in"):
            second.train(resume_from_checkpoint="elsewhere")


def test_trls_reward_functions_score_as_in_trl():
    messages = ({"role": "user", "content": "1+1=?"},)
    prompt = Prompt(id="p", text="1+1=?", token_ids=[1], answer=None, messages=messages, columns={"solution": "$2$"})
    texts = [r"<think>sum</think> \boxed{2}", r"\boxed{3}", "no answer"]
    samples = [Trajectory([1] * 5, [-0.1] * 5, text, "stop", 0) for text in texts]
    functions = [trl_rewards.accuracy_reward, trl_rewards.think_format_reward]
    functions.append(trl_rewards.get_soft_overlong_punishment(max_completion_len=8, soft_punish_cache=4))
    verdicts = as_verifier(functions, RewardSettings(), weights=[1.0, 0.5, 1.0])(prompt, samples)
    assert [verdict.score for verdict in verdicts] == [1.25, -0.25, -0.25], "5 of 8 tokens cost 1/4"


def test_the_pages_tables_are_the_codes():
    assert tables() in PAGE.read_text()


def tables():
    """What becomes of each field of GRPOConfig, as the page shows it."""
    made = decisions(trl.GRPOConfig)
    mapped = [(name, *rest) for name, rest in made.items() if rest[0].startswith(("`", "weights", "always"))]
    refused = [(name, rest[1]) for name, rest in made.items() if rest[0] == "refused"]
    differs = [(name, rest[1]) for name, rest in made.items() if rest[0] == "differs"]
    ignored = [f"`{name}`" for name, rest in made.items() if rest[0] == "ignored"]
    lines = ["## Fields of `GRPOConfig`", "", "| field | here | |", "|---|---|---|"]
    lines += [f"| `{name}` | {here} | {note} |" for name, here, note in mapped]
    lines += ["", "Refused unless left at a value that turns them off:", "", "| field | why |", "|---|---|"]
    lines += [f"| `{name}` | {why} |" for name, why in refused]
    assert not differs, "a default of TRL that has no counterpart needs a table of its own"
    lines += ["", f"Not applicable here, so they are ignored and do not affect training: {', '.join(ignored)}.", ""]
    return "\n".join(lines)
