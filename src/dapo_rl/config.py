"""Every setting: one spelling, one type, one default, in one place.

A recipe is a YAML file with these sections. A key is `section.name` everywhere: in the file, on the command line, in
the run directory and in error messages. Settings are frozen; values derived from several of them are properties.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from dapo_rl.base.format import counted
from dapo_rl.base.quote import shown
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.choices import (
    ENGINES,
    FIXED_OPTIONS,
    NORMALIZATIONS,
    VERIFIERS,
    WITHOUT_OPTIONS,
    Aggregation,
    ImportanceMode,
    KLKind,
    Normalize,
    Proximal,
    is_function,
)
from dapo_rl.errors import UserError
from dapo_rl.family import ADVANTAGES, GAE, LOSSES
from dapo_rl.recipe import explain, nested, override, read_recipe
from dapo_rl.recipes import find_recipe

Preset = Literal["dapo", "grpo", "dr_grpo", "vapo", "ppo"]

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "dapo": {},  # the defaults below
    "grpo": {
        "algo": {"clip_high": 0.2, "aggregation": "seq-mean-token-mean", "kl_coef": 0.001, "kl_kind": "k3"},
        "sampling": {"dynamic": False},
        "overlong": {"shape": "off"},
    },
    "dr_grpo": {
        "algo": {"clip_high": 0.2, "aggregation": "seq-mean-token-sum-norm", "normalize": "none"},
        "sampling": {"dynamic": False},
        "overlong": {"shape": "off"},
    },
    "vapo": {
        "algo": {"advantage": "gae", "positive_lm_coef": 0.1},
        "sampling": {"dynamic": False},
    },
    "ppo": {
        "algo": {"advantage": "gae", "clip_high": 0.2},
        "critic": {
            "pretrain_steps": 0,
            "lambda_policy": 0.95,
            "lambda_critic": 0.95,
            "value_clip": 0.2,
            "whiten": True,
        },
        "sampling": {"dynamic": False},
        "overlong": {"shape": "off"},
    },
}
"""What each preset changes. A recipe or an override that sets the same key overrides the preset."""


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        coerce_numbers_to_str=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _reject_booleans_as_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and info.field_name:
            kinds = get_args(kind := cls.model_fields[info.field_name].annotation) or (kind,)
            if bool not in kinds and any(kind in (int, float) or type(kind) is int for kind in kinds):
                raise PydanticCustomError("switch_for_number", "expected a number")
        return value


class LoraSettings(Section):
    rank: int = Field(16, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    targets: str | tuple[str, ...] = "all-linear"
    """Layers to adapt: `all-linear` (all but the output layer), or a list of names such as `[q_proj, v_proj]`."""
    save: Literal["merged", "adapter"] = "merged"
    """Save the full model with the adapters merged in, or the adapters alone, in peft's format."""


class ModelSettings(Section):
    name: str = "tiny"
    """A directory, a hub name, `tiny` (part of the package), or a model from `dapo model get` (`smollm2-135m`)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type; trained weights stay in float32. `auto`: bfloat16 if the hardware supports it natively."""
    save_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of saved models. `auto`: that of the model as loaded. Checkpoints also keep the float32 weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` uses a GPU if there is one."""
    lora: LoraSettings | None = None
    """Train low-rank adapters with the settings below instead of the weights; none: train the weights."""

    @field_validator("lora", mode="before")
    @classmethod
    def _require_lora_settings(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, Mapping | LoraSettings):
            raise PydanticCustomError("no_settings", "expected settings, for example model.lora.rank=16")
        return value


class SourceSettings(Section):
    model_config = ConfigDict(frozen=True, extra="allow")
    source: str
    """The source, as in a plain `data.train` string; all other keys are parameters of the source."""


class DataSettings(Section):
    train: str | SourceSettings = "arithmetic"
    """A .jsonl or .parquet file, a hub data set, `reasoning_gym:NAME` or `arithmetic`; {source: …} adds parameters."""
    eval: str | SourceSettings | None = None
    """Held-out prompts, given in the same way; none: no evaluation."""
    prompt_key: str = "prompt"
    """Column with the prompt, a string or chat messages; if there is no `prompt`, `question` or `problem` is used."""
    answer_key: str | None = None
    """Column with the ground truth (dots address nested fields); by default the usual names are tried."""
    system_prompt: str | None = None
    """System message added to every prompt (as a first paragraph if there is no chat template)."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """`auto`: apply the tokenizer's template to prompts that are chat messages or if there is a system prompt."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longer prompts are dropped and counted."""


class WeightedVerifier(Section):
    """One of several verifiers. In a recipe, a name alone has the weight 1."""

    verifier: str
    weight: float = 1.0
    timeout_s: float | None = Field(None, gt=0)
    """Time limit of this verifier, instead of `reward.timeout_s`."""


class RewardSettings(Section):
    verifier: str | tuple[WeightedVerifier, ...] = "math"
    """`math` (the last `Answer:` line), `exact`, `gym`, or your own function: `module:name` or `file.py:name`. Or a
    list of these, whose scores are summed; {verifier: NAME, weight: 0.5} gives a weight."""
    boxed: bool = False
    """`math`: fall back to the last `\\boxed{}` if there is no `Answer:` line."""
    correct: float = 1.0
    """Reward of a correct response (built-in verifiers)."""
    wrong: float = -1.0
    """Reward of any other response."""
    threshold: float | None = None
    """Correct means a score above this (your own function, by default 0.5) or at least this (gym, by default 1)."""
    timeout_s: float = Field(5.0, gt=0)
    """Time limit of a verifier call. A call that exceeds it is killed and counted as a timeout, not as wrong."""
    memory_mb: int = Field(2048, ge=64)
    """Memory limit of a verifier, on top of what the run had loaded when it started; a call that exceeds it fails."""
    workers: int | None = Field(None, ge=0)
    """Verifier processes; by default the number of cores minus one, at most 8. 0: no processes, and no limits."""
    max_error_share: float = Field(0.5, ge=0, le=1)
    """The run stops if the verifier fails on more than this share of a step's groups."""

    @field_validator("verifier", mode="before")
    @classmethod
    def _read_verifiers(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return _weighted_verifiers(value)
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise ValueError(f"reward.verifier: expected a name or a list, got {shown(value)}; {_AN_ENTRY}")
        return value

    @property
    def verifiers(self) -> tuple[WeightedVerifier, ...]:
        """The verifiers with their weights; the first one that applies decides whether a sample is correct."""
        return (WeightedVerifier(verifier=self.verifier),) if isinstance(self.verifier, str) else self.verifier

    @property
    def verifier_names(self) -> str:
        """The names of the verifiers, for messages."""
        return ", ".join(entry.verifier for entry in self.verifiers)


_AN_ENTRY = "an entry is a name or {verifier: NAME, weight: 0.5}"


def _weighted_verifiers(entries: Sequence[Any]) -> str | tuple[WeightedVerifier, ...]:
    """The entries of `reward.verifier`; a single name in a list is the name."""
    key = "reward.verifier"
    if not entries:
        raise ValueError(f"{key}: the list is empty; {_AN_ENTRY}")
    read: list[WeightedVerifier] = []
    for entry in entries:
        if isinstance(entry, str | WeightedVerifier):
            read.append(WeightedVerifier(verifier=entry) if isinstance(entry, str) else entry)
            continue
        if not isinstance(entry, Mapping) or not isinstance(entry.get("verifier"), str):
            raise ValueError(f"{key}: cannot read {shown(entry)}; {_AN_ENTRY}")
        if unknown := [str(name) for name in entry if name not in WeightedVerifier.model_fields]:
            hint = did_you_mean(nearest(unknown[0], WeightedVerifier.model_fields), _AN_ENTRY)
            raise ValueError(f"{key}: {entry['verifier']} has an unknown key {shown(unknown[0])}{hint}")
        try:
            read.append(WeightedVerifier.model_validate(entry))
        except ValidationError as error:
            first = error.errors()[0]
            what = "a finite number" if first["loc"] == ("weight",) else "a number of seconds above 0"
            where = f"{key}: the {first['loc'][0]} of {entry['verifier']}"
            raise ValueError(f"{where}, {shown(first['input'])}, is not {what}") from None
    names = [entry.verifier for entry in read]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{key}: {twice[0]} appears twice; keep one, with one weight")
    if not any(entry.weight for entry in read):
        raise ValueError(f"{key}: every weight is 0, so every reward is 0; give one that is not")
    plain = len(read) == 1 and read[0].weight == 1 and read[0].timeout_s is None
    return read[0].verifier if plain else tuple(read)


class SamplingSettings(Section):
    prompts_per_step: int = Field(16, ge=1)
    """Groups to train on per rollout step (N)."""
    group_size: int = Field(16, ge=1)
    """Samples per prompt (G)."""
    max_new_tokens: int = Field(1024, ge=1)
    """Maximum length of a response; a longer one is truncated (finish reason `length`)."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; log-probabilities in the loss are computed at the same temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; 1 is off. Recorded log-probabilities ignore the truncation."""
    top_k: int = Field(0, ge=0)
    """Sample from the k most likely tokens; 0 is off."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Exclude tokens whose probability is below this fraction of the most likely token's; 0 is off."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, in addition to the end-of-sequence token."""
    ignore_eos: bool = False
    """For benchmarks: continue past the end-of-sequence token, up to max_new_tokens."""
    dynamic: bool = True
    """Dynamic Sampling: drop groups that are all right or all wrong, and keep sampling until the batch is full."""
    metric: Literal["auto", "correct", "score"] = "auto"
    """What the filter compares within a group: correctness, or scores. `auto`: correctness, until the verifier gives
    different scores to samples that are all right or all wrong."""
    filter: str | None = None
    """Your own additional filter, `module:name` or `file.py:name`: takes a group, returns whether to keep it."""
    cap: int | None = Field(None, ge=1)
    """Maximum number of groups drawn per step; by default 30 × prompts_per_step, as in verl's recipe."""
    on_cap: Literal["error", "partial", "fill"] = "error"
    """At the cap: stop with an error, train on the groups kept so far, or fill up with uninformative ones."""
    surplus: Literal["carry", "requeue", "drop"] = "carry"
    """Groups beyond a full batch: carry them over to the next step, sample their prompts again next, or drop them."""
    max_staleness: int = Field(1, ge=0)
    """`carry`: maximum age of a group in weight versions when it is trained on. Groups are started accordingly, and a
    step trains on more than prompts_per_step of them rather than let any become too old. With 0, nothing is carried."""
    ahead: float = Field(0.0, ge=0)
    """`carry`: share of a batch in flight beyond what it is expected to need, as far as max_staleness allows: 0.5 is
    half a batch. Steps are shorter, and groups older."""
    dynamic_batch: bool = False
    """Draw exactly prompts_per_step groups and train on those that pass the filter (AReaL's dynamic_bs)."""
    wait_for_verdicts: bool = True
    """The engine waits for late verdicts, so that a seed always gives the same run. With slow verifiers, set false to
    take verdicts as they come."""
    retire: int = Field(0, ge=0)
    """Number of epochs to skip a prompt after all of its samples were right; 0 is off."""
    max_batch: int | None = Field(None, ge=1)
    """Maximum number of sequences that the engine generates at once; by default 1024, with engine=hf 256."""
    kv_memory_gib: float | None = Field(None, gt=0)
    """`native`: size of the KV cache; requests that do not fit wait. By default 1/3 of GPU memory, or 1/4 of RAM or of
    the control group's limit."""


class AlgoSettings(Section):
    loss: str = "dapo"
    """Token loss: `dapo` (Eq. 8), another name of docs/losses.md, or your own function, `module:name` or
    `file.py:name`."""
    clip_low: float = 0.2
    """The ratio is clipped below at 1 − clip_low."""
    clip_high: float = 0.28
    """Clip-Higher: the ratio is clipped above at 1 + clip_high."""
    clip_ratio_c: float | None = None
    """Dual-clip PPO: bound of the ratio for negative advantages; none is off."""
    proximal: Proximal = "behaviour"
    """Policy that the clipped ratio is relative to: the one that sampled the token, by the engine's log-probability, or
    the one at the beginning of the step, by the trainer's (decoupled PPO)."""
    importance_cap: float | None = Field(None, gt=0)
    """Truncated importance sampling: with a recomputed proximal policy, token losses are multiplied by the ratio
    proximal / behaviour, at most this; none is off."""
    importance_mode: ImportanceMode = "truncate"
    """A token whose ratio is above the cap has the cap as its weight, or 0."""
    aggregation: Aggregation = "token-mean"
    """Token-level loss: how token losses are averaged."""
    norm_length: int | None = Field(None, ge=1)
    """Divisor of seq-mean-token-sum-norm; by default sampling.max_new_tokens."""
    advantage: str = "group"
    """`group`: reward relative to the group, by the three settings below; another name of docs/losses.md, or your own
    function."""
    normalize: Normalize = "group"
    """Baseline and scale: group mean and group std, batch std, no std, or the mean of the other samples (RLOO)."""
    ddof: Literal[0, 1] = 1
    """Standard deviation with divisor n − ddof; 1 (Bessel's correction) is what TRL and verl use."""
    advantage_eps: float = Field(1e-6, ge=0)
    """Added to the standard deviation."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL penalty towards the frozen initial model; 0 is off, and no reference model is loaded."""
    kl_kind: KLKind = "k3"
    """Estimator of the KL penalty."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether the KL penalty is part of the loss, or of the reward of each token, for a critic (PPO)."""
    positive_lm_coef: float = Field(0.0, ge=0)
    """Weight of the negative log-likelihood of correct samples, added to the loss (VAPO); 0 is off."""


class OverlongSettings(Section):
    shape: Literal["soft", "linear", "off"] = "soft"
    """`soft`: Soft Overlong Punishment (Eq. 13); `linear`: a penalty proportional to the excess over max_length."""
    max_length: int | None = Field(None, ge=1)
    """Length from which the soft penalty is full and the linear one starts; by default sampling.max_new_tokens."""
    cache_length: int | None = Field(None, ge=0)
    """Interval before max_length over which the soft penalty grows; by default max_length / 5, as in the paper."""
    factor: float = Field(1.0, ge=0)
    """The full penalty (`soft`), or the weight of the penalty (`linear`)."""
    mask_truncated: bool = False
    """Overlong Filtering: exclude truncated samples from the loss and its denominator."""
    masked_in_baseline: bool = True
    """Whether masked samples count towards the mean and std of their group."""

    @field_validator("shape", mode="before")
    @classmethod
    def _accept_yaml_off(cls, value: Any) -> Any:
        return "off" if value is False else value


class TrainSettings(Section):
    steps: int = Field(100, ge=1)
    """Number of rollout steps."""
    mini_batches: int = Field(1, ge=1)
    """Gradient updates per pass over a step's groups."""
    epochs_per_step: int = Field(1, ge=1)
    """Passes over a step's groups."""
    lr: float = Field(1e-6, gt=0)
    """AdamW's learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, as in the paper, or decaying to min_lr_share × lr at the last step."""
    min_lr_share: float = Field(0.1, ge=0, le=1)
    """Final learning rate of a decaying schedule, as a share of lr."""
    warmup_steps: int = Field(20, ge=0)
    """Rollout steps of linear warm-up."""
    weight_decay: float = Field(0.1, ge=0)
    """AdamW's weight decay, applied to matrices only."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the moments."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this norm."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit` (torchao) stores the moments in 2 bytes per weight instead of 8."""
    token_budget: int | None = Field(None, ge=1)
    """Maximum tokens per micro-batch; by default 16384 or the longest sample, on a GPU as many as 1/3 of it holds."""
    packed: bool = True
    """Concatenate samples without padding and compute the prompt of a group once; false: pad samples."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute each layer in the backward pass: about a quarter more time, a fraction of the memory. `auto`: only if a
    run does not fit on the GPU otherwise."""
    memory: Literal["auto", "keep", "turns"] = "auto"
    """On a GPU, `keep`: all memory stays taken; `turns`: the engine frees its weights and cache during updates (engine
    `native` alone). `auto`: keep if it fits, otherwise turns."""
    fused: bool = True
    """On a GPU in bfloat16: norms, activations, rotary embeddings and softmax in fused kernels."""


class CriticSettings(Section):
    """The critic exists if `algo.advantage` is `gae`."""

    lr: float | None = Field(None, gt=0)
    """Its learning rate; by default 2 × train.lr, as in VAPO. Its other optimizer settings are those of `train`."""
    pretrain_steps: int | None = Field(None, ge=0)
    """Value pre-training: the first steps train the critic alone; by default 50, and at most a quarter of
    train.steps."""
    lambda_policy: float | Literal["adaptive"] = "adaptive"
    """λ of the policy's advantages: a number, or `adaptive`, 1 − 1 / (length_alpha × tokens of the response)."""
    lambda_critic: float = Field(1.0, ge=0, le=1)
    """λ of the critic's targets; with 1, they are the returns."""
    length_alpha: float = Field(0.05, gt=0)
    """α of the adaptive λ."""
    lambda_lowest: float = Field(0.0, ge=0, le=1)
    """The adaptive λ is at least this. With length_alpha 0.05, responses of 20 tokens or less have a λ of 0."""
    value_clip: float | None = Field(None, gt=0)
    """A value changes by at most this in one step, as far as its loss goes (PPO); none is off."""
    whiten: bool = False
    """Scale the advantages of a step to mean 0 and variance 1 over its tokens."""

    @field_validator("lambda_policy", mode="before")
    @classmethod
    def _check_lambda(cls, value: Any) -> Any:
        try:
            good = value == "adaptive" or (not isinstance(value, bool) and 0 <= float(value) <= 1)
        except (TypeError, ValueError):
            good = False
        if not good:
            raise ValueError(
                f"critic.lambda_policy: {shown(value)} is not a number in [0, 1] or adaptive; PPO uses 0.95"
            )
        return value


class EvalSettings(Section):
    every: int | None = Field(None, ge=1)
    """Steps between evaluations, in addition to one before the first step and one after the last."""
    prompts: int | None = Field(None, ge=1)
    """Maximum number of held-out prompts to use."""
    samples: int = Field(1, ge=1)
    """Samples per held-out prompt (avg@k); repeated copies of a prompt in the file are ignored."""
    temperature: float = Field(1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; the paper evaluates at 0.7."""


class CheckpointSettings(Section):
    every: int | None = Field(None, ge=1)
    """Steps between checkpoints; by default train.steps / 10. The last step always writes one."""
    keep: int = Field(2, ge=1)
    """Number of checkpoints to keep."""


class LogSettings(Section):
    rollouts: bool = True
    """Write every group, kept and dropped, to rollouts/step-N.parquet."""
    keep_rollouts: int | None = Field(None, ge=1)
    """Keep only the newest K rollout files; by default all."""
    to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers in addition to metrics.jsonl: any of `tensorboard`, `wandb`, `trackio`, each an optional dependency."""

    @field_validator("to", mode="before")
    @classmethod
    def _accept_a_single_name(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else () if value is None else value


class ClusterSettings(Section):
    backend: Literal["ray"] | None = None
    """`ray`: engines and training ranks are Ray actors, here or on many hosts; none: all in this process."""
    address: str | None = None
    """A running Ray cluster, for example `auto` or `HOST:6379`; none: a cluster on this host, for this run alone."""
    engines: int = Field(1, ge=1)
    """Number of engines that sample."""
    engine_gpus: int = Field(1, ge=1)
    """GPUs per engine, where there are GPUs; with more than one, vLLM is tensor-parallel."""
    ranks: int = Field(1, ge=1)
    """Number of ranks that train, each with a shard of the weights (FSDP2) and a GPU where there are GPUs."""
    placement: Literal["colocated", "separate"] = "colocated"
    """`colocated`: engines and ranks take turns on the same GPUs; `separate`: sampling goes on during updates."""
    offload: bool = False
    """Keep the ranks' weights and moments in host memory."""
    restarts: int = Field(3, ge=0)
    """How often the run continues by itself from its last checkpoint after a rank was lost, and how often each engine
    is started again."""
    timeout_s: float = Field(60.0, gt=0)
    """Seconds without progress after which a rank or an engine counts as lost."""


class Config(Section):
    preset: Preset = "dapo"
    """dapo: the authors' published settings; grpo: none of their techniques; dr_grpo: no std, a constant divisor; vapo
    and ppo: with a critic."""
    seed: int = Field(0, ge=0)
    """Seed of the prompt order, the samples and everything else that is random."""
    engine: str = "native"
    """`native` samples from the trained model; `hf` is transformers' generate, for any architecture; `vllm` is vLLM; or
    your own engine, `module:Class` or `file.py:Class`."""
    engine_options: dict[str, Any] = {}
    """Arguments of vLLM's `LLM`, for example `engine_options.max_num_batched_tokens=8192`, or of your own engine's
    constructor."""
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    reward: RewardSettings = RewardSettings()
    sampling: SamplingSettings = SamplingSettings()
    algo: AlgoSettings = AlgoSettings()
    overlong: OverlongSettings = OverlongSettings()
    train: TrainSettings = TrainSettings()
    critic: CriticSettings = CriticSettings()
    eval: EvalSettings = EvalSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    log: LogSettings = LogSettings()
    cluster: ClusterSettings = ClusterSettings()

    # Derived values.

    @property
    def overlong_max_length(self) -> int:
        return self.overlong.max_length or self.sampling.max_new_tokens

    @property
    def overlong_cache_length(self) -> int:
        cache = self.overlong.cache_length
        return self.overlong_max_length // 5 if cache is None else cache

    @property
    def norm_length(self) -> int:
        return self.algo.norm_length or self.sampling.max_new_tokens

    @property
    def sampling_cap(self) -> int:
        return self.sampling.cap or 30 * self.sampling.prompts_per_step

    @property
    def longest_sample(self) -> int:
        return self.data.max_prompt_tokens + self.sampling.max_new_tokens

    @property
    def token_budget(self) -> int:
        return self.train.token_budget or max(16384, self.longest_sample)

    @property
    def has_critic(self) -> bool:
        return self.algo.advantage == GAE

    @property
    def critic_lr(self) -> float:
        return self.critic.lr or 2 * self.train.lr

    @property
    def pretrain_steps(self) -> int:
        """Steps that train the critic alone."""
        if not self.has_critic:
            return 0
        steps = self.critic.pretrain_steps
        return min(50, self.train.steps // 4) if steps is None else steps

    @property
    def kl_in_reward(self) -> bool:
        return self.algo.kl_coef > 0 and self.algo.kl_in == "reward"

    @property
    def checkpoint_every(self) -> int:
        return self.checkpoint.every or max(1, self.train.steps // 10)

    @property
    def updates_per_step(self) -> int:
        return self.train.mini_batches * self.train.epochs_per_step

    @property
    def scores_first(self) -> bool:
        """Whether a step scores its batch before the first update. With a single update per step, the update itself
        starts from the proximal policy."""
        return self.algo.proximal == "recomputed" and self.updates_per_step > 1

    @property
    def during_updates(self) -> bool:
        """Whether sampling goes on during updates. With `max_staleness: 0`, or if no group outlives its step, there is
        nothing to sample then."""
        apart = self.cluster.backend is not None and self.cluster.placement == "separate"
        outlives = self.sampling.surplus == "carry" and not self.sampling.dynamic_batch
        return apart and outlives and self.sampling.max_staleness > 0

    def resolved(self) -> dict[str, Any]:
        """Every setting with its value, including derived defaults; loading it gives the same run."""
        settings = self.model_dump(mode="json")
        settings["overlong"] |= {"max_length": self.overlong_max_length, "cache_length": self.overlong_cache_length}
        settings["algo"]["norm_length"] = self.norm_length
        settings["sampling"]["cap"] = self.sampling_cap
        settings["checkpoint"]["every"] = self.checkpoint_every
        if self.has_critic:
            settings["critic"] |= {"lr": self.critic_lr, "pretrain_steps": self.pretrain_steps}
        return settings

    @model_validator(mode="after")
    def _reject_conflicts(self) -> Config:
        for key, wrong, remedy in self._conflicts():
            raise ValueError(f"{key}: {wrong}; {remedy}")
        return self

    def _cluster_conflicts(self) -> Iterable[tuple[str, str, str]]:
        cluster = self.cluster
        if cluster.engine_gpus > 1 and self.engine in WITHOUT_OPTIONS:
            wrong = f"{cluster.engine_gpus} with engine={self.engine}, which uses one GPU"
            yield "cluster.engine_gpus", wrong, "set engine=vllm, or more cluster.engines"
        if cluster.engine_gpus > 1 and cluster.placement == "colocated":
            wrong = f"{cluster.engine_gpus} with cluster.placement=colocated, where an engine shares one GPU"
            yield "cluster.engine_gpus", wrong, "set cluster.placement=separate"
        if cluster.backend is None:
            for name, field in ClusterSettings.model_fields.items():
                if (value := getattr(cluster, name)) != field.default:
                    wrong = f"{value} {name} need Ray" if name in ("engines", "ranks") else "has no effect without Ray"
                    yield f"cluster.{name}", wrong, "set cluster.backend=ray"

    def _critic_conflicts(self) -> Iterable[tuple[str, str, str]]:
        if self.has_critic and self.pretrain_steps >= self.train.steps:
            wrong = f"{self.pretrain_steps} of train.steps {self.train.steps} leave no step for the policy"
            yield "critic.pretrain_steps", wrong, f"use {self.train.steps // 4} or less, or raise train.steps"
        if self.kl_in_reward and not self.has_critic:
            wrong = f"reward with algo.advantage={self.algo.advantage}: a token's reward needs a critic"
            yield "algo.kl_in", wrong, f"set algo.kl_in=loss, or algo.advantage={GAE}"

    def _conflicts(self) -> Iterable[tuple[str, str, str]]:
        sampling, algo, overlong = self.sampling, self.algo, self.overlong
        for key, name, known in (("algo.loss", algo.loss, LOSSES), ("algo.advantage", algo.advantage, ADVANTAGES)):
            if name not in known and not is_function(name):
                methods = {
                    choice.after.lower(): normalize for normalize, choice in NORMALIZATIONS.items() if choice.after
                }
                same = methods.get(name.lower()) if known is ADVANTAGES else None
                remedy = f"set algo.normalize={same}" if same else ""
                hint = remedy or did_you_mean(nearest(name, known), "a function is named module:name or file.py:name")
                yield key, f"{shown(name)} is not one of {', '.join(known)}", hint.removeprefix("; ")
        for entry in self.reward.verifiers:
            if entry.verifier not in VERIFIERS and not is_function(entry.verifier):
                hint = did_you_mean(
                    nearest(entry.verifier, VERIFIERS), "a function is named module:name or file.py:name"
                )
                what = f"{shown(entry.verifier)} is not one of {', '.join(VERIFIERS)}"
                yield "reward.verifier", what, hint.removeprefix("; ")
        if self.engine not in ENGINES and not is_function(self.engine):
            hint = did_you_mean(nearest(self.engine, ENGINES), "one of your own is named module:Class or file.py:Class")
            yield "engine", f"{shown(self.engine)} is not one of {', '.join(ENGINES)}", hint.removeprefix("; ")
        if self.engine_options and self.engine in WITHOUT_OPTIONS:
            wrong = f"{', '.join(self.engine_options)}: engine={self.engine} has no options of its own"
            yield "engine_options", wrong, "its settings are sampling.max_batch and sampling.kv_memory_gib"
        yield from self._cluster_conflicts()
        yield from self._critic_conflicts()
        if fixed := [name for name in self.engine_options if name in FIXED_OPTIONS]:
            yield "engine_options", f"{fixed[0]} is decided by the run", FIXED_OPTIONS[fixed[0]]
        loss, advantage = LOSSES.get(algo.loss), ADVANTAGES.get(algo.advantage)
        for key, bound in (("algo.clip_low", algo.clip_low), ("algo.clip_high", algo.clip_high)):
            if loss is None or loss.wide_bounds:
                if not 0 <= bound < math.inf:
                    yield (
                        key,
                        f"{bound:g} is not 0 or more",
                        f"algo.loss={algo.loss} clips at 1 − clip_low, 1 + clip_high",
                    )
            elif not 0 <= bound < 1:
                yield key, f"{bound:g} is outside [0, 1)", "the paper's bounds are clip_low 0.2 and clip_high 0.28"
        if algo.clip_ratio_c is not None and algo.clip_ratio_c <= 1:
            yield "algo.clip_ratio_c", f"{algo.clip_ratio_c:g} is not above 1", "verl uses 3.0; null turns it off"
        if algo.clip_ratio_c is not None and loss is not None and not loss.dual_clip:
            wrong = f"{algo.clip_ratio_c:g} with algo.loss={algo.loss}, which has no dual clip"
            yield "algo.clip_ratio_c", wrong, "set it to null"
        if algo.importance_cap is not None and algo.proximal == "behaviour":
            yield (
                "algo.importance_cap",
                f"{algo.importance_cap:g} with algo.proximal=behaviour: the ratio proximal / behaviour is always 1",
                "set algo.proximal=recomputed",
            )
        if sampling.group_size == 1 and (sampling.dynamic or (advantage is not None and not advantage.alone)):
            what = "dynamic sampling" if sampling.dynamic else f"algo.normalize={algo.normalize}"
            if not sampling.dynamic and algo.advantage != "group":
                what = f"algo.advantage={algo.advantage}"
            yield "sampling.group_size", f"1 with {what}: one sample has nothing to be compared with", "use 2 or more"
        if self.reward.correct <= self.reward.wrong:
            yield (
                "reward.correct",
                f"{self.reward.correct:g} is not above reward.wrong {self.reward.wrong:g}",
                "the paper uses 1 and -1",
            )
        if sampling.prompts_per_step % self.train.mini_batches:
            candidates = range(1, min(sampling.prompts_per_step, 10_000) + 1)
            divisors = [n for n in candidates if sampling.prompts_per_step % n == 0]
            divisor = min(divisors, key=lambda n: abs(n - self.train.mini_batches))
            yield (
                "train.mini_batches",
                f"{self.train.mini_batches} does not divide sampling.prompts_per_step {sampling.prompts_per_step}",
                f"the nearest that does is {divisor}",
            )
        if self.sampling_cap < sampling.prompts_per_step:
            yield (
                "sampling.cap",
                f"{counted(self.sampling_cap, 'group')} cannot fill sampling.prompts_per_step "
                f"{sampling.prompts_per_step}",
                f"use {sampling.prompts_per_step} or more",
            )
        if overlong.shape != "off" and self.overlong_max_length > sampling.max_new_tokens:
            yield (
                "overlong.max_length",
                f"{overlong.max_length} is above sampling.max_new_tokens {sampling.max_new_tokens}, "
                "which no response exceeds",
                f"use {sampling.max_new_tokens} or less",
            )
        if overlong.shape == "soft" and self.overlong_cache_length >= self.overlong_max_length:
            yield (
                "overlong.cache_length",
                f"{overlong.cache_length} is not below overlong.max_length {self.overlong_max_length}",
                f"the paper's proportion is {max(self.overlong_max_length // 5, 0)}",
            )
        if (
            overlong.shape == "soft"
            and self.overlong_cache_length == 0
            and self.overlong_max_length == sampling.max_new_tokens
        ):
            yield (
                "overlong.cache_length",
                f"0 is a hard step beyond {self.overlong_max_length}, which no response exceeds",
                f"the paper's proportion is {self.overlong_max_length // 5}",
            )
        if overlong.shape == "linear" and self.overlong_max_length >= sampling.max_new_tokens:
            yield (
                "overlong.max_length",
                f"linear shaping starts beyond {self.overlong_max_length}, where the engine already stops",
                f"use less than sampling.max_new_tokens {sampling.max_new_tokens}, or overlong.shape=soft",
            )
        if self.token_budget < self.longest_sample:
            yield (
                "train.token_budget",
                f"{self.train.token_budget} does not hold one sample of data.max_prompt_tokens + "
                f"sampling.max_new_tokens = {self.longest_sample}",
                f"use {self.longest_sample} or more",
            )
        if any(not 0 <= beta < 1 for beta in self.train.betas):
            yield "train.betas", f"{list(self.train.betas)} is outside [0, 1)", "AdamW's usual values are [0.9, 0.999]"
        if "" in sampling.stop:
            yield "sampling.stop", "an empty string is in every response", "leave it out"
        if sampling.ahead and sampling.surplus != "carry":
            wrong = f"{sampling.ahead:g} with sampling.surplus={sampling.surplus}: what is drawn ahead is not kept"
            yield "sampling.ahead", wrong, "set sampling.surplus=carry"
        if sampling.ahead and sampling.max_staleness == 0:
            wrong = f"{sampling.ahead:g} with sampling.max_staleness=0: what is drawn ahead is one version old"
            yield "sampling.ahead", wrong, "set sampling.max_staleness=1"
        if sampling.ahead and sampling.dynamic_batch:
            wrong = f"{sampling.ahead:g} with sampling.dynamic_batch: it draws one batch and nothing ahead"
            yield "sampling.ahead", wrong, "set sampling.ahead=0"
        if sampling.dynamic_batch and not sampling.dynamic:
            yield "sampling.dynamic_batch", "needs the filter of sampling.dynamic", "set sampling.dynamic=true"

    @classmethod
    def load(cls, recipe: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
        """Settings of a recipe, a file or a name (None: the defaults), with `key=value` overrides."""
        return cls.override(read_recipe(find_recipe(recipe)) if recipe is not None else {}, overrides)

    @classmethod
    def override(cls, settings: dict[str, Any], overrides: Iterable[str]) -> Config:
        """Nested settings, with `key=value` overrides."""
        override(settings, overrides)
        return cls.build(settings)

    @classmethod
    def build(cls, settings: Mapping[str, Any]) -> Config:
        """Settings from a mapping, nested or with dotted keys; the preset supplies those that it does not set."""
        try:
            sections = nested(settings)
            preset = sections.get("preset", "dapo")
            for section, changes in PRESETS.get(str(preset), {}).items():
                given = sections.setdefault(section, {})
                if isinstance(given, dict):
                    sections[section] = {**changes, **given}
            return cls.model_validate(sections)
        except ValidationError as error:
            raise UserError(explain(error, known_keys())) from None
        except RecursionError:
            raise UserError("settings: nested too deeply; a key is written section.name") from None


def known_keys() -> dict[str, Any]:
    """Every dotted key with its pydantic field, in order of definition."""
    keys: dict[str, Any] = {}
    for name, field in Config.model_fields.items():
        if isinstance(field.default, Section):
            for inner, inner_field in type(field.default).model_fields.items():
                keys[f"{name}.{inner}"] = inner_field
                if inner_field.annotation == LoraSettings | None:
                    keys |= {f"{name}.{inner}.{key}": f for key, f in LoraSettings.model_fields.items()}
        else:
            keys[name] = field
    return keys
