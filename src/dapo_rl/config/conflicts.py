"""Settings that contradict each other: what is wrong, and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from dapo_rl.base.format import counted
from dapo_rl.base.quote import shown
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.choices import FIXED_OPTIONS, KL_KINDS, NORMALIZATIONS, VERIFIERS, is_function
from dapo_rl.config.sections import ClusterSettings
from dapo_rl.engine_specs import ENGINES, engine_spec
from dapo_rl.objectives import ADVANTAGES, GAE, LOSSES

if TYPE_CHECKING:
    from dapo_rl.config.root import Config


FIXED_TEMPLATE_ARGUMENTS = (
    *("conversation", "messages", "tokenize", "add_generation_prompt", "continue_final_message", "chat_template"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    *("tokenizer_kwargs", "tools", "documents"),
)
"""Arguments of `apply_chat_template` that are not settings of a template, or that several turns need."""


class Conflict(NamedTuple):
    key: str
    wrong: str
    remedy: str


def conflicts(config: Config) -> Iterator[Conflict]:
    """All of them; the first is reported."""
    for of_subject in (_names, _engine, _cluster, _critic, _algo, _data, _reward, _sampling, _overlong, _training):
        yield from of_subject(config)


def _names(config: Config) -> Iterator[Conflict]:
    algo = config.algo
    for key, name, known in (("algo.loss", algo.loss, LOSSES), ("algo.advantage", algo.advantage, ADVANTAGES)):
        if name not in known and not is_function(name):
            methods = {choice.after.lower(): normalize for normalize, choice in NORMALIZATIONS.items() if choice.after}
            same = methods.get(name.lower()) if known is ADVANTAGES else None
            remedy = f"set algo.normalize={same}" if same else ""
            hint = remedy or did_you_mean(nearest(name, known), "a function is named module:name or file.py:name")
            yield Conflict(key, f"{shown(name)} is not one of {', '.join(known)}", hint.removeprefix("; "))
    for entry in config.reward.verifiers:
        if entry.verifier not in VERIFIERS and not is_function(entry.verifier):
            hint = did_you_mean(nearest(entry.verifier, VERIFIERS), "a function is named module:name or file.py:name")
            what = f"{shown(entry.verifier)} is not one of {', '.join(VERIFIERS)}"
            yield Conflict("reward.verifier", what, hint.removeprefix("; "))
    if config.engine not in ENGINES and not is_function(config.engine):
        hint = did_you_mean(nearest(config.engine, ENGINES), "one of your own is named module:Class or file.py:Class")
        yield Conflict("engine", f"{shown(config.engine)} is not one of {', '.join(ENGINES)}", hint.removeprefix("; "))


def _engine(config: Config) -> Iterator[Conflict]:
    if config.engine_options and not engine_spec(config.engine).takes_options:
        wrong = f"{', '.join(config.engine_options)}: engine={config.engine} has no options of its own"
        yield Conflict("engine_options", wrong, "its settings are sampling.max_batch and sampling.kv_memory_gib")
    if fixed := [name for name in config.engine_options if name in FIXED_OPTIONS]:
        yield Conflict("engine_options", f"{fixed[0]} is decided by the run", FIXED_OPTIONS[fixed[0]])


def _cluster(config: Config) -> Iterator[Conflict]:
    cluster = config.cluster
    if cluster.engine_gpus > 1 and not engine_spec(config.engine).tensor_parallel:
        wrong = f"{cluster.engine_gpus} with engine={config.engine}, which uses one GPU"
        others = " or ".join(f"engine={name}" for name, spec in ENGINES.items() if spec.tensor_parallel)
        yield Conflict("cluster.engine_gpus", wrong, f"set {others}, or more cluster.engines")
    if cluster.engine_gpus > 1 and cluster.placement != "separate":
        wrong = f"{cluster.engine_gpus} with cluster.placement={cluster.placement}, where an engine shares one GPU"
        yield Conflict("cluster.engine_gpus", wrong, "set cluster.placement=separate")
    if cluster.weights == "direct" and cluster.placement == "separate":
        wrong = "direct with cluster.placement=separate, where no engine is on the GPU of a rank"
        yield Conflict("cluster.weights", wrong, "set it to broadcast, or leave it at store")
    if cluster.weights == "broadcast" and cluster.placement != "separate":
        wrong = f"broadcast with cluster.placement={cluster.placement}, where engines are on the GPUs of ranks"
        yield Conflict("cluster.weights", wrong, "set it to direct, or leave it at store")
    lora = config.model.lora
    if cluster.backend is not None and lora is not None:
        for name, given in (("dropout", lora.dropout), ("use_dora", lora.use_dora)):
            if given:
                wrong = f"{given} is not supported on ranks"
                yield Conflict(
                    f"model.lora.{name}", wrong, "leave it out, or train in one process (no cluster.backend)"
                )
    if cluster.backend is None:
        for name, field in ClusterSettings.model_fields.items():
            if (value := getattr(cluster, name)) != field.default:
                wrong = f"{value} {name} need Ray" if name in ("engines", "ranks") else "has no effect without Ray"
                yield Conflict(f"cluster.{name}", wrong, "set cluster.backend=ray")


def _critic(config: Config) -> Iterator[Conflict]:
    if config.has_critic and config.pretrain_steps >= config.train.steps:
        wrong = f"{config.pretrain_steps} of train.steps {config.train.steps} leave no step for the policy"
        yield Conflict("critic.pretrain_steps", wrong, f"use {config.train.steps // 8} or less, or raise train.steps")
    if config.kl_in_reward and not config.has_critic:
        wrong = f"reward with algo.advantage={config.algo.advantage}: a token's reward needs a critic"
        yield Conflict("algo.kl_in", wrong, f"set algo.kl_in=loss, or algo.advantage={GAE}")


def _algo(config: Config) -> Iterator[Conflict]:
    sampling, algo = config.sampling, config.algo
    loss, advantage = LOSSES.get(algo.loss), ADVANTAGES.get(algo.advantage)
    for key, bound in (("algo.clip_low", algo.clip_low), ("algo.clip_high", algo.clip_high)):
        if loss is None or loss.wide_bounds:
            if not 0 <= bound < math.inf:
                yield Conflict(
                    key,
                    f"{bound:g} is not 0 or more",
                    f"algo.loss={algo.loss} clips at 1 − clip_low, 1 + clip_high",
                )
        elif not 0 <= bound < 1:
            yield Conflict(
                key, f"{bound:g} is outside [0, 1)", "the paper's bounds are clip_low 0.2 and clip_high 0.28"
            )
    if algo.clip_ratio_c is not None and algo.clip_ratio_c <= 1:
        yield Conflict("algo.clip_ratio_c", f"{algo.clip_ratio_c:g} is not above 1", "verl uses 3.0; null turns it off")
    if algo.clip_ratio_c is not None and loss is not None and not loss.dual_clip:
        wrong = f"{algo.clip_ratio_c:g} with algo.loss={algo.loss}, which has no dual clip"
        yield Conflict("algo.clip_ratio_c", wrong, "set it to null")
    if algo.importance_cap is not None and algo.old_policy == "behaviour":
        which = "behaviour" if algo.proximal == "behaviour" else f"auto, which is behaviour for algo.loss={algo.loss}"
        wrong = f"{algo.importance_cap:g} with algo.proximal={which}: the ratio proximal / behaviour is always 1"
        yield Conflict("algo.importance_cap", wrong, "set algo.proximal=recomputed")
    if algo.kl_coef > 0 and algo.kl_in == "loss" and not KL_KINDS[algo.kl_kind].learns:
        wrong = f"{algo.kl_kind} with algo.kl_in=loss: its gradient is 0 in expectation, so it penalises nothing"
        yield Conflict("algo.kl_kind", wrong, "set algo.kl_kind=k1+, with the same value and a gradient")
    if sampling.group_size == 1 and (sampling.dynamic or (advantage is not None and not advantage.alone)):
        what = "dynamic sampling" if sampling.dynamic else f"algo.normalize={algo.normalize}"
        if not sampling.dynamic and algo.advantage != "group":
            what = f"algo.advantage={algo.advantage}"
        yield Conflict(
            "sampling.group_size", f"1 with {what}: one sample has nothing to be compared with", "use 2 or more"
        )


def _data(config: Config) -> Iterator[Conflict]:
    key, arguments = "data.chat_template_kwargs", config.data.chat_template_kwargs
    if fixed := [name for name in arguments if name in FIXED_TEMPLATE_ARGUMENTS]:
        yield Conflict(key, f"{fixed[0]} is decided by the run", "leave it out")
    if arguments and config.data.chat_template == "never":
        wrong = f"{', '.join(map(str, arguments))} with data.chat_template=never, which applies no template"
        yield Conflict(key, wrong, "set data.chat_template=always, or leave them out")


def _reward(config: Config) -> Iterator[Conflict]:
    if config.reward.correct <= config.reward.wrong:
        yield Conflict(
            "reward.correct",
            f"{config.reward.correct:g} is not above reward.wrong {config.reward.wrong:g}",
            "the paper uses 1 and -1",
        )


def _sampling(config: Config) -> Iterator[Conflict]:
    sampling = config.sampling
    if config.sampling_cap < sampling.prompts_per_step:
        yield Conflict(
            "sampling.cap",
            f"{counted(config.sampling_cap, 'group')} cannot fill sampling.prompts_per_step "
            f"{sampling.prompts_per_step}",
            f"use {sampling.prompts_per_step} or more",
        )
    if "" in sampling.stop:
        yield Conflict("sampling.stop", "an empty string is in every response", "leave it out")
    if sampling.ahead and sampling.surplus != "carry":
        wrong = f"{sampling.ahead:g} with sampling.surplus={sampling.surplus}: what is drawn ahead is not kept"
        yield Conflict("sampling.ahead", wrong, "set sampling.surplus=carry")
    if sampling.ahead and sampling.max_staleness == 0:
        wrong = f"{sampling.ahead:g} with sampling.max_staleness=0: what is drawn ahead is one version old"
        yield Conflict("sampling.ahead", wrong, "set sampling.max_staleness=1")
    if sampling.ahead and sampling.dynamic_batch:
        wrong = f"{sampling.ahead:g} with sampling.dynamic_batch: it draws one batch and nothing ahead"
        yield Conflict("sampling.ahead", wrong, "set sampling.ahead=0")
    if sampling.dynamic_batch and not sampling.dynamic:
        yield Conflict("sampling.dynamic_batch", "needs the filter of sampling.dynamic", "set sampling.dynamic=true")


def _overlong(config: Config) -> Iterator[Conflict]:
    sampling, overlong = config.sampling, config.overlong
    if overlong.shape != "off" and config.overlong_max_length > sampling.max_new_tokens:
        yield Conflict(
            "overlong.max_length",
            f"{overlong.max_length} is above sampling.max_new_tokens {sampling.max_new_tokens}, "
            "which no response exceeds",
            f"use {sampling.max_new_tokens} or less",
        )
    if overlong.shape == "soft" and config.overlong_cache_length >= config.overlong_max_length:
        yield Conflict(
            "overlong.cache_length",
            f"{overlong.cache_length} is not below overlong.max_length {config.overlong_max_length}",
            f"the paper's proportion is {max(config.overlong_max_length // 5, 0)}",
        )
    if (
        overlong.shape == "soft"
        and config.overlong_cache_length == 0
        and config.overlong_max_length == sampling.max_new_tokens
    ):
        yield Conflict(
            "overlong.cache_length",
            f"0 is a hard step beyond {config.overlong_max_length}, which no response exceeds",
            f"the paper's proportion is {config.overlong_max_length // 5}",
        )
    if overlong.shape == "linear" and config.overlong_max_length >= sampling.max_new_tokens:
        yield Conflict(
            "overlong.max_length",
            f"linear shaping starts beyond {config.overlong_max_length}, where the engine already stops",
            f"use less than sampling.max_new_tokens {sampling.max_new_tokens}, or overlong.shape=soft",
        )


def _training(config: Config) -> Iterator[Conflict]:
    sampling = config.sampling
    if sampling.prompts_per_step % config.train.mini_batches:
        candidates = range(1, min(sampling.prompts_per_step, 10_000) + 1)
        divisors = [n for n in candidates if sampling.prompts_per_step % n == 0]
        divisor = min(divisors, key=lambda n: abs(n - config.train.mini_batches))
        yield Conflict(
            "train.mini_batches",
            f"{config.train.mini_batches} does not divide sampling.prompts_per_step {sampling.prompts_per_step}",
            f"the nearest that does is {divisor}",
        )
    if config.token_budget < config.longest_sample:
        yield Conflict(
            "train.token_budget",
            f"{config.train.token_budget} does not hold one sample of data.max_prompt_tokens + "
            f"sampling.max_new_tokens = {config.longest_sample}",
            f"use {config.longest_sample} or more",
        )
    if any(not 0 <= beta < 1 for beta in config.train.betas):
        yield Conflict(
            "train.betas", f"{list(config.train.betas)} is outside [0, 1)", "AdamW's usual values are [0.9, 0.999]"
        )
