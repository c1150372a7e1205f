"""SGLang's offline engine behind the Engine protocol, with a stand-in for the package: what a new built-in engine
consists of. The test registers it with one entry in `ENGINES`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from dapo_rl.engines.protocol import Completion, Engine, EngineInputs, Request
from dapo_rl.engines.stopping import make_sample, stop_token_ids
from dapo_rl.engines.token_sampling import derive_seed
from dapo_rl.models.weights import BUCKET_BYTES, WeightSource
from dapo_rl.types import Trajectory


def build(inputs: EngineInputs) -> SGLangEngine:
    return SGLangEngine(inputs.model, inputs.tokenizer, max_running_requests=inputs.settings.max_batch or 64)


class SGLangEngine(Engine):
    version = 0

    def __init__(self, model: Any, tokenizer: Any, max_running_requests: int) -> None:
        self._tokenizer, self._stop_ids = tokenizer, stop_token_ids(model, tokenizer)
        self._runtime = Runtime(model, self._stop_ids)
        self._width = max_running_requests
        self._queue: list[tuple[Request, Trajectory]] = []

    def submit(self, request: Request) -> None:
        samples = [*request.partial, *map(Trajectory.nothing, request.starting)]
        self._queue += [(request, partial) for partial in samples]

    def poll(self, timeout_s: float | None = None) -> list[Completion]:
        batch, self._queue = self._queue[: self._width], self._queue[self._width :]
        outputs = self._runtime.generate(
            input_ids=[np.concatenate([request.prompt_ids, partial.token_ids]).tolist() for request, partial in batch],
            sampling_params=[self._params(*pair) for pair in batch],
        )
        return [self._completion(*pair, output) for pair, output in zip(batch, outputs, strict=True)]

    def cancel(self, ids: Collection[str]) -> int:
        lost = sum(len(partial.token_ids) for request, partial in self._queue if request.id in ids)
        self._queue = [pair for pair in self._queue if pair[0].id not in ids]
        return lost

    def receive(self, version: int, source: WeightSource) -> None:
        for bucket in source.buckets(BUCKET_BYTES):
            self._runtime.update_weights_from_tensor(bucket)
        self.version = version

    def take_unfinished(self) -> list[Request]:
        requests = {request.id: request for request, _ in self._queue}
        written = {name: [partial for request, partial in self._queue if request.id == name] for name in requests}
        self._queue = []
        return [request.left(written[name]) for name, request in requests.items()]

    def close(self) -> None:
        self._runtime.shutdown()

    def _params(self, request: Request, partial: Trajectory) -> dict[str, Any]:
        params = request.params_of(partial.index)
        return {
            "max_new_tokens": params.max_new_tokens - len(partial.token_ids),
            "temperature": params.temperature,
            "sampling_seed": derive_seed(request.seed, partial.index, len(partial.token_ids)),
        }

    def _completion(self, request: Request, partial: Trajectory, output: dict[str, Any]) -> Completion:
        logps, tokens = zip(*output["meta_info"]["output_token_logprobs"], strict=True)
        written = partial.then(np.array(tokens, np.int32), np.array(logps, np.float32), self.version)
        finish = output["meta_info"]["finish_reason"]["type"]
        sample = make_sample(self._tokenizer, written, len(written.token_ids), finish, self._stop_ids)
        return Completion(request.id, partial.index, sample)


class Runtime:
    """A stand-in for `sglang.Engine`, with its methods and the form of its results."""

    closed = 0

    def __init__(self, model: Any, stop_ids: frozenset[int]) -> None:
        self._model, self._stop_ids = model, stop_ids

    @torch.no_grad()
    def generate(self, input_ids: list[list[int]], sampling_params: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [self._generate_one(ids, params) for ids, params in zip(input_ids, sampling_params, strict=True)]

    def _generate_one(self, ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(params["sampling_seed"])
        drawn: list[tuple[float, int]] = []
        while len(drawn) < params["max_new_tokens"] and not (drawn and drawn[-1][1] in self._stop_ids):
            logits = self._model(torch.tensor([ids + [token for _, token in drawn]])).logits[0, -1]
            logps = (logits / (params["temperature"] or 1)).log_softmax(-1)
            best = int(logps.argmax())
            token = int(torch.multinomial(logps.exp(), 1, generator=generator)) if params["temperature"] else best
            drawn.append((float(logps[token]), token))
        finish = "stop" if drawn[-1][1] in self._stop_ids else "length"
        return {"meta_info": {"output_token_logprobs": drawn, "finish_reason": {"type": finish}}}

    def update_weights_from_tensor(self, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
        own = dict(self._model.named_parameters())
        for name, tensor in named_tensors:
            own[name].data.copy_(tensor)

    def shutdown(self) -> None:
        Runtime.closed += 1
