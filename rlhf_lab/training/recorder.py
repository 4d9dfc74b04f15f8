"""The recorder: a callback that writes run.json, metrics, samples and checkpoints of a run."""

import platform
import uuid
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlhf_lab import __version__
from rlhf_lab.errors import RunError
from rlhf_lab.training.callbacks import Context, switched_off
from rlhf_lab.training.checkpoint import (
    CheckpointWriter,
    copied_to_host,
    is_numbered,
    make_metadata,
    make_training_state,
    read_metadata,
    remove_outdated,
    save_checkpoint,
    wait_for_writers,
    weights,
)
from rlhf_lab.training.kl_control import reference_tensors
from rlhf_lab.training.model_card import write_run_card
from rlhf_lab.training.phase_stats import diagnose_batch, validate_finite_weights
from rlhf_lab.training.rollout import sample_lines
from rlhf_lab.training.run_dir import METRICS, SAMPLES, RunDir, RunLock

if TYPE_CHECKING:
    from rlhf_lab.training.trainer import RLHFTrainer


class Recorder:
    """Writes a run's directory, as a callback whose errors end the run.

    Checkpoints are written in the background, unless a callback is registered for `checkpoint`. The
    best weights wait in memory for the next save, and are written before `last`, which names them.
    """

    def __init__(self, trainer: "RLHFTrainer", out: str | Path | None) -> None:
        make_training_state(trainer)  # raises if a component has state that cannot be saved
        self.trainer, self.out = trainer, out
        self.run: RunDir | None = None
        self.run_id = uuid.uuid4().hex  # of run.json and the checkpoints
        self.last_saved_phase: int | None = None
        self.best: dict[str, float] | None = None
        self.diagnostics: dict[str, dict[str, Any]] = {}  # phase and text by name
        self.changes: list[dict[str, Any]] = []  # of settings by `resume`
        self.writer, self.lock = CheckpointWriter(), RunLock()
        self._waiting: list[tuple[dict[str, Any], dict[str, Tensor]]] = []
        callbacks = trainer.callbacks
        callbacks.record("run_start", self.maybe_save, last=True)
        callbacks.record("after_score", self.save_best)
        callbacks.record("after_phase", self.log)
        # after all other callbacks, so that they see a phase in which a run is killed again
        callbacks.record("after_phase", self.maybe_save, last=True)
        callbacks.record("run_end", self.finish)

    def open(self) -> None:
        """Make the directory of a new run, or drop what a resumed run is about to do again."""
        trainer, args, phase = self.trainer, self.trainer.args, self.trainer.phase
        validate_finite_weights(trainer)
        if self.run is not None:
            self._hold()
            self.run.rewind(phase)
            diagnostics = self.run.read_info().get("diagnostics", {})
            self.diagnostics = {k: v for k, v in diagnostics.items() if v["phase"] < phase}
            remove_outdated(self.run.checkpoints, args.keep_checkpoints, phase)
        else:
            name = f"{args.preset}-seed{args.seed}"
            is_named = self.out is not None
            self.run = RunDir.create(self.out) if is_named else RunDir.create_numbered(name)
            self.lock.hold(self.run.path)
            self.run.validate_empty()  # another trainer may have started here before the lock
        versions = {"rlhf_lab": __version__, "python": platform.python_version()}
        versions |= {name: version(name) for name in ("torch", "transformer_lens", "transformers")}
        self.write_info(
            args=args.to_dict(),
            versions=versions,
            working_directory=str(Path.cwd()),
            device=str(trainer.device),
            processes=1 if trainer.world is None else trainer.world.size,
            custom_components=trainer.custom_components,
            sources=trainer.sources,
            interventions=trainer.interventions.records,
            phases_done=phase,
            id=self.run_id,
            changes=self.changes,
            status="running",
        )

    def _hold(self) -> None:
        path = self.run.checkpoints / "last.safetensors"
        if self.lock.hold(self.run.path):
            wait_for_writers(self.run.checkpoints)
            saved = read_metadata(path)["phase"] if path.exists() else self.last_saved_phase
            if saved != self.last_saved_phase:
                raise RunError(
                    f"{path} is of phase {saved} now, not of {self.last_saved_phase}: another "
                    f"trainer has continued the run. Load it again with `resume {self.run.path}`."
                )

    def write_info(self, **changes: Any) -> None:
        trainer = self.trainer
        info = self.run.read_info() if self.run.info_path.exists() else {}
        if trainer.phase < trainer.args.total_phases:
            info.pop("final", None)  # of a finished run that continues
        changes |= {"last_saved_phase": self.last_saved_phase, "diagnostics": self.diagnostics}
        self.run.write_info(info | changes)

    def log(self, ctx: Context) -> None:
        self._hold()
        self.run.append(METRICS, [ctx.report.to_dict()])
        self._log_samples(ctx.rollout)
        signs = diagnose_batch(ctx.report.rollout, ctx.rollout, ctx.args, ctx.phase)
        for sign, text in signs.items():
            self.diagnostics.setdefault(sign, {"phase": ctx.phase, "text": text})
        for name, (phase, text) in self.trainer.callbacks.dropped.items():
            self.diagnostics.setdefault(switched_off(name), {"phase": phase, "text": text})
        self.write_info(phases_done=ctx.phase + 1)

    def remark(self, sign: str, phase: int, text: str) -> None:
        self.diagnostics.setdefault(sign, {"phase": phase, "text": text})
        self.write_info()

    def _log_samples(self, rollout: Any) -> None:
        phase, lines = self.trainer.phase, sample_lines(rollout, self.trainer.tokenizer)
        self.run.append(SAMPLES, [{"phase": phase} | line for line in lines])

    def save_best(self, ctx: Context) -> None:
        """Copy the weights if they sampled the best batch so far, before they learn from it."""
        if ctx.run is None:  # a rollout phase that is run on its own
            return
        mean_reward = ctx.rollout.raw_rewards.mean().item()
        if self.best is None or mean_reward > self.best["mean_reward"]:
            self.best = {"phase": ctx.phase, "mean_reward": mean_reward}
            tensors = copied_to_host(weights(self.trainer.policy))
            self._waiting = [(make_metadata(self.trainer, "best", ctx.phase), tensors)]
            if self.trainer.callbacks.registered.get("checkpoint"):
                self._write()

    def maybe_save(self, ctx: Context) -> None:
        """Save weights after 0, 1, 2, 3, 5, 8, ... phases, the state every `save_every` phases."""
        if ctx.event == "run_start" and ctx.phase:
            return  # a resumed run has this checkpoint
        phase = ctx.phase + (ctx.event == "after_phase")
        # without moments, a callback has just requested a stop, and `finish` saves
        world = self.trainer.world
        saves_state = self.is_save_phase(phase) and (world is None or world.moments is not None)
        self._save(phase, saves_state, is_numbered(phase, self.trainer.args.keep_checkpoints))

    def is_save_phase(self, phase: int) -> bool:
        args = self.trainer.args
        is_end = phase == args.total_phases or self.trainer.stop_requested
        return is_end or phase % args.save_every == 0

    def _save(self, phase: int, saves_state: bool, numbered: bool) -> None:
        if not saves_state and not numbered:
            return
        trainer = self.trainer
        self.writer.wait()  # before copying: one copy of the state in memory at a time
        tensors = copied_to_host(weights(trainer.policy))
        if numbered:
            self._waiting.append((make_metadata(trainer, f"phase_{phase:06d}", phase), tensors))
        if saves_state:
            state, of_state = make_training_state(trainer)
            if trainer.world is not None:
                of_state |= trainer.world.moments
            of_state |= reference_tensors(trainer)
            metadata = make_metadata(trainer, "last", phase) | state
            self._waiting.append((metadata, tensors | copied_to_host(of_state)))
        self._write()

    def _write(self) -> None:
        files, self._waiting = self._waiting, []
        run = RunDir(self.run.path.absolute())  # the working directory may change meanwhile
        is_awaited = self.trainer.callbacks.registered.get("checkpoint")

        def write() -> None:
            for metadata, tensors in files:
                path = run.checkpoints / f"{metadata['name']}.safetensors"
                save_checkpoint(path, tensors, metadata)
                if metadata["name"] == "last":
                    self.last_saved_phase = metadata["phase"]
                    keep = self.trainer.args.keep_checkpoints
                    remove_outdated(run.checkpoints, keep, self.last_saved_phase)
                    _write_card(run)
                if is_awaited:
                    self.trainer.emit("checkpoint", phase=metadata["phase"], checkpoint=path)

        self.writer.wait()
        write() if is_awaited else self.writer.start(run.checkpoints, write)

    def finish(self, ctx: Context) -> None:
        """Record how the run ended; evaluate the learned policy on fresh samples."""
        trainer = self.trainer
        self._hold()
        self.writer.wait()
        if self.last_saved_phase != trainer.phase:  # a run of steps, or an iteration left early
            self._save(trainer.phase, saves_state=True, numbered=False)
            self.writer.wait()
        info = self.run.read_info()
        if info.get("scores") == "given":
            self.write_info(status="finished")  # only the caller can score fresh samples
        elif trainer.phase < trainer.args.total_phases:
            self.write_info(status="stopped")
        elif info["status"] != "finished":
            rollouts = list(trainer.fresh_rollouts())
            self._log_samples(rollouts[0])
            self.write_info(status="finished", final=trainer.evaluate(rollouts))
        _write_card(self.run)
        self.lock.release()

    def break_off(self, error: BaseException | None) -> None:
        """Finish the save in progress, record an error of a started run, and unlock the run."""
        for close in (self.writer.wait, lambda: self._record_end(error)):
            try:
                close()
            except Exception as second:
                warnings.warn(str(second), stacklevel=2)
        self.lock.release()

    def _record_end(self, error: BaseException | None) -> None:
        if error is not None and self.lock.is_held() and self.run.info_path.exists():
            self.write_info(status="stopped" if isinstance(error, KeyboardInterrupt) else "failed")


def _write_card(run: RunDir) -> None:
    try:
        write_run_card(run)
    except Exception as error:  # the run is complete without it
        warnings.warn(f"the model card was not written: {error}", stacklevel=2)
