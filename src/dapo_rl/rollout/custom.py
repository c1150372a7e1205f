"""A user's own engine behind the protocol: its mistakes are one line that names the method."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from dapo_rl.base.quote import describe, describe_traceback
from dapo_rl.errors import DivergedError, NonFiniteError, UserError
from dapo_rl.models.weights import WeightSource
from dapo_rl.rollout.engine import Completion, Request

ENGINE_METHODS = ("submit", "poll", "cancel", "receive", "take_unfinished")


class CustomEngine:
    """Calls the engine, and turns what it raises, or what it returns instead of a result, into a `UserError`."""

    def __init__(self, engine: Any, name: str) -> None:
        self.engine, self._name = engine, name
        self._open: dict[str, set[int]] = {}
        """By request, the samples that it was asked for and has not returned."""
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
        self._open[request.id] = set(request.indices)
        self._call("submit", request)

    def poll(self, timeout_s: float | None = None) -> list[Completion]:
        completions: list[Completion] = self._items("poll", Completion, timeout_s)
        if not completions and timeout_s is None and self._open:
            raise self._wrong("poll", f"returned nothing while {len(self._open)} requests are unfinished")
        for completion in completions:
            missing = self._open.get(completion.request_id, set())
            if completion.index not in missing:
                raise self._wrong("poll", f"returned sample {completion.index} of {completion.request_id} unasked")
            missing.discard(completion.index)
            if not missing:
                del self._open[completion.request_id]
        return completions

    def cancel(self, ids: Collection[str]) -> int:
        self._open = {name: indices for name, indices in self._open.items() if name not in ids}
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
        returned = {request.id: set(request.indices) for request in requests}
        wrong = [name for name in {**self._open, **returned} if self._open.get(name) != returned.get(name)]
        if wrong:
            raise self._wrong("take_unfinished", f"gave back other samples of {wrong[0]} than are unfinished")
        self._open = {}
        return requests

    def close(self) -> None:
        if callable(getattr(self.engine, "close", None)):
            self._call("close")

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
