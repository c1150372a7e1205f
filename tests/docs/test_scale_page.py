"""docs/scale.md: its constants are those of the code, and its figures those of the plan."""

import re

import pytest
from fit_rates import MEASURED
from support import REPOSITORY

from dapo_rl.base.format import duration
from dapo_rl.config import Config
from dapo_rl.lab.plan.layout import GpuMemory, Layout, choose_layout
from dapo_rl.lab.plan.planning import Question
from dapo_rl.lab.plan.rates import ERROR, SPECS, Rates, Shares
from dapo_rl.lab.plan.simulation import Simulation, simulated_share
from dapo_rl.memory.model_size import KNOWN

PAGE = (REPOSITORY / "docs" / "scale.md").read_text()


def test_the_constants_are_those_of_the_code():
    shares = Shares()
    shown = re.findall(r"^\| [a-z].* \| ([\d.]+) ?(?:%|µs)? \|$", PAGE, re.MULTILINE)
    used = [100 * shares.matmul, 100 * shares.bandwidth, 1e6 * shares.layer_s, shares.passes]
    assert list(map(float, shown)) == pytest.approx(used)
    assert f"all {len(MEASURED)} measurements within {ERROR:.0%}".replace("%", " %") in PAGE
    assert all(f"`{name}`" in PAGE for name in SPECS)


def test_rounds_take_as_long_as_the_page_says():
    """The other ways depend on the sampler, and are run by hand."""
    (shown,) = re.findall(r"--gpus 128 --gpu h800` \| (\S+) \|", PAGE)
    question = Question(Config.load("dapo-math-qwen2.5-32b"), SPECS["h800"], 128)
    size = KNOWN["qwen2.5-32b"]
    layout = choose_layout(question.config, size, question.gpu, Layout(128), None)
    memory = GpuMemory(question.config, size, question.gpu, layout)
    rates = Rates(size, question.gpu, layout.tensor_parallel)
    share = simulated_share(512, layout.engines)
    run = Simulation(memory, rates, question.world, question.prompt_tokens, steps=2, warmup=0, share=share)
    assert duration(run.run("rounds").step_seconds) == shown


def test_the_days_are_the_steps_of_the_recipe():
    table = PAGE[PAGE.index("| command |") :]
    times = re.findall(r"with `sampling\.surplus=carry sampling\.ahead=0\.5` \| (.*) \|", table)[0].split(" | ")
    seconds = [60 * int(minutes) + int(rest) for minutes, rest in (re.findall(r"\d+", time) for time in times)]
    config = Config.load("dapo-math-qwen2.5-32b")
    days = [f"{config.train.steps * each / 86400:.1f}" for each in seconds]
    words = (
        f"the {config.train.steps} steps of the recipe would take {days[0]}, {days[1]} and {days[2]} days on 128 GPUs"
    )
    assert words in " ".join(PAGE.split())
    assert config.train.steps * config.updates_per_step == 10_000
