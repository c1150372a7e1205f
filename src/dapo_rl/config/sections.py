"""The sections of settings: one spelling, one type and one default for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from dapo_rl.base.quote import shown
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.choices import (
    NO_VERIFIER,
    Aggregation,
    ImportanceLevel,
    ImportanceMode,
    KLKind,
    Normalize,
    Proximal,
    Rejection,
)
from dapo_rl.config.rejections import read_rejections
from dapo_rl.config.section import Section
from dapo_rl.config.sources import Sources, read_sources
from dapo_rl.objectives import LOSSES


def _finite_logits(temperature: float) -> float:
    """Logits divided by less would overflow in float32."""
    if 0 < temperature < 1e-30:
        raise PydanticCustomError("temperature", "expected 1e-30 or more (temperature 0, where allowed, is greedy)")
    return temperature


Temperature = Annotated[float, AfterValidator(_finite_logits)]


class LoraSettings(Section):
    rank: int = Field(16, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    targets: str | tuple[str, ...] = "all-linear"
    """Layers to adapt: `all-linear` (all but the output layer), or a list of names such as `[q_proj, v_proj]`."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the inputs of the adapters, during updates only."""
    use_rslora: bool = False
    """rsLoRA: the output is multiplied by alpha / √rank instead."""
    use_dora: bool = False
    """DoRA: trains the norms of the adapted weights' rows too."""
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
        if value not in (None, "none") and not isinstance(value, Mapping | LoraSettings):
            raise PydanticCustomError("no_settings", "expected settings, for example model.lora.rank=16")
        return value


Window = tuple[float, float]


class DataSettings(Section):
    train: Sources = "arithmetic"
    """A .jsonl or .parquet file, a hub data set, `reasoning_gym:NAME` or `arithmetic`; {source: …} adds parameters. Or
    a list of these, mixed in proportion to weights if any entry has one: {source: …, weight: 2}."""
    eval: Sources | None = None
    """Held-out prompts, given in the same way, without weights; none: no evaluation."""
    prompt_key: str = "prompt"
    """Column with the prompt, a string or chat messages; if there is no `prompt`, `question` or `problem` is used."""
    answer_key: str | None = None
    """Column with the ground truth (dots address nested fields); by default the usual names are tried."""
    system_prompt: str | None = None
    """System message added to every prompt (as a first paragraph if there is no chat template)."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """`auto`: apply the tokenizer's template to prompts that are chat messages or if there is a system prompt."""
    chat_template_kwargs: dict[str, Any] = Field({})
    """Arguments of the chat template, such as `{enable_thinking: false}` for Qwen3."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longer prompts are dropped and counted."""
    pass_rate: Window | None = None
    """Train only on prompts whose pass rate is in this window, such as `[0.1, 0.9]`. `data.train` needs a column of
    pass rates, which `dapo eval --scores` writes."""
    pass_rate_key: str = "pass_rate"
    """Column with the pass rate (dots address nested fields): a number from 0 to 1, or a text such as `3/8`."""

    @field_validator("train", "eval", mode="before")
    @classmethod
    def _read_sources(cls, value: Any, info: ValidationInfo) -> Any:
        return read_sources(value, f"data.{info.field_name}")


class WeightedVerifier(Section):
    """One of several verifiers. In a recipe, a name alone has the weight 1."""

    verifier: str
    weight: float = 1.0
    timeout_s: float | None = Field(None, gt=0)
    """Time limit of this verifier, instead of `reward.timeout_s`."""


class RewardSettings(Section):
    verifier: str | tuple[WeightedVerifier, ...] = "math"
    """`math` (the last `Answer:` line), `exact`, `gym`, a custom function (`module:name` or `file.py:name`), a reward
    model (`model:NAME`, a directory or a hub name), or a judge (a .yaml file, docs/verifiers.md). Or a list of these,
    whose scores are summed; {verifier: NAME, weight: 0.5} gives a weight. `none`, the default with `env.name` or
    `env.agent`: the environment gives the rewards."""
    boxed: bool = False
    """`math`: fall back to the last `\\boxed{}` if there is no `Answer:` line."""
    form: Literal["any", "same"] = "any"
    """`math`: `any` accepts each notation that equals the ground truth; `same` requires its form, so that `2x+3x` is
    wrong for `5x`. Order, spacing, `\\cdot` and `/` for `\\frac` do not matter."""
    correct: float = 1.0
    """Reward of a correct response (built-in verifiers)."""
    wrong: float = -1.0
    """Reward of any other response."""
    threshold: float | None = None
    """Correct means a score above this (a custom function, by default 0.5) or at least this (gym, by default 1)."""
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
        if value is None:
            return NO_VERIFIER
        if isinstance(value, list | tuple):
            return _weighted_verifiers(value)
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise ValueError(f"reward.verifier: expected a name or a list, got {shown(value)}; {_AN_ENTRY}")
        return value

    @property
    def verifiers(self) -> tuple[WeightedVerifier, ...]:
        """The verifiers with their weights; the first one that applies decides whether a sample is correct."""
        if self.verifier == NO_VERIFIER:
            return ()
        return (WeightedVerifier(verifier=self.verifier),) if isinstance(self.verifier, str) else self.verifier


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


class EnvSettings(Section):
    name: str | None = None
    """An environment: `file.py:Class` or `module:Class`, `guess`, `verifiers:NAME`, `openenv:URL`, `gymnasium:NAME`,
    `textarena:NAME`; none: single turns, unless there are tools or an agent."""
    options: dict[str, Any] = Field({})
    """Arguments of the environment's class."""
    tools: tuple[str, ...] = ()
    """Functions that the policy can call: `file.py:name`, `module:name`, or the built-in `python` and `calculator`."""
    mcp: tuple[str, ...] = ()
    """MCP servers, whose tools the policy can call: a command or a URL each."""
    agent: str | None = None
    """A program that talks to the run's OpenAI-compatible endpoint: `file.py:function`, or a command line."""
    tool_format: str = "auto"
    """How the model writes tool calls: `auto`, by its tokenizer, or a parser's name, such as `hermes`."""
    max_turns: int = Field(8, ge=1)
    """Turns of the policy in an episode."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Tokens of one turn; none: only `sampling.max_new_tokens` limits them, over the whole episode."""
    max_observation_tokens: int = Field(2048, ge=1)
    """Tokens of tool results and other messages in an episode, after its prompt."""
    reward_weight: float = 1.0
    """Weight of the environment's reward if `reward.verifier` is set too."""
    turn_discount: float | None = Field(None, ge=0, le=1)
    """Give each turn the discounted sum of the rewards that follow it; none: the whole episode gets its total."""
    timeout_s: float = Field(30.0, gt=0)
    """Time limit of a call (opening an episode, or a step with its tool calls). Beyond it, the episode fails."""
    memory_mb: int = Field(1024, ge=64)
    """Memory limit of a process of the environment, on top of what the run had loaded when it started."""
    workers: int | None = Field(None, ge=1)
    """Processes for environments, each of which makes one call at a time: by default four per core (8 to 64), 64 for
    tools, and one for asynchronous environments, which make many. With as many as there are episodes, none shares
    one."""
    max_error_share: float = Field(0.5, ge=0, le=1)
    """The run stops if the environment fails in more than this share of a step's episodes."""
    host: str = "127.0.0.1"
    """Address on which the endpoint for agents listens. Any but loopback needs `env.tls` or a trusted network."""
    port: int = Field(0, ge=0, le=65535)
    """Port of the endpoint; 0: any free one."""
    tls: tuple[str, str] | None = None
    """Certificate and key files of the endpoint; none: plain HTTP."""
    workers_per_node: int | None = Field(None, ge=1)
    """With `cluster.backend=ray`: processes for environments on each node; none: all on the driver's node."""

    @field_validator("tools", "mcp", mode="before")
    @classmethod
    def _read_list(cls, value: Any, info: ValidationInfo) -> Any:
        if value in (None, "none"):
            return ()
        if isinstance(value, bool | int | float):
            key = f"env.{info.field_name}"
            raise ValueError(f"{key}: expected a name, a command or a list of them, got {shown(value)}; quote it")
        return (value,) if isinstance(value, str) else value

    @property
    def given(self) -> bool:
        return bool(self.name or self.tools or self.mcp or self.agent)


class SamplingSettings(Section):
    prompts_per_step: int = Field(16, ge=1)
    """Groups to train on per rollout step (N)."""
    group_size: int = Field(16, ge=1)
    """Samples per prompt (G)."""
    max_new_tokens: int = Field(1024, ge=1)
    """Maximum length of a response; a longer one is truncated (finish reason `length`)."""
    length_stages: dict[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=1)]] = Field({})
    """Length limits by the number of complete steps: `{0: 4096, 200: 8192}` allows 4096 tokens, and 8192 after 200
    steps. The longest must equal max_new_tokens."""
    temperature: Temperature = Field(1.0, gt=0)
    """Sampling temperature; log-probabilities in the loss are computed at the same temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling, applied after top_k; 1 is off. Recorded log-probabilities ignore the truncation, unless
    keep_mask is set."""
    top_k: int = Field(0, ge=0)
    """Sample from the k most likely tokens; 0 is off."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Exclude tokens whose probability is below this fraction of the most likely token's; 0 is off. Applied after
    top_p, as in transformers; vLLM applies it before."""
    keep_mask: bool = False
    """Record which tokens top_k, top_p and min_p kept for each sampled token, and compute its log-probabilities and
    entropy over them alone. Needs top_k, 1 to 1024: it takes 4 · top_k bytes per token."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, in addition to the end-of-sequence token."""
    ignore_eos: bool = False
    """For benchmarks: continue past the end-of-sequence token, up to max_new_tokens."""
    dynamic: bool = True
    """Dynamic Sampling: drop groups that are all right or all wrong, and keep sampling until the batch is full."""
    metric: Literal["auto", "correct", "score"] = "auto"
    """Quantity that must differ within a group. `auto`: correctness, or scores once the verifier gives different scores
    to samples of equal correctness."""
    filter: str | None = None
    """An additional filter, `module:name` or `file.py:name`: takes a group, returns whether to keep it."""
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
    """`carry`: keep this share of a batch in flight beyond the expected need, as far as max_staleness allows. Steps get
    shorter, and groups older."""
    dynamic_batch: bool = False
    """Draw exactly prompts_per_step groups and train on those that pass the filter (AReaL's dynamic_bs)."""
    wait_for_verdicts: bool = True
    """The engine waits for late verdicts, so that a seed always gives the same run. With slow verifiers, set false to
    take verdicts as they come."""
    skip_solved_epochs: int = Field(0, ge=0)
    """Number of epochs to skip a prompt after all of its samples were right; 0 is off."""
    selection: Literal["uniform", "informative"] = "uniform"
    """`informative`: a curriculum that prefers prompts whose groups are predicted to be neither all right nor all
    wrong."""
    source_weights: Literal["fixed", "informative"] = "fixed"
    """`informative`: the weights of a list of sources follow their recent shares of informative groups."""
    replay_hard: float = Field(0.0, ge=0, lt=1)
    """Share of the draws that replays prompts that were solved, but seldom; 0 is off."""
    replay_pass_rate: float = Field(0.25, gt=0, le=1)
    """Highest pass rate of a replayed prompt."""
    max_batch: int | None = Field(None, ge=1)
    """Maximum number of sequences that the engine generates at once; by default 1024, `hf` 256."""
    kv_memory_gib: float | None = Field(None, gt=0)
    """`native`: size of the KV cache; requests that do not fit wait. By default 1/3 of the GPU's free memory, more or
    less if the run would not fit otherwise; without a GPU, 1/4 of RAM or of the control group's limit."""

    @property
    def truncations(self) -> dict[str, float]:
        """The settings that exclude tokens from sampling, with their values."""
        off = {"top_p": 1, "top_k": 0, "min_p": 0}
        return {name: value for name in off if (value := getattr(self, name)) != off[name]}

    @property
    def most_kept(self) -> int:
        """The most tokens that are recorded as kept for a sampled token; 0 if none are."""
        return self.top_k if self.keep_mask else 0

    def longest_response(self, steps: int) -> int:
        """The length limit of groups that start after so many steps."""
        begun = [step for step in self.length_stages if step <= steps]
        return self.length_stages[max(begun)] if begun else self.max_new_tokens


class AlgoSettings(Section):
    loss: str = "dapo"
    """Token loss: `dapo` (Eq. 8), another name of docs/losses.md, or a custom function, `module:name` or
    `file.py:name`."""
    clip_low: float = 0.2
    """The ratio is clipped below at 1 − clip_low."""
    clip_high: float = 0.28
    """Clip-Higher: the ratio is clipped above at 1 + clip_high."""
    clip_ratio_c: float | None = None
    """Dual-clip PPO: bound of the ratio for negative advantages; none is off."""
    proximal: Proximal = "auto"
    """Policy that the clipped ratio is relative to. `behaviour`: the one that sampled the token, by the engine's
    log-probability; `recomputed`: the one at the beginning of the step, by the trainer's (decoupled PPO). By default
    `recomputed` for losses with one ratio per sequence, such as gspo, and `behaviour` for all others."""
    importance_cap: float | None = Field(None, gt=0)
    """Truncated importance sampling: with a recomputed proximal policy, token losses are multiplied by the ratio
    proximal / behaviour, at most this; none is off."""
    importance_floor: float | None = Field(None, gt=0)
    """Weights are at least this; none is no lower bound."""
    importance_mode: ImportanceMode = "truncate"
    """Weight of a ratio out of bounds. `truncate`: the bound; `mask`: 0."""
    importance_level: ImportanceLevel = "token"
    """`token`: each token has its own ratio; `sequence`: the product over its sample."""
    importance_normalize: bool = False
    """Divides weights by their mean over the tokens of a mini-batch, or with level `sequence` over its samples."""
    reject: dict[Rejection, float | tuple[float, float]] = Field({})
    """Leaves tokens or samples out of the loss and its denominator by their ratio proximal / behaviour, for example
    `algo.reject.geometric=[0.99,1.01]`; docs/losses.md has the statistics and their bounds."""
    off_policy_mask_threshold: float | None = Field(None, ge=0)
    """Off-policy sequence masking (DeepSeek-V3.2): in samples whose mean of log behaviour − log current is above this,
    tokens with a negative advantage have no loss; none is off."""
    max_token_staleness: int | None = Field(None, ge=0)
    """Leaves tokens out of the loss that were sampled with weights more than this many versions old; none: trains on
    all."""
    aggregation: Aggregation = "token-mean"
    """Token-level loss: how token losses are averaged."""
    norm_length: int | None = Field(None, ge=1)
    """Divisor of seq-mean-token-sum-norm; by default sampling.max_new_tokens."""
    advantage: str = "group"
    """`group`: reward relative to the group, by the three settings below; another name of docs/losses.md, or a custom
    function."""
    normalize: Normalize = "group"
    """Baseline and scale: group mean and group std, batch std, no std, or the mean of the other samples (RLOO)."""
    ddof: Literal[0, 1] = 1
    """Standard deviation with divisor n − ddof; 1 (Bessel's correction) is what TRL and verl use."""
    advantage_eps: float = Field(1e-6, ge=0)
    """Added to the standard deviation."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL penalty towards the frozen initial model; 0 is off, and no reference model is loaded. With
    `algo.kl_target`, its value at the start."""
    kl_target: float | None = Field(None, gt=0)
    """Adaptive KL penalty: after each update, or with `algo.kl_in: reward` after each step, its weight rises if the KL
    divergence per token is above this, and falls if it is below, by at most a fifth. None: a constant weight."""
    kl_horizon: float = Field(10000.0, gt=0)
    """Samples after which the adaptive weight has changed by up to a fifth; a smaller number adapts faster."""
    kl_kind: KLKind = "k3"
    """Estimator of the KL penalty. In the loss only its gradient matters, which is 0 on average for k1; k1+ and k3+
    have the values of k1 and k3 with the gradient of the KL divergence."""
    kl_unbiased: bool = False
    """In the loss, with kl_kind k1 or k3: weight the estimate by the ratio of the policy to the one that sampled the
    token. Its gradient is then that of the KL divergence, also for tokens of an older policy."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether the KL penalty is part of the loss, or of the reward of each token, for a critic (PPO)."""
    ref_sync_steps: int | None = Field(None, ge=1)
    """The policy replaces the reference of the KL penalty every this many steps (ProRL, TR-DPO); none: it stays the
    initial model."""
    ref_mixup_alpha: float = Field(1.0, gt=0, le=1)
    """The reference's weights become alpha × the policy's + (1 − alpha) × its own. TRL's default is 0.6."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus: the entropy of tokens, averaged as token losses are, is subtracted from the loss; 0
    is off. With `algo.entropy_target`, its value at the start."""
    entropy_target: float | None = Field(None, gt=0)
    """Adaptive entropy bonus: after each update its weight rises by `algo.entropy_coef_delta` if the mean entropy, in
    nats, is at most this, and falls by as much otherwise; above the target, no bonus is given. None: a constant
    weight."""
    entropy_coef_delta: float = Field(0.005, gt=0)
    """Step of the adaptive weight."""
    entropy_coef_max: float = Field(1.0, gt=0)
    """Largest adaptive weight."""
    top_entropy_quantile: float = Field(1.0, gt=0, le=1)
    """Train only on this share of an update's tokens: those with the highest entropy. The others have no loss, but
    count in its denominator. 1 is off; otherwise a step costs one more forward pass."""
    cov_share: float = Field(0.0002, gt=0, le=1)
    """Share of an update's tokens that `clip-cov` leaves out or `kl-cov` penalises."""
    clip_cov_low: float = 1.0
    """`clip-cov`: tokens whose covariance of log-probability and advantage is above this can be left out."""
    clip_cov_high: float = 5.0
    """`clip-cov`: upper bound of that covariance."""
    kl_cov_coef: float = Field(1.0, ge=0)
    """`kl-cov`: weight of the penalty, the size of a token's log-ratio to the old policy."""
    tau_pos: float = Field(1.0, gt=0)
    """`sapo`: temperature of the gate for positive advantages; a higher one closes it sooner."""
    tau_neg: float = Field(1.05, gt=0)
    """`sapo`: temperature for the others."""
    positive_lm_coef: float = Field(0.0, ge=0)
    """Weight of the negative log-likelihood of correct samples, added to the loss (VAPO); 0 is off."""

    @field_validator("reject", mode="before")
    @classmethod
    def _read_rejections(cls, value: Any) -> Any:
        return read_rejections(value)

    @property
    def has_entropy_bonus(self) -> bool:
        return self.entropy_coef > 0 or self.entropy_target is not None

    @property
    def per_sequence(self) -> bool:
        """Whether the loss clips one ratio per sequence. Whether a function of the user does is not known."""
        entry = LOSSES.get(self.loss)
        return entry is not None and entry.per_sequence

    @property
    def old_policy(self) -> Literal["behaviour", "recomputed"]:
        """The policy that the clipped ratio is relative to. The clip bounds of a sequence's ratio are about as small as
        the difference between engine and trainer, which would use them up."""
        if self.proximal == "auto":
            return "recomputed" if self.per_sequence else "behaviour"
        return self.proximal


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
    """Maximum tokens per micro-batch; by default 16384 or the longest sample, on a GPU as many as a third of its
    free memory holds."""
    packed: bool = True
    """Concatenate samples without padding and compute the prompt of a group once; false: pad samples."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute each layer in the backward pass: about a quarter more time, a fraction of the memory. `auto`: only if a
    run does not fit on the GPU otherwise."""
    memory: Literal["auto", "keep", "time_share"] = "auto"
    """On a GPU, `keep`: all memory stays taken; `time_share`: the engine frees its weights and cache during updates
    (engine `native` alone). `auto`: keep if it fits, otherwise time_share."""
    transforms: tuple[str, ...] = ()
    """Functions that add columns to the batch before its first update, each module:name or file.py:name."""
    fused: bool = True
    """On a GPU in bfloat16: norms, activations, rotary embeddings and softmax in fused kernels."""


class TeacherSettings(Section):
    name: str | None = None
    """On-policy distillation: a model with the same tokenizer, as a directory, a hub name, or the base URL of a vLLM
    server (`http://localhost:8000/v1`). Each sampled token's advantage gets weight × (log π_teacher − log π), and
    nothing else with `algo.advantage: distill`."""
    weight: float = Field(1.0, gt=0)
    """Weight of the teacher in the advantage of a token."""
    prompt: str | None = None
    """Template of the teacher's prompt, where it differs; {prompt} and {answer} are replaced. Without
    `teacher.name`, the teacher is the policy as the run starts."""
    model: str | None = None
    """Name of the model on the server; by default the first that it lists."""
    api_key_env: str | None = None
    """Environment variable with the server's key."""
    timeout_s: float = Field(60.0, gt=0)
    """Time limit of a request to the server."""
    retries: int = Field(4, ge=0)
    """How often a failed request is retried before the run stops with a checkpoint."""

    @property
    def given(self) -> bool:
        return self.name is not None or self.prompt is not None

    @property
    def served(self) -> bool:
        return self.name is not None and self.name.startswith(("http://", "https://"))

    @property
    def loaded(self) -> bool:
        return self.name is not None and not self.served

    @property
    def of_policy(self) -> bool:
        return self.name is None and self.prompt is not None


class CriticSettings(Section):
    """The critic exists if `algo.advantage` is `gae`."""

    model: str | None = None
    """A reward model that the critic starts from, as a directory or a hub name, of the policy's architecture and with
    its tokenizer; none: from the policy's weights, with a new head."""
    lr: float | None = Field(None, gt=0)
    """The critic's learning rate; by default 2 × train.lr, as in VAPO. Its other optimizer settings are in `train`."""
    pretrain_steps: int | None = Field(None, ge=0)
    """Value pre-training: the first steps train the critic alone; by default 50, and at most an eighth of
    train.steps."""
    pretrain_until: float | None = Field(None, gt=0, le=1)
    """Value pre-training ends early, after the first step in which the critic explains this share of the returns'
    variance (`critic/vf_explained_var`)."""
    lambda_policy: float | Literal["adaptive"] = "adaptive"
    """λ of the policy's advantages: a number, or `adaptive`, 1 − 1 / (length_alpha × tokens of the response)."""
    lambda_critic: float = Field(1.0, ge=0, le=1)
    """λ of the critic's targets; with 1, they are the returns."""
    length_alpha: float = Field(0.05, gt=0)
    """α of the adaptive λ."""
    lambda_lowest: float = Field(0.0, ge=0, le=1)
    """The adaptive λ is at least this. With length_alpha 0.05, responses of 20 tokens or less have a λ of 0."""
    value_clip: float | None = Field(None, gt=0)
    """PPO's value clipping: limits the change of a value in one step, in its loss; none is off."""
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
    """Maximum number of held-out prompts, of each source in a list."""
    samples: int = Field(1, ge=1)
    """Samples per held-out prompt (avg@k); repeated copies of a prompt in the file are ignored."""
    temperature: Temperature = Field(1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; the paper evaluates at 0.7."""


class CheckpointSettings(Section):
    every: int | None = Field(None, ge=1)
    """Steps between checkpoints; by default train.steps / 10."""
    save_final: bool = True
    """Save the last step: a checkpoint, and the model in Hugging Face format. `dapo ablate` needs neither."""
    keep: int = Field(2, ge=1)
    """Number of checkpoints to keep."""


class LogSettings(Section):
    rollouts: bool = True
    """Write every group, kept and dropped, to rollouts/step-N.parquet."""
    keep_rollouts: int | None = Field(None, ge=1)
    """Number of rollout files to keep, the newest; by default all."""
    report: bool = True
    """Draw report.png when the run ends."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers in addition to metrics.jsonl: any of `tensorboard`, `wandb`, `trackio`, each an optional dependency."""

    @field_validator("trackers", mode="before")
    @classmethod
    def _accept_a_single_name(cls, value: Any) -> Any:
        return () if value in (None, "none") else (value,) if isinstance(value, str) else value


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
    placement: Literal["colocated", "separate", "shared"] = "colocated"
    """`colocated`: engines and ranks time-share the same GPUs; `separate`: each has its own GPUs, and sampling
    continues during updates; `shared`: sampling continues during updates on the same GPUs."""
    weights: Literal["store", "direct", "broadcast"] = "store"
    """How engines get new weights. `store`: through Ray's object store; `direct`: from the rank on the same GPU;
    `broadcast`: from the first rank to engines on other GPUs, by NCCL, or by gloo without GPUs."""
    offload: bool = False
    """Keep the ranks' weights and moments in host memory."""
    restarts: int = Field(3, ge=0)
    """How often lost ranks restart from the last checkpoint; also the limit for each engine, and for the environments
    of each node."""
    timeout_s: float = Field(60.0, gt=0)
    """Seconds without progress after which a rank or an engine counts as lost."""

    @property
    def engines_per_gpu(self) -> int:
        """Where engines and ranks share GPUs."""
        return -(-self.engines // self.ranks)
