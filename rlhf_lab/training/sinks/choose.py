"""The sinks that a run's arguments ask for."""

from rlhf_lab.config import RLHFArgs
from rlhf_lab.training.callbacks import Callbacks
from rlhf_lab.training.sinks.sink import Sink
from rlhf_lab.training.sinks.tensorboard_sink import TensorBoardSink
from rlhf_lab.training.sinks.trackio_sink import TrackioSink
from rlhf_lab.training.sinks.wandb_sink import WandbSink


def attach_sinks(args: RLHFArgs, callbacks: Callbacks) -> list[Sink]:
    """Make the loggers of `args.loggers`, and wandb if `args.wandb_mode` says so; attach them.

    Raises:
        ConfigError: a logger's package is not installed, or wandb needs a login.
    """
    sinks: list[Sink] = [WandbSink(args.wandb_mode)] if args.wandb_mode != "disabled" else []
    known = {"tensorboard": TensorBoardSink, "trackio": TrackioSink}
    sinks += [known[name]() for name in args.logger_names]
    for sink in sinks:
        sink.attach(callbacks)
    return sinks
