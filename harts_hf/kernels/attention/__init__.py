from harts_hf.kernels.attention.api import tree_attention

__all__ = ["tree_attention"]
