from harts_hf.kernels.conv.api import ACTIVATIONS, tree_causal_conv1d

__all__ = ["ACTIVATIONS", "tree_causal_conv1d"]
