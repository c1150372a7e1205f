"""The endpoint for agents, with the clients that people use. The test plays the policy."""

import asyncio
import json
import signal
import socket
import subprocess
from contextlib import asynccontextmanager

import httpx2
import openai
import pytest

from dapo_rl.envs import endpoint as endpoint_module
from dapo_rl.envs.endpoint import Endpoint
from dapo_rl.envs.openai_format import ChatRequest, RequestError, read_message, sent_message
from dapo_rl.envs.protocol import AssistantTurn, Opening, ToolCall
from dapo_rl.errors import UserError

pytestmark = pytest.mark.slow

USER = {"role": "user", "content": "What is 2+3?"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
FIVE = AssistantTurn("5", token_ids=(7, 8), logps=(-0.5, -0.25), prompt_ids=(1, 2, 3))
CALL = AssistantTurn(
    "", (ToolCall("add", {"a": 2, "b": "drei"}), ToolCall("add", error="not valid JSON: …")), number=4, token_ids=(9,)
)
MALFORMED = ToolCall("add", error="not valid JSON: …", raw="<tool_call>{6</tool_call>")


class Policy:
    """Answers all calls with one turn, and keeps them."""

    def __init__(self, turn=FIVE):
        self.turn, self.calls = turn, []

    async def __call__(self, call):
        self.calls.append(call)
        return self.turn


class Never:
    """A policy that does not answer; tells when it is asked, and when the call is cancelled."""

    def __init__(self):
        self.asked, self.cancelled = asyncio.Event(), asyncio.Event()

    async def __call__(self, call):
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


@asynccontextmanager
async def serving(**settings):
    endpoint = Endpoint("policy", **settings)
    await endpoint.start()
    try:
        yield endpoint
    finally:
        await endpoint.stop()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def talk(handle, work, **settings):
    """Runs `work(client, endpoint, secret)` with an HTTP client of the episode that `handle` answers."""

    async def main():
        async with serving(**settings) as endpoint:
            secret = endpoint.open(handle, 64)
            headers = {"authorization": f"Bearer {secret}"}
            root = endpoint.url.removesuffix("/v1")
            async with httpx2.AsyncClient(base_url=root, headers=headers, timeout=20) as client:
                return await work(client, endpoint, secret)

    return run(main())


def post(body, path="/v1/chat/completions", handle=None, **more):
    async def work(client, endpoint, secret):
        return await client.post(path, json=body, **more)

    return talk(handle or Policy(), work)


def ask_sdk(handle, work):
    async def main():
        async with serving() as endpoint:
            key = endpoint.open(handle, 64)
            async with openai.AsyncOpenAI(base_url=endpoint.url, api_key=key, max_retries=0) as client:
                return await work(client)

    return run(main())


def test_the_sdk_gets_the_turn_and_the_policy_the_conversation():
    policy = Policy()
    reply = ask_sdk(
        policy,
        lambda client: client.chat.completions.create(
            model="gpt-4o",
            messages=[{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, USER],
            tools=[ADD],
            max_completion_tokens=9,
            logprobs=True,
            extra_body={"return_token_ids": True},
        ),
    )
    assert reply.choices[0].message.content == "5"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.model == "policy"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (3, 2, 5)
    assert reply.prompt_token_ids == [1, 2, 3]
    assert reply.choices[0].token_ids == [7, 8]
    assert [(t.token, t.logprob) for t in reply.choices[0].logprobs.content] == [
        ("token_id:7", -0.5),
        ("token_id:8", -0.25),
    ]
    assert policy.calls == [
        Opening(messages=({"role": "system", "content": "Be brief."}, USER), tools=(ADD,), max_tokens=9)
    ]


def test_tool_calls_have_arguments_as_text():
    create = lambda client: client.chat.completions.create(model="m", messages=[USER], tools=[ADD])  # noqa: E731
    choice = ask_sdk(Policy(CALL), create).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert (call.id, call.function.name) == ("call_4_0", "add")
    assert json.loads(call.function.arguments) == {"a": 2, "b": "drei"}


def test_malformed_tool_calls_are_text():
    create = lambda client: client.chat.completions.create(model="m", messages=[USER], tools=[ADD])  # noqa: E731
    choice = ask_sdk(Policy(AssistantTurn("", (MALFORMED,))), create).choices[0]
    assert (choice.message.content, choice.message.tool_calls) == (MALFORMED.raw, None)
    assert choice.finish_reason == "stop"
    both = ask_sdk(Policy(AssistantTurn("So:", (MALFORMED, *CALL.tool_calls))), create).choices[0]
    assert both.message.content == f"So:\n{MALFORMED.raw}"
    assert [call.function.name for call in both.message.tool_calls] == ["add"]
    assert both.finish_reason == "tool_calls"


def test_tool_choice_none_offers_no_tools():
    policy = Policy()
    assert post({"messages": [USER], "tools": [ADD], "tool_choice": "none"}, handle=policy).status_code == 200
    assert policy.calls[0].tools == ()


def test_the_sdk_streams():
    async def work(client):
        stream = await client.chat.completions.create(
            model="m", messages=[USER], tools=[ADD], stream=True, stream_options={"include_usage": True}
        )
        return [chunk async for chunk in stream]

    chunks = ask_sdk(Policy(AssistantTurn("Let me add.", CALL.tool_calls, token_ids=(9,))), work)
    assert chunks[0].choices[0].delta.content == "Let me add."
    assert chunks[0].choices[0].delta.tool_calls[0].function.name == "add"
    assert chunks[1].choices[0].finish_reason == "tool_calls"
    assert chunks[2].usage.completion_tokens == 1

    async def accumulate(client):
        strict = ADD | {"function": ADD["function"] | {"strict": True}}  # which OpenAI's client wants here
        async with client.chat.completions.stream(model="m", messages=[USER], tools=[strict]) as stream:
            return await stream.get_final_completion()

    message = ask_sdk(Policy(CALL), accumulate).choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 2, "b": "drei"}


def test_curl():
    async def work(client, endpoint, secret):
        body = json.dumps({"messages": [USER]})
        process = await asyncio.create_subprocess_exec(
            *("curl", "-s", "--noproxy", "*", f"{endpoint.url}/chat/completions", "-d", body),
            *("-H", f"Authorization: Bearer {secret}"),
            stdout=subprocess.PIPE,
        )
        return json.loads((await process.communicate())[0])

    assert talk(Policy(), work)["choices"][0]["message"] == {"role": "assistant", "content": "5"}


def test_tokens_in_tokens_out_as_in_vllm():
    policy = Policy()
    body = {
        "model": "m",
        "token_ids": [1, 2, 3],
        "sampling_params": {"max_tokens": 5, "logprobs": 1, "stop_token_ids": [0], "skip_special_tokens": False},
        "request_id": "abc",
    }
    reply = post(body, "/inference/v1/generate", policy)
    assert policy.calls == [Opening(prompt_ids=(1, 2, 3), max_tokens=5)]
    assert reply.headers["x-dapo-ignored"] == "stop_token_ids"
    got = reply.json()
    assert got["request_id"] == "abc"
    entries = [{"token": f"token_id:{i}", "logprob": p, "bytes": None} for i, p in ((7, -0.5), (8, -0.25))]
    assert got["choices"] == [
        {
            "index": 0,
            "logprobs": {"content": [{**entry, "top_logprobs": [entry]} for entry in entries]},
            "finish_reason": "stop",
            "token_ids": [7, 8],
        }
    ]
    assert got["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}

    events = post({**body, "stream": True}, "/inference/v1/generate").text.split("\n\n")
    assert json.loads(events[0].removeprefix("data: "))["choices"] == got["choices"]
    assert events[1:] == ["data: [DONE]", ""]


def test_the_client_of_renderers_takes_the_tokens():
    pytest.importorskip("httpx")
    client_module = pytest.importorskip("renderers.client")

    class Renderer:
        supports_tools = True

        def get_stop_token_ids(self):
            return [0]

        def parse_response(self, ids, **_):
            return type(
                "Parsed",
                (),
                dict.fromkeys(("content", "reasoning_content", "reasoning_complete"), "") | {"tool_calls": []},
            )()

    def work(client):
        return client_module.generate(
            client=client, renderer=Renderer(), messages=[], model="policy", prompt_ids=[1, 2, 3]
        )

    got = ask_sdk(Policy(), work)
    assert (got["completion_ids"], got["completion_logprobs"]) == ([7, 8], [-0.5, -0.25])
    with pytest.raises(client_module.OverlongPromptError):
        ask_sdk(
            Policy(),
            lambda client: client_module.generate(
                client=client, renderer=Renderer(), messages=[], model="policy", prompt_ids=[1] * 65
            ),
        )


def test_a_prompt_that_fills_the_context_is_refused():
    body = {"token_ids": [1] * 64, "sampling_params": {}}
    reply = post(body, "/inference/v1/generate")
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert post({**body, "token_ids": [1] * 63}, "/inference/v1/generate").status_code == 200


def test_models_says_how_long_the_context_is():
    models = ask_sdk(Policy(), lambda client: client.models.list())
    assert [(model.id, model.max_model_len) for model in models.data] == [("policy", 64)]


def test_sampling_parameters_are_ignored_and_named():
    reply = post({"messages": [USER], "temperature": 0, "top_p": 0.5, "tool_choice": "required", "user": None})
    assert reply.headers["x-dapo-ignored"] == "temperature, tool_choice, top_p"
    assert "x-dapo-ignored" not in post({"messages": [USER], "model": "m"}).headers


def test_stop_cuts_the_text_and_what_follows():
    turn = AssistantTurn("Add them.\nObservation: 6", CALL.tool_calls, token_ids=(1, 2))
    asked = {"messages": [USER], "stop": ["nowhere", "6", "Observation:"]}
    choice = post(asked, handle=Policy(turn)).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Add them.\n"}
    choice = post(asked, handle=Policy(AssistantTurn("", (MALFORMED,)))).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "<tool_call>{"}
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("reason", ["length", "turns"])
def test_limits_are_the_finish_reason_length(reason):
    for calls in ((), CALL.tool_calls):
        reply = post({"messages": [USER]}, handle=Policy(AssistantTurn("5", calls, finish_reason=reason)))
        assert reply.json()["choices"][0]["finish_reason"] == "length"


def test_the_message_that_an_agent_sends_back_is_the_turns_message():
    turn = AssistantTurn("So:", (ToolCall("add", {"a": [1, {"b": "ü"}]}, id="x1"),), reasoning="hm")
    assert read_message(json.loads(json.dumps(sent_message(turn)))) == turn.message
    silent = AssistantTurn("", (ToolCall("add", {}, id="x1"),))
    assert read_message({**sent_message(silent), "refusal": None, "audio": None}) == silent.message


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "messages: expected a list"),
        ({"messages": []}, "messages: expected a list"),
        ({"messages": [{"role": "king", "content": ""}]}, "messages[0]: expected an object with a role"),
        ({"messages": [USER, {"role": "user", "content": [{"type": "image_url"}]}]}, "messages[1].content: a part"),
        ({"messages": [USER], "n": 2}, "n=2 is not supported"),
        ({"messages": [USER], "max_tokens": 0}, "max_tokens: expected a positive"),
        ({"messages": [USER], "max_tokens": True}, "max_tokens: expected a positive"),
        ({"messages": [USER], "tools": [{"name": "add"}]}, "tools[0]: expected"),
        ({"messages": [USER], "functions": [{}]}, "use tools"),
        ({"messages": [USER], "stop": 5}, "stop: expected"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}]},
            "messages[0].tool_calls[0].function.arguments: expected a JSON object",
        ),
        ([], "not a JSON object"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "lone surrogate"),
    ],
)
def test_bad_requests_get_one_line(body, said):
    policy = Policy()
    reply = post(None, handle=policy, content=json.dumps(body))
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert said in message
    assert "\n" not in message
    assert not policy.calls


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100_000, b""], ids=["cut", "bytes", "deep", "empty"])
def test_a_body_that_is_not_json(content):
    reply = post(None, content=content)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith("the request is not JSON")


@pytest.mark.parametrize(
    "body",
    [
        {"sampling_params": {}},
        {"token_ids": [], "sampling_params": {}},
        {"token_ids": [True], "sampling_params": {}},
        {"token_ids": [-1], "sampling_params": {}},
        {"token_ids": [1]},
        {"token_ids": [1], "sampling_params": {"n": 2}},
        {"token_ids": [1], "sampling_params": {}, "features": {"mm_hashes": {}}},
    ],
)
def test_bad_requests_of_tokens(body):
    assert post(body, "/inference/v1/generate").status_code == 400


def test_only_the_secret_of_a_running_episode_is_accepted():
    async def work(client, endpoint, secret):
        async def status(authorization):
            headers = {"authorization": authorization}
            reply = await client.post("/v1/chat/completions", json={"messages": [USER]}, headers=headers)
            assert set(reply.json()) == ({"error"} if reply.status_code != 200 else set(reply.json()))
            return reply.status_code, reply.json().get("error", {}).get("code")

        assert (await status(f"Bearer {secret}"))[0] == 200
        assert await status(f"Bearer {secret[:-1]}") == (401, "invalid_api_key")
        assert await status("Bearer x") == (401, "invalid_api_key")
        assert await status("") == (401, "invalid_api_key")
        assert await status(f"Basic {secret}") == (401, "invalid_api_key")
        other = endpoint.open(Policy(), 64)
        endpoint.close(secret)
        assert await status(f"Bearer {secret}") == (410, "episode_ended")
        assert (await client.get("/v1/models")).status_code == 410
        assert (await status(f"Bearer {other}"))[0] == 200
        assert other != secret

    talk(Policy(), work)


def test_calls_reach_their_own_episode():
    async def main():
        async with serving() as endpoint:
            replies = {}

            async def ask(number):
                key = endpoint.open(Policy(AssistantTurn(str(number))), 64)
                async with openai.AsyncOpenAI(base_url=endpoint.url, api_key=key, max_retries=0) as client:
                    reply = await client.chat.completions.create(model="m", messages=[USER])
                    replies[number] = reply.choices[0].message.content

            await asyncio.gather(*map(ask, range(20)))
            return replies

    assert run(main()) == {number: str(number) for number in range(20)}


def test_the_end_of_an_episode_refuses_its_waiting_call():
    async def main():
        never = Never()
        async with serving() as endpoint:
            key = endpoint.open(never, 64)
            async with openai.AsyncOpenAI(base_url=endpoint.url, api_key=key, max_retries=0) as client:
                waiting = asyncio.create_task(client.chat.completions.create(model="m", messages=[USER]))
                await never.asked.wait()
                endpoint.close(key)
                with pytest.raises(openai.APIStatusError) as error:
                    await waiting
        assert error.value.status_code == 410
        assert never.cancelled.is_set()

    run(main())


def test_a_client_that_disconnects_cancels_its_call():
    async def main():
        never = Never()
        async with serving() as endpoint, httpx2.AsyncClient() as client:
            headers = {"authorization": f"Bearer {endpoint.open(never, 64)}"}
            body = {"messages": [USER]}
            asking = asyncio.create_task(client.post(f"{endpoint.url}/chat/completions", json=body, headers=headers))
            await never.asked.wait()
            asking.cancel()
            await asyncio.wait_for(never.cancelled.wait(), 10)

    run(main())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
        ("POST", "/v1/completions", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("POST", "/v1/../v1/models", 404),
        ("GET", "/v1/models/policy", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("OPTIONS", "/v1/models", 405),
    ],
)
def test_there_are_no_other_routes(method, path, status):
    async def work(client, endpoint, secret):
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        writer.write(f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n".encode())
        writer.write(f"authorization: Bearer {secret}\r\ncontent-length: 0\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        return int(head.split()[1]), json.loads(body)

    got, body = talk(Policy(), work)
    assert got == status
    assert set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("chunked", [False, True])
def test_a_long_body_is_refused(chunked):
    async def chunks():
        for _ in range(9):
            yield b" " * 2**20

    policy = Policy()
    reply = post(None, handle=policy, content=chunks() if chunked else b" " * (9 * 2**20))
    assert reply.status_code == 413
    assert reply.json()["error"]["code"] == "request_too_large"
    assert not policy.calls


def test_a_body_just_within_the_limit_is_read():
    text = "x" * (endpoint_module.BODY_LIMIT - 100)
    assert post({"messages": [{"role": "user", "content": text}]}).status_code == 200


def test_a_huge_body_is_not_read_to_its_end():
    async def work(client, endpoint, secret):
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {secret}\r\n"
        writer.write(f"{head}content-length: {2**40}\r\n\r\n".encode())
        reply = await reader.read()
        writer.close()
        return reply

    assert b" 413 " in talk(Policy(), work)


def test_a_body_that_does_not_come_times_out(monkeypatch):
    monkeypatch.setattr(endpoint_module, "BODY_SECONDS", 0.1)

    async def work(client, endpoint, secret):
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {secret}\r\n"
        writer.write(f"{head}content-length: 10\r\n\r\nabc".encode())
        reply = await reader.read()
        writer.close()
        return reply

    assert b" 408 " in talk(Policy(), work)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le"])
def test_a_lone_surrogate_in_bytes_is_refused_before_the_policy_is_asked(encoding):
    body = '{"token_ids": [1], "sampling_params": {}, "request_id": "\ud800"}'.encode(encoding, "surrogatepass")
    policy = Policy()

    async def work(client, endpoint, secret):
        return await client.post("/inference/v1/generate", content=body)

    reply = talk(policy, work)
    assert reply.status_code == 400
    assert "lone surrogate" in reply.json()["error"]["message"]
    assert policy.calls == []


@pytest.mark.parametrize("role", [["user"], {"user": 1}, None, 5, "judge"])
def test_a_role_that_is_none_is_the_client_s_mistake(role):
    """Clients send a request again after a status of 500."""
    with pytest.raises(RequestError, match=r"messages\[0\]: expected an object with a role of system"):
        ChatRequest.parse({"messages": [{"role": role, "content": "?"}]})


def test_an_error_of_the_policy_is_json():
    async def fails(call):
        raise KeyError("two\nlines")

    reply = post({"messages": [USER]}, handle=fails)
    assert reply.status_code == 500
    assert "\n" not in reply.json()["error"]["message"]

    async def refuses(call):
        raise RequestError("no more turns", 429, "turns")

    assert post({"messages": [USER]}, handle=refuses).status_code == 429


def test_signal_handlers_stay_and_stopping_is_quick():
    async def main():
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        never = Never()
        async with serving() as endpoint:
            assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
            secret = endpoint.open(never, 64)
            async with httpx2.AsyncClient(headers={"authorization": f"Bearer {secret}"}, timeout=20) as client:
                waiting = asyncio.create_task(
                    client.post(f"{endpoint.url}/chat/completions", json={"messages": [USER]})
                )
                await never.asked.wait()
                began = asyncio.get_running_loop().time()
                await endpoint.stop()
                assert asyncio.get_running_loop().time() - began < 3
                assert (await waiting).status_code == 410
        with pytest.raises(OSError, match="Connect"):
            await asyncio.open_connection("127.0.0.1", endpoint.port)

    run(main())


def test_a_port_in_use_is_one_line():
    said = r"env\.port: cannot listen on 127\.0\.0\.1:\d+: .*; env\.port=0"
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match=said):
        run(Endpoint("m", port=taken.getsockname()[1]).start())


def test_tls(tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )

    async def main():
        async with serving(tls=(str(cert), str(key))) as endpoint:
            assert endpoint.url.startswith("https://127.0.0.1:")
            secret = endpoint.open(Policy(), 64)
            process = await asyncio.create_subprocess_exec(
                *("curl", "-s", "--noproxy", "*", "--cacert", str(cert), f"{endpoint.url}/models"),
                *("-H", f"Authorization: Bearer {secret}"),
                stdout=subprocess.PIPE,
            )
            return json.loads((await process.communicate())[0])

    assert run(main())["data"][0]["id"] == "policy"
    with pytest.raises(UserError, match=r"env\.tls: .*PEM"):
        run(Endpoint("m", tls=(str(key), str(key))).start())
