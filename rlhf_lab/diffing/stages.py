"""Progress of a long comparison: stages with a number of steps, which a listener may draw."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Tick = Callable[[], None]
"""Called behind every step."""
OpenStage = Callable[[str, int], AbstractContextManager[Tick]]
"""Opens a stage by its name and number of steps, and gives what to call behind each of them."""


def untold() -> None:
    """A step without a listener."""


@contextmanager
def unseen(name: str, steps: int) -> Iterator[Tick]:
    """A stage without a listener."""
    yield untold
