"""Makes a model folder to try things with on a CPU: two hybrid layers, random weights, a tokenizer of bytes.

    python examples/tiny.py tiny

The folder looks like one from the Hub (`config.json`, weights, a tokenizer with Qwen3.5's chat template): every
example takes it where a real model goes, and so does `harts verify`. It knows nothing and writes bytes at random.
"""

import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from trl.chat_template_utils import qwen3_5_nothink_chat_template

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and the marks of Qwen3.5's chat template."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(symbols)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
    )
    tokenizer.chat_template = qwen3_5_nothink_chat_template
    return tokenizer


def tiny_model(vocab_size: int, eos_token_id: int, pad_token_id: int) -> torch.nn.Module:
    """Qwen3.5's text model, 40 wide: a Gated DeltaNet layer and a layer of attention."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_5_text",
        vocab_size=vocab_size,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        hidden_size=40,
        intermediate_size=64,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        initializer_range=0.1,  # the default, 0.02, is made for wide models
    )
    return AutoModelForCausalLM.from_config(config)


def save_tiny(folder: str | Path) -> None:
    """Writes model and tokenizer into a folder."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{model.num_parameters():,} parameters in {folder}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/tiny.py FOLDER (which is made)")
    save_tiny(sys.argv[1])
