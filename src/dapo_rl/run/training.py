"""Trains a run into its directory: from the first step, or resumed; restarts lost ranks; writes the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from dapo_rl.base.saved import not_of_this_run
from dapo_rl.cluster.ray_watch import if_ray_ends
from dapo_rl.cluster.restart_ranks import Restarts
from dapo_rl.compat.trl.callbacks import Callbacks
from dapo_rl.config.warnings import warnings
from dapo_rl.errors import UserError
from dapo_rl.run.build import Run
from dapo_rl.runs.config_file import ConfigFile
from dapo_rl.runs.directory import NOTHING, LogLength, RunDirectory
from dapo_rl.runs.error_file import write_failure
from dapo_rl.runs.keyboard_interrupt import Interrupts
from dapo_rl.runs.notes import NotedDisplay, Notes
from dapo_rl.runs.resume import check_same_run
from dapo_rl.runs.trackers import Trackers
from dapo_rl.runs.write_errors import WriteErrors
from dapo_rl.train import loop
from dapo_rl.train.checkpoint import Checkpoints
from dapo_rl.train.random_state import seed_everything
from dapo_rl.train.results import MODEL, save_result, write_results
from dapo_rl.train.trainer_state import FILE as PROGRESS
from dapo_rl.train.transforms import build_transforms


class RunTraining:
    """One training of a run, up to its last step or a stop."""

    def __init__(self, run: Run, directory: RunDirectory, display: NotedDisplay, callbacks: Callbacks) -> None:
        self._run, self._directory, self._display, self._callbacks = run, directory, display, callbacks
        self._unsaved = WriteErrors(display.note)
        keep = run.config.checkpoint.keep
        self._checkpoints = Checkpoints(directory.checkpoints_path, keep, display.note, self._unsaved)
        self._log = LogLength(directory)
        self._trackers: Trackers | None = None

    def train(self, resume: bool, stop_requested: Callable[[], bool], how_to_continue: str) -> dict[str, Any]:
        """Returns the summary. `how_to_continue` tells the user what to do with the directory `{}` after Ctrl-C."""
        run, directory, display = self._run, self._directory, self._display
        with directory.locked(), self._recorded_notes() as notes:
            seed_everything(run.config.seed)
            if resume:
                self.resume()
                self._checkpoints.remove_old()  # `checkpoint.keep` may be smaller now, to make room
                run.disk.check(run.config, directory.path, run.progress.step)
            else:
                directory.begin(run.config)
            run.verifier.begin(directory.path)
            notes.begin()
            self._callbacks.follow(directory.read_metrics)
            with (
                Interrupts(directory, display, how_to_continue) as interrupts,
                self._recorded_failure(),
                self._checkpoints,
            ):
                summary = self._train_to_end(lambda: interrupts.requested or stop_requested())
                self._unsaved.raise_errors(self._written(summary))
                if (why := run.stopped) and not summary["finished"]:
                    raise UserError(why)
                if interrupts.requested and not summary["finished"]:
                    raise KeyboardInterrupt
        return summary

    def track(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._trackers is not None:
            self._trackers.log(step, metrics)

    def resume(self) -> None:
        """Restores everything from the newest checkpoint. Nothing is written until all of it has been checked."""
        run, directory, note = self._run, self._directory, self._display.note
        config = run.config
        before = (self._checkpoints.settings() or ConfigFile.read(directory.config_path)).over(config)
        check_same_run(directory.path, before, config)
        checkpoint = self._checkpoints.restore(
            (*run.parts, self._log), note=lambda line: note(f"skipping a damaged checkpoint: {line}")
        )
        if checkpoint is None:
            directory.check_may_start_again(before.checkpoint_every)
            if run.progress.current:  # in this process: the weights and the order of prompts are no longer the first
                raise UserError(
                    f"{directory.path}: there is no checkpoint to resume from, and this trainer has already trained; "
                    "make it again to start from the first step"
                )
            note(f"{directory.path}: no checkpoint yet; starting from the first step")
            directory.forget_after(NOTHING)
            directory.write_config(config)
            return
        if run.progress.step != checkpoint.step:
            raise not_of_this_run(checkpoint.path / PROGRESS, "step is inconsistent")
        if checkpoint.step > config.train.steps:
            raise UserError(
                f"train.steps: {config.train.steps} is below step {checkpoint.step}, which {directory.path} has "
                "already reached; raise it, or start a new run"
            )
        run.engine.receive(checkpoint.step, run.policy.weights())
        if changed := directory.forget_after(checkpoint.step, self._log.loaded, run.progress.logged):
            note(changed)
        directory.write_config(config)
        note(f"resumed from {checkpoint.path}")

    def _train_to_end(self, stop_requested: Callable[[], bool]) -> dict[str, Any]:
        run, directory, display, unsaved = self._run, self._directory, self._display, self._unsaved
        config, progress = run.config, run.progress
        trackers = Trackers(config.log.trackers, directory.path, config.resolved(), progress.step, display.note)
        self._trackers = trackers
        training = loop.Training(
            config=config,
            engine=run.engine,
            sampler=run.sampler,
            policy=run.policy,
            transforms=build_transforms(
                config,
                run.policy,
                run.advantages,
                None if run.critic is None else run.critic.score,
                run.coefficients,
                run.teacher,
            ),
            evaluate=partial(run.evaluate, display),
            save=self._save,
            checkpoints=self._checkpoints,
            directory=directory,
            display=display,
            progress=progress,
            unsaved=unsaved,
            stop_requested=stop_requested,
            track=trackers.log,
            callbacks=self._callbacks,
            time_share=run.plan.time_share,
            critic=run.critic,
            verifier=run.verifier,
            coefficients=run.coefficients,
            recover=self._restarts(),
        )
        with display:
            display.start(config.train.steps, config, run.description, progress.step)
            for note in self._first_notes():
                display.note(note)
            try:
                loop.train(training)
                self._save_model(training)
            except Exception:
                with suppress(Exception):  # the error that ends the run is the one to show
                    self._write_results(failed=True)
                raise
            finally:
                self._trackers = None
                trackers.close()
            with unsaved.trying("metrics.jsonl", "some lines are missing"):
                directory.finish_log()
            summary = self._write_results()
            display.finish(summary)
        return summary

    def _save_model(self, training: loop.Training) -> None:
        """Saves the model of a run that has made its last step."""
        run = self._run
        # Without the model, the board still needs its tokenizer to show rollouts.
        export = run.policy.export if run.config.checkpoint.save_final else run.tokenizer.save_pretrained

        def save() -> None:
            loop.train_to_end(training)  # a rank was lost in the export, and the last checkpoint is of an earlier step
            if run.progress.is_done(run.config.train.steps):
                save_result(export, self._directory.model_path)

        if run.progress.is_done(run.config.train.steps):
            with self._unsaved.at_the_end(MODEL):
                loop.with_restarts(save, training.recover)

    def _first_notes(self) -> Iterator[str]:
        run = self._run
        for prompts in (run.train_prompts, run.eval_prompts):
            if prompts is not None and (report := prompts.report()):
                yield report
        yield from warnings(run.config)
        yield from (*run.notes, *self._callbacks.never_called())

    def _save(self) -> None:
        run = self._run
        self._checkpoints.start(run.progress.step, (*run.parts, self._log), run.config, unchanged=run.learners)

    def _restarts(self) -> loop.Recover | None:
        run = self._run
        if run.restart is None:
            return None

        def resume() -> None:
            run.engine.receive(0, run.policy.weights())
            self.resume()
            self._callbacks.follow(self._directory.read_metrics)

        others = [part for part in run.parts if part not in run.learners]
        return Restarts(run.restart, others, self._checkpoints, run.config.cluster.restarts, resume, self._display.note)

    def _write_results(self, failed: bool = False) -> dict[str, Any]:
        run, sampler = self._run, self._run.sampler
        # What a failed step has sampled is in the ledger.
        waiting, in_flight = (0, 0) if sampler.has_failed else (sampler.carried_tokens, sampler.in_flight_tokens)
        return write_results(
            self._directory,
            run.config,
            run.progress,
            run.train_prompts,
            self._unsaved,
            waiting=waiting,
            in_flight=in_flight,
            so_far=sampler.so_far,
            failed=failed,
        )

    def _written(self, summary: Mapping[str, Any]) -> str:
        there = [f"the model is in {self._directory.model_path}"] if "model" in summary["paths"] else []
        latest = self._checkpoints.latest()
        there.append(f"--resume continues from {latest.path}" if latest else "there is no checkpoint to resume from")
        return ", and ".join(there)

    @contextmanager
    def _recorded_notes(self) -> Iterator[Notes]:
        progress = self._run.progress
        self._display.notes = Notes(self._directory.path, step=lambda: progress.current)
        try:
            yield self._display.notes
        finally:
            self._display.notes = None

    @contextmanager
    def _recorded_failure(self) -> Iterator[None]:
        """Leaves error.json for an exception that ends the run, and for the end of Ray. Ctrl-C is not one: it stops the
        run."""
        directory, progress, display = self._directory, self._run.progress, self._display

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
