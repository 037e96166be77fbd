# mypy: disallow-untyped-defs=False
"""The interval mask in CuTe, for FA4's partial tiles. Imported only where FA4 is."""

import cutlass
import cutlass.cute as cute
from flash_attn.cute import utils


@cute.jit
def interval_mask(  # noqa: ANN201
    batch: cute.TensorSSA,
    head: cute.TensorSSA,
    query: cute.TensorSSA,
    key: cute.TensorSSA,
    seqlen_info,  # noqa: ANN001
    aux_tensors,  # noqa: ANN001
):
    """Row ``query`` sees ``key`` if and only if ``lo[key] <= query < hi[key]``; ``aux_tensors`` is [lo, hi]."""
    lo = utils.scalar_to_ssa(aux_tensors[0][key[0]], cutlass.Int32)
    hi = utils.scalar_to_ssa(aux_tensors[1][key[0]], cutlass.Int32)
    return (query >= lo) & (query < hi)
