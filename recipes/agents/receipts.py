"""A small agent for chat models that can call tools: look up prices, add them up, answer.

Run from the folder above `recipes`, or copy it beside your recipe: `agent: recipes.agents.receipts:ReceiptAgent`.
"""

import json
import random
import threading
from typing import Any

import openai

from harts_hf.rollouts.gateway import Agent, AgentAccess

ITEMS = ("apples", "bread", "cheese", "dates", "eggs", "figs", "grapes", "honey")
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {key: {"type": kind}}, "required": [key]},
        },
    }
    for name, description, key, kind in (
        ("price", "The price of one item, in cents.", "item", "string"),
        ("answer", "Gives the answer and ends the task.", "cents", "integer"),
    )
]


class ReceiptAgent(Agent):
    """Asks what some items cost together; the reward is 1 for the right sum, 0.1 for a wrong one, else 0.

    Args:
        num_items: items on a receipt.
        max_turns: requests of an episode.
    """

    def __init__(self, *, num_items: int = 4, max_turns: int = 8) -> None:
        if not 1 <= num_items <= len(ITEMS):
            raise ValueError(f"expected num_items in [1, {len(ITEMS)}], got {num_items}")
        self._num_items = num_items
        self._max_turns = max_turns
        self._client = openai.OpenAI(api_key="none", http_client=openai.DefaultHttpxClient(trust_env=False))

    def run(self, task: Any, access: AgentAccess, *, timeout: float, stopped: threading.Event) -> float:
        """Plays one episode; prices depend on the seed, which the episodes of a prompt share."""
        client = self._client.with_options(
            base_url=access.base_url, api_key=access.api_key, timeout=timeout, max_retries=0
        )
        draw = random.Random(access.seed)
        prices = {item: draw.randint(10, 999) for item in ITEMS}
        total = sum(prices[item] for item in ITEMS if item in str(task))
        messages: list[Any] = [{"role": "user", "content": task}]
        for _ in range(self._max_turns):
            answer = client.chat.completions.create(model=access.model, messages=messages, tools=TOOLS)
            message = answer.choices[0].message.to_dict()
            messages.append(message)
            if not message.get("tool_calls"):
                return 0.0
            for call in message["tool_calls"]:
                name, given = call["function"]["name"], _arguments(call)
                if name == "answer":
                    return 1.0 if given.get("cents") == total else 0.1
                said = str(prices.get(given.get("item"), "no such item"))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
        return 0.0

    def prompts(self) -> list[str]:
        """Receipts to train on."""
        return self._receipts(64, seed=0)

    def eval_prompts(self) -> list[str]:
        """Other receipts."""
        return self._receipts(16, seed=1)

    def _receipts(self, count: int, *, seed: int) -> list[str]:
        draw = random.Random(seed)
        chosen = [draw.sample(ITEMS, self._num_items) for _ in range(count)]
        return [f"What do {', '.join(items)} cost together? Look up every price." for items in chosen]


def _arguments(call: Any) -> dict[str, Any]:
    """What a call was given; nothing where that is no JSON object, as a policy may write."""
    try:
        given = json.loads(call["function"]["arguments"])
    except ValueError:
        return {}
    return given if isinstance(given, dict) else {}
