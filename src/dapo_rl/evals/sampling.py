"""Problems in, judged responses out: evaluation and `dapo verify`, by the same episodes as in training."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from dapo_rl.engines.protocol import Engine, Request, SamplingParams
from dapo_rl.engines.token_sampling import derive_seed
from dapo_rl.envs import OneTurn
from dapo_rl.rollout.conversation import Conversations
from dapo_rl.rollout.episodes import Episodes
from dapo_rl.rollout.pending_steps import check_nothing
from dapo_rl.rollout.policy_answers import policy_of
from dapo_rl.types import Group, Prompt, Verifier

AT_A_TIME = 512


def answer(
    engine: Engine,
    verifier: Verifier | None,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    samples: int,
    seed: int,
    indices: Sequence[int] | None = None,
    check: Callable[[], None] = check_nothing,
    conversations: Conversations | None = None,
    at_a_time: int = AT_A_TIME,
) -> Iterator[Group]:
    """Samples every prompt `samples` times; yields problems in the order in which they are judged. The draw of a group
    is the index of its problem.

    A sample's random numbers follow from the seed, the prompt's id and the sample's index: the same problems give the
    same responses, whichever of them (`indices`) are asked for and in whatever order. `check` is called every fraction
    of a second; it raises to end this. Of episodes with environments, about `at_a_time` are open; of samples that the
    policy judges, as many wait for it.
    """

    def request(index: int, prompt: Prompt, version: int) -> Request:
        return Request(f"eval-{index}", prompt.token_ids, samples, params, derive_seed(seed, "eval", prompt.id))

    judge = None if verifier is None else OneTurn(verifier)
    episodes = Episodes(engine, judge, request, waits=False, conversations=conversations, policy=policy_of(verifier))
    episodes.submitted = True
    left = deque(range(len(prompts)) if indices is None else indices)
    most = len(left) if conversations is None else max(1, at_a_time // samples)
    try:
        while left or len(episodes):
            for _ in range(min(len(left), most - len(episodes))):
                index = left.popleft()
                episodes.start(index, prompts[index])
            if episodes.generating:
                episodes.poll(check)
            many = episodes.policy is not None and episodes.judging * samples >= at_a_time
            yield from episodes.finish(judge_all=many or not episodes.generating, check=check)
    finally:  # a caller that stops early leaves no work behind
        episodes.abandon()
