"""Tree attention on FlashAttention-4 and FlexAttention."""
