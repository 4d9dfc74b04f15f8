"""Sampling: a policy continues prompts with a KV cache, by one uniform number per row and step."""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from rlhf_lab.errors import ConfigError, format_argument, require_list
from rlhf_lab.functional import response_mask, truncate_at_stop
from rlhf_lab.functional.masks import at_least_float32
from rlhf_lab.models import Forward, TransformerWithValueHead
from rlhf_lab.models.decode import Decoder, State
from rlhf_lab.models.hooked_model import HookedModel, has_hooks
from rlhf_lab.models.padding import move_to, pad_rows
from rlhf_lab.samples import Samples, Support, join_samples
from rlhf_lab.sampling_spec import SamplingSpec, check_context


def tokenize_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], prepend_bos: bool
) -> list[list[int]]:
    """Return the token ids of each prompt, starting with one BOS if requested.

    Raises:
        ConfigError: If there is no BOS token to prepend, or a word is outside a closed vocabulary.
    """
    require_list(prompts)
    bos = tokenizer.bos_token_id
    if prepend_bos and bos is None:
        raise ConfigError("prepend_bos=True requires a BOS token. Set prepend_bos=False.")
    encoded = []
    for n, prompt in enumerate(prompts, 1):
        where = f"the text {prompt!r:.80} (number {n} of {len(prompts)})"
        tokens = encode_text(tokenizer, prompt, where)
        encoded.append([bos, *tokens] if prepend_bos and tokens[:1] != [bos] else tokens)
    return encoded


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, where: str) -> list[int]:
    """Return the token ids of a text, or raise ConfigError that names its first unknown word."""
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # of any kind, as it comes from Rust
        words = str(text).split()
        for word in words if len(words) > 1 else ():
            encode_text(tokenizer, word, where)
        problem = f"{where} has the word {text!r}, outside the model's vocabulary ({error})"
        raise ConfigError(f"{problem}. Use other words, or another model.") from None


def read_token_ids(
    rows: Any, d_vocab: int, field: str = "prompts", pad: int | None = None
) -> list[list[int]]:
    """Return rows of token ids; raise ConfigError if one is empty, padded, a text or unknown."""
    found: list[list[int]] = []
    for i, row in enumerate(rows):
        with contextlib.suppress(TypeError):  # of text and fractions
            found.append(list(map(index, row.tolist() if hasattr(row, "tolist") else row)))
        if len(found) == i or not (found[i] and 0 <= min(found[i]) <= max(found[i]) < d_vocab):
            raise ConfigError(
                f"{field}[{i}]={row!r:.60} is empty or not a list of token ids from 0 to "
                f"{d_vocab - 1}. Pass at least one id each, as `tokenize_prompts` returns them."
            )
        if found[i][:2] == [pad, pad] or found[i][1:][-1:] == [pad]:  # a first one may be the BOS
            raise ConfigError(f"{field}[{i}] has padding. Pass its token ids without it.")
    if not found:
        raise ConfigError(f"{field} is empty. Pass at least one list of token ids.")
    return found


def sampling_noise(
    n_rows: int, gen_len: int, generator: torch.Generator | None = None
) -> Float[Tensor, "gen batch"]:
    """Sample a uniform number in [0, 1) for each row and step: all the randomness of sampling.

    The numbers come from the generator's device (the CPU when None), so the noise of a row is the
    same on every device and for any division of the batch.
    """
    device = "cpu" if generator is None else generator.device
    return torch.rand(gen_len, n_rows, generator=generator, device=device, dtype=torch.float32)


def draw_token(
    logprobs: Float[Tensor, "batch width"], noise: Float[Tensor, " batch"]
) -> Int[Tensor, " batch"]:
    """Draw from a distribution per row by its inverse CDF (Devroye 1986, section III.2).

    1. Add up the probabilities from the first token to each.
    2. Take the first token at which the sum is greater than the noise times the whole sum. Token v
       is then drawn with probability p(v), and never if p(v) is 0.

    Returns:
        The index of each row's token on the last axis.
    """
    reached = logprobs.exp().cumsum(-1)
    threshold = noise[:, None] * reached[:, -1:]
    return torch.searchsorted(reached, threshold, right=True)[:, 0]


@torch.no_grad()
def sample_without_cache(
    model: HookedModel,
    prompts: Int[Tensor, "batch prefix"],
    noise: Float[Tensor, "gen batch"],
    temperature: float = 1.0,
) -> Int[Tensor, "batch seq"]:
    """Continue prompts of equal length, and run the model on the whole text at every step.

    1. Take one step for each row of the noise: run the model on all tokens so far.
    2. Divide the logits at the last position by the temperature. Compute their log-softmax, and
       draw one token per text with the noise.
    3. Append the tokens to the texts.

    Unlike `sample`, this never stops early. With the same noise, both generate the same tokens, up
    to rounding. Raises ConfigError if prompts and tokens are longer than the model's context.

    a_t ~ softmax(z_t / T), with z_t = model(a_<t) at its last position
    """
    check_context(model, prompts.shape[1], len(noise))
    tokens = prompts.to(next(model.parameters()).device)
    for noise_of_step in noise.to(tokens.device):
        logits = at_least_float32(model(tokens)[:, -1])
        drawn = draw_token((logits / temperature).log_softmax(-1), noise_of_step)
        tokens = torch.cat([tokens, drawn[:, None]], dim=1)
    return tokens


def sample(
    policy: TransformerWithValueHead,
    prompts: Sequence[Sequence[int]],
    spec: SamplingSpec,
    generator: torch.Generator | None = None,
    forward: Forward | None = None,
    part_size: int | None = None,
    rows: slice | None = None,
) -> Samples:
    """Sample a continuation of each prompt, with a KV cache.

    1. Sample all noise: a uniform number per row and step.
    2. Run each distinct prompt once and copy its keys and values to all rows that start with it.
    3. Truncate the last logits by the spec, sample a token, and store its log-probability and the
       state's value and last residual.
    4. Feed the token and repeat from 3, until every row has stopped or has `gen_len` tokens.
    5. Replace the tokens after a stop token by padding.

    Args:
        prompts: token ids (see `tokenize_prompts`), of any lengths.
        generator: the source of all randomness; torch's global one when None.
        forward: forward-pass settings.
        part_size: largest number of sequences at a time, with the same noise; all when None.
        rows: the rows to sample, with the noise that they have among all prompts; all when None.

    Raises:
        ConfigError: If a prompt is empty or has no token ids of the model, or prompt and response
            together exceed the context.
    """
    if not (isinstance(spec, SamplingSpec) and hasattr(policy, "base_model")):
        got = f"{format_argument(policy)} and {format_argument(spec)}"
        raise ConfigError(f"sample() needs a TransformerWithValueHead and SamplingSpec, got {got}.")
    prompts = read_token_ids(prompts, policy.base_model.cfg.d_vocab)
    noise = sampling_noise(len(prompts), spec.gen_len, generator)
    if rows is not None:
        prompts, noise = prompts[rows], noise[:, rows]
    if part_size is None or part_size >= len(prompts):
        return _sample(policy, prompts, spec, noise, forward)
    cuts = [slice(start, start + part_size) for start in range(0, len(prompts), part_size)]
    parts = [_sample(policy, prompts[cut], spec, noise[:, cut], forward) for cut in cuts]
    return join_samples(parts, _pad_token(policy, spec))


@torch.no_grad()
def _sample(
    policy: TransformerWithValueHead,
    prompts: Sequence[Sequence[int]],
    spec: SamplingSpec,
    noise: Float[Tensor, "gen batch"],
    forward: Forward | None,
) -> Samples:
    model, pad_token = policy.base_model, _pad_token(policy, spec)
    stops = spec.stops(model.tokenizer)
    prompt_tokens, prompt_mask = pad_rows(prompts, torch.device("cpu"), pad_token, "left")
    check_context(model, prompt_tokens.shape[1], spec.gen_len)

    noise, stop_ids = (move_to(policy.device, x) for x in (noise, prompt_tokens.new_tensor(stops)))
    decoder = Decoder(policy, prompt_tokens, prompt_mask, spec.gen_len, forward)
    take = lambda state, noise: _Step.take(state, spec, noise)
    width = min(spec.top_k or model.cfg.d_vocab, model.cfg.d_vocab) if spec.truncates else 0
    columns = None
    try:
        if decoder.is_static and width <= WIDEST_KEPT:  # a graph cannot read a nucleus's width
            columns = _Step(*decoder.draw_all(take, spec, noise, stop_ids))
        elif decoder.is_static and not has_hooks(policy):
            decoder.step = decoder.static_step().captured()
    except RuntimeError as failure:  # if it is a hook's, it is raised again
        decoder.forward.graphs = False
        warnings.warn(f"cuda_graphs is switched off in sampling: {failure}.", stacklevel=3)
    columns = columns or _draw_by_steps(decoder, take, noise, stop_ids)

    generated = truncate_at_stop(columns.token, stops, pad_token)
    support = None
    if spec.truncates:
        width = width if spec.top_p is None else int(columns.kept.sum(-1).max())
        support = Support(columns.candidates[..., :width], columns.kept[..., :width])
    return Samples(
        tokens=torch.cat([decoder.prompts, generated], 1),
        prompt_mask=decoder.prompt_mask,
        mask=response_mask(generated, stops),
        logprobs=columns.logprob,
        values=columns.value,
        residuals=columns.residual,
        support=support,
    )


def _draw_by_steps(
    decoder: Decoder,
    take: Callable[[State, Tensor], "_Step"],
    noise: Float[Tensor, "gen batch"],
    stop_ids: Int[Tensor, " stops"],
) -> "_Step":
    """Draw tokens until every row has stopped; return all steps, `[batch gen ...]`."""
    stopped = torch.zeros(noise.shape[1], dtype=torch.bool, device=noise.device)
    steps: list[_Step] = []
    for noise_of_step in noise:
        if steps:
            decoder.feed(steps[-1].token)
        steps.append(take(decoder.state, noise_of_step))
        if len(stop_ids):
            stopped = stopped | torch.isin(steps[-1].token, stop_ids)
            if len(steps) < len(noise) and bool(stopped.all()):
                break
    return _Step(*(_columns(steps, name, len(noise)) for name in _Step._fields))


WIDEST_KEPT = 1024  # candidates per step above which the width of the nucleus is read (a sync)


class _Step(NamedTuple):
    """The results of one step of sampling, without the logits of the whole vocabulary."""

    token: Int[Tensor, " batch"]
    logprob: Float[Tensor, " batch"]
    value: Float[Tensor, " batch"]
    residual: Float[Tensor, "batch d_model"] | None
    candidates: Int[Tensor, "batch width"] | None
    kept: Bool[Tensor, "batch width"] | None

    @classmethod
    def take(cls, state: State, spec: SamplingSpec, noise: Float[Tensor, " batch"]) -> "_Step":
        """Sample a token per row, with its log-probability in at least float32: nan for nan."""
        logits, tokens = spec.candidates(at_least_float32(state.logits))
        logprobs = logits.log_softmax(-1)
        place, kept = draw_token(logprobs, noise).clamp(max=logprobs.shape[-1] - 1), None
        if spec.truncates:
            kept = logits.isfinite()
            n_kept = kept.sum(-1)
            # removed tokens are last, where a GPU's cumulative sum can still rise by rounding
            place = place.minimum(n_kept - 1).clamp(min=0)
            if kept.shape[-1] > WIDEST_KEPT:
                width = int(n_kept.max())
                tokens, kept = tokens[:, :width].clone(), kept[:, :width].clone()
        logprob = logprobs.gather(-1, place[:, None])[:, 0]
        token = place if tokens is None else tokens.gather(-1, place[:, None])[:, 0]
        return cls(token, logprob, at_least_float32(state.value), state.residual, tokens, kept)


def _columns(steps: list[_Step], name: str, gen_len: int) -> Tensor | None:
    """Stack a field of all steps, `[batch gen ...]`, with zeros after the last step."""
    columns = [getattr(step, name) for step in steps]
    if columns[0] is None:
        return None
    width = max(column.shape[-1] for column in columns)  # of each step's nucleus
    columns = [x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in columns]
    return torch.stack(columns + [torch.zeros_like(columns[0])] * (gen_len - len(columns)), 1)


def _pad_token(policy: TransformerWithValueHead, spec: SamplingSpec) -> int:
    tokenizer = policy.base_model.tokenizer
    pad_token = None if tokenizer is None else tokenizer.pad_token_id
    return next(iter(spec.stops(tokenizer)), 0) if pad_token is None else pad_token
