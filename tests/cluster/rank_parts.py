"""Policies of the embedded model for tests, in one process and on ranks."""

import errno
import os
import time
from datetime import timedelta
from functools import cache
from typing import ClassVar
from unittest import mock

import numpy as np
import torch
from support import small_model, tokenizer, train_sample
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import filesystem

from dapo_rl.cluster.distributed_policy import DistributedPolicy
from dapo_rl.cluster.policy_worker import PolicyWorker
from dapo_rl.cluster.ray_ranks import Place, RayRanks
from dapo_rl.config import AlgoSettings, ModelSettings, TrainSettings
from dapo_rl.models.load import load_model, pad_id
from dapo_rl.models.lora import add_lora
from dapo_rl.train.policy import HFPolicy


def settings(token_budget=60, aggregation="token-mean", **changes):
    return {
        "temperature": 1.0,
        "algo": AlgoSettings(aggregation=aggregation),
        "train": TrainSettings(lr=1e-3, max_grad_norm=0.5),
        "norm_length": 20,
        "token_budget": token_budget,
    } | changes


def loaded(tied=True):
    """The embedded model, whose embeddings are tied, or a small one whose are not."""
    if tied:
        return load_model(ModelSettings(device="cpu"))
    return small_model(tie_word_embeddings=False), tokenizer()


def parts(tied, reference, changes):
    """The model, with adapters that are not zero if the settings say so, and what a policy takes beside it."""
    model, words = loaded(tied)
    lora = changes["settings"].lora if "settings" in changes else None
    if lora is not None:
        add_lora(model, lora, seed=0)
        torch.manual_seed(1)
        for weight in (p for name, p in model.named_parameters() if ".lora_B." in name):
            torch.nn.init.normal_(weight, std=0.02)
    frozen = None
    if reference:
        frozen = loaded(tied)[0].requires_grad_(False) if lora is None else model
    return model, {"pad_id": pad_id(words), "tokenizer": words, "reference": frozen}


def one_process(tied=True, reference=False, **changes):
    model, how = parts(tied, reference, changes)
    return HFPolicy(model, **how, **settings(**changes))


class Rank:
    """A rank whose policy tests can replace, so that they share processes."""

    def __init__(self, place: Place):
        self._place = place

    def notes(self):
        return None, None

    def build(self, tied=True, reference=False, changes=None):
        model, how = parts(tied, reference, changes or {})
        self.policy = PolicyWorker(lambda: (model, how), place=self._place, **settings(**(changes or {})))

    def build_late(self, seconds):
        """Loads for longer than torch's groups wait by default."""
        model, how = parts(True, False, {})

        def load():
            time.sleep(seconds)
            return model, how

        with mock.patch.object(distributed_c10d, "default_pg_timeout", timedelta(seconds=seconds / 2)):
            self.policy = PolicyWorker(load, place=self._place, **settings())

    def gradients(self):
        full = {n: p.grad.full_tensor() for n, p in self.policy.model.named_parameters() if p.grad is not None}
        return full if self._place.rank == 0 else None

    def moments(self):
        names = {p: n for n, p in self.policy.model.named_parameters()}
        state = self.policy.optimizer.state
        full = {names[p]: (s["exp_avg"].full_tensor(), s["exp_avg_sq"].full_tensor()) for p, s in state.items()}
        return full if self._place.rank == 0 else None

    def eager(self, stance):
        """The 8-bit optimizer compiles its step, which takes longer than a test."""
        torch.compiler.set_stance(stance)

    def moment_bytes(self):
        """The elements and bytes of the first moment of each weight in 8 bits."""
        names = {p: n for n, p in self.policy.model.named_parameters()}
        local = {names[p]: s["exp_avg"].to_local() for p, s in self.policy.optimizer.state.items()}
        parts = {name: (m.codes, m.scale) if hasattr(m, "codes") else (m,) for name, m in local.items()}
        return {name: (local[name].numel(), sum(part.nbytes for part in parts[name])) for name in local}

    def spoil_moment(self):
        """One scale of the last rank is not finite."""
        if self._place.rank == self._place.world_size - 1:
            moments = (s["exp_avg"].to_local() for s in self.policy.optimizer.state.values())
            next(m for m in moments if hasattr(m, "scale")).scale[0] = float("nan")

    def sizes(self):
        return [p.to_local().numel() for p in self.policy.model.parameters()]

    def spoil(self, number):
        """One weight of the last rank becomes this number."""
        if self._place.rank == self._place.world_size - 1:
            with torch.no_grad():
                next(p for p in self.policy.model.parameters() if p.to_local().numel()).to_local().view(-1)[0] = number

    def limit(self, rank, layer, tokens):
        """This rank runs out of memory in a layer that gets more tokens than these."""

        def check(module, arguments, more):
            if more["hidden_states"].shape[1] > tokens:
                raise torch.OutOfMemoryError("no memory")

        if self._place.rank == rank:
            self.policy.model.model.layers[layer].self_attn.register_forward_pre_hook(check, with_kwargs=True)

    def write_over_quota(self, directory):
        """A file server may report it when a file is complete."""
        error = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        with mock.patch.object(filesystem.os, "fsync", side_effect=error):
            self.policy.write_shards(directory)

    def budget(self):
        return self.policy._token_budget

    def __getattr__(self, name):
        return getattr(self.policy, name)


class WarmRanks(RayRanks):
    """Ranks in actors that were used before and have imported everything. An actor keeps its number, by which torch
    caches where its shards are. There is one such object at a time: another one closes it."""

    actors: ClassVar = {}
    current: ClassVar = None

    def _start(self):
        if WarmRanks.current is not None:
            WarmRanks.current.close()
        WarmRanks.current = self
        if missing := [rank for rank in range(self.world_size) if rank not in self.actors]:
            self.actors |= dict(zip(missing, super()._start(), strict=False))
        return [self.actors[rank] for rank in range(self.world_size)]

    def _end(self, actors, kill):
        """Ends those that do not leave the group by themselves; the others are used again."""
        WarmRanks.current = None
        leaving = [actor.leave.remote() for actor in actors]
        self._ray.wait(leaving, num_returns=len(leaving), timeout=2)
        for rank, leave in enumerate(leaving):
            try:
                self._ray.get(leave, timeout=0)
            except self._ray.exceptions.RayError:
                super()._end([self.actors.pop(rank)], kill=True)

    @property
    def is_open(self):
        return bool(self._actors)


class RanksOfTests(DistributedPolicy):
    """A policy on ranks that can be built again in the same processes."""

    def build(self, tied=True, reference=False, **changes):
        self.ranks.call("build", tied, reference, changes)
        return self

    @property
    def ranks(self):
        return self._ranks


@cache
def _scoring():
    return one_process()


def make_samples(seed=0, count=12, masked=(), group_size=3):
    """Samples of random tokens in groups that share a prompt, of very different lengths, a bit off the policy."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, 60, rng.integers(2, 9)).tolist() for _ in range(-(-count // group_size))]
    raw = [
        train_sample(
            prompt_ids=prompts[i // group_size],
            token_ids=rng.integers(3, 60, rng.integers(1, 24)).tolist(),
            logps=0.0,
            advantages=float(rng.normal()),
            group=i // group_size,
            in_loss=i not in masked,
        )
        for i in range(count)
    ]
    logps = _scoring().score(raw)
    return [s.replace(logps=lp + rng.normal(0, 0.3, len(lp))) for s, lp in zip(raw, logps, strict=True)]


def weights_of_policy(policy):
    return {name: t.detach().clone() for bucket in policy.weights().buckets(1 << 20) for name, t in bucket}


def assert_close(mine, other, **tolerance):
    torch.testing.assert_close(mine, other, **({"atol": 1e-5, "rtol": 1e-4} | tolerance))
