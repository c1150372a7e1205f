"""Compares a recipe with the paper (arXiv 2503.14476), component by component."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dapo_rl.base.format import counted
from dapo_rl.choices import AGGREGATIONS, NORMALIZATIONS, VERIFIERS, is_function
from dapo_rl.config import Config, SourceSettings
from dapo_rl.family import ADVANTAGES, LOSSES
from dapo_rl.lab.batch_arithmetic import batch_arithmetic, redraws

Kind = Literal["algorithm", "settings", "evaluation"]
"""A technique that is on or off, a value, or how accuracy is measured."""


@dataclass(frozen=True, slots=True)
class Comparison:
    component: str
    reference: str
    """Where the paper specifies it; `verl script` if only the authors' published script does."""
    kind: Kind
    keys: tuple[str, ...]
    paper: str
    recipe: str
    same: bool
    meaning: str = ""
    """The effect of the difference on the run, or why an apparent difference is not one."""


Finding = tuple[str, bool, str]
"""The recipe's value, whether it matches the paper, and what that means."""

COMPONENTS: list[Callable[[Config], Comparison | None]] = []


def _component(
    name: str, reference: str, kind: Kind, paper: str, *keys: str
) -> Callable[[Callable[[Config], Finding | None]], Callable[[Config], Finding | None]]:
    """Registers a comparison for the report, in the order of this file."""

    def enter(find: Callable[[Config], Finding | None]) -> Callable[[Config], Finding | None]:
        def compare(config: Config) -> Comparison | None:
            finding = find(config)
            return None if finding is None else Comparison(name, reference, kind, keys, paper, *finding)

        COMPONENTS.append(compare)
        return find

    return enter


@_component("Objective", "Eq. 8", "algorithm", "min(r A, clip(r) A)", "algo.loss", "algo.clip_ratio_c")
def _objective(config: Config) -> Finding:
    if is_function(config.algo.loss):
        meaning = "the function computes the token losses; whether the clip bounds apply is up to it"
        return f"losses of {config.algo.loss}", False, meaning
    loss, c = LOSSES[config.algo.loss], config.algo.clip_ratio_c
    if config.algo.loss != "dapo":
        return loss.formula, False, loss.effect
    if c is None:
        return loss.formula, True, ""
    meaning = f"tokens with a negative advantage and a ratio above {c:g} get no gradient"
    if c >= 10:
        meaning += "; the authors' script has this bound too, at 10, where it hardly acts"
    else:
        meaning += ": mistakes whose probability rises fastest are not unlearned"
    return f"min(r A, clip(r) A), dual clip at {c:g}", c >= 10, meaning


@_component(
    "Ratio",
    "Eq. 9",
    "algorithm",
    "to the policy that sampled the token",
    "algo.proximal",
    "algo.importance_cap",
    "algo.importance_mode",
)
def _ratio(config: Config) -> Finding:
    algo = config.algo
    if algo.proximal == "behaviour":
        return "to the policy that sampled the token", True, ""
    recipe = "to the policy at the beginning of the step"
    old = config.sampling.dynamic and config.sampling.surplus == "carry"
    meaning = "the same policy, by the trainer's log-probabilities instead of the engine's, as in the authors' script"
    if old:
        meaning += "; carried tokens, which older weights sampled, are clipped around newer ones"
    if algo.importance_cap is None:
        return recipe, not old, f"{meaning}, without a correction" if old else meaning
    what = {"truncate": "truncated at", "mask": "0 above"}[algo.importance_mode]
    meaning += f"; token losses are multiplied by the ratio to the policy that sampled, {what} {algo.importance_cap:g}"
    return f"{recipe}, importance weights {what} {algo.importance_cap:g}", False, meaning


@_component(
    "Advantage",
    "Eq. 9",
    "algorithm",
    "group mean and std",
    "algo.advantage",
    "algo.normalize",
    "algo.ddof",
    "algo.advantage_eps",
)
def _advantage(config: Config) -> Finding:
    algo, size = config.algo, config.sampling.group_size
    if is_function(algo.advantage):
        meaning = "the function computes the advantages; algo.normalize has no effect"
        return f"advantages of {algo.advantage}", False, meaning
    if algo.advantage != "group":
        return ADVANTAGES[algo.advantage].formula, False, ADVANTAGES[algo.advantage].effect
    chosen = NORMALIZATIONS[algo.normalize]
    if algo.normalize != "group":
        meaning = "groups that are about half right have more weight than lopsided ones"
        return chosen.words, False, f"{meaning}, as in {chosen.after}" if chosen.after else meaning
    recipe = f"{chosen.words} (ddof {algo.ddof})"
    if algo.advantage_eps > 1e-3:
        meaning = f"eps {algo.advantage_eps:g} is not small compared with the std: groups with little spread count less"
        return f"{recipe}, eps {algo.advantage_eps:g}", False, meaning
    if algo.ddof == 1:
        return recipe, True, ""
    gain = (size / (size - 1)) ** 0.5 - 1
    meaning = f"the paper does not specify ddof; the authors' script uses 1, and 0 makes advantages {gain:.1%} larger"
    return recipe, True, meaning


@_component("Clip-Higher", "Eq. 10", "algorithm", "upper bound wider", "algo.clip_low", "algo.clip_high")
def _clip_higher(config: Config) -> Finding:
    low, high = config.algo.clip_low, config.algo.clip_high
    if high > low:
        return "upper bound wider", True, ""
    if high == low:
        meaning = f"both bounds are {low:g}: unlikely tokens can hardly gain probability, and entropy tends to collapse"
        return "symmetric", False, meaning
    meaning = "the upper bound is tighter: exploration is limited more than in GRPO, and entropy falls faster"
    return "lower bound wider", False, meaning


@_component(
    "Dynamic Sampling",
    "Eq. 11",
    "algorithm",
    "0 < correct < G",
    "sampling.dynamic",
    "sampling.metric",
    "sampling.filter",
)
def _dynamic_sampling(config: Config) -> Finding:
    sampling = config.sampling
    if not sampling.dynamic:
        signal = "no signal" if config.overlong.shape == "off" else "no signal except the length penalty"
        meaning = f"groups that are all right or all wrong stay in the batch and carry {signal}: the more of them, the "
        return "off", False, meaning + "noisier the gradient"
    recipe, effects = "0 < correct < G", []
    if sampling.metric == "score":
        recipe = "scores have a spread"
        effects.append(
            "groups are filtered by score: with binary rewards the same groups are kept, with graded ones also groups "
            "that are all wrong to different degrees"
        )
    if sampling.filter is not None:
        recipe += f", and {sampling.filter}"
        effects.append("your own filter drops further groups, so it selects the prompts that are trained on")
    return recipe, not effects, "; ".join(effects)


@_component("Batch filling", "Algorithm 1", "algorithm", "sample until N groups are kept", "sampling.dynamic_batch")
def _batch_filling(config: Config) -> Finding | None:
    n = config.sampling.prompts_per_step
    if not config.sampling.dynamic:
        return None
    if not config.sampling.dynamic_batch:
        return f"sample until {counted(n, 'group')} {'is' if n == 1 else 'are'} kept", True, ""
    meaning = "the batch shrinks as prompts become too easy or too hard, and gradient noise changes with it"
    return f"draw {n}, train on those kept", False, meaning


@_component("Token-level loss", "Eq. 12", "algorithm", "token-mean", "algo.aggregation")
def _token_level_loss(config: Config) -> Finding:
    aggregation = config.algo.aggregation
    chosen = AGGREGATIONS[aggregation]
    return aggregation, chosen.token_level, chosen.effect.format(norm_length=config.norm_length)


@_component("Soft Overlong Punishment", "Eq. 13", "algorithm", "soft", "overlong.shape")
def _soft_punishment(config: Config) -> Finding:
    shape = config.overlong.shape
    meanings = {
        "soft": "",
        "linear": f"there is no soft interval: the penalty starts beyond {config.overlong_max_length} tokens and has "
        "no upper bound",
        "off": "a response just below the limit scores the same as a short one, and truncated ones give no hint of "
        "the cause: lengths tend to grow up to the limit",
    }
    return shape, shape == "soft", meanings[shape]


@_component(
    "Overlong Filtering",
    "Sec. 3.4",
    "settings",
    "off (best run)",
    "overlong.mask_truncated",
    "overlong.masked_in_baseline",
)
def _overlong_filtering(config: Config) -> Finding:
    if not config.overlong.mask_truncated:
        return "off", True, ""
    brake = "nothing" if config.overlong.shape == "off" else "only the penalty on finished ones"
    meaning = "as in the paper's ablation (30 to 36 on AIME 2024): truncated responses are excluded from the loss, so "
    meaning += f"{brake} limits lengths"
    if not config.overlong.masked_in_baseline:
        meaning += "; they are excluded from their group's mean and std as well"
    return "on", False, meaning


@_component("KL term", "Sec. 2.3", "algorithm", "none", "algo.kl_coef", "algo.kl_kind")
def _kl_term(config: Config) -> Finding:
    if config.algo.kl_coef == 0:
        return "none", True, ""
    meaning = "the policy is pulled towards the initial model, which hinders long reasoning; the reference costs "
    return f"{config.algo.kl_kind}, weight {config.algo.kl_coef:g}", False, meaning + "memory and a forward pass"


@_component("Clip bounds", "Eq. 10", "settings", "low 0.2, high 0.28", "algo.clip_low", "algo.clip_high")
def _clip_bounds(config: Config) -> Finding | None:
    low, high = config.algo.clip_low, config.algo.clip_high
    if (entry := LOSSES.get(config.algo.loss)) is not None and entry.ratio is not None:
        return None  # bounds of a sequence's ratio, for which the paper has no value
    effects = []
    if high != 0.28:
        room = "more" if high > 0.28 else "less"
        effects.append(f"unlikely tokens have {room} room to gain probability in a step than with 0.28")
    if low > 0.2:
        effects.append("bad tokens can lose more probability in a step than with 0.2, which reduces diversity")
    elif low < 0.2:
        effects.append("bad tokens lose less probability in a step than with 0.2")
    return f"low {low:g}, high {high:g}", not effects, "; ".join(effects)


@_component(
    "Punishment interval",
    "Eq. 13",
    "settings",
    "L_max 20,480, L_cache 4,096, factor 1",
    "overlong.max_length",
    "overlong.cache_length",
    "overlong.factor",
)
def _punishment_interval(config: Config) -> Finding | None:
    if config.overlong.shape != "soft":
        return None
    longest, cache, factor = config.overlong_max_length, config.overlong_cache_length, config.overlong.factor
    effects = []
    if (longest, cache) != (20480, 4096):
        effects.append(
            f"the penalty grows from {longest - cache:,} to {longest:,} tokens instead of from 16,384 to 20,480"
        )
    if factor != 1:
        effects.append(f"a response at the limit loses {factor:g} instead of 1")
    return f"L_max {longest:,}, L_cache {cache:,}, factor {factor:g}", not effects, "; ".join(effects)


@_component(
    "Rule-based reward", "Eq. 7", "settings", "right +1, wrong -1", "reward.correct", "reward.wrong", "reward.verifier"
)
def _reward(config: Config) -> Finding:
    reward = config.reward
    if not isinstance(reward.verifier, str):
        weighted = " + ".join(f"{entry.weight:g} × {entry.verifier}" for entry in reward.verifiers)
        return weighted, False, f"a sum of several rewards; {reward.verifiers[0].verifier} decides what is right"
    if reward.verifier not in VERIFIERS:
        meaning = "the function defines the scores; reward.correct and reward.wrong have no effect"
        return f"scores of {reward.verifier}", False, meaning
    recipe = f"right {reward.correct:+g}, wrong {reward.wrong:+g}"
    if (reward.correct, reward.wrong) == (1, -1):
        return recipe, True, ""
    margin = reward.correct - reward.wrong
    meaning = "advantages are the same for any two values once divided by the std"
    if is_function(config.algo.advantage):
        meaning = "the effect on advantages depends on algo.advantage"
    elif not _divides_by_std(config):
        meaning = f"advantages are not divided by the std, so they are {margin / 2:g} times as large"
    if config.overlong.shape == "soft":
        share = config.overlong.factor / margin
        meaning += f"; the full length penalty is {share:.0%} of the margin between right and wrong instead of 50%"
    return recipe, False, meaning


def _divides_by_std(config: Config) -> bool:
    if config.algo.advantage == "group":
        return NORMALIZATIONS[config.algo.normalize].by_std
    return ADVANTAGES[config.algo.advantage].by_std


@_component("Prompts per step", "Sec. 4.1", "settings", "512", "sampling.prompts_per_step")
def _prompts_per_step(config: Config) -> Finding:
    n = config.sampling.prompts_per_step
    if n == 512:
        return "512", True, ""
    effect = "noisier gradients and cheaper steps" if n < 512 else "smoother gradients and more expensive steps"
    return f"{n:,}", False, f"{_times(n, 512)}: {effect}"


@_component("Group size", "Sec. 4.1", "settings", "16", "sampling.group_size")
def _group_size(config: Config) -> Finding:
    size = config.sampling.group_size
    if size == 16:
        return "16", True, ""
    meaning = f"for a prompt that is solved half of the time, {2 * 0.5**size:.2%} of the groups carry no signal "
    meaning += f"({2 * 0.5**16:.3%} with 16), and the baseline is {'noisier' if size < 16 else 'more precise'}"
    return str(size), False, meaning


@_component(
    "Updates per step", "Sec. 4.1", "settings", "16, of 512 responses", "train.mini_batches", "train.epochs_per_step"
)
def _updates(config: Config) -> Finding:
    numbers = batch_arithmetic(config)
    updates, samples = numbers.updates_per_step, numbers.samples_per_update
    recipe = f"{updates}, of {samples:,} responses"
    if updates == 1:
        meaning = "one update per step is on-policy: the ratio is 1 for groups sampled in the step, and neither clip "
        return recipe, False, meaning + "bound acts on them"
    if updates != 16:
        place, often = ("further from", "more") if updates > 16 else ("closer to", "less")
        meaning = f"the last update of a step is {place} the policy that sampled than in the paper, so clipping is "
        return recipe, False, meaning + f"{often} frequent"
    if samples != 512:
        return recipe, False, f"each update averages over {_times(samples, 512)} responses"
    return recipe, True, ""


@_component(
    "Learning rate", "Sec. 4.1", "settings", "1e-06, constant", "train.lr", "train.lr_schedule", "train.min_lr_share"
)
def _learning_rate(config: Config) -> Finding:
    lr, schedule = config.train.lr, config.train.lr_schedule
    effects = []
    if lr != 1e-6:
        effects.append(f"{_times(lr, 1e-6)}: {'faster and less stable' if lr > 1e-6 else 'slower and steadier'}")
    if schedule != "constant":
        effects.append(f"it decays to {config.train.min_lr_share:g} of its value by step {config.train.steps}")
    return f"{lr:g}, {schedule}", not effects, "; ".join(effects)


@_component("Warm-up", "Sec. 4.1", "settings", "20 rollout steps", "train.warmup_steps")
def _warmup(config: Config) -> Finding:
    steps = config.train.warmup_steps
    if steps == 20:
        return "20 rollout steps", True, ""
    when = f"after {steps} rollout steps instead of 20" if steps else "at once, before AdamW's averages have settled"
    return f"{steps} rollout steps", False, f"the full learning rate is reached {when}"


@_component(
    "Optimizer",
    "verl script",
    "settings",
    "AdamW, decay 0.1, betas 0.9 0.999, clip 1",
    "train.optimizer",
    "train.weight_decay",
    "train.betas",
    "train.max_grad_norm",
)
def _optimizer(config: Config) -> Finding:
    train = config.train
    name = {"adamw": "AdamW", "adamw_8bit": "8-bit AdamW"}[train.optimizer]
    recipe = f"{name}, decay {train.weight_decay:g}, betas {train.betas[0]:g} {train.betas[1]:g}, "
    recipe += f"clip {train.max_grad_norm:g}"
    if train.optimizer != "adamw":
        return recipe, False, "the moments are quantised to 8 bits: less memory, slightly less precise updates"
    if (train.weight_decay, tuple(train.betas), train.max_grad_norm) == (0.1, (0.9, 0.999), 1.0):
        return recipe, True, ""
    meaning = "the paper specifies only AdamW; the values are from the authors' script, and affect the size of updates"
    return recipe, False, meaning


@_component("Precision", "verl script", "settings", "bfloat16, float32 weights", "model.dtype")
def _precision(config: Config) -> Finding:
    if config.model.dtype == "bfloat16":
        return "bfloat16, float32 weights", True, ""
    if config.model.dtype == "auto":
        return "on a GPU bfloat16, float32 weights", True, ""
    return "float32", False, "ratios are more precise than with bfloat16, and a step on a GPU takes longer"


@_component("New tokens", "Sec. 4.1", "settings", "20,480 at most", "sampling.max_new_tokens")
def _new_tokens(config: Config) -> Finding:
    limit = config.sampling.max_new_tokens
    meaning = ""
    if limit < 20480:
        meaning = f"{_times(limit, 20480)}: reasoning beyond {limit:,} tokens is truncated, and usually wrong"
    elif limit > 20480:
        meaning = f"{_times(limit, 20480)}: reasoning can grow longer, and a step costs more"
    return f"{limit:,} at most", limit == 20480, meaning


@_component("Temperature", "Sec. 4.1", "settings", "1", "sampling.temperature")
def _temperature(config: Config) -> Finding:
    value = config.sampling.temperature
    meaning = ""
    if value < 1:
        meaning = "samples are less varied: fewer groups are informative, and entropy starts lower"
    elif value > 1:
        meaning = "samples are more varied and more often wrong"
    return f"{value:g}", value == 1, meaning


@_component("Top-p and top-k", "Sec. 4.1", "settings", "top_p 1, no top_k", "sampling.top_p", "sampling.top_k")
def _truncation(config: Config) -> Finding:
    top_p, top_k = config.sampling.top_p, config.sampling.top_k
    recipe = f"top_p {top_p:g}, {f'top_k {top_k}' if top_k else 'no top_k'}"
    if top_p == 1 and top_k == 0:
        return recipe, True, ""
    meaning = "tokens come from a truncated distribution, but the ratio uses the full one: gradients are biased, and "
    return recipe, False, meaning + "unlikely tokens are never explored"


@_component("Cap on draws", "verl script", "settings", "stop with an error", "sampling.cap", "sampling.on_cap")
def _cap(config: Config) -> Finding | None:
    if not redraws(config):
        return None
    cap = config.sampling_cap
    if config.sampling.on_cap == "error":
        return f"stop with an error, at {cap:,}", True, ""
    if config.sampling.on_cap == "partial":
        return f"train on fewer, at {cap:,}", False, f"after {cap:,} draws, a step trains on fewer than N groups"
    return f"fill up, at {cap:,}", False, f"after {cap:,} draws, a step fills up with groups that violate Eq. 11"


@_component(
    "Surplus groups",
    "verl script",
    "settings",
    "drop",
    "sampling.surplus",
    "sampling.max_staleness",
    "sampling.ahead",
)
def _surplus(config: Config) -> Finding | None:
    if not redraws(config) and not config.sampling.ahead:
        return None
    if config.sampling.surplus == "drop":
        return "drop", True, ""
    if config.sampling.surplus == "requeue":
        meaning = "prompts of surplus groups are sampled again next, so they come up slightly more often than others"
        return "requeue", False, meaning
    if config.sampling.max_staleness == 0:
        return "none: no more groups are started than a step can train on", True, ""
    age = counted(config.sampling.max_staleness, "version")
    meaning = f"surplus groups are trained on later instead of dropped, with weights up to {age} newer; their ratio "
    meaning += "is still relative to the policy that sampled them"
    if ahead := config.sampling.ahead:
        meaning += f"; {ahead:g} of a batch is drawn ahead, so more groups are old"
    return f"carry, up to {age} old", False, meaning


@_component("Model", "Sec. 4.1", "settings", "Qwen2.5-32B", "model.name")
def _model(config: Config) -> Finding:
    name = config.model.name
    if re.search(r"qwen2\.5-32b$", name.rstrip("/"), re.IGNORECASE):
        return name, True, ""
    return name, False, "the paper's scores are for the Qwen2.5-32B base model; expect different ones"


@_component("Training prompts", "Sec. 3.5", "settings", "DAPO-Math-17K", "data.train")
def _training_prompts(config: Config) -> Finding:
    name = _source(config.data.train)
    if re.search(r"dapo-math-17k", name, re.IGNORECASE):
        return name, True, ""
    return name, False, "other problems: what is learned, and how many groups are informative, depends on them"


@_component("Held-out prompts", "Sec. 4.1", "evaluation", "AIME 2024", "data.eval", "eval.prompts")
def _held_out_prompts(config: Config) -> Finding:
    if config.data.eval is None:
        return "none", False, "accuracy before and after training is not measured"
    name, limit = _source(config.data.eval), config.eval.prompts
    if not re.search(r"aime[^a-z0-9]*(20)?24", name, re.IGNORECASE):
        return name, False, "accuracies are not comparable with the paper's tables"
    if limit is None or limit >= 30:
        return name, True, ""
    return f"{name}, {counted(limit, 'prompt')}", False, f"{limit} of 30 problems: each is {1 / limit:.0%} of the score"


@_component("Held-out samples", "Sec. 4.1", "evaluation", "avg@32", "eval.samples")
def _held_out_samples(config: Config) -> Finding | None:
    n = config.eval.samples
    if config.data.eval is None:
        return None
    if n == 32:
        return "avg@32", True, ""
    return f"avg@{n}", False, f"the sampling noise of a prompt's accuracy is {(32 / n) ** 0.5:.2g} times that of avg@32"


@_component("Held-out sampling", "Sec. 4.1", "evaluation", "temperature 1, top_p 0.7", "eval.temperature", "eval.top_p")
def _held_out_sampling(config: Config) -> Finding | None:
    temperature, top_p = config.eval.temperature, config.eval.top_p
    if config.data.eval is None:
        return None
    recipe = f"temperature {temperature:g}, top_p {top_p:g}"
    if (temperature, top_p) == (1.0, 0.7):
        return recipe, True, ""
    if temperature == 0:
        return recipe, False, "greedy decoding: no sampling noise, but not the mean over samples of the paper's tables"
    meaning = "top_p and temperature affect accuracy: compare only accuracies with the same settings"
    return recipe, False, meaning


def _times(value: float, paper: float) -> str:
    if value >= paper:
        return f"{value / paper:.3g} times the paper's"
    share = paper / value
    return f"1/{share:.0f} of the paper's" if share >= 2 else f"{value / paper:.0%} of the paper's"


def _source(source: str | SourceSettings) -> str:
    return source if isinstance(source, str) else source.source
