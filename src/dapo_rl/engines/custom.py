"""A user's own engine behind the protocol: its mistakes are one line that names the method."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch

from dapo_rl.base.load import load_function, spec_of
from dapo_rl.base.quote import describe, describe_traceback
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.choices import is_function
from dapo_rl.engine_specs import ENGINES
from dapo_rl.engines.protocol import Completion, Engine, EngineInputs, Request
from dapo_rl.errors import DivergedError, NonFiniteError, UserError
from dapo_rl.models.weights import WeightSource
from dapo_rl.types import KEPT_IDS, Trajectory

ENGINE_METHODS = ("submit", "poll", "cancel", "receive", "take_unfinished")
ROUNDING = 1e-3
"""Log-probabilities may exceed 0 by this much: they are rounded."""


def build_custom_engine(named: str | Callable[..., Any], inputs: EngineInputs) -> CustomEngine:
    """Calls a class or function as `Class(model, tokenizer, settings, dtype=dtype, longest=longest, **options)`."""
    name, make = (named, _load(named)) if isinstance(named, str) else (spec_of(named), named)
    arguments = (inputs.model, inputs.tokenizer, inputs.settings)
    try:
        engine = make(*arguments, dtype=inputs.dtype, longest=inputs.longest, **inputs.options)
    except (UserError, KeyboardInterrupt, torch.OutOfMemoryError):
        raise
    except BaseException as error:
        raise UserError(f"engine: {name} raised {describe(error)}", describe_traceback(error)) from error
    try:
        return CustomEngine(engine, name, vocabulary_of(inputs.model))
    except UserError:
        if _has_close(engine):
            engine.close()
        raise


def is_engine(given: Any) -> bool:
    """Whether `given` is an engine, rather than a class or function that makes one."""
    return not isinstance(given, type) and (not callable(given) or all(hasattr(given, m) for m in ENGINE_METHODS))


def vocabulary_of(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _load(spec: str) -> Callable[..., Any]:
    if not is_function(spec):
        hint = did_you_mean(nearest(spec, ENGINES), f"there are {', '.join(ENGINES)}")
        raise UserError(f"engine: there is no engine {spec!r}{hint}")
    try:
        return load_function(spec)
    except UserError as error:
        raise UserError(f"engine: {error}", error.more) from error


def _has_close(engine: Any) -> bool:
    return callable(getattr(engine, "close", None))


class CustomEngine(Engine):
    """Calls the engine, and turns what it raises, or what it returns instead of a result, into a `UserError`. Methods
    that the engine does not have are those of `Engine`."""

    def __init__(self, engine: Any, name: str, vocabulary: int = 2**31 - 1) -> None:
        self.engine, self._name, self._vocabulary = engine, name, vocabulary
        self._open: dict[str, tuple[Request, set[int]]] = {}
        """Requests, with the samples that the engine has not returned."""
        self._taken = False
        """Whether the engine has just given back what is unfinished: it owes the rest to the next poll."""
        for method in ENGINE_METHODS:
            if not callable(getattr(engine, method, None)):
                raise UserError(
                    f"engine: {name}: {type(engine).__name__} has no method {method}; an engine has "
                    f"{', '.join(ENGINE_METHODS)}"
                )
        if not isinstance(getattr(engine, "version", None), int):
            raise UserError(f"engine: {name}: {type(engine).__name__} has no version; set self.version = 0")

    @property
    def version(self) -> int:
        return int(self.engine.version)

    def submit(self, request: Request) -> None:
        self._open[request.id] = (request, set(request.indices))
        self._taken = False
        self._call("submit", request)

    def poll(self, timeout_s: float | None = None) -> list[Completion]:
        completions: list[Completion] = self._items("poll", Completion, timeout_s)
        if not completions and timeout_s is None and self._open:
            raise self._wrong("poll", f"returned nothing while {len(self._open)} requests are unfinished")
        for completion in completions:
            self._settle(completion)
        if self._taken and self._open:
            lost = next(iter(self._open))
            raise self._wrong("take_unfinished", f"gave back other samples of {lost} than are unfinished")
        self._taken = False
        return completions

    def cancel(self, ids: Collection[str]) -> int:
        self._open = {name: entry for name, entry in self._open.items() if name not in ids}
        lost = self._call("cancel", ids)
        if not isinstance(lost, int):
            raise self._wrong("cancel", f"returned {type(lost).__name__}, not the number of tokens lost")
        return lost

    def receive(self, version: int, source: WeightSource) -> None:
        self._call("receive", version, source)
        if self.version != version:
            raise self._wrong("receive", f"left version at {self.version}; set self.version = version")

    def take_unfinished(self) -> list[Request]:
        requests: list[Request] = self._items("take_unfinished", Request)
        for request in requests:
            missing = self._open.get(request.id, (request, set[int]()))[1]
            if not missing >= {*request.indices}:
                raise self._wrong("take_unfinished", f"gave back other samples of {request.id} than are unfinished")
            missing.difference_update(request.indices)
        self._open = {name: entry for name, entry in self._open.items() if entry[1]}
        self._taken = True
        return requests

    def close(self) -> None:
        if _has_close(self.engine):
            self._call("close")

    def _settle(self, completion: Completion) -> None:
        name, index = completion.request_id, completion.index
        request, missing = self._open.get(name, (None, set[int]()))
        if request is None or index not in missing:
            raise self._wrong("poll", f"returned sample {index} of {name} unasked")
        if fault := self._fault(completion.sample, request):
            raise self._wrong("poll", f"returned sample {index} of {name} with {fault}")
        missing.discard(index)
        if not missing:
            del self._open[name]

    def _fault(self, sample: Any, request: Request) -> str | None:
        """What is wrong with a sample. `Sample` itself makes sure that its arrays have one length."""
        if not isinstance(sample, Trajectory):
            return f"a {type(sample).__name__} instead of a Sample"
        length, limit = len(sample.token_ids), request.params.max_new_tokens
        if not 0 < length <= limit:
            return f"{length} tokens; it has 1 to {limit} (max_new_tokens)"
        if sample.token_ids.min() < 0 or sample.token_ids.max() >= self._vocabulary:
            return f"token ids outside 0 to {self._vocabulary - 1}"
        if not np.isfinite(sample.logps).all() or sample.logps.max() > ROUNDING:
            return "log-probabilities that are not finite and at most 0"
        if sample.versions.min() < 0 or sample.versions.max() > self.version:
            return f"versions outside 0 to {self.version}, the engine's own"
        if fault := self._fault_of_kept_ids(sample, request.params.most_kept):
            return fault
        reasons = ("stop", "length")
        if not isinstance(sample.text, str) or sample.finish_reason not in reasons:
            found = f"text {type(sample.text).__name__} and finish_reason {sample.finish_reason!r}"
            return f"{found}; they are str, and {' or '.join(reasons)}"
        return None

    def _fault_of_kept_ids(self, sample: Trajectory, most: int) -> str | None:
        kept_ids = sample.get(KEPT_IDS)
        if kept_ids is None:
            needs = f"sampling.keep_mask needs one, [tokens, {most}], with −1 after the last kept id"
            return f"no column kept_ids; {needs}" if most else None
        if not most:
            return "a column kept_ids, which sampling.keep_mask=false does not have"
        if kept_ids.shape[1] != most:
            return f"kept_ids of the shape {list(kept_ids.shape)}, not [{len(kept_ids)}, {most}] (top_k)"
        if kept_ids.min() < -1 or kept_ids.max() >= self._vocabulary:
            return f"kept_ids outside −1 to {self._vocabulary - 1}"
        if not (kept_ids == sample.token_ids[:, None]).any(1)[sample.mask].all():
            return "kept_ids without the sampled token"
        return None

    def _items(self, method: str, kind: type, *arguments: Any) -> list[Any]:
        items = self._call(method, *arguments)
        if not isinstance(items, list) or not all(isinstance(item, kind) for item in items):
            odd = [item for item in items if not isinstance(item, kind)] if isinstance(items, list) else [items]
            where = " in its list" if isinstance(items, list) else ""
            raise self._wrong(method, f"returned {type(odd[0]).__name__}{where}, not a list of {kind.__name__}")
        return items

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self.engine, method)(*arguments)
        except (UserError, NonFiniteError, DivergedError, KeyboardInterrupt, torch.OutOfMemoryError):
            raise
        except BaseException as error:  # SystemExit among them: sys.exit(0) in an engine is not a finished run
            line = f"engine: {self._name}.{method} raised {describe(error)}"
            raise UserError(line, describe_traceback(error)) from error

    def _wrong(self, method: str, what: str) -> UserError:
        return UserError(f"engine: {self._name}.{method} {what}")
