from harts_hf.kernels.linear_attention.api import TreeLinearOutput, tree_gated_delta_rule, tree_kimi_delta_rule

__all__ = ["TreeLinearOutput", "tree_gated_delta_rule", "tree_kimi_delta_rule"]
