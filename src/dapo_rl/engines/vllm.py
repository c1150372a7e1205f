"""The `vllm` engine: vLLM behind the Engine protocol, with its own copy of the weights.

Written against vLLM 0.24, which has its own random numbers: with `seeded` they depend on (request seed, sample index,
position) alone, but they differ from those of the other engines.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import numpy as np
import torch

from dapo_rl.base.quote import one_line
from dapo_rl.config import SamplingSettings
from dapo_rl.engines.protocol import Completion, Engine, EngineInputs, Request
from dapo_rl.engines.stopping import StopSearch, StopStrings, make_sample, stop_token_ids
from dapo_rl.engines.token_sampling import derive_seed
from dapo_rl.errors import UserError
from dapo_rl.models.save import save_model
from dapo_rl.models.weights import BUCKET_BYTES, WeightSource
from dapo_rl.types import FinishReason, FloatArray, IntArray, Trajectory


def build(inputs: EngineInputs) -> VLLMEngine:
    options: dict[str, Any] = {"max_model_len": inputs.longest or None}
    if inputs.gpu_share is not None:
        options["gpu_memory_utilization"] = inputs.gpu_share
    if inputs.gpus > 1:  # the workers are child processes
        options |= {"tensor_parallel_size": inputs.gpus, "distributed_executor_backend": "mp"}
    arguments = (inputs.model, inputs.tokenizer, inputs.settings, inputs.dtype)
    return VLLMEngine(*arguments, releases_memory=inputs.releases_memory, **{**options, **inputs.options})


class VLLMEngine(Engine):
    """One vLLM request per sample. vLLM's prefix cache, which is on by default, shares the prompt's blocks and keeps
    those of samples that are continued; new weights empty it."""

    version = prefix_hits = 0

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: SamplingSettings,
        dtype: torch.dtype,
        *,
        gpu_memory_utilization: float = 0.4,
        in_process: bool = True,
        seeded: bool = True,
        model_runner_v2: bool | None = None,
        releases_memory: bool = False,
        **options: Any,
    ) -> None:
        """`options` go to vLLM's `LLM`. With `in_process=False`, sampling overlaps with bookkeeping, but the weights
        cannot be updated. `model_runner_v2` selects vLLM's newer model runner, which draws all samples at once although
        each has a seed; None leaves it to vLLM, which has a list of architectures. `release_memory` works only with
        `releases_memory`."""
        self._held: list[Request] | None = None
        """Unfinished requests while the engine sleeps or has only some of its new weights."""
        self._asleep = False
        self._tokenizer, self._in_process, self._seeded = tokenizer, in_process, seeded
        self._stop_ids = stop_token_ids(model, tokenizer)
        self._running: dict[str, tuple[Request, Trajectory]] = {}
        """By vLLM's request id: the request, and the partial sample submitted to vLLM."""
        self._submitted = 0
        # vLLM reads the model from a directory, and reads the tokenizer again later.
        self._directory = TemporaryDirectory(prefix="dapo-vllm-")
        if options.get("tensor_parallel_size", 1) > 1:
            # New weights are sent to vLLM's workers as a function, which they accept only if this is set.
            os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        LLM, self._sampling_params_type, self._final_only = _import_vllm(in_process, model_runner_v2)
        save_model(model, tokenizer, self._directory.name)
        how = {
            "model": self._directory.name,
            "dtype": str(dtype).removeprefix("torch."),
            **({} if settings.max_batch is None else {"max_num_seqs": settings.max_batch}),
            "gpu_memory_utilization": gpu_memory_utilization,
            "logprobs_mode": _logprobs_mode(settings),
            # The sampling settings in a model's generation_config.json would change the policy.
            "generation_config": "vllm",
            **({"enable_sleep_mode": True} if releases_memory else {}),
            **options,
        }
        try:
            self._llm: Any = LLM(trust_remote_code=False, **how)
        except (TypeError, ValueError) as error:  # of an option that vLLM does not have, or a value that it refuses
            if not options.keys() - {"max_model_len"}:
                raise
            raise UserError(f"engine_options: vLLM refuses {', '.join(options)}: {one_line(error)}") from error
        self._engine: Any = self._llm.llm_engine

    @property
    def pending(self) -> int:
        """Samples submitted and not yet returned."""
        return len(self._running) + sum(request.samples for request in self._held or ())

    def submit(self, request: Request) -> None:
        if self._held is not None:
            self._held.append(request)
            return
        for partial in request.trajectories:
            self._submitted += 1
            name = f"{self._submitted}:{request.id}:{partial.index}"
            ids = np.concatenate([request.prompt_ids, partial.token_ids]).tolist()
            self._engine.add_request(name, {"type": "token", "prompt_token_ids": ids}, self._params(request, partial))
            self._running[name] = (request, partial)

    def poll(self, timeout_s: float | None = None) -> list[Completion]:
        deadline = None if timeout_s is None else monotonic() + timeout_s
        while self._running and (deadline is None or monotonic() < deadline):
            if finished := [output for output in self._engine.step() if output.finished]:
                return [self._completion(output) for output in finished]
        return []

    def cancel(self, ids: Collection[str]) -> int:
        names = [name for name, (request, _) in self._running.items() if request.id in ids]
        if self._held is not None:
            lost = sum(request.tokens for request in self._held if request.id in ids)
            self._held = [request for request in self._held if request.id not in ids]
            return lost
        lost = sum(len(self._written(name).token_ids) for name in names)
        self._abort(names)
        return lost

    def release_memory(self) -> None:
        if self._held is None:
            self._held = self.take_unfinished()
        if not self._asleep:
            self._llm.sleep(level=2)  # the next weights come from outside
            self._asleep = True

    @torch.no_grad()
    def receive(self, version: int, source: WeightSource) -> None:
        if not self._in_process:
            raise RuntimeError("weights can be updated only if vLLM runs in this process")
        if self._held is None:  # the KV cache, prefixes included, was computed with the old weights
            self._held = self.take_unfinished()
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False
        for bucket in source.buckets(BUCKET_BYTES):
            self._engine.apply_model(lambda model, bucket=bucket: model.load_weights(iter(bucket)))
        self._engine.reset_prefix_cache()
        self.version = version
        unfinished, self._held = self._held, None
        for request in unfinished:
            self.submit(request)

    def take_unfinished(self) -> list[Request]:
        if self._held is not None:
            unfinished, self._held = self._held, []
            return unfinished
        taken: dict[str, tuple[Request, list[Trajectory]]] = {}
        for name, (request, _) in self._running.items():
            taken.setdefault(request.id, (request, []))[1].append(self._written(name))
        self._abort(list(self._running))
        return [request.left(written) for request, written in taken.values()]

    def close(self) -> None:
        """Stops vLLM's processes and frees its memory."""
        self._abort(list(self._running))
        self._engine.engine_core.shutdown()
        self._directory.cleanup()

    def _abort(self, names: list[str]) -> None:
        self._engine.abort_request(names)
        for name in names:
            del self._running[name]

    def _params(self, request: Request, partial: Trajectory) -> Any:
        params, had = request.params_of(partial.index), len(partial.token_ids)
        # vLLM restarts its random numbers with each request.
        seed = derive_seed(request.seed, partial.index, *([had] if had else []))
        return self._sampling_params_type(
            max_tokens=params.max_new_tokens - had,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            stop=list(params.stop),
            stop_token_ids=[] if params.ignore_eos else sorted(self._stop_ids),
            ignore_eos=params.ignore_eos,
            seed=seed if self._seeded else None,
            logprobs=0,
            flat_logprobs=True,
            # The text is decoded at the end; vLLM needs it earlier only for stop strings.
            detokenize=bool(params.stop),
            output_kind=self._final_only,
        )

    def _completion(self, output: Any) -> Completion:
        request, partial = self._running.pop(output.request_id)
        if len(partial.token_ids):
            self.prefix_hits += output.num_cached_tokens or 0
        done = output.outputs[0]
        tokens = np.asarray(done.token_ids, np.int32)
        written = partial.then(tokens, _sampled_logps(done.logprobs, tokens), self.version)
        end = len(written.token_ids)
        finish: FinishReason = "length" if done.finish_reason == "length" else "stop"
        if request.params.stop and len(partial.token_ids):
            # vLLM does not find a stop string that starts in the tokens it was given.
            search = StopSearch(StopStrings(self._tokenizer, request.params.stop))
            search.skip(partial.token_ids, partial.mask)
            found = search.find(tokens)
            end, finish = (end, finish) if found is None else (found, "stop")
        sample = make_sample(self._tokenizer, written, end, finish, self._stop_ids)
        return Completion(request.id, partial.index, sample)

    def _written(self, name: str) -> Trajectory:
        """A running sample with its tokens so far, read from vLLM's internal state: there is no public API for it."""
        _, partial = self._running[name]
        processor = self._engine.output_processor
        for inner in processor.external_req_ids.get(name, ()):
            state = processor.request_states.get(inner)
            if state is not None and state.detokenizer is not None and state.detokenizer.num_output_tokens():
                tokens = np.asarray(state.detokenizer.output_token_ids, np.int32)
                return partial.then(tokens, _sampled_logps(state.logprobs_processor.logprobs, tokens), self.version)
        return partial


def _sampled_logps(logprobs: Any, tokens: IntArray) -> FloatArray:
    """With `logprobs=0` each position has the log-probability of the sampled token alone."""
    flat = getattr(logprobs, "logprobs", None)
    if flat is not None and len(flat) == len(tokens):
        return np.asarray(flat, np.float32)
    pairs = zip(logprobs, tokens.tolist(), strict=True)
    return np.asarray([position[token].logprob for position, token in pairs], np.float32)


def _logprobs_mode(settings: SamplingSettings) -> str:
    """vLLM returns log-probabilities from before temperature and truncation, or from after both; the trainer needs them
    after temperature and before truncation.

    At temperature 1 these are the first kind, without truncation the second.
    """
    if settings.temperature == 1:
        return "raw_logprobs"
    if settings.top_p < 1 or settings.top_k or settings.min_p:
        raise UserError(
            "sampling.temperature: with top_p, top_k or min_p, vLLM returns the log-probabilities that training needs "
            "only at temperature 1; use engine=native"
        )
    return "processed_logprobs"


def _import_vllm(in_process: bool, model_runner_v2: bool | None) -> tuple[Any, Any, Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    if model_runner_v2 is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if model_runner_v2 else "0"
    # A forked engine would inherit torch's threads in an undefined state.
    os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # FlashInfer's sampler, used only for top-k and top-p, takes minutes to compile at start-up, and may fail to.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    try:
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind
    except ImportError as error:
        raise UserError(f"engine: vllm cannot be imported ({error}); pip install vllm, or use engine=hf") from None
    return LLM, SamplingParams, RequestOutputKind.FINAL_ONLY
