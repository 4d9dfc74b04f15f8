"""Externally generated responses as `Samples`."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lab import functional as F
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import Forward, TransformerWithValueHead, policy_outputs
from rlhf_lab.samples import Samples
from rlhf_lab.sampling import check_context, pad_prompts, tokenize_prompts

Texts = Sequence[str] | Sequence[Tensor] | Sequence[Sequence[int]]


def as_tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Texts, field: str, prepend_bos: bool
) -> list[list[int]]:
    """Token ids of texts; what is given as token ids stays as it is.

    Raises:
        ConfigError: nothing is given, or one of them is empty; named by `field` and number.
    """
    if isinstance(texts, str) or not len(texts):
        raise ConfigError(f"{field} must be a list with at least one text, or list of token ids.")
    if all(isinstance(text, str) for text in texts):
        rows = tokenize_prompts(tokenizer, texts, prepend_bos)
    else:
        rows = [torch.as_tensor(row).flatten().tolist() for row in texts]
    empty = [number for number, row in enumerate(rows) if not row]
    if empty:
        raise ConfigError(f"{field}[{empty[0]}] is empty; give it at least one token.")
    return rows


def as_masks(
    response_masks: Sequence[Sequence[int]] | Sequence[Tensor] | None,
    responses: Sequence[Sequence[int]],
) -> list[list[bool]]:
    """Which tokens of each response count; all of them, when there are no masks.

    Raises:
        ConfigError: not a 0 or 1 for each token, or a response of which nothing counts.
    """
    if response_masks is None:
        return [[True] * len(row) for row in responses]
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
    return [[bool(counts) for counts in row] for row in rows]


@torch.no_grad()
def samples_of(
    policy: TransformerWithValueHead,
    queries: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    temperature: float,
    chunk_size: int,
    forward: Forward | None = None,
    counted: Sequence[Sequence[bool]] | None = None,
) -> Samples:
    """Run the policy over finished texts for the log-probabilities and values of their tokens.

    1. Pad queries on the left and responses on the right.
    2. Run the policy over some rows at a time.

    Log-probabilities are over the whole vocabulary at the temperature, whatever wrote the
    responses: there is no support, in learning either.

    Args:
        counted: which tokens of each response are the policy's own; the others are read as context,
            and not learned from. All, when None.

    Raises:
        ConfigError: query and response together are longer than the model's context.
    """
    tokens, prompt_mask = pad_prompts(queries, 0, policy.device)
    longest = max(map(len, responses))
    check_context(policy.base_model, tokens.shape[1], longest)
    padded = [[*row, *[0] * (longest - len(row))] for row in responses]
    written = torch.tensor(padded, device=policy.device)
    counted = counted or [[True] * len(row) for row in responses]
    filled = [[*row, *[False] * (longest - len(row))] for row in counted]
    mask = torch.tensor(filled, device=policy.device)
    tokens, prefix_len = torch.cat([tokens, written], dim=1), tokens.shape[1]
    attention_mask = torch.cat([prompt_mask, torch.ones_like(mask)], dim=1)
    logprobs, values = [], []
    for rows in torch.arange(len(tokens), device=policy.device).split(chunk_size):
        logits, all_values = policy_outputs(policy, tokens[rows], attention_mask[rows], forward)
        logprobs.append(F.get_logprobs(logits, tokens[rows], prefix_len, temperature))
        values.append(F.generated_values(all_values, prefix_len).float())
    return Samples(tokens, prompt_mask, mask, torch.cat(logprobs), torch.cat(values), support=None)
