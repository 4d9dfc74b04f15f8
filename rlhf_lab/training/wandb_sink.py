"""Weights & Biases as a mirror of what the run writes to its own directory."""

import os
from typing import Any

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.training.moments import Context, Moments

N_SAMPLES = 16


class WandbSink:
    """Sends every phase's metrics, and a table of some of its samples.

    Without credentials online mode is refused at once, so that no login prompt ever stands in the
    way.

    Raises:
        ConfigError: `wandb_mode` is online and nobody is logged in.
    """

    def __init__(self, args: RLHFArgs, moments: Moments) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._wandb = wandb
        if args.wandb_mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "wandb_mode='online' needs a login; run `wandb login`, set WANDB_API_KEY, "
                "or use wandb_mode='offline'."
            )
        self._run: Any = None
        moments.on("run_start")(self.begin)
        moments.on("after_phase")(self.log)
        moments.on("run_end")(self.finish)

    def begin(self, ctx: Context) -> None:
        """Open the wandb run; a resumed run goes on under its old id."""
        info = ctx.run.read_info()
        self._run = self._wandb.init(
            project=ctx.args.wandb_project_name,
            entity=ctx.args.wandb_entity,
            name=ctx.run.path.name,
            id=info.get("wandb_id"),
            resume="allow" if "wandb_id" in info else None,
            mode=ctx.args.wandb_mode,
            dir=str(ctx.run.path),
            config=ctx.args.to_dict(),
        )
        ctx.run.write_info(info | {"wandb_id": self._run.id})

    def log(self, ctx: Context) -> None:
        """Send one phase."""
        if self._run is None:
            return
        rewards = ctx.rollout.raw_rewards.tolist()
        rows = [list(row) for row in zip(ctx.rollout.texts, rewards, strict=True)][:N_SAMPLES]
        table = self._wandb.Table(columns=["text", "reward"], data=rows)
        metrics = {k: v for k, v in ctx.report.to_dict().items() if k != "cost" and v is not None}
        self._run.log({**metrics, "samples": table}, step=ctx.phase)

    def finish(self, ctx: Context) -> None:
        """Close the wandb run."""
        if self._run is not None:
            self._run.finish()
