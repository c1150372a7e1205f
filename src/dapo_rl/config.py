"""Every setting: one spelling, one type, one default, in one place.

A recipe is a YAML file in these sections. A key is `section.name` everywhere: in the file, on the command line, in
the run directory and in error messages. Settings are frozen; what follows from several of them is a property.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from dapo_rl.base.quote import shown
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.choices import ADVANTAGES, ENGINES, LOSSES, Aggregation, KLKind, Normalize, is_function
from dapo_rl.errors import UserError
from dapo_rl.recipe import explain, nested, parse_value, put, read_recipe

Preset = Literal["dapo", "grpo", "dr_grpo"]

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
}
"""What each preset changes; a recipe or an override that names the key wins over it."""


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
    def _a_switch_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and info.field_name:
            kinds = get_args(kind := cls.model_fields[info.field_name].annotation) or (kind,)
            if bool not in kinds and any(kind in (int, float) or type(kind) is int for kind in kinds):
                raise PydanticCustomError("switch_for_number", "expected a number")
        return value


class LoraSettings(Section):
    rank: int = Field(16, ge=1)
    """The adapters' rank."""
    alpha: float = Field(32.0, gt=0)
    """Adapters are added with the weight alpha / rank."""
    targets: str | tuple[str, ...] = "all-linear"
    """The layers that get one: `all-linear` (all but the output layer), or names: `[q_proj, v_proj]`."""
    save: Literal["merged", "adapter"] = "merged"
    """How the trained model is saved: whole, with the adapters added in, or the adapters alone, as peft loads them."""


class ModelSettings(Section):
    name: str = "tiny"
    """A directory, a hub name, `tiny` (inside the package), or one of `dapo model get`: `smollm2-135m`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What is computed in; trained weights are float32. `auto`: bfloat16 where the machine multiplies it natively."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU where there is one."""
    lora: LoraSettings | None = None
    """Train adapters of a low rank and not the weights, with the settings below; none: the weights."""

    @field_validator("lora", mode="before")
    @classmethod
    def _lora_has_settings(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, Mapping | LoraSettings):
            raise PydanticCustomError("no_settings", "expected settings, for example model.lora.rank=16")
        return value


class SourceSettings(Section):
    model_config = ConfigDict(frozen=True, extra="allow")
    source: str
    """What `data.train` may say as a plain string; all other keys here are parameters of the source."""


class DataSettings(Section):
    train: str | SourceSettings = "arithmetic"
    """A .jsonl or .parquet file, a hub data set, `reasoning_gym:NAME`, or `arithmetic`; or {source: …, parameters}."""
    eval: str | SourceSettings | None = None
    """Held-out prompts, in the same forms; none: no evaluation."""
    prompt_key: str = "prompt"
    """The column with the prompt, a string or chat messages; without `prompt`, `question` or `problem` stand in."""
    answer_key: str | None = None
    """The column with the ground truth (a dotted name goes inside); by default the usual names are tried."""
    system_prompt: str | None = None
    """Put before every prompt as a system message (or as a first paragraph, without a chat template)."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """`auto`: the tokenizer's template for prompts that are messages or where there is a system prompt."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longer prompts are dropped and counted."""


class RewardSettings(Section):
    verifier: str = "math"
    """`math` (the last `Answer:` line), `exact`, `gym`, or a function: `module:name` or `file.py:name`."""
    boxed: bool = False
    """`math`: fall back to the last `\\boxed{}` where there is no `Answer:` line."""
    correct: float = 1.0
    """The reward of a correct response (built-in verifiers)."""
    wrong: float = -1.0
    """The reward of any other response."""
    threshold: float | None = None
    """A user function's score above this is correct (by default 0.5), a gym scorer's from this on (full marks)."""
    timeout_s: float = Field(5.0, gt=0)
    """A call of the verifier that takes longer is killed, and counted as timed out, not as wrong."""
    memory_mb: int = Field(2048, ge=64)
    """Memory that a verifier may take beside what the run had loaded when it started; beyond it the call fails."""
    workers: int | None = Field(None, ge=0)
    """Processes for the verifier, by default one less than the cores, 8 at most; 0: in this one, without limits."""
    max_error_share: float = Field(0.5, ge=0, le=1)
    """The run stops when the verifier failed on more than this share of a step's groups."""


class SamplingSettings(Section):
    prompts_per_step: int = Field(16, ge=1)
    """Groups that a rollout step trains on (N)."""
    group_size: int = Field(16, ge=1)
    """Samples for each prompt (G)."""
    max_new_tokens: int = Field(1024, ge=1)
    """The engine stops a response here and says so (finish reason `length`)."""
    temperature: float = Field(1.0, gt=0)
    """The policy that is trained is the one at this temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; 1 is off. Log-probabilities are kept without the truncation."""
    top_k: int = Field(0, ge=0)
    """Sample among the k likeliest tokens; 0 is off."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Leave out tokens below this share of the likeliest one's probability; 0 is off."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, beside the end-of-sequence token."""
    ignore_eos: bool = False
    """For benchmarks: responses run to max_new_tokens, whatever tokens they have."""
    dynamic: bool = True
    """Dynamic Sampling: drop groups that are all right or all wrong, and go on sampling until the batch is full."""
    metric: Literal["correct", "score"] = "correct"
    """What the filter looks at: correctness, or the spread of scores (for rewards that are not right-or-wrong)."""
    filter: str | None = None
    """One more filter of your own, `module:name` or `file.py:name`: a function of a group that says keep or not."""
    cap: int | None = Field(None, ge=1)
    """Groups drawn per step at most; by default 30 × prompts_per_step, what verl's recipe allows."""
    on_cap: Literal["error", "partial", "fill"] = "error"
    """At the cap: stop, train on the groups there are, or fill up with uninformative ones."""
    surplus: Literal["carry", "requeue", "drop"] = "carry"
    """Beyond the batch: go on and wait for the next step, sample the prompts again first, or drop."""
    max_staleness: int = Field(1, ge=0)
    """Weight versions that a group may be old when it is trained on; older ones are dropped."""
    dynamic_batch: bool = False
    """Draw prompts_per_step groups, no more, and train on those that pass the filter (AReaL's dynamic_bs)."""
    retire: int = Field(0, ge=0)
    """Epochs for which a prompt rests after all of its samples were right; 0 is off."""
    max_batch: int | None = Field(None, ge=1)
    """Sequences that the engine generates at the same time, at most; by default 1024, with engine=hf 256."""
    kv_memory_gib: float | None = Field(None, gt=0)
    """`native`: memory for keys and values; requests beyond it wait. By default a third of a GPU, a quarter of RAM."""


class AlgoSettings(Section):
    loss: str = "dapo"
    """The loss of a token: `dapo` (Eq. 8), or a function of your own, `module:name` or `file.py:name`."""
    clip_low: float = 0.2
    """The ratio's lower bound is 1 − this."""
    clip_high: float = 0.28
    """Clip-Higher: the ratio's upper bound is 1 + this."""
    clip_ratio_c: float | None = None
    """PPO's dual clip for negative advantages; none is off."""
    aggregation: Aggregation = "token-mean"
    """Token-level loss: how token losses become one number."""
    norm_length: int | None = Field(None, ge=1)
    """The constant of seq-mean-token-sum-norm; by default sampling.max_new_tokens."""
    advantage: str = "group"
    """`group`: a sample beside its group, by the three settings below; or a function of your own, without them."""
    normalize: Normalize = "group"
    """Advantages: by the group's mean and std, the batch's std, the mean only, or the mean of the others."""
    ddof: Literal[0, 1] = 1
    """1: the sample's standard deviation, as in every peer; 0: NumPy's."""
    advantage_eps: float = Field(1e-6, ge=0)
    """Added to the standard deviation."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL term to the frozen starting model; 0 is off, and the reference is not loaded."""
    kl_kind: KLKind = "k3"
    """The estimator of the KL term."""


class OverlongSettings(Section):
    shape: Literal["soft", "linear", "off"] = "soft"
    """Soft Overlong Punishment (Eq. 13); `linear` penalises in proportion beyond max_length; or none."""
    max_length: int | None = Field(None, ge=1)
    """The length at which the penalty is whole; by default sampling.max_new_tokens."""
    cache_length: int | None = Field(None, ge=0)
    """The soft interval before max_length; by default a fifth of it, the paper's proportion."""
    factor: float = Field(1.0, ge=0)
    """The whole penalty (soft), or its weight (linear)."""
    mask_truncated: bool = False
    """Overlong Filtering: samples that the engine cut off stay out of the loss and its denominator."""
    masked_in_baseline: bool = True
    """Whether masked samples count in their group's mean and std: their reward is real."""

    @field_validator("shape", mode="before")
    @classmethod
    def _off_is_a_boolean_in_yaml(cls, value: Any) -> Any:
        return "off" if value is False else value


class TrainSettings(Section):
    steps: int = Field(100, ge=1)
    """Rollout steps."""
    mini_batches: int = Field(1, ge=1)
    """Gradient updates per pass over a step's groups."""
    epochs_per_step: int = Field(1, ge=1)
    """Passes over a step's groups."""
    lr: float = Field(1e-6, gt=0)
    """AdamW's learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant as in the paper, or falling to `min_lr_share` at the last step."""
    min_lr_share: float = Field(0.1, ge=0, le=1)
    """Where a falling schedule ends, as a share of lr."""
    warmup_steps: int = Field(20, ge=0)
    """Rollout steps of linear warm-up."""
    weight_decay: float = Field(0.1, ge=0)
    """AdamW's weight decay, on matrices."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's moments."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this norm."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit` keeps the moments in 2 bytes a weight instead of 8, with torchao."""
    token_budget: int | None = Field(None, ge=1)
    """Tokens of a micro-batch at most; by default 16384 or the longest sample, on a GPU what a third of it holds."""
    packed: bool = True
    """Samples one after the other in a row, prompts of a group once; false: padded, as the model itself computes."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass: a quarter more time, a fraction of the memory."""


class EvalSettings(Section):
    every: int | None = Field(None, ge=1)
    """Evaluate after every so many steps, beside before the first and after the last."""
    prompts: int | None = Field(None, ge=1)
    """Held-out prompts to use at most."""
    samples: int = Field(1, ge=1)
    """Samples for each held-out prompt (avg@k); copies of a prompt in an avg@k file are not counted."""
    temperature: float = Field(1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; the paper evaluates at 0.7."""


class CheckpointSettings(Section):
    every: int | None = Field(None, ge=1)
    """Steps between checkpoints; by default a tenth of train.steps. The last step always writes one."""
    keep: int = Field(2, ge=1)
    """Checkpoints that stay."""


class LogSettings(Section):
    rollouts: bool = True
    """Write every group, kept and dropped, to rollouts/step-N.parquet."""
    to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Where metrics go beside metrics.jsonl: any of `tensorboard`, `wandb`, `trackio`, each an extra of the package."""

    @field_validator("to", mode="before")
    @classmethod
    def _one_is_a_list_of_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else () if value is None else value


class Config(Section):
    preset: Preset = "dapo"
    """dapo: the paper's techniques on; grpo: none of them; dr_grpo: mean-only advantages and a constant norm."""
    seed: int = Field(0, ge=0)
    """Decides prompts, samples and everything else that is random."""
    engine: str = "native"
    """`native` samples on the model itself; `hf` is transformers' generate, for any architecture; `vllm` is vLLM; or
    an engine of one's own, `module:Class` or `file.py:Class`."""
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    reward: RewardSettings = RewardSettings()
    sampling: SamplingSettings = SamplingSettings()
    algo: AlgoSettings = AlgoSettings()
    overlong: OverlongSettings = OverlongSettings()
    train: TrainSettings = TrainSettings()
    eval: EvalSettings = EvalSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    log: LogSettings = LogSettings()

    # What follows from the settings.

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
    def checkpoint_every(self) -> int:
        return self.checkpoint.every or max(1, self.train.steps // 10)

    @property
    def updates_per_step(self) -> int:
        return self.train.mini_batches * self.train.epochs_per_step

    def resolved(self) -> dict[str, Any]:
        """Every setting with its value, defaults that follow from others included; loads back to the same run."""
        settings = self.model_dump(mode="json")
        settings["overlong"] |= {"max_length": self.overlong_max_length, "cache_length": self.overlong_cache_length}
        settings["algo"]["norm_length"] = self.norm_length
        settings["sampling"]["cap"] = self.sampling_cap
        settings["checkpoint"]["every"] = self.checkpoint_every
        return settings

    @model_validator(mode="after")
    def _combinations_that_cannot_work(self) -> Config:
        for key, wrong, remedy in self._conflicts():
            raise ValueError(f"{key}: {wrong}; {remedy}")
        return self

    def _conflicts(self) -> Iterable[tuple[str, str, str]]:
        sampling, algo, overlong = self.sampling, self.algo, self.overlong
        for key, name, known in (("algo.loss", algo.loss, LOSSES), ("algo.advantage", algo.advantage, ADVANTAGES)):
            if name not in known and not is_function(name):
                hint = did_you_mean(nearest(name, known), "a function is named module:name or file.py:name")
                yield key, f"{shown(name)} is not one of {', '.join(known)}", hint.removeprefix("; ")
        if self.engine not in ENGINES and not is_function(self.engine):
            hint = did_you_mean(nearest(self.engine, ENGINES), "one of your own is named module:Class or file.py:Class")
            yield "engine", f"{shown(self.engine)} is not one of {', '.join(ENGINES)}", hint.removeprefix("; ")
        for key, bound in (("algo.clip_low", algo.clip_low), ("algo.clip_high", algo.clip_high)):
            if not 0 <= bound < 1:
                yield key, f"{bound:g} is outside [0, 1)", "the paper's bounds are clip_low 0.2 and clip_high 0.28"
        if algo.clip_ratio_c is not None and algo.clip_ratio_c <= 1:
            yield "algo.clip_ratio_c", f"{algo.clip_ratio_c:g} is not above 1", "verl uses 3.0; null turns it off"
        if sampling.group_size == 1 and (sampling.dynamic or not is_function(algo.advantage)):
            what = "dynamic sampling" if sampling.dynamic else f"algo.normalize={algo.normalize}"
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
                f"{sampling.cap} groups cannot fill sampling.prompts_per_step {sampling.prompts_per_step}",
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
        if sampling.dynamic and sampling.surplus == "carry" and sampling.max_staleness == 0:
            yield (
                "sampling.max_staleness",
                "0 with sampling.surplus=carry: what is carried is a version old when its turn comes",
                "use 1 or more, or sampling.surplus=drop",
            )
        if sampling.dynamic_batch and not sampling.dynamic:
            yield "sampling.dynamic_batch", "it needs the filter of sampling.dynamic", "set sampling.dynamic=true"

    @classmethod
    def load(cls, recipe: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
        """A recipe file (none: the defaults), then `key=value` overrides on top of it."""
        return cls.override(read_recipe(Path(recipe)) if recipe is not None else {}, overrides)

    @classmethod
    def override(cls, settings: dict[str, Any], overrides: Iterable[str]) -> Config:
        """Nested settings, into which `key=value` overrides are put."""
        for override in overrides:
            key, equals, value = override.partition("=")
            if not equals or not key:
                raise UserError(f"{shown(override)}: an override is written key=value, for example train.lr=1e-6")
            put(settings, key.strip(), parse_value(key, value))
        return cls.build(settings)

    @classmethod
    def build(cls, settings: Mapping[str, Any]) -> Config:
        """Settings as a mapping, nested or with dotted keys; the preset fills in what they do not name."""
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
    """Every dotted key with its pydantic field, in the order of the documentation."""
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
