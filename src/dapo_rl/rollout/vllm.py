"""The `vllm` engine: vLLM behind the Engine protocol, with its own copy of the weights.

Written against vLLM 0.24. Its random numbers are its own: with `seeded` they depend on (request seed, sample index,
position) alone, but they are not the ones that the other engines draw.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from dapo_rl.config import SamplingSettings
from dapo_rl.errors import UserError
from dapo_rl.models.load import save_model
from dapo_rl.rollout.draw import derive_seed
from dapo_rl.rollout.ending import make_sample, stop_token_ids
from dapo_rl.rollout.engine import Completion, Request
from dapo_rl.types import FinishReason


class VLLMEngine:
    """One vLLM request for each sample; the prompt's blocks are shared through vLLM's prefix cache."""

    keeps_begun = False

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
        **options: Any,
    ) -> None:
        """`options` go to vLLM's `LLM`. Out of process sampling overlaps with bookkeeping, and weights stay fixed."""
        self.version = 0
        self._tokenizer, self._in_process, self._seeded = tokenizer, in_process, seeded
        self._stop_ids = stop_token_ids(model, tokenizer)
        self._running: dict[str, tuple[Request, int, int]] = {}
        """By vLLM's request id: the request, the sample's index, the weight version at its start."""
        self._submitted = 0
        # vLLM reads the model from a directory, and its tokenizer again later.
        self._directory = TemporaryDirectory(prefix="dapo-vllm-")
        LLM, self._sampling_params_type, self._final_only = _import_vllm(in_process)
        save_model(model, tokenizer, self._directory.name)
        self._engine: Any = LLM(
            model=self._directory.name,
            dtype=str(dtype).removeprefix("torch."),
            **({} if settings.max_batch is None else {"max_num_seqs": settings.max_batch}),
            gpu_memory_utilization=gpu_memory_utilization,
            logprobs_mode=_logprobs_mode(settings),
            # What publishers put into generation_config.json would change the policy.
            generation_config="vllm",
            trust_remote_code=False,
            **options,
        ).llm_engine

    @property
    def pending(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> frozenset[str]:
        untouched = Counter(
            request.id for name, (request, _, _) in self._running.items() if not self._tokens_so_far(name)
        )
        requests = {request.id: request for request, _, _ in self._running.values()}
        return frozenset(name for name, count in untouched.items() if count == requests[name].count)

    def submit(self, request: Request) -> None:
        for index in range(request.count):
            self._submitted += 1
            name = f"{self._submitted}:{request.id}:{index}"
            prompt = {"type": "token", "prompt_token_ids": list(request.prompt_ids)}
            self._engine.add_request(name, prompt, self._params(request, index))
            self._running[name] = (request, index, self.version)

    def poll(self) -> list[Completion]:
        while self._running:
            if finished := [output for output in self._engine.step() if output.finished]:
                return [self._completion(output) for output in finished]
        return []

    def cancel(self, request_id: str) -> int:
        names = [name for name, (request, _, _) in self._running.items() if request.id == request_id]
        lost = sum(self._tokens_so_far(name) for name in names)
        self._engine.abort_request(names)
        for name in names:
            del self._running[name]
        return lost

    @torch.no_grad()
    def load_weights(self, version: int, weights: Mapping[str, Tensor]) -> None:
        if not self._in_process:
            raise RuntimeError("weights can be swapped only where vLLM runs in this process")
        self._engine.apply_model(lambda model: model.load_weights(weights.items()))
        # Cached prefixes were computed with the weights before.
        self._engine.reset_prefix_cache()
        self.version = version

    def state(self) -> dict[str, Any]:
        if self._running:
            raise RuntimeError("vLLM's samples in flight cannot be kept: finish or cancel them first")
        return {"version": self.version, "work": []}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.version = state["version"]

    def _params(self, request: Request, index: int) -> Any:
        params = request.params
        return self._sampling_params_type(
            max_tokens=params.max_new_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            stop=list(params.stop),
            stop_token_ids=[] if params.ignore_eos else sorted(self._stop_ids),
            ignore_eos=params.ignore_eos,
            seed=derive_seed(request.seed, index) if self._seeded else None,
            logprobs=0,
            flat_logprobs=True,
            # The whole text is decoded at the end; only stop strings need it on the way.
            detokenize=bool(params.stop),
            output_kind=self._final_only,
        )

    def _completion(self, output: Any) -> Completion:
        request, index, version = self._running.pop(output.request_id)
        done = output.outputs[0]
        tokens = tuple(int(token) for token in done.token_ids)
        logps = _sampled_logps(done.logprobs, tokens)
        finish: FinishReason = "length" if done.finish_reason == "length" else "stop"
        sample = make_sample(self._tokenizer, tokens, logps, finish, self._stop_ids, (version, self.version))
        return Completion(request.id, index, sample)

    def _tokens_so_far(self, name: str) -> int:
        """vLLM has no public count of a running request's tokens."""
        processor = self._engine.output_processor
        states = [processor.request_states.get(inner) for inner in processor.external_req_ids.get(name, ())]
        return sum(state.detokenizer.num_output_tokens() for state in states if state and state.detokenizer)


def _sampled_logps(logprobs: Any, tokens: tuple[int, ...]) -> tuple[float, ...]:
    """With `logprobs=0` every position has the sampled token's alone."""
    flat = getattr(logprobs, "logprobs", None)
    if flat is not None and len(flat) == len(tokens):
        return tuple(float(value) for value in flat)
    return tuple(float(position[token].logprob) for position, token in zip(logprobs, tokens, strict=True))


def _logprobs_mode(settings: SamplingSettings) -> str:
    """vLLM gives log-probabilities before temperature and truncation, or after both; the trainer needs those between.

    At temperature 1 that is the first kind, without truncation the second.
    """
    if settings.temperature == 1:
        return "raw_logprobs"
    if settings.top_p < 1 or settings.top_k or settings.min_p:
        raise UserError(
            "sampling.temperature: with top_p, top_k or min_p the vllm engine gives the trainer's log-probabilities "
            "only at temperature 1; use engine=native"
        )
    return "processed_logprobs"


def _import_vllm(in_process: bool) -> tuple[Any, Any, Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    # A forked engine would inherit torch's threads in whatever state they are.
    os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # FlashInfer's sampler, for top-k and top-p alone, is compiled at start-up, for minutes or in vain.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    try:
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind
    except ImportError as error:
        raise UserError(f"engine: vllm cannot be imported ({error}); pip install vllm, or use engine=hf") from None
    return LLM, SamplingParams, RequestOutputKind.FINAL_ONLY
