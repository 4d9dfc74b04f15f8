"""The default suite of probes: all exact values of Reel and sums, what makes sense elsewhere."""

import warnings
from collections.abc import Sequence
from typing import Literal

from rlhf_lab.config import RLHFArgs
from rlhf_lab.models.residual_parts import reason_not_additive
from rlhf_lab.probes.attachment import Attachment, differ_in_shape
from rlhf_lab.probes.direction_probe import Direction
from rlhf_lab.probes.eval_text import MOST_TEXTS, text_of_the_run
from rlhf_lab.probes.exact_values import exact_values
from rlhf_lab.probes.kl_by_position import KLByPosition
from rlhf_lab.probes.run_health import RunHealth
from rlhf_lab.probes.step_ledger import StepLedger
from rlhf_lab.probes.store import ProbeStore
from rlhf_lab.probes.suite import Suite
from rlhf_lab.probes.text_heatmap import TextHeatmap
from rlhf_lab.probes.value_lens_probe import ValueLens
from rlhf_lab.probes.weight_delta import WeightDelta
from rlhf_lab.probes.words_moved import WordsMoved
from rlhf_lab.training import Context, RLHFTrainer, RunDir
from rlhf_lab.training.checkpoint import is_numbered

EVAL_TEXTS = 96
SHIFT_TEXTS, KL_TEXTS = 16, 8
MOST_COST = 0.03  # of the rows that a run's models read
CAPTURED = 1.5  # cost of a row with captured activations, in rows of the run
LEDGERS = 2  # the first is of phase 0
EVAL_SEED = 20_231_015
REMEMBERED, RECORD = "probes", "record_probes"


def attach_default_suite(
    trainer: RLHFTrainer, record: Literal["milestones", "every"] | Sequence[int] | None = None
) -> Attachment:
    """Attach the default suite, and store in run.json that the run has one.

    Args:
        record: see `Suite`; None for "milestones", or what a resumed run has recorded so far.
    """
    if record is None:
        stored = {} if trainer.run is None else trainer.run.read_info()
        record = stored.get(RECORD, "milestones")
    suite = default_suite(trainer, record)

    @trainer.on("run_start")
    def remember_probes(ctx: Context) -> None:
        ctx.run.write_info(ctx.run.read_info() | {REMEMBERED: "default", RECORD: suite.record})

    return suite.attach(trainer)


def had_default_suite(run: RunDir) -> bool:
    """Return True if `attach_default_suite` was called for this run."""
    return run.read_info().get(REMEMBERED) == "default"


def affordable_rows(args: RLHFArgs) -> int:
    """Return how many rows a record may read if all records are to cost at most 3% of the run.

    A phase samples B rows, reads them with the reference, and passes them forward and back.

    rows = 0.03 phases B (2 + 3 passes) / (1.5 records)
    """
    phases = args.total_phases
    run = phases * args.batch_size * (2 + 3 * args.batches_per_learning_phase)
    return int(MOST_COST * run / (CAPTURED * (1 + sum(map(is_numbered, range(phases))))))


def default_suite(
    trainer: RLHFTrainer, record: Literal["milestones", "every"] | Sequence[int] = "milestones"
) -> Suite:
    """Return probes and eval text that suit this trainer.

    On the bundled Reel policy the eval text is fresh reviews with their hidden sentiment, and on
    the bundled policy of sums fresh texts with steps, without labels and so without Direction;
    every probe has its exact truth. Elsewhere the eval text is the run's prompts, or samples of the
    first reference (see `text_of_the_run`; stored with the run), as many as `affordable_rows`, from
    16 to 32, the value lens predicts the returns, and there is no direction without labels.
    With exact truth, ValueLens, Direction and WeightDelta record only the end, since they cost
    most, and policy and reference are equal in the first phase; elsewhere both. WeightDelta and
    WordsMoved are left out if the reference has another architecture.
    """
    phases = trainer.args.total_phases
    probes = [TextHeatmap(), RunHealth(), KLByPosition(n=KL_TEXTS)]
    probes += [StepLedger(every=-(-phases // LEDGERS))]
    truth, _ = exact_values(trainer)
    if truth is not None:
        tokens, mask, labels = truth.eval_text(EVAL_TEXTS, EVAL_SEED)
        large = [Direction("sentiment")] * (labels is not None) + [ValueLens(), WeightDelta()]
        for probe in large:
            probe.events = ("run_end",)
        probes += [WordsMoved(), *large]
        return Suite(*probes, eval_tokens=tokens, eval_mask=mask, labels=labels, record=record)
    probes += [ValueLens(text="rollout", every=max(1, phases - 1))]  # the first and the last
    why, left_out = reason_not_additive(trainer.policy.base_model), "words_moved"
    if differ_in_shape(trainer.policy.base_model, trainer.reference):
        why, left_out = "the reference has another architecture", "words_moved and weight_delta"
    else:
        probes.append(WeightDelta(every=phases))
    if why is None:
        probes.append(WordsMoved(SHIFT_TEXTS, text="rollout"))
    else:
        warnings.warn(f"the default suite leaves out {left_out}: {why}.", stacklevel=2)
    kept = None if trainer.run is None else ProbeStore(trainer.run).kept_text()
    rows = min(MOST_TEXTS, max(SHIFT_TEXTS, affordable_rows(trainer.args)))
    tokens, mask = kept or text_of_the_run(trainer, rows)
    return Suite(*probes, eval_tokens=tokens, eval_mask=mask, keep_eval_text=True, record=record)
