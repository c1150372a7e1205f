"""`DAPOTrainer`: trains a model from Python, with the arguments of TRL's `GRPOTrainer`."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Never, Self

import torch
from transformers.utils import logging

from dapo_rl.base.quote import shown
from dapo_rl.compat.trl.accelerator import Accelerator
from dapo_rl.compat.trl.callbacks import Callbacks, with_trl_names
from dapo_rl.compat.trl.check_arguments import (
    check_arguments,
    check_environments,
    refuse_arguments,
    refuse_processor,
    refuse_unknown,
    resume_requested,
    with_reward_models,
)
from dapo_rl.compat.trl.grpo_config import count_rows, script_settings
from dapo_rl.compat.trl.training_arguments import CallbackArguments
from dapo_rl.config import Config
from dapo_rl.data.sources import choose_splits
from dapo_rl.errors import UserError
from dapo_rl.models.hub_upload import push_folder, write_card
from dapo_rl.run.build import Run, build_run
from dapo_rl.run.inputs import TrainerInputs
from dapo_rl.run.training import RunTraining
from dapo_rl.runs.directory import RunDirectory, new_run_directory
from dapo_rl.runs.display import Display, make_display
from dapo_rl.runs.notes import NotedDisplay

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
    `reward_funcs` is a verifier's name, a function in TRL's or verl's signature, a reward model (a name, a directory or
    a loaded one, with its tokenizer in `reward_processing_classes`), or a list of them. Data sets are
    anything that `data.train` accepts, a list of rows, or a Hugging Face data set. `engine` is an engine, or a class or
    function that makes one, called as `Class(model, tokenizer, settings, dtype=dtype, longest=longest)`. Arguments that
    are not given come from `config`: a `Config`, the path or name of a recipe, or a mapping of settings with nested or
    dotted keys. `callbacks` are transformers' `TrainerCallback`s, or classes of them (docs/callbacks.md). `tools` are
    functions that the policy can call, and `environment_factory` is a class of TRL's environments, or several by the
    names in the column `environment`; with one class, `train_dataset` can be left out.

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
        check_arguments(model=model, config=config, engine=engine, run_dir=run_dir, display=display)
        refuse_arguments(optimizers=optimizers, quantization_config=quantization_config, rollout_func=rollout_func)
        check_arguments(tools=tools, environment_factory=environment_factory)
        check_environments(environment_factory, tools, reward_funcs, train_dataset, args)
        refuse_processor(processing_class)
        reward_funcs = with_reward_models(reward_funcs, reward_processing_classes)
        check_arguments(processing_class=processing_class)
        # transformers' progress bars for loading and saving weights would disturb the display.
        logging.disable_progress_bar()
        count = partial(count_rows, train_dataset)
        has_data = train_dataset is not None or environment_factory is not None
        several_turns = bool(tools or environment_factory)
        script = script_settings(args, config, reward_funcs, count, has_data, several_turns)
        train_dataset, eval_dataset, chosen = choose_splits(
            train_dataset, eval_dataset, script.config.eval.every is not None
        )
        self.args = args
        self._pushes = script.pushes
        self.display = NotedDisplay(display or make_display())
        self.run_dir = Path(run_dir or script.run_dir or new_run_directory())
        self.stop_requested: Callable[[], bool] = lambda: False
        inputs = TrainerInputs(
            model,
            processing_class,
            reward_funcs,
            train_dataset,
            eval_dataset,
            engine,
            script.reward_weights,
            peft_config,
            tools,
            environment_factory,
            notes=(*script.notes, *([chosen] if chosen else [])),
            to_device=args is not None,
        )
        run = build_run(script.config, inputs, self.display)
        self._built: Run | None = run
        self._training: RunTraining | None = None
        self.config = run.config
        # The `args` of every hook: the caller's GRPOConfig, or these.
        self._callbacks = Callbacks(
            args or CallbackArguments.of(self.config, self.run_dir),
            {"model": run.model, "processing_class": run.tokenizer, "optimizer": run.policy.optimizer},
            prompts=None if run.train_prompts.is_stream else len(run.train_prompts.prompts),
            steps=self.config.train.steps,
            eval_steps=self.config.eval.every,
            save_steps=self.config.checkpoint_every,
        )
        callbacks = () if callbacks is None else callbacks
        try:
            for callback in callbacks if isinstance(callbacks, list | tuple) else [callbacks]:
                self._callbacks.add(callback)
            self._callbacks.call("on_init_end")
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
    def accelerator(self) -> Accelerator:
        """What scripts use of accelerate: printing, and whether this is the main process."""
        return Accelerator()

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
        if self._training is not None:
            numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
            self._training.track(self.state.global_step, numbers)
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
        check_arguments(resume=resume, resume_from_checkpoint=resume_from_checkpoint)
        resume = resume_requested(resume or resume_from_checkpoint, self.run_dir)
        call, place = (RESUMES, "run_dir") if self.args is None else (TRL_RESUMES, "output_dir")
        if resume:
            directory = RunDirectory.open(self.run_dir)
        else:
            run.disk.check(run.config, self.run_dir, 0)
            shell = " (on the command line: --resume)" if self.args is None else ""
            directory = RunDirectory.prepare(self.run_dir, f"resume it with {call}{shell}, or name another {place}")
        self._training = RunTraining(run, directory, self.display, self._callbacks)
        try:
            how = f"{place}={{}} and call {call}"
            summary = self._training.train(resume, lambda: self.stop_requested(), how)
        finally:
            self._training = None
        if self._pushes and summary["finished"]:
            self.push_to_hub()
        return summary

    def evaluate(self, **unknown: Never) -> dict[str, float]:
        """Accuracy and related metrics on the held-out prompts, under the names here (`eval/accuracy`) and TRL's."""
        refuse_unknown(self.evaluate, unknown, "evaluate")
        evaluation = self._run.evaluate(self.display)
        if evaluation is None:
            raise UserError("there is nothing to evaluate on: give eval_dataset, or set data.eval")
        metrics = evaluation.metrics()
        self._callbacks.evaluated(metrics)
        return with_trl_names(metrics)

    def save_model(self, path: str | os.PathLike[str] | None = None, **unknown: Never) -> None:
        """Saves the model and tokenizer in Hugging Face format, or in PEFT format with `model.lora.save: adapter`; by
        default in the run directory's folder model/."""
        refuse_unknown(self.save_model, unknown, "save_model")
        check_arguments(path=path)
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
        check_arguments(repo_id=repo_id, commit_message=commit_message, revision=revision)
        self._callbacks.call("on_push_begin")
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

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _run(self) -> Run:
        if self._built is None:
            raise RuntimeError("the trainer is closed; make a new one")
        return self._built
