"""Weights & Biases as a mirror of what the run writes to its own directory."""

import os
from typing import Any

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.training.run_dir import RunDir
from rlhf_lab.training.sinks.sink import COLUMNS, Entry, Sink


class WandbSink(Sink):
    """Sends every phase's metrics, and a table of some of its samples.

    Without credentials online mode is refused at once, so that no login prompt ever stands in the
    way.

    Raises:
        ConfigError: the mode is online and nobody is logged in.
    """

    def __init__(self, mode: str) -> None:
        super().__init__()
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._wandb = wandb
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "wandb_mode='online' needs a login; run `wandb login`, set WANDB_API_KEY, "
                "or use wandb_mode='offline'."
            )
        self._run: Any = None

    def open(self, run: RunDir, args: RLHFArgs, phase: int) -> None:
        """Open the wandb run; a resumed run goes on under its old id.

        wandb takes each step once, so a phase that is done again stays as it was.
        """
        info = run.read_info()
        self._run = self._wandb.init(
            project=args.wandb_project_name,
            entity=args.wandb_entity,
            name=run.path.name,
            id=info.get("wandb_id"),
            resume="allow" if "wandb_id" in info else None,
            mode=args.wandb_mode,
            dir=str(run.path),
            config=args.to_dict(),
        )
        run.write_info(info | {"wandb_id": self._run.id})

    def send(self, entry: Entry) -> None:
        """Send one phase."""
        rows = [list(row) for row in entry.samples]
        table = self._wandb.Table(columns=list(COLUMNS), data=rows)
        self._run.log({**entry.scalars, "samples": table}, step=entry.phase)

    def close(self) -> None:
        """Close the wandb run."""
        self._run.finish()
