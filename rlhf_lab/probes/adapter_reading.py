"""AdapterReading: rank-1 pieces of LoRA adapters, what each reads and writes, and its reward."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rlhf_lab.diffing.steering import Vector
from rlhf_lab.diffing.transplant import Writer, prompt_ids
from rlhf_lab.diffing.weights import as_matrix, from_matrix
from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import bootstrap_means
from rlhf_lab.models import LoRALinear, adapters_off, effective_weights, lora_layers
from rlhf_lab.models.device import exact
from rlhf_lab.models.hooked_model import HookedModel, is_centered
from rlhf_lab.models.peft_format import flat_factors
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

PieceSide = tuple[str, Vector | None]  # such as "values of L0H1", and its residual direction


class AdapterPieces(NamedTuple):
    """Rank-1 pieces of a change of a weight, strongest first: s_i read_i' write_i.

    Args:
        reads: unit vectors of the inputs, heads side by side.
        writes: unit vectors of the outputs.
    """

    s: Float[Tensor, " piece"]
    reads: Float[Tensor, "piece rows"]
    writes: Float[Tensor, "piece cols"]


Adapters = dict[str, AdapterPieces]


class AdapterReading(Probe):
    """The rank-1 pieces of each LoRA adapter: strength, what they read, what they write.

    The pieces are the singular value decomposition of the change that an adapter makes to the
    frozen weight. The input of a piece is named by the words of the nearest embeddings and by the
    earlier component that writes most along it; the output by the words whose logits it changes
    most. This reads weights only: a piece that reads a word matters only at that word.

    With `removed`, the policy also samples without each of the strongest pieces, with the same
    noise. The record then has the reward (on Reel the true reward, else the reward of the run) and
    the fraction of samples that change.

    Checks: pieces sum to the effective weight minus the frozen weight; they are orthonormal.

    Args:
        words: number of words on each side of a piece.
        removed: number of the strongest pieces to sample without.
        n: samples of each.

    Raises:
        ConfigError: If a number is out of range or, when attached, the model has no adapters.
    """

    name = "adapter_reading"
    question = "What do the rank-1 pieces of each adapter read and write?"
    caveat = "Pieces are read from weights: one that reads a word matters only at that word."
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
        if not lora_layers(model):
            raise ConfigError(
                f"{self.name} reads LoRA adapters, and the model has none; train with lora_rank= "
                "above 0, or look at all weights with WeightDelta."
            )

    def check_run(self, trainer: RLHFTrainer) -> None:
        if self.removed:
            refuse_own_parts(trainer, self.name, "leave out removed=, which samples")

    @torch.no_grad()
    def observe(self, seen: Observation) -> Record:
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
        energy = found.s.square().sum().item()
        row = {"weight": weight, "piece": index, "s": found.s[index].item(), "share": None}
        row |= {"reads": None, "reads_words": [], "reads_cos": [], "upstream": None}
        row |= {"upstream_times": None, "writes": None, "writes_words": [], "writes_cos": []}
        if not energy:
            return row
        row["share"] = row["s"] ** 2 / energy
        row["reads"], reads = reading_side(model, weight, found.reads[index])
        row["writes"], writes = writing_side(model, weight, found.writes[index])
        if reads is not None:
            row |= self._words("reads", model, exact(model.embed.W_E), reads)
            writers = upstream_writers(model, weight, reads)
            row["upstream"] = max(writers, key=writers.get)
            row["upstream_times"] = writers[row["upstream"]]
        if writes is not None:
            writes = _before_norm(model.ln_final, writes)
            row |= self._words("writes", model, exact(model.unembed.W_U).T, writes)
        return row

    def _words(self, side: str, model: HookedModel, table: Tensor, direction: Vector) -> dict:
        apart = table - table.mean(0)
        size = apart.norm(dim=1) * direction.norm()
        cosines = apart @ direction / size.clamp(min=1e-30)
        ids = cosines.abs().topk(min(self.words, len(cosines))).indices
        words = [model.tokenizer.decode([token]) for token in ids.tolist()]
        return {f"{side}_words": words, f"{side}_cos": decimals(cosines[ids])}

    def _written(self, seen: Observation, adapters: Adapters, pieces: list[dict]) -> Record:
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
    """Return a weight without one piece of its adapter."""
    piece = pieces.s[index] * torch.outer(pieces.reads[index], pieces.writes[index])
    return from_matrix(name, exact(as_matrix(name, weight)) - piece, weight).to(weight)


def _checks(seen: Observation, model: HookedModel, adapters: Adapters) -> list[Check]:
    after = effective_weights(model)
    with adapters_off(model):
        before = effective_weights(model)
    error, askew = 0.0, 0.0
    for name, found in adapters.items():
        delta = exact(as_matrix(name, after[name])) - exact(as_matrix(name, before[name]))
        size = max(1.0, before[name].abs().max().item())
        whole = (found.reads.T * found.s) @ found.writes
        error = max(error, (whole - delta).abs().max().item() / size)
        for side in (found.reads, found.writes):
            identity = torch.eye(len(side), dtype=side.dtype, device=side.device)
            askew = max(askew, (side @ side.T - identity).abs().max().item())
    allowed = seen.allowed(1e-6, half=0.02)
    return [
        Check.at_most("pieces sum to the effective weight minus the frozen weight", error, allowed),
        Check.at_most("pieces are orthonormal on both sides", askew, 1e-9),
    ]


@torch.no_grad()
def adapter_pieces(adapter: LoRALinear) -> AdapterPieces:
    """Decompose the change of an adapter by singular values, in float64.

    1. Factor A = Q_A R_A and B' = Q_B R_B, and decompose (alpha / rank) R_A R_B'.
    2. Choose signs such that the largest entry of each written vector is positive.

    Columns of A and rows of B are not unique (B R and R^-1 A are the same adapter); pieces are.
    """
    A, B, scale = flat_factors(adapter)
    (q_a, r_a), (q_b, r_b) = (torch.linalg.qr(exact(x)) for x in (A, B.T))
    u, s, vh = torch.linalg.svd(scale * r_a @ r_b.T, full_matrices=False)
    reads, writes = (q_a @ u).T, vh @ q_b.T
    sign = writes.gather(1, writes.abs().argmax(1, keepdim=True)).sign()
    return AdapterPieces(s, reads * sign, writes * sign)


def reading_side(model: HookedModel, weight: str, read: Float[Tensor, " rows"]) -> PieceSide:
    """Return the input of a piece, as a direction of the residual stream before the norm.

    For W_O it is the strongest head, through its W_V; for W_out the strongest neuron.
    """
    _, layer, _, kind = weight.replace("._", ".").split(".")  # blocks.0.attn._W_K
    block = model.blocks[int(layer)]
    if kind == "W_out":
        return f"neuron {int(read.abs().argmax())}", None
    if kind == "W_O":
        by_head = read.reshape(model.cfg.n_heads, -1)
        head = int(by_head.norm(dim=1).argmax())
        through = exact(block.attn.W_V[head]) @ by_head[head]
        return f"values of L{layer}H{head}", _before_norm(block.ln1, through)
    norm = block.ln2 if kind in ("W_in", "W_gate") else block.ln1
    return "residual", _before_norm(norm, read)


def writing_side(model: HookedModel, weight: str, write: Float[Tensor, " cols"]) -> PieceSide:
    """Return the output of a piece, as a direction of the residual stream.

    For W_V it is the strongest head, through its W_O; queries, keys and neurons have no direction.
    """
    _, layer, _, kind = weight.replace("._", ".").split(".")  # blocks.0.attn._W_K
    attn = model.blocks[int(layer)].attn
    if kind in ("W_O", "W_out"):
        return "residual", write
    if kind in ("W_in", "W_gate"):
        return f"neuron {int(write.abs().argmax())}", None
    by_head = write.reshape(-1, model.cfg.d_head)
    head = int(by_head.norm(dim=1).argmax())
    shared = model.cfg.n_heads // len(by_head)
    if kind != "W_V":
        what = {"W_Q": "queries", "W_K": "keys"}[kind]
        return f"{what} of L{layer}H{head * shared}", None
    outputs = exact(attn.W_O[head * shared : (head + 1) * shared])
    carried = by_head[head] @ outputs
    best = int(carried.norm(dim=1).argmax())
    return f"values of L{layer}H{head * shared + best}", carried[best]


def upstream_writers(model: HookedModel, weight: str, direction: Vector) -> dict[str, float]:
    """Return how much of each earlier component's output is along a direction; 1 if random.

    ||W d||^2 / ||W||^2 d_model, for embeddings, and each earlier head's W_O and MLP's W_out; for an
    MLP's weight also heads of the same layer, unless both run in parallel.
    """
    _, layer, _, kind = weight.replace("._", ".").split(".")
    in_mlp = kind in ("W_in", "W_gate") and not model.cfg.parallel_attn_mlp
    writers = {"embed": exact(model.embed.W_E)}
    if hasattr(model, "pos_embed"):
        writers["pos_embed"] = exact(model.pos_embed.W_pos)
    for at in range(int(layer) + in_mlp):
        block = model.blocks[at]
        writers |= {f"L{at}H{head}": exact(W) for head, W in enumerate(block.attn.W_O)}
        if at < int(layer):
            writers[f"L{at} mlp"] = exact(block.mlp.W_out)
    unit = direction / direction.norm()
    return {
        name: ((W @ unit).square().sum() / W.square().sum() * len(unit)).item()
        for name, W in writers.items()
    }


def _before_norm(norm: nn.Module, direction: Vector) -> Vector:
    read = direction * exact(norm.w) if hasattr(norm, "w") else direction
    return read - read.mean() if is_centered(norm) else read
