"""Tools, environments and agents of other libraries become settings `env.*`, with rows for what has to be written."""

import pytest

from dapo_rl.convert.write_recipe import recipe_text

VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a.parquet "
    "actor_rollout_ref.model.path=m data.max_response_length=2000 actor_rollout_ref.rollout.n=8 "
)
TURNS, AGENT = "actor_rollout_ref.rollout.multi_turn", "actor_rollout_ref.rollout.agent"
SWIFT = (
    "swift rlhf --rlhf_type grpo --model m --dataset d --num_generations 8 --per_device_train_batch_size 8 "
    "--max_completion_length 100 "
)
AREAL = "gconfig: {n_samples: 4}\ntrain_dataset: {path: d, batch_size: 16}\nactor: {path: m}\n"


def verl(**settings):
    return VERL + " ".join(f"{TURNS}.{name}={value}" for name, value in settings.items())


def test_the_tools_of_verl(converted):
    text = verl(enable=True, tool_config_path="t.yaml", max_assistant_turns=5, max_user_turns=3, format="hermes")
    result, config, rows = converted(text)
    assert config.env.tools == ("TOOLS.py:tool",)
    assert config.env.max_turns == 4
    assert config.env.tool_format == "hermes"
    assert config.env.max_observation_tokens == config.sampling.max_new_tokens == 2000
    path = rows[f"{TURNS}.tool_config_path"]
    assert path.learns
    assert "BaseTool" in path.note
    assert rows[f"{TURNS}.enable"].status == "same"
    assert rows[f"{TURNS}.format"].here == "env.tool_format: hermes"
    assert "tools: ['TOOLS.py:tool']  # not known: write it here" in recipe_text(result)


@pytest.mark.parametrize(
    ("limits", "turns"),
    [
        ({"max_assistant_turns": 5}, 5),
        ({"max_user_turns": 5}, 6),
        ({"max_assistant_turns": 5, "max_user_turns": 5}, 5),
        ({"max_assistant_turns": "null", "max_user_turns": "null"}, 2000),
        ({}, 2000),
    ],
)
def test_the_turns_of_verl(converted, limits, turns):
    assert converted(verl(enable=True, tool_config_path="t.yaml", **limits))[1].env.max_turns == turns


def test_what_verl_limits_by_default_is_told(converted):
    _, _, rows = converted(verl(enable=True, tool_config_path="t.yaml"))
    calls, result = rows[f"{TURNS}.max_parallel_calls"], rows[f"{TURNS}.max_tool_response_length"]
    assert (calls.value, result.value) == (1, 256)
    assert not calls.is_set
    assert calls.learns
    assert result.learns
    assert "the first 1" in calls.note
    assert "characters" in result.note


def test_function_tools_of_verl_are_named_in_their_file(converted):
    _, config, rows = converted(verl(enable=True, function_tool_path="tools.py"))
    assert config.env.tools == ("tools.py:NAME",)
    assert "function_tool" in rows[f"{TURNS}.function_tool_path"].note
    _, config, rows = converted(verl(enable=True, function_tool_path="tools.py", tool_config_path="t.yaml"))
    assert config.env.tools == ("TOOLS.py:tool", "tools.py:NAME")
    assert "BaseTool" in rows[f"{TURNS}.tool_config_path"].note


def test_interactions_and_agent_loops_of_verl(converted):
    _, config, rows = converted(verl(enable=True, interaction_config_path="i.yaml"))
    assert config.env.name == "ENVIRONMENT.py:Environment"
    assert config.env.tools == ()
    assert rows[f"{TURNS}.interaction_config_path"].learns
    _, config, rows = converted(VERL + f"{AGENT}.default_agent_loop=react_agent {AGENT}.agent_loop_config_path=a.yaml")
    assert config.env.agent == "AGENT.py:solve"
    assert rows[f"{AGENT}.default_agent_loop"].learns
    assert rows[f"{AGENT}.agent_loop_config_path"].learns


def test_the_tool_loop_of_verl_without_its_switch(converted):
    _, config, rows = converted(VERL + f"{AGENT}.default_agent_loop=tool_agent {TURNS}.tool_config_path=$DIR/t.yaml")
    assert config.env.tools == ("TOOLS.py:tool",)
    assert rows[f"{AGENT}.default_agent_loop"].status == "same"
    assert rows[f"{TURNS}.tool_config_path"].learns


def test_code_is_explained_where_its_path_is_not_known(converted):
    row = converted(verl(enable=True, tool_config_path="$DIR/t.yaml", format="llama3_json"))[2]
    assert "BaseTool" in row[f"{TURNS}.tool_config_path"].note
    assert row[f"{TURNS}.tool_config_path"].value == "$DIR/t.yaml"
    assert row[f"{TURNS}.format"].here == "env.tool_format: llama3"
    _, config, rows = converted(SWIFT + '--multi_turn_scheduler "$SCHEDULER" --max_turns "$TURNS"')
    assert config.env.name == "ENVIRONMENT.py:Environment"
    assert "open and step" in rows["multi_turn_scheduler"].note
    assert "the value is not known" in rows["max_turns"].note


def test_a_switch_alone_asks_for_tools(converted):
    _, config, rows = converted(verl(enable=True))
    assert config.env.tools == ("TOOLS.py:tool",)
    assert "no tools are named" in rows[f"{TURNS}.enable"].note


@pytest.mark.parametrize(
    "text",
    [
        verl(enable=False, max_assistant_turns=5, tool_config_path="t.yaml", format="hermes"),
        VERL + f"{AGENT}.default_agent_loop=single_turn_agent {TURNS}.max_tool_response_length=9",
        VERL + f"data.tool_config_path=null {AGENT}.agent_loop_config_path=null {AGENT}.num_workers=8",
    ],
)
def test_without_its_switch_verl_has_one_turn(converted, text):
    _, config, rows = converted(text)
    assert not config.env.given
    assert config.env.max_turns == type(config.env)().max_turns
    assert not [row.key for row in rows.values() if row.learns and (TURNS in row.key or AGENT in row.key)]


def test_settings_of_a_fork_of_verl_are_unknown(converted):
    row = converted(verl(enable=True, turn_limit_schedule=3))[2][f"{TURNS}.turn_limit_schedule"]
    assert row.status == "unknown to dapo convert"
    assert row.learns


def test_a_micro_batch_holds_the_results_of_tools(converted):
    budget = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2600 data.max_prompt_length=512"
    _, config, _ = converted(f"{verl(enable=True, tool_config_path='t.yaml')} {budget}")
    assert config.train.token_budget == 512 + 2000 + 2000
    assert converted(f"{VERL} {budget}")[1].train.token_budget == 2600


def test_a_scheduler_of_swift_limits_turns(converted):
    _, config, rows = converted(SWIFT + "--multi_turn_scheduler search --max_turns 3 --agent_template hermes")
    env = config.env
    assert (env.name, env.max_turns, env.max_turn_tokens) == ("ENVIRONMENT.py:Environment", 3, 100)
    assert config.sampling.max_new_tokens == 300
    assert env.tool_format == "hermes"
    assert rows["multi_turn_scheduler"].learns
    assert rows["max_completion_length"].here == "env.max_turn_tokens: 100, sampling.max_new_tokens: 300"


def test_a_scheduler_of_swift_can_limit_the_whole(converted):
    options = (
        "--multi_turn_scheduler search --max_turns 3 --completion_length_limit_scope total --loss_scale last_round"
    )
    _, config, rows = converted(SWIFT + options)
    assert (config.env.max_turns, config.env.max_turn_tokens, config.sampling.max_new_tokens) == (3, None, 100)
    assert rows["loss_scale"].learns


def test_swift_without_a_limit_on_turns(converted):
    config = converted(SWIFT + "--multi_turn_scheduler search")[1]
    assert config.sampling.max_new_tokens == 100 * config.env.max_turns
    total = converted(SWIFT + "--multi_turn_scheduler search --completion_length_limit_scope total")[1]
    assert total.env.max_turns == 100


def test_the_gym_of_swift_may_be_an_option_of_the_server(converted):
    server = "swift rollout --model m --use_gym_env true --gym_env game --max_turns 4\n"
    _, config, rows = converted(server + SWIFT)
    assert (config.env.name, config.env.max_turns) == ("ENVIRONMENT.py:Environment", 4)
    assert rows["use_gym_env"].learns
    assert rows["gym_env"].learns
    _, config, _ = converted(server + SWIFT + "--max_turns 6")
    assert config.env.max_turns == 6, "the training command's own"


def test_one_turn_of_swift(converted):
    _, config, rows = converted(SWIFT + "--max_turns 3 --use_gym_env false --agent_template react_en")
    assert not config.env.given
    assert config.sampling.max_new_tokens == 100
    assert rows["max_turns"].status == "default here"
    assert rows["agent_template"].learns


def test_a_workflow_of_areal_becomes_an_agent(converted):
    _, config, rows = converted(
        AREAL + "workflow: agents.Search\nmax_turns: 4\nagent_run_args: {max_tokens: 5}\n", "a.yaml"
    )
    assert (config.env.agent, config.env.max_turns) == ("AGENT.py:solve", 4)
    assert rows["workflow"].learns
    assert rows["agent_run_args.max_tokens"].learns
    _, config, rows = converted(AREAL + "econfig: {domain: airline}\nmax_llm_calls_per_run: 9\n", "a.yaml")
    assert (config.env.agent, config.env.max_turns) == ("AGENT.py:solve", 9)
    assert rows["(workflow)"].learns
    assert "make it one of your agent" in rows["econfig.domain"].note


def test_the_workflow_of_areal_for_one_turn(converted):
    _, config, rows = converted(AREAL + "workflow: areal.workflow.rlvr.RLVRWorkflow\nmax_turns: null\n", "a.yaml")
    assert not config.env.given
    assert not rows["workflow"].learns


def test_the_tool_iterations_of_trl(converted):
    _, config, rows = converted("num_generations: 8\nmax_tool_calling_iterations: 4\nmodel_name_or_path: m\n", "a.yaml")
    assert config.env.max_turns == 5
    assert rows["max_tool_calling_iterations"].status == "same"
