"""Every recipe parses and is dry-run, real models with their real dimensions and no weights; launch files are read."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from support.recorded import tokenizer
from transformers import AutoConfig
from trl.chat_template_utils import qwen3_5_think_chat_template

from benchmarks.gpu.registry import STEP_MODELS
from harts_hf.cli.main import main as harts
from harts_hf.cli.recipe import parse, read_recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
LAUNCHES = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))
# Billions of parameters of the text model, of public model cards (of 4B: of its configuration).
REAL = {
    "qwen3_5_grpo_1gpu": (4.206, "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_lora": (8.954, "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_ppo_fsdp2": (8.954, "Qwen3_5ForConditionalGeneration"),
    "ling3_tiny_grpo_fsdp2": (7.893, "BailingHybridForCausalLM"),
    "ling3_flash_grpo_zero3": (124.414, "BailingHybridForCausalLM"),
}


@pytest.fixture(autouse=True)
def _process_settings(monkeypatch):
    """Recipes are started in the folder above theirs; what they set for the process is undone."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def configuration(name):
    """Of the model that a recipe is for, as its checkpoint has it: Qwen3.5's are multimodal."""
    if name == "qwen3_5_grpo_1gpu":
        return AutoConfig.for_model("qwen3_5", text_config=STEP_MODELS["qwen3.5-4b"][1])
    if name in ("qwen3_5_lora", "qwen3_5_ppo_fsdp2"):
        return AutoConfig.for_model("qwen3_5")  # its defaults are the 9B's
    if name == "ling3_tiny_grpo_fsdp2":
        return AutoConfig.for_model("bailing_hybrid", **STEP_MODELS["ling-3.0-tiny"][1])
    return AutoConfig.for_model("bailing_hybrid")  # its defaults are the flash's


def model_folder(name, folder):
    """A folder with that configuration and a tokenizer, and nothing else."""
    config = configuration(name)
    config.architectures = [REAL[name][1]]
    config.save_pretrained(folder)
    words = tokenizer()
    words.chat_template = qwen3_5_think_chat_template  # one whose answers TRL can parse
    words.save_pretrained(folder)
    return folder


def dry_run(recipe, tmp_path, capsys, *options):
    """Exit status and output."""
    status = harts(["train", str(recipe), "--dry-run", "--output_dir", str(tmp_path / "out"), *map(str, options)])
    return status, capsys.readouterr().out


@pytest.mark.essential("qwen3_5_grpo_1gpu", "tiny_ppo", "tiny_sft")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_dry_run(recipe, tmp_path, capsys):
    """Nothing is refused, nothing is written, and real models have the parameters that they are known to have."""
    model = model_folder(recipe.stem, tmp_path / "model") if recipe.stem in REAL else None
    status, said = dry_run(recipe, tmp_path, capsys, *(("--model_name_or_path", model) if model else ()))
    assert status == 0, said
    assert "nothing is refused" in said
    assert not (tmp_path / "out").exists()
    if model:
        found = re.search(r"([\d,]+) parameters in [\w ]+, ([\d,]+) of them", said)
        total, trained = (int(number.replace(",", "")) for number in found.groups())
        base = total - trained if trained < total else total  # without adapters
        assert base / 1e9 == pytest.approx(REAL[recipe.stem][0], abs=0.001)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_says_what_it_is(recipe):
    """It begins with what it does, how it is launched, and whether it was ever run."""
    text = recipe.read_text()
    comments = "".join(line for line in text.splitlines(keepends=True)[:20] if line.startswith("#"))
    assert f"recipes/{recipe.name}" in comments and "train" in comments
    assert ("Verified on" in comments) != ("only dry-run" in comments)
    launch = read_recipe(str(recipe)).get("accelerate_config")
    assert launch is None or f"--config_file {launch}" in comments


def test_a_recipe_for_a_server_reaches_its_keys():
    """vLLM's address, its time-outs, the gap that stops a run."""
    options = ["--bf16", "false", "--use_cpu", "true", "--tree_server_timeout", "30", "--vllm_server_timeout", "5"]
    _, training, _ = parse([str(ROOT / "recipes" / "ling3_tiny_grpo_fsdp2.yaml"), *options])
    assert (training.use_vllm, training.vllm_mode) == (True, "server")
    assert training.vllm_server_base_url == "http://localhost:8000" and training.vllm_server_timeout == 5
    assert training.server_options().timeout == 30 and training.server_options().max_logprob_gap == 0.1


@pytest.mark.parametrize("path", LAUNCHES, ids=lambda path: path.stem)
def test_launch_files(path):
    """Accelerate's own parser and launcher take them; layers to wrap are classes of Transformers."""
    config = load_config_from_file(str(path))
    options = ["--config_file", str(path), "-m", "harts_hf.cli", "train", "recipe.yaml"]
    launched, _, _ = _validate_launch_command(launch_command_parser().parse_args(options))
    assert launched.num_processes == config.num_processes > 1 and launched.module
    kinds = (launched.use_fsdp, launched.use_deepspeed, launched.multi_gpu)
    assert kinds == tuple(kind in path.stem for kind in ("fsdp2", "zero3", "ddp"))
    named = yaml.safe_load(path.read_text()).get("fsdp_config", {}).get("fsdp_transformer_layer_cls_to_wrap")
    if named:
        from transformers.models.bailing_hybrid import modeling_bailing_hybrid
        from transformers.models.qwen3_5 import modeling_qwen3_5

        assert hasattr(modeling_qwen3_5 if "qwen3_5" in path.stem else modeling_bailing_hybrid, named)
