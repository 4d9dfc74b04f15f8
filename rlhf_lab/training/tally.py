"""The numbers of a phase's minibatches, which stay on the device until the phase is over."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class Tally:
    """Collects numbers of each minibatch, and whether all of them could be learned from.

    A GPU works through a queue of operations while the host lines up the next ones; every number
    that the host asks for has to wait until the queue is empty. So it asks once.
    """

    def __init__(self) -> None:
        self._rows: list[Float[Tensor, " numbers"]] = []
        self._sound: Bool[Tensor, ""] | None = None

    def still_sound(self, *values: Float[Tensor, ""]) -> Bool[Tensor, ""]:
        """Whether these are finite, and whatever was asked about before them was, too."""
        for value in values:
            finite = value.detach().isfinite()
            self._sound = finite if self._sound is None else self._sound & finite
        return self._sound

    def add(self, numbers: Float[Tensor, " numbers"]) -> None:
        """Take the numbers of a minibatch; every call takes as many."""
        self._rows.append(numbers)

    def read(self, *more: Float[Tensor, ""]) -> tuple[list[list[float]], list[float]]:
        """The numbers of all minibatches, and further ones, in one trip to the device."""
        flat = torch.cat([*self._rows, *(x.reshape(1) for x in more)]).tolist()
        width = len(self._rows[0]) if self._rows else 1
        end = width * len(self._rows)
        return [flat[i : i + width] for i in range(0, end, width)], flat[end:]
