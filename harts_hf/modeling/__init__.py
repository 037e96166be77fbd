"""Patched Hugging Face models."""

from harts_hf.modeling.families import FAMILIES
from harts_hf.modeling.patching import is_patched, patch, unpatch, vocab_size_of
from harts_hf.modeling.scoring import ScoreRequest, TreeOutput
from harts_hf.modeling.sizes import handed_sizes, with_handed_bytes

__all__ = [
    "FAMILIES",
    "ScoreRequest",
    "TreeOutput",
    "handed_sizes",
    "is_patched",
    "patch",
    "unpatch",
    "vocab_size_of",
    "with_handed_bytes",
]
