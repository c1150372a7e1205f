"""`verifiers:NAME`: tasksets of verifiers 0.4, with their environments and rewards, as an agent.

`NAME` is an installed taskset. verifiers runs each rollout, and its model is the run's endpoint. Unless the taskset
brings a harness of its own, the rollout is a chat in the process of the episode. The harnesses of verifiers start
programs: `env.options={agent: {harness: {id: bash}, runtime: {type: docker}}}`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from dapo_rl.base.quote import one_line
from dapo_rl.errors import UserError

PREFIX = "verifiers:"
COLUMN = "verifiers_task"
"""The column of a row that has the task's data."""
_CHAT = "dapo_rl_chat"


class VerifiersAgent:
    """An agent, `await agent(task, client)`, that plays one rollout and returns its reward.

    - `model`: the policy's tokenizer. verifiers then renders the prompts and calls `/inference/v1/generate`; without
      it, `/v1/chat/completions`
    - `renderer`: settings of `renderers` for it
    - `taskset`: settings of the taskset
    - others: the environment's settings, such as `agent`, or `id` for an environment other than the taskset's own
    """

    def __init__(
        self,
        name: str,
        *,
        model: str | None = None,
        renderer: Mapping[str, Any] | None = None,
        taskset: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.name, self._model, self._renderer = name, model, renderer
        self._settings = _settings(name, taskset, options)

    async def __call__(self, task: Mapping[str, Any], client: Any) -> float:
        """`task` is a row of `rows`; `client` is OpenAI's, or has its `base_url` and `api_key`."""
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.utils.loaders import load_environment

        if COLUMN not in task:
            raise UserError(f"env.name: {PREFIX}{self.name} needs its own tasks: set data.train=tasks")
        # An environment serves the rollouts of one key: it keeps a client for each that it has seen.
        env = load_environment(self._settings)
        kind = type(env.taskset).task_type()
        given = kind(kind.data_type().model_validate(task[COLUMN]), env.taskset.config.task)
        with _endpoint(str(client.base_url), str(client.api_key)) as (url, variable):
            context = ModelContext(client=self._client(url, variable), model=self._model or "policy")
            async with env.serving():
                episode = await env.run_episode(given, context)
        return _reward(self.name, episode)

    def _client(self, url: str, variable: str) -> Any:
        from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig

        if self._model is None:
            return EvalClientConfig(base_url=url, api_key_var=variable)
        return TrainClientConfig(
            base_url=url, api_key_var=variable, renderer=self._renderer, renderer_model_name=self._model
        )


def rows(name: str, *, limit: int | None = None, taskset: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """The taskset's tasks as rows of data: the prompt as it is shown, and the data of the task."""
    from verifiers.v1.utils.loaders import load_taskset

    loaded = load_taskset(_settings(name, taskset, {}).taskset)
    if limit is None and not loaded.bounded:
        raise UserError(
            f"data.train: {PREFIX}{name} has infinitely many tasks; limit them: {{source: tasks, size: 1000}}"
        )
    try:
        for task in itertools.islice(loaded, limit):
            data = task.data.model_dump(mode="json", exclude_none=True)
            yield {"prompt": task.data.prompt_text or f"{name} {data['idx']}", COLUMN: data}
    except UserError:
        raise
    except Exception as error:  # a taskset's own code may raise anything
        raise UserError(f"data.train: {PREFIX}{name} cannot load its tasks: {one_line(error)}") from None


def _settings(name: str, taskset: Mapping[str, Any] | None, options: Mapping[str, Any]) -> Any:
    """The validated settings of the environment."""
    try:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import default_harness_id, env_config_type, resolve_env_config, taskset_class
    except ImportError:
        raise UserError(f"env.name: {PREFIX}{name} needs verifiers 0.4: pip install 'dapo-rl[verifiers]'") from None
    _register_chat()
    try:
        taskset_class(name)  # its errors say more than those of the settings
        harness = {"harness": {"id": _CHAT}} if default_harness_id(name) == "bash" else {}
        kind = env_config_type(name, str(options.get("id", "")))
        unknown = sorted(set(options) - set(kind.model_fields))
        if unknown:
            raise UserError(f"env.options: {PREFIX}{name} has no {unknown[0]}; it has {', '.join(kind.model_fields)}")
        local = {"runtime": {"type": "subprocess"}, **harness}
        seats = {seat: {**local, **dict(options.get(seat) or {})} for seat in agent_config_fields(kind())}
        return resolve_env_config(
            {"interception": {"type": "server"}, **options, **seats, "taskset": {**(taskset or {}), "id": name}}
        )
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"env.name: {PREFIX}{name} cannot be used: {one_line(error)}") from None


def _register_chat() -> None:
    """Makes our harness known under a name that verifiers can import."""
    from dapo_rl.envs import verifiers_chat

    sys.modules.setdefault(_CHAT, verifiers_chat)
    for name in ("verifiers", "renderers"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextlib.contextmanager
def _endpoint(url: str, key: str) -> Iterator[tuple[str, str]]:
    """The endpoint's URL, and the variable that has its key while the episode lasts: verifiers reads it from there, and
    does not pass on variables of such a name to programs."""
    host = urlsplit(url).hostname or ""
    direct = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
    if host not in direct.split(","):
        os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(filter(None, [direct, host]))
    variable = f"DAPO_API_KEY_{secrets.token_hex(8)}".upper()
    os.environ[variable] = key
    try:
        yield url.rstrip("/"), variable
    finally:
        del os.environ[variable]


def _reward(name: str, episode: Any) -> float:
    """The mean over the policy's parts in the episode. A failure is not a reward."""
    if not episode.ok:
        failed = next((trace.errors[-1] for trace in episode.traces if trace.errors), episode.last_error)
        reason = f"{failed.type}: {failed.message}" if failed is not None else "the rollout failed"
        raise RuntimeError(f"{PREFIX}{name}: {one_line(reason)}")
    rewards = [trace.reward for trace in episode.traces if trace.agent.trainable]
    return float(sum(rewards) / len(rewards)) if rewards else 0.0
