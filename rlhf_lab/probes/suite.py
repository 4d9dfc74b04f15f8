"""Suite: probes of one run, with their eval text and schedule."""

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.padding import pad_rows
from rlhf_lab.probes.attachment import Attachment
from rlhf_lab.probes.eval_text import EvalText, validate_eval_text
from rlhf_lab.probes.probe import Probe
from rlhf_lab.sampling import tokenize_prompts
from rlhf_lab.training import RLHFTrainer


class Suite:
    """Probes that observe one run together.

    Args:
        probes: probes with different names, also as one list.
        eval_tokens: sequences with BOS that probes of eval text read at every phase.
        eval_text: texts of any lengths, instead of `eval_tokens`.
        eval_mask: False where `eval_tokens` are padded, on either side.
        keep_eval_text: True to store the eval text in the run's directory.
        labels: class of each eval sequence.
        record: phases to record: "milestones" (0, 1, 2, 3, 5, 8, ...), "every", or a list; the end
            is always recorded. A probe's own `every` goes first.

    Raises:
        ConfigError: If two probes have one name, or an argument is invalid.
    """

    def __init__(
        self,
        *probes: Probe | Sequence[Probe],
        eval_tokens: Int[Tensor, "batch seq"] | None = None,
        eval_text: Sequence[str] | None = None,
        eval_mask: Bool[Tensor, "batch seq"] | None = None,
        keep_eval_text: bool = False,
        labels: Bool[Tensor, " batch"] | None = None,
        record: Literal["milestones", "every"] | Sequence[int] = "milestones",
    ) -> None:
        if len(probes) == 1 and isinstance(probes[0], list | tuple):
            probes = tuple(probes[0])
        for probe in probes:
            if not isinstance(probe, Probe):
                raise ConfigError(f"{probe!r:.80} is not a probe. Pass probes such as RunHealth().")
        names = [probe.name for probe in probes]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"Two probes are named {name!r}. Set name= of one of them.")
        if eval_tokens is not None and eval_text is not None:
            raise ConfigError("eval_tokens and eval_text cannot be combined. Pass one of them.")
        if eval_mask is not None and eval_tokens is None:
            raise ConfigError("eval_mask requires eval_tokens. Pass both.")
        self.probes = list(probes)
        self.eval_tokens, self.eval_text, self.labels = eval_tokens, eval_text, labels
        self.eval_mask, self.keep_eval_text = eval_mask, keep_eval_text
        is_list = isinstance(record, list | tuple)
        is_phases = is_list and all(type(x) is int and x >= 0 for x in record)
        if record not in ("milestones", "every") and not is_phases:
            raise ConfigError(
                f"record must be 'milestones', 'every' or a list of phases, got {record!r}."
            )
        self.record = record if isinstance(record, str) else sorted(set(record))

    def attach(self, trainer: RLHFTrainer) -> Attachment:
        """Register the probes on a trainer's events.

        Raises:
            ConfigError: If it is not a trainer, a site is not in the model, eval text or labels do
                not fit, or a probe of the same name is attached.
        """
        if not isinstance(trainer, RLHFTrainer):
            kind = type(trainer).__name__
            raise ConfigError(f"{kind} is not a trainer. Pass RLHFTrainer(args) first.")
        if trainer.phase >= (phases := trainer.args.total_phases):
            warnings.warn(f"All {phases} phases are done. Attach before training.", stacklevel=3)
        if isinstance(self.record, list) and max(self.record, default=0) > phases:
            warnings.warn(f"record has phases after {phases}, the last.", stacklevel=3)
        attachment = Attachment(self.probes, self._read_eval_text(trainer), self.record, trainer)
        if trainer.args.log_probes:
            from rlhf_lab.views.probe_logger import ProbeLogger  # views come after probes

            ProbeLogger(trainer.sinks, list(attachment.probes)).attach(trainer)
        return attachment

    def _read_eval_text(self, trainer: RLHFTrainer) -> EvalText | None:
        tokens, mask = self.eval_tokens, self.eval_mask
        if self.eval_text is not None:
            rows = tokenize_prompts(trainer.tokenizer, self.eval_text, trainer.args.prepend_bos)
            if not rows or not all(rows):
                raise ConfigError("eval_text has an empty text or none. Pass texts with words.")
            tokens, mask = pad_rows(rows, torch.device("cpu"))
        for probe in self.probes:
            if tokens is None and probe.text == "eval":
                raise ConfigError(f"{probe.name} requires eval text. Pass eval_text=[...].")
            if tokens is not None and probe.needs_labels and self.labels is None:
                problem = "requires a label per sequence. Pass labels= to Suite"
                raise ConfigError(f"{probe.name} {problem}.")
        if tokens is None:
            return None
        cfg = trainer.policy.base_model.cfg
        if mask is None and isinstance(tokens, torch.Tensor):
            mask = torch.ones_like(tokens, dtype=torch.bool)
        validate_eval_text(tokens, mask, self.labels, cfg.n_ctx, cfg.d_vocab)
        tokens, mask = tokens.to(trainer.device), mask.to(trainer.device)
        text = EvalText.of(tokens, mask, self.labels, self.keep_eval_text)
        shortest = int(text.lengths.min())
        for probe in self.probes:
            pos = probe.pos if probe.text == "eval" and probe.pos is not None else 0
            if not -shortest <= pos < shortest:
                raise ConfigError(
                    f"pos={pos} of {probe.name} is outside the shortest eval text of {shortest} "
                    f"tokens. Choose from {-shortest} to {shortest - 1}."
                )
        return text


def attach(
    trainer: RLHFTrainer, *probes: Suite | Probe | Sequence[Probe], **options: Any
) -> Attachment:
    """Attach a suite, or probes as a suite with these options, to a trainer.

    Raises:
        ConfigError: If `Suite` or `Suite.attach` raises it, or options are combined with a suite.
    """
    if not probes:
        raise ConfigError("There is no probe. Pass probes, or call attach_default_suite.")
    if len(probes) == 1 and isinstance(probes[0], Suite):
        if options:
            raise ConfigError(f"{next(iter(options))} belongs to the suite. Pass it to Suite(...).")
        return probes[0].attach(trainer)
    return Suite(*probes, **options).attach(trainer)
