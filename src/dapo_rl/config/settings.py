"""The settings of a run by sections, and the values that follow from several of them."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from dapo_rl.choices import Masking
from dapo_rl.config import sections
from dapo_rl.config.presets import Preset
from dapo_rl.config.section import Section
from dapo_rl.objectives import GAE, GDPO


class RunSettings(Section):
    preset: Preset = "dapo"
    """dapo: the authors' published settings; grpo: none of their techniques, and a KL term; dr_grpo: no std, a constant
    divisor; vapo and ppo: with a critic."""
    seed: int = Field(0, ge=0)
    """Seed of the prompt order, the samples and all other randomness."""
    engine: str = "native"
    """`native` samples from the trained model; `hf` is transformers' generate, for any architecture; `vllm` is vLLM; or
    a custom engine, `module:Class` or `file.py:Class`."""
    engine_options: dict[str, Any] = Field({})
    """Arguments of vLLM's `LLM`, for example `engine_options.max_num_batched_tokens=8192`, or of a custom engine's
    constructor."""
    model: sections.ModelSettings = sections.ModelSettings()
    data: sections.DataSettings = sections.DataSettings()
    reward: sections.RewardSettings = sections.RewardSettings()
    env: sections.EnvSettings = sections.EnvSettings()
    sampling: sections.SamplingSettings = sections.SamplingSettings()
    algo: sections.AlgoSettings = sections.AlgoSettings()
    overlong: sections.OverlongSettings = sections.OverlongSettings()
    train: sections.TrainSettings = sections.TrainSettings()
    critic: sections.CriticSettings = sections.CriticSettings()
    teacher: sections.TeacherSettings = sections.TeacherSettings()
    eval: sections.EvalSettings = sections.EvalSettings()
    checkpoint: sections.CheckpointSettings = sections.CheckpointSettings()
    log: sections.LogSettings = sections.LogSettings()
    cluster: sections.ClusterSettings = sections.ClusterSettings()

    # Derived values.

    @property
    def overlong_max_length(self) -> int:
        return self.overlong.max_length or self.sampling.max_new_tokens

    @property
    def overlong_cache_length(self) -> int:
        return self.overlong_limits(self.sampling.max_new_tokens)[1]

    def overlong_limits(self, longest: int) -> tuple[int, int]:
        """`overlong.max_length` and `cache_length` of a group whose responses may have `longest` tokens."""
        limit, cache = self.overlong.max_length or longest, self.overlong.cache_length
        return limit, limit // 5 if cache is None else cache

    @property
    def masking(self) -> Masking:
        if not self.overlong.mask_truncated:
            return "none"
        # A critic's advantages have no baseline of the group.
        return "loss" if self.overlong.masked_in_baseline or self.has_critic else "baseline"

    @property
    def norm_length(self) -> int:
        return self.algo.norm_length or self.sampling.max_new_tokens

    @property
    def sampling_cap(self) -> int:
        return self.sampling.cap or 30 * self.sampling.prompts_per_step

    @property
    def longest_sample(self) -> int:
        observed = self.env.max_observation_tokens if self.env.given else 0
        return self.data.max_prompt_tokens + self.sampling.max_new_tokens + observed

    @property
    def token_budget(self) -> int:
        return self.train.token_budget or max(16384, self.longest_sample)

    @property
    def has_critic(self) -> bool:
        return self.algo.advantage == GAE

    @property
    def needs_reference(self) -> bool:
        """Whether samples are scored by the policy as the run starts."""
        return self.algo.kl_coef > 0 or self.teacher.of_policy

    @property
    def decouples_rewards(self) -> bool:
        """Whether rewards are normalised each on its own."""
        return self.algo.advantage == GDPO

    @property
    def critic_lr(self) -> float:
        return self.critic.lr or 2 * self.train.lr

    @property
    def pretrain_steps(self) -> int:
        """Steps that train the critic alone."""
        if not self.has_critic:
            return 0
        steps = self.critic.pretrain_steps
        return min(50, self.train.steps // 8) if steps is None else steps

    @property
    def kl_in_reward(self) -> bool:
        return self.algo.kl_coef > 0 and self.algo.kl_in == "reward"

    def syncs_reference(self, step: int) -> bool:
        """Whether the reference policy moves to the policy after a step."""
        every = self.algo.ref_sync_steps
        return every is not None and step % every == 0

    @property
    def checkpoint_every(self) -> int:
        return self.checkpoint.every or max(1, self.train.steps // 10)

    @property
    def updates_per_step(self) -> int:
        return self.train.mini_batches * self.train.epochs_per_step

    @property
    def scores_first(self) -> bool:
        """Whether a step scores its batch before the first update. With a single update per step, the update itself
        starts from the proximal policy; only denominators and normalised weights need the scores before."""
        several = self.algo.old_policy == "recomputed" and self.updates_per_step > 1
        return several or self.corrects_first

    @property
    def corrects_first(self) -> bool:
        """Whether a step decides before the first update which tokens are off-policy, or how much their weights are on
        average."""
        return bool(self.algo.reject) or self.algo.importance_normalize

    @property
    def during_updates(self) -> bool:
        """Whether sampling goes on during updates. With `max_staleness: 0`, or if no group outlives its step, there is
        nothing to sample then."""
        apart = self.cluster.backend is not None and self.cluster.placement != "colocated"
        outlives = self.sampling.surplus == "carry" and not self.sampling.dynamic_batch
        return apart and outlives and self.sampling.max_staleness > 0

    def resolved(self) -> dict[str, Any]:
        """Every setting with its value, including derived defaults; loading it gives the same run."""
        settings = self.model_dump(mode="json")
        if not self.sampling.length_stages:  # where they are not set, they follow the limit of each stage
            settings["overlong"] |= {
                "max_length": self.overlong_max_length,
                "cache_length": self.overlong_cache_length,
            }
        settings["algo"] |= {"norm_length": self.norm_length, "proximal": self.algo.old_policy}
        settings["sampling"]["cap"] = self.sampling_cap
        settings["checkpoint"]["every"] = self.checkpoint_every
        if self.has_critic:
            settings["critic"] |= {"lr": self.critic_lr, "pretrain_steps": self.pretrain_steps}
        return settings
