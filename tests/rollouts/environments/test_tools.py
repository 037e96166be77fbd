"""TRL's environments and tools: what TRL's own loop makes of a conversation, and forks of it."""

import json

import pytest
import torch
from datasets import Dataset
from support.models import tiny_model
from support.sampling import tree_sampler
from support.scripted import ScriptedEngine, chat_tokenizer, encoded

from harts_hf.rollouts import EpisodesFailedError, ReplayedEnvironment, ToolEnvironment, TreeRolloutCollector
from harts_hf.rollouts.environments.chat import ChatWriter
from harts_hf.rollouts.forks import NoForks, TurnForks
from harts_hf.trainers import TreeGRPOConfig, TreeGRPOTrainer

END = "<|im_end|>"


def call(name, **arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


class Counter:
    """As TRL's trainers take it."""

    def reset(self, start=0, **row):
        self.count = start
        return f" Begin at {start}."

    def add(self, number: int) -> str:
        """Adds to the count.

        Args:
            number: What to add.
        """
        self.count += number
        return f"now {self.count}"

    async def double(self) -> str:
        """Doubles the count."""
        self.count *= 2
        return f"doubled: {self.count}"

    def get_reward(self) -> float:
        return float(self.count)


def shout(text: str) -> str:
    """Shouts.

    Args:
        text: What to shout.
    """
    return text.upper()


# What the policy says, by the number of answers before it: several calls in a turn, of which one is awaited, one is
# of no tool and one has a wrong argument; no JSON at all.
TURNS = {
    0: f"Let me see. {call('double')}\n{call('add', number=3)}\n{call('fly')}{END}",
    3: f"{call('add', numbers=1)}\n{call('shout', text='ä')}{END}",
    5: f"Done.{END}",
}
OTHER_TURNS = {0: f"{call('add', number=1)[:-20]}{END}"}


def script(history, branch):
    turns = OTHER_TURNS if "Other" in history else TURNS
    return turns[history.count("<tool_response>")]


@pytest.fixture
def make_trainer(tmp_path):
    """A trainer of a tiny model with Qwen3's chat template."""

    def make(rewards=(), rows=2, more=None, **options):
        tokenizer = chat_tokenizer()
        prompts = [[{"role": "user", "content": text}] for text in ("Count.", "Other")]
        args = TreeGRPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=1500,
            max_steps=1,
            use_cpu=True,
            bf16=False,
            activation_checkpointing=False,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=1,
        )
        return TreeGRPOTrainer(
            tiny_model("bailing_hybrid", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id),
            list(rewards),
            args=args,
            train_dataset=Dataset.from_dict(more or {"prompt": prompts, "start": [2, 5]}),
            processing_class=tokenizer,
            **options,
        )

    return make


def trl_rows(trainer, inputs):
    """Prompts, completions and masks that TRL's own loop makes of scripted turns."""
    tokenizer = trainer.processing_class

    def single_turn(prompt_ids, images, fields, num_generations, has_tool_images=False):
        histories = [tokenizer.decode(ids, skip_special_tokens=False) for ids in prompt_ids]
        turns = [encoded(tokenizer, script(history, 0)) for history in histories]
        return turns, [[-1.0] * len(turn) for turn in turns]

    trainer._generate_single_turn = single_turn
    output = trainer._generate_and_score_completions(inputs)
    taken = []
    for key, mask in (("prompt_ids", "prompt_mask"), ("completion_ids", "completion_mask")):
        pairs = zip(output[key], output[mask], strict=True)
        taken.append([ids[keep.bool()].tolist() for ids, keep in pairs])
    masks = [mask[: len(ids)].tolist() for mask, ids in zip(output["tool_mask"], taken[1], strict=True)]
    return *taken, masks


def sampled(environments, rows, policy, *, episodes, script=script, **limits):
    tokenizer = chat_tokenizer()
    sampler = tree_sampler(
        ScriptedEngine(tokenizer, script),
        tokenizer,
        end_ids=[tokenizer.eos_token_id],
        policy=policy,
        num_episodes=episodes,
        limits={"max_turns": 6, "max_turn_tokens": 300, "max_completion_tokens": 1500, **limits},
    )

    def begin(environment, row):
        return lambda: (environment, environment.begin(row, seed=0))

    return sampler.sample([begin(*pair) for pair in zip(environments, rows, strict=True)])


def test_a_linear_conversation_is_that_of_trls_loop(make_trainer):
    """Prompt, every token of the completion and the mask; turns that TRL's parser reads, and one that it does not."""
    trainer = make_trainer(environment_factory=Counter, tools=[shout])
    inputs = [{**row, "prompt": list(row["prompt"])} for row in trainer.train_dataset]
    rows = trl_rows(trainer, [row for row in inputs for _ in range(2)])
    environments = [ToolEnvironment(Counter, tools=[shout]) for _ in inputs]
    rollouts = sampled(environments, inputs, NoForks(), episodes=2)
    assert [rollout.prompt_ids for rollout in rollouts] == rows[0]
    assert [rollout.completion_ids for rollout in rollouts] == rows[1]
    assert [rollout.env_mask for rollout in rollouts] == rows[2]
    assert [rollout.num_turns for rollout in rollouts] == [3, 3, 1, 1]
    # Added first, doubled after it, as TRL does.
    assert [rollout.reward for rollout in rollouts] == [10.0, 10.0, 5.0, 5.0]
    text = trainer.processing_class.decode(rows[1][0])
    for part in ("now 5", "doubled: 10", "'error': 'Tool fly not found.'", "unexpected keyword argument", "Ä"):
        assert part in text


def test_native_trl_calls_go_on_as_they_are(make_trainer):
    """``environment_factory`` and ``tools`` given to the trainer: TRL's loop, a step of tree training."""
    trainer = make_trainer(environment_factory=Counter, tools=[shout])
    trl_rows(trainer, [{**trainer.train_dataset[0]}] * 2)  # scripts the trainer
    trainer.train()
    assert trainer.state.global_step == 1
    entry = next(entry for entry in trainer.state.log_history if "reward" in entry)
    assert entry["tools/call_frequency"] > 0
    assert entry["tree/sharing_ratio"] > 1.5  # both generations of a prompt are one path


@pytest.mark.parametrize("where", ["train", "eval"])
def test_prompts_that_are_texts_are_refused_where_trl_plays(make_trainer, where):
    """TRL looks for calls in messages: it would fail once the first turns are sampled."""
    texts = {"prompt": ["Count.", "Other"], "start": [2, 5]}
    data = {"more": texts} if where == "train" else {"eval_dataset": {"a": Dataset.from_dict(texts)}}
    with pytest.raises(ValueError, match=r"expected prompts that are messages, .*, got the text 'Count\.'"):
        make_trainer(environment_factory=Counter, **data)


def forking(history, branch):
    """Adds the branch's number, then the number of answers so far, then stops."""
    answers = history.count("<tool_response>")
    return f"{call('add', number=10**answers * (branch + 1))}{END}" if answers < 2 else f"Done.{END}"


@pytest.mark.parametrize("make", [ToolEnvironment, lambda *a: ReplayedEnvironment(lambda: ToolEnvironment(*a))])
def test_forks_go_on_by_themselves(make):
    """Each leaf's count is that of its own calls, whether the environment is copied or played again."""
    policy = TurnForks(branching=(2, 2), fork_turns=(0, 1))
    rollouts = sampled([make(Counter)], [{"prompt": "Count.", "start": 100}], policy, episodes=4, script=forking)
    assert [rollout.reward for rollout in rollouts] == [111.0, 121.0, 112.0, 122.0]
    assert [rollout.path for rollout in rollouts] == [(0, 0), (0, 1), (1, 0), (1, 1)]


class Odd(Counter):
    """Counts how often it was begun, over all instances: no two are alike."""

    begun = 0

    def reset(self, **row):
        Odd.begun += 1
        return f"{super().reset(**row)} Number {Odd.begun}."


def test_another_answer_of_a_replay_costs_the_episode():
    """All below the continuations that were played again, here two: that of two leaves, and one of the other two."""
    Odd.begun = 0
    policy = TurnForks(branching=(2, 2), fork_turns=(0, 1))
    environment = ReplayedEnvironment(lambda: ToolEnvironment(Odd))
    rollouts = sampled([environment], [{"prompt": "Count."}], policy, episodes=4, script=forking)
    kinds = [rollout.failure and rollout.failure.kind for rollout in rollouts]
    assert kinds == ["replay", "replay", "replay", None]
    failure = next(rollout.failure for rollout in rollouts if rollout.failure)
    assert "to be deterministic" in str(failure) and "Number 2" in str(failure.__cause__)


def test_a_collector_plays_them(make_trainer):
    """Other columns reach ``reset``, reward functions get the environments, rewards are their own."""
    seen = []

    def own(environments, **_):
        seen.extend(environments)
        return [environment.count / 10 for environment in environments]

    collector = TreeRolloutCollector(lambda: ToolEnvironment(Counter), branching=(2,), max_turns=2, max_turn_tokens=8)
    trainer = make_trainer([own], rollout_func=collector)
    trainer.train()
    assert sorted(environment.count for environment in seen) == [2, 2, 5, 5]
    assert sorted(rollout.reward for rollout in collector.last_rollouts) == [2.0, 2.0, 5.0, 5.0]
    assert collector.last_metrics["environment/failed"] == 0
    assert "environment/failed" in next(entry for entry in trainer.state.log_history if "reward" in entry)


class Stuck(Counter):
    def reset(self, **row):
        self.count = 7
        self.lock = (number for number in ())  # cannot be copied


def test_what_cannot_be_copied_says_what_to_do():
    """The first branch goes on; the others fail, and the message names the way out."""
    policy = TurnForks(branching=(2,), fork_turns=(0,))
    rollouts = sampled([ToolEnvironment(Stuck)], [{"prompt": "x"}], policy, episodes=2, script=lambda *_: f"No.{END}")
    assert [rollout.reward for rollout in rollouts] == [7.0, None]
    assert "play it again with ReplayedEnvironment" in str(rollouts[1].failure)


def test_several_kinds_of_environments():
    """By the column ``environment``, as in TRL, each with its own tools; an unknown one fails its prompt."""
    environment = ToolEnvironment({"count": Counter, "none": Stuck}, tools=[shout])
    environment.begin({"prompt": "x", "environment": "count", "start": 3}, seed=0)
    assert [tool.__name__ for tool in environment.tools] == ["shout", "add", "double"]
    with pytest.raises(ValueError, match="expected a column environment of count, none, got 'other'"):
        environment.begin({"prompt": "x", "environment": "other"}, seed=0)
    with pytest.raises(ValueError, match="expected an environment_factory, tools, or both, got neither"):
        ToolEnvironment()


def test_every_environment_failing_is_an_error(make_trainer):
    """With the environment's own error as its cause."""

    class Broken(Counter):
        def reset(self, **row):
            raise SystemExit(0)

    collector = TreeRolloutCollector(lambda: ToolEnvironment(Broken), branching=(2,), max_turns=2, max_turn_tokens=8)
    with pytest.raises(EpisodesFailedError, match=r"4 failures of 4 episodes \(4 raised\); the first: SystemExit: 0"):
        make_trainer([lambda environments, **_: [0.0] * 4], rollout_func=collector).train()
    assert torch.is_grad_enabled()


class Judged(Counter):
    """Its reward is awaited, its first message has blocks, and it says how it was closed."""

    closed = 0

    def reset(self, seed, **row):
        self.count, self.seed = 1, seed
        return [{"type": "text", "text": " And more."}]

    async def fail(self) -> str:
        """Fails."""
        raise OSError("not now")

    async def get_reward(self) -> float:
        return self.count / 2

    def _close(self):
        Judged.closed += 1


def test_what_else_trls_environments_may_do():
    """Rewards that are awaited, blocks, a parameter ``seed``, awaited tools that fail; ``_close`` is no tool."""
    environment = ToolEnvironment(Judged)
    (message,) = environment.begin({"prompt": [{"role": "user", "content": "x"}]}, seed=5)
    assert message["content"] == [{"type": "text", "text": "x"}, {"type": "text", "text": " And more."}]
    assert environment.for_rewards().seed == 5 and environment.reward == 0.5
    assert [tool.__name__ for tool in environment.tools] == ["add", "double", "fail"]
    calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in ("fail", "double")]
    observation, done = environment.step({"role": "assistant", "content": "", "tool_calls": calls})
    assert [message["content"] for message in observation] == ["{'error': 'not now'}", "doubled: 2"] and not done
    environment.close()
    assert Judged.closed == 1
    with pytest.raises(ValueError, match="expected reset to return a text, blocks of content or None, got 7"):
        wrong = ToolEnvironment(type("Wrong", (Counter,), {"reset": lambda self, **row: 7}))
        wrong.begin({"prompt": "x"}, seed=0)


class Shows(Counter):
    def reset(self, **row):
        self.count = 0

    def look(self):
        """Shows a picture."""
        return [{"type": "image", "image": "pixels"}]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"type": "function"}, "A tool call without a name"),
        ({"type": "function", "function": {"arguments": {}}}, "A tool call without a name"),
        ({"type": "function", "function": {"name": ["add"], "arguments": {}}}, "A tool call without a name"),
        ("add", "A tool call without a name"),
        ({"type": "function", "function": {"name": "add"}}, "'arguments'"),
        ({"type": "function", "function": {"name": "add", "arguments": [1]}}, "must be a mapping, not list"),
        ({"type": "retrieval"}, "Unsupported tool call type: retrieval"),
    ],
)
def test_calls_that_are_not_whole_are_answered(made, message):
    """They are what the policy wrote: no failure of the environment, which would cost the episode its reward."""
    game = ToolEnvironment(Counter)
    game.reset("Count.", seed=0)
    (answer,), is_over = game.step({"role": "assistant", "content": "", "tool_calls": [made]})
    assert answer["role"] == "tool" and "error" in answer["content"] and message in answer["content"] and not is_over
    assert isinstance(answer["name"], str) and game.reward == 0


def test_images_are_not_taken():
    """They fail the episode, and it is said which content came."""
    script = lambda *_: f"{call('look')}{END}"  # noqa: E731
    rollouts = sampled([ToolEnvironment(Shows)], [{"prompt": "x"}], NoForks(), episodes=1, script=script)
    assert rollouts[0].failure.kind == "contract" and "content of the type 'image'" in str(rollouts[0].failure)


def test_tools_need_a_template_that_writes_and_parses_them():
    """Before anything is sampled."""
    for name, message in (("gemma", "writes tools, tool calls and their results"), ("deepseekv3", "TRL can parse")):
        tokenizer = chat_tokenizer(name)
        writer = ChatWriter(tokenizer, end_ids=[tokenizer.eos_token_id])
        environment = ToolEnvironment(Counter)
        with pytest.raises(ValueError, match=message):
            writer.prompt(environment.begin({"prompt": "x"}, seed=0), environment)
