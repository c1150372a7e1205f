"""Compares how a recipe samples its batch with a paper's way."""

from __future__ import annotations

from dapo_rl.base.format import counted
from dapo_rl.config import Config
from dapo_rl.lab.batch_arithmetic import redraws
from dapo_rl.lab.papers.record import Finding, times_the_paper


def compare_dynamic(config: Config) -> Finding:
    """DAPO's Eq. 11."""
    sampling = config.sampling
    if not sampling.dynamic and config.has_critic:
        return (
            "off",
            False,
            "groups that are all right or all wrong stay in the batch; the critic gives them advantages",
        )
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


def compare_no_filter(config: Config) -> Finding:
    """For a paper that trains on every group."""
    sampling = config.sampling
    if not sampling.dynamic and sampling.filter is None:
        return "none", True, ""
    if not sampling.dynamic:
        return (
            f"{sampling.filter}",
            False,
            "your own filter drops groups, so it selects the prompts that are trained on",
        )
    meaning = "groups that are all right or all wrong are sampled and dropped, though a critic learns from them too"
    return "0 < correct < G", False, meaning


def compare_filling(config: Config) -> Finding | None:
    n = config.sampling.prompts_per_step
    if not config.sampling.dynamic:
        return None
    if not config.sampling.dynamic_batch:
        return f"sample until {counted(n, 'group')} {'is' if n == 1 else 'are'} kept", True, ""
    meaning = "the batch shrinks as prompts become too easy or too hard, and gradient noise changes with it"
    return f"draw {n}, train on those kept", False, meaning


def compare_prompts(config: Config, *, paper: int) -> Finding:
    n = config.sampling.prompts_per_step
    if n == paper:
        return f"{n:,}", True, ""
    effect = "noisier gradients and cheaper steps" if n < paper else "smoother gradients and more expensive steps"
    return f"{n:,}", False, f"{times_the_paper(n, paper)}: {effect}"


def compare_group_size(config: Config) -> Finding:
    size = config.sampling.group_size
    if size == 16 or config.has_critic:
        return compare_contrast(config, paper=16)
    meaning = f"for a prompt that is solved half of the time, {2 * 0.5**size:.2%} of the groups carry no signal "
    meaning += f"({2 * 0.5**16:.3%} with 16), and the baseline is {'noisier' if size < 16 else 'more precise'}"
    return str(size), False, meaning


def compare_groups(config: Config) -> Finding:
    """VAPO's Group-Sampling, as opposed to one sample per prompt."""
    if config.sampling.group_size > 1:
        return "several samples per prompt", True, ""
    return "one sample per prompt", False, "a batch never has right and wrong responses to the same prompt"


def compare_contrast(config: Config, *, paper: int) -> Finding:
    """The group size of a paper with a critic, where the group is no baseline."""
    size = config.sampling.group_size
    if size == paper:
        return str(size), True, ""
    return str(size), False, f"a prompt has {'fewer' if size < paper else 'more'} right and wrong responses to contrast"


def compare_new_tokens(config: Config) -> Finding:
    limit = config.sampling.max_new_tokens
    meaning = ""
    if limit < 20480:
        meaning = f"{times_the_paper(limit, 20480)}: reasoning beyond {limit:,} tokens is truncated, and usually wrong"
    elif limit > 20480:
        meaning = f"{times_the_paper(limit, 20480)}: reasoning can grow longer, and a step costs more"
    return f"{limit:,} at most", limit == 20480, meaning


def compare_temperature(config: Config) -> Finding:
    value = config.sampling.temperature
    meaning = ""
    if value < 1:
        meaning = "samples are less varied: fewer groups are informative, and entropy starts lower"
    elif value > 1:
        meaning = "samples are more varied and more often wrong"
    return f"{value:g}", value == 1, meaning


def compare_prompt_tokens(config: Config, *, paper: int) -> Finding:
    limit = config.data.max_prompt_tokens
    recipe = f"{limit:,} at most"
    if limit == paper:
        return recipe, True, ""
    return (
        recipe,
        False,
        f"prompts of more than {limit:,} tokens are dropped; the authors drop those of more than {paper:,}",
    )


def compare_truncation(config: Config) -> Finding:
    sampling = config.sampling
    found = [
        f"{name} {value:g}"
        for name, value, off in (
            ("top_p", sampling.top_p, 1),
            ("top_k", sampling.top_k, 0),
            ("min_p", sampling.min_p, 0),
        )
        if value != off
    ]
    if not found:
        return "none", True, ""
    meaning = "tokens come from a truncated distribution, but the ratio uses the full one: gradients are biased, and "
    return ", ".join(found), False, meaning + "unlikely tokens are never explored"


def compare_cap(config: Config) -> Finding | None:
    if not redraws(config):
        return None
    cap = config.sampling_cap
    if config.sampling.on_cap == "error":
        return f"stop with an error, at {cap:,}", True, ""
    if config.sampling.on_cap == "partial":
        return f"train on fewer, at {cap:,}", False, f"after {cap:,} draws, a step trains on fewer than N groups"
    return f"fill up, at {cap:,}", False, f"after {cap:,} draws, a step fills up with groups that violate Eq. 11"


def compare_surplus(config: Config) -> Finding | None:
    if not redraws(config) and not config.sampling.ahead and not config.during_updates:
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
    if config.during_updates:
        meaning += f"; with cluster.placement={config.cluster.placement}, engines also sample during updates"
    return f"carry, up to {age} old", False, meaning
