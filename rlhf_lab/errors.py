"""Exceptions for errors of the user: what is wrong, with field and value, and what to do."""


class LabError(Exception):
    """An error that the user can fix; the command line prints it and returns 2."""


class ConfigError(LabError):
    """A wrong value, or a wrong combination of values, in the arguments."""


class LoadError(LabError):
    """A model, tokenizer, reward or data file that is missing or broken."""


class RunError(LabError):
    """A run directory or checkpoint that is missing, occupied, corrupt or not writable."""


class RankError(RunError):
    """An error of one process of several, which prints it whichever process it is."""


class LostRankError(RunError):
    """Another process of the run ended; the run continues from its last saved state.

    Attributes:
        is_first: True in the process that prints the error.
    """

    def __init__(self, message: str, is_first: bool = True) -> None:
        super().__init__(message)
        self.is_first = is_first
