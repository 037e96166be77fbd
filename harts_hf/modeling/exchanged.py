"""What modules have in common whose class was exchanged on the instance."""

import copy
import pickle
from typing import Any, Self

from torch import nn


class Exchanged(nn.Module):
    """A module of a class that no module of Python has: it can be copied, and says so where it is pickled.

    Attributes:
        stock: the class that was exchanged.
    """

    stock: type[nn.Module]

    def __copy__(self) -> Self:
        twin = type(self).__new__(type(self))
        twin.__setstate__(dict(vars(self)))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self)] = twin = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(vars(self), memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises PicklingError; what Python would say names a class that looks as if it were there."""
        raise pickle.PicklingError(
            "expected a model without patches to pickle (torch.save, multiprocessing), got a patched one: save it "
            "with save_pretrained, or call harts_hf.unpatch first"
        )
