"""Patched Hugging Face models."""

from harts_hf.modeling.families import FAMILIES
from harts_hf.modeling.patching import is_patched, patch, unpatch, vocab_size_of
from harts_hf.modeling.scoring import ScoreRequest, TreeOutput

__all__ = ["FAMILIES", "ScoreRequest", "TreeOutput", "is_patched", "patch", "unpatch", "vocab_size_of"]
