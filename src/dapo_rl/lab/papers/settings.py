"""Rows on sampling, rewards, training and evaluation."""

from __future__ import annotations

import re
from functools import partial

from dapo_rl.base.format import counted
from dapo_rl.choices import NORMALIZATIONS, VERIFIERS, is_function
from dapo_rl.config import Config, Sources, entries_of, source_name
from dapo_rl.lab.batch_arithmetic import batch_arithmetic, redraws
from dapo_rl.lab.papers.compare import Find, Finding, differs, row, same, times_the_paper
from dapo_rl.objectives import ADVANTAGES

technique, value, evaluation = (partial(row, kind) for kind in ("algorithm", "settings", "evaluation"))
_SCRIPT = "verl script"


@technique("Dynamic Sampling", "Eq. 11", "0 < correct < G", "sampling.dynamic sampling.metric sampling.filter")
def dynamic_sampling(c: Config) -> Finding:
    by_score, own = c.sampling.metric == "score", c.sampling.filter
    if not c.sampling.dynamic:
        stay = "groups that are all right or all wrong stay in the batch"
        if c.has_critic:
            return differs("off", f"{stay}; the critic gives them advantages")
        signal = "no signal" if c.overlong.shape == "off" else "no signal except the length penalty"
        return differs("off", f"{stay} and carry {signal}: the more of them, the noisier the gradient")
    recipe = "scores have a spread" if by_score else "0 < correct < G"
    kept = "with binary rewards the same groups are kept, with graded ones also groups that are all wrong to different"
    return differs(
        recipe if own is None else f"{recipe}, and {own}",
        by_score and f"groups are filtered by score: {kept} degrees",
        own is not None and "your own filter drops further groups, so it selects the prompts that are trained on",
    )


@technique(
    "Dynamic Sampling",
    "Sec. 5.1",
    "none",
    "sampling.dynamic sampling.filter sampling.metric sampling.dynamic_batch sampling.cap sampling.on_cap",
)
def no_filter(c: Config) -> Finding:
    if c.sampling.dynamic:
        meaning = "groups that are all right or all wrong are sampled and dropped, though a critic learns from them too"
        return differs("0 < correct < G", meaning)
    if c.sampling.filter is None:
        return same("none")
    meaning = "your own filter drops groups, so it selects the prompts that are trained on"
    return differs(f"{c.sampling.filter}", meaning)


@technique("Batch filling", "Algorithm 1", "sample until N groups are kept", "sampling.dynamic_batch")
def batch_filling(c: Config) -> Finding | None:
    n = c.sampling.prompts_per_step
    if not c.sampling.dynamic:
        return None
    if not c.sampling.dynamic_batch:
        return same(f"sample until {counted(n, 'group')} {'is' if n == 1 else 'are'} kept")
    meaning = "the batch shrinks as prompts become too easy or too hard, and gradient noise changes with it"
    return differs(f"draw {n}, train on those kept", meaning)


@value("Prompts per step", "Sec. 4.1", "512", "sampling.prompts_per_step")
def prompts_per_step(c: Config) -> Finding:
    n = c.sampling.prompts_per_step
    effect = "noisier gradients and cheaper steps" if n < 512 else "smoother gradients and more expensive steps"
    return differs(f"{n:,}", n != 512 and f"{times_the_paper(n, 512)}: {effect}")


@technique("Group-Sampling", "Sec. 4.3", "several samples per prompt", "sampling.group_size", without=55)
def group_sampling(c: Config) -> Finding:
    if c.sampling.group_size > 1:
        return same("several samples per prompt")
    return differs("one sample per prompt", "a batch never has right and wrong responses to the same prompt")


@value("Group size", "Sec. 4.1", "16", "sampling.group_size")
def group_size(c: Config) -> Finding:
    size = c.sampling.group_size
    if size == 16 or c.has_critic:
        return contrast(c)
    meaning = f"for a prompt that is solved half of the time, {2 * 0.5**size:.2%} of the groups carry no signal "
    meaning += f"({2 * 0.5**16:.3%} with 16), and the baseline is {'noisier' if size < 16 else 'more precise'}"
    return differs(str(size), meaning)


def contrast(c: Config) -> Finding:
    """With a critic, the group is no baseline."""
    size = c.sampling.group_size
    words = f"a prompt has {'fewer' if size < 16 else 'more'} right and wrong responses to contrast"
    return differs(str(size), size != 16 and words)


@value("Prompt tokens", _SCRIPT, "2,048 at most", "data.max_prompt_tokens")
def prompt_tokens(c: Config) -> Finding:
    limit = c.data.max_prompt_tokens
    meaning = f"prompts of more than {limit:,} tokens are dropped; the authors drop those of more than 2,048"
    return differs(f"{limit:,} at most", limit != 2048 and meaning)


@value("New tokens", "Sec. 4.1", "20,480 at most", "sampling.max_new_tokens")
def new_tokens(c: Config) -> Finding:
    limit = c.sampling.max_new_tokens
    times = times_the_paper(limit, 20480)
    return differs(
        f"{limit:,} at most",
        limit < 20480 and f"{times}: reasoning beyond {limit:,} tokens is truncated, and usually wrong",
        limit > 20480 and f"{times}: reasoning can grow longer, and a step costs more",
    )


@value("Temperature", "Sec. 4.1", "1", "sampling.temperature")
def temperature(c: Config) -> Finding:
    chosen = c.sampling.temperature
    return differs(
        f"{chosen:g}",
        chosen < 1 and "samples are less varied: fewer groups are informative, and entropy starts lower",
        chosen > 1 and "samples are more varied and more often wrong",
    )


@value("Truncated sampling", "Sec. 4.1", "none", "sampling.top_p sampling.top_k sampling.min_p")
def truncated_sampling(c: Config) -> Finding:
    off = {"top_p": 1, "top_k": 0, "min_p": 0}
    found = [f"{name} {chosen:g}" for name in off if (chosen := getattr(c.sampling, name)) != off[name]]
    meaning = "tokens come from a truncated distribution, but the ratio uses the full one: gradients are biased, and "
    return differs(", ".join(found), meaning + "unlikely tokens are never explored") if found else same("none")


@value("Cap on draws", _SCRIPT, "stop with an error", "sampling.cap sampling.on_cap")
def cap_on_draws(c: Config) -> Finding | None:
    if not redraws(c):
        return None
    at = f"at {c.sampling_cap:,}"
    if c.sampling.on_cap == "error":
        return same(f"stop with an error, {at}")
    after = f"after {c.sampling_cap:,} draws, a step"
    if c.sampling.on_cap == "partial":
        return differs(f"train on fewer, {at}", f"{after} trains on fewer than N groups")
    return differs(f"fill up, {at}", f"{after} fills up with groups that violate Eq. 11")


@value(
    "Surplus groups",
    _SCRIPT,
    "drop",
    "sampling.surplus sampling.max_staleness sampling.ahead cluster.placement",
)
def surplus_groups(c: Config) -> Finding | None:
    ahead = c.sampling.ahead
    if not redraws(c) and not ahead and not c.during_updates:
        return None
    if c.sampling.surplus == "drop":
        return same("drop")
    if c.sampling.surplus == "requeue":
        meaning = "prompts of surplus groups are sampled again next, so they come up slightly more often than others"
        return differs("requeue", meaning)
    if c.sampling.max_staleness == 0:
        return same("none: no more groups are started than a step can train on")
    age = counted(c.sampling.max_staleness, "version")
    during = f"with cluster.placement={c.cluster.placement}, engines also sample during updates"
    return differs(
        f"carry, up to {age} old",
        f"surplus groups are trained on later instead of dropped, with weights up to {age} newer",
        "their ratio is still relative to the policy that sampled them",
        ahead > 0 and f"{ahead:g} of a batch is drawn ahead, so more groups are old",
        c.during_updates and during,
    )


@technique("Soft Overlong Punishment", "Eq. 13", "soft", "overlong.shape")
def soft_punishment(c: Config) -> Finding:
    shape, longest = c.overlong.shape, c.overlong_max_length
    return differs(
        shape,
        shape == "linear"
        and f"there is no soft interval: the penalty starts beyond {longest} tokens and has no upper bound",
        shape == "off"
        and "a response just below the limit scores the same as a short one, and truncated ones give no hint of the "
        "cause: lengths tend to grow up to the limit",
    )


@value("Overlong Filtering", "Sec. 3.4", "off (best run)", "overlong.mask_truncated overlong.masked_in_baseline")
def overlong_filtering(c: Config) -> Finding:
    if not c.overlong.mask_truncated:
        return same("off")
    brake = "nothing" if c.overlong.shape == "off" else "only the penalty on finished ones"
    meaning = "as in DAPO's ablation (30 to 36 on AIME 2024): truncated responses are excluded from the loss, so "
    excluded = "they are excluded from their group's mean and std as well"
    return differs("on", f"{meaning}{brake} limits lengths", c.masking == "baseline" and excluded)


@value(
    "Punishment interval",
    "Eq. 13",
    "L_max 20,480, L_cache 4,096, factor 1",
    "overlong.max_length overlong.cache_length overlong.factor",
)
def punishment_interval(c: Config) -> Finding | None:
    if c.overlong.shape != "soft":
        return None
    longest, cache, factor = c.overlong_max_length, c.overlong_cache_length, c.overlong.factor
    grows = f"the penalty grows from {longest - cache:,} to {longest:,} tokens instead of from 16,384 to 20,480"
    return differs(
        f"L_max {longest:,}, L_cache {cache:,}, factor {factor:g}",
        (longest, cache) != (20480, 4096) and grows,
        factor != 1 and f"a response at the limit loses {factor:g} instead of 1",
    )


@value(
    "Rule-based reward",
    "Eq. 7",
    "right +1, wrong -1",
    "reward.correct reward.wrong reward.verifier reward.threshold",
)
def reward(c: Config) -> Finding:
    chosen = c.reward
    if not isinstance(chosen.verifier, str):
        weighted = " + ".join(f"{entry.weight:g} × {entry.verifier}" for entry in chosen.verifiers)
        return differs(weighted, f"a sum of several rewards; {chosen.verifiers[0].verifier} decides what is right")
    if chosen.verifier not in VERIFIERS:
        meaning = "the function defines the scores; reward.correct and reward.wrong have no effect"
        return differs(f"scores of {chosen.verifier}", meaning)
    recipe, margin = f"right {chosen.correct:+g}, wrong {chosen.wrong:+g}", chosen.correct - chosen.wrong
    if (chosen.correct, chosen.wrong) == (1, -1):
        return same(recipe)
    meaning = "advantages are the same for any two values once divided by the std"
    if is_function(c.algo.advantage):
        meaning = "the effect on advantages depends on algo.advantage"
    elif not _divides_by_std(c):
        meaning = f"advantages are not divided by the std, so they are {margin / 2:g} times as large"
    share = f"{c.overlong.factor / margin:.0%} of the margin between right and wrong instead of 50%"
    return differs(recipe, meaning, c.overlong.shape == "soft" and f"the full length penalty is {share}")


def _divides_by_std(c: Config) -> bool:
    if c.has_critic:
        return c.critic.whiten
    if c.algo.advantage == "group":
        return NORMALIZATIONS[c.algo.normalize].by_std
    return ADVANTAGES[c.algo.advantage].by_std


@value("Updates per step", "Sec. 4.1", "16, of 512 responses", "train.mini_batches train.epochs_per_step")
def updates_per_step(c: Config) -> Finding:
    numbers = batch_arithmetic(c)
    updates, samples = numbers.updates_per_step, numbers.samples_per_update
    recipe = f"{updates}, of {samples:,} responses"
    if updates == 1:
        meaning = "one update per step is on-policy: the ratio is 1 for groups sampled in the step, and neither clip "
        return differs(recipe, meaning + "bound acts on them")
    if updates != 16:
        place, often = ("further from", "more") if updates > 16 else ("closer to", "less")
        meaning = f"the last update of a step is {place} the policy that sampled than in the paper, so clipping is "
        return differs(recipe, f"{meaning}{often} frequent")
    return differs(recipe, samples != 512 and f"each update averages over {times_the_paper(samples, 512)} responses")


def total_updates(paper: int) -> Find:
    """The papers' figures count updates of the policy, not rollout steps."""

    def find(c: Config) -> Finding:
        updates = batch_arithmetic(c).total_updates
        steps = c.pretrain_steps + round(paper / c.updates_per_step)
        meaning = f"{times_the_paper(updates, paper)}, which train.steps={steps} would have"
        return differs(f"{updates:,} updates", abs(updates - paper) > 0.01 * paper and meaning)

    return find


length_of_the_run = value("Length of the run", "Fig. 1", "10,000 updates", "train.steps")(total_updates(10_000))


@value("Learning rate", "Sec. 4.1", "1e-06, constant", "train.lr train.lr_schedule train.min_lr_share")
def learning_rate(c: Config) -> Finding:
    lr, schedule = c.train.lr, c.train.lr_schedule
    pace = "faster and less stable" if lr > 1e-6 else "slower and steadier"
    decays = f"it decays to {c.train.min_lr_share:g} of its value by step {c.train.steps}"
    return differs(
        f"{lr:g}, {schedule}", lr != 1e-6 and f"{times_the_paper(lr, 1e-6)}: {pace}", schedule != "constant" and decays
    )


def warmup_steps(paper: int | None) -> Find:
    """`paper` None: there is a warm-up, whose length the paper does not state."""

    def find(c: Config) -> Finding:
        steps = c.train.warmup_steps
        when = f"after {steps} rollout steps instead of {paper}"
        if not steps:
            when = "at once, before AdamW's averages have settled"
        differ = steps != paper and (paper is not None or steps == 0)
        return differs(f"{steps} rollout steps", differ and f"the full learning rate is reached {when}")

    return find


warmup = value("Warm-up", "Sec. 4.1", "20 rollout steps", "train.warmup_steps")(warmup_steps(20))


@value(
    "Optimizer",
    _SCRIPT,
    "AdamW, decay 0.1, betas 0.9 0.999, clip 1",
    "train.optimizer train.weight_decay train.betas train.max_grad_norm",
)
def optimizer(c: Config) -> Finding:
    chosen, (first, second) = c.train, c.train.betas
    name = {"adamw": "AdamW", "adamw_8bit": "8-bit AdamW"}[chosen.optimizer]
    recipe = f"{name}, decay {chosen.weight_decay:g}, betas {first:g} {second:g}, clip {chosen.max_grad_norm:g}"
    if chosen.optimizer != "adamw":
        return differs(recipe, "the moments are quantised to 8 bits: less memory, slightly less precise updates")
    if (chosen.weight_decay, first, second, chosen.max_grad_norm) == (0.1, 0.9, 0.999, 1.0):
        return same(recipe)
    meaning = "the paper specifies only AdamW; the values are from DAPO's script, and affect the size of updates"
    return differs(recipe, meaning)


@value("Precision", _SCRIPT, "bfloat16, float32 weights", "model.dtype")
def precision(c: Config) -> Finding:
    if c.model.dtype == "float32":
        return differs("float32", "ratios are more precise than with bfloat16, and a step on a GPU takes longer")
    return same(f"{'on a GPU ' * (c.model.dtype == 'auto')}bfloat16, float32 weights")


@value("Model", "Sec. 4.1", "Qwen2.5-32B", "model.name")
def model(c: Config) -> Finding:
    known = re.search(r"qwen2\.5-32b$", c.model.name.rstrip("/"), re.IGNORECASE)
    meaning = "the paper's scores are for the Qwen2.5-32B base model; expect different ones"
    return differs(c.model.name, not known and meaning)


@value("Training prompts", "Sec. 3.5", "DAPO-Math-17K", "data.train")
def training_prompts(c: Config) -> Finding:
    meaning = "other problems: what is learned, and how many groups are informative, depends on them"
    return differs(source_name(c.data.train), not _every_source(c.data.train, r"dapo-math-17k") and meaning)


@evaluation("Held-out prompts", "Sec. 4.1", "AIME 2024", "data.eval eval.prompts")
def heldout_prompts(c: Config) -> Finding:
    if c.data.eval is None:
        return differs("none", "accuracy before and after training is not measured")
    name, limit = source_name(c.data.eval), c.eval.prompts
    if not _every_source(c.data.eval, r"aime[^a-z0-9]*(20)?24"):
        return differs(name, "accuracies are not comparable with the paper's tables")
    if limit is None or limit >= 30:
        return same(name)
    return differs(
        f"{name}, {counted(limit, 'prompt')}", f"{limit} of 30 problems: each is {1 / limit:.0%} of the score"
    )


@evaluation("Held-out samples", "Sec. 4.1", "avg@32", "eval.samples")
def heldout_samples(c: Config) -> Finding | None:
    if c.data.eval is None:
        return None
    n = c.eval.samples
    noise = f"the sampling noise of a prompt's accuracy is {(32 / n) ** 0.5:.2g} times that of avg@32"
    return differs(f"avg@{n}", n != 32 and noise)


@evaluation("Held-out sampling", "Sec. 4.1", "temperature 1, top_p 0.7", "eval.temperature eval.top_p")
def heldout_sampling(c: Config) -> Finding | None:
    if c.data.eval is None:
        return None
    chosen = (c.eval.temperature, c.eval.top_p)
    meaning = "top_p and temperature affect accuracy: compare only accuracies with the same settings"
    if c.eval.temperature == 0:
        meaning = "greedy decoding: no sampling noise, but not the mean over samples of the paper's tables"
    return differs("temperature {:g}, top_p {:g}".format(*chosen), chosen != (1.0, 0.7) and meaning)


def _every_source(sources: Sources, pattern: str) -> bool:
    return all(re.search(pattern, entry.source, re.IGNORECASE) for entry in entries_of(sources))
