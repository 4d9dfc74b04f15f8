"""Loggers of a run: the sinks that its settings, and wandb's own variables, ask for."""

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.extras import import_extra
from rlhf_lab.training.callbacks import Callbacks
from rlhf_lab.training.sinks import Sink
from rlhf_lab.training.tensorboard_sink import TensorBoardSink
from rlhf_lab.training.trackio_sink import TrackioSink
from rlhf_lab.training.wandb_sink import WandbSink, import_wandb, wandb_mode_of


def attach_sinks(args: RLHFArgs, callbacks: Callbacks) -> list[Sink]:
    """Make the loggers of `args.loggers`, and wandb if it is switched on; attach them.

    Raises:
        ConfigError: a logger's package is not installed, wandb needs a login or does not take a
            setting, or there is no logger for what is to be logged.
    """
    mode = wandb_mode_of(args)
    sinks: list[Sink] = []
    if mode != "disabled":
        sinks.append(WandbSink(import_wandb(args, mode), mode))
    for name in args.logger_names:
        package = {"tensorboard": "torch.utils.tensorboard"}.get(name, name)
        module = import_extra(package, f"loggers={name!r}", "loggers")
        sinks.append({"tensorboard": TensorBoardSink, "trackio": TrackioSink}[name](module))
    if args.log_probes and not sinks:
        raise ConfigError(
            "log_probes=True has no logger to send to; set wandb_mode='offline' or loggers, such "
            "as loggers='tensorboard'."
        )
    for sink in sinks:
        sink.attach(callbacks)
    return sinks
