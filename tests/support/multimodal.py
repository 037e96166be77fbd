"""Tiny multimodal checkpoints of Qwen3.5, as the hub has them: a vision part, a text part, both in one folder."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from support.models import _CONFIGS
from support.recorded import tokenizer

VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [],
}  # fmt: skip
TOKENS = {"image_token_id": 40, "video_token_id": 41, "vision_start_token_id": 42, "vision_end_token_id": 43}


def multimodal_checkpoint(kind: str, folder: Path) -> Path:
    """Saves a random model of ``qwen3_5`` or ``qwen3_5_moe`` with a tokenizer and a processor's configuration."""
    torch.manual_seed(0)
    text = {**_CONFIGS[f"{kind}_text"], "router_aux_loss_coef": 0.0}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=VISION, **TOKENS)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    # What a processor is made from; no image processor fits it, and none is needed for text.
    (folder / "preprocessor_config.json").write_text('{"processor_class": "Qwen3VLProcessor"}')
    return folder
