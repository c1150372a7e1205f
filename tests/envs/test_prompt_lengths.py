"""Prompts that are too long with their tools and system prompt are dropped with the data, before a run starts."""

import pytest
from chat_tokenizers import tokenizer_of

from dapo_rl.config import Config
from dapo_rl.data import build_prompts, load_rows
from dapo_rl.envs.build import build_environment
from dapo_rl.envs.chat_format import chat_format
from dapo_rl.rollout.build_conversations import prompt_fits

SYSTEM = "Use the calculator."
ROWS = [{"prompt": [{"role": "user", "content": "x" * length}], "answer": "1"} for length in (1, 40, 80, 81, 82, 200)]


def dropped(most, *settings):
    """The report, and the lengths of the prompts that are left."""
    config = Config.load(None, [f"data.max_prompt_tokens={most}", "env.workers=1", *settings])
    data = config.data.model_copy(update={"chat_template": "never", "system_prompt": None})
    tokenizer, environments = tokenizer_of("qwen2.5"), build_environment(config)
    try:
        fits = prompt_fits(config, environments, tokenizer)
        found = build_prompts(load_rows(ROWS, key="data.train"), tokenizer, data, fits=fits)
    finally:
        if environments is not None:
            environments.close()
    return found.report(), [len(prompt.messages[0]["content"]) for prompt in found.prompts], environments


@pytest.mark.parametrize("system", [None, SYSTEM])
def test_tools_and_system_prompt_count(system):
    settings = ["env.tools=calculator", *([f"data.system_prompt={system}"] if system else [])]
    *_, environments = dropped(4096, *settings)
    messages = ({"role": "system", "content": system},) if system else ()
    whole = chat_format(tokenizer_of("qwen2.5")).prompt((*messages, *ROWS[3]["prompt"]), environments.tools)
    report, left, _ = dropped(len(whole), *settings)
    assert left == [1, 40, 80, 81], "81 characters have exactly as many tokens as are allowed"
    assert report == f"data.train: 2 prompts over data.max_prompt_tokens {len(whole)} dropped"


def test_a_system_prompt_counts_without_tools():
    settings = ["env.name=guess", f"data.system_prompt={SYSTEM}"]
    whole = chat_format(tokenizer_of("qwen2.5")).prompt(({"role": "system", "content": SYSTEM}, *ROWS[3]["prompt"]))
    assert dropped(len(whole), *settings)[1] == [1, 40, 80, 81]


def test_without_tools_the_tokens_of_the_row_count():
    report, left, _ = dropped(81, "env.name=guess")
    assert left == [1, 40, 80, 81]
    assert report == "data.train: 2 prompts over data.max_prompt_tokens 81 dropped"
