from harts_hf.kernels.logprobs.api import token_logprobs

__all__ = ["token_logprobs"]
