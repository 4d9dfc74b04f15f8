"""Weights & Biases (wandb) as a sink: its environment variables, its runs, tables and summary."""

import os
import shlex
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Any, Literal, get_args

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.training.notes import WANDB_NAMES
from rlhf_lab.training.run_dir import RunDir
from rlhf_lab.training.sinks import Entry, Sink

Mode = Literal["disabled", "offline", "online"]
"""Of wandb, in the order of what is sent."""
FLUSH_SECONDS = 1.0
EARLIER_MODES = MappingProxyType({"dryrun": "offline", "run": "online"})
"""What wandb called its modes before, and still takes."""


def wandb_mode_of(args: RLHFArgs, environment: Mapping[str, str] = os.environ) -> Mode:
    """What is done about wandb: of `args.wandb_mode` and WANDB_MODE, the one that sends less.

    Where only one of them is set, it holds; where neither is, wandb is not used.

    Raises:
        ConfigError: WANDB_MODE is none of wandb's modes.
    """
    modes = get_args(Mode)
    said = environment.get("WANDB_MODE", "").strip().lower() or None
    said = EARLIER_MODES.get(said, said)
    if said is not None and said not in modes:
        raise ConfigError(
            f"WANDB_MODE={said!r} is not known here; set it to one of {', '.join(modes)}, or "
            "unset it."
        )
    given = [mode for mode in (args.wandb_mode, said) if mode is not None]
    return min(given, key=modes.index, default="disabled")


def import_wandb(args: RLHFArgs, mode: Mode) -> ModuleType:
    """The package wandb; what it would not take is refused before the run begins.

    Raises:
        ConfigError: no login, so that no prompt for one ever waits; or names that wandb refuses,
            of fields or of its environment variables.
    """
    import wandb

    given = _named(args)
    names = {"project": "project", "entity": "entity", "group": "run_group", "tags": "run_tags"}
    try:
        settings = wandb.Settings(
            **{names[k]: v for k, v in given.items() if k in names and v is not None}
        )
        settings.update_from_env_vars(os.environ)
    except (wandb.Error, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"wandb refuses a setting or variable of its own: {reason}") from None
    if mode == "online" and not wandb.login(prompt=False, verify=False):
        asked = "wandb_mode='online'" if args.wandb_mode else "WANDB_MODE=online"
        raise ConfigError(
            f"{asked} needs a login; run `wandb login`, set WANDB_API_KEY, "
            "or use wandb_mode='offline'."
        )
    return wandb


def _named(args: RLHFArgs) -> dict[str, Any]:
    """What `wandb.init` is told of the run; None where wandb's own variables are to decide."""
    project, entity = args.wandb_project_name, args.wandb_entity
    if project == RLHFArgs.wandb_project_name and os.environ.get("WANDB_PROJECT"):
        project = None
    tags = args.wandb_tags and [tag.strip() for tag in args.wandb_tags.split(",")]
    return {
        "project": project,
        "entity": entity,
        "group": args.wandb_group,
        "tags": tags,
        "notes": args.wandb_notes,
    }


def _settings(module: ModuleType) -> Any:
    """Let wandb's file have what was logged within a second: of a run that is killed, a phase that
    was saved is not done again. wandb's own interval is 15 seconds; the user's holds.
    """
    name, given = "x_transaction_log_flush_interval", module.Settings()
    given.update_from_env_vars(os.environ)
    if name in given.model_fields_set or not hasattr(given, name):
        return None
    return module.Settings(**{name: FLUSH_SECONDS})


def _names_of(run: Any) -> dict[str, Any]:
    """What a run is called in wandb and where it is, for the parts of it that may follow."""
    found = {name: getattr(run, name, None) or None for name in sorted(WANDB_NAMES)}
    return found | {"tags": list(found["tags"] or ()) or None}


class WandbSink(Sink):
    """Sends every phase's metrics, a table of some of its samples, and the final figures to wandb.

    What wandb reads from its environment variables (WANDB_NAME, WANDB_DIR, WANDB_JOB_TYPE,
    WANDB_RUN_ID, ...) holds where no field says otherwise.
    """

    __name__ = "wandb"

    def __init__(self, module: ModuleType, mode: Mode) -> None:
        super().__init__()
        self._module, self._mode, self._run = module, mode, None
        self._at_end: dict[str, Any] = {}
        self._last_phase = -1

    def open(self, run: RunDir, args: RLHFArgs, phase: int) -> None:
        """Begin a run under the directory's name, or go on with its earlier part.

        wandb goes on under the old id, and takes each step once: a phase that is done again stays
        as it was. In run.json stand the id, the names, and the run's address or the directories of
        its parts; the names that it began with stay, whatever the variables are by then.
        """
        info = run.read_info()
        earlier = info.get("wandb_id")
        named = _named(args) | {"name": os.environ.get("WANDB_NAME") or run.path.absolute().name}
        # A run of wandb's that is open in this process is another trainer's, or the user's own.
        beside = {"reinit": "create_new"} if getattr(self._module, "run", None) else {}
        self._run = self._module.init(
            **named | (info.get("wandb_run") or {}),
            **beside,
            config=args.to_dict(),
            id=earlier,
            resume="allow" if earlier else None,
            mode=self._mode,
            dir=os.environ.get("WANDB_DIR") or str(run.path),
            settings=_settings(self._module),
        )
        noted = {"wandb_id": self._run.id, "wandb_run": _names_of(self._run)}
        if self._mode == "online":
            noted["wandb_url"] = self._run.url
        else:
            directories = info.get("wandb_directories") or []
            noted["wandb_directories"] = [*directories, str(self._run.sync_dir)]
        run.write_info(info | noted)

    def send(self, entry: Entry) -> None:
        """Send one phase."""
        self._last_phase = entry.phase
        self._run.log(values_of(entry, self._module), step=entry.phase)

    def add(self, entry: Entry) -> None:
        """Add to the last step; numbers that were found at the end are for the summary alone.

        No step is begun for them: a run that is given more phases goes on with that number. Where
        the last step is complete, as when a run was stopped, the summary has the pictures, too.
        """
        values = values_of(entry, self._module)
        if not entry.is_final:
            self._run.log(values, step=entry.phase)
            return
        is_open = self._run.step == entry.phase - 1
        now = values.keys() - entry.scalars.keys() if is_open else ()
        if now:
            self._run.log({name: values[name] for name in now}, step=entry.phase - 1)
        self._at_end |= {name: value for name, value in values.items() if name not in now}

    def complete(self, phase: int) -> None:
        """Let wandb write the phase, which it would do when the next is logged."""
        if self._run.step == phase:  # a wandb.log of the user's own may have completed it
            self._run.log({}, step=phase, commit=True)

    def close(self) -> None:
        """Wait until all is sent, and close the run with the exit code that says how it ended.

        The last step is completed before the summary is, which takes over what a step logs.
        """
        if self._at_end:
            self.complete(self._last_phase)
            self._run.summary.update(self._at_end)
            self._at_end = {}
        self._run.finish(exit_code=self.exit_code)


def values_of(entry: Entry, module: ModuleType) -> dict[str, Any]:
    """What is logged of an entry, as wandb and trackio take it: numbers, a table, pictures."""
    values: dict[str, Any] = dict(entry.scalars)
    if entry.samples:
        rows = [list(row) for row in entry.samples]
        values[entry.table_name] = module.Table(columns=list(entry.columns), data=rows)
    for name, (picture, caption) in entry.pictures.items():
        values[name] = module.Image(picture, caption=caption)
    return values


def offline_in_wandb(info: Mapping[str, Any]) -> str | None:
    """How to send what wandb has of a run on the disk, from its run.json; None if it has none."""
    directories = info.get("wandb_directories")
    if not directories:
        return None
    return f"wandb, offline; send it with: wandb sync {shlex.join(directories)}"
