"""Linear-attention layers, their rules, convolutions and state kernels."""
