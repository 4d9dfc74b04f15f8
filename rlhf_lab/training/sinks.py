"""Sinks: wandb, trackio and TensorBoard get a run's metrics and samples next to its directory."""

import io
import json
import os
import warnings
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stdout
from types import ModuleType
from typing import Any, Literal, get_args

from rlhf_lab.config import RLHFArgs
from rlhf_lab.console import INTERRUPTED
from rlhf_lab.errors import ConfigError, import_extra
from rlhf_lab.training.callbacks import Callbacks, Context
from rlhf_lab.training.overrides import warn_if_set
from rlhf_lab.training.rollout import sample_lines
from rlhf_lab.training.run_dir import SAMPLES, RunDir

Mode = Literal["disabled", "offline", "online"]
Values = dict[str, Any]  # by name: numbers, a table as a list of dicts, (svg, caption)
N_SAMPLES = 16  # rows of the samples table, per phase
IDENTITY = ("name", "project", "entity", "group", "job_type", "notes", "tags")


def attach_sinks(args: RLHFArgs, callbacks: Callbacks) -> list["Sink"]:
    """Build the loggers of `args.loggers`, and wandb if it is enabled, and attach them."""
    mode = choose_wandb_mode(args)
    sinks: list[Sink] = []
    if not (args.wandb_mode or os.environ.get("WANDB_MODE") or "trackio" in args.loggers):
        unused = " ".join(name for name in vars(args) if name.startswith("wandb_"))
        warn_if_set(args, unused, "wandb is off (set wandb_mode='online' or 'offline')")
    if mode != "disabled":
        import wandb

        sinks.append(RunSink(wandb, wandb_options(args, mode)))
    if "trackio" in args.loggers:
        module = import_extra("trackio", "loggers='trackio'", "loggers")
        options = {"auto_log_cpu": False, "auto_log_gpu": False, "embed": False}
        options |= {"project": args.wandb_project_name, "group": args.wandb_group}
        sinks.append(RunSink(module, options | {"resume": "allow"}))
    if "tensorboard" in args.loggers:
        module = import_extra("torch.utils.tensorboard", "loggers='tensorboard'", "loggers")
        sinks.append(TensorBoardSink(module))
    if args.log_probes and not sinks:
        raise ConfigError(
            "log_probes=True requires a logger. Set wandb_mode='offline' or loggers='tensorboard'."
        )
    for sink in sinks:
        sink.attach(callbacks)
    return sinks


def choose_wandb_mode(args: RLHFArgs, environment: Mapping[str, str] = os.environ) -> Mode:
    """Return the more private of `args.wandb_mode` and WANDB_MODE; "disabled" without either."""
    variable = environment.get("WANDB_MODE", "").strip().lower()
    variable = {"dryrun": "offline", "run": "online"}.get(variable, variable)
    modes = get_args(Mode)
    if variable not in ("", *modes):
        raise ConfigError(f"Unknown WANDB_MODE={variable!r}. Choose one of: {', '.join(modes)}.")
    return min(filter(None, (args.wandb_mode, variable)), key=modes.index, default="disabled")


def to_values(line: dict[str, Any], samples: list[dict[str, Any]], prefix: str = "") -> Values:
    """Return what is logged of a line of metrics.jsonl and its lines of samples.jsonl, by name."""
    numbers = line | {f"cost/{name}": value for name, value in line.get("cost", {}).items()}
    known = {k for k, v in numbers.items() if v is not None} - {"phase", "cost"}
    values: Values = {prefix + k: v for k, v in numbers.items() if k in known}
    rows = [{k: v for k, v in row.items() if k != "phase"} for row in samples[:N_SAMPLES]]
    return values | ({prefix.replace("/", "_") + "samples": rows} if rows else {})


class Sink:
    """Callback that sends a run's phases to one logger; subclasses define `open`, `send`, `close`.

    The run's directory is the record: a sink that raises is switched off with a warning.
    """

    state: Literal["new", "open", "closed"] = "new"

    def open(self, run: RunDir, args: RLHFArgs, phase: int) -> None:
        """Start a log, or continue an earlier one from `phase`, replacing it and later phases."""

    def send(self, phase: int, values: Values, is_final: bool = False) -> None:
        """Log values of a phase, once or more, or of the policy after `phase` learning phases."""

    def close(self, exit_code: int) -> None:
        """Finish the log: 0 for a finished run, 130 for a stopped one, 1 after an error."""

    def attach(self, callbacks: Callbacks) -> None:
        for event in ("run_start", "after_phase"):
            callbacks.on(event)(self)
        callbacks.on("run_end", last=True)(self)

    def __call__(self, ctx: Context) -> None:
        """Open, send or close, depending on the event; reopen if a stopped run continues."""
        if ctx.event == "run_start" or self.state == "closed":
            self.open(ctx.run, ctx.args, ctx.phase)
            self.state = "open"
        if ctx.event == "after_phase" and self.state == "open":
            samples = sample_lines(ctx.rollout, ctx.policy.base_model.tokenizer)
            self.send(ctx.phase, to_values(ctx.report.to_dict(), samples))
        if ctx.event == "run_end" and self.state == "open":
            info = ctx.run.read_info()
            is_finished = info.get("status") == "finished"
            if is_finished and info.get("final"):
                phase = info["phases_done"]
                samples = [row for row in ctx.run.read(SAMPLES) if row["phase"] == phase]
                self.send(phase, to_values(info["final"], samples, "final/"), is_final=True)
            self._close(0 if is_finished else INTERRUPTED)

    def break_off(self, error: BaseException) -> None:
        """Close the log of a run that ended with an error."""
        try:
            if self.state == "open":
                self._close(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)
        except Exception as second:
            warnings.warn(f"closing a logger raised {second!r}", stacklevel=2)

    def _close(self, exit_code: int) -> None:
        self.state = "closed"
        self.close(exit_code)


def wandb_options(args: RLHFArgs, mode: Mode) -> dict[str, Any]:
    """Return options of `wandb.init`; its environment variables apply where no setting does."""
    import wandb

    options = {
        "project": args.wandb_project_name,
        "entity": args.wandb_entity,
        "run_group": args.wandb_group,
        "run_tags": args.wandb_tags and [tag.strip() for tag in args.wandb_tags.split(",")],
        "run_notes": args.wandb_notes,
        "x_transaction_log_flush_interval": 1.0,  # seconds; 15 by default, lost by a kill
    }
    if os.environ.get("WANDB_PROJECT") and options["project"] == RLHFArgs.wandb_project_name:
        del options["project"]
    try:
        wandb.Settings().update_from_env_vars(os.environ)
        settings = wandb.Settings(**{k: v for k, v in options.items() if v is not None})
    except (wandb.Error, ValueError) as error:
        raise ConfigError(f"wandb rejects a setting: {' '.join(str(error).split())}") from None
    if mode == "online" and not wandb.login(prompt=False, verify=False):
        raise ConfigError(
            "wandb mode 'online' requires a login. Run `wandb login`, set WANDB_API_KEY, or "
            "use wandb_mode='offline'."
        )
    return {"mode": mode, "settings": settings}


class RunSink(Sink):
    """Weights & Biases, or trackio, which stores each call, so it gets phases without probes."""

    def __init__(self, module: ModuleType, options: dict[str, Any]) -> None:
        self.module, self.options, self.summary, self.phase = module, options, Values(), -1
        self.is_wandb, self.__name__ = module.__name__ == "wandb", f"{module.__name__}_sink"
        # trackio has no setting to print nothing
        self.quiet = nullcontext() if self.is_wandb else redirect_stdout(io.StringIO())

    def attach(self, callbacks: Callbacks) -> None:
        super().attach(callbacks)
        if self.is_wandb:
            callbacks.on("after_phase", last=True)(self.commit)

    def open(self, run: RunDir, args: RLHFArgs, phase: int) -> None:
        info, name = run.read_info(), run.path.absolute().name
        options = self.options | {"config": args.to_dict()}
        if self.is_wandb:
            options |= {
                "name": os.environ.get("WANDB_NAME") or name,
                "id": info.get("wandb_id"),
                "resume": "allow" if "wandb_id" in info else None,
                "dir": os.environ.get("WANDB_DIR") or str(run.path),
                # next to another trainer's run
                "reinit": "create_new" if self.module.run else None,
            } | info.get("wandb_run", {})
        else:
            options["name"] = f"{name}-{info['id'][:6]}"  # unique in the project
        with self.quiet:
            self.run = self.module.init(**options)
        if self.is_wandb:
            identity = {name: getattr(self.run, name, None) or None for name in IDENTITY}
            info |= {"wandb_id": self.run.id, "wandb_run": identity}
            if self.options["mode"] == "online":
                info["wandb_url"] = self.run.url
            else:
                info.setdefault("wandb_directories", []).append(str(self.run.sync_dir))
            run.write_info(info)

    def send(self, phase: int, values: Values, is_final: bool = False) -> None:
        media = dict(values)
        for name, value in values.items():
            if isinstance(value, list):
                rows = [list(row.values()) for row in value]
                media[name] = self.module.Table(list(value[0]), rows)
            elif isinstance(value, tuple) and self.is_wandb:
                media[name] = self.module.Html(value[0], inject=False)
        if is_final and self.is_wandb:
            self.summary |= media
        elif self.is_wandb or any(isinstance(value, list) for value in values.values()):
            self.phase = phase
            self.run.log(media, step=phase)

    def commit(self, ctx: Context) -> None:
        """Write the step of a phase that others follow, unless wandb.log has done so."""
        if self.state == "open" and self.run.step == ctx.phase < ctx.args.total_phases - 1:
            self.run.log({}, step=ctx.phase, commit=True)

    def close(self, exit_code: int) -> None:
        if self.summary:
            if self.run.step == self.phase:
                self.run.log({}, step=self.phase, commit=True)
            self.run.summary.update(self.summary)
            self.summary = {}
        with self.quiet:
            self.run.finish(**({"exit_code": exit_code} if self.is_wandb else {}))


class TensorBoardSink(Sink):
    """TensorBoard: event files with scalars, and samples as JSON lines."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def open(self, run: RunDir, args: RLHFArgs, phase: int) -> None:
        self.writer = self.module.SummaryWriter(str(run.path / "tensorboard"), purge_step=phase)

    def send(self, phase: int, values: Values, is_final: bool = False) -> None:
        for name, value in values.items():
            if isinstance(value, list):
                lines = (f"    {json.dumps(row, ensure_ascii=False)}" for row in value)
                self.writer.add_text(name, "\n".join(lines), phase)
            elif not isinstance(value, tuple):
                self.writer.add_scalar(name, value, phase)
        self.writer.flush()

    def close(self, exit_code: int) -> None:
        self.writer.close()
