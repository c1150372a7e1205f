"""`DAPOTrainer`: the one place that builds a run from its settings."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers.utils import logging

from dapo_rl.algo.registry import TokenLosses
from dapo_rl.base.files import directory_beside
from dapo_rl.base.load import load_function
from dapo_rl.base.quote import one_line
from dapo_rl.config import Config, SourceSettings
from dapo_rl.data import PromptSet, PromptStream, build_prompts, load_rows, once_each
from dapo_rl.data.sources import IN_MEMORY
from dapo_rl.errors import NonFiniteError, UserError
from dapo_rl.models.load import (
    check_context,
    check_tokenizer,
    check_vocabulary,
    compute_dtype,
    describe_model,
    load_model,
    make_savable,
    pad_id,
    save_model,
    slow_dtype,
    to_float32,
)
from dapo_rl.models.lora import add_lora, has_lora, save_adapter
from dapo_rl.rewards import as_verifier, build_verifier
from dapo_rl.rewards.pool import VerifierPool
from dapo_rl.rollout.build import build_engine
from dapo_rl.rollout.engine import SamplingParams, tokens_in_flight
from dapo_rl.rollout.sampler import GroupFilter, Sampler
from dapo_rl.runs.config_file import ConfigFile
from dapo_rl.runs.directory import RunDirectory, new_run_directory, saved_so_far
from dapo_rl.runs.display import Display
from dapo_rl.runs.live import make_display
from dapo_rl.runs.settings import check_same_run
from dapo_rl.runs.trackers import Trackers, check_installed
from dapo_rl.train import loop
from dapo_rl.train.checkpoint import Checkpoint, Checkpoints
from dapo_rl.train.evaluate import Evaluation, evaluate
from dapo_rl.train.finite import not_finite
from dapo_rl.train.own import build_advantages, build_losses
from dapo_rl.train.policy import HFPolicy
from dapo_rl.train.random_state import random_state, restore_random_state, seed_everything
from dapo_rl.train.state import check_state

_NOT_OURS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What restoring raises for a state that has another shape than the one that was saved."""


class DAPOTrainer:
    """Trains a causal language model with verifiable rewards, by DAPO.

        trainer = DAPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=my_reward, train_dataset=dataset,
                              config={"train.steps": 100, "sampling.group_size": 8})
        trainer.train()

    `model` is a name or directory, or a loaded model with its tokenizer as `processing_class`. `reward_funcs` is a
    verifier's name, a function in TRL's or verl's signature, or a list of them. Data sets are anything that
    `data.train` accepts, a list of rows, or a Hugging Face data set. What is not given comes from `config`: a
    `Config`, a recipe's path, or a mapping of settings with nested or dotted keys.
    """

    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        processing_class: Any = None,
        run_dir: str | os.PathLike[str] | None = None,
        display: Display | None = None,
    ) -> None:
        # The display shows progress; a bar for every weight that is loaded or saved would run across it.
        logging.disable_progress_bar()
        self.config = config = _as_config(config, model, reward_funcs, train_dataset, eval_dataset)
        self.display = display or make_display()
        self.run_dir = Path(run_dir or new_run_directory())
        self.stop_requested: Callable[[], bool] = lambda: False

        check_installed(config.log.to)
        self._notes: list[str] = []
        # Before anything starts threads or a GPU: worker processes are forked from what is here now.
        self._verifier = VerifierPool(
            build_verifier(config.reward) if reward_funcs is None else as_verifier(reward_funcs, config.reward),
            config.reward,
        )
        if self._verifier.note:
            self._notes.append(self._verifier.note)
        losses, self._advantages = build_losses(config.algo), build_advantages(config.algo)
        self.model, self.tokenizer = _model_and_tokenizer(model, processing_class, config)
        if converted := to_float32(self.model):
            self._notes.append(converted)
        self._train_prompts = self._prompts(
            train_dataset if train_dataset is not None else config.data.train, "data.train"
        )
        eval_source = eval_dataset if eval_dataset is not None else config.data.eval
        self._eval_prompts = self._prompts(eval_source, "data.eval") if eval_source is not None else None
        if config.eval.every is not None and self._eval_prompts is None:
            raise UserError("eval.every: there is nothing to evaluate on; set data.eval, or give eval_dataset")
        everything = [*self._train_prompts.prompts, *(self._eval_prompts.prompts if self._eval_prompts else [])]
        self._verifier.check(everything)
        check_vocabulary(self.model, max(token for p in everything for token in p.token_ids))
        longest_prompt = max(len(p.token_ids) for p in everything)
        check_context(self.model, longest_prompt, config.sampling.max_new_tokens)

        self._stream = PromptStream(self._train_prompts.prompts, config.seed)
        dtype = compute_dtype(config.model, next(self.model.parameters()).device)
        if slow := slow_dtype(dtype, next(self.model.parameters()).device):
            self._notes.append(slow)
        # What `auto` means here is written down: a resumed run goes on in it, on whatever machine.
        named = config.model.model_copy(update={"dtype": str(dtype).removeprefix("torch.")})
        self.config = config = config.model_copy(update={"model": named})
        longest = longest_prompt + config.sampling.max_new_tokens
        sampled = self.model
        if config.model.lora is not None:
            # An engine samples from plain weights, which it gets with the adapters added in.
            sampled = copy.deepcopy(self.model).requires_grad_(False)
            add_lora(self.model, config.model.lora, config.seed)
        self._engine = build_engine(config.engine, sampled, self.tokenizer, config.sampling, dtype, longest)
        del sampled  # an engine that made a copy of its own does not need this one
        self._sampler = Sampler(
            self._stream,
            self._engine,
            self._verifier,
            SamplingParams.of(config.sampling),
            config.sampling,
            cap=config.sampling_cap,
            seed=config.seed,
            max_error_share=config.reward.max_error_share,
            keep=_group_filter(config.sampling.filter),
            on_progress=lambda done, total: self.display.phase("sampling", done, total),
        )
        self._policy = build_policy(self.model, self.tokenizer, config, longest, losses)
        if self._policy.note:
            self._notes.append(self._policy.note)
        self._description = describe_model(self.model, dtype)
        self._progress = loop.Progress()
        self._checkpoints = Checkpoints(self.run_dir / "checkpoints", config.checkpoint.keep)

    def train(self, resume: bool = False) -> dict[str, Any]:
        """Runs to the last step, or to a requested stop; returns the summary, which is also in the run directory."""
        directory = RunDirectory.open(self.run_dir) if resume else RunDirectory.prepare(self.run_dir)
        with directory.locked():
            seed_everything(self.config.seed)
            if resume:
                self._resume(directory)
            else:
                directory.begin(self.config)
            return self._train(directory)

    def _train(self, directory: RunDirectory) -> dict[str, Any]:
        trackers = Trackers(
            self.config.log.to, directory.path, self.config.resolved(), self._progress.step, self.display.note
        )
        run = loop.Run(
            config=self.config,
            engine=self._engine,
            sampler=self._sampler,
            policy=self._policy,
            advantages=self._advantages,
            evaluate=self._evaluate,
            save=self._save_checkpoint,
            checkpoints=self._checkpoints,
            directory=directory,
            display=self.display,
            progress=self._progress,
            stop_requested=lambda: self.stop_requested(),
            track=trackers.log,
        )
        with self.display:
            self.display.start(self.config.train.steps, self.config, self._description, self._progress.step)
            for prompts in (self._train_prompts, self._eval_prompts):
                if prompts is not None and (report := prompts.report()):
                    self.display.note(report)
            for note in self._notes:
                self.display.note(note)
            try:
                loop.train(run)
            finally:
                trackers.close()
            finished = self._progress.step == self.config.train.steps
            if finished:
                self._save_result(directory.model_path)
            summary = self._write_results(directory, finished)
            self.display.finish(summary)
        return summary

    def evaluate(self) -> dict[str, float]:
        """Accuracy and its companions on the held-out prompts."""
        evaluation = self._evaluate()
        if evaluation is None:
            raise UserError("there is nothing to evaluate on: give eval_dataset, or set data.eval")
        return evaluation.metrics()

    def save_model(self, path: str | os.PathLike[str]) -> None:
        """The model and its tokenizer in Hugging Face format; with `model.lora.save: adapter`, in peft's."""
        lora = self.config.model.lora
        if lora is not None and lora.save == "adapter":
            save_adapter(self.model, self.tokenizer, lora, self.config.model.name, path)
        else:
            save_model(self.model, self.tokenizer, path)

    def _prompts(self, source: Any, key: str) -> PromptSet:
        rows = load_rows(source, key=key)
        return build_prompts(rows, self.tokenizer, self.config.data, self._verifier.needs_answer)

    def _evaluate(self) -> Evaluation | None:
        if self._eval_prompts is None:
            return None
        settings = self.config.eval
        return evaluate(
            self._engine,
            self._verifier,
            once_each(self._eval_prompts.prompts)[: settings.prompts],
            SamplingParams(
                max_new_tokens=self.config.sampling.max_new_tokens,
                temperature=settings.temperature,
                top_p=settings.top_p,
                stop=self.config.sampling.stop,
            ),
            settings.samples,
            self.config.seed,
            on_progress=lambda done, total: self.display.phase("evaluating", done, total),
        )

    def _save_result(self, path: Path) -> None:
        """The trained model, whole or not there."""
        if path.is_file():
            raise UserError(f"{path}: the model is saved as a directory, and there is a file of that name")
        rest = "checkpoints are untouched, and --resume goes on from the last"
        try:
            with directory_beside(path) as draft:
                self.save_model(draft)
        except OSError as error:
            raise UserError(f"{path}: the model cannot be saved: {error.strerror}; {rest}") from error
        except UserError as error:
            raise UserError(f"{str(error).replace(str(draft), str(path))}; {rest}") from error

    def _save_checkpoint(self) -> Checkpoint:
        optimizer = self._policy.state()
        if name := not_finite(optimizer):
            raise NonFiniteError(f"the state of the optimizer is not finite, in {name}")
        return self._checkpoints.save(
            self._progress.step,
            self.model,
            self.tokenizer,
            optimizer,
            {
                "progress": loop.progress_state(self._progress),
                "stream": self._stream.state(),
                "sampler": self._sampler.state(),
                "engine": self._engine.state(),
                "random": random_state(),
                "log": RunDirectory(self.run_dir).metrics_length(),
            },
            self.config,
        )

    def _resume(self, directory: RunDirectory) -> None:
        """Puts everything back as the newest checkpoint has it. Nothing is written before all of it is known good."""
        before = (self._checkpoints.settings() or ConfigFile.read(directory.config_path)).over(self.config)
        check_same_run(self.run_dir, before, self.config)
        checkpoint, damaged = self._checkpoints.newest_sound()
        for damage in damaged:
            self.display.note(f"damaged, going back to the one before: {damage}")
        if checkpoint is None:
            directory.check_log_is_short(before.checkpoint_every)
            self.display.note(f"{self.run_dir}: no checkpoint yet; starting from the first step")
            directory.forget_after(0)
            directory.write_config(self.config)
            return
        if checkpoint.step > self.config.train.steps:
            raise UserError(
                f"train.steps: {self.config.train.steps} is below step {checkpoint.step}, which {self.run_dir} has "
                "reached; name more, or start a new run"
            )
        optimizer, state = checkpoint.load(self.model)
        self._restore(checkpoint, optimizer, state)
        if note := directory.forget_after(checkpoint.step, state["log"]):
            self.display.note(note)
        directory.write_config(self.config)
        self.display.note(f"resumed from {checkpoint.path}")

    def _restore(self, checkpoint: Checkpoint, optimizer: dict[str, Any], state: dict[str, Any]) -> None:
        remedy = f"remove {checkpoint.path} to go on from the checkpoint before it"
        try:
            self._policy.restore(optimizer)
        except _NOT_OURS as error:
            raise UserError(f"{checkpoint.path}: is of another optimizer: {one_line(error)}; {remedy}") from error
        try:
            check_state(state, checkpoint.step, self.config, self.model.get_input_embeddings().weight.shape[0])
            self._stream.restore(state["stream"])
            self._sampler.restore(state["sampler"])
            self._engine.restore(state["engine"])
            self._progress = loop.progress_from(state["progress"])
            restore_random_state(state["random"])
        except _NOT_OURS as error:
            where = checkpoint.path / "state.json"
            raise UserError(f"{where}: is not the state of this run: {one_line(error)}; {remedy}") from error
        self._engine.load_weights(self._engine.version, self._policy.weights())

    def _write_results(self, directory: RunDirectory, finished: bool) -> dict[str, Any]:
        progress, config = self._progress, self.config
        paths = {"summary": directory.summary_path, "report": directory.report_path}
        if finished:
            paths["model"] = directory.model_path
        accuracies = progress.evaluations
        summary = {
            "finished": finished,
            "steps": progress.step,
            "seed": config.seed,
            "accuracy_before": accuracies[0][1] if accuracies and accuracies[0][0] == 0 else None,
            "accuracy_after": accuracies[-1][1] if accuracies and accuracies[-1][0] > 0 else None,
            "evaluations": [{"step": step, "accuracy": accuracy} for step, accuracy in accuracies],
            "wall_seconds": progress.wall_seconds,
            "tokens": progress.ledger.columns(self._sampler.carried_tokens, tokens_in_flight(self._engine)),
            "data": {
                "train_prompts": len(self._train_prompts.prompts),
                "too_long": self._train_prompts.too_long,
                "bad_rows": len(self._train_prompts.bad),
            },
            "metrics": progress.metrics,
            "paths": {name: str(path) for name, path in paths.items()},
        }
        from dapo_rl.runs.plots import draw_report  # matplotlib takes a second to import

        directory.write_summary(summary)
        metrics = directory.read_metrics()
        with saved_so_far(directory.report_path):
            draw_report(metrics, accuracies, directory.report_path, title=directory.path.name)
        return summary


def build_policy(
    model: Any, tokenizer: Any, config: Config, longest: int = 0, losses: TokenLosses | None = None
) -> HFPolicy:
    """The policy that a run trains, with its optimizer; `longest` is its longest sample, where that is known."""
    return HFPolicy(
        model,
        pad_id=pad_id(tokenizer),
        temperature=config.sampling.temperature,
        algo=config.algo,
        train=config.train,
        norm_length=config.norm_length,
        token_budget=config.token_budget,
        fill_memory=config.train.token_budget is None,
        longest=longest,
        dtype=compute_dtype(config.model, next(model.parameters()).device),
        reference=_reference(model) if config.algo.kl_coef > 0 else None,
        losses=losses,
    )


def _reference(model: Any) -> Any:
    """The model as it is now, to stay so; one with adapters has it inside."""
    return model if has_lora(model) else copy.deepcopy(model).requires_grad_(False)


def _as_config(
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None,
    model: Any,
    reward_funcs: Any,
    train_dataset: Any,
    eval_dataset: Any,
) -> Config:
    """The settings, with what was handed over beside them named in them, so that the run directory tells the truth."""
    if isinstance(config, Mapping):
        config = Config.build(config)
    elif not isinstance(config, Config):
        config = Config.load(Path(config) if config is not None else None)
    given: dict[str, dict[str, Any]] = {"model": {}, "reward": {}, "data": {}}
    if name := model if isinstance(model, str | os.PathLike) else getattr(model, "name_or_path", None):
        given["model"]["name"] = os.fspath(name)
    if reward_funcs is not None:
        functions = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        given["reward"]["verifier"] = ", ".join(f if isinstance(f, str) else _name_of(f) for f in functions)
    for key, source in (("train", train_dataset), ("eval", eval_dataset)):
        if source is not None:
            named = os.fspath(source) if isinstance(source, os.PathLike) else source
            given["data"][key] = named if isinstance(named, str | SourceSettings) else IN_MEMORY
    sections = {section: getattr(config, section).model_copy(update=values) for section, values in given.items()}
    return config.model_copy(update=sections)


def _name_of(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', type(function).__name__)}"


def _model_and_tokenizer(model: Any, tokenizer: Any, config: Config) -> tuple[Any, Any]:
    if model is None or isinstance(model, str | os.PathLike):
        model, loaded = load_model(config.model)
        return model, tokenizer or loaded
    model.eval()  # dropout would make the policy that samples another one than the policy that is trained
    if tokenizer is None:
        raise UserError("a loaded model needs its tokenizer: pass processing_class=tokenizer")
    check_tokenizer(tokenizer, config.model.name)
    make_savable(model)
    return model, tokenizer


def _group_filter(spec: str | None) -> GroupFilter | None:
    return load_function(spec) if spec is not None else None
