"""TRL's step-based way of working: generate, score outside, step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from rlhf_lab.compat.external import Texts, as_masks, as_tokens, samples_of
from rlhf_lab.errors import ConfigError
from rlhf_lab.samples import Samples
from rlhf_lab.sampling import check_context
from rlhf_lab.training.ppo import score_samples
from rlhf_lab.training.random_streams import phase_generator
from rlhf_lab.training.report import PhaseReport
from rlhf_lab.training.rollout import Rollout

if TYPE_CHECKING:
    from rlhf_lab.training.trainer import RLHFTrainer


def generate(trainer: "RLHFTrainer", prompts: Texts) -> list[str] | list[Int[Tensor, " response"]]:
    """Let the policy answer, in the kind that the prompts are: texts, or token ids.

    1. Take prompts as they are, but for a BOS before texts, if `args.prepend_bos`.
    2. Sample, by the seed: another call in the same phase has other noise.
    3. Return the responses alone; token ids include the stop token, texts do not.

    Raises:
        ConfigError: an empty prompt, or one that leaves no room for an answer.
    """
    args, tokenizer = trainer.args, trainer.tokenizer
    rows = as_tokens(tokenizer, prompts, "prompts", args.prepend_bos)
    place = (args.seed, trainer.phase, "generate", trainer.device)
    generator = phase_generator(*place, call=trainer.generated)
    trainer.generated += 1
    samples = trainer.sample(rows, generator)
    written = samples.tokens[:, samples.prefix_len :]
    responses = [ids[real] for ids, real in zip(written, samples.mask, strict=True)]
    if isinstance(prompts[0], str):
        return tokenizer.batch_decode(responses, skip_special_tokens=True)
    return responses


def step(
    trainer: "RLHFTrainer",
    queries: Texts,
    responses: Texts,
    scores: Sequence[float] | Sequence[Tensor] | Tensor,
    response_masks: Sequence[Sequence[int]] | Sequence[Tensor] | None = None,
) -> PhaseReport:
    """One phase of learning from texts that are scored already.

    1. Run the policy over query and response for log-probabilities and values.
    2. Go on as any phase does: shape the scores, learn, log, save.

    Args:
        queries, responses: `batch_size` of each, as texts or as token ids. A text has no stop
            token; where the end matters, give token ids.
        scores: one number for each.
        response_masks: for each response, 1 for its tokens that are learned from and 0 for those
            that are context only, such as the answer of a tool; all 1 when None.

    Returns:
        The report; `trl_stats` has its numbers under TRL's names.

    Raises:
        ConfigError: not as many as `batch_size`, an empty one, or advantages='remax', for which no
            scores of greedy answers are there.
    """
    args, tokenizer = trainer.args, trainer.tokenizer
    _check_step(trainer, queries, responses, scores)
    asked = as_tokens(tokenizer, queries, "queries", args.prepend_bos)
    answered = as_tokens(tokenizer, responses, "responses", False)
    counted = as_masks(response_masks, answered)
    numbers = torch.tensor([float(score) for score in scores])
    model, longest = trainer.policy.base_model, max(map(len, answered))
    check_context(model, max(map(len, asked)), longest)

    def rollout_phase() -> Rollout:
        trainer.recorder.write_info(scores="given")

        def note() -> Samples:
            settings = args.temperature, args.rows_at_once, trainer.forward
            return samples_of(trainer.policy, asked, answered, *settings, counted)

        samples = trainer.forward.proved_samples(
            note, trainer.policy, trainer.reference, args.temperature
        )
        trainer.emit("after_rollout", samples=samples)
        rollout = score_samples(trainer, samples, numbers)
        trainer.emit("after_score", samples=samples, rollout=rollout)
        return rollout

    return trainer.run_phase_on(rollout_phase)


def _check_step(
    trainer: "RLHFTrainer", queries: Texts, responses: Texts, scores: Sequence[Any] | Tensor
) -> None:
    """Refuse what is not one query, response and score for each row of the batch."""
    args = trainer.args
    for name, entries in {"queries": queries, "responses": responses, "scores": scores}.items():
        if len(entries) != args.batch_size:
            raise ConfigError(
                f"{name} has {len(entries)} entries, but batch_size={args.batch_size}; "
                "give one for each sequence of the batch."
            )
    if trainer.functions.wants_greedy(args):
        raise ConfigError(
            f"advantages={args.advantages!r} needs scores of greedy answers, which step() "
            "is not given; choose another estimator."
        )
