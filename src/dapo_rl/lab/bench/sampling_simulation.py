"""The cost of dynamic sampling: our sampler and sampling in rounds, as in other libraries, on a simulated engine.

Only the schedule is simulated. Response lengths are drawn from a long-tailed distribution, and groups pass the filter
at a given acceptance rate. Both depend on the prompt alone, so all strategies see the same lengths and outcomes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from dapo_rl.base.table import figure_table
from dapo_rl.config import SamplingSettings
from dapo_rl.engines.protocol import Engine, SamplingParams
from dapo_rl.evals.sampling import answer
from dapo_rl.lab.simulated_engine import SimulatedEngine
from dapo_rl.lab.simulated_world import LONGEST, EndlessPrompts, NoWeights, SaysSo, World
from dapo_rl.rollout.batch_builder import SampledBatch
from dapo_rl.rollout.sampler import Sampler
from dapo_rl.types import Group

STRATEGIES: dict[str, dict[str, Any]] = {
    "carry": {"surplus": "carry"},
    "carry, ahead 0.5": {"surplus": "carry", "ahead": 0.5},
    "carry, ahead 1": {"surplus": "carry", "ahead": 1.0},
    "requeue": {"surplus": "requeue"},
    "drop": {"surplus": "drop"},
    "rounds of 3, verl": {"round_size": 3},
    "rounds of 1": {"round_size": 1},
    "rounds of 1, ms-swift": {"round_size": 1, "most": 4, "gives_up": True},
}
"""The settings of the sampler, or the fields of Rounds."""


@dataclass(slots=True)
class Rounds:
    """Dynamic sampling in rounds, as in other libraries: each batch of prompts starts when the last one is done.

    `fill` samples rounds of `round_size × n` prompts until n groups pass, and drops the surplus.

    verl's recipe uses rounds of three batches and stops the run after `most` rounds. ms-swift uses rounds of one batch
    and, if `most` rounds are not enough, trains on the first round unfiltered (`gives_up`).
    """

    engine: Engine
    params: SamplingParams
    group_size: int
    round_size: int = 1
    most: int = 10**9
    gives_up: bool = False
    prompts: EndlessPrompts = field(default_factory=EndlessPrompts)

    def fill(self, n: int) -> SampledBatch:
        """The batch lists only the groups that are sampled and those that are kept."""
        kept: list[Group] = []
        sampled: list[Group] = []
        for _ in range(self.most):
            drawn = [self.prompts.draw() for _ in range(n * self.round_size)]
            groups = answer(self.engine, SaysSo(), drawn, self.params, self.group_size, seed=0)
            sampled += sorted(groups, key=lambda group: group.draw)
            kept = [group for group in sampled if len({verdict.correct for verdict in group.verdicts}) > 1][:n]
            if len(kept) == n:
                break
        if len(kept) < n and self.gives_up:
            kept = sampled[:n]
        tokens = sum(group.tokens for group in sampled)
        return SampledBatch(kept, [], sampled, version=self.engine.version, tokens_finished=tokens)


def build_strategy(name: str, engine: Engine, group: int, n: int) -> Rounds | Sampler:
    how, params = STRATEGIES[name], SamplingParams(max_new_tokens=LONGEST)
    if "round_size" in how:
        return Rounds(engine, params, group, **how)
    settings = SamplingSettings(group_size=group, prompts_per_step=n, max_new_tokens=LONGEST, **how)
    return Sampler(EndlessPrompts(), engine, SaysSo(), params, settings, cap=10**9, seed=0)


def simulate(
    acceptance: float, name: str, *, prompts: int, group: int, slots: int, steps: int, seed: int
) -> dict[str, Any]:
    """Simulates one strategy at one acceptance rate, over the steps of a run."""
    world = World(acceptance, group, seed)
    engine = SimulatedEngine.counting_steps(world, slots)
    strategy = build_strategy(name, engine, group, prompts)
    trained = stale = 0
    for step in range(steps):
        fill = strategy.fill(prompts)
        useful = [g for g in fill.kept if world.passes(g.prompt.id)]
        trained += len(useful)
        stale += sum(step - g.first_version for g in useful)
        engine.receive(step + 1, NoWeights())
    return {
        "acceptance": acceptance,
        "strategy": name,
        "trained_groups": trained,
        "tokens_per_group": engine.tokens / trained if trained else None,
        "engine_steps_per_group": engine.steps / trained if trained else None,
        "to_oracle": engine.tokens / world.least_tokens(trained) if trained else None,
        "staleness": stale / trained if trained else None,
    }


def print_simulation(report: dict[str, Any]) -> None:
    console = Console()
    console.print(Text("per trained group: generated tokens, engine steps, age in weight versions", style="bold"))
    shown = figure_table("accepted", "strategy", "tokens", "vs. oracle", "steps", "staleness", texts=2)
    shown.columns[0].justify, shown.columns[1].no_wrap = "right", True
    before = None
    for row in report["rows"]:
        lead = f"{row['acceptance']:.0%}" if row["acceptance"] != before else ""
        before = row["acceptance"]
        forms = {"tokens_per_group": ",.0f", "to_oracle": ".2f", "engine_steps_per_group": ",.0f", "staleness": ".2f"}
        cells = {name: "-" if row[name] is None else format(row[name], form) for name, form in forms.items()}
        cells["to_oracle"] += "×" * (row["to_oracle"] is not None)
        shown.add_row(lead, Text(row["strategy"]), *cells.values())
    console.print(shown)
