# mypy: disallow-untyped-defs=False
"""The interval mask in CuTe, for FA4's partial tiles. Imported only where FA4 is.

FA4 calls a mask for every element of a partial tile. Where a mask reads tensors, it also divides every index by the
length; so this one is given an address as a scalar, and reads an interval as one word (:func:`pack_intervals`).
"""

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
    aux_scalars,  # noqa: ANN001
):
    """Row ``query`` sees ``key`` if and only if ``lo[key] <= query < hi[key]``.

    ``aux_scalars`` holds the address of the packed words, which reach to the end of the last tile of keys.
    """
    pointer = cute.make_ptr(cutlass.Int64, aux_scalars[0], cute.AddressSpace.gmem, assumed_align=8)
    word = cute.make_tensor(pointer, cute.make_layout(1 << 30))[key[0]]
    lo = utils.scalar_to_ssa(cutlass.Int32(word), cutlass.Int32)
    length = utils.scalar_to_ssa(cutlass.Uint32(cutlass.Int32(word >> 32)), cutlass.Uint32)
    return (query - lo).to(cutlass.Uint32) < length  # below lo, the difference wraps around to more than any length


def address_of(words):  # noqa: ANN001, ANN201
    """The scalar that :func:`interval_mask` reads."""
    return cutlass.Int64(words.data_ptr())
