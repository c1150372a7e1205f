"""`DAPOTrainer`: builds a run, trains it or resumes it, and closes it."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never, Self

import torch
from transformers.utils import logging

from dapo_rl.base.quote import shown
from dapo_rl.base.saved import not_of_this_run
from dapo_rl.build import Given, Run, build_run, tell_progress
from dapo_rl.cluster.policy import RankedPolicy
from dapo_rl.cluster.ray_watch import if_ray_ends
from dapo_rl.cluster.restarts import Restarts
from dapo_rl.config import Config, SourceSettings
from dapo_rl.data import once_each
from dapo_rl.data.rows import Rows
from dapo_rl.data.sources import as_sources, open_rows
from dapo_rl.data.splits import choose_splits
from dapo_rl.engines.protocol import SamplingParams
from dapo_rl.errors import UserError
from dapo_rl.models.push import push_folder, write_card
from dapo_rl.moving.grpo_script import refuse_arguments, refuse_models, script_settings
from dapo_rl.moving.one_process import OneProcess
from dapo_rl.rollout.episodes import check_nothing
from dapo_rl.runs.config_file import ConfigFile
from dapo_rl.runs.directory import NOTHING, LogLength, RunDirectory, new_run_directory
from dapo_rl.runs.display import EVALUATING, Display
from dapo_rl.runs.error_file import write_failure
from dapo_rl.runs.interrupts import Interrupts
from dapo_rl.runs.live_display import make_display
from dapo_rl.runs.notes import NotedDisplay, Notes
from dapo_rl.runs.resume import check_same_run
from dapo_rl.runs.trackers import Trackers
from dapo_rl.runs.write_errors import Unsaved
from dapo_rl.train import loop
from dapo_rl.train.arguments import check_arguments, check_path, check_resume, check_text, refuse_unknown
from dapo_rl.train.callback_args import CallbackArguments
from dapo_rl.train.callbacks import Callbacks
from dapo_rl.train.checkpoint import Checkpoints
from dapo_rl.train.evaluate import Evaluation, evaluate
from dapo_rl.train.progress import FILE as PROGRESS
from dapo_rl.train.progress import Progress
from dapo_rl.train.random_state import seed_everything
from dapo_rl.train.results import MODEL, save_result, write_results
from dapo_rl.train.trl_names import with_trl_names

if TYPE_CHECKING:
    from transformers.trainer_callback import TrainerControl, TrainerState


RESUMES, TRL_RESUMES = "train(resume=True)", "train(resume_from_checkpoint=True)"
"""How a program continues a run, and how a script for TRL does."""


class DAPOTrainer:
    """Trains a causal language model with verifiable rewards, by DAPO.

        with DAPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=my_reward, train_dataset=dataset,
                         config={"train.steps": 100, "sampling.group_size": 8}) as trainer:
            trainer.train()

    `model` is a name or directory, or a loaded model, also a `PeftModel`, with its tokenizer as `processing_class`.
    `reward_funcs` is a verifier's name, a function in TRL's or verl's signature, or a list of them. Data sets are
    anything that `data.train` accepts, a list of rows, or a Hugging Face data set. `engine` is an engine, or a class or
    function that makes one, called as `Class(model, tokenizer, settings, dtype=dtype, longest=longest)`. Arguments that
    are not given come from `config`: a `Config`, the path or name of a recipe, or a mapping of settings with nested or
    dotted keys. `callbacks` are transformers' `TrainerCallback`s, or classes of them (docs/callbacks.md).

    The positional arguments are those of TRL's `GRPOTrainer`. `args` is a `GRPOConfig`; `config` overrides it. See
    docs/from-trl.md.

    `close`, or the end of the `with` block, stops the verifier's processes and frees the model's memory; so does
    dropping the last reference.
    """

    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Any = None,
        optimizers: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        *,
        config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        engine: Any = None,
        run_dir: str | os.PathLike[str] | None = None,
        display: Display | None = None,
        **unknown: Never,
    ) -> None:
        refuse_unknown(DAPOTrainer, unknown, "DAPOTrainer")
        check_arguments(
            {
                "model": model,
                "config": config,
                "engine": engine,
                "run_dir": run_dir,
                "display": display,
            }
        )
        # transformers' progress bars for loading and saving weights would disturb the display.
        logging.disable_progress_bar()
        refuse_arguments(
            {
                "reward_processing_classes": reward_processing_classes,
                "optimizers": optimizers,
                "quantization_config": quantization_config,
                "tools": tools,
                "rollout_func": rollout_func,
                "environment_factory": environment_factory,
            }
        )
        refuse_models(reward_funcs, processing_class)
        check_arguments({"processing_class": processing_class})
        count = partial(_count_prompts, train_dataset)
        script = script_settings(args, config, reward_funcs, count, has_data=train_dataset is not None)
        train_dataset, eval_dataset, chosen = choose_splits(train_dataset, eval_dataset, script.evaluates)
        self.args = args
        self._pushes = script.pushes
        self.display = NotedDisplay(display or make_display())
        self.run_dir = Path(run_dir or script.run_dir or new_run_directory())
        self.stop_requested: Callable[[], bool] = lambda: False
        given = Given(
            model,
            processing_class,
            reward_funcs,
            train_dataset,
            eval_dataset,
            engine,
            script.reward_weights,
            peft_config,
            (*script.notes, *([chosen] if chosen else [])),
            to_device=args is not None,
        )
        self._built: Run | None = build_run(script.config, given, self.display)
        self.config = self._built.config
        self._trackers: Trackers | None = None
        # The `args` of every hook: the caller's GRPOConfig, or these.
        self._callbacks = _callbacks(self._built, args or CallbackArguments.of(self.config, self.run_dir))
        callbacks = () if callbacks is None else callbacks
        try:
            for callback in callbacks if isinstance(callbacks, list | tuple) else [callbacks]:
                self._callbacks.add(callback)
            self._callbacks.init_end()
        except BaseException:
            self.close()
            raise

    @property
    def model(self) -> Any:
        return self._run.model

    @property
    def tokenizer(self) -> Any:
        return self._run.tokenizer

    @property
    def accelerator(self) -> OneProcess:
        """What scripts use of accelerate: printing, and whether this is the main process."""
        return OneProcess()

    @property
    def state(self) -> TrainerState:
        """transformers' `TrainerState`; its steps are rollout steps."""
        return self._callbacks.state

    @property
    def control(self) -> TrainerControl:
        return self._callbacks.control

    def add_callback(self, callback: Any) -> None:
        """Adds a `TrainerCallback`, or an instance of the class."""
        self._callbacks.add(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Removes a callback, or the first of a class, and returns it; None if there is none."""
        return self._callbacks.pop(callback)

    def remove_callback(self, callback: Any) -> None:
        self._callbacks.pop(callback)

    def log(self, logs: Mapping[str, Any]) -> None:
        """Adds metrics of your own to `state.log_history`, to the trackers of a run in progress, and to `on_log`.

        They are not in metrics.jsonl, which has one line per step.
        """
        if not isinstance(logs, Mapping):
            raise UserError(f"log: expected a mapping of metrics, got {shown(logs)}")
        if self._trackers is not None:
            self._trackers.log(self.state.global_step, {k: v for k, v in logs.items() if isinstance(v, int | float)})
        self._callbacks.log(logs)

    def train(
        self,
        resume: str | bool | None = False,
        resume_from_checkpoint: str | bool | None = None,
        **unknown: Never,
    ) -> dict[str, Any]:
        """Trains to the last step, or until a stop is requested. Returns the summary, which the run directory also
        contains.

        Ctrl-C saves and raises KeyboardInterrupt, also in the middle of a step; an update in progress is finished
        first. A second Ctrl-C raises it at once. In both cases `train(resume=True)` continues the run, and so does
        `train(resume_from_checkpoint=True)`.
        """
        run = self._run
        refuse_unknown(self.train, unknown, "train")
        check_resume("resume", resume)
        check_resume("resume_from_checkpoint", resume_from_checkpoint)
        resume = _resumes(resume or resume_from_checkpoint, self.run_dir)
        if not resume:
            run.disk.check(run.config, self.run_dir, 0)
        directory = RunDirectory.open(self.run_dir) if resume else RunDirectory.prepare(self.run_dir, self._again)
        unsaved = Unsaved(self.display.note)
        checkpoints = Checkpoints(directory.checkpoints_path, run.config.checkpoint.keep, self.display.note, unsaved)
        log = LogLength(directory)
        with directory.locked(), self._noting(directory) as notes:
            seed_everything(run.config.seed)
            if resume:
                _resume(run, directory, checkpoints, log, self.display)
                checkpoints.remove_old()  # `checkpoint.keep` may be smaller now, to make room
                run.disk.check(run.config, directory.path, run.progress.step)
            else:
                directory.begin(run.config)
            notes.begin()
            self._callbacks.follow(directory.read_metrics)
            script = self.args is not None
            again = f"output_dir={{}} and call {TRL_RESUMES}" if script else f"run_dir={{}} and call {RESUMES}"
            with (
                Interrupts(directory, self.display, again) as interrupts,
                _recorded(directory, run.progress, self.display),
                checkpoints,
            ):
                summary = self._train(run, directory, checkpoints, log, interrupts, unsaved)
                unsaved.raise_errors(_what_there_is(directory, checkpoints, summary))
                if interrupts.requested and not summary["finished"]:
                    raise KeyboardInterrupt
        if self._pushes and summary["finished"]:
            self.push_to_hub()
        return summary

    def evaluate(self, **unknown: Never) -> dict[str, float]:
        """Accuracy and related metrics on the held-out prompts, under the names here (`eval/accuracy`) and TRL's."""
        refuse_unknown(self.evaluate, unknown, "evaluate")
        evaluation = _evaluate(self._run, self.display)
        if evaluation is None:
            raise UserError("there is nothing to evaluate on: give eval_dataset, or set data.eval")
        metrics = evaluation.metrics()
        self._callbacks.evaluated(metrics)
        return with_trl_names(metrics)

    def save_model(self, path: str | os.PathLike[str] | None = None, **unknown: Never) -> None:
        """Saves the model and tokenizer in Hugging Face format, or in PEFT format with `model.lora.save: adapter`; by
        default in the run directory's folder model/."""
        refuse_unknown(self.save_model, unknown, "save_model")
        check_path("path", path)
        self._run.policy.export(RunDirectory(self.run_dir).model_path if path is None else path)

    @property
    def hub_model_id(self) -> str:
        """The repository that `push_to_hub` uploads to."""
        return getattr(self._callbacks.args, "hub_model_id", None) or self.run_dir.resolve().name

    def push_to_hub(
        self,
        repo_id: str | None = None,
        commit_message: str = "End of training",
        *,
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        dataset_name: str | None = None,
        tags: Sequence[str] = (),
    ) -> str:
        """Uploads the model and tokenizer to the Hugging Face hub, as `save_model` saves them, with a model card.
        Returns the address of the commit.

        `repo_id` is `owner/name`, or a name of your own; by default `hub_model_id` of a GRPOConfig, or the name of the
        run directory. The repository is created if it does not exist, public unless `private` or your organisation
        says otherwise.
        """
        for name, value in (("repo_id", repo_id), ("commit_message", commit_message), ("revision", revision)):
            check_text(name, value)
        self._callbacks.push_begin()
        args = self._callbacks.args
        name = repo_id or self.hub_model_id
        with TemporaryDirectory(prefix="dapo-push-") as folder:
            self.save_model(folder)
            write_card(Path(folder), self.config.model.name, dataset_name, tags)
            return push_folder(
                Path(folder),
                name,
                commit_message,
                private=getattr(args, "hub_private_repo", None) if private is None else private,
                token=token or getattr(args, "hub_token", None),
                revision=revision or getattr(args, "hub_revision", None),
            )

    def close(self) -> None:
        """Stops all processes of the run, and frees the model unless the caller holds a reference to it.

        A closed trainer cannot be used again; calling `close` twice is safe.
        """
        run, self._built = self._built, None
        if run is None:
            return
        on_gpu = next(run.model.parameters()).is_cuda
        self._callbacks.release()
        run.close()
        del run
        if on_gpu:
            gc.collect()  # libraries may have left tensors in reference cycles
            torch._C._cuda_clearCublasWorkspaces()  # cuBLAS keeps one for each stream
            torch.cuda.empty_cache()

    def end(self) -> None:
        """The same as `close`, under transformers' name."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _again(self) -> str:
        """What to do about a run directory that already contains a run."""
        if self.args is None:
            return f"resume it with {RESUMES} (on the command line: --resume), or name another run_dir"
        return f"resume it with {TRL_RESUMES}, or name another output_dir"

    @property
    def _run(self) -> Run:
        if self._built is None:
            raise RuntimeError("the trainer is closed; make a new one")
        return self._built

    def _train(
        self,
        run: Run,
        directory: RunDirectory,
        checkpoints: Checkpoints,
        log: LogLength,
        interrupts: Interrupts,
        unsaved: Unsaved,
    ) -> dict[str, Any]:
        config, progress, display = run.config, run.progress, self.display

        def save() -> None:
            checkpoints.start(progress.step, (*run.parts, log), config, unchanged=run.learners)

        trackers = Trackers(config.log.to, directory.path, config.resolved(), progress.step, display.note)
        self._trackers = trackers
        training = loop.Training(
            config=config,
            engine=run.engine,
            sampler=run.sampler,
            policy=run.policy,
            advantages=run.advantages,
            evaluate=partial(_evaluate, run, display),
            save=save,
            checkpoints=checkpoints,
            directory=directory,
            display=display,
            progress=progress,
            unsaved=unsaved,
            stop_requested=lambda: interrupts.requested or self.stop_requested(),
            track=trackers.log,
            callbacks=self._callbacks,
            turns=run.plan.turns,
            critic=run.critic,
        )
        recover = self._restarts(run, directory, checkpoints, log)
        training = replace(training, recover=recover)
        with display:
            display.start(config.train.steps, config, run.description, progress.step)
            for prompts in (run.train_prompts, run.eval_prompts):
                if prompts is not None and (report := prompts.report()):
                    display.note(report)
            for note in (*run.notes, *self._callbacks.never_called()):
                display.note(note)
            try:
                loop.train(training)
            except Exception:
                with suppress(Exception):  # the error that ends the run is the one to show
                    self._write_results(run, directory, unsaved, failed=True)
                raise
            finally:
                self._trackers = None
                trackers.close()
            if progress.is_done(config.train.steps):
                # Without the model, the board still needs its tokenizer to show rollouts.
                keep = self.save_model if config.checkpoint.last else run.tokenizer.save_pretrained
                with unsaved.at_the_end(MODEL):
                    loop.with_restarts(partial(save_result, keep, directory.model_path), recover)
            with unsaved.trying("metrics.jsonl", "some lines are missing"):
                directory.finish_log()
            summary = self._write_results(run, directory, unsaved)
            display.finish(summary)
        return summary

    def _write_results(
        self, run: Run, directory: RunDirectory, unsaved: Unsaved, failed: bool = False
    ) -> dict[str, Any]:
        sampler = run.sampler
        # What a failed step has sampled is in the ledger.
        waiting, in_flight = (0, 0) if sampler.has_failed else (sampler.carried_tokens, sampler.begun_tokens)
        return write_results(
            directory,
            run.config,
            run.progress,
            run.train_prompts,
            unsaved,
            waiting=waiting,
            in_flight=in_flight,
            so_far=sampler.so_far,
            failed=failed,
        )

    def _restarts(
        self, run: Run, directory: RunDirectory, checkpoints: Checkpoints, log: LogLength
    ) -> loop.Recover | None:
        """How the run recovers from the loss of a rank, if it has ranks."""
        policy = run.policy
        if not isinstance(policy, RankedPolicy):
            return None

        def resume() -> None:
            run.engine.receive(0, policy.weights())
            _resume(run, directory, checkpoints, log, self.display)
            self._callbacks.follow(directory.read_metrics)

        others = [part for part in run.parts if part not in run.learners]
        return Restarts(policy, others, checkpoints, run.config.cluster.restarts, resume, self.display.note)

    @contextmanager
    def _noting(self, directory: RunDirectory) -> Iterator[Notes]:
        """Records the notes that the display shows meanwhile."""
        progress = self._run.progress
        self.display.notes = Notes(directory.path, step=lambda: progress.current)
        try:
            yield self.display.notes
        finally:
            self.display.notes = None


def _callbacks(run: Run, args: Any) -> Callbacks:
    config = run.config
    return Callbacks(
        args,
        {"model": run.model, "processing_class": run.tokenizer, "optimizer": run.policy.optimizer},
        prompts=None if run.train_prompts.is_stream else len(run.train_prompts.prompts),
        steps=config.train.steps,
        eval_steps=config.eval.every,
        save_steps=config.checkpoint_every,
    )


def _what_there_is(directory: RunDirectory, checkpoints: Checkpoints, summary: Mapping[str, Any]) -> str:
    """What a run that could not write everything has written."""
    there = [f"the model is in {directory.model_path}"] if "model" in summary["paths"] else []
    latest = checkpoints.latest()
    there.append(f"--resume continues from {latest.path}" if latest else "there is no checkpoint to resume from")
    return ", and ".join(there)


@contextmanager
def _recorded(directory: RunDirectory, progress: Progress, display: Display) -> Iterator[None]:
    """Leaves error.json for an exception that ends the run, and for the end of Ray. Ctrl-C is not one: it stops the
    run."""

    def record(error: Exception) -> None:
        write_failure(directory.path, progress.current, error)

    def without_ray(error: Exception) -> None:
        record(error)
        display.__exit__(None, None, None)

    try:
        with if_ray_ends(without_ray):
            yield
    except Exception as error:
        record(error)
        raise


def _count_prompts(train_dataset: Any, config: Config) -> int | None:
    """The rows of the training data; None if they have no length."""
    source = as_sources(choose_splits(train_dataset, None, False)[0], "train_dataset")
    if source is None or isinstance(source, str | os.PathLike | SourceSettings | tuple):
        rows = open_rows(config.data.train if source is None else source)
        return len(rows.good) if isinstance(rows, Rows) else None
    return len(source) if hasattr(source, "__len__") else None


def _resumes(checkpoint: str | bool | None, run_dir: Path) -> bool:
    """Whether to continue the run. A run continues from its newest checkpoint, so a path must be of this run."""
    if not isinstance(checkpoint, str | os.PathLike):
        return bool(checkpoint)
    if not Path(checkpoint).resolve().is_relative_to(run_dir.resolve()):
        raise UserError(
            f"resume_from_checkpoint: {checkpoint} is not in {run_dir}; a run continues in its own directory: give it "
            "as output_dir or run_dir, and resume_from_checkpoint=True"
        )
    return True


def _resume(run: Run, directory: RunDirectory, checkpoints: Checkpoints, log: LogLength, display: Display) -> None:
    """Restores everything from the newest checkpoint. Nothing is written until all of it has been checked."""
    config = run.config
    before = (checkpoints.settings() or ConfigFile.read(directory.config_path)).over(config)
    check_same_run(directory.path, before, config)
    checkpoint = checkpoints.restore(
        (*run.parts, log), note=lambda line: display.note(f"skipping a damaged checkpoint: {line}")
    )
    if checkpoint is None:
        directory.check_may_start_again(before.checkpoint_every)
        display.note(f"{directory.path}: no checkpoint yet; starting from the first step")
        directory.forget_after(NOTHING)
        directory.write_config(config)
        return
    if run.progress.step != checkpoint.step:
        raise not_of_this_run(checkpoint.path / PROGRESS, "step is inconsistent")
    if checkpoint.step > config.train.steps:
        raise UserError(
            f"train.steps: {config.train.steps} is below step {checkpoint.step}, which {directory.path} has already "
            "reached; raise it, or start a new run"
        )
    run.engine.receive(checkpoint.step, run.policy.weights())
    if note := directory.forget_after(checkpoint.step, log.loaded, run.progress.logged):
        display.note(note)
    directory.write_config(config)
    display.note(f"resumed from {checkpoint.path}")


def _evaluate(run: Run, display: Display, check: Callable[[], None] = check_nothing) -> Evaluation | None:
    if run.eval_prompts is None:
        return None
    settings = run.config.eval
    run.sampler.drain()
    tell_progress(run.verifier, run.config, run.progress.step)
    return evaluate(
        run.engine,
        run.verifier,
        once_each(run.eval_prompts.prompts, settings.prompts),
        SamplingParams(
            max_new_tokens=run.config.sampling.max_new_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            stop=run.config.sampling.stop,
        ),
        settings.samples,
        run.config.seed,
        on_progress=lambda done, total: display.phase(EVALUATING, done, total),
        check=check,
    )
