"""Findings of a dry run about a recipe: one line each, with a remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dapo_rl.base.quote import one_line
from dapo_rl.config import Config
from dapo_rl.data.chat import PromptReader
from dapo_rl.data.pass_rate import window_text
from dapo_rl.engines.stopping import stop_token_ids
from dapo_rl.envs.python_tool import uncontained
from dapo_rl.evals.metrics import is_graded
from dapo_rl.models.download import PRETRAINED
from dapo_rl.outcomes import OUTCOMES, Outcome
from dapo_rl.rewards.answers import has_other_forms
from dapo_rl.rewards.math import final_answer
from dapo_rl.run.build import Run
from dapo_rl.types import Group, Trajectory, Verdict

Level = Literal["error", "warning", "note"]
"""`dapo train` would stop; it would waste its time; it may be as intended."""

MANY = 0.25
"""From this share of the responses on, a finding is a warning."""
INSTRUCT = re.compile(r"(?<![a-z])(instruct|chat|it|sft|rlhf|dpo)(?![a-z])", re.IGNORECASE)
"""Names of models that are trained on a chat template: Qwen2.5-7B-Instruct, gemma-2-9b-it."""

FORM = re.compile(
    r"(?<![a-z])(?:expand(?:ed)?|factor(?:ed|i[sz]ed?)?|simplif(?:y|ied)|simplest|lowest terms|reduced|common fraction"
    r"|mixed number|improper fraction|radical form|standard form|rationali[sz]ed?|partial fractions?"
    r"|single (?:fraction|power|term|logarithm)|complet(?:e|ing) the square|slope-intercept|combine like terms)"
    r"(?![a-z])",
    re.IGNORECASE,
)
"""Words of a prompt that ask for the form of an answer."""


@dataclass(frozen=True, slots=True)
class Advice:
    level: Level
    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Facts:
    run: Run
    groups: tuple[Group, ...]
    outcomes: tuple[Outcome, ...]
    rewards: tuple[float, ...]
    """Of all responses, after the length penalty."""

    @property
    def config(self) -> Config:
        return self.run.config

    @property
    def samples(self) -> list[Trajectory]:
        return [sample for group in self.groups for sample in group.samples]

    @property
    def verdicts(self) -> list[Verdict]:
        return [verdict for group in self.groups for verdict in group.verdicts]


def find_all(facts: Facts) -> tuple[Advice, ...]:
    """All findings, the most serious first."""
    found = [advice for find in FINDERS for advice in find(facts)]
    order = ("error", "warning", "note")
    return tuple(sorted(found, key=lambda advice: order.index(advice.level)))


def _environment(facts: Facts) -> Iterator[Advice]:
    ended = [bool(sample.scalars.get("env_failed")) for sample in facts.samples]
    failed = [verdict for verdict, is_failed in zip(facts.verdicts, ended, strict=True) if is_failed]
    if not failed:
        return
    limit = facts.config.env.max_error_share
    stops = len(failed) > limit * len(ended)
    what = f"the environment failed in {len(failed)} of {len(ended)} episodes"
    what += f", more than env.max_error_share {limit:g} allows" if stops else ""
    what += f"; the first: {one_line(failed[0].detail.partition(chr(10))[0])}"
    remedy = "raise env.timeout_s, or make it faster" if failed[0].status == "timeout" else "fix it"
    yield Advice("error" if stops else "warning", what, f"{remedy}; groups with a failed episode are dropped")


def _tools(facts: Facts) -> Iterator[Advice]:
    calls, errors = (sum(s.scalars.get(name, 0.0) for s in facts.samples) for name in ("tool_calls", "tool_errors"))
    has_tools = bool(facts.config.env.tools or facts.config.env.mcp)
    if has_tools and not calls:
        what = f"no tool was called in {len(facts.samples)} episodes"
        yield Advice("warning", what, "say in data.system_prompt when to call one, or set env.tool_format")
    elif errors >= MANY * calls and errors:
        yield Advice("warning", f"{errors:.0f} of {calls:.0f} tool calls failed", "look at their results above")
    if "python" in facts.config.env.tools and (open_to := uncontained()):
        what = f"code of the python tool is not kept from: {', '.join(open_to)}"
        yield Advice("warning", what, "install bubblewrap, or run in a container that has nothing to lose")


def _verifier(facts: Facts) -> Iterator[Advice]:
    """Failures of environments are reported as theirs."""
    pairs = zip(facts.samples, facts.verdicts, strict=True)
    failed = [verdict for sample, verdict in pairs if verdict.failed and not sample.scalars.get("env_failed")]
    if not failed:
        return
    first = one_line(failed[0].detail.partition("\n")[0]) or failed[0].status
    limit = facts.config.reward.max_error_share
    stops = facts.outcomes.count("verifier_error") > limit * len(facts.groups)
    what = f"the verifier failed on {len(failed)} of {len(facts.verdicts)} responses; the first: {first}"
    if stops:
        groups = f"{facts.outcomes.count('verifier_error')} of {len(facts.groups)} groups"
        what += f" ({groups}, more than reward.max_error_share {limit:g} allows)"
    if all(verdict.status == "timeout" for verdict in failed):
        yield Advice("error" if stops else "warning", what, "raise reward.timeout_s, or make the verifier faster")
    else:
        yield Advice("error" if stops else "warning", what, "fix reward.verifier; failed groups are dropped")


def _constant(facts: Facts) -> Iterator[Advice]:
    """Failed verdicts are left out, since their score is a placeholder."""
    judged = [verdict for verdict in facts.verdicts if not verdict.failed]
    right = sum(verdict.correct for verdict in judged)
    if len(judged) < 2 or 0 < right < len(judged):
        return
    how = "right" if right else "wrong"
    if len({verdict.score for verdict in judged}) > 1:
        what = f"all {len(judged)} responses are {how}, with different scores"
        remedy = "set sampling.metric=score to learn from the scores, or change reward.threshold"
        yield Advice("note", what, "they are compared by their scores" if "kept" in facts.outcomes else remedy)
        return
    what = f"all {len(judged)} responses are {how}, with the score {judged[0].score:g}: there is nothing to learn"
    if len(set(facts.rewards)) > 1 and not facts.config.sampling.dynamic:
        what += " but to avoid the length penalty"
    remedy = "use harder problems" if right else "use easier problems, or a better model"
    yield Advice("warning", what, f"{remedy}; check that reward.verifier tells right from wrong")


def _groups(facts: Facts) -> Iterator[Advice]:
    """Prompts that carry no signal. `_constant` reports it if this is true of all responses together."""
    total, sampling = len(facts.groups), facts.config.sampling
    judged, same = [], []
    for group, outcome in zip(facts.groups, facts.outcomes, strict=True):
        if not any(verdict.failed for verdict in group.verdicts):
            judged.append(group.verdicts)
            alike = len({verdict.correct for verdict in group.verdicts}) == 1
            same += [group.verdicts] if (not OUTCOMES[outcome].signal if sampling.dynamic else alike) else []
    right = sum(all(verdict.correct for verdict in verdicts) for verdicts in same)
    wrong = sum(not any(verdict.correct for verdict in verdicts) for verdicts in same)
    size = len(facts.groups[0].verdicts)
    everything = {(verdict.correct, verdict.score) for verdicts in judged for verdict in verdicts}
    if size == 1 or not same or len(everything) == 1:
        return
    what = f"{right} of {total} prompts are all right and {wrong} all wrong in {size} samples: they carry no signal"
    more = "expect fewer in the run, whose groups are larger" if sampling.group_size > size else ""
    if len(same) < len(judged):
        yield Advice("note", what, more or "expect to sample more groups than are trained on")
    else:
        yield Advice("warning", what, f"use problems of medium difficulty{f'; {more}' if more else ''}")


def _unparseable(facts: Facts) -> Iterator[Advice]:
    """Truncated responses usually have no answer, so they count only if no response ended."""
    pairs = list(zip(facts.samples, facts.verdicts, strict=True))
    ended = [verdict for sample, verdict in pairs if not sample.truncated] or facts.verdicts
    count, total, reward = sum(verdict.status == "unparseable" for verdict in ended), len(ended), facts.config.reward
    if not count:
        return
    share = f"all {total}" if count == total else f"{count} of {total}"
    decides = reward.verifiers[0].verifier
    what = f"{share} responses have no answer that reward.verifier={decides} can parse"
    remedy = "ask for the answer's format in data.system_prompt or the prompts"
    if decides == "math":
        remedy = "ask for a last line 'Answer: ...' in data.system_prompt or the prompts"
        remedy += "" if reward.boxed else ", or set reward.boxed=true"
    yield Advice("warning" if count >= MANY * total else "note", what, remedy)


def _cut_off(facts: Facts) -> Iterator[Advice]:
    count, total = sum(sample.truncated for sample in facts.samples), len(facts.samples)
    if not count or facts.config.sampling.ignore_eos:
        return
    limit = facts.config.sampling.max_new_tokens
    if facts.run.conversations is not None:
        what = f"{count} of {total} episodes ({count / total:.0%}) ended by a limit on tokens or turns"
        remedy = "raise sampling.max_new_tokens, env.max_turn_tokens, env.max_observation_tokens or env.max_turns"
        yield Advice("warning" if count >= MANY * total else "note", what, remedy)
        return
    what = f"{count} of {total} responses ({count / total:.0%}) were cut off at sampling.max_new_tokens {limit}"
    remedy = "raise it, or shorten the responses with the prompt"
    yield Advice("warning" if count >= MANY * total else "note", what, remedy)


def _overlong(facts: Facts) -> Iterator[Advice]:
    """A length penalty that outweighs the differences between graded scores."""
    config, overlong = facts.config, facts.config.overlong
    judged = [verdict for verdict in facts.verdicts if not verdict.failed]
    excess = max(0, config.sampling.max_new_tokens - config.overlong_max_length) / config.overlong_max_length
    most = {"soft": 1.0, "linear": excess, "off": 0.0}[overlong.shape] * overlong.factor
    if not is_graded((verdict.correct, verdict.score) for verdict in judged):
        return
    low, high = min(v.score for v in judged), max(v.score for v in judged)
    if most <= (high - low) / 2:
        return
    what = f"the scores are graded, from {low:g} to {high:g}, and the length penalty takes up to {most:g} from them"
    factor = overlong.factor * (high - low) / 2 / most
    yield Advice(
        "warning",
        f"{what}: a short response outweighs a good one",
        f"lower overlong.factor, for example to {factor:.2g}, or set overlong.shape=off",
    )


def _no_end(facts: Facts) -> Iterator[Advice]:
    if facts.config.sampling.ignore_eos:
        what = "sampling.ignore_eos is on: no response ends before sampling.max_new_tokens"
        yield Advice("warning", what, "it is for benchmarks; set it to false")
        return
    stop_ids = stop_token_ids(facts.run.model, facts.run.tokenizer)
    ends = [(s, end) for s in facts.samples for end in [len(s.token_ids), *(t.end for t in s.turns)] if end]
    ended = any(int(sample.token_ids[end - 1]) in stop_ids for sample, end in ends)
    if not ended and any(sample.truncated for sample in facts.samples):
        what = f"no response ended with an end-of-sequence token ({facts.run.tokenizer.eos_token})"
        yield Advice(
            "warning", what, "raise sampling.max_new_tokens, set sampling.stop, or use the model's chat template"
        )


def _chat_template(facts: Facts) -> Iterator[Advice]:
    if facts.run.conversations is not None:  # whose prompts are rendered by the chat format
        return
    name, total = facts.config.model.name, len(facts.groups)
    published = PRETRAINED[name].about if name in PRETRAINED else Path(name).name
    instruct = bool(INSTRUCT.search(published))
    reader = PromptReader(facts.run.tokenizer, facts.config.data)
    of_messages = [group.prompt.messages is not None for group in facts.groups]
    templated = sum(reader.takes_template(not messages) for messages in of_messages)
    if instruct and not getattr(facts.run.tokenizer, "chat_template", None):
        what = f"{name} looks like a chat model, but its tokenizer has no chat template"
        yield Advice("warning", what, "save the tokenizer with its chat_template beside the weights")
    elif instruct and templated < total:
        what = f"{name} looks like a chat model, but {total - templated} of {total} prompts are plain text"
        yield Advice("warning", what, "set data.chat_template=always")
    elif any(of_messages) and not templated:
        what = "the prompts are chat messages, joined as plain text without roles (data.chat_template=never)"
        yield Advice("note", what, "right for a base model; for a chat model, set data.chat_template=auto")


def _form(facts: Facts) -> Iterator[Advice]:
    """Prompts that ask for a form, such as an expanded one, which `reward.form=any` does not require."""
    reward, prompts = facts.config.reward, facts.run.train_prompts.prompts
    if reward.form != "any" or not any(entry.verifier == "math" for entry in reward.verifiers):
        return
    asked = [
        prompt
        for prompt in prompts
        if prompt.answer and FORM.search(prompt.text) and has_other_forms(final_answer(prompt.answer))
    ]
    if asked:
        word = FORM.search(asked[0].text)
        assert word is not None
        what = f"{len(asked)} of {len(prompts)} prompts ask for a form (the first, row {asked[0].id}: {word[0]}), and "
        what += "reward.form=any accepts any other, such as a copy of the question"
        yield Advice("warning", what, "set reward.form=same")


def _data(facts: Facts) -> Iterator[Advice]:
    prompts = facts.run.train_prompts
    if prompts.too_long:
        share = prompts.too_long / prompts.rows
        what = f"{prompts.too_long} of {prompts.rows} prompts are over data.max_prompt_tokens "
        what += f"{prompts.max_prompt_tokens} and were dropped"
        yield Advice("warning" if share >= MANY else "note", what, "raise data.max_prompt_tokens to keep them")
    if prompts.window is not None and not prompts.is_stream:
        left = len(prompts.prompts) + prompts.too_long
        what = f"data.pass_rate {window_text(prompts.window)} leaves {left} of {left + prompts.outside} prompts"
        if left < facts.config.sampling.prompts_per_step:
            yield Advice("warning", f"{what}, fewer than sampling.prompts_per_step", "widen data.pass_rate")
        else:
            yield Advice("note", what, "widen data.pass_rate to keep more")
    untold = [row for row in prompts.bad if row.why.startswith("no ground truth")]
    if untold:
        what = (
            f"{len(untold)} of {prompts.rows} rows have no ground truth and were skipped; the first: {untold[0].where}"
        )
        yield Advice("warning", what, "data.answer_key names the column")
    if others := [row for row in prompts.bad if row not in untold]:
        first = one_line(str(others[0]))
        what = f"{len(others)} of {prompts.rows} rows cannot be used and were skipped; the first: {first}"
        yield Advice("warning", what, "correct the rows")
    missing = sum(prompt.answer is None for prompt in prompts.prompts)
    if missing and facts.run.judge is not None:
        what = f"{missing} of {len(prompts.prompts)} prompts have no ground truth"
        yield Advice("note", what, "data.answer_key names the column, if reward.verifier needs one")


FINDERS: tuple[Callable[[Facts], Iterator[Advice]], ...] = (
    _environment,
    _tools,
    _verifier,
    _constant,
    _groups,
    _unparseable,
    _cut_off,
    _overlong,
    _no_end,
    _chat_template,
    _form,
    _data,
)
