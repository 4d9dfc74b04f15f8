"""The recorder: a callback that writes run.json, metrics, samples and checkpoints of a run."""

import platform
import uuid
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from rlhf_lab import __version__
from rlhf_lab.training import checkpoint
from rlhf_lab.training.callbacks import Context, switched_off
from rlhf_lab.training.checkpoint_space import (
    is_numbered,
    loaded_weights,
    most_bytes,
    remove_outdated,
    shortage,
)
from rlhf_lab.training.checkpoint_writer import (
    CheckpointWriter,
    Snapshot,
    copied_to_host,
)
from rlhf_lab.training.diagnostics import diagnose_batch, validate_finite, validate_finite_weights
from rlhf_lab.training.model_card import keep_run_card
from rlhf_lab.training.notes import notes_of
from rlhf_lab.training.reference_reset import final_kl_to_start, reference_tensors
from rlhf_lab.training.resume_checks import refuse_moved_on
from rlhf_lab.training.rewind import rewind
from rlhf_lab.training.rollout import Rollout, mean_of_batches, sample_lines
from rlhf_lab.training.run_dir import METRICS, SAMPLES, RunDir
from rlhf_lab.training.run_lock import RunLock, refuse_locked
from rlhf_lab.training.sources import noted_sources

if TYPE_CHECKING:
    from rlhf_lab.training.trainer import RLHFTrainer

_PACKAGES = ("torch", "transformer_lens", "transformers")


class Recorder:
    """Writes what a run produces to its directory, as a callback like any other.

    Its errors end the run, other callbacks' do not: what it could not write would be lost. The
    directory is `runs/PRESET-seedN`, numbered on, when `out` is None.

    Checkpoints are written in the background. The best weights wait in memory for the next save,
    and are whole before the `last` that tells of them: a run that is killed before goes on from an
    older `last`, and comes to the same best again. Where a callback listens for checkpoints, the
    run waits for each, so that the callback sees the weights that are in the file.

    The run's directory is locked from its start to its end, and looked at again in each phase.

    Attributes:
        run: the directory; None before the run starts.
        run_id: what run.json and the checkpoints of one run have in common.
        saved: the phase of the newest `last` that is whole; None before the first.
        changes: what was changed when the run went on: phase, field, from and to.
        best: phase and mean reward of the best checkpoint.
        remarks: by the name of each sign that learning is dead or has exploded, its text and the
            phase in which it was first seen.
        writer: what writes checkpoints; `writer.wait()` returns when they are on the disk.
        seconds: how long saving within rollout phases took.
    """

    def __init__(self, trainer: "RLHFTrainer", out: str | Path | None) -> None:
        self.trainer, self.out = trainer, out
        self.run: RunDir | None = None
        self.best: dict[str, float] | None = None
        self.remarks: dict[str, dict[str, Any]] = {}
        self.writer, self._waiting = CheckpointWriter(), list[Snapshot]()
        self.seconds = 0.0
        self.run_id, self.saved = uuid.uuid4().hex, None
        self.changes: list[dict[str, Any]] = []
        self.lock = RunLock()
        callbacks = trainer.callbacks
        callbacks.record("run_start", self.save_due, last=True)
        callbacks.record("after_score", self.save_best)
        callbacks.record("after_phase", self.log)
        # Weights are saved when all other callbacks have seen the phase, so that a run that is
        # killed in one of them repeats the phase, and the callback sees it.
        callbacks.record("after_phase", self.save_due, last=True)
        callbacks.record("run_end", self.finish)

    def open(self) -> None:
        """Make the directory of a new run, or drop from an old one what is about to be done again.

        run.json says then that the run is running.
        """
        args = self.trainer.args
        validate_finite_weights(self.trainer)
        if self.run is not None:
            self._hold()
            rewind(self.run, self.trainer.phase, args.batch_size)
            earlier = self.run.read_info().get("remarks") or {}
            phase = self.trainer.phase
            self.remarks = {k: v for k, v in earlier.items() if v["phase"] < phase}
            remove_outdated(self.run.checkpoints, args.keep_checkpoints, self.trainer.phase)
        elif self.out is None:
            self.run = RunDir.create_numbered(f"{args.preset}-seed{args.seed}")
        else:
            self.run = RunDir.create(self.out)
        is_new = not self.lock.is_held
        self.lock.hold(self.run.path)
        if is_new:  # another trainer may have come here since it was looked
            self.run.refuse_occupied()
        lacking = shortage(self.run, self.most_bytes())
        if lacking:
            warnings.warn(lacking, stacklevel=2)
        info = self.run.read_info() if self.run.info_path.exists() else {}
        self.write_info(status="running", sources=noted_sources(self.trainer, info))

    def most_bytes(self) -> int:
        """The most that the run's checkpoints take on the disk, the one being written included."""
        trainer = self.trainer
        return most_bytes(trainer.args, trainer.policy, "policy" in trainer.own_parts)

    def write_info(self, **changes: Any) -> None:
        """Bring run.json up to date, with these changes."""
        trainer = self.trainer
        info = self.run.read_info() if self.run.info_path.exists() else {}
        versions = {"rlhf_lab": __version__, "python": platform.python_version()}
        info |= {
            "args": trainer.args.to_dict(),
            "versions": versions | {name: version(name) for name in _PACKAGES},
            "device": str(trainer.device),
            "processes": trainer.world.size,
            "own_parts": trainer.own_parts,
            "rewarded_class": trainer.rewarded_class,
            "interventions": trainer.interventions.records,
            "phases_done": trainer.phase,
            "id": self.run_id,
            "saved": self.saved,
            "reference_phase": trainer.reference_phase,
            "changes": self.changes,
            "remarks": self.remarks,
        }
        if trainer.phase < trainer.args.total_phases:
            info.pop("final", None)  # of a run that was finished, and goes on
        self.run.write_info(info | changes)

    def save_best(self, ctx: Context) -> None:
        """Keep the weights if they wrote the best batch so far, before they learn from it."""
        if ctx.run is None:  # a rollout phase that is run on its own
            return
        began = perf_counter()
        mean_reward = ctx.rollout.raw_rewards.mean().item()
        if self.best is None or mean_reward > self.best["mean_reward"]:
            self.best = {"phase": ctx.phase, "mean_reward": mean_reward}
            weights = copied_to_host(checkpoint.weights(self.trainer.policy))
            self._waiting = [self._snapshot("best", weights, ctx.phase)]
            if self.trainer.callbacks.has_callbacks("checkpoint"):
                self._save([])
        self.seconds += perf_counter() - began

    def log(self, ctx: Context) -> None:
        """Add the phase to metrics.jsonl and samples.jsonl."""
        self._hold()
        self.run.append(METRICS, [ctx.report.to_dict()])
        self.log_samples(ctx.rollout)
        self.note_remarks(ctx)
        done = {"phases_done": ctx.phase + 1, "saved": self.saved, "remarks": self.remarks}
        done["reference_phase"] = self.trainer.reference_phase
        if ctx.phase == 0:
            done["initial"] = ctx.report.to_dict()
        self.run.write_info(self.run.read_info() | done)

    def note_remarks(self, ctx: Context) -> None:
        """Note, once in a run, that learning is dead or has exploded, and since which phase.

        The text of a remark stays as it was in the phase that it was first made in.
        """
        for sign, text in diagnose_batch(ctx.report.rollout, ctx.rollout, ctx.args).items():
            self.remarks.setdefault(sign, {"phase": ctx.phase, "text": text})
        for name, (phase, text) in self.trainer.callbacks.dropped.items():
            self.remarks.setdefault(switched_off(name), {"phase": phase, "text": text})

    def remark(self, sign: str, phase: int, text: str) -> None:
        """Note a remark of a listener's, once in a run, and write it to run.json at once."""
        self.remarks.setdefault(sign, {"phase": phase, "text": text})
        self.run.write_info(self.run.read_info() | {"remarks": self.remarks})

    def log_samples(self, rollout: Rollout) -> None:
        """What the policy wrote after so many learning phases as are done."""
        phase = {"phase": self.trainer.phase}
        lines = sample_lines(rollout, self.trainer.tokenizer)
        self.run.append(SAMPLES, [phase | line for line in lines])

    def save_due(self, ctx: Context) -> None:
        """Weights after 0, 1, 2, 4, 8, ... phases; the state every `save_every`, and at the end."""
        if ctx.event == "run_start" and ctx.phase:
            return  # a run that goes on has this checkpoint
        phase = ctx.phase + (ctx.event == "after_phase")
        # without moments a listener has asked just now to stop, and `finish` saves
        is_due = self.is_due(phase) and self.trainer.weights.has_moments
        numbered = is_numbered(phase, self.trainer.args.keep_checkpoints)
        if is_due or numbered:
            self._save_phase(phase, is_due, numbered)

    def is_due(self, phase: int) -> bool:
        """Whether the training state is saved after so many phases."""
        args = self.trainer.args
        is_end = phase == args.total_phases or self.trainer.stop_requested
        return is_end or phase % args.save_every == 0

    def _save_phase(self, phase: int, is_due: bool, numbered: bool) -> None:
        """Save the training state if it is due, and the weights under a number."""
        trainer = self.trainer
        self.writer.wait()  # before copying, so that one copy of the state is in memory at a time
        weights = checkpoint.weights(trainer.policy)
        moments = trainer.weights.moments(trainer.optimizer) if is_due else {}
        if is_due:
            moments |= reference_tensors(trainer)
        state, due = copied_to_host(weights | moments), []
        if numbered:
            due.append(self._numbered({name: state[name] for name in weights}, phase))
        if is_due:
            due.append(self._snapshot("last", state, phase, lambda: self._saved(phase)))
        self._save(due)

    def _save(self, due: list[Snapshot]) -> None:
        """Write in the background, the best first; or at once, and tell the callbacks."""
        due, self._waiting = self._waiting + due, []
        if not self.trainer.callbacks.has_callbacks("checkpoint"):
            self.writer.save(due)
            return
        for snapshot in due:
            self.writer.save([snapshot])
            self.writer.wait()
            phase = snapshot.notes["phase"]
            self.trainer.emit("checkpoint", phase=phase, checkpoint=snapshot.path)

    def _saved(self, phase: int) -> None:
        """What follows once `last` is whole, in the writer's thread."""
        self.saved = phase
        remove_outdated(self.run.checkpoints, self.trainer.args.keep_checkpoints, phase)
        keep_run_card(self.run)

    def _numbered(self, weights: dict[str, torch.Tensor], phase: int) -> Snapshot:
        """The checkpoint of a phase; with a bound on the disk, phase 0's leaves out what it can."""
        trainer, left = self.trainer, {}
        if phase == 0:
            left = loaded_weights(trainer.args, "policy" in trainer.own_parts, weights)
        kept = {name: tensor for name, tensor in weights.items() if name not in left}
        snapshot = self._snapshot(f"phase_{phase:06d}", kept, phase)
        if left:
            snapshot.notes["as_loaded"] = checkpoint.checksum(left)
        return snapshot

    def _snapshot(
        self,
        name: str,
        tensors: dict[str, torch.Tensor],
        phase: int,
        then: Callable[[], None] | None = None,
    ) -> Snapshot:
        """A checkpoint with its notes, of copies in host memory."""
        notes = notes_of(self.trainer, name, phase, len(tensors))
        return Snapshot(self.run.checkpoints / f"{name}.safetensors", tensors, notes, then)

    def finish(self, ctx: Context) -> None:
        """Note how the run ended; measure the policy that was learned, and log what it writes."""
        trainer = self.trainer
        self._hold()
        self.writer.wait()
        if self.saved != trainer.phase:  # a run of steps, or one whose iteration was left
            self._save_phase(trainer.phase, is_due=True, numbered=False)
            self.writer.wait()
        if self.run.read_info().get("scores") == "given":
            self.write_info(status="finished")  # nobody but the caller can score fresh samples
        elif trainer.phase < trainer.args.total_phases:
            self.write_info(status="stopped")
        elif self.run.read_info()["status"] != "finished":
            rollouts = list(trainer.fresh_rollouts())
            self.log_samples(rollouts[0])
            figures = mean_of_batches(rollouts) | final_kl_to_start(trainer, rollouts)
            final = validate_finite(figures, trainer)
            self.write_info(status="finished", final=final)
        keep_run_card(self.run)
        self.lock.release()

    def break_off(self) -> None:
        """Let the run's directory go while an error ends the run."""
        self.writer.wait_to_end()
        self.lock.release()

    def _hold(self) -> None:
        """Take the lock of an earlier run, or see that it is still ours.

        Raises:
            RunError: another trainer has it, or has gone on with the run meanwhile.
        """
        if self.lock.is_held:
            self.lock.hold(self.run.path)
            return
        refuse_locked(self.run.path)
        refuse_moved_on(self.run, self.saved)
        self.lock.hold(self.run.path)
        refuse_moved_on(self.run, self.saved)  # by one that finished just before the lock was ours
