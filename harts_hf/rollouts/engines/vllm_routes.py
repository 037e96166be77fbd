"""vLLM's ``routed_experts``: how a server says which experts tokens went to.

Started with ``--enable-return-routed-experts`` (vLLM 0.31; it needs the model runner V2), a server puts into each
choice the base64 text of a ``.npy`` array ``[R, L, k]``, uint8 for up to 256 experts and else uint16: the experts of
the R tokens that were read, from the request's ``routed_experts_prompt_start`` on. The last token of a choice has not
been read. ``L`` are all layers of the model; those without experts hold zeros. (Read in vLLM's source: on a CPU it has
no model runner V2.)
"""

import base64
import binascii
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

FLAG = "--enable-return-routed-experts"
FIELD = "routed_experts"
START = "routed_experts_prompt_start"


def read_routes(value: Any, num_tokens: int) -> NDArray[np.integer[Any]]:
    """``[num_tokens, L, k]`` of a choice.

    Args:
        value: the choice's ``routed_experts``.
        num_tokens: that the server has read from the start that was asked for.

    Raises:
        ValueError: anything else; the text says how to start the server where it gives none.
    """
    if value is None:
        raise ValueError(f"expected {FIELD}, got none: start the server with `vllm serve ... {FLAG}`")
    try:
        array = np.load(io.BytesIO(base64.b64decode(value, validate=True)), allow_pickle=False)
    except (TypeError, ValueError, EOFError, OSError, binascii.Error) as error:
        raise ValueError(f"expected {FIELD} as base64 of a .npy array, got {str(value)[:40]!r} ({error})") from error
    if array.ndim != 3 or array.dtype.kind not in "iu" or len(array) != num_tokens:
        raise ValueError(
            f"expected {FIELD} of shape [{num_tokens}, layers, experts per token], integers, got {array.dtype} "
            f"{list(array.shape)}"
        )
    return array
