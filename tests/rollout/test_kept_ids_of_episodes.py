"""Episodes on a real engine, which observe and fork: all their trajectories have the tokens that truncation kept."""

import numpy as np
import torch
from support import make_prompt, small_model, tokenizer

from dapo_rl.config import EnvSettings
from dapo_rl.engines.native.engine import NativeEngine
from dapo_rl.engines.protocol import Request, SamplingParams
from dapo_rl.envs import Observation, Opening
from dapo_rl.envs.chat_format import Parsed
from dapo_rl.envs.pool import EnvironmentPool
from dapo_rl.models.response_logps import response_logps
from dapo_rl.rollout.conversation import Conversations
from dapo_rl.rollout.episodes import Episodes


class Rewriter:
    """Answers the first turn, rewrites the conversation after the second, and ends after the third."""

    deterministic = True

    def open(self, prompt, seed):
        return Opening(({"role": "user", "content": "ab"},))

    def step(self, turn):
        if turn.number == 1:
            return Observation(messages=({"role": "user", "content": "abc"},))
        if turn.number == 2:
            return Observation(conversation=Opening(({"role": "user", "content": "abcd"},)))
        return Observation(reward=0.5, done=True)


class Lengths:
    """A chat format without a template: a message is two tokens, the first of which is its length."""

    supports_tools = False

    def prompt(self, messages, tools=()):
        return [token for message in messages for token in (5 + len(message["content"]) % 9, 6)]

    suffix = lambda self, before, messages, tools=(): self.prompt(messages)  # noqa: E731

    def parse(self, turn_ids, tools=()):
        return Parsed("".join(map(str, turn_ids)))


def request(draw, prompt, version=0):
    params = SamplingParams(40, top_k=5, top_p=0.9, keep_mask=True)
    return Request(f"draw-{draw}", prompt.token_ids, 4, params, seed=draw)


def test_observations_and_forks_keep_the_column():
    model, settings = small_model(), EnvSettings(name="x:y", max_turn_tokens=7)
    engine = NativeEngine(model, tokenizer(), longest=100, most_kept=5)
    with EnvironmentPool(Rewriter, settings) as pool:
        conversations = Conversations(pool, Lengths(), settings, max_new_tokens=40, context=100)
        conversations.cut_turns_continue = True
        episodes = Episodes(engine, None, request, conversations=conversations)
        episodes.submitted = True
        episodes.start(3, make_prompt("p"))
        groups = []
        while len(episodes):
            if episodes.generating:
                episodes.poll()
            groups += episodes.finish(judge_all=not episodes.generating)
    (group,) = groups
    assert len(group.forks) == 4
    for fork, sample in zip(group.forks, group.samples, strict=True):
        assert not fork.mask.all()
        assert sample.mask.all()
    with torch.no_grad():
        logps = response_logps(model, group.trajectories, 1.0, 0).logps.numpy()
    for row, each in zip(logps, group.trajectories, strict=True):
        kept = each["kept_ids"]
        assert kept.shape == (len(each.token_ids), 5)
        assert ((kept >= 0).any(1) == each.mask).all()
        np.testing.assert_allclose(row[: len(kept)], each.logps, atol=1e-5)
