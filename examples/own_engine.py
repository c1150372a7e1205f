"""A custom engine without a KV cache: each decode step adds one token to every sample of a batch.

    dapo train engine=examples/own_engine.py:PlainEngine train.steps=2

An engine is a class with these methods and a `version`. It must return every sample: finished from `poll`, or
unfinished, with its tokens so far, from `take_unfinished`. The random number of a token depends only on the request's
seed, the sample's index and the token's position, so a resumed run continues bit for bit.
"""

import numpy as np
import torch

from dapo_rl.engines.protocol import Completion, Request
from dapo_rl.engines.stopping import make_sample, stop_token_ids
from dapo_rl.engines.token_sampling import DrawParams, draw_tokens, row_keys, uniforms
from dapo_rl.models.load import pad_id, take_over
from dapo_rl.types import Trajectory


class PlainEngine:
    def __init__(self, model, tokenizer, settings, *, dtype, longest):
        self.version = 0
        self.model, self.tokenizer = model, tokenizer
        self.batch = settings.max_batch or 256
        self.stop_ids = stop_token_ids(model, tokenizer)
        self.samples: list[tuple[Request, Trajectory]] = []

    def submit(self, request):
        self.samples += [(request, partial) for partial in request.trajectories]

    def poll(self, timeout_s=None):
        """Advances one batch of samples until at least one of them finishes."""
        finished = []
        while self.samples and not finished:
            now = [self._one_more(*sample) for sample in self._next_tokens(self.samples[: self.batch])]
            finished = [(request, partial, end) for request, partial, end in now if end]
            going_on = [(request, partial) for request, partial, end in now if not end]
            self.samples = going_on + self.samples[self.batch :]
        return [
            Completion(
                request.id,
                partial.index,
                make_sample(self.tokenizer, partial, len(partial.token_ids), reason, self.stop_ids),
            )
            for request, partial, reason in finished
        ]

    def cancel(self, ids):
        lost = sum(len(partial.token_ids) for request, partial in self.samples if request.id in ids)
        self.samples = [(request, partial) for request, partial in self.samples if request.id not in ids]
        return lost

    def receive(self, version, source):
        take_over(self.model, source)
        self.version = version

    def take_unfinished(self):
        written: dict[str, tuple[Request, list[Trajectory]]] = {}
        for request, partial in self.samples:
            written.setdefault(request.id, (request, []))[1].append(partial)
        self.samples = []
        return [request.left(samples) for request, samples in written.values()]

    @torch.no_grad()
    def _next_tokens(self, samples):
        """Yields each sample with one more token."""
        contexts = [np.concatenate([request.prompt_ids, partial.token_ids]) for request, partial in samples]
        width = max(map(len, contexts))
        ids = np.full((len(samples), width), pad_id(self.tokenizer))
        for row, context in zip(ids, contexts, strict=True):
            row[: len(context)] = context
        ends = torch.tensor([len(context) - 1 for context in contexts])
        logits = self.model(input_ids=torch.from_numpy(ids), use_cache=False).logits
        how = DrawParams.of([request.params for request, _ in samples])
        keys = row_keys([(request.seed, partial.index) for request, partial in samples])
        positions = torch.tensor([len(partial.token_ids) for _, partial in samples])
        drawn = draw_tokens(logits[torch.arange(len(samples)), ends], uniforms(keys, positions), how)
        for (request, partial), token, logp, kept in zip(samples, *drawn, strict=True):
            more = {"kept_ids": kept[None].numpy()} if request.params.keep_mask else {}
            yield request, partial.then(np.int32([token]), np.float32([logp]), self.version, **more)

    def _one_more(self, request, partial):
        """The sample with its finish reason, or None if it is unfinished."""
        if int(partial.token_ids[-1]) in self.stop_ids:
            return request, partial, "stop"
        full = len(partial.token_ids) == request.params.max_new_tokens
        return request, partial, "length" if full else None
