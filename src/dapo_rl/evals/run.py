"""Runs an evaluation: models × problems × k samples, in a directory from which it can be resumed."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from dapo_rl.base.files import atomic_write
from dapo_rl.base.format import counted
from dapo_rl.base.home import expanded
from dapo_rl.base.lock import acquire
from dapo_rl.choices import NO_VERIFIER
from dapo_rl.config import ModelSettings
from dapo_rl.data import Rows, build_prompts, copies, load_rows, once_each
from dapo_rl.engines.build import build_engine
from dapo_rl.engines.custom import vocabulary_of
from dapo_rl.engines.protocol import Engine, EngineInputs, SamplingParams
from dapo_rl.envs.build import build_environment, environment_rows, gives_rewards
from dapo_rl.envs.pool import Environments
from dapo_rl.errors import UserError
from dapo_rl.evals.metrics import ModelMetrics, compare, read_metrics
from dapo_rl.evals.progress import EvalProgress
from dapo_rl.evals.protocols import EvalPlan, fingerprint
from dapo_rl.evals.responses import ResponseFile
from dapo_rl.evals.resume import SETTINGS, check_same, fingerprint_of_weights, judged_by
from dapo_rl.evals.sampling import answer
from dapo_rl.evals.scores import check_scores, write_scores
from dapo_rl.evals.vote import Voting
from dapo_rl.models.load import (
    TINY,
    check_context,
    check_vocabulary,
    compute_dtype,
    describe_model,
    load_model,
    pick_device,
)
from dapo_rl.rewards import build_verifier
from dapo_rl.rewards.pool import VerifierPool
from dapo_rl.rollout.build_conversations import build_conversations, longest_episode, prompt_fits
from dapo_rl.rollout.conversation import Conversations
from dapo_rl.rollout.failures import check_environment
from dapo_rl.rollout.policy_answers import longest_question, use_as_judge
from dapo_rl.rollout.reward_model import load_reward_models
from dapo_rl.types import Group, Prompt, Trajectory, Verdict


@dataclass(frozen=True, slots=True)
class _Work:
    """A model that is ready to be sampled."""

    engine: Engine
    prompts: list[Prompt]
    params: SamplingParams
    k: int
    description: str
    conversations: Conversations | None = None


def evaluate_models(
    plan: EvalPlan,
    models: Sequence[str],
    out: Path | None = None,
    progress: EvalProgress | None = None,
    scores: Path | None = None,
) -> tuple[dict[str, Any], Path]:
    """Evaluates what is missing; returns the report, and the directory that contains it as `evaluation.json`. Writes
    the rows with the model's pass rates to `scores`."""
    if scores is not None:
        check_scores(scores, models, plan.config.data.eval or plan.data)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    progress = progress or EvalProgress()
    if twice := [name for name in models if models.count(name) > 1]:
        raise UserError(f"{twice[0]}: named twice")
    config = plan.config
    rows = load_rows(environment_rows(config, config.data.eval or plan.data), key="--data")
    dtype = compute_dtype(config.model, pick_device(config.model.device))
    settings = plan.settings(str(dtype).removeprefix("torch.")) | {"rows": fingerprint(rows)} | judged_by(config)
    out = out or Path("evals") / f"{_slug(Path(plan.data).stem)}-{_digest(settings)}"
    with _locked(out):
        # Workers are forked from this process, so they must start before any threads or a GPU context.
        with ExitStack() as resources:
            judges = _judges(plan, out, resources)
            for model in models:
                _evaluate(plan, model, rows, settings, _home(out, model), judges, progress)
                _free_memory()
        figures = [read_metrics(model, ResponseFile(_home(out, model))) for model in models]
        judge = "environment or the verifier" if config.env.given else "verifier"
        for each in figures:
            if each.verifier_errors:
                progress.note(
                    f"{each.model}: the {judge} failed on {counted(each.verifier_errors, 'sample')}, left out; "
                    f"the first: {each.first_error}"
                )
        if scores is not None:
            written = write_scores(scores, rows, ResponseFile(_home(out, models[0])))
            progress.note(f"{scores}: {counted(written, 'row')} with pass_rate, for data.train with data.pass_rate")
        report = _report(plan, figures, settings, out)
        atomic_write(out / "evaluation.json", json.dumps(report, indent=2, allow_nan=False) + "\n")
    return report, out


@dataclass(frozen=True, slots=True)
class _Judges:
    """What judges the responses of all models."""

    verifier: VerifierPool | None
    """None: the environment does."""
    voting: Voting
    environments: Environments | None


def _judges(plan: EvalPlan, out: Path, resources: ExitStack) -> _Judges:
    config = plan.config
    judged = config.reward.verifier != NO_VERIFIER or not gives_rewards(config)
    verifier = None
    if judged:
        verifier = resources.enter_context(VerifierPool(build_verifier(config.reward), config.reward))
        verifier.begin(out)
    environments = build_environment(config)
    if environments is not None:
        resources.callback(environments.close)
    if verifier is not None:
        load_reward_models(verifier, config, pick_device(config.model.device))
    return _Judges(verifier, resources.enter_context(closing(Voting(config.reward, judged))), environments)


def _report(plan: EvalPlan, figures: Sequence[ModelMetrics], settings: dict[str, Any], out: Path) -> dict[str, Any]:
    seed = plan.config.seed
    first, *others = figures
    return {
        "data": plan.data,
        "k": first.k,
        "settings": settings,
        "models": [f.report(seed) | {"responses": f"{_home(out, f.model).name}/responses.parquet"} for f in figures],
        "comparisons": [row for other in others for row in compare(first, other, seed)],
    }


def _evaluate(
    plan: EvalPlan,
    name: str,
    rows: Rows,
    settings: dict[str, Any],
    home: Path,
    judges: _Judges,
    progress: EvalProgress,
) -> None:
    """Completes the responses of one model."""
    directory = _directory(name)
    settings = {"model": name, "weights": fingerprint_of_weights(directory), **settings}
    check_same(home, settings)
    responses = ResponseFile(home)
    if responses.whole:
        responses.tidy()
        progress.note(f"{name}: already evaluated, read from {responses.path}")
        return
    progress.note(f"{name}: loading")
    dtype = settings["model.dtype"]
    chosen = plan.config.model.model_copy(update={"name": str(directory or name), "dtype": dtype})
    work = _prepare(plan, chosen, rows, judges, progress)
    home.mkdir(parents=True, exist_ok=True)
    atomic_write(home / SETTINGS, json.dumps(settings, indent=2) + "\n")
    missing = responses.begin(len(work.prompts), work.k)
    there = len(work.prompts) - sum(map(len, missing))
    problems = counted(len(work.prompts), "problem")
    progress.note(f"{name} ({work.description}): {problems}, {counted(work.k, 'sample')} each")
    if there:
        progress.note(f"resuming: {there} of {problems} done")
    part_of = {index: part for part in missing for index in part}
    waiting: dict[range, list[Group]] = {part: [] for part in missing}
    episodes: list[tuple[Trajectory, Verdict]] = []
    asked = (work.prompts, work.params, work.k, plan.config.seed, list(part_of))
    answers = answer(work.engine, judges.verifier, *asked, conversations=work.conversations)
    with closing(work.engine), progress.of(name, len(work.prompts), done=there):
        for problem in answers:
            progress.advance(problem.tokens)
            part = part_of[problem.draw]
            waiting[part].append(problem)
            if work.conversations is not None:
                episodes += problem.judged
            if len(waiting[part]) == len(part):
                check_environment(episodes, plan.config.env.max_error_share)  # before failures are written as results
                judged = sorted(waiting.pop(part), key=lambda group: group.draw)
                responses.write(part, [(group, judges.voting.votes(group)) for group in judged])
        responses.finish(len(work.prompts), work.k)


def _prepare(plan: EvalPlan, chosen: ModelSettings, rows: Rows, judges: _Judges, progress: EvalProgress) -> _Work:
    """Loads a model, and checks it and the data before anything is sampled or written."""
    config, verifier, environments = plan.config, judges.verifier, judges.environments
    model, tokenizer = load_model(chosen)
    data = config.data
    if environments is not None:  # which renders the prompts itself, with its tools
        data = data.model_copy(update={"chat_template": "never", "system_prompt": None})
    fits = prompt_fits(config, environments, tokenizer)
    found = build_prompts(rows, tokenizer, data, verifier is not None and verifier.needs_answer, fits)
    if report := found.report():
        progress.note(report)
    prompts, repeated = once_each(found.prompts, config.eval.prompts), copies(found.prompts)
    # Greedy samples are all the same.
    k = plan.k or (repeated if config.eval.temperature > 0 else 1)
    if repeated > 1:
        progress.note(f"{plan.data} repeats each problem {repeated} times: used once, with {counted(k, 'sample')}")
    if verifier is not None:
        verifier.check(prompts)
    check_vocabulary(model, max(int(prompt.token_ids.max()) for prompt in prompts))
    longest = max(len(prompt.token_ids) for prompt in prompts)
    params = _params(plan, model, longest)
    dtype = compute_dtype(chosen, next(model.parameters()).device)
    described, longest = describe_model(model, dtype), longest + params.max_new_tokens
    conversations = None
    if environments is not None:
        longest = longest_episode(config, model)
        limits = {"context": longest, "max_new_tokens": params.max_new_tokens, "vocabulary": vocabulary_of(model)}
        conversations = build_conversations(config, environments, tokenizer, **limits, rewards=gives_rewards(config))
    longest = longest_question(verifier, tokenizer, config, model, longest)
    inputs = EngineInputs(model, tokenizer, config.sampling, dtype, longest, copies=False)
    engine = build_engine(config.engine, inputs)
    use_as_judge(verifier, engine, tokenizer, config, longest)
    return _Work(engine, prompts, params, k, f"{described}; {_how(params)}", conversations)


def _free_memory() -> None:
    """Frees the memory of the last model for the next one."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _params(plan: EvalPlan, model: Any, longest: int) -> SamplingParams:
    """Sampling parameters; a default length limit is lowered to the model's context."""
    config = plan.config
    limit, context = config.sampling.max_new_tokens, getattr(model.config, "max_position_embeddings", None)
    if "sampling.max_new_tokens" not in plan.given and isinstance(context, int):
        limit = max(1, min(limit, context - longest))
    check_context(model, longest, limit)
    return SamplingParams(limit, config.eval.temperature, config.eval.top_p, stop=config.sampling.stop)


def _how(params: SamplingParams) -> str:
    top_p = f", top_p {params.top_p:g}" if params.top_p < 1 else ""
    return f"temperature {params.temperature:g}{top_p}, at most {params.max_new_tokens} tokens"


def _home(out: Path, model: str) -> Path:
    return out / f"{_slug(model)[-48:]}-{_digest(model)}"


def _directory(name: str) -> Path | None:
    """The directory of a local model; a run directory stands for its final model."""
    if name == "tiny":
        return TINY
    path = expanded(name)
    if (path / "model" / "config.json").is_file() and not (path / "config.json").exists():
        return path / "model"
    return path if path.is_dir() else None


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UserError(f"--out: {out} is a file; name a directory") from None
    try:
        release = acquire(out)
    except UserError as error:
        who = str(error).partition(";")[0]
        raise UserError(f"{who}; wait until it is done, or name another directory with --out") from None
    try:
        yield
    finally:
        release()
        with suppress(OSError):
            out.rmdir()  # empty if a mistake was found before anything was written


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "data"


def _digest(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
