"""The shared types: frozen records of arrays, without behaviour.

A *prompt* is one problem; a *trajectory* is one response to it, as named columns over its tokens; a *verdict* is the
verifier's result for a trajectory; a *group* is all trajectories of one draw of a prompt; a *batch* is the groups that
a step trains on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]

FinishReason = Literal["stop", "length", "turns"]
"""Why a sample ended: a stop token, a stop string or its environment; a limit on tokens; the limit on turns."""

VerdictStatus = Literal["correct", "wrong", "unparseable", "timeout", "error"]
"""`timeout` and `error` are failures of the verifier, not of the response."""


class Record:
    """Two records are equal if all their fields are; arrays are compared element by element."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))  # type: ignore[arg-type]


def _same(mine: Any, other: Any) -> bool:
    if isinstance(mine, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(mine, other)
    if isinstance(mine, dict) and isinstance(other, dict):
        return mine.keys() == other.keys() and all(_same(mine[name], other[name]) for name in mine)
    return bool(mine == other)


def _array(owner: str, values: Any, dtype: Any, length: int | None, wide: bool = False) -> Array:
    """Values as an array with one entry per token, or one row if it is `wide`. A single value applies to all tokens if
    their number is known."""
    given = np.asarray(values)
    if dtype is not None:
        if given.dtype.kind == "f" and given.size and np.issubdtype(dtype, np.integer):
            raise ValueError(f"{owner} has numbers that are not whole")
        given = given.astype(dtype, copy=False)
    if given.ndim == 0 and length is not None:
        given = np.full(length, given)
    if given.ndim == 0 or length not in (None, len(given)) or (dtype is not None and given.ndim != 1 + wide):
        raise ValueError(f"{owner} has the shape {list(given.shape)}, not [{length}{', K' * wide}]")
    return given


@dataclass(frozen=True, slots=True, eq=False)
class Prompt(Record):
    id: str
    """Unique within its data set; names the prompt in logs and seeds its random numbers."""
    text: str
    """The model's input, after the chat template."""
    token_ids: IntArray
    answer: str | None = None
    """The ground truth, if the data has one."""
    data_source: str = ""
    messages: tuple[Mapping[str, str], ...] | None = None
    """The prompt as chat messages, if the data has them."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """All other columns of the row, passed to verifiers unchanged."""
    origin: str = ""
    """The entry of a list of sources that it comes from; empty if there is no list."""
    question: str = ""
    """A prompt of plain text before the chat template, if it went through it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", _array("Prompt.token_ids", self.token_ids, np.int32, None))

    @property
    def conversation(self) -> tuple[Mapping[str, Any], ...]:
        """Its messages; a plain text is a message of the user."""
        return self.messages or ({"role": "user", "content": self.text},)


COLUMNS: dict[str, Any] = {
    "token_ids": np.int32,
    "logps": np.float32,
    "versions": np.int32,
    "mask": np.bool_,
    "loss_mask": np.bool_,
    "fresh": np.bool_,
    "advantages": np.float32,
    "values": np.float32,
    "returns": np.float32,
    "proximal_logps": np.float32,
    "ref_logps": np.float32,
    "entropy_mask": np.bool_,
    "cov_mask": np.bool_,
    "train_logps": np.float32,
    "entropies": np.float32,
    "clipped": np.int8,
    "kept_ids": np.int32,
}
"""The columns that the package itself uses, with one number per token; `kept_ids` has K. A column with another name
keeps its type, and may have any trailing shape.

- `logps`: the log-probability under the policy that sampled the token, at the sampling temperature, before truncation,
  or after it with `kept_ids`; 0 for tokens of an environment
- `kept_ids`: with `sampling.keep_mask`, the tokens that truncation kept at the token's position, the most likely first,
  then −1; only −1 for tokens of an environment
- `versions`: the version of the weights that generated the token
- `mask`: whether the policy wrote the token; tokens of an environment are context only
- `loss_mask`: whether the token is in the loss and in its denominator
- `fresh`: whether the token comes from the weights that the step's first update starts from
- `values` and `returns`: the critic's estimate before the token at the beginning of the step, and its target
- `proximal_logps`, `ref_logps`: under the policy at the beginning of the step, and under the reference policy
- `entropy_mask`, `cov_mask`: whether the token is selected by `algo.top_entropy_quantile`, and by Clip-Cov or KL-Cov
- `train_logps`, `entropies`, `clipped`: of the last update pass; `clipped` is the bound that clipped the gradient
  (0 none, 1 upper, 2 lower, 3 dual clip)
"""


KEPT_IDS = "kept_ids"


@dataclass(frozen=True, slots=True)
class Turn:
    """A span of a trajectory's tokens."""

    start: int
    end: int
    author: Literal["policy", "environment"]
    seconds: float = 0.0
    reward: float = 0.0
    """Of this turn alone."""


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Trajectory(Record):
    """The tokens that follow a prompt: named columns with an entry per token. It is partial until it has a finish
    reason."""

    columns: dict[str, Array]
    text: str
    """The decoded response."""
    finish_reason: FinishReason | None
    """None while it is unfinished."""
    index: int
    """Its place in its group."""
    turns: tuple[Turn, ...]
    """Empty for a single turn of the policy."""
    prompt_ids: IntArray
    """The tokens before it, once it is in a batch."""
    scalars: dict[str, float]
    """Numbers per trajectory, such as `reward`."""
    messages: tuple[Mapping[str, Any], ...]
    """The conversation after the prompt, as OpenAI's messages of JSON values; empty for a single turn."""
    episode: Mapping[str, Any]
    """What a verifier gets of an episode with an environment, as JSON values, until it has judged it: `messages`, the
    whole conversation, of which the first `opening` are before the first turn, and the environment's last `state`."""

    def __init__(
        self,
        token_ids: Any,
        logps: Any = 0.0,
        text: str = "",
        finish_reason: FinishReason | None = None,
        versions: Any = 0,
        mask: Any = True,
        *,
        index: int = 0,
        turns: tuple[Turn, ...] = (),
        prompt_ids: Any = (),
        scalars: Mapping[str, float] | None = None,
        messages: tuple[Mapping[str, Any], ...] = (),
        episode: Mapping[str, Any] | None = None,
        **columns: Any,
    ) -> None:
        """Columns are sequences with an entry per token, or one value for all tokens; None leaves one out."""
        ids = _array("Trajectory.token_ids", token_ids, np.int32, None)
        given = {"logps": logps, "versions": versions, "mask": mask, **columns}
        arrays = {"token_ids": ids} | _columns(given, len(ids))
        prompt = _array("Trajectory.prompt_ids", prompt_ids, np.int32, None)
        self._set(arrays, text, finish_reason, index, turns, prompt, dict(scalars or {}), messages, episode or {})

    def _set(self, *values: Any) -> Trajectory:
        for name, value in zip(_FIELDS, values, strict=True):
            object.__setattr__(self, name, value)
        return self

    @classmethod
    def of_text(cls, text: str, finish_reason: FinishReason | None = "stop") -> Trajectory:
        """A finished trajectory with text but no tokens."""
        return cls((), (), text, finish_reason)

    @classmethod
    def nothing(cls, index: int) -> Trajectory:
        """A partial trajectory without tokens."""
        return _NOTHING.replace(index=index)

    def replace(self, *, scalars: Any = None, **changes: Any) -> Trajectory:
        """A copy with other fields or columns. Scalars are added to those that it has; a column that is None goes.
        `columns` replaces all of them with arrays that are known to be right."""
        of_tokens = {name: changes.pop(name) for name in [*changes] if name not in _FIELDS}
        columns = changes.get("columns", self.columns)
        if of_tokens:
            columns = {name: array for name, array in columns.items() if name not in of_tokens}
            columns |= _columns(of_tokens, len(self.token_ids))
        if "prompt_ids" in changes:
            changes["prompt_ids"] = _array("Trajectory.prompt_ids", changes["prompt_ids"], np.int32, None)
        changes |= {"columns": dict(columns), "scalars": {**self.scalars, **(scalars or {})}}
        values = (changes[name] if name in changes else getattr(self, name) for name in _FIELDS)
        return type(self).__new__(type(self))._set(*values)

    def then(self, token_ids: Any, logps: Any, version: int, **columns: Any) -> Trajectory:
        """A copy with more tokens of the policy appended."""
        more = Trajectory(token_ids, logps, versions=version, **columns).columns
        if not len(self.token_ids):  # a copy, because an engine may give parts of larger arrays
            return self.replace(columns={name: array.copy() for name, array in more.items()})
        if missing := self.columns.keys() ^ more.keys():
            raise ValueError(f"Trajectory.then: {', '.join(sorted(missing))} must be given for all tokens or for none")
        return self.replace(columns={name: np.concatenate([array, more[name]]) for name, array in self.columns.items()})

    def then_observed(self, token_ids: Any) -> Trajectory:
        """A copy with tokens of the environment appended. Other columns than the policy's own are 0 there, and
        `kept_ids` −1."""
        ids = _array("Trajectory.token_ids", token_ids, np.int32, None)
        version = self.versions[-1] if len(self.versions) else 0
        told: dict[str, Any] = {"token_ids": ids, "versions": version, KEPT_IDS: -1}
        return self.replace(
            columns={
                name: np.concatenate([array, np.full((len(ids), *array.shape[1:]), told.get(name, 0), array.dtype)])
                for name, array in self.columns.items()
            }
        )

    def until(self, end: int) -> Trajectory:
        """A copy with the first `end` tokens."""
        return self.replace(columns={name: array[:end] for name, array in self.columns.items()})

    def __getitem__(self, column: str) -> Array:
        return self.columns[column]

    def get(self, column: str) -> Array | None:
        return self.columns.get(column)

    @property
    def token_ids(self) -> IntArray:
        """Including the end-of-sequence token."""
        return self.columns["token_ids"]

    @property
    def logps(self) -> FloatArray:
        return self.columns["logps"]

    @property
    def versions(self) -> IntArray:
        return self.columns["versions"]

    @property
    def mask(self) -> BoolArray:
        return self.columns["mask"]

    @property
    def loss_mask(self) -> BoolArray:
        return self.columns.get("loss_mask", self.mask)

    @property
    def fresh(self) -> BoolArray:
        return self.columns.get("fresh", np.ones(len(self.token_ids), np.bool_))

    @property
    def written(self) -> int:
        """The number of tokens that the policy wrote."""
        return int(np.count_nonzero(self.mask))

    @property
    def trained_tokens(self) -> int:
        """The number of tokens in the loss."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def truncated(self) -> bool:
        """Whether a limit ended it."""
        return self.finish_reason in ("length", "turns")

    @property
    def group(self) -> int:
        """The index of its group in the batch."""
        return int(self.scalars.get("group", 0))

    @property
    def correct(self) -> bool:
        """Whether the verifier judged it correct, once it is in a batch."""
        return bool(self.scalars.get("correct", False))


def _columns(given: Mapping[str, Any], length: int) -> dict[str, Array]:
    if taken := [name for name in given if name not in COLUMNS and hasattr(Trajectory, name)]:
        raise ValueError(f"Trajectory.{taken[0]} is not a column")
    return {
        name: _array(f"Trajectory.{name}", values, COLUMNS.get(name), length, name == KEPT_IDS)
        for name, values in given.items()
        if values is not None
    }


_FIELDS = tuple(each.name for each in fields(Trajectory))
_NOTHING = Trajectory((), ())
Sample = Trajectory
"""The earlier name, for verifiers and engines that users wrote."""


class RewardPart(NamedTuple):
    """What one reward function adds to a score."""

    name: str
    """Unique among the functions of a run; names the curve of the function."""
    score: float
    """Without the weight."""
    weight: float = 1.0


MOST_LOGGED = 64
"""Names that reward functions may log under, of each kind, in a call and in a step."""
Loggable = str | int | float | bool | None
"""A value that a reward function logs for a sample."""


@dataclass(frozen=True, slots=True)
class Verdict:
    score: float
    """The reward before the length penalty."""
    correct: bool
    status: VerdictStatus
    answer: str | None = None
    """The answer extracted from the response, if the verifier extracts one."""
    detail: str = ""
    """The reason, if the verifier failed."""
    parts: tuple[RewardPart, ...] = ()
    """The functions that the score is the weighted sum of; empty for a built-in verifier alone."""
    extra: Mapping[str, Loggable] = field(default_factory=dict)
    """What reward functions log for this sample (TRL's `log_extra`)."""
    metrics: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """What they log for the call (TRL's `log_metric`): sum and number of values. The first verdict of a call has it."""

    @property
    def failed(self) -> bool:
        return self.status in ("timeout", "error")


@dataclass(frozen=True, slots=True)
class Group:
    draw: int
    """The position of this draw in the run: groups are admitted in this order."""
    prompt: Prompt
    samples: tuple[Trajectory, ...]
    verdicts: tuple[Verdict, ...]
    forks: tuple[Trajectory, ...] = ()
    """Further trajectories of its episodes, whose `index` says which: they share the advantage of its sample."""

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """Its samples and their forks."""
        return (*self.samples, *self.forks)

    @property
    def judged(self) -> list[tuple[Trajectory, Verdict]]:
        """Its samples with their verdicts."""
        return list(zip(self.samples, self.verdicts, strict=True))

    @property
    def lengths(self) -> list[int]:
        """Tokens that the policy wrote in each of its episodes."""
        lengths = [sample.written for sample in self.samples]
        for fork in self.forks:
            lengths[fork.index] += fork.written
        return lengths

    @property
    def tokens(self) -> int:
        """Tokens that the policy wrote."""
        return sum(s.written for s in self.trajectories)

    @property
    def first_version(self) -> int:
        """The oldest weight version that generated one of its tokens."""
        return min(int(s.versions.min(initial=2**31 - 1)) for s in self.trajectories)


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of a step. Transforms add columns to their trajectories before the first update."""

    groups: tuple[Group, ...]
    step: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the transforms measured."""
    trains_policy: bool = True
    """False in value pre-training: it is for the critic alone."""

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    @property
    def samples(self) -> tuple[Trajectory, ...]:
        return tuple(sample for group in self.groups for sample in group.trajectories)

    @property
    def trained(self) -> list[Trajectory]:
        """The trajectories with tokens in the loss."""
        return [sample for sample in self.samples if sample.trained_tokens]

    def with_samples(self, samples: Iterable[Trajectory]) -> Batch:
        """The batch with other trajectories, in the order of `samples`."""
        others = iter(samples)
        groups = []
        for group in self.groups:
            own, forks = (tuple(next(others) for _ in old) for old in (group.samples, group.forks))
            groups.append(replace(group, samples=own, forks=forks))
        return replace(self, groups=tuple(groups))

    def with_trained(self, trained: Iterable[Trajectory]) -> Batch:
        """The batch with others in place of `trained`, in their order."""
        others = iter(trained)
        return self.with_samples([next(others) if sample.trained_tokens else sample for sample in self.samples])

    def mini_batches(self, count: int) -> list[tuple[Trajectory, ...]]:
        """Splits the batch into `count` mini-batches of whole groups, as evenly as possible; at least one group
        each."""
        count = min(count, len(self.groups))
        bounds = [round(i * len(self.groups) / count) for i in range(count + 1)]
        return [
            tuple(s for group in self.groups[start:end] for s in group.trajectories) for start, end in pairwise(bounds)
        ]


@dataclass(frozen=True, slots=True)
class Update:
    """The result of one optimizer step."""

    metrics: Mapping[str, float]
    """Empty if no sample was in the loss."""
    columns: tuple[Mapping[str, Array] | None, ...]
    """Token diagnostics of each trajectory of the mini-batch, to add to it; None for those outside the loss."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""


class Verifier(Protocol):
    """Judges the samples of one prompt. It must not raise, whatever the responses contain."""

    def __call__(self, prompt: Prompt, samples: Sequence[Trajectory]) -> list[Verdict]: ...


Drops = Callable[[Sequence[Verdict]], bool]
"""Whether a group with these verdicts is dropped."""


class Pending(Protocol):
    """Verdicts that are being computed."""

    def result(self) -> Sequence[Any]:
        """Waits for them and returns them."""
        ...

    def done(self) -> bool:
        """Whether `result` returns without waiting."""
        ...
