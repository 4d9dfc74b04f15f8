"""Where a run's numbers and texts go besides its own directory."""

from rlhf_lab.training.sinks.loggers import attach_sinks
from rlhf_lab.training.sinks.sink import Entry, Sink

__all__ = ["Entry", "Sink", "attach_sinks"]
