"""A suite of probes: which probes look at a run together, and on which eval text."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from rlhf_lab.config.checks import POSITIVE, check_range
from rlhf_lab.errors import ConfigError
from rlhf_lab.models.padding import pad_rows
from rlhf_lab.probes.attachment import Attachment
from rlhf_lab.probes.eval_text import EvalText, refuse_wrong_mask
from rlhf_lab.probes.probe import Probe
from rlhf_lab.sampling import tokenize_prompts
from rlhf_lab.training import RLHFTrainer

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Suite:
    """Probes that look at one run together.

    Args:
        probes: with names of their own; also as one list.
        eval_tokens: the same sequences at every phase, BOS included, for probes that want them.
        eval_text: texts of any lengths, instead of `eval_tokens`.
        eval_mask: False where `eval_tokens` are padded, on either side.
        keep_eval_text: store the eval text in the run's directory.
        labels: a class per eval sequence.
        max_mb: the most that the records may take on disk; a probe whose record exceeds it is
            switched off with a warning, which is stored too.

    Raises:
        ConfigError: something that is no probe, two probes of one name, or both kinds of eval
            text.
    """

    def __init__(
        self,
        *probes: Probe | Sequence[Probe],
        eval_tokens: Int[Tensor, "batch seq"] | None = None,
        eval_text: Sequence[str] | None = None,
        eval_mask: Bool[Tensor, "batch seq"] | None = None,
        keep_eval_text: bool = False,
        labels: Bool[Tensor, " batch"] | None = None,
        max_mb: float | int = 64,
    ) -> None:
        if len(probes) == 1 and isinstance(probes[0], list | tuple):
            probes = tuple(probes[0])
        for given in probes:
            if not isinstance(given, Probe):
                raise ConfigError(
                    f"probes has {given!r:.80}; give probes, such as RunHealth(), or one Suite."
                )
        names = [probe.name for probe in probes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"two probes are named {twice[0]!r}; give one of them name=.")
        if eval_tokens is not None and eval_text is not None:
            raise ConfigError("eval_tokens and eval_text are both given; give one of them.")
        if eval_mask is not None and eval_tokens is None:
            raise ConfigError("eval_mask is given without eval_tokens; give both, or neither.")
        self.probes = list(probes)
        self.eval_tokens, self.eval_text, self.labels = eval_tokens, eval_text, labels
        self.eval_mask, self.keep_eval_text = eval_mask, keep_eval_text
        check_range(POSITIVE, max_mb=max_mb)
        self.max_mb = max_mb

    def attach(self, trainer: RLHFTrainer) -> Attachment:
        """Look at this trainer's run from now on.

        Raises:
            ConfigError: a site that the model does not have, eval text or labels that do not fit,
                or a probe of a name that records already.
        """
        attachment = Attachment(self.probes, self._read_eval_text(trainer), self.max_mb, trainer)
        if trainer.args.log_probes:
            from rlhf_lab.views.probe_logger import ProbeLogger  # views come after probes

            ProbeLogger(trainer.sinks, list(attachment.probes)).attach(trainer)
        return attachment

    def _read_eval_text(self, trainer: RLHFTrainer) -> EvalText | None:
        tokens, mask = self.eval_tokens, self.eval_mask
        if self.eval_text is not None:
            tokens, mask = _padded_eval_text(trainer, self.eval_text)
        if tokens is None:
            needing = [probe.name for probe in self.probes if probe.text == "eval"]
            if needing:
                raise ConfigError(f"{needing[0]} looks at eval text; give the suite eval_tokens=.")
            return None
        unlabelled = [p.name for p in self.probes if p.needs_labels and self.labels is None]
        if unlabelled:
            raise ConfigError(
                f"{unlabelled[0]} needs a label per sequence; give the suite labels=."
            )
        cfg = trainer.policy.base_model.cfg
        _check_eval_text(tokens, self.labels, cfg.n_ctx, cfg.d_vocab)
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        refuse_wrong_mask(mask, tokens)
        text = EvalText.of(*_on(trainer.device, tokens, mask), self.labels, self.keep_eval_text)
        shortest = int(text.lengths.min())
        for probe in self.probes:
            asked = probe.pos if probe.text == "eval" and probe.pos is not None else 0
            if not -shortest <= asked < shortest:
                raise ConfigError(
                    f"{probe.name} looks at pos={asked}, which is outside the shortest eval text, "
                    f"of {shortest} tokens; choose from {-shortest} to {shortest - 1}."
                )
        return text


SUITE_OPTIONS = frozenset(inspect.signature(Suite).parameters) - {"probes"}


def attach(
    trainer: RLHFTrainer, *probes: Suite | Probe | Sequence[Probe], **options: Any
) -> Attachment:
    """Attach a suite, or some probes as a suite with these options, to a trainer.

    Raises:
        ConfigError: what `Suite` and `Suite.attach` refuse, an option that `Suite` does not have,
            or options beside a whole suite.
    """
    for option in options.keys() - SUITE_OPTIONS:
        near = [known for known in SUITE_OPTIONS if option in known] or sorted(SUITE_OPTIONS)
        raise ConfigError(f"Unknown option {option!r} of a suite. Use {' or '.join(near)}.")
    if len(probes) == 1 and isinstance(probes[0], Suite):
        if options:
            raise ConfigError(f"{next(iter(options))} belongs to the suite. Pass it to Suite(...).")
        return probes[0].attach(trainer)
    return Suite(*probes, **options).attach(trainer)


def tokenize_eval_text(trainer: RLHFTrainer, texts: Sequence[str]) -> Int[Tensor, "batch seq"]:
    """Token ids of texts of one length, with BOS in front when the run puts it there."""
    rows = tokenize_prompts(trainer.tokenizer, texts, trainer.args.prepend_bos)
    lengths = sorted({len(row) for row in rows})
    if len(lengths) != 1 or lengths[0] == 0:
        raise ConfigError(
            f"eval_text has texts of {lengths} tokens; give at least one text, all of one length, "
            "or eval_tokens."
        )
    return torch.tensor(rows)


def _padded_eval_text(
    trainer: RLHFTrainer, texts: Sequence[str]
) -> tuple[Int[Tensor, "batch seq"], Bool[Tensor, "batch seq"]]:
    """Token ids of texts of any lengths, padded on the right, and the mask of real tokens."""
    rows = tokenize_prompts(trainer.tokenizer, texts, trainer.args.prepend_bos)
    if not rows or not all(rows):
        raise ConfigError("eval_text has no text, or one without tokens; give texts with words.")
    return pad_rows(rows, torch.device("cpu"))


def _on(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.to(device) for x in tensors)


def _check_eval_text(tokens: Any, labels: Any, n_ctx: int, d_vocab: int) -> None:
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.dtype not in INTEGERS:
        given = type(tokens).__name__
        if isinstance(tokens, Tensor):
            given = f"tensor of shape {list(tokens.shape)} and {tokens.dtype}"
        raise ConfigError(f"eval_tokens is a {given}; give a [batch seq] tensor of token ids.")
    if not tokens.numel():
        raise ConfigError(f"eval_tokens of shape {list(tokens.shape)} is empty; give a sequence.")
    if tokens.shape[1] > n_ctx:
        raise ConfigError(
            f"eval_tokens has {tokens.shape[1]} columns; the model's context ends at {n_ctx}."
        )
    low, high = (int(end) for end in tokens.aminmax())
    if low < 0 or high >= d_vocab:
        wrong = low if low < 0 else high
        raise ConfigError(
            f"eval_tokens has the id {wrong}; the model's vocabulary has 0 to {d_vocab - 1}, so "
            "give ids of its own tokenizer."
        )
    if labels is not None and (not isinstance(labels, Tensor) or labels.shape != tokens.shape[:1]):
        kind = type(labels).__name__
        given = f"of shape {list(labels.shape)}" if isinstance(labels, Tensor) else f"a {kind}"
        raise ConfigError(
            f"labels is {given}, but the eval text has {len(tokens)} sequences; give a tensor with "
            "one label for each."
        )
