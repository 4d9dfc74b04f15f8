"""Eval text: the sequences, of any lengths, that probes read at every phase, and their source."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.padding import pad_rows, rotate_padding
from rlhf_lab.sampling import sample
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.random_streams import phase_generator

MOST_TEXTS, FEWEST_TEXTS = 32, 8
MOST_TOKENS = 2048
LONGEST_SAMPLED = 24  # tokens sampled after a prompt


@dataclass(frozen=True)
class EvalText:
    """The same sequences at every phase; activations on them have their shape.

    Args:
        tokens: padded on the right, so that a column is a place in each text, counted from its own
            first token.
        attention_mask: False on padding.
        labels: a class per sequence, for probes that need one.
        kept: whether it is stored with the run, since it cannot be made again later.
    """

    tokens: Int[Tensor, "batch seq"]
    attention_mask: Bool[Tensor, "batch seq"]
    labels: Bool[Tensor, " batch"] | None = None
    kept: bool = False

    @classmethod
    def of(
        cls,
        tokens: Int[Tensor, "batch seq"],
        attention_mask: Bool[Tensor, "batch seq"],
        labels: Bool[Tensor, " batch"] | None = None,
        kept: bool = False,
    ) -> "EvalText":
        """Sequences that are padded on either side, or not at all."""
        turned = rotate_padding(tokens, attention_mask, "right")
        return cls(turned, rotate_padding(attention_mask, attention_mask, "right"), labels, kept)

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """Tokens of each sequence."""
        return self.attention_mask.sum(1)

    def columns(self, pos: int) -> Int[Tensor, " batch"]:
        """Index of position `pos` in each sequence; a negative one counts from its end."""
        return pos + self.lengths if pos < 0 else torch.full_like(self.lengths, pos)

    def first(self, n: int) -> "EvalText":
        """The first n sequences."""
        labels = None if self.labels is None else self.labels[:n]
        tokens, mask = self.tokens[:n], self.attention_mask[:n]
        return replace(self, tokens=tokens, attention_mask=mask, labels=labels)

    def common(self) -> "EvalText":
        """The sequences as far as all of them go."""
        shortest = int(self.lengths.min())
        mask = self.attention_mask[:, :shortest]
        return replace(self, tokens=self.tokens[:, :shortest], attention_mask=mask)


def gather_columns(x: Tensor, columns: Int[Tensor, " batch"]) -> Shaped[Tensor, "batch ..."]:
    """Return the entries of `[batch seq ...]` at one column of each row."""
    return x[torch.arange(len(x), device=x.device), columns.to(x.device)]


def validate_eval_text(tokens: Any, mask: Any, labels: Any, n_ctx: int, d_vocab: int) -> None:
    """Raise ConfigError for eval text on which probes would fail during the run."""
    is_table = isinstance(tokens, Tensor) and tokens.ndim == 2 and not tokens.is_floating_point()
    low, high = map(int, tokens.aminmax()) if is_table and tokens.numel() else (-1, -1)
    if not 0 <= low <= high < d_vocab or tokens.shape[1] > n_ctx:
        kind = getattr(tokens, "dtype", type(tokens).__name__)
        what = f"{list(tokens.shape)}, ids from {low} to {high}" if is_table else kind
        raise ConfigError(
            f"eval_tokens ({what}) do not fit the model. Pass a non-empty [batch seq] tensor of "
            f"ids below {d_vocab} with at most {n_ctx} columns."
        )
    is_labels = isinstance(labels, Tensor) and labels.shape == tokens.shape[:1]
    if labels is not None and not is_labels:
        raise ConfigError(f"labels must be a tensor of shape [{len(tokens)}], one per text.")
    is_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == tokens.shape
    if not is_mask or (pad(mask, (1, 1)).int().diff(dim=1).abs().sum(1) != 2).any():
        raise ConfigError(
            f"eval_mask must be a boolean tensor of shape {list(tokens.shape)} that is True on one "
            "stretch of each sequence. Mask padding at the ends only."
        )


def text_of_the_run(
    trainer: RLHFTrainer, most: int = MOST_TEXTS
) -> tuple[Int[Tensor, "batch seq"], Bool[Tensor, "batch seq"]]:
    """Return up to `most` eval sequences of a run and their mask, the same for the same seed.

    Some of the run's prompts if it has several, otherwise responses of its first reference.
    """
    generator = phase_generator(trainer.args.seed, 0, "eval_text")
    prompts = [list(each) for each in dict.fromkeys(map(tuple, trainer.prompts.tokens))]
    order = torch.randperm(len(prompts), generator=generator).tolist()
    rows = [prompts[i] for i in order]
    if len(rows) < FEWEST_TEXTS:
        rows = _continued(trainer, rows, generator, most)
    return pad_rows(_within_budget(rows[:most]), trainer.device, side="right")


def _within_budget(rows: list[list[int]]) -> list[list[int]]:
    width, kept = 0, []
    for row in rows:
        width = max(width, len(row))
        if len(kept) >= FEWEST_TEXTS and width * (len(kept) + 1) > MOST_TOKENS:
            break
        kept.append(row)
    return kept


def _continued(
    trainer: RLHFTrainer, prompts: Sequence[list[int]], generator: torch.Generator, most: int
) -> list[list[int]]:
    spec = replace(
        trainer.sampling_spec, gen_len=min(trainer.sampling_spec.gen_len, LONGEST_SAMPLED)
    )
    prefixes = [prompts[i % len(prompts)] for i in range(most)]
    cuts = torch.randint(1, spec.gen_len + 1, (len(prefixes),), generator=generator)
    samples = sample(TransformerWithValueHead(trainer.first_reference), prefixes, spec, generator)
    written = samples.tokens[:, samples.prefix_len :].cpu()
    lengths = samples.mask.sum(1).cpu().minimum(cuts)
    return [
        [*prompt, *row[: int(length)].tolist()]
        for prompt, row, length in zip(prefixes, written, lengths, strict=True)
    ]
