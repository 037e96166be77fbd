"""Conversations written by chat templates: as the template writes them, if they can be a single row."""

import itertools

import pytest
from support.engines import SeededEngine
from support.sampling import beginnings, tree_sampler
from support.scripted import ScriptedEngine, chat_tokenizer, encoded

from harts_hf.rollouts import AgentRolloutCollector, ChatEnvironment, Environment, StepResult
from harts_hf.rollouts.environments.chat import ChatWriter
from harts_hf.rollouts.environments.failures import EpisodeFailure
from harts_hf.rollouts.forks import NoForks

END = "<|im_end|>"
# Templates that come with TRL and write whatever a user says after an answer without touching what was before; those
# of thinking models are TRL's training templates.
KEEPING = ["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_5_think", "qwen3_6", "qwen3_8"]


class Echo(Environment):
    """Answers with what was said and how often; over when it is told to stop."""

    def reset(self, prompt, *, seed):
        self.said = []
        return prompt

    def step(self, action):
        self.said.append(action)
        return StepResult(f"{len(self.said)} times {action}", done="stop" in action)

    @property
    def reward(self):
        return float(len(self.said))


class Roles(ChatEnvironment):
    """Speaks in messages."""

    def __init__(self, first=None, then="Go on."):
        self._first = first or [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Begin."}]
        self._then = then
        self.actions = []

    def reset(self, prompt, *, seed):
        return self._first

    def step(self, action):
        self.actions.append(action)
        return StepResult(self._then, done=len(self.actions) == 2)

    @property
    def reward(self):
        return 1.0


def play(environments, prompts, script, *, tokenizer=None, chat=True, **limits):
    tokenizer = tokenizer or chat_tokenizer()
    sampler = tree_sampler(
        ScriptedEngine(tokenizer, script),
        tokenizer,
        chat=chat,
        end_ids=[tokenizer.eos_token_id],
        policy=NoForks(),
        num_episodes=1,
        limits={"max_turns": 4, "max_turn_tokens": 60, "max_completion_tokens": 900, **limits},
    )
    return sampler.sample(beginnings(environments, prompts))


def text_of(rollout, tokenizer):
    return tokenizer.decode(rollout.prompt_ids + rollout.completion_ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", KEEPING)
def test_a_conversation_is_what_the_template_writes(name):
    """Its row, decoded, is the rendering of all its messages; the mask has the turns and their ends, nothing else."""
    tokenizer = chat_tokenizer(name)
    words = itertools.cycle(["one", "two", "stop"])
    turns = []

    def script(history, branch):
        thought = "ok\n</think>\n\n" if history.endswith("<think>\n") else ""
        turns.append(f"{thought}{next(words)}{END}")
        return turns[-1]

    environment = Echo()
    (rollout,) = play([environment], ["Say something, ä."], script, tokenizer=tokenizer)
    writer = ChatWriter(tokenizer, end_ids=[tokenizer.eos_token_id])
    template = writer._template_for(False)
    messages = [{"role": "user", "content": "Say something, ä."}]
    opening = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    answer_start = opening[opening.rindex("<|im_start|>") :]
    expected = opening
    for number, turn in enumerate(turns, 1):
        expected += turn
        if number < len(turns):
            expected += f"\n<|im_start|>user\n{number} times {environment.said[number - 1]}{END}\n{answer_start}"
    assert text_of(rollout, tokenizer) == expected
    masked = [token for token, mask in zip(rollout.completion_ids, rollout.env_mask, strict=True) if mask]
    assert tokenizer.decode(masked, skip_special_tokens=False) == "".join(turns)
    assert rollout.reward == 3.0 and environment.said[2] == "stop"


def test_thoughts_are_no_action_and_stay_in_the_history():
    """A text environment gets what is said after the thought; the row keeps the thought, as TRL's training does."""
    environment = Echo()
    script = lambda history, branch: f"<think>\nhm\n</think>\n\n{'stop' if 'hm' in history else 'go'}{END}"  # noqa: E731
    tokenizer = chat_tokenizer()
    (rollout,) = play([environment], ["x"], script, tokenizer=tokenizer)
    assert environment.said == ["go", "stop"]
    assert text_of(rollout, tokenizer).count("hm") == 2


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("glm4moe", "written in another way once a user's message follows it"),
        ("nemotron_3_nano", "written in another way once a user's message follows it"),
        ("deepseekv3", "thoughts are left out of the history"),
    ],
)
def test_templates_that_rewrite_the_history_are_refused(name, why):
    """With the way out; of a single turn they write nothing anew."""
    script = lambda history, branch: f"a{END}"  # noqa: E731
    with pytest.raises(ValueError, match=rf"{why}.*agent by URL.*{AgentRolloutCollector.__name__}"):
        play([Echo()], ["x"], script, tokenizer=chat_tokenizer(name))
    (rollout,) = play([Echo()], ["x"], script, tokenizer=chat_tokenizer(name), max_turns=1)
    assert rollout.num_turns == 1


def test_messages_in_and_out():
    """An environment of messages needs no flag: system message first, the turn as a message, a text is a user's."""
    environment = Roles()
    tokenizer = chat_tokenizer("qwen2_5")
    (rollout,) = play([environment], [None], lambda *_: f"Yes.{END}", tokenizer=tokenizer, chat=False)
    assert environment.actions == [{"role": "assistant", "content": "Yes."}] * 2
    assert text_of(rollout, tokenizer) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nBegin.<|im_end|>\n"
        "<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n"
        "<|im_start|>assistant\nYes.<|im_end|>"
    )


def test_a_turn_that_was_cut_is_ended_by_the_template():
    """The mark is the environment's token: it was not sampled. A turn that ended by itself has it once."""
    tokenizer = chat_tokenizer("qwen2_5")
    script = lambda history, branch: f"{'b' * 20 if 'aa' in history else 'a' * 3}{END}"  # noqa: E731
    (rollout,) = play([Echo()], ["x"], script, tokenizer=tokenizer, max_turn_tokens=10, max_turns=3)
    text = text_of(rollout, tokenizer)
    assert f"aaa{END}\n<|im_start|>user" in text and f"{'b' * 10}{END}\n<|im_start|>user" in text
    ends = [
        mask
        for token, mask in zip(rollout.completion_ids, rollout.env_mask, strict=True)
        if token == tokenizer.eos_token_id
    ]
    assert ends == [1, 0, 0, 0]  # sampled; the user's message's; the cut turn's; the user's message's


def test_variables_of_the_template():
    """``chat_template_kwargs`` reach the prompt and what is between turns."""
    tokenizer = chat_tokenizer("qwen3")
    writer = ChatWriter(tokenizer, end_ids=[tokenizer.eos_token_id], template_kwargs={"enable_thinking": False})
    closed = "<think>\n\n</think>\n\n"
    assert tokenizer.decode(writer.prompt("x", Echo())).endswith(closed)
    assert writer.between([{"role": "user", "content": "y"}])[1].endswith(closed)


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (7, "expected Roles.reset to return a text or a list of messages, got 7"),
        ([{"content": "x"}], "expected Roles.reset to return messages, objects with a role"),
        ([{"role": "user", "content": [{"type": "image", "image": 1}]}], "content of the type 'image'"),
        ([{"role": "user", "content": "\ud800"}], "the character"),
        ([{"role": "critic", "content": "x"}], r"message 1 \(role 'critic'\): its content left no token"),
    ],
)
def test_messages_that_are_none(first, message):
    """They cost the episode, with what was expected."""
    (rollout,) = play([Roles(first)], [None], lambda *_: f"a{END}", tokenizer=chat_tokenizer("glm4moe"))
    assert rollout.failure is not None and rollout.failure.kind == "contract"
    with pytest.raises(EpisodeFailure, match=message):
        raise rollout.failure


def test_a_role_that_a_template_leaves_out_is_an_error():
    """It would leave them all out, so nothing is sampled for it."""
    tokenizer = chat_tokenizer("qwen2_5")
    tokenizer.chat_template = tokenizer.chat_template.replace('message.role == "user"', 'message.role == "person"')
    writer = ChatWriter(tokenizer, end_ids=[tokenizer.eos_token_id])
    with pytest.raises(ValueError, match=r"role 'critic'|another way"):
        writer.between([{"role": "critic", "content": "y"}])


def test_no_chat_template():
    """Named before anything is sampled."""
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"expected a tokenizer with a chat template .* got .* without one"):
        play([Echo()], ["x"], None, tokenizer=tokenizer)


def test_without_the_flag_texts_are_shown_as_they_are():
    """No mark is added."""
    tokenizer = chat_tokenizer()
    engine = SeededEngine(len(tokenizer), tokenizer.eos_token_id)
    sampler = tree_sampler(engine, tokenizer, policy=NoForks(), num_episodes=1)
    (rollout,) = sampler.sample(beginnings([Echo()], ["plain"]))
    assert rollout.prompt_ids == encoded(tokenizer, "plain")
