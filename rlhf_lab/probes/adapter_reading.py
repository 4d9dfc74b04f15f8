"""AdapterReading: what each rank-1 piece of a LoRA adapter reads, writes and earns."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.diffing.adapter import (
    AdapterPieces,
    adapter_pieces,
    reading_side,
    upstream_writers,
    words_read,
    words_written,
    writing_side,
)
from rlhf_lab.diffing.transplant import Writer, prompt_ids
from rlhf_lab.diffing.weights import as_matrix, from_matrix
from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import bootstrap_means
from rlhf_lab.models import adapters_off, effective_weights, lora_layers
from rlhf_lab.models.device import exact
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.probes.own_writing import (
    refuse_hooks,
    refuse_own_parts,
    resolve_true_reward,
    run_prompts,
    run_sampling,
)
from rlhf_lab.probes.probe import (
    RESAMPLES,
    Check,
    Observation,
    Probe,
    Record,
    decimals,
    interval_fields,
)
from rlhf_lab.training import RLHFTrainer

Adapters = dict[str, AdapterPieces]


class AdapterReading(Probe):
    """The rank-1 pieces of each LoRA adapter: how strong, what they read, what they write.

    The pieces are those of the singular value decomposition of the change that the adapter makes
    to the frozen weight. What a piece reads is named by the words whose embeddings it is nearest
    to and the earlier part that writes most along it; what it writes, by the words whose logits it
    raises or lowers most. All of it is of weights alone: a piece that reads a word does something
    only where that word stands.

    With `removed`, the policy also samples without each of the strongest pieces, always with the
    same noise. The record then has the reward (on Reel the true reward, else the reward of the run)
    and the fraction of samples that change. This takes `removed + 1` times `n` samples.

    Checks: pieces sum to the effective weight minus the frozen weight; they are orthonormal.

    Args:
        words: how many words are named for each side of a piece.
        removed: how many pieces, the strongest of all adapters, the policy writes without.
        n: samples of each.

    Raises:
        ConfigError: numbers out of range; when it is attached, a model without adapters.
    """

    name = "adapter_reading"
    every = 20

    def __init__(
        self,
        words: int = 5,
        removed: int = 0,
        n: int = 96,
        every: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(every, name)
        for field, value, least in (("words", words, 1), ("removed", removed, 0), ("n", n, 2)):
            if value < least:
                raise ConfigError(f"{field}={value} of {self.name} must be at least {least}.")
        self.words, self.removed, self.n = words, removed, n

    def check_model(self, model: HookedModel) -> None:
        """Raise ConfigError for a model without adapters."""
        if not lora_layers(model):
            raise ConfigError(
                f"{self.name} reads LoRA adapters, and the model has none; train with lora_rank= "
                "above 0, or look at all weights with WeightDelta."
            )

    def check_run(self, trainer: RLHFTrainer) -> None:
        """Raise ConfigError where samples are asked for that the settings alone cannot pay."""
        if self.removed:
            refuse_own_parts(trainer, self.name, "leave out removed=, which samples")

    @torch.no_grad()
    def observe(self, seen: Observation) -> Record:
        """Decompose every adapter, name its pieces' sides, and write without some if asked to."""
        model = seen.ctx.policy.base_model
        adapters = {name: adapter_pieces(each) for name, each in lora_layers(model).items()}
        pieces = [
            self._described(model, name, found, index)
            for name, found in adapters.items()
            for index in range(len(found.s))
        ]
        tensors = {}
        for name, found in adapters.items():
            for field, x in zip(found._fields, found, strict=True):
                tensors[f"{name}.{field}"] = x.cpu().float()
        values: dict[str, Any] = {"pieces": pieces}
        if self.removed:
            written = self._written(seen, adapters, pieces)
            values, tensors = values | written.values, tensors | written.tensors
        return Record(values, tensors, _checks(seen, model, adapters))

    def _described(
        self, model: HookedModel, weight: str, found: AdapterPieces, index: int
    ) -> dict[str, Any]:
        """One row: strength, and both sides in words; no words for a piece of no strength."""
        energy = found.s.square().sum().item()
        row = {"weight": weight, "piece": index, "s": found.s[index].item(), "share": None}
        row |= {"reads": None, "reads_words": [], "reads_cos": [], "upstream": None}
        row |= {"upstream_times": None, "writes": None, "writes_words": [], "writes_cos": []}
        if not energy:
            return row
        reads = reading_side(model, weight, found.reads[index])
        writes = writing_side(model, weight, found.writes[index])
        row |= {"share": row["s"] ** 2 / energy, "reads": reads.name, "writes": writes.name}
        if reads.direction is not None:
            row |= self._words("reads", model, words_read(model, reads.direction))
            writers = upstream_writers(model, weight, reads.direction)
            most = max(writers, key=writers.get)
            row |= {"upstream": most, "upstream_times": writers[most]}
        if writes.direction is not None:
            row |= self._words("writes", model, words_written(model, writes.direction))
        return row

    def _words(
        self, side: str, model: HookedModel, cosines: Float[Tensor, " d_vocab"]
    ) -> dict[str, Any]:
        """The words of the largest cosines, whatever their sign."""
        ids = cosines.abs().topk(min(self.words, len(cosines))).indices
        words = [model.tokenizer.decode([token]) for token in ids.tolist()]
        return {f"{side}_words": words, f"{side}_cos": decimals(cosines[ids])}

    def _written(
        self, seen: Observation, adapters: Adapters, pieces: list[dict[str, Any]]
    ) -> Record:
        """What the policy writes and earns, whole and without each of the strongest pieces."""
        refuse_hooks(seen, "copies without a piece")
        model, reward = seen.ctx.policy.base_model, resolve_true_reward(seen)
        weights = effective_weights(model)
        prompts = prompt_ids(model, run_prompts(seen), self.n)
        writer = Writer(model, prompts, run_sampling(seen), seen.args.seed)
        order = sorted(range(len(pieces)), key=lambda i: -pieces[i]["s"])[: self.removed]
        rewards, texts = [], []
        for row in [None, *order]:
            changed = weights
            if row is not None:
                name, index = pieces[row]["weight"], pieces[row]["piece"]
                left = without_piece(name, weights[name], adapters[name], index)
                changed = weights | {name: left}
            texts.append(writer.write(changed).texts(writer.tokenizer))
            rewards.append(reward(texts[-1]).detach().cpu().float())
        found = torch.stack(rewards)
        turned = torch.tensor(
            [[a != b for a, b in zip(texts[0], each, strict=True)] for each in texts[1:]]
        )
        earned = bootstrap_means((found[0] - found[1:]).T, resamples=RESAMPLES)
        values = {"removed": order, "n": self.n, "reward": found[0].mean().item()}
        values |= {"earned": decimals(earned.value)} | interval_fields("earned", earned, 6)
        values |= {"turned": decimals(turned.double().mean(1))}
        return Record(values, {"rewards": found, "turned": turned})


def without_piece(
    name: str, weight: Float[Tensor, "*shape"], pieces: AdapterPieces, index: int
) -> Float[Tensor, "*shape"]:
    """A weight without one piece of its adapter."""
    left = exact(as_matrix(name, weight)) - pieces.piece(index)
    return from_matrix(name, left, weight).to(weight)


def _checks(seen: Observation, model: HookedModel, adapters: Adapters) -> list[Check]:
    """Pieces sum to the change that the modules have, and are orthonormal."""
    after = effective_weights(model)
    with adapters_off(model):
        before = effective_weights(model)
    missed, askew = 0.0, 0.0
    for name, found in adapters.items():
        delta = exact(as_matrix(name, after[name])) - exact(as_matrix(name, before[name]))
        size = max(1.0, before[name].abs().max().item())
        missed = max(missed, (found.summed() - delta).abs().max().item() / size)
        for side in (found.reads, found.writes):
            identity = torch.eye(len(side), dtype=side.dtype, device=side.device)
            askew = max(askew, (side @ side.T - identity).abs().max().item())
    allowed = seen.allowed(1e-6, half=0.02)
    return [
        Check.at_most("pieces sum to the effective weight less the frozen one", missed, allowed),
        Check.at_most("pieces are orthonormal on both sides", askew, 1e-9),
    ]
