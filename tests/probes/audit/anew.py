"""Forward passes made anew: what the numbers of a record are held to, and by how much they miss."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lab.models import TransformerWithValueHead, has_hooks
from rlhf_lab.models.device import LOGPROB_ROUNDING
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.probes.probe import Observation
from rlhf_lab.samples import Rows

ROWS_ANEW = 2
"""Sequences that are run anew in each record."""


class States(NamedTuple):
    """What a model says in the states before the generated tokens of some rows."""

    logits: Float[Tensor, "rows gen d_vocab"]
    values: Float[Tensor, "rows gen"] | None

    def logprobs(self, tokens: Int[Tensor, "rows gen"]) -> Float[Tensor, "rows gen"]:
        """Log-probabilities of tokens in these states, over the whole vocabulary."""
        chosen = self.logits.gather(-1, as_float64(tokens).long()[..., None])[..., 0]
        return chosen - self.logits.logsumexp(-1)

    def entropy(self) -> Float[Tensor, "rows gen"]:
        """-sum_v p(v) log p(v), in nats."""
        return torch.special.entr(self.logits.softmax(-1)).sum(-1)

    def kl(self, reference: "States") -> Float[Tensor, "rows gen"]:
        """sum_v p(v) log(p(v) / q(v)), in nats."""
        logs = self.logits.log_softmax(-1), reference.logits.log_softmax(-1)
        return (self.logits.softmax(-1) * (logs[0] - logs[1])).sum(-1)


def as_float64(x: Any) -> Tensor:
    """Numbers as float64 on the CPU, wherever they were."""
    return torch.as_tensor(x).detach().cpu().double()


def gap(stored: Any, found: Any, mask: Tensor | None = None) -> float:
    """The largest difference where the mask is True: 0 for none, nan for other shapes."""
    stored, found = as_float64(stored), as_float64(found)
    if stored.shape != found.shape:
        return math.nan
    difference = (stored - found).abs()
    if mask is not None:
        difference = difference[mask.cpu()]
    return difference.max().item() if difference.numel() else 0.0


def relative_gap(stored: Any, found: Any, mask: Tensor | None = None, least: float = 1.0) -> float:
    """`gap`, as a share of the largest number that was found, or of `least` if that is less."""
    size = as_float64(found).abs()
    if mask is not None and size.shape == mask.shape:
        size = size[mask.cpu()]
    largest = size.max().item() if size.numel() else 0.0
    return gap(stored, found, mask) / max(least, largest)


def as_rows_say(seen: Observation) -> bool:
    """Whether a row that is run alone says what it said in its batch: no hook is on the models."""
    critic = getattr(seen.ctx.policy, "critic", None)
    hooked = has_hooks(seen.ctx.policy) or has_hooks(seen.ctx.reference)
    return not hooked and (critic is None or not has_hooks(critic))


def rounding(seen: Observation) -> float:
    """By how much a log-probability of another path may miss, in nats."""
    whole = 1e-4 if seen.args.rounding == "fp32" else LOGPROB_ROUNDING[seen.args.rounding]
    return seen.allowed(whole, half=LOGPROB_ROUNDING["bf16"])


def value_rounding(seen: Observation) -> float:
    """By how much a value of another path may miss, as a share of the largest."""
    return seen.allowed(1e-4 if seen.args.rounding == "fp32" else 0.05, half=0.05)


def states_anew(
    model: TransformerWithValueHead | HookedModel,
    texts: Rows,
    gen_len: int,
    temperature: float,
    rows: int = ROWS_ANEW,
) -> States:
    """Run some rows through the modules, each alone and without its padding.

    Args:
        texts: samples or a minibatch, with `tokens` and `attention_mask`.
        rows: so many from the first on.
    """
    logits, values = [], []
    for tokens, real in zip(texts.tokens[:rows], texts.attention_mask[:rows], strict=True):
        alone = tokens[real][None]
        if isinstance(model, HookedModel):
            out, value = model(alone, attention_mask=torch.ones_like(alone)), None
        else:
            out, value = model(alone)
        logits.append(as_float64(out)[0, -gen_len - 1 : -1] / temperature)
        if value is not None:
            values.append(as_float64(value)[0, -gen_len - 1 : -1])
    return States(torch.stack(logits), torch.stack(values) if values else None)


def rollout_anew(seen: Observation) -> tuple[States, States]:
    """Rerun policy and reference on the first rows of the phase."""
    samples, gen_len = seen.ctx.rollout.samples, seen.ctx.rollout.kl.shape[1]
    policy, reference = (
        states_anew(model, samples, gen_len, seen.args.temperature)
        for model in (seen.ctx.policy, seen.ctx.reference)
    )
    return policy, reference


def misspelt(
    tokenizer: PreTrainedTokenizerBase,
    spelled: Sequence[Sequence[str]],
    tokens: Int[Tensor, "rows seq"],
) -> int:
    """How many rows of spelled tokens are not the text of their token ids, or not as many."""
    return sum(
        len(parts) != len(ids) or _differs(tokenizer, parts, ids)
        for parts, ids in zip(spelled, tokens.tolist(), strict=True)
    ) + abs(len(spelled) - len(tokens))


def _differs(tokenizer: PreTrainedTokenizerBase, parts: Sequence[str], ids: Sequence[int]) -> bool:
    """Whether parts do not add up to a text, where the text grows from token to token.

    It does not where an id changes what stood before it: half a character, a blank cleaned up.
    """
    texts = [tokenizer.decode(ids[:end], skip_special_tokens=False) for end in range(len(ids) + 1)]
    grows = all(later.startswith(text) for text, later in zip(texts, texts[1:], strict=False))
    return grows and "".join(parts) != texts[-1]


def off_mask(columns: dict[str, Tensor], mask: Bool[Tensor, "rows gen"]) -> float:
    """The largest number that stands where the mask is False."""
    outside = [column[~mask].abs().max().item() for column in columns.values() if (~mask).any()]
    return max(outside, default=0.0)


def component_names(model: HookedModel) -> list[str]:
    """The components in the order in which they are added to the residual stream."""
    names = ["embed"] + ["pos_embed"] * ("hook_pos_embed" in model.hook_dict)
    for layer in range(model.cfg.n_layers):
        names += [f"L{layer}H{head}" for head in range(model.cfg.n_heads)]
        names += [f"L{layer} b_O", f"L{layer} mlp"]
    return names
