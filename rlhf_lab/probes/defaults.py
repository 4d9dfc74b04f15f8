"""The default suite of probes: everything that is known on Reel, what makes sense elsewhere."""

import warnings

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.residual_parts import reason_not_additive
from rlhf_lab.probes.attachment import Attachment
from rlhf_lab.probes.direction_probe import Direction
from rlhf_lab.probes.eval_text import text_of_the_run
from rlhf_lab.probes.kl_by_position import KLByPosition
from rlhf_lab.probes.logit_shift import single_token
from rlhf_lab.probes.logit_shift_probe import LogitShift
from rlhf_lab.probes.reel_truth import ReelTruth
from rlhf_lab.probes.run_health import RunHealth
from rlhf_lab.probes.step_ledger import StepLedger
from rlhf_lab.probes.store import ProbeStore
from rlhf_lab.probes.suite import Suite
from rlhf_lab.probes.text_heatmap import TextHeatmap
from rlhf_lab.probes.value_lens_probe import ValueLens
from rlhf_lab.probes.weight_delta import WeightDelta
from rlhf_lab.training import Context, RLHFTrainer, RunDir

MOST_REVIEWS, FEWEST_REVIEWS = 384, 96
LEDGERS = 3
FEW_TEXTS = 16  # eval texts of LogitShift without bundled text: models may be large
EVAL_SEED = 20_231_015
REMEMBERED = "probes"
WORD_PAIRS = (("loved", "hated"), (" great", " terrible"), (" good", " bad"))


def attach_default_suite(trainer: RLHFTrainer) -> Attachment:
    """Attach the default suite, and note in the run that it has one; see `had_default_suite`."""

    @trainer.on("run_start")
    def remember_probes(ctx: Context) -> None:
        ctx.run.write_info(ctx.run.read_info() | {REMEMBERED: "default"})

    return default_suite(trainer).attach(trainer)


def had_default_suite(run: RunDir) -> bool:
    """Whether `attach_default_suite` was called for this run."""
    return run.read_info().get(REMEMBERED) == "default"


def default_suite(trainer: RLHFTrainer) -> Suite:
    """Probes and eval text that suit this trainer.

    On the bundled Reel policy the eval text is fresh reviews with their hidden sentiment, and
    every probe has its exact truth. Elsewhere the eval text is the run's prompts, or what the first
    reference writes (see `text_of_the_run`; stored with the run), the value lens reads the returns,
    and there is no direction, since nothing is labelled.
    """
    if trainer.starts_as_grammar:
        return _reel_suite(trainer)
    pair = _pair(trainer)
    phases = trainer.args.total_phases
    often = max(1, phases // 5)
    probes = [TextHeatmap(every=often), RunHealth(), KLByPosition(n=8, every=often)]
    probes += [ValueLens(text="rollout", every=max(20, phases))]
    probes += [StepLedger(every=-(-phases // LEDGERS))]
    probes += [WeightDelta(words=pair, every=phases)]
    why = reason_not_additive(trainer.policy.base_model)
    if pair is not None and why is None:
        probes.append(LogitShift(*pair, n=FEW_TEXTS, every=phases))
    elif pair is not None:
        warnings.warn(f"the default suite leaves out logit_shift: {why}.", stacklevel=2)
    kept = None if trainer.run is None else ProbeStore(trainer.run).kept_text()
    tokens, mask = kept or text_of_the_run(trainer)
    return Suite(*probes, eval_tokens=tokens, eval_mask=mask, keep_eval_text=True)


def _reel_suite(trainer: RLHFTrainer) -> Suite:
    truth = ReelTruth()
    n_reviews = min(MOST_REVIEWS, max(FEWEST_REVIEWS, trainer.args.batch_size))
    tokens, positive = truth.reviews(n_reviews, EVAL_SEED)
    word, other = WORD_PAIRS[0]
    phases = trainer.args.total_phases
    every = phases // 4 if phases >= 20 else phases
    return Suite(
        TextHeatmap(every=max(1, phases // 5)),
        RunHealth(),
        StepLedger(every=-(-phases // LEDGERS)),
        KLByPosition(every=max(2, phases // 5)),
        ValueLens(every=min(phases, 2 * every)),
        Direction("sentiment", every=every),
        LogitShift(word, other, pos=truth.grammar.slot("VERB") - 1, every=every),
        WeightDelta(words=(word, other), every=every),
        eval_tokens=tokens,
        labels=positive,
    )


def _pair(trainer: RLHFTrainer) -> tuple[str, str] | None:
    for pair in WORD_PAIRS:
        try:
            for text in pair:
                single_token(trainer.tokenizer, text)
        except ConfigError:
            continue
        return pair
    return None
