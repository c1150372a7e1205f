"""DAPO in one file: Algorithm 1 of arXiv 2503.14476 on a laptop's CPU, from random weights, in about a minute.

    python examples/dapo_in_one_file.py [--steps 40] [--seed 0]

The task: given four digits, `4729:`, name the largest. A response ends with a full stop, and the digit before it is the
answer; anything may come before that. With random weights the policy is sometimes right, and sometimes cut off before
its full stop. DAPO makes it right most of the time, and short.

The policy is a Llama with 84,000 parameters. Everything specific to DAPO comes from `dapo_rl.algo`, which takes only
tensors and numbers. Shapes: N groups × G samples, B = N·G samples × T response tokens.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dapo_rl.algo import (
    clip_fractions,
    dapo_policy_loss,
    dynamic_sampling_filter,
    group_advantages,
    soft_overlong_punishment,
)

# The vocabulary: the digits 0 to 9, the end of the prompt, the end of a response, and four filler words.
COLON, STOP, VOCABULARY = 10, 11, 16
PROMPT_LENGTH = 5  # four digits and the colon

# The paper's settings (Sec. 4.1), with lengths and counts scaled to this task.
EPSILON_LOW, EPSILON_HIGH = 0.2, 0.28  # Clip-Higher
GROUPS, GROUP_SIZE = 16, 16  # N and G
MAX_LENGTH, CACHE_LENGTH = 12, 4  # L_max and L_cache of Soft Overlong Punishment
CAP = 20 * GROUPS  # maximum number of groups drawn per step
MINI_BATCHES = 4  # gradient updates per rollout step
LEARNING_RATE = 1e-3


# ---------------------------------------------------------------------------------------------------- the task


def draw_prompts(count: int, held_out: bool = False) -> Tensor:
    """Prompts `[count, PROMPT_LENGTH]`. Those with a digit sum divisible by five are held out."""
    drawn: list[Tensor] = []
    while len(drawn) < count:
        digits = torch.randint(10, (4,))
        if (int(digits.sum()) % 5 == 0) == held_out:
            drawn.append(torch.cat([digits, torch.tensor([COLON])]))
    return torch.stack(drawn)


def verify(prompts_B: Tensor, responses_BT: Tensor, lengths_B: Tensor, finished_B: Tensor) -> Tensor:
    """Correct where the response ended, and the token before its full stop is the largest digit of the prompt."""
    largest_B = prompts_B[:, :4].amax(-1)
    before_stop_B = responses_BT.gather(1, (lengths_B - 2).clamp(min=0)[:, None])[:, 0]
    return finished_B & (lengths_B >= 2) & (before_stop_B == largest_B)


# -------------------------------------------------------------------------------------------------- the policy


def random_policy() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=PROMPT_LENGTH + MAX_LENGTH,
            eos_token_id=STOP,
            bos_token_id=None,
        )
    )


@dataclass
class Samples:
    """Responses sampled from the old policy."""

    prompts_B: Tensor  # [B, PROMPT_LENGTH]
    responses_BT: Tensor
    old_logps_BT: Tensor
    lengths_B: Tensor
    finished_B: Tensor
    """False if cut off at MAX_LENGTH."""
    correct_B: Tensor

    def mask(self) -> Tensor:
        """Response tokens, including the full stop."""
        return torch.arange(self.responses_BT.shape[1]) < self.lengths_B[:, None]

    def take(self, chosen_B: Tensor) -> Samples:
        return Samples(*(getattr(self, name)[chosen_B] for name in self.__dataclass_fields__))

    @staticmethod
    def join(parts: list[Samples]) -> Samples:
        return Samples(*(torch.cat([getattr(p, name) for p in parts]) for name in Samples.__dataclass_fields__))


@torch.no_grad()
def sample(policy: LlamaForCausalLM, prompts_B: Tensor) -> Samples:
    """One response to each prompt, token by token, with the log-probability of each token."""
    count, tokens, cache = len(prompts_B), prompts_B, None
    responses_BT = torch.full((count, MAX_LENGTH), STOP)
    logps_BT = torch.zeros(count, MAX_LENGTH)
    for position in range(MAX_LENGTH):
        output = policy(tokens, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logps_BV = output.logits[:, -1].log_softmax(-1)
        tokens = logps_BV.exp().multinomial(1)
        responses_BT[:, position] = tokens[:, 0]
        logps_BT[:, position] = logps_BV.gather(1, tokens)[:, 0]
        if (responses_BT[:, : position + 1] == STOP).any(1).all():
            break  # tokens after a full stop are masked
    is_stop_BT = responses_BT == STOP
    finished_B = is_stop_BT.any(1)
    lengths_B = torch.where(finished_B, is_stop_BT.int().argmax(1) + 1, MAX_LENGTH)
    correct_B = verify(prompts_B, responses_BT, lengths_B, finished_B)
    return Samples(prompts_B, responses_BT, logps_BT, lengths_B, finished_B, correct_B)


def logprobs(policy: LlamaForCausalLM, samples: Samples) -> Tensor:
    """Log-probabilities of the responses under the current policy: the numerator of the ratio."""
    tokens = torch.cat([samples.prompts_B, samples.responses_BT], 1)
    logits = policy(tokens).logits[:, PROMPT_LENGTH - 1 : -1]
    return logits.log_softmax(-1).gather(2, samples.responses_BT[..., None])[..., 0]


# --------------------------------------------------------------------------------------------------- Algorithm 1


def fill_batch(policy: LlamaForCausalLM) -> tuple[Samples | None, int]:
    """Dynamic Sampling (Eq. 11): sample until there are N groups that are neither all right nor all wrong.

    None if CAP groups do not contain that many. Also returns the number of groups drawn.
    """
    kept: list[Samples] = []
    drawn = groups = 0
    while groups < GROUPS:
        if drawn >= CAP:
            return None, drawn
        prompts = draw_prompts(GROUPS).repeat_interleave(GROUP_SIZE, 0)
        samples = sample(policy, prompts)
        keep_N = dynamic_sampling_filter(samples.correct_B.view(GROUPS, GROUP_SIZE))
        kept.append(samples.take(keep_N.repeat_interleave(GROUP_SIZE)))
        drawn, groups = drawn + GROUPS, groups + int(keep_N.sum())
    batch = Samples.join(kept)
    return batch.take(torch.arange(GROUPS * GROUP_SIZE)), drawn


def rewards_of(samples: Samples) -> Tensor:
    """Correctness (Eq. 7) plus Soft Overlong Punishment (Eq. 13)."""
    outcome_B = torch.where(samples.correct_B, 1.0, -1.0)
    return outcome_B + soft_overlong_punishment(samples.lengths_B, MAX_LENGTH, CACHE_LENGTH)


def update(policy: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: Samples) -> float:
    """MINI_BATCHES gradient steps on Eq. 8; returns the fraction of tokens clipped at the upper bound."""
    rewards_NG = rewards_of(batch).view(GROUPS, GROUP_SIZE)
    advantages_B = group_advantages(rewards_NG).view(-1)  # Eq. 9
    clipped = 0.0
    for chosen in torch.arange(len(advantages_B)).chunk(MINI_BATCHES):
        part = batch.take(chosen)
        # Overlong Filtering: truncated responses are left out of the loss and its denominator.
        mask_BT = part.mask() & part.finished_B[:, None]
        new_logps_BT = logprobs(policy, part)
        bounds = {"clip_low": EPSILON_LOW, "clip_high": EPSILON_HIGH}
        # Token-level loss: every token of the mini-batch has the same weight, whichever response it is in.
        loss = dapo_policy_loss(
            new_logps_BT, part.old_logps_BT, advantages_B[chosen], mask_BT, aggregation="token-mean", **bounds
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            found = clip_fractions(new_logps_BT, part.old_logps_BT, advantages_B[chosen], mask_BT, **bounds)
        clipped += float(found.high) / MINI_BATCHES
    return clipped


def accuracy(policy: LlamaForCausalLM, prompts_B: Tensor) -> float:
    return float(sample(policy, prompts_B).correct_B.float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="rollout steps")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)

    policy = random_policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    held_out = draw_prompts(1000, held_out=True)
    print(f"held-out accuracy before: {accuracy(policy, held_out):.1%}", flush=True)
    started = time.perf_counter()
    for step in range(1, options.steps + 1):
        batch, drawn = fill_batch(policy)
        if batch is None:
            print(f"step {step:3}  fewer than {GROUPS} of {drawn} groups are neither all right nor all wrong: stopping")
            break
        clipped = update(policy, optimizer, batch)
        if step == 1 or step % 10 == 0:
            right, length = batch.correct_B.float().mean(), batch.lengths_B.float().mean()
            cut_off, seconds = 1 - batch.finished_B.float().mean(), time.perf_counter() - started
            print(
                f"step {step:3}  right {right:4.0%}  length {length:4.1f}  cut off {cut_off:4.0%}  "
                f"kept {GROUPS} groups of {drawn:3}  clipped high {clipped:5.2%}  {seconds:3.0f} s",
                flush=True,
            )
    print(f"held-out accuracy after: {accuracy(policy, held_out):.1%}")


if __name__ == "__main__":
    main()
