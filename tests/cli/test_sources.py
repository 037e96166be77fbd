"""`harts train`: rollouts from everywhere that a recipe may name, each trained for a step; what contradicts."""

import json
import sys

import pytest
import torch
from support.chat import byte_tokenizer
from trl.chat_template_utils import qwen3_5_think_chat_template

from harts_hf.cli.main import main as harts
from harts_hf.cli.sources import _say_unused
from harts_hf.cli.train_arguments import PolicyArguments, TrainArguments

USER_CODE = '''
def rewards(completion_ids, **columns):
    return [float(index % 3) for index, _ in enumerate(completion_ids)]

def play(prompts, trainer):
    rows = [[7, 8, 9 + index % 2] for index, _ in enumerate(prompts)]
    return {"prompt_ids": [[5, 6]] * len(rows), "completion_ids": rows, "logprobs": [[-1.0] * 3] * len(rows)}

def weather(city: str) -> str:
    """Tells the weather.

    Args:
        city: Where.
    """
    return "rain"

class Counter:
    """Counts; the reward says how many instances came before it."""

    made = 0

    def __init__(self, start=0):
        Counter.made += 1
        self.value = float(Counter.made % 2)

    def reset(self, **row):
        return "Count."

    def add(self, number: int) -> str:
        """Adds.

        Args:
            number: What to add.
        """
        return "added"

    def get_reward(self) -> float:
        return self.value
'''
RECIPE = """
model_type: qwen3_5_text
model_config:
  hidden_size: 32
  intermediate_size: 48
  num_hidden_layers: 2
  layer_types: [linear_attention, full_attention]
  num_attention_heads: 2
  num_key_value_heads: 2
  head_dim: 16
  linear_num_key_heads: 2
  linear_num_value_heads: 2
  linear_key_head_dim: 8
  linear_value_head_dim: 8
num_generations: 4
per_device_train_batch_size: 4
max_completion_length: 8
max_steps: 1
logging_steps: 1
save_strategy: "no"
use_cpu: true
bf16: false
report_to: none
disable_tqdm: true
"""


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    """Runs a command in a folder with a user's module, a recipe, a tokenizer and a data set; its status and texts."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.delitem(sys.modules, "my_code", raising=False)
    (tmp_path / "my_code.py").write_text(USER_CODE)
    tokenizer = byte_tokenizer(qwen3_5_think_chat_template, ("<|im_start|>", "<|im_end|>", "<pad>"))
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<pad>"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "recipe.yaml").write_text(RECIPE + f"tokenizer: {tmp_path / 'tokenizer'}\noutput_dir: out\n")
    prompts = [{"prompt": [{"role": "user", "content": text}]} for text in ("one", "two", "three", "four")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    threads = torch.get_num_threads()

    def train(*options):
        status = harts(["train", "recipe.yaml", *options])
        output = capsys.readouterr()
        return status, output.out, output.err

    yield train
    torch.set_num_threads(threads)
    sys.modules.pop("my_code", None)


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["train", "dry-run"])
def test_a_template_that_writes_no_tools(dry, train, tmp_path):
    """Refused before anything is sampled where the environment's turns are calls."""
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    )
    status, out, err = train("--environment_factory", "my_code:Counter", "--branching", "2", "2", *dry)
    said = " ".join((out + err).split())
    assert status == (1 if dry else 2) and "expected a chat template that writes tools" in said


REWARDS = ("--reward_funcs", "my_code:rewards")
DATA = ("--dataset_name", "prompts.jsonl")


@pytest.mark.essential("rollout_func", "environment_factory")
@pytest.mark.parametrize(
    "options",
    [
        ("--rollout_func", "my_code:play", *DATA, *REWARDS),
        ("--environment_factory", "my_code:Counter", "--environment_kwargs", '{"start": 1}'),
        ("--tools", "my_code:weather", *DATA, *REWARDS),
        (*DATA, *REWARDS, "--trainer", "gmpo"),
        (*DATA, *REWARDS, "--trainer=rloo", "--beta", "0"),
    ],
    ids=["rollout_func", "environment_factory", "tools", "gmpo", "rloo"],
)
def test_a_step_from_each_source(options, train, tmp_path):
    """The current folder's module is found; the step is logged with its rewards and what is left of the time."""
    status, said, error = train(*options)
    assert status == 0, error
    assert "on 1 process," in said and "step     1/1  reward" in said and "ETA 0:00:00" in said
    (entry,) = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert entry["tree/expanded_tokens"] > 0
    assert (tmp_path / "out" / "summary.json").exists() and not (tmp_path / "out" / "tree.png").exists()


def test_an_environment_of_trl_forks(train, tmp_path):
    """With an option of forks, and options of the collector."""
    options = ("--environment_factory", "my_code:Counter", "--branching", "2", "2", "--max_turns", "2")
    status, said, error = train(*options, "--max_turn_tokens", "4", "--collector_kwargs.failed_reward", "0.0")
    assert status == 0, error
    assert "step     1/1  reward" in said
    assert (tmp_path / "out" / "tree.png").exists()


def test_recorded_rollouts(train, tmp_path):
    """A file's groups are the prompts, its rewards the rewards; its options reach the reader."""
    rows = [
        {"group": group, "token_ids": [5, 6, 7, 8 + i], "loss_mask": [0, 0, 1, 1], "reward": float(i),
         "old_logprobs": [0.0, 0.0, -1.0, -2.0]}
        for group in ("a", "b") for i in range(4)
    ]  # fmt: skip
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, said, error = train("--recorded_rollouts", "rollouts.jsonl", "--recorded_kwargs.logprobs", "rescored")
    assert status == 0, error
    assert "reward  1.500" in said
    status, said, error = train("--recorded_rollouts", "rollouts.jsonl", "--dry-run")
    assert status == 0, said
    assert "sampled by nobody: they are recorded" in said and "rollouts.jsonl: 1 of 2 groups" in said
    status, _, error = train("--recorded_rollouts", "rollouts.jsonl", "--recorded_kwargs.mood", "good")
    assert status == 2 and "recorded_kwargs do not fit RecordedRollouts" in error


@pytest.mark.exhaustive
def test_evaluation(train, tmp_path):
    """A split of a data set's own is evaluated, and logged in a file of its own."""
    folder = tmp_path / "data"
    folder.mkdir()
    row = json.dumps({"prompt": "a"}) + "\n"
    (folder / "train.jsonl").write_text(row * 4)
    (folder / "test.jsonl").write_text(row * 2)
    evaluation = ("--eval_strategy", "steps", "--eval_steps", "1", "--per_device_eval_batch_size", "4")
    status, said, error = train("--dataset_name", str(folder), *REWARDS, *evaluation)
    assert status == 0, error
    assert "step     1/1  evaluation: reward" in said
    (entry,) = [json.loads(line) for line in (tmp_path / "out" / "evaluation.jsonl").read_text().splitlines()]
    assert entry["step"] == 1 and "eval_reward" in entry
    status, said, error = train(
        *DATA, *REWARDS, *evaluation, "--dataset_test_split", "train", "--disable_tqdm", "false"
    )
    assert status == 0, error
    assert "step     1/1" not in said and "1/1" in error  # TRL's bar instead


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "expected reward_funcs, dotted paths of reward functions, where rollouts come from prompts, got none"),
        (REWARDS, "expected dataset_name, prompts to train on, where rollouts come from TRL, got none"),
        (("--rollout_func", "my_code:play", *REWARDS), "prompts to train on, where rollouts come from rollout_func"),
        (("--rollout_func", "my_code:play", "--tools", "my_code:weather"), "expected no tools beside rollout_func"),
        (("--rollout_func", "my_code:none"), "expected rollout_func to be the dotted path of a rollout function"),
        (
            ("--rollout_func", "my_code:play", "--environment_factory", "my_code:Counter"),
            "got environment_factory and",
        ),
        (("--branching", "2", "2"), "expected no branching without environment or environment_factory, got [2, 2]"),
        (
            ("--rollout_func", "my_code:play", "--fork_policy", "entropy"),
            "expected no fork_policy beside rollout_func",
        ),
        (("--fork_policy", "entropy", *DATA, *REWARDS), "expected no fork_policy without environment or"),
        (("--environment_factory", "my_code:Counter", "--environment_kwargs.x", "1"), "do not fit my_code:Counter"),
        (
            ("--environment_factory", "my_code:Counter", "--collector_kwargs.x", "1"),
            "expected no collector_kwargs where",
        ),
        (("--trainer", "a2c"), "expected trainer to be one of grpo, gmpo, ppo, rloo, sft, got 'a2c'"),
        (
            ("--trainer", "rloo", "--rollout_func", "my_code:play", *DATA, *REWARDS),
            "expected a trainer that takes rollout_func for rollout_func, got 'rloo': TRL's RLOO samples",
        ),
        (("--trainer", "rloo", "--tree_credit", "turn", *DATA, *REWARDS), "unknown key 'tree_credit'"),
        (("--tokenizer", "nowhere", *DATA, *REWARDS), "expected tokenizer to be a folder with a tokenizer"),
        (("--tokenizer", "", *DATA, *REWARDS), "expected tokenizer, a folder or name, for a model_type without"),
        (("--dataset_name", "my_code.py", *REWARDS), "expected a data set in a file of .json, .jsonl, .parquet, .csv"),
        (("--use_peft", "--lora_dropout", "0.05", *DATA), "expected lora_dropout 0 (scoring and training compute"),
        (("--use_peft", "--load_in_4bit", *DATA), "expected unquantized weights, got load_in_4bit"),
        (("--num_processes", "2", *DATA, *REWARDS), "expected 2 processes (num_processes), got 1: start them with"),
        (("--num_processes", "0"), "expected num_processes of at least 1, got 0"),
        (("--dry_run_rollouts", "x.jsonl"), "expected dry_run_rollouts with --dry-run only"),
        (
            ("--environment", "harts_hf.rollouts.environments.shelf:ShelfEnvironment", "--collector_kwargs.x", "1"),
            "collector_kwargs do not fit TreeRolloutCollector",
        ),
    ],
)
def test_what_contradicts_is_refused(options, message, train):
    """Named, with what was expected and what came; exit status 2."""
    status, _, error = train(*options)
    assert status == 2 and message in error


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"rollout_func": "play", "max_turns": 3, "agent_timeout": 5},
            "agent_timeout and max_turns are not used with",
        ),
        (
            {"environment": "Game", "agent_concurrency": 3, "max_turns": 3},
            "agent_concurrency is not used with environment\n",
        ),
        (
            {"environment_factory": "Counter", "max_turns": 3},
            "max_turns is not used with environment_factory, which TRL",
        ),
        ({"environment_factory": "Counter", "max_turns": 3, "branching": [2, 2]}, ""),
        ({"max_turn_tokens": 3}, "max_turn_tokens is not used with prompts\n"),
        ({"agent": "play", "agent_timeout": 5, "max_turns": 3}, ""),
    ],
    ids=["rollout_func", "environment", "trl", "forked", "prompts", "agent"],
)
def test_limits_that_nobody_reads_are_named(options, line, capsys):
    """On stderr: a recipe may keep those of another source, but who sets a limit should know that it is none."""
    _say_unused(TrainArguments(**options))
    said = capsys.readouterr().err
    assert said.startswith(line) and bool(said) == bool(line)


def test_groups_that_processes_would_split(train):
    """Four rollouts a process and groups of eight: each process would have half a group."""
    from types import SimpleNamespace

    from harts_hf.cli.sources import RolloutSource

    source = RolloutSource(arguments={"rollout_func": SimpleNamespace(uses_engine=True)})
    args = SimpleNamespace(per_device_train_batch_size=4, steps_per_generation=1, num_generations=8)
    with pytest.raises(ValueError, match=r"whole groups, got 4 x 1 rollouts and groups of 8"):
        source.check(args)
    source.check(SimpleNamespace(**{**vars(args), "steps_per_generation": 2}))


def test_a_lora_without_dropout_by_default(train, tmp_path):
    """TRL's default would be refused."""
    options = ("--use_peft", "--lora_r", "2", "--lora_target_modules", "all-linear", *DATA, *REWARDS)
    status, _, error = train(*options, "--save_strategy", "steps")
    assert status == 0, error
    saved = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert saved["lora_dropout"] == 0.0


@pytest.mark.parametrize("modules", [["q_proj"], ["q_proj", "k_proj"], ["all-linear"], [".*q_proj"], []])
def test_modules_of_a_lora(modules):
    """A list of one name stays a list: as a text, PEFT would look for a module of this whole dotted name."""
    is_text = modules in (["all-linear"], [".*q_proj"])
    assert PolicyArguments(lora_target_modules=modules).lora_target_modules == (modules[0] if is_text else modules)
