from harts_hf.kernels.conv.api import tree_causal_conv1d

__all__ = ["tree_causal_conv1d"]
