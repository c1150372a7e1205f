"""The prompts of a run, the stream they are drawn from, and the sampler that draws them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dapo_rl.base.load import load_function
from dapo_rl.config import Config
from dapo_rl.data import (
    PromptSet,
    PromptStream,
    ReplayStream,
    SelectedStream,
    Stream,
    held_out_prompts,
    stream_of,
    training_prompts,
)
from dapo_rl.engines.custom import vocabulary_of
from dapo_rl.engines.protocol import Engine, SamplingParams
from dapo_rl.envs.pool import Environments
from dapo_rl.errors import UserError
from dapo_rl.models.load import check_vocabulary
from dapo_rl.rewards.pool import VerifierPool
from dapo_rl.rewards.trainer_state import RewardState
from dapo_rl.rollout.build_conversations import prompt_fits
from dapo_rl.rollout.conversation import Conversations
from dapo_rl.rollout.sampler import Sampler
from dapo_rl.run.inputs import TrainerInputs
from dapo_rl.runs.display import Display
from dapo_rl.train.checkpoint import Part


def prompt_sets(
    config: Config,
    inputs: TrainerInputs,
    tokenizer: Any,
    verifier: VerifierPool,
    environments: Environments | None = None,
) -> tuple[PromptSet, PromptSet | None]:
    fits = prompt_fits(config, environments, tokenizer)
    settings = config.data
    if inputs.has_environment(config):  # which renders the prompts itself, with its tools
        settings = settings.model_copy(update={"chat_template": "never", "system_prompt": None})
    how = (tokenizer, settings, verifier.needs_answer)
    sources = inputs.sources(config)
    train, source = training_prompts(sources["data.train"], *how, fits), sources["data.eval"]
    held_out = None if source is None else held_out_prompts(source, *how, config.eval.prompts, fits)
    if config.sampling.length_stages and inputs.has_environment(config):
        raise UserError("sampling.length_stages: episodes with an environment have one limit; leave it out")
    if train.is_stream and config.sampling.skip_solved_epochs:
        raise UserError(
            "sampling.skip_solved_epochs: a stream without a length has no epochs to leave a prompt out of; set it to "
            "0, or give data.train as a list"
        )
    if config.sampling.source_weights == "informative" and not train.parts:
        raise UserError(
            "sampling.source_weights: informative needs a list of sources with weights; give data.train as a list of "
            "{source: NAME, weight: 1}"
        )
    verifier.check([*train.prompts, *(held_out.prompts if held_out else [])])
    return train, held_out


def build_stream(config: Config, prompts: PromptSet, model: Any, display: Display) -> Stream:
    """The stream that training prompts are drawn from. Prompts read during the run are checked as they come."""
    follows = config.sampling.source_weights == "informative"
    stream = stream_of(prompts, config.seed, config.sampling.prompts_per_step if follows else 0)
    if not isinstance(stream, PromptStream):
        stream.watch(lambda prompt: check_vocabulary(model, int(prompt.token_ids.max())), display.note)
    sampling = config.sampling
    if sampling.selection == "informative":
        stream = SelectedStream(stream, config.seed, sampling.group_size, sampling.prompts_per_step)
    if sampling.replay_hard:
        stream = ReplayStream(stream, config.seed, sampling.replay_hard, sampling.replay_pass_rate)
    return stream


@dataclass(frozen=True, slots=True)
class _LazyPart:
    """Saves a stream with the prompts that the sampler needs again: those of unfinished groups."""

    stream: Stream
    sampler: Sampler

    def save(self, directory: Path) -> None:
        self.stream.save(directory, [prompt.id for prompt in self.sampler.unfinished])

    def load(self, directory: Path) -> None:
        self.stream.load(directory)


def stream_part(stream: Stream, sampler: Sampler) -> Part:
    return stream if isinstance(stream, PromptStream) else _LazyPart(stream, sampler)


def build_sampler(
    config: Config,
    stream: Stream,
    engine: Engine,
    verifier: VerifierPool,
    display: Display,
    model: Any,
    conversations: Conversations | None,
    judged: bool,
) -> Sampler:
    return Sampler(
        stream,
        engine,
        verifier if judged else None,
        SamplingParams.of(config.sampling),
        config.sampling,
        cap=config.sampling_cap,
        seed=config.seed,
        max_error_share=config.reward.max_error_share,
        keep=None if config.sampling.filter is None else load_function(config.sampling.filter),
        masking=config.masking,
        decoupled=config.decouples_rewards,
        on_progress=partial(display.phase, "sampling"),
        on_step=lambda step: tell_progress(verifier, config, step, stream),
        vocabulary=vocabulary_of(model),
        during_updates=config.during_updates,
        conversations=conversations,
    )


def tell_progress(verifier: VerifierPool, config: Config, step: int, stream: Stream | None = None) -> None:
    """Tells the reward functions how many steps are complete; an evaluation, which has no stream, keeps the epoch."""
    epoch = verifier.state.epoch if stream is None else stream.epochs_drawn
    verifier.state = RewardState(step, config.train.steps, epoch)
