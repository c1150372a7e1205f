"""Builds a run from its settings and the caller's inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from dapo_rl.cluster.environments import DistributedEnvironments
from dapo_rl.config import Config
from dapo_rl.data import PromptSet, once_each
from dapo_rl.data.overlap import check_apart, shared_prompts
from dapo_rl.data.sources import check_there
from dapo_rl.engines.custom import vocabulary_of
from dapo_rl.engines.protocol import SamplingParams
from dapo_rl.envs.build import build_environment, gives_rewards
from dapo_rl.envs.pool import Environments
from dapo_rl.envs.python_tool import uncontained
from dapo_rl.models.load import compute_dtype, describe_model, saved_dtype, slow_dtype, stored_dtype, to_float32
from dapo_rl.rewards import as_verifier, build_verifier
from dapo_rl.rewards.pool import VerifierPool
from dapo_rl.rewards.trainer_state import SavedRewardState
from dapo_rl.rollout.build_conversations import build_conversations, untold_tools
from dapo_rl.rollout.conversation import Conversations
from dapo_rl.rollout.pending_steps import check_nothing
from dapo_rl.rollout.policy_answers import longest_question, use_as_judge
from dapo_rl.rollout.reward_model import load_reward_models
from dapo_rl.rollout.sampler import Sampler
from dapo_rl.run.backend import Backend, LoadedModel, RayBackend, Workers
from dapo_rl.run.inputs import TrainerInputs, resolve
from dapo_rl.run.model import longest_sample, model_and_tokenizer, with_lora
from dapo_rl.run.prompts import build_sampler, build_stream, prompt_sets, stream_part, tell_progress
from dapo_rl.run.teacher import build_teacher
from dapo_rl.runs.display import EVALUATING, Display
from dapo_rl.runs.trackers import check_installed
from dapo_rl.train.checkpoint import Part
from dapo_rl.train.coefficients import Coefficients
from dapo_rl.train.custom import Advantages, build_advantages, build_losses
from dapo_rl.train.disk_space import DiskNeed
from dapo_rl.train.evaluate import Evaluation, evaluate
from dapo_rl.train.random_state import RandomState
from dapo_rl.train.teacher import Teacher
from dapo_rl.train.trainer_state import Progress
from dapo_rl.types import Prompt, Trajectory, Verdict


@dataclass(frozen=True, slots=True)
class Run(Workers):
    """The parts of a run. No part refers to the run, so dropping the last reference frees all of them."""

    config: Config
    model: Any
    tokenizer: Any
    verifier: VerifierPool
    train_prompts: PromptSet
    eval_prompts: PromptSet | None
    sampler: Sampler
    conversations: Conversations | None
    """With an environment."""
    judge: VerifierPool | None
    """The verifier; None if the environment gives all rewards."""
    teacher: Teacher | None
    advantages: Advantages
    coefficients: Coefficients | None
    """Those of the loss that change during the run."""
    progress: Progress
    disk: DiskNeed
    parts: tuple[Part, ...]
    """The parts of a checkpoint, except the log."""
    description: str
    notes: tuple[str, ...]
    """Notes for the user, shown before the first step."""
    resources: ExitStack
    """Closes the engine, the ranks, the connection to Ray and the verifier."""

    @property
    def stopped(self) -> str:
        """Why a server that the run needs has stopped it; empty if none has."""
        served = None if self.teacher is None else self.teacher.served
        return self.verifier.stopped or ("" if served is None else served.stopped)

    @property
    def learners(self) -> tuple[Part, ...]:
        """The parts that change by updates alone."""
        return (self.policy,) if self.critic is None else (self.policy, self.critic)

    def evaluate(self, display: Display, check: Callable[[], None] = check_nothing) -> Evaluation | None:
        """Samples and judges the held-out prompts; None if there are none. `check` is called every fraction of a
        second, and raises to abandon the evaluation."""
        if self.eval_prompts is None:
            return None
        settings, sampling = self.config.eval, self.config.sampling
        self.sampler.drain()
        tell_progress(self.verifier, self.config, self.progress.step)
        return evaluate(
            self.engine,
            self.judge,
            once_each(self.eval_prompts.prompts, settings.prompts),
            SamplingParams(
                max_new_tokens=sampling.max_new_tokens,
                temperature=settings.temperature,
                top_p=settings.top_p,
                stop=sampling.stop,
            ),
            settings.samples,
            self.config.seed,
            on_progress=lambda done, total: display.phase(EVALUATING, done, total),
            check=check,
            conversations=self.conversations,
        )

    def close(self) -> None:
        """Stops the processes that the parts have started. A second call does nothing."""
        self.resources.close()


def build_run(config: Config, inputs: TrainerInputs, display: Display) -> Run:
    """Builds a run. If this raises, everything built so far is closed."""
    check_installed(config.log.trackers)
    inputs.check_data(config)
    backend = (Backend if config.cluster.backend is None else RayBackend)(config, inputs)
    with ExitStack() as resources:
        # The verifier forks its workers from this process, so it must come before anything that starts threads or
        # initialises a GPU. Its settings do not depend on `resolve`.
        verifier = resources.enter_context(_verifier(config, inputs))
        environments = _start(backend, config, inputs, display, resources)
        config = resolve(config, inputs, backend.device())
        if inputs.has_environment(config):  # settings that fit one turn may not fit the tools that were passed
            config.check_conflicts()
        build_losses(config.algo)  # the policy loads it again: a model may take minutes to load
        advantages = build_advantages(config.algo, config.overlong.factor)
        sources = inputs.sources(config)
        for key, source in sources.items():
            check_there(source, key)
        check_apart(*sources.values())
        load_reward_models(verifier, config, backend.device())
        model, tokenizer = model_and_tokenizer(config, inputs, backend.device(), backend.load)
        config = with_lora(config, inputs, model)
        stored = stored_dtype(config.model.name) if inputs.names_a_model else model.dtype
        notes = [*inputs.notes, verifier.note, to_float32(model)]
        train_prompts, eval_prompts = prompt_sets(config, inputs, tokenizer, verifier, environments)
        notes.append(shared_prompts(train_prompts, eval_prompts, tuple(sources.values())))
        device = backend.device()
        has_environment = environments is not None
        longest = longest_sample(config, model, train_prompts, eval_prompts, has_environment=has_environment)
        loaded = LoadedModel(
            model=model,
            tokenizer=tokenizer,
            longest=longest,
            context=longest_question(verifier, tokenizer, config, model, longest),
            dtype=compute_dtype(config.model, device),
            save_dtype=saved_dtype(config.model, stored),
        )
        teacher = build_teacher(config, model, tokenizer, train_prompts, longest, has_environment=has_environment)
        workers = backend.build(config, loaded, resources, display)
        policy, critic = workers.policy, workers.critic
        use_as_judge(verifier, workers.engine, tokenizer, config, loaded.context)
        stream = build_stream(config, train_prompts, model, display)
        conversations = None if environments is None else _conversations(config, inputs, environments, loaded)
        judged = inputs.judged_by_verifier(config)
        sampler = build_sampler(config, stream, workers.engine, verifier, display, model, conversations, judged)
        progress = Progress()
        learners: tuple[Part, ...] = (policy,) if critic is None else (policy, critic)
        coefficients = Coefficients.of(config.algo)
        changing = () if coefficients is None else (coefficients,)
        reward_state = SavedRewardState(verifier, config.train.steps)
        notes += [slow_dtype(loaded.dtype, device), workers.plan.note, policy.note]
        notes += [each.save_note for each in (policy, critic) if each is not None and each.save_note][:1]
        notes += [_not_contained(config), untold_tools(config, environments, tokenizer)]
        return Run(
            engine=workers.engine,
            policy=policy,
            critic=critic,
            plan=workers.plan,
            restart=workers.restart,
            config=config,
            model=model,
            tokenizer=tokenizer,
            verifier=verifier,
            train_prompts=train_prompts,
            eval_prompts=eval_prompts,
            sampler=sampler,
            conversations=conversations,
            judge=verifier if judged else None,
            teacher=teacher,
            advantages=advantages,
            coefficients=coefficients,
            progress=progress,
            disk=DiskNeed.of(config, model, loaded.save_dtype),
            parts=(*learners, stream_part(stream, sampler), sampler, progress, reward_state, RandomState(), *changing),
            description=describe_model(model, loaded.dtype, backend.where),
            notes=tuple(note for note in notes if note),
            resources=resources.pop_all(),
        )


def _verifier(config: Config, inputs: TrainerInputs) -> VerifierPool:
    functions = inputs.reward_funcs
    if not inputs.judged_by_verifier(config):
        return VerifierPool(_unused, config.reward.model_copy(update={"workers": 0}))
    if functions is None:
        return VerifierPool(build_verifier(config.reward), config.reward)
    return VerifierPool(as_verifier(functions, config.reward, inputs.reward_weights), config.reward)


def _start(
    backend: Backend, config: Config, inputs: TrainerInputs, display: Display, resources: ExitStack
) -> Environments | None:
    """Starts the backend and the environments. Those of this host are forked from it, so they come first."""
    build = partial(build_environment, config, inputs.tools, inputs.environment_factory)
    on_nodes = config.cluster.backend is not None and config.env.workers_per_node is not None
    environments = None if on_nodes else build()
    if environments is not None:
        resources.callback(environments.close)
    backend.start(resources)
    if on_nodes:
        make = partial(DistributedEnvironments, restarts=config.cluster.restarts, note=display.note)
        if (environments := build(make=make)) is not None:
            resources.callback(environments.close)
    return environments


def _conversations(
    config: Config, inputs: TrainerInputs, environments: Environments, loaded: LoadedModel
) -> Conversations:
    return build_conversations(
        config,
        environments,
        loaded.tokenizer,
        context=loaded.longest,
        max_new_tokens=config.sampling.max_new_tokens,
        rewards=gives_rewards(config, inputs.environment_factory),
        vocabulary=vocabulary_of(loaded.model),
    )


def _unused(prompt: Prompt, samples: Sequence[Trajectory]) -> list[Verdict]:
    """In place of a verifier, where the environment gives the rewards."""
    raise AssertionError


def _not_contained(config: Config) -> str | None:
    """A note if code that the policy writes can do harm."""
    if "python" not in config.env.tools or not (open_to := uncontained()):
        return None
    return f"env.tools: the python tool runs the policy's code, which is not kept from: {', '.join(open_to)}"
