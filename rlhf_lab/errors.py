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
    """An error of one of several processes, which reports it itself, not only on rank 0."""


class LostRankError(RankError):
    """Another process of the run has ended; the run can be resumed from its last save."""
