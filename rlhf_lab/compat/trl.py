"""TRL's step-based workflow: generate, score outside the trainer, step, and finish."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.padding import pad_rows
from rlhf_lab.sampling import read_token_ids, tokenize_prompts
from rlhf_lab.sampling_spec import SamplingSpec, check_context
from rlhf_lab.training.ppo import score_samples
from rlhf_lab.training.prompts import phase_spec
from rlhf_lab.training.random_streams import phase_generator
from rlhf_lab.training.report import PhaseReport
from rlhf_lab.training.rollout import Rollout, score_tokens

if TYPE_CHECKING:
    from rlhf_lab.training.trainer import RLHFTrainer

Texts = Sequence[str] | Sequence[Tensor] | Sequence[Sequence[int]]
SETTINGS = ("do_sample", "eos_token_id", "max_new_tokens", "temperature", "top_k", "top_p")


def generate(
    trainer: "RLHFTrainer",
    prompts: Texts | Int[Tensor, " prompt"],
    return_prompt: bool = False,
    *,
    batch_size: int | None = None,
    length_sampler: Callable[[], int] | None = None,
    **settings: Any,
) -> list[str] | list[Int[Tensor, " response"]] | Int[Tensor, "1 response"]:
    """Generate responses from the policy: texts for texts, token ids (with stop token) for ids.

    One prompt as a tensor of token ids with one dimension returns a tensor [1 response]. Samples by
    the run's seed; another call in the same phase has other noise.

    Args:
        return_prompt: include each prompt before its response.
        batch_size: sequences per forward pass; `args.generation_batch_size` if None.
        length_sampler: number of tokens to generate, such as TRL's LengthSampler.
        settings: for this call only; see `generation_spec`.
    """
    args, tokenizer = trainer.args, trainer.tokenizer
    is_single = isinstance(prompts, Tensor) and prompts.ndim == 1
    rows = _token_rows(trainer, [prompts] if is_single else prompts, "prompts", args.prepend_bos)
    if length_sampler is not None:
        settings = {"max_new_tokens": int(length_sampler())} | settings
    spec = generation_spec(phase_spec(trainer.sampling_spec, args, trainer.phase), settings)
    generator = phase_generator(args.seed, trainer.phase, "generate", trainer.generated)
    samples = trainer.sample(rows, generator, spec, batch_size)
    trainer.generated += 1
    start = 0 if return_prompt else samples.prefix_len
    real = torch.cat([samples.prompt_mask, samples.mask], dim=1)[:, start:]
    responses = [ids[kept] for ids, kept in zip(samples.tokens[:, start:], real, strict=True)]
    if spec.truncates or spec.temperature != args.temperature:
        written = [ids[-n:] for ids, n in zip(responses, samples.mask.sum(1), strict=True)]
        trainer.truncated.update(tokenizer.batch_decode(written, skip_special_tokens=True))
    if is_single:
        return responses[0][None]
    if isinstance(prompts[0], str):
        return tokenizer.batch_decode(responses, skip_special_tokens=True)
    return responses


def generation_spec(spec: SamplingSpec, settings: dict[str, Any]) -> SamplingSpec:
    """Apply settings with the names of transformers' `generate` to a sampling spec.

    They are max_new_tokens, temperature, top_k (0: off), top_p (1: off), do_sample (False: greedy)
    and eos_token_id (one or several). pad_token_id and min_length of at most 0 have no effect.
    """
    for name, value in settings.items():
        if name == "pad_token_id" or (name == "min_length" and value <= 0):
            continue
        if name not in SETTINGS:
            raise ConfigError(
                f"generate() does not take {name}={value!r}. Use only: {', '.join(SETTINGS)}."
            )
    names = {"max_new_tokens": "gen_len", "temperature": "temperature"}
    changes = {field: settings[name] for name, field in names.items() if name in settings}
    if "top_k" in settings:
        changes["top_k"] = int(settings["top_k"] or 0) or None
    if "top_p" in settings:
        changes["top_p"] = None if settings["top_p"] in (None, 1) else settings["top_p"]
    if not settings.get("do_sample", True):
        changes |= {"top_k": 1, "top_p": None}
    if settings.get("eos_token_id") is not None:
        stops = torch.as_tensor(settings["eos_token_id"]).flatten().tolist()
        changes |= {"stop_tokens": tuple(i for i in stops if i >= 0), "stop_at_eos": False}
    return replace(spec, **changes)


def step(
    trainer: "RLHFTrainer",
    queries: Texts,
    responses: Texts,
    scores: Sequence[float] | Sequence[Tensor] | Tensor,
    response_masks: Sequence[Sequence[int]] | Sequence[Tensor] | None = None,
) -> PhaseReport:
    """Run one learning phase on texts that are already scored; log and save as in any phase.

    Args:
        queries, responses: `batch_size` of each, as texts or as token ids. A text has no stop
            token; if the end matters, pass token ids.
        scores: one number per response.
        response_masks: for each response, 1 for its tokens that are learned and 0 for context, such
            as the output of a tool; all 1 if None.

    Returns:
        The report; `TRLStats` has its numbers under TRL's names.

    Raises:
        ConfigError: If there are not `batch_size` of each, one is empty or padded, and for
            advantages='remax' (no greedy responses are scored) and dynamic_sampling.
    """
    args = trainer.args
    for name, entries in {"queries": queries, "responses": responses, "scores": scores}.items():
        if len(entries) != args.batch_size:
            raise ConfigError(
                f"{name} has {len(entries)} entries, but batch_size={args.batch_size}. "
                "Pass one for each sequence of the batch."
            )
    is_remax = "greedy_rewards" in trainer.overrides.estimator_parameters(args)
    if args.dynamic_sampling is not None or is_remax:
        raise ConfigError(
            "step() learns from the given responses only, but dynamic_sampling samples others and "
            "advantages='remax' needs scores of greedy responses. Choose other settings."
        )
    prompts = _token_rows(trainer, queries, "queries", args.prepend_bos)
    written = _token_rows(trainer, responses, "responses", False)
    if trainer.truncated.issuperset(trainer.tokenizer.batch_decode(written, True)):
        warnings.warn(
            "generate() changed the probabilities, so the policy that sampled is another one. "
            "Use top_k=0, top_p=1 and the temperature of RLHFArgs, at which step() scores.",
            stacklevel=3,
        )
    skipped = int(args.prepend_bos and isinstance(queries[0], str))  # the BOS before a text
    starts = [ids[skipped:] for ids in prompts]
    if all(ids and row[: len(ids)] == ids != row for ids, row in zip(starts, written, strict=True)):
        warnings.warn("responses begin with their queries. Pass them without.", stacklevel=3)
    size = args.samples_per_prompt
    if any(row != prompts[i - i % size] for i, row in enumerate(prompts)):
        raise ConfigError(
            f"samples_per_prompt={size} requires one query per {size} rows, but those of one group "
            "differ. Sort the batch by query, or set samples_per_prompt=1."
        )
    learned = _mask_rows(response_masks, written)
    stops = {*trainer.sampling_spec.stops(trainer.tokenizer)}
    if response_masks is None and any(stops & {*row[:-1]} for row in written):
        raise ConfigError("responses continue after a stop token. Cut padding; mask other tokens.")
    numbers = torch.tensor([math.nan if isinstance(x, str) else float(x) for x in scores])
    if not numbers.isfinite().all():
        i = int((~numbers.isfinite()).nonzero()[0])
        raise ConfigError(f"scores[{i}] must be a finite number, got {scores[i]!r:.60}.")
    check_context(trainer.policy.base_model, max(map(len, prompts)), max(map(len, written)))

    def rollout_phase() -> Rollout:
        if trainer.is_main:
            trainer.recorder.write_info(scores="given")
        tokens, prompt_mask = pad_rows(prompts, trainer.policy.device, side="left")
        tokens = torch.cat([tokens, pad_rows(written, tokens.device)[0]], dim=1)
        mask = pad_rows(learned, tokens.device)[0].bool()
        samples = score_tokens(trainer, tokens, prompt_mask, mask)
        trainer.emit("after_rollout", samples=samples)
        rollout = score_samples(trainer, samples, numbers)
        trainer.emit("after_score", samples=samples, rollout=rollout)
        return rollout

    return trainer.run_phase(rollout_phase)


def _token_rows(
    trainer: "RLHFTrainer", texts: Texts, field: str, prepend_bos: bool
) -> list[list[int]]:
    if isinstance(texts, str) or not len(texts):
        raise ConfigError(f"{field} must be a list with at least one text, or list of token ids.")
    if isinstance(texts[0], str):
        texts = tokenize_prompts(trainer.tokenizer, texts, prepend_bos)
    pad = None if field == "responses" else trainer.tokenizer.pad_token_id
    return read_token_ids(texts, trainer.policy.base_model.cfg.d_vocab, field, pad)


def _mask_rows(masks: Sequence[Any] | None, responses: list[list[int]]) -> list[list[int]]:
    if masks is None:
        return [[1] * len(row) for row in responses]
    rows = [torch.as_tensor(row).flatten().tolist() for row in masks]
    fits = list(map(len, rows)) == list(map(len, responses))
    if not fits or not all({1} <= set(row) <= {0, 1} for row in rows):
        raise ConfigError(
            "response_masks must have one mask for each response, with a 0 or a 1 for each token "
            "and at least one 1."
        )
    return [list(map(int, row)) for row in rows]
