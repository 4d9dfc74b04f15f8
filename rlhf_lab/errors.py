"""Exceptions for mistakes a user can fix: one sentence each, with field, value and remedy."""


class LabError(Exception):
    """Something the user can put right; the command line prints its sentence, with status 2."""


class ConfigError(LabError):
    """A wrong value, or a wrong combination of values, in the arguments."""


class LoadError(LabError):
    """A model, tokenizer or reward that could not be found or read."""


class RunError(LabError):
    """A run directory or checkpoint that is missing, occupied, corrupt or cannot be written."""


class RankError(RunError):
    """What one process of several met alone; it speaks for itself, whichever it is."""


class LostRankError(RunError):
    """Another process of the run is gone; the run goes on from what was saved.

    Attributes:
        is_first: whether no other process has noticed it before, so that this one says it.
    """

    def __init__(self, said: str, is_first: bool = True) -> None:
        super().__init__(said)
        self.is_first = is_first
