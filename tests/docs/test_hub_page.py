"""docs/hub-checkpoint.md from end to end, on a small checkpoint that looks like the one it names."""

import shlex

import pytest
import torch
from support.models import _CONFIGS
from support.multimodal import TOKENS, VISION
from support.pages import ROOT, blocks, commands
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from harts_hf.cli.main import main as harts

PAGE = ROOT / "docs" / "hub-checkpoint.md"
# What a CPU needs, and what makes the recipe's rollouts small; the commands stay as they are otherwise.
SMALL = [
    "--use_cpu", "true", "--bf16", "false", "--cpu_threads", "1", "--max_turns", "2", "--max_turn_tokens", "4",
    "--num_generations", "2", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the repository's `examples` and `recipes` and the checkpoint `Qwen3.5-4B`: multimodal, as the
    Hub has it, with the tokenizer of `examples/tiny.py`."""
    folder = tmp_path_factory.mktemp("hub")
    for name in ("examples", "recipes"):
        (folder / name).symlink_to(ROOT / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        from tiny import tiny_tokenizer
    tokenizer = tiny_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = {**_CONFIGS["qwen3_5_text"], "vocab_size": len(tokenizer), **ids}
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=VISION, **TOKENS)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder / "Qwen3.5-4B")
    tokenizer.save_pretrained(folder / "Qwen3.5-4B")
    return folder


@pytest.fixture
def there(place, monkeypatch):
    """The process's folder is that place."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(ROOT)  # recipes.agents, which `harts` finds in the folder where it is started
    threads = torch.get_num_threads()
    yield place
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_its_commands(there, capsys):
    """The dry run, the verdict and both trainings; what they leave loads, under the checkpoint's own names."""
    lines = [line for line in commands(PAGE) if line.startswith("harts ")]
    assert [line.split()[1] for line in lines] == ["train", "verify", "train", "train"]
    dry, verify, two, all_of_them = (shlex.split(line)[1:] for line in lines)
    assert harts([*dry, "--dry_run_memory", "141GB"]) == 0
    said = capsys.readouterr().out
    assert "qwen3_5_text" in said and "nothing is refused" in said
    # Float32, because a small random model's bfloat16 says nothing of a large one's.
    assert harts([*verify[: verify.index("--dtype")], "--device", "cpu"]) == 0
    assert "PASS" in capsys.readouterr().out
    assert two[-2:] == ["--max_steps", "2"] and all_of_them == two[:-2]
    assert harts([*two, *SMALL]) == 0
    said = capsys.readouterr()
    assert "step     2/2" in said.out and "Warning" not in said.err
    saved = there / "outputs" / "qwen3_5_grpo_1gpu"
    model, loading = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert model.config.model_type == "qwen3_5_text" and not loading["missing_keys"]
    assert AutoTokenizer.from_pretrained(saved).chat_template
    before = AutoModelForCausalLM.from_pretrained(there / "Qwen3.5-4B").state_dict()
    assert before.keys() == model.state_dict().keys()


@pytest.mark.exhaustive
def test_its_script(there):
    """The script on a single GPU, here on a CPU; what it saves loads."""
    from examples.digit import Digit

    (block,) = blocks(PAGE, "python")
    names = {"model_folder": str(there / "Qwen3.5-4B"), "max_steps": 1, "Digit": Digit}
    exec(block, names)
    assert names["trainer"].state.log_history[0]["tree/sharing_ratio"] > 1.5
    assert AutoModelForCausalLM.from_pretrained(there / "outputs" / "mine").config.model_type == "qwen3_5_text"
    assert "harts_hf" in (there / "outputs" / "mine" / "README.md").read_text()
