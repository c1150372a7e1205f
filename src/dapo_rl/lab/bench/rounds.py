"""Dynamic sampling in rounds, as in other libraries: whole batches of prompts, each started when the last is done.

The interface is that of our sampler, so both run on the same engine, prompts and verifier.
"""

from __future__ import annotations

from dataclasses import dataclass

from dapo_rl.engines.protocol import Engine, Request, SamplingParams
from dapo_rl.engines.token_sampling import derive_seed
from dapo_rl.objectives.dynamic_sampling import dynamic_sampling_filter
from dapo_rl.outcomes import Outcome
from dapo_rl.rollout.batch_builder import SampledBatch
from dapo_rl.rollout.sampler import Prompts
from dapo_rl.types import Group, Trajectory, Verifier


@dataclass(slots=True)
class Rounds:
    """`fill` samples rounds of `round_size × n` prompts until n groups pass, and drops the surplus.

    verl's recipe uses rounds of three batches and stops the run after `most` rounds. ms-swift uses rounds of one batch
    and, if `most` rounds are not enough, trains on the first round unfiltered (`gives_up`).
    """

    prompts: Prompts
    engine: Engine
    verifier: Verifier
    params: SamplingParams
    group_size: int
    round_size: int = 1
    most: int = 10**9
    gives_up: bool = False
    draws: int = 0

    def fill(self, n: int) -> SampledBatch:
        kept: list[Group] = []
        dropped: list[tuple[Group, Outcome]] = []
        sampled: list[Group] = []
        rounds = 0
        while len(kept) < n and rounds < self.most:
            rounds += 1
            for group in self._round(n * self.round_size):
                sampled.append(group)
                outcome = _outcome(group)
                if outcome != "kept":
                    dropped.append((group, outcome))
                elif len(kept) < n:
                    kept.append(group)
                else:
                    dropped.append((group, "surplus"))
        if len(kept) < n and self.gives_up:
            first = sampled[:n]
            dropped = [(group, "surplus" if _outcome(group) == "kept" else _outcome(group)) for group in sampled[n:]]
            kept = first
        tokens = sum(group.tokens for group in sampled)
        return SampledBatch(
            tuple(kept), tuple(dropped), tuple(sampled), version=self.engine.version, tokens_generated=tokens
        )

    def _round(self, size: int) -> list[Group]:
        drawn = {f"draw-{self.draws + i}": (self.draws + i, self.prompts.draw()) for i in range(size)}
        self.draws += size
        for name, (draw, prompt) in drawn.items():
            seed = derive_seed(0, prompt.id, draw)
            self.engine.submit(Request(name, prompt.token_ids, self.group_size, self.params, seed))
        samples: dict[str, dict[int, Trajectory]] = {name: {} for name in drawn}
        while completions := self.engine.poll():
            for completion in completions:
                samples[completion.request_id][completion.index] = completion.sample
        groups = []
        for name, (draw, prompt) in drawn.items():
            responses = tuple(samples[name][i] for i in range(self.group_size))
            groups.append(Group(draw, prompt, responses, tuple(self.verifier(prompt, responses))))
        return groups


def _outcome(group: Group) -> Outcome:
    import torch  # not needed to start the command line

    correct = [verdict.correct for verdict in group.verdicts]
    if dynamic_sampling_filter(torch.tensor([correct])).item():
        return "kept"
    return "all_correct" if correct[0] else "all_wrong"
