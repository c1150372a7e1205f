"""Agents as environments. The test plays the policy."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import openai
import pytest
from support import REPOSITORY

from dapo_rl.envs.agent import AgentEnvironment, AgentError
from dapo_rl.envs.protocol import AssistantTurn, Observation, Opening, ToolCall
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt, Verdict

pytestmark = pytest.mark.slow

QUESTION = {"role": "user", "content": "What is 2+3?"}
PROMPT = Prompt(
    "p1",
    "<user>What is 2+3?",
    np.array([1, 2]),
    answer="5",
    messages=(QUESTION,),
    columns={"level": 3, "bits": np.arange(2), "seed": "a column"},
)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


async def play(env, *turns, seed=7):
    """Opens the environment and plays the turns; all it answered."""
    try:
        answers = [await env.open(PROMPT, seed)]
        for number, turn in enumerate(turns, start=1):
            given = turn if isinstance(turn, AssistantTurn) else AssistantTurn(turn, number=number)
            answers.append(await env.step(given))
        return answers
    finally:
        await env.close()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def two_calls(task, client):
    messages = list(task["messages"])
    for _ in range(2):
        reply = await client.chat.completions.create(model="m", messages=messages, max_tokens=9)
        messages += [reply.choices[0].message.model_dump(), {"role": "user", "content": "Are you sure?"}]
    return float(reply.choices[0].message.content == task["answer"])


def with_tool(task, client):
    """Synchronous, streaming, with a tool call whose message is sent back."""
    messages = list(task["messages"])
    with client.chat.completions.stream(model="m", messages=messages, tools=[ADD]) as stream:
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls
    total = sum(json.loads(call.function.arguments).values())
    messages += [message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": str(total)}]
    reply = client.chat.completions.create(model="m", messages=messages, tools=[ADD])
    return {"reward": 0.5, "correct": reply.choices[0].message.content == task["answer"]}


def test_an_agent_makes_the_conversation():
    opening, second, last = run(play(AgentEnvironment(two_calls), "4", "5"))
    assert opening == Opening((QUESTION,), max_tokens=9)
    conversation = (QUESTION, {"role": "assistant", "content": "4"}, {"role": "user", "content": "Are you sure?"})
    assert second == Observation(conversation=Opening(conversation), max_tokens=9)
    assert last == Observation(reward=1.0, done=True)


def test_a_synchronous_agent_with_tools():
    turn = AssistantTurn("", (ToolCall("add", {"a": 2, "b": 3}, id="c1"),))
    opening, second, last = run(play(AgentEnvironment(with_tool), turn, "5"))
    assert opening.tools == (ADD,)
    assert second.conversation.messages == (
        QUESTION,
        turn.message,
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
    )
    assert (second.tool_calls, second.tool_errors) == (1, 0)
    assert last == Observation(reward=0.5, done=True, correct=True)


def test_the_task():
    async def agent(task, client):
        tasks.append(task)
        await client.models.list()
        await client.chat.completions.create(model="m", messages=task["messages"])
        return Verdict(-1.0, False, "wrong")

    tasks = []
    last = run(play(AgentEnvironment(agent), "x"))[-1]
    assert last == Observation(reward=-1.0, done=True, correct=False)
    bits = tasks[0].pop("bits")
    assert list(bits) == [0, 1]
    assert tasks == [{"prompt": "What is 2+3?", "messages": [QUESTION], "answer": "5", "level": 3, "seed": 7}]


def test_tokens_in_tokens_out():
    async def agent(task, client):
        url = str(client.base_url).removesuffix("/v1/") + "/inference/v1/generate"
        ids = [1, 2]
        for _ in range(2):
            body = {"token_ids": ids, "sampling_params": {"logprobs": 1, "max_tokens": 6}}
            reply = await client.post(url, body=body, cast_to=object)
            ids = ids + reply["choices"][0]["token_ids"] + [9]
        return reply["choices"][0]["logprobs"]["content"][0]["logprob"]

    turns = [AssistantTurn("x", token_ids=(3, 4), logps=(-1.0, -2.0)), AssistantTurn("y", token_ids=(5,), logps=(-4,))]
    opening, second, last = run(play(AgentEnvironment(agent), *turns))
    assert opening == Opening((), prompt_ids=(1, 2), max_tokens=6)
    assert second == Observation(prompt_ids=(1, 2, 3, 4, 9), max_tokens=6)
    assert last == Observation(reward=-4.0, done=True)


def test_concurrent_calls_are_turns_one_after_another():
    async def agent(task, client):
        async def ask(number):
            message = {"role": "user", "content": str(number)}
            reply = await client.chat.completions.create(model="m", messages=[message])
            return reply.choices[0].message.content == f"answer {number}"

        return sum(await asyncio.gather(*map(ask, range(5))))

    async def main():
        env = AgentEnvironment(agent)
        opening = await env.open(PROMPT, 0)
        asked, observation = [], Observation(conversation=opening)
        while not observation.done:
            (message,) = observation.conversation.messages
            asked.append(message["content"])
            observation = await env.step(AssistantTurn(f"answer {message['content']}"))
        await env.close()
        return sorted(asked), observation.reward

    assert run(main()) == (list("01234"), 5.0)


def test_an_abandoned_call_is_skipped():
    async def agent(task, client):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.chat.completions.create(model="m", messages=[QUESTION]), 0.2)
        reply = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "again"}])
        return float(reply.choices[0].message.content)

    async def main():
        env = AgentEnvironment(agent)
        await env.open(PROMPT, 0)
        await asyncio.sleep(0.5)
        second = await env.step(AssistantTurn("1"))
        last = await env.step(AssistantTurn("2"))
        await env.close()
        return second.conversation.messages[0]["content"], last.reward

    assert run(main()) == ("again", 2.0)


def test_a_call_abandoned_in_the_queue_is_not_a_turn():
    async def agent(task, client):
        def ask(text):
            return client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])

        first = asyncio.create_task(ask("first"))
        await asyncio.sleep(0.2)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(ask("abandoned"), 0.2)
        await first
        return float((await ask("third")).choices[0].message.content)

    async def main():
        env = AgentEnvironment(agent)
        await env.open(PROMPT, 0)
        await asyncio.sleep(1.0)
        second = await env.step(AssistantTurn("1"))
        last = await env.step(AssistantTurn("2"))
        await env.close()
        return second.conversation.messages[0]["content"], last.reward

    assert run(main()) == ("third", 2.0)


def test_many_episodes_at_once_share_an_endpoint():
    keys = set()

    async def agent(task, client):
        keys.add((str(client.base_url), client.api_key))
        return await two_calls(task, client)

    async def main():
        return await asyncio.gather(*(play(AgentEnvironment(agent), "4", str(n % 2 * 5)) for n in range(40)))

    assert [answers[-1].reward for answers in run(main())] == [float(n % 2) for n in range(40)]
    assert len({url for url, _ in keys}) == 1
    assert len({key for _, key in keys}) == 40
    assert run(play(AgentEnvironment(agent), "4", "5"))[-1].reward == 1.0, "on another loop"


def test_more_threads_than_a_pool_has_can_wait():
    def agent(task, client):
        return float(client.chat.completions.create(model="m", messages=[QUESTION]).choices[0].message.content)

    async def main():
        environments = [AgentEnvironment(agent) for _ in range(40)]
        await asyncio.gather(*(env.open(PROMPT, 0) for env in environments))
        last = await asyncio.gather(*(env.step(AssistantTurn(str(n))) for n, env in enumerate(environments)))
        return [observation.reward for observation in last]

    assert run(main()) == list(range(40))


async def raises(task, client):
    await client.chat.completions.create(model="m", messages=[QUESTION])
    raise ValueError("two\nlines")


def raises_in_its_thread(task, client):
    client.chat.completions.create(model="m", messages=[QUESTION])
    raise StopIteration("gone")


async def exits(task, client):
    await client.chat.completions.create(model="m", messages=[QUESTION])
    sys.exit(3)


async def returns_nan(task, client):
    await client.chat.completions.create(model="m", messages=[QUESTION])
    return float("nan")


async def returns_nothing(task, client):
    await client.chat.completions.create(model="m", messages=[QUESTION])


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        (raises, "ValueError: two lines"),
        (raises_in_its_thread, "StopIteration: gone"),
        (exits, "SystemExit: 3"),
        (returns_nan, "its reward is nan; it must return a finite number"),
        (returns_nothing, "its reward is None; it must return a number"),
    ],
)
def test_a_failing_agent_is_one_line(agent, said):
    with pytest.raises(AgentError) as error:
        run(play(AgentEnvironment(agent), "5"))
    line = str(error.value)
    assert line.startswith(f"env.agent: {agent.__module__}:{agent.__qualname__}: ")
    assert said in line
    assert "\n" not in line


def test_an_agent_that_never_calls():
    async def idle(task, client):
        return 1.0

    with pytest.raises(UserError, match=r"^env\.agent: .*idle ended without calling the endpoint; "):
        run(play(AgentEnvironment(idle)))

    async def broken(task, client):
        raise ValueError("no such task")

    with pytest.raises(AgentError, match="ValueError: no such task"):
        run(play(AgentEnvironment(broken)))


def test_closing_cancels_the_agent_and_refuses_its_secret():
    seen = {}

    async def agent(task, client):
        seen["client"] = client.copy(http_client=openai.DefaultAsyncHttpxClient())
        try:
            await client.chat.completions.create(model="m", messages=[QUESTION])
        finally:
            seen["ended"] = True

    async def main():
        await play(AgentEnvironment(agent))
        assert seen["ended"]
        with pytest.raises(openai.APIStatusError) as error:
            await seen["client"].chat.completions.create(model="m", messages=[QUESTION])
        assert error.value.status_code == 410

    run(main())


def test_closing_ends_a_thread_that_waits_for_the_policy():
    ended = threading.Event()

    def agent(task, client):
        try:
            client.chat.completions.create(model="m", messages=[QUESTION])
        finally:
            ended.set()

    async def main():
        await play(AgentEnvironment(agent))
        assert await asyncio.to_thread(ended.wait, 10)

    run(main())


def test_a_limit_lets_the_agent_end_with_what_it_has():
    async def agent(task, client):
        calls = 0
        while True:
            try:
                await client.chat.completions.create(model="m", messages=[QUESTION])
            except openai.APIStatusError:
                return calls / 4
            calls += 1

    async def main(agent):
        env = AgentEnvironment(agent)
        await env.open(PROMPT, 0)
        await env.step(AssistantTurn("1"))
        reward = await env.result()
        await env.close()
        return reward

    async def says_that_it_is_not_correct(task, client):
        return {"reward": await agent(task, client), "correct": False}

    assert run(main(agent)) == Observation(reward=0.25, done=True)
    assert run(main(says_that_it_is_not_correct)) == Observation(reward=0.25, done=True, correct=False)
    assert run(main(two_calls)) is None


SHELL = r"""
read -r task
ask() {
    curl -s "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
        -H "Content-Type: application/json" -d "{\"messages\": [{\"role\": \"user\", \"content\": \"$1\"}]}"
}
case "$DAPO_TASK" in *'"answer": "5"'*) ;; *) exit 9 ;; esac
[ "$task" = "$DAPO_TASK" ] || exit 8
ask "What is 2+3?" > /dev/null
case $(ask "Sure?") in *'"content":"5"'*) echo '{"reward": 1.5, "correct": true}' ;; *) echo 0 ;; esac
"""


def test_a_shell_script_with_curl(tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    script = tmp_path / "an agent.sh"
    script.write_text(SHELL)
    opening, second, last = run(play(AgentEnvironment(f"sh '{script}'"), "4", "5"))
    assert opening.messages == (QUESTION,)
    assert second.conversation.messages[0]["content"] == "Sure?"
    assert last == Observation(reward=1.5, done=True, correct=True)
    assert run(play(AgentEnvironment(f"sh '{script}'"), "4", "6"))[-1].reward == 0.0


PYTHON = """
import json, os, sys
from openai import OpenAI
task = json.load(sys.stdin)
reply = OpenAI().chat.completions.create(model="gpt-4o-mini", messages=task["messages"], temperature=0)
print("thinking …", "x" * 200_000)
print(float(reply.choices[0].message.content == task["answer"]))
"""


def test_a_program_with_the_sdk(tmp_path):
    (tmp_path / "agent.py").write_text(PYTHON)
    env = AgentEnvironment(f"{sys.executable} {tmp_path / 'agent.py'}")
    assert run(play(env, "5"))[-1] == Observation(reward=1.0, done=True)


CURL = (
    'curl -s "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY"'
    """ -d '{"messages": [{"role": "user", "content": "x"}]}' > /dev/null; """
)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo oh no >&2; exit 3", "exit code 3: oh no"),
        ("kill -9 $$", "killed by signal 9"),
        ("echo done", "the last line that it printed is 'done'; it must be a number"),
        ("true", "the last line that it printed is ''"),
        ("echo NaN", "its reward is nan"),
        ('echo "{}"', "its reward is None"),
    ],
)
def test_a_failing_command_is_one_line(tmp_path, script, said):
    (tmp_path / "agent.sh").write_text(CURL + script)
    command = f"sh {tmp_path / 'agent.sh'}"
    with pytest.raises(AgentError) as error:
        run(play(AgentEnvironment(command), "5"))
    assert str(error.value).startswith(f"env.agent: {command}: ")
    assert said in str(error.value)


@pytest.mark.parametrize("command", ["no-such-program --fast", "sh 'unclosed", " "])
def test_a_command_that_does_not_start(command):
    with pytest.raises(UserError, match=r"^env\.agent: .*; it must be file\.py:function or a command$"):
        run(play(AgentEnvironment(command)))


def gone(pid):
    for _ in range(100):
        try:
            os.kill(pid, 0)
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def test_closing_kills_the_command_and_its_children(tmp_path):
    script = tmp_path / "agent.sh"
    script.write_text(f"sleep 1000 & echo $! $$ > {tmp_path}/pids; {CURL} sleep 1000")
    run(play(AgentEnvironment(f"sh {script}")))
    child, shell = map(int, (tmp_path / "pids").read_text().split())
    assert gone(child)
    assert gone(shell)


def test_children_that_hold_the_output_do_not_keep_an_episode(tmp_path):
    script = tmp_path / "agent.sh"
    script.write_text(f"sleep 1000 & echo $! > {tmp_path}/pid; {CURL} echo 1")
    began = time.monotonic()
    assert run(play(AgentEnvironment(f"sh {script}"), "5"))[-1].reward == 1.0
    assert time.monotonic() - began < 10
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_long_task_is_on_standard_input_alone(tmp_path):
    script = tmp_path / "agent.sh"
    script.write_text(f'[ -z "$DAPO_TASK" ] || exit 9; wc -c > {tmp_path}/size; {CURL} echo 1')
    prompt = Prompt("p", "x" * 500_000, np.array([1]))

    async def main():
        env = AgentEnvironment(f"sh {script}")
        await env.open(prompt, 0)
        return await env.step(AssistantTurn("5"))

    assert run(main()).reward == 1.0
    assert int((tmp_path / "size").read_text()) > 1_000_000


def test_smolagents():
    """A ToolCallingAgent, unmodified."""
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def add(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: a number
            b: another
        """
        return a + b

    def agent(task, client):
        model = OpenAIServerModel("policy", api_base=str(client.base_url), api_key=client.api_key)
        solver = ToolCallingAgent([add], model, verbosity_level=0)
        return float(str(solver.run(task["prompt"])) == task["answer"])

    turns = [
        AssistantTurn("", (ToolCall("add", {"a": 2, "b": 3}),), number=1),
        AssistantTurn("", (ToolCall("final_answer", {"answer": "5"}),), number=2),
    ]
    opening, second, last = run(play(AgentEnvironment(agent), *turns))
    assert {schema["function"]["name"] for schema in opening.tools} == {"add", "final_answer"}
    assert opening.messages[0]["role"] == "system"
    assert "2+3?" in opening.messages[-1]["content"]
    assert "5" in second.conversation.messages[-1]["content"]
    assert last == Observation(reward=1.0, done=True, tool_calls=1)


def test_an_endpoint_that_could_not_start_is_started_once_its_port_is_free():
    async def main():
        with socket.create_server(("127.0.0.1", 0)) as taken:
            env = AgentEnvironment(two_calls, port=taken.getsockname()[1])
            with pytest.raises(UserError, match=r"env\.port: cannot listen"):
                await play(env)
        return await play(env, "4", "5")

    assert run(main())[-1].reward == 1.0


def test_a_function_from_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "solver_of_test.py").write_text(
        "class Solver:\n"
        "    async def __call__(self, task, client):\n"
        "        await client.chat.completions.create(model='m', messages=task['messages'])\n"
        "        return 1\n"
        "solve = Solver()\n"
    )
    assert run(play(AgentEnvironment("solver_of_test.py:solve"), "5"))[-1].reward == 1.0
    assert run(play(AgentEnvironment("solver_of_test:solve"), "5"))[-1].reward == 1.0
    with pytest.raises(UserError, match="no such file"):
        AgentEnvironment("other.py:solve")


@pytest.mark.parametrize(("turns", "reward"), [(["=5", "6", "5"], 1.0), (["6", "x", "y"], 0.0), (["", "", ""], -1.0)])
def test_the_example(turns, reward):
    example = f"{REPOSITORY / 'examples' / 'agent.py'}:solve"
    assert run(play(AgentEnvironment(example), *turns))[-1] == Observation(reward=reward, done=True)


def test_an_address_of_this_host(tmp_path):
    """Other hosts reach the endpoint there, and it gives agents this address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # sends nothing
        except OSError:
            pytest.skip("this host has no network")
        host = probe.getsockname()[0]
    assert not host.startswith("127.")
    assert run(play(AgentEnvironment(two_calls, host=host), "4", "5"))[-1].reward == 1.0
    (tmp_path / "agent.sh").write_text(CURL + 'echo "${OPENAI_BASE_URL}" > "$0.url"; echo 1')
    assert run(play(AgentEnvironment(f"sh {tmp_path / 'agent.sh'}", host=host), "5"))[-1].reward == 1.0
    assert (tmp_path / "agent.sh.url").read_text().startswith(f"http://{host}:")


def test_tls(tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=node7"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    tls = (str(cert), str(key))
    assert run(play(AgentEnvironment(two_calls, tls=tls), "4", "5"))[-1].reward == 1.0
    (tmp_path / "agent.sh").write_text(CURL.replace("curl", f"curl --cacert {cert}") + "echo 1")
    assert run(play(AgentEnvironment(f"sh {tmp_path / 'agent.sh'}", tls=tls), "5"))[-1].reward == 1.0
