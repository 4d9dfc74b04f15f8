"""TRL's step-based way of working: generate, score outside, step, and finish."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lab import functional as F
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import policy_outputs
from rlhf_lab.models.padding import pad_rows
from rlhf_lab.samples import Samples
from rlhf_lab.sampling import SamplingSpec, check_context, pad_prompts, tokenize_prompts
from rlhf_lab.training.ppo import score_samples
from rlhf_lab.training.prompts import phase_spec
from rlhf_lab.training.random_streams import phase_generator
from rlhf_lab.training.report import PhaseReport
from rlhf_lab.training.rollout import Rollout

if TYPE_CHECKING:
    from rlhf_lab.training.trainer import RLHFTrainer

Texts = Sequence[str] | Sequence[Tensor] | Sequence[Sequence[int]]


def generate(
    trainer: "RLHFTrainer",
    prompts: Texts | Int[Tensor, " prompt"],
    return_prompt: bool = False,
    *,
    batch_size: int | None = None,
    length_sampler: Callable[[], int] | None = None,
    **settings: Any,
) -> list[str] | list[Int[Tensor, " response"]] | Int[Tensor, "1 response"]:
    """Let the policy answer, in the kind that the prompts are: texts, or token ids.

    1. Take prompts as they are, but for a BOS before texts, if `args.prepend_bos`.
    2. Sample, by the seed: another call in the same phase has other noise.
    3. Return the responses; token ids include the stop token, texts do not.

    Args:
        prompts: a list of texts, or of token ids for each prompt; or the token ids of one prompt as
            a tensor with one dimension, which is answered by a tensor [1 response].
        return_prompt: put each prompt before its response.
        batch_size: sequences to generate at a time; `args.generation_batch_size` when None.
        length_sampler: gives the number of tokens to generate, as TRL's LengthSampler.
        settings: of this call alone, under the names of transformers; see `generation_spec`.

    Raises:
        ConfigError: an empty prompt, one that leaves no room for an answer, or a setting that is
            unknown.
    """
    args, tokenizer = trainer.args, trainer.tokenizer
    one = isinstance(prompts, Tensor) and prompts.ndim == 1
    rows = as_tokens(tokenizer, [prompts] if one else prompts, "prompts", args.prepend_bos)
    _refuse_unknown(rows, "prompts", trainer)
    spec = phase_spec(trainer.sampling_spec, args, trainer.phase)
    if length_sampler is not None:
        settings = {"max_new_tokens": int(length_sampler())} | settings
    spec = generation_spec(spec, settings)
    generator = phase_generator(args.seed, trainer.phase, "generate", trainer.generated)
    samples = trainer.sample(rows, generator, spec, batch_size)
    trainer.generated += 1
    start = 0 if return_prompt else samples.prefix_len
    real = torch.cat([samples.prompt_mask, samples.mask], dim=1)[:, start:]
    responses = [ids[kept] for ids, kept in zip(samples.tokens[:, start:], real, strict=True)]
    if one:
        return responses[0][None]
    if isinstance(prompts[0], str):
        return tokenizer.batch_decode(responses, skip_special_tokens=True)
    return responses


def generation_spec(spec: SamplingSpec, settings: dict[str, Any]) -> SamplingSpec:
    """A sampling spec with settings under the names of transformers' `generate` in their place.

    They are max_new_tokens, temperature, top_k (0 for none), top_p (1 for none), do_sample (False
    takes the likeliest token) and eos_token_id (one, or several). A pad_token_id is not needed, and
    min_length -1 or 0 asks for nothing; both are let through.

    Raises:
        ConfigError: another name, or a value out of range.
    """
    names = {"max_new_tokens": "gen_len", "temperature": "temperature"}
    changes = {own: settings[name] for name, own in names.items() if name in settings}
    if "top_k" in settings:
        changes["top_k"] = int(settings["top_k"] or 0) or None
    if "top_p" in settings:
        changes["top_p"] = None if settings["top_p"] in (None, 1) else settings["top_p"]
    if not settings.get("do_sample", True):
        changes |= {"top_k": 1, "top_p": None}
    if settings.get("eos_token_id") is not None:
        stops = settings["eos_token_id"]
        stops = tuple(stops) if isinstance(stops, Sequence) else (int(stops),)
        changes |= {"stop_tokens": tuple(i for i in stops if i >= 0), "stop_at_eos": False}
    known = {*names, "top_k", "top_p", "do_sample", "eos_token_id", "pad_token_id", "min_length"}
    for name, value in settings.items():
        if name not in known or (name == "min_length" and value > 0):
            raise ConfigError(
                f"generate() does not take {name}={value!r}; it takes "
                f"{', '.join(sorted(known - {'min_length', 'pad_token_id'}))}."
            )
    return replace(spec, **changes)


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

    Warns once of steps beyond `total_phases`, where the schedule of the learning rates ends.

    Returns:
        The report; `trl_stats` has its numbers under TRL's names.

    Raises:
        ConfigError: not as many as `batch_size`, an empty one, advantages='remax', for which no
            scores of greedy answers are there, or dynamic_sampling, which samples itself.
    """
    args, tokenizer = trainer.args, trainer.tokenizer
    _check_step(trainer, queries, responses, scores)
    if trainer.phase == args.total_phases:
        warnings.warn(
            f"the steps from here on are beyond total_phases={args.total_phases}, where the "
            "schedule of the learning rates ends: they stay; give it the number of all steps.",
            stacklevel=3,
        )
    asked = as_tokens(tokenizer, queries, "queries", args.prepend_bos)
    answered = as_tokens(tokenizer, responses, "responses", False)
    _refuse_unknown(asked, "queries", trainer)
    _refuse_unknown(answered, "responses", trainer)
    counted = as_masks(response_masks, answered)
    numbers = as_numbers(scores)
    check_context(trainer.policy.base_model, max(map(len, asked)), max(map(len, answered)))
    note = partial(samples_of, trainer, asked, answered, counted)

    def rollout_phase() -> Rollout:
        if trainer.world.is_main:
            trainer.recorder.write_info(scores="given")
        with trainer.world.together("sampling"):
            samples = note()
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
    if args.dynamic_sampling is not None:
        raise ConfigError(
            f"dynamic_sampling={args.dynamic_sampling} samples other prompts and asks the reward "
            "function again, but step() is given both; leave it None."
        )
    if trainer.functions.wants_greedy(args):
        raise ConfigError(
            f"advantages={args.advantages!r} needs scores of greedy answers, which step() "
            "is not given; choose another estimator."
        )


def as_tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Texts, field: str, prepend_bos: bool
) -> list[list[int]]:
    """Token ids of texts; what is given as token ids stays as it is.

    Raises:
        ConfigError: nothing is given, or one of them is empty, or neither a text like the others
            nor token ids; named by `field` and number.
    """
    if isinstance(texts, str) or not hasattr(texts, "__len__") or not len(texts):
        raise ConfigError(f"{field} must be a list with at least one text, or list of token ids.")
    if all(isinstance(text, str) for text in texts):
        rows = tokenize_prompts(tokenizer, texts, prepend_bos)
    else:
        rows = [_token_ids(row, f"{field}[{i}]") for i, row in enumerate(texts)]
    empty = [number for number, row in enumerate(rows) if not row]
    if empty:
        raise ConfigError(f"{field}[{empty[0]}] is empty; give it at least one token.")
    return rows


def _token_ids(row: Any, place: str) -> list[int]:
    """One text's token ids, as they were given."""
    try:
        ids = torch.as_tensor(row)
    except (TypeError, ValueError, RuntimeError):
        ids = None
    if ids is None or (ids.numel() and (ids.is_floating_point() or ids.is_complex())):
        raise ConfigError(
            f"{place}={row!r:.60} is no list of token ids; give texts only, or token ids only."
        )
    if ids.ndim != 1:
        raise ConfigError(
            f"{place} has the shape {tuple(ids.shape)}; give the token ids of each text as a list "
            "or a tensor with one dimension."
        )
    return ids.tolist()


def _refuse_unknown(rows: Sequence[Sequence[int]], field: str, trainer: "RLHFTrainer") -> None:
    """Refuse token ids that the policy has no embedding for."""
    size = trainer.policy.base_model.cfg.d_vocab
    for i, row in enumerate(rows):
        unknown = next((token for token in row if not 0 <= token < size), None)
        if unknown is not None:
            raise ConfigError(
                f"{field}[{i}] has the token {unknown}, and the policy has tokens 0 to {size - 1}; "
                "give ids of its own tokenizer."
            )


def as_numbers(scores: Sequence[float] | Sequence[Tensor] | Tensor) -> Float[Tensor, " batch"]:
    """Scores as a tensor, one number each.

    Raises:
        ConfigError: one is no number; named by its place.
    """
    numbers = []
    for i, score in enumerate(scores):
        try:
            numbers.append(math.nan if isinstance(score, str) else float(score))
        except (TypeError, ValueError, RuntimeError, OverflowError):
            numbers.append(math.nan)
        if not math.isfinite(numbers[-1]):
            raise ConfigError(f"scores[{i}]={score!r:.60} is no finite number; give one for each.")
    return torch.tensor(numbers)


def as_masks(
    response_masks: Sequence[Sequence[int]] | Sequence[Tensor] | None,
    responses: Sequence[Sequence[int]],
) -> list[list[int]]:
    """1 for each token of a response that counts, else 0; all 1, when there are no masks.

    Raises:
        ConfigError: not a 0 or 1 for each token, or a response of which nothing counts.
    """
    if response_masks is None:
        return [[1] * len(row) for row in responses]
    if len(response_masks) != len(responses):
        raise ConfigError(
            f"response_masks has {len(response_masks)} entries for {len(responses)} responses; "
            "give one for each."
        )
    rows = [torch.as_tensor(row).flatten().tolist() for row in response_masks]
    for i, (row, response) in enumerate(zip(rows, responses, strict=True)):
        if len(row) != len(response) or not set(row) <= {0, 1} or not any(row):
            raise ConfigError(
                f"response_masks[{i}]={row} does not fit a response of {len(response)} tokens; "
                "give a 0 or a 1 for each token, and at least one 1."
            )
    return [[int(counts) for counts in row] for row in rows]


@torch.no_grad()
def samples_of(
    trainer: "RLHFTrainer",
    queries: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    counted: Sequence[Sequence[int]],
) -> Samples:
    """Run the policy over finished texts for the log-probabilities and values of their tokens.

    1. Pad queries on the left and responses on the right.
    2. Run the policy over some rows at a time.

    Log-probabilities are over the whole vocabulary at the run's temperature, whatever wrote the
    responses: there is no support, in learning either.

    Args:
        counted: 1 for each token of a response that is the policy's own; the others are read as
            context, and not learned from.
    """
    policy, args = trainer.policy, trainer.args
    prompts, prompt_mask = pad_prompts(queries, 0, policy.device)
    written, _ = pad_rows(responses, policy.device)
    mask = pad_rows(counted, policy.device)[0].bool()
    tokens, prefix_len = torch.cat([prompts, written], dim=1), prompts.shape[1]
    attention_mask = torch.cat([prompt_mask, torch.ones_like(mask)], dim=1)
    logprobs, values = [], []
    for rows in torch.arange(len(tokens), device=policy.device).split(args.rows_at_once):
        outputs = policy_outputs(policy, tokens[rows], attention_mask[rows], trainer.forward)
        logits, all_values = outputs
        logprobs.append(F.get_logprobs(logits, tokens[rows], prefix_len, args.temperature))
        values.append(F.generated_values(all_values, prefix_len).float())
    return Samples(tokens, prompt_mask, mask, torch.cat(logprobs), torch.cat(values), support=None)
