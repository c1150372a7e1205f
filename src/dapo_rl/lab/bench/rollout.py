"""Measures sampling: each engine through the Engine protocol, and transformers' `generate` as users call it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from dapo_rl.engine_specs import engine_spec
from dapo_rl.engines.build import build_engine
from dapo_rl.engines.protocol import EngineInputs, Request, SamplingParams
from dapo_rl.engines.token_sampling import derive_seed
from dapo_rl.errors import UserError
from dapo_rl.lab.bench.model_shapes import open_model, random_prompts
from dapo_rl.lab.bench.peer_variants import ENGINE_OPTIONS, GENERATE_VARIANTS, all_variants
from dapo_rl.lab.bench.roofline import Size
from dapo_rl.lab.bench.timing import measure
from dapo_rl.lab.bench.workload import Measurement, Workload
from dapo_rl.models.load import check_context, pad_id, pick_device
from dapo_rl.models.response_logps import pad
from dapo_rl.types import IntArray

WARMUP_SHARE = 16
"""With lengths that vary, samples of a warm-up round are shorter by this factor: they end in the same order, so that
every batch size occurs."""


def measure_engine(work: Workload, variant: str = "") -> Measurement:
    model, tokenizer, prompts, facts = _open(work)
    device, spec = pick_device(work.device), engine_spec(work.engine)
    if spec.needs_cuda and not torch.cuda.is_available():
        raise UserError(f"--engine: {work.engine} needs a GPU here")
    if spec.loads_from_disk:  # it gets the whole GPU; random weights are made there, which is faster
        model.cpu()
        torch.cuda.empty_cache()
    settings, dtype = work.config().sampling, getattr(torch, work.dtype)
    options = {}
    if of_variant := ENGINE_OPTIONS.get(work.engine):
        max_batch = settings.max_batch or work.samples
        options = of_variant(variant or all_variants(work.engine)[0], max_batch=max_batch, longest=work.longest)
        facts["options"] = options
        options = {**options, "seeded": False}  # per-request seeds slow vLLM down
    inputs = EngineInputs(model, tokenizer, settings, dtype, work.longest, copies=False, options=options)
    engine = build_engine(work.engine, inputs)
    del model
    params = SamplingParams.of(settings)

    def run(i: int) -> None:
        wanted: dict[tuple[str, int], int] = {}
        for p, (ids, lengths) in enumerate(zip(prompts(i), work.group_lengths, strict=True)):
            if i < work.warmup and work.lengths:
                lengths = tuple(-(-length // WARMUP_SHARE) for length in lengths)
            limits = lengths if work.lengths else None
            request = Request(f"{i}-{p}", ids, work.group, params, derive_seed(work.seed, i, p), limits=limits)
            wanted |= {(request.id, index): length for index, length in enumerate(lengths)}
            engine.submit(request)
        sampled: dict[tuple[str, int], int] = {}
        while completions := engine.poll():
            sampled |= {(done.request_id, done.index): len(done.sample.logps) for done in completions}
        if sampled != wanted:
            wrong = sum(sampled.get(key) != length for key, length in wanted.items())
            raise AssertionError(f"{wrong} of {work.samples} samples do not have the length of the workload")

    result = measure(run, work, device, facts)
    if figures := engine.cache_figures():
        facts |= {"cache": figures, "preempted": engine.preempted}
    if spec.gpu_share is not None and device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        how = f"in use on the GPU, with {work.engine}'s reserved cache"
        return Measurement(result.seconds, total - free, how, result.parts, result.facts)
    return result


def measure_generate(work: Workload, variant: str) -> Measurement:
    """Measures tokens without log-probabilities, which `generate` returns only if it keeps all logits.

    It generates a whole batch until its longest sample ends. Only the tokens of the workload count.
    """
    model, tokenizer, prompts, facts = _open(work)
    device = pick_device(work.device)
    longest = max(work.all_lengths)
    settings = dict(
        do_sample=True,
        top_k=0,
        min_new_tokens=longest,
        max_new_tokens=longest,
        pad_token_id=pad_id(tokenizer),
        **GENERATE_VARIANTS[variant],
    )

    @torch.inference_mode()
    def run(i: int) -> None:
        ids, mask = pad([ids for ids in prompts(i) for _ in range(work.group)], pad_id(tokenizer), side="left")
        output = model.generate(ids.to(device), attention_mask=mask.long().to(device), **settings)
        output[:, ids.shape[1] :].tolist()

    return measure(run, work, device, facts)


def _open(work: Workload) -> tuple[Any, Any, Callable[[int], list[IntArray]], dict[str, Any]]:
    model, tokenizer = open_model(work.model, getattr(torch, work.dtype), work.device, work.seed)
    model.requires_grad_(False)
    texts = random_prompts(tokenizer, work.prompts * work.rounds, work.prompt_tokens, work.seed)
    ids = [np.asarray(tokenizer(text).input_ids, np.int32) for text in texts]
    check_context(model, max(map(len, ids)), work.tokens)

    def prompts(i: int) -> list[IntArray]:
        return ids[i * work.prompts : (i + 1) * work.prompts]

    return model, tokenizer, prompts, {"size": asdict(Size.of(model)), "read_tokens": sum(map(len, ids)) / len(ids)}
