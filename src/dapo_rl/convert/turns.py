"""Tools, environments and agents: the settings `env.*` from those of other libraries.

Their code cannot be converted. A recipe names a file that does not exist in its place, and a row says what to write.
"""

from __future__ import annotations

from dapo_rl.config import EnvSettings
from dapo_rl.convert.draft import Draft
from dapo_rl.convert.hydra import UnknownValue
from dapo_rl.convert.shared import ROLLOUT

NO_TOOLS = ["TOOLS.py:tool"]
NO_ENVIRONMENT = "ENVIRONMENT.py:Environment"
NO_AGENT = "AGENT.py:solve"
PLACEHOLDERS = (NO_TOOLS, NO_ENVIRONMENT, NO_AGENT)

_GIVEN = ("env.name", "env.tools", "env.agent")
_TURNS, _LOOP = f"{ROLLOUT}.multi_turn", f"{ROLLOUT}.agent.default_agent_loop"
_LOOPS = f"{ROLLOUT}.agent.agent_loop_config_path"
_TOOL_CLASSES = (f"{_TURNS}.tool_config_path", "data.tool_config_path")
_TOOL_FUNCTIONS, _USERS = f"{_TURNS}.function_tool_path", f"{_TURNS}.interaction_config_path"
_SINGLE, _WITH_TOOLS = "single_turn_agent", "tool_agent"
_AS_FUNCTIONS = "write each tool as a function with type hints and a docstring; verl's are classes (BaseTool)"
_AS_ENVIRONMENT = "write it as a class with the methods open and step (docs/environments.md)"
_AS_AGENT = "write it as a function of a task and an OpenAI client, which returns the reward (docs/environments.md)"
_WITHOUT_LIMIT = "no limit there; the length ends an episode"

_FORMATS = {"hermes": "hermes", "llama3": "llama3", "llama3_json": "llama3"}
"""Their names of tool formats, and those here."""
_SCHEDULERS = ("multi_turn_scheduler", "use_gym_env", "gym_env")
_ONE_TURN_WORKFLOW = "RLVRWorkflow"
_OF_AGENTS = ("agent_", "econfig.", "tir.", "judge_engine", "rollout.agent.")


def has_turns(draft: Draft) -> bool:
    return any(draft.settings.get(ours) for ours in _GIVEN)


def verl_turns(draft: Draft) -> None:
    _take_as_text(draft, *_TOOL_CLASSES, _TOOL_FUNCTIONS, _USERS, _LOOPS)
    if not _verl_has_turns(draft):
        keys = [key for key in draft.keys if key.startswith(f"{_TURNS}.")]
        draft.unused("without multi_turn.enable it does nothing", *keys, *_TOOL_CLASSES, _LOOPS)
        draft.unused("a response is one turn", _LOOP)
        return
    _verl_world(draft)
    keys = [f"{_TURNS}.max_assistant_turns", f"{_TURNS}.max_user_turns"]
    assistant, user = map(draft.count, keys)
    limits = [*([assistant] if assistant else []), *([user + 1] if user else [])]
    length = int(draft.setting("sampling.max_new_tokens"))
    note = "turns of the policy: max_assistant_turns, or max_user_turns + 1 if that is less" if user else ""
    draft.put("env.max_turns", min(limits, default=length), *keys, note=note if limits else _WITHOUT_LIMIT)
    if not limits:
        draft.always("env.max_turns", length, _WITHOUT_LIMIT)
    _format(draft, f"{_TURNS}.format")
    draft.always("env.max_observation_tokens", length, "counts tool results in max_response_length")
    calls, result = f"{_TURNS}.max_parallel_calls", f"{_TURNS}.max_tool_response_length"
    most = draft.count(calls)
    note = f"all calls of a turn are made; there, the first {most}. Same if turns have no more"
    draft.explain(calls, "differs", note=note, learns=True)
    note = "characters of a result; shorten it in the tool. env.max_observation_tokens limits those of an episode"
    draft.explain(result, "differs", "env.max_observation_tokens", note, True)
    note = "shorten long results in the tool"
    draft.explain(f"{_TURNS}.tool_response_truncate_side", "differs", note=note, learns=True)
    draft.explain(f"{_TURNS}.enable", "same", _world(draft))


def _take_as_text(draft: Draft, *keys: str) -> None:
    """Values that name code: they are not used, so variables in them need not be known."""
    for key in keys:
        if isinstance(value := draft.keys.get(key), UnknownValue):
            draft.keys[key] = value.text
            draft.rows.pop(key, None)


def _is_given(draft: Draft, key: str) -> bool:
    """Whether a setting is there, known or not."""
    return draft.keys.get(key) not in (None, "", False, 0, [], {})


def _verl_has_turns(draft: Draft) -> bool:
    switch = f"{_TURNS}.enable"
    if _is_given(draft, switch):
        return True
    if _is_given(draft, _LOOP) and draft.keys[_LOOP] != _SINGLE:
        return True
    paths = (*_TOOL_CLASSES, _TOOL_FUNCTIONS, _USERS, _LOOPS)
    return not draft.has(switch) and any(_is_given(draft, key) for key in paths)


def _verl_world(draft: Draft) -> None:
    """`env.agent` for an agent loop of its user's own; otherwise `env.tools`, and `env.name` for simulated users."""
    loop = draft.keys.get(_LOOP)
    if _is_given(draft, _LOOPS) or (_is_given(draft, _LOOP) and loop not in (_SINGLE, _WITH_TOOLS)):
        draft.put("env.agent", NO_AGENT, _LOOPS, _LOOP, note=f"an agent loop: {_AS_AGENT}", learns=True)
        draft.unused("the agent calls its own tools", *_TOOL_CLASSES, _TOOL_FUNCTIONS, _USERS)
        return
    if _is_given(draft, _USERS):
        draft.put("env.name", NO_ENVIRONMENT, _USERS, note=f"an interaction: {_AS_ENVIRONMENT}", learns=True)
    if _is_given(draft, _TOOL_FUNCTIONS):
        classes = NO_TOOLS if any(_is_given(draft, key) for key in _TOOL_CLASSES) else []
        tools = [*classes, f"{draft.keys[_TOOL_FUNCTIONS]}:NAME"]
        note = "name each of its functions, file.py:name, without verl's decorator function_tool"
        draft.put("env.tools", tools, _TOOL_FUNCTIONS, note=note, learns=True)
        draft.explain_again(_TOOL_CLASSES[0], "differs", f"env.tools: {NO_TOOLS[0]}", _AS_FUNCTIONS, True)
    elif any(_is_given(draft, key) for key in _TOOL_CLASSES):
        draft.put("env.tools", NO_TOOLS, *_TOOL_CLASSES, note=_AS_FUNCTIONS, learns=True)
    elif not has_turns(draft):
        keys = (f"{_TURNS}.enable", _LOOP)
        draft.put("env.tools", NO_TOOLS, *keys, note="no tools are named: list them in env.tools", learns=True)
    draft.explain(_LOOP, "same", _world(draft), "calls tools until a turn has no call")


def _world(draft: Draft) -> str:
    return ", ".join(f"{ours}: {draft.settings[ours]}" for ours in _GIVEN if draft.settings.get(ours))


def _format(draft: Draft, *keys: str) -> None:
    for key in keys:
        if ours := _FORMATS.get(str(draft.value(key))):
            draft.put("env.tool_format", ours, key)
        elif _is_given(draft, key):
            note = "the tokenizer's chat template describes tools, and decides how calls are read"
            draft.explain(key, "differs", "env.tool_format: auto", note, draft.value(key) is not None)
        else:
            draft.unused("null sets nothing", key)


def swift_turns(draft: Draft) -> None:
    scope, turns_key, loss = "completion_length_limit_scope", "max_turns", "loss_scale"
    _format(draft, "agent_template", "tools_prompt")
    _take_as_text(draft, "multi_turn_scheduler", "gym_env")
    given = [key for key in _SCHEDULERS if _is_given(draft, key)]
    if not given:
        draft.unused("without multi_turn_scheduler it does nothing", *_SCHEDULERS, turns_key, scope, "context_manager")
        return
    note = f"a scheduler or an environment of the plugin: {_AS_ENVIRONMENT}"
    draft.put("env.name", NO_ENVIRONMENT, *given, note=note, learns=True)
    draft.unused("multi_turn_scheduler counts", *_SCHEDULERS)
    if _is_given(draft, "context_manager"):
        draft.no_counterpart(
            "an environment can write the conversation itself: Observation.conversation", "context_manager"
        )
    length, turns = int(draft.setting("sampling.max_new_tokens")), draft.size(turns_key)
    if draft.value(scope) == "total":
        draft.put("env.max_turns", turns or length, turns_key, note="" if turns else _WITHOUT_LIMIT)
        draft.explain(scope, "same", "sampling.max_new_tokens", "limits the policy's tokens of an episode")
    else:
        count = turns or EnvSettings().max_turns
        note = "" if turns else f"no limit there; {count} turns here"
        draft.put("env.max_turns", count, turns_key, note=note, learns=not turns)
        draft.put("env.max_turn_tokens", length)
        draft.put("sampling.max_new_tokens", length * count)
        here = f"env.max_turn_tokens: {length}, sampling.max_new_tokens: {length * count}"
        note = f"per turn: {count} turns of {length} tokens"
        draft.explain_again("max_completion_length", "same", here, note)
        draft.explain(scope, "same", here, note)
    if draft.value(loss) == "last_round":
        draft.explain_again(loss, "no counterpart", note="all turns of the policy are trained on", learns=True)


def areal_turns(draft: Draft) -> None:
    _take_as_text(draft, "workflow", "eval_workflow")
    workflows = [key for key in ("workflow", "eval_workflow") if _is_given(draft, key)]
    own = [key for key in workflows if not str(draft.value(key)).endswith(_ONE_TURN_WORKFLOW)]
    draft.unused("a response is one turn, which the verifier scores", *(key for key in workflows if key not in own))
    options = [key for key in draft.keys if key.startswith(_OF_AGENTS) and _is_given(draft, key)]
    limits = [key for key in ("max_turns", "max_llm_calls_per_run") if _is_given(draft, key)]
    if not own and not options and not limits:
        draft.unused("null sets nothing", "workflow", "eval_workflow", "max_turns", "max_llm_calls_per_run")
        return
    draft.put("env.agent", NO_AGENT, *own, note=f"a workflow: {_AS_AGENT}", learns=True)
    if not own:
        note = f"its script has the workflow: {_AS_AGENT}"
        draft.add_row("(workflow)", "", "differs", f"env.agent: {NO_AGENT}", note, True)
    counts = [count for key in limits if (count := draft.size(key))]
    if counts:
        draft.put("env.max_turns", min(counts), *limits)
