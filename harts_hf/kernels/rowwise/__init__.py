"""Operations of one row at a time that models run between products: norms, gates, decays."""

from harts_hf.kernels.rowwise.api import Activation, decay_gate, gated_rms_norm, rms_norm, rotate, swiglu

__all__ = ["Activation", "decay_gate", "gated_rms_norm", "rms_norm", "rotate", "swiglu"]
