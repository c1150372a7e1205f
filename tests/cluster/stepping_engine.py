"""An engine without a model, for tests of what is around engines. Its samples follow from the request alone; the
log-probabilities are those that its weights say, so that they show which weights a token was sampled with."""

import hashlib
import os
import time
from functools import partial

import numpy as np
import torch

from dapo_rl.cluster.weights_object_store import WeightsLostError
from dapo_rl.engines.protocol import Completion, Engine
from dapo_rl.errors import UserError
from dapo_rl.types import Trajectory

LONGEST = 40


def number_of(*parts):
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest())


def length_of(request, index):
    return min(5 + number_of(request.seed, index, "length") % (LONGEST - 5), request.params.max_new_tokens)


def text_of(request, index):
    """A third of the groups is all right, a third all wrong."""
    kind = number_of(request.seed, "kind") % 3
    return "right" if kind == 0 or (kind == 1 and index % 2) else "wrong"


class Numbers:
    """A source of two weights that are equal, in a bucket each."""

    def __init__(self, value):
        self.value = value

    def buckets(self, nbytes):
        for name in ("first", "second"):
            yield [(name, torch.tensor([float(self.value)]))]


class SteppingEngine(Engine):
    """One token for each sample in every step, which takes `pace` seconds."""

    version = 0

    def __init__(self, source, pace=0.0, trouble=None):
        self.pace, self.trouble = pace, trouble or {}
        self.rows = []
        self.weights = {}
        self._load(source)

    def _load(self, source):
        for bucket in source.buckets(1):
            for name, tensor in bucket:
                self.weights[name] = float(tensor[0])
                if self.trouble.get("load") == self.weights[name] and _once(self.trouble["flag"]):
                    raise RuntimeError("the second half is missing")
                if self.trouble.get("lost_weights") == self.weights[name] and _once(self.trouble["flag"]):
                    raise WeightsLostError("their host was lost")

    def submit(self, request):
        if self.trouble.get("refuse") == request.id:
            raise UserError("engine: this request is refused")
        for begun in (*request.partial, *map(Trajectory.nothing, request.starting)):
            self.rows.append([request, begun])

    def poll(self, timeout_s=None):
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while self.rows and (end is None or time.monotonic() < end):
            if any(row[0].id == self.trouble.get("hang") for row in self.rows) and _once(self.trouble["flag"]):
                time.sleep(3600)
            time.sleep(self.pace)
            for row in self.rows:
                row[1] = self._with_a_token(*row)
            done = [row for row in self.rows if len(row[1].token_ids) == length_of(row[0], row[1].index)]
            self.rows = [row for row in self.rows if row not in done]
            if done:
                return [self._completion(request, begun) for request, begun in done]
        return []

    def _with_a_token(self, request, begun):
        assert self.weights["first"] == self.weights["second"], "half a version"
        position = len(begun.token_ids)
        token = number_of(request.seed, begun.index, position) % 1000
        return begun.then(np.array([token], np.int32), np.array([-self.weights["first"]], np.float32), self.version)

    def _completion(self, request, begun):
        columns = (begun.token_ids, begun.logps, text_of(request, begun.index), "stop", begun.versions)
        return Completion(request.id, begun.index, Trajectory(*columns))

    def cancel(self, ids):
        lost = sum(len(begun.token_ids) for request, begun in self.rows if request.id in ids)
        self.rows = [row for row in self.rows if row[0].id not in ids]
        return lost

    def receive(self, version, source):
        self._load(source)
        self.version = version

    def take_unfinished(self):
        requests = {request.id: request for request, _ in self.rows}
        written = {name: [begun for request, begun in self.rows if request.id == name] for name in requests}
        self.rows = []
        return [request.left(written[name]) for name, request in requests.items()]


def _once(flag):
    """True the first time, in whichever process."""
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _make(weights, pace, trouble):
    engine = SteppingEngine(weights, pace, trouble)
    engine.version = weights.version
    return engine


def stepping(pace=0.0, **trouble):
    """What a pool builds its engines with. `trouble`: what goes wrong, once, as a file `flag` records."""
    return partial(_make, pace=pace, trouble=trouble)
