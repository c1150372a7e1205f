"""Settings that contradict each other: what is wrong, and what to do, in one line."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from dapo_rl.base.format import counted
from dapo_rl.base.placeholders import fault_of_names
from dapo_rl.base.quote import shown
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.base.urls import fault_of_credentials
from dapo_rl.choices import FIXED_OPTIONS, KL_KINDS, NORMALIZATIONS, VERIFIERS, is_function, is_judge
from dapo_rl.config.sections import ClusterSettings, TeacherSettings
from dapo_rl.config.settings import RunSettings
from dapo_rl.engine_specs import ENGINES, engine_spec
from dapo_rl.objectives import ADVANTAGES, DISTILL, GAE, GDPO, LOSSES

FIXED_TEMPLATE_ARGUMENTS = (
    *("conversation", "messages", "tokenize", "add_generation_prompt", "continue_final_message", "chat_template"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    *("tokenizer_kwargs", "tools", "documents"),
)
"""Arguments of `apply_chat_template` that are not settings of a template, or that several turns need."""
TEACHER_FIELDS = ("prompt", "answer")
"""What `teacher.prompt` may name in braces."""
MOST_KEPT = 1024
"""Limit of `sampling.top_k` with `sampling.keep_mask`: each sampled token takes 4 bytes for each."""


def conflicts(config: RunSettings) -> Iterator[str]:
    """All of them; the first is reported."""
    for of_subject in (
        _names,
        _engine,
        _cluster,
        _critic,
        _teacher,
        _algo,
        _off_policy,
        _data_and_reward,
        _sampling,
        _keep_mask,
        _length_stages,
        _overlong,
        _training,
    ):
        yield from of_subject(config)


def _names(config: RunSettings) -> Iterator[str]:
    algo = config.algo
    methods = {choice.after.lower(): normalize for normalize, choice in NORMALIZATIONS.items() if choice.after}
    normalize = methods.get(algo.advantage.lower())
    yield from _unknown("algo.loss", algo.loss, LOSSES)
    yield from _unknown("algo.advantage", algo.advantage, ADVANTAGES, normalize and f"set algo.normalize={normalize}")
    if (config.env.name or "").startswith("openenv:"):
        fault = fault_of_credentials(config.env.name or "", "leave it out: OpenEnv servers take none")
        yield from [f"env.name: {fault}"] if fault else []
    for entry in config.reward.verifiers:
        if not is_judge(entry.verifier):
            yield from _unknown("reward.verifier", entry.verifier, VERIFIERS)
    yield from _unknown("engine", config.engine, ENGINES, kind="one of your own is named module:Class or file.py:Class")


def _unknown(
    key: str,
    name: str,
    known: Collection[str],
    remedy: str | None = None,
    kind: str = "a function is named module:name or file.py:name",
) -> Iterator[str]:
    """A name that is none of those known, nor of a custom function."""
    if name not in known and not is_function(name):
        hint = f"; {remedy}" if remedy else did_you_mean(nearest(name, known), kind)
        yield f"{key}: {shown(name)} is not one of {', '.join(known)}{hint}"


def _engine(config: RunSettings) -> Iterator[str]:
    options = config.engine_options
    if options and not engine_spec(config.engine).takes_options:
        yield (
            f"engine_options: {', '.join(options)}: engine={config.engine} has no options of its own; its settings are "
            "sampling.max_batch and sampling.kv_memory_gib"
        )
    if fixed := [name for name in options if name in FIXED_OPTIONS]:
        yield f"engine_options: {fixed[0]} is decided by the run; {FIXED_OPTIONS[fixed[0]]}"


def _cluster(config: RunSettings) -> Iterator[str]:
    cluster, lora = config.cluster, config.model.lora
    gpus, placement = cluster.engine_gpus, cluster.placement
    if gpus > 1 and not engine_spec(config.engine).tensor_parallel:
        others = " or ".join(f"engine={name}" for name, spec in ENGINES.items() if spec.tensor_parallel)
        yield (
            f"cluster.engine_gpus: {gpus} with engine={config.engine}, which uses one GPU; set {others}, or more "
            "cluster.engines"
        )
    if gpus > 1 and placement != "separate":
        yield (
            f"cluster.engine_gpus: {gpus} with cluster.placement={placement}, where an engine shares one GPU; set "
            "cluster.placement=separate"
        )
    if cluster.weights == "direct" and placement == "separate":
        yield (
            "cluster.weights: direct with cluster.placement=separate, where no engine is on the GPU of a rank; set it "
            "to broadcast, or leave it at store"
        )
    if cluster.weights == "broadcast" and placement != "separate":
        yield (
            f"cluster.weights: broadcast with cluster.placement={placement}, where engines are on the GPUs of ranks; "
            "set it to direct, or leave it at store"
        )
    if cluster.backend is not None and placement == "colocated" and config.train.memory == "keep":
        yield (
            "train.memory: keep with cluster.placement=colocated, where engines and ranks take turns with a GPU's "
            "memory; set cluster.placement=shared, or leave train.memory out"
        )
    if cluster.backend is not None and lora is not None:
        for name in ("dropout", "use_dora"):
            if given := getattr(lora, name):
                yield (
                    f"model.lora.{name}: {given} is not supported on ranks; leave it out, or train in one process (no "
                    "cluster.backend)"
                )
    if cluster.backend is None:
        for name, field in ClusterSettings.model_fields.items():
            if (value := getattr(cluster, name)) != field.default:
                wrong = f"{value} {name} need Ray" if name in ("engines", "ranks") else "has no effect without Ray"
                yield f"cluster.{name}: {wrong}; set cluster.backend=ray"


def _critic(config: RunSettings) -> Iterator[str]:
    steps, pretrain = config.train.steps, config.pretrain_steps
    if config.has_critic and pretrain >= steps:
        yield (
            f"critic.pretrain_steps: {pretrain} of train.steps {steps} leave no step for the policy; use {steps // 8} "
            "or less, or raise train.steps"
        )
    if config.has_critic and config.critic.pretrain_until is not None and not pretrain:
        yield (
            f"critic.pretrain_until: {config.critic.pretrain_until:g} with critic.pretrain_steps=0: there is no value "
            "pre-training to end; set critic.pretrain_steps to the most steps it may take"
        )
    if config.kl_in_reward and not config.has_critic:
        yield (
            f"algo.kl_in: reward with algo.advantage={config.algo.advantage}: a token's reward needs a critic; set "
            f"algo.kl_in=loss, or algo.advantage={GAE}"
        )


def _teacher(config: RunSettings) -> Iterator[str]:
    algo, teacher = config.algo, config.teacher
    if algo.advantage == DISTILL and not teacher.given:
        yield f"algo.advantage: {DISTILL} needs a teacher; set teacher.name to a model with the same tokenizer"
    if algo.advantage == DISTILL and config.sampling.dynamic:
        yield (
            f"sampling.dynamic: with algo.advantage={DISTILL} every group is informative; set sampling.dynamic=false"
        )
    if teacher.served and (fault := fault_of_credentials(teacher.name or "")):
        yield f"teacher.name: {fault}"
    if not teacher.given and teacher.weight != TeacherSettings.model_fields["weight"].default:
        yield f"teacher.weight: {teacher.weight:g} without a teacher; set teacher.name, or leave it out"
    key = "teacher.name" if teacher.name is not None else "teacher.prompt"
    if teacher.given and config.has_critic:
        yield f"{key}: a critic's advantages take the place of the teacher's; use one of the two"
    if teacher.loaded and algo.kl_coef > 0:
        yield "teacher.name: with algo.kl_coef the reference policy is the initial model; use one of the two"
    if teacher.served and config.sampling.temperature != 1:
        yield (
            f"teacher.name: a server gives log-probabilities at temperature 1, and sampling.temperature is "
            f"{config.sampling.temperature:g}; set it to 1"
        )
    if not teacher.served:
        for name in ("model", "api_key_env", "timeout_s", "retries"):
            if getattr(teacher, name) != TeacherSettings.model_fields[name].default:
                yield f"teacher.{name}: is for a teacher behind a server; set teacher.name to its base URL"
    if teacher.prompt is not None and "{prompt}" not in teacher.prompt:
        yield "teacher.prompt: it has no {prompt}: the teacher would not see the question"
    if teacher.prompt is not None and (fault := fault_of_names(teacher.prompt, TEACHER_FIELDS)):
        yield f"teacher.prompt: {fault}"
    if teacher.prompt is not None and config.env.given:
        yield "teacher.prompt: environments render their own prompts; leave it out"


def _algo(config: RunSettings) -> Iterator[str]:
    sampling, algo = config.sampling, config.algo
    loss, advantage = LOSSES.get(algo.loss), ADVANTAGES.get(algo.advantage)
    for key, bound in (("algo.clip_low", algo.clip_low), ("algo.clip_high", algo.clip_high)):
        if (loss is None or loss.wide_bounds) and not 0 <= bound < math.inf:
            yield f"{key}: {bound:g} is not 0 or more; algo.loss={algo.loss} clips at 1 − clip_low, 1 + clip_high"
        if loss is not None and not loss.wide_bounds and not 0 <= bound < 1:
            yield f"{key}: {bound:g} is outside [0, 1); the paper's bounds are clip_low 0.2 and clip_high 0.28"
    if algo.clip_ratio_c is not None and algo.clip_ratio_c <= 1:
        yield f"algo.clip_ratio_c: {algo.clip_ratio_c:g} is not above 1; verl uses 3.0; null turns it off"
    if algo.clip_ratio_c is not None and loss is not None and not loss.dual_clip:
        yield (
            f"algo.clip_ratio_c: {algo.clip_ratio_c:g} with algo.loss={algo.loss}, which has no dual clip; set it to "
            "null"
        )
    yield from _kl(config)
    if config.decouples_rewards and config.env.turn_discount is not None:
        yield (
            f"env.turn_discount: with algo.advantage={GDPO} rewards are those of whole episodes; leave it out, or set "
            "algo.advantage=group"
        )
    if algo.clip_cov_low >= algo.clip_cov_high:
        yield (
            f"algo.clip_cov_low: {algo.clip_cov_low:g} is not below algo.clip_cov_high {algo.clip_cov_high:g}; verl's "
            "are 1 and 5"
        )
    if algo.entropy_target is not None and algo.entropy_coef > algo.entropy_coef_max:
        yield (
            f"algo.entropy_coef: {algo.entropy_coef:g} is above algo.entropy_coef_max {algo.entropy_coef_max:g}, which "
            "limits it; raise algo.entropy_coef_max"
        )
    if sampling.group_size == 1 and (sampling.dynamic or (advantage is not None and not advantage.alone)):
        what = f"algo.normalize={algo.normalize}" if algo.advantage == "group" else f"algo.advantage={algo.advantage}"
        what = "dynamic sampling" if sampling.dynamic else what
        yield f"sampling.group_size: 1 with {what}: one sample has nothing to be compared with; use 2 or more"


def _kl(config: RunSettings) -> Iterator[str]:
    algo = config.algo
    if algo.kl_coef > 0 and algo.kl_in == "loss" and not KL_KINDS[algo.kl_kind].learns and not algo.kl_unbiased:
        yield (
            f"algo.kl_kind: {algo.kl_kind} with algo.kl_in=loss: its gradient is 0 in expectation, so it penalises "
            "nothing; set algo.kl_kind=k1+, with the same value and a gradient"
        )
    if algo.kl_unbiased and algo.kl_coef > 0 and not KL_KINDS[algo.kl_kind].unbiased:
        yield (
            f"algo.kl_unbiased: with algo.kl_kind={algo.kl_kind} its gradient would not be that of the KL divergence; "
            "set algo.kl_kind=k3, or leave it out"
        )
    if algo.kl_unbiased and config.kl_in_reward:
        yield "algo.kl_unbiased: with algo.kl_in=reward the penalty has no gradient; leave it out"
    if algo.ref_sync_steps is not None and algo.kl_coef == 0:
        yield (
            f"algo.ref_sync_steps: {algo.ref_sync_steps} with algo.kl_coef=0: there is no reference policy; set "
            "algo.kl_coef=0.001, or leave it out"
        )
    if algo.ref_sync_steps is not None and config.teacher.of_policy:
        yield (
            "algo.ref_sync_steps: the teacher is the policy at the start, which stays as it is; leave it out, or set "
            "teacher.name"
        )
    if algo.ref_sync_steps is not None and config.model.lora is not None:
        yield (
            "algo.ref_sync_steps: with model.lora the reference is the model without its adapters, which does not "
            "change; leave one of the two out"
        )
    if algo.kl_target is not None and algo.kl_coef == 0:
        yield (
            f"algo.kl_target: {algo.kl_target:g} with algo.kl_coef=0: there is no KL penalty to adapt; set "
            "algo.kl_coef=0.001, its weight at the start"
        )


def _off_policy(config: RunSettings) -> Iterator[str]:
    algo = config.algo
    cap, floor = algo.importance_cap, algo.importance_floor
    if cap is not None and algo.old_policy == "behaviour":
        which = "behaviour" if algo.proximal == "behaviour" else f"auto, which is behaviour for algo.loss={algo.loss}"
        yield (
            f"algo.importance_cap: {cap:g} with algo.proximal={which}: the ratio proximal / behaviour "
            "is always 1; set algo.proximal=recomputed"
        )
    if cap is None:
        given = {"importance_floor": floor is not None, "importance_normalize": algo.importance_normalize}
        for name in [name for name, is_given in given.items() if is_given]:
            yield f"algo.{name}: without algo.importance_cap there are no weights; set algo.importance_cap=2"
    elif floor is not None and floor > cap:
        yield f"algo.importance_floor: {floor:g} is above algo.importance_cap {cap:g}; IcePop's bounds are 0.5 and 5"


def _data_and_reward(config: RunSettings) -> Iterator[str]:
    arguments = config.data.chat_template_kwargs
    if fixed := [name for name in arguments if name in FIXED_TEMPLATE_ARGUMENTS]:
        yield f"data.chat_template_kwargs: {fixed[0]} is decided by the run; leave it out"
    if arguments and config.data.chat_template == "never":
        yield (
            f"data.chat_template_kwargs: {', '.join(map(str, arguments))} with data.chat_template=never, which applies "
            "no template; set data.chat_template=always, or leave them out"
        )
    if (window := config.data.pass_rate) is not None and not 0 <= window[0] <= window[1] <= 1:
        yield f"data.pass_rate: {list(window)} is not within [0, 1], in order; for example [0.1, 0.9]"
    correct, wrong = config.reward.correct, config.reward.wrong
    if correct <= wrong:
        yield f"reward.correct: {correct:g} is not above reward.wrong {wrong:g}; the paper uses 1 and -1"


def _sampling(config: RunSettings) -> Iterator[str]:
    sampling, groups = config.sampling, config.sampling.prompts_per_step
    if config.sampling_cap < groups:
        cap = counted(config.sampling_cap, "group")
        yield f"sampling.cap: {cap} cannot fill sampling.prompts_per_step {groups}; use {groups} or more"
    if "" in sampling.stop:
        yield "sampling.stop: an empty string is in every response; leave it out"
    if sampling.ahead and sampling.surplus != "carry":
        yield (
            f"sampling.ahead: {sampling.ahead:g} with sampling.surplus={sampling.surplus}: what is drawn ahead is not "
            "kept; set sampling.surplus=carry"
        )
    if sampling.ahead and sampling.max_staleness == 0:
        yield (
            f"sampling.ahead: {sampling.ahead:g} with sampling.max_staleness=0: what is drawn ahead is one version "
            "old; set sampling.max_staleness=1"
        )
    if sampling.ahead and sampling.dynamic_batch:
        yield (
            f"sampling.ahead: {sampling.ahead:g} with sampling.dynamic_batch: it draws one batch and nothing ahead; "
            "set sampling.ahead=0"
        )
    if sampling.dynamic_batch and not sampling.dynamic:
        yield "sampling.dynamic_batch: needs the filter of sampling.dynamic; set sampling.dynamic=true"


def _keep_mask(config: RunSettings) -> Iterator[str]:
    sampling = config.sampling
    if not sampling.keep_mask:
        return
    if not sampling.top_k:
        yield (
            "sampling.keep_mask: needs a limit to the tokens that are kept; add sampling.top_k, for example "
            "sampling.top_k=256"
        )
    if sampling.top_k > MOST_KEPT:
        yield (
            f"sampling.keep_mask: records at most {MOST_KEPT} tokens per position, and sampling.top_k is "
            f"{sampling.top_k}; use {MOST_KEPT} or less"
        )
    if not engine_spec(config.engine).keeps_mask:
        yield (
            f"sampling.keep_mask: engine={config.engine} does not return the tokens that truncation kept; set "
            "engine=native"
        )
    if config.teacher.served:
        yield (
            "teacher.name: a server gives log-probabilities of the full distribution, and with sampling.keep_mask the "
            "policy's are of the kept tokens; name a model instead, or leave sampling.keep_mask out"
        )


def _length_stages(config: RunSettings) -> Iterator[str]:
    sampling, overlong = config.sampling, config.overlong
    if not (stages := sampling.length_stages):
        return
    key, lowest = "sampling.length_stages", min(stages.values())
    if 0 not in stages:
        yield f"{key}: no stage starts at step 0; for example {{0: {lowest}, {min(stages)}: {stages[min(stages)]}}}"
    if max(stages.values()) != sampling.max_new_tokens:
        yield (
            f"{key}: the longest stage, {max(stages.values())}, is not sampling.max_new_tokens "
            f"{sampling.max_new_tokens}, for which memory is planned; set both to the same"
        )
    if config.env.given:
        yield f"{key}: episodes with an environment have one limit; leave it out, or set env.max_turn_tokens"
    limit, cache = config.overlong_limits(lowest)
    if overlong.shape != "off" and (limit > lowest or (overlong.shape == "linear" and limit == lowest)):
        yield f"overlong.max_length: {limit} is not reached in the stage of {lowest} tokens; leave it out, or lower it"
    if overlong.shape == "soft" and (cache >= limit):
        yield (
            f"overlong.cache_length: {cache} is not below the limit of the stage of {lowest} tokens; leave it out, "
            "which is a fifth of each stage"
        )


def _overlong(config: RunSettings) -> Iterator[str]:
    overlong, longest = config.overlong, config.sampling.max_new_tokens
    limit, cache = config.overlong_max_length, config.overlong_cache_length
    if overlong.shape != "off" and limit > longest:
        yield (
            f"overlong.max_length: {overlong.max_length} is above sampling.max_new_tokens {longest}, which no response "
            f"exceeds; use {longest} or less"
        )
    if overlong.shape == "soft" and cache >= limit:
        yield (
            f"overlong.cache_length: {overlong.cache_length} is not below overlong.max_length {limit}; the paper's "
            f"proportion is {max(limit // 5, 0)}"
        )
    if overlong.shape == "soft" and cache == 0 and limit == longest:
        yield (
            f"overlong.cache_length: 0 is a hard step beyond {limit}, which no response exceeds; the paper's "
            f"proportion is {limit // 5}"
        )
    if overlong.shape == "linear" and limit >= longest:
        yield (
            f"overlong.max_length: linear shaping starts beyond {limit}, where the engine already stops; use less than "
            f"sampling.max_new_tokens {longest}, or overlong.shape=soft"
        )


def _training(config: RunSettings) -> Iterator[str]:
    train, groups = config.train, config.sampling.prompts_per_step
    if groups % train.mini_batches:
        yield (
            f"train.mini_batches: {train.mini_batches} does not divide sampling.prompts_per_step {groups}; the nearest "
            f"that does is {nearest_divisor(groups, train.mini_batches)}"
        )
    if config.token_budget < config.longest_sample:
        yield (
            f"train.token_budget: {train.token_budget} does not hold one sample of data.max_prompt_tokens + "
            f"sampling.max_new_tokens = {config.longest_sample}; use {config.longest_sample} or more"
        )
    if any(not 0 <= beta < 1 for beta in train.betas):
        yield f"train.betas: {list(train.betas)} is outside [0, 1); AdamW's usual values are [0.9, 0.999]"


def nearest_divisor(number: int, wanted: float) -> int:
    """The divisor of a number, up to 10,000, that is nearest to another number."""
    divisors = [n for n in range(1, min(number, 10_000) + 1) if number % n == 0]
    return min(divisors, key=lambda n: abs(n - wanted))
