"""An agent that asks the policy three times at once and answers with the majority.

    dapo train env.agent=examples/agent.py:solve train.steps=2

The client is OpenAI's, and talks to the run. The answers to all three calls are trained on, with the reward that the
agent returns. A program with its own client is trained as well: `env.agent="python my_agent.py"` starts it with
OPENAI_BASE_URL and OPENAI_API_KEY, gives it its task as JSON on standard input, and takes the last line that it prints
as the reward.
"""

import asyncio
import re
from collections import Counter


async def solve(task, client):
    """1 if the majority is right, 0 if not, and -1 if no reply has a number."""

    async def ask():
        reply = await client.chat.completions.create(model="policy", messages=task["messages"])
        return re.findall(r"-?\d+", reply.choices[0].message.content)[-1:]

    answers = [numbers[0] for numbers in await asyncio.gather(ask(), ask(), ask()) if numbers]
    if not answers:
        return -1.0
    [(answer, _)] = Counter(answers).most_common(1)
    return float(answer == task["answer"])
