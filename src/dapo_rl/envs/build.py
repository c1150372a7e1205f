"""Builds the environment that the settings, or the trainer's arguments, name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from dapo_rl.base.load import load_function
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.config import Config, EnvSettings, SourceSettings, source_name
from dapo_rl.data.tasks import NAME as TASKS
from dapo_rl.envs.guess import Guess
from dapo_rl.envs.inline_calculator import InlineCalculator
from dapo_rl.envs.pool import EnvironmentPool, Environments
from dapo_rl.envs.protocol import ToolSchema
from dapo_rl.envs.trl_environment import TRLEnvironments, check_class, is_trl_environment, owns_reward
from dapo_rl.errors import UserError

BUILTIN: dict[str, type] = {"guess": Guess, "calculator": InlineCalculator}
VERIFIERS = "verifiers:"


class Factory:
    """Makes the environment of each episode, in its process."""

    def __init__(self, environment: Any, *arguments: Any, **options: Any) -> None:
        self.environment = environment
        """Its class, which says whether it is asynchronous, stateless and deterministic."""
        self.tools: Sequence[ToolSchema] = ()
        """The tools of all episodes, where they are known before one begins."""
        self.is_async = self.deterministic = False
        """Whether the environments it makes are, where their class does not say it of all."""
        self._arguments, self._options = arguments, options

    def __call__(self) -> Any:
        return self.environment(*self._arguments, **self._options)


Make = Callable[[Any, EnvSettings, str], Environments]


def build_environment(
    config: Config,
    tools: Sequence[Any] | None = None,
    environment_factory: Any = None,
    make: Make = EnvironmentPool,
) -> Environments | None:
    """The environments of a run; None if its episodes have one turn. `tools` and `environment_factory` are the
    trainer's arguments. `make` is where they run."""
    settings = config.env
    if not settings.given and not tools and environment_factory is None:
        return None
    factory = _factory(settings, config, tools or (), environment_factory)
    name = settings.name or settings.agent or getattr(factory.environment, "__name__", "environment")
    return make(factory, settings, str(name))


def gives_rewards(config: Config, environment_factory: Any = None) -> bool:
    """Whether the environment gives rewards, rather than verifiers alone."""
    if environment_factory is not None:
        return owns_reward(environment_factory)
    name = config.env.name or ""
    kind: Any = BUILTIN.get(name)
    if ":" in name and not name.startswith((VERIFIERS, *(f"{prefix}:" for prefix in ADAPTERS))):
        kind = load_function(name)
    if is_trl_environment(kind):
        return owns_reward(kind)
    return bool(name or config.env.agent) and bool(getattr(getattr(kind, "environment", kind), "rewards", True))


def _factory(
    settings: EnvSettings, config: Config, tools: Sequence[Any], environment_factory: Any
) -> Factory | TRLEnvironments:
    ways = {
        "env.name": settings.name,
        "env.agent": settings.agent,
        "env.tools": (*settings.tools, *settings.mcp, *(tools if environment_factory is None else ())),
        "environment_factory": environment_factory,
    }
    chosen = [way for way, value in ways.items() if value]
    if len(chosen) > 1:
        raise UserError(f"{chosen[0]}: an episode has one environment; leave out {' and '.join(chosen[1:])}")
    if settings.agent:
        from dapo_rl.envs.agent import check_agent

        check_agent(settings.agent)
        return _of_agent(settings.agent, config)
    if settings.name and settings.name.startswith(VERIFIERS):
        from dapo_rl.envs.verifiers_env import VerifiersAgent

        return _of_agent(VerifiersAgent(settings.name.removeprefix(VERIFIERS), **settings.options), config)
    if settings.name:
        return _named(settings.name, settings)
    if environment_factory is not None:
        return TRLEnvironments(environment_factory, tools)
    return _of_tools(settings, tools)


def _of_agent(agent: Any, config: Config) -> Factory:
    from dapo_rl.envs.agent import AgentEnvironment

    env = config.env
    return Factory(AgentEnvironment, agent, config.model.name, env.host, env.port, env.tls)


def environment_rows(config: Config, source: Any) -> Any:
    """The rows of a data source: for `tasks` of an environment that has a list of its own, that list."""
    name = config.env.name or ""
    if not name.startswith(VERIFIERS) or source_name(source) != TASKS:
        return source
    from dapo_rl.envs.verifiers_env import rows

    size = (source.model_extra or {}).get("size") if isinstance(source, SourceSettings) else None
    return list(rows(name.removeprefix(VERIFIERS), limit=size, taskset=config.env.options.get("taskset")))


def _named(name: str, settings: EnvSettings) -> Factory | TRLEnvironments:
    prefix, colon, rest = name.partition(":")
    if name in BUILTIN:
        return _with_options(BUILTIN[name], settings)
    if not colon:
        hint = did_you_mean(nearest(name, BUILTIN), f"built in are {', '.join(BUILTIN)}")
        raise UserError(f"env.name: no environment {name!r}; a class is named file.py:Class or module:Class{hint}")
    if prefix in ADAPTERS:
        return _adapted(prefix, rest, settings)
    kind = load_function(name)
    if is_trl_environment(kind):
        check_class(kind, "env.name")
        return TRLEnvironments(kind)
    if not inspect.isclass(kind):
        kind = getattr(kind, "environment", kind)
    if not callable(getattr(kind, "step", None)):
        raise UserError(
            f"env.name: {name} has no method step; an environment is a class with step(turn), and open(prompt, seed) "
            "where it has something to begin with"
        )
    _check_methods(kind, name)
    return _with_options(kind, settings)


def _check_methods(kind: Any, name: str) -> None:
    """Raises UserError for methods that do not take what they get."""
    for method, given in {"open": ("prompt", "seed"), "step": ("turn",)}.items():
        function = getattr(kind, method, None)
        if not inspect.isfunction(function) or not inspect.isclass(kind):
            continue
        try:
            inspect.signature(function).bind(None, *given)
        except TypeError as error:
            raise UserError(
                f"env.name: {name}: {method} must take {' and '.join(given)}, as {method}(self, {', '.join(given)}): "
                f"{error}"
            ) from None


def _with_options(kind: Callable[..., Any], settings: EnvSettings, *arguments: Any) -> Factory:
    try:
        signature = inspect.signature(kind)
        signature.bind(*arguments, **settings.options)
    except TypeError as error:
        takes = f"it takes {', '.join(signature.parameters)}" if signature.parameters else "it takes none"
        raise UserError(f"env.options: {getattr(kind, '__name__', kind)}: {error}; {takes}") from None
    except ValueError:
        pass
    return Factory(kind, *arguments, **settings.options)


def _of_tools(settings: EnvSettings, tools: Sequence[Any]) -> Factory:
    from dapo_rl.envs.tools import Tool, ToolsEnvironment, load_tools

    loaded = load_tools([*settings.tools, *tools])
    if settings.mcp:
        from dapo_rl.envs.mcp_tools import mcp_tools

        loaded += [Tool(each.name, each.schema, each) for server in settings.mcp for each in mcp_tools(server)]
    environment = ToolsEnvironment(loaded)
    factory = Factory(ToolsEnvironment, loaded)
    factory.tools, factory.is_async = environment.schemas, environment.is_async
    factory.deterministic = environment.deterministic
    return factory


ADAPTERS = {
    "openenv": "dapo_rl.envs.openenv:OpenEnv",
    "gymnasium": "dapo_rl.envs.gymnasium_env:Gymnasium",
    "textarena": "dapo_rl.envs.textarena_env:TextArena",
}


def _adapted(prefix: str, name: str, settings: EnvSettings) -> Factory:
    factory = _with_options(load_function(ADAPTERS[prefix]), settings, name)
    example = factory()  # a wrong name is found before a model is loaded
    if prefix == "gymnasium":
        example.close()
    factory.deterministic = example.deterministic
    return factory
