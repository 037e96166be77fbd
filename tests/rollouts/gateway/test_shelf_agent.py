"""The shelf agent: its chat format, and the rows that its loop leaves."""

import json
import random
import threading

import pytest
from support.agents import ScriptedEngine, running

from harts_hf.rollouts.agents.shelf import ShelfAgent
from harts_hf.rollouts.gateway import AgentAccess, EngineTurns, Gateway, LengthLimits
from harts_hf.rollouts.gateway.requests import read_request

AGENT = ShelfAgent()
TOKENIZER = AGENT.tokenizer()
FORMAT = AGENT.chat_format(TOKENIZER)
END = TOKENIZER.eos_token_id
ANY = read_request(b'{"messages": [{"role": "user", "content": "lamp wanted"}]}')


def ids_of(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("text", "content", "thinking", "call"),
    [
        ("look lamp <end>", "", None, ("look", {"item": "lamp"})),
        ("cup go s3", "", "cup", ("go", {"shelf": "s3"})),
        ("open s1", "", None, ("open", {"shelf": "s1"})),
        ("lamp look <end>", "lamp look", None, None),
        ("go <end>", "go", None, None),
        ("<end>", "", None, None),
        ("<tool> go go", "", None, ("go", {"shelf": "go"})),
    ],
)
def test_a_turns_last_two_words_are_a_call(text, content, thinking, call):
    """Whatever is sampled becomes a message."""
    message = FORMAT.parse(ids_of(text), ANY, history=[1])
    assert (message.content, message.reasoning_content) == (content, thinking)
    assert [(one.name, json.loads(one.arguments)) for one in message.tool_calls] == ([call] if call else [])


def play(speak):
    """One episode of a policy whose turns are texts."""
    engine = ScriptedEngine(lambda request, choice: ids_of(speak(TOKENIZER.decode(request.history))), end_ids=(END,))
    limits = LengthLimits(max_turn_tokens=3, max_completion_tokens=64)
    source = EngineTurns(engine, FORMAT, end_ids=(END,), limits=limits)
    with running(engine), Gateway() as gateway:
        session = gateway.open(source, seed_of=lambda number: number, max_turns=4)
        access = AgentAccess(base_url=session.base_url, api_key=session.key, model="policy", seed=3)
        reward = AGENT.run("lamp wanted", access, timeout=20, stopped=threading.Event())
    rows = session.recording.rows()
    return reward, [(TOKENIZER.decode(row.prompt_ids), TOKENIZER.decode(row.completion_ids)) for row in rows]


def solve(history, thought=""):
    """The right call, with a thought before it."""
    shelves = [word for word in history.split() if word.startswith("s") and word[1:].isdigit()]
    call = "look lamp" if not shelves else f"{'open' if 'reached' in history else 'go'} {shelves[-1]}"
    return f"{thought} {call}" if thought else f"{call} <end>"


def test_thinking_is_dropped_and_the_context_compacted():
    """Each turn a row of its own: the template drops the thought, the agent all but the task and what it saw last."""
    shelf = f"s{1 + random.Random(3).choice(range(4))}"
    reward, rows = play(lambda history: solve(history, "cup"))
    assert reward == 1.0
    assert rows == [
        ("<user> lamp wanted <bot>", "cup look lamp"),
        (f"<user> lamp wanted <bot> look lamp <end> <tool> {shelf} listed <bot>", f"cup go {shelf}"),
        (f"<user> lamp wanted <user> {shelf} reached <bot>", f"cup open {shelf}"),
    ]


def test_without_thinking_a_row_goes_on_until_the_compaction():
    """What extends the row token for token continues it."""
    shelf = f"s{1 + random.Random(3).choice(range(4))}"
    reward, rows = play(solve)
    assert reward == 1.0
    assert rows == [
        ("<user> lamp wanted <bot>", f"look lamp <end> <tool> {shelf} listed <bot> go {shelf} <end>"),
        (f"<user> lamp wanted <user> {shelf} reached <bot>", f"open {shelf} <end>"),
    ]


def test_nonsense_is_answered():
    """The agent says "error", and the policy may try again until its turns are over."""
    reward, rows = play(lambda history: "cup cup cup")
    assert reward == 0.0 and sum(row[1].count("cup cup cup") for row in rows) == 4
