"""NeuronRank: which MLP neurons move a logit difference away from the reference's."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.diffing.contrast import Words
from rlhf_lab.diffing.logit_shift import logit_reader
from rlhf_lab.errors import ConfigError
from rlhf_lab.models.device import exact
from rlhf_lab.models.hooked_model import HookedModel, is_centered, model_where_exact, without_hooks
from rlhf_lab.models.residual_parts import SITES, validate_additive
from rlhf_lab.probes.eval_text import EvalText
from rlhf_lab.probes.logit_shift import attribute_logits
from rlhf_lab.probes.probe import Check, Observation, Record, decimals, mean_fields
from rlhf_lab.probes.word_pair import WordPairProbe
from rlhf_lab.training.capture import capture_activations

NEURON_SITE = "blocks.*.mlp.hook_post"
TOP_NEURONS, TOP_TOKENS = 20, 3
ACTIVATIONS_AT_ONCE = 20_000_000


class NeuronEnd(NamedTuple):
    """Neurons of one model at one position, in float64."""

    activation: Float[Tensor, "layer batch neuron"]  # after the nonlinearity and any gate
    write: Float[Tensor, "layer neuron"]  # d difference / d activation, times the norm's scale
    bias: Float[Tensor, " layer"]  # contribution of b_out, times the scale
    inverse_scale: Float[Tensor, " batch"]  # one over the final norm's scale


class NeuronRank(WordPairProbe):
    """Contribution of each neuron to the shift of the logit difference of two words.

    A neuron adds its activation times its write: W_out along the difference of two columns of the
    unembedding, through the final norm's gain and scale, as in LogitShift. Its contribution to the
    shift is split by the change of the activation and that of the write; the neurons of a layer and
    its b_out sum to LogitShift's row of that MLP. The neurons that contribute most are listed with
    the tokens of the eval text at which they are most active. Effects on later components do not
    count; hooks on the models are off.

    Checks: the neurons of each layer sum to LogitShift's row.

    Args:
        word, other: single tokens; or weights by word as `word`.
        pos: the position before the word, in each text; from its end when negative.
        n: number of sequences.
    """

    name = "neuron_rank"
    question = "Which MLP neurons move the logit difference?"
    caveat = "Only the direct effect on the logits counts, not effects on later components."
    every = 10

    def check_model(self, model: HookedModel) -> None:
        validate_additive(model, self.name)
        if not all(hasattr(getattr(block, "mlp", None), "W_out") for block in model.blocks):
            raise ConfigError(
                "The model has blocks without an MLP of single neurons. Remove "
                f"{self.name}, and use LogitShift."
            )
        super().check_model(model)

    @torch.no_grad()
    def observe(self, seen: Observation) -> Record:
        models = [model_where_exact(m) for m in (seen.ctx.reference, seen.ctx.policy.base_model)]
        tokenizer = seen.ctx.policy.base_model.tokenizer
        words = self.contrast(models[1])
        text = seen.text.first(self.n)
        with without_hooks(*models):
            where = text.columns(self.pos), text.attention_mask
            sites = *SITES, NEURON_SITE
            acts = [capture_activations(m, text.tokens, sites, *where) for m in models]
            before, after = (neuron_end(m, end, words) for m, end in zip(models, acts, strict=True))
            found = [attribute_logits(m, x, words) for m, x in zip(models, acts, strict=True)]
            is_mlp = [i for i, name in enumerate(found[0].components) if name.endswith(" mlp")]
            mlp = [each.rows[is_mlp] for each in found]
            by_neuron, by_activation, b_out = neuron_shift(before, after)
            contribution = by_neuron.mean(1)
            top = contribution.abs().flatten().topk(min(TOP_NEURONS, contribution.numel())).indices
            at = torch.stack([top // contribution.shape[1], top % contribution.shape[1]])
            most_active = _most_active(models[1], text, at)
        layer, index = at
        moved = (after.activation - before.activation).mean(1)
        write = torch.stack([end.write * end.inverse_scale.mean() for end in (before, after)])
        columns = {
            "by_activation": by_activation.mean(1),
            "activation": before.activation.mean(1),
            "activation_shift": moved,
            "write": write.mean(0),
        }
        values = {
            "n": len(text.tokens),
            "neurons": [f"L{layer}N{index}" for layer, index in at.T.tolist()],
            **mean_fields("contribution", by_neuron[layer, :, index].T),
            **{name: decimals(x[layer, index]) for name, x in columns.items()},
            "tokens": [[tokenizer.decode([i]) for i in ids] for ids, _ in most_active],
            "token_activations": [decimals(x) for _, x in most_active],
            "mlp": decimals((mlp[1] - mlp[0]).mean(1)),
            "b_out": decimals(b_out.mean(1)),
        }
        tensors = {"contribution": contribution, "activation_shift": moved, "write": write}
        tensors = {f"neuron_{name}": x.float().cpu() for name, x in tensors.items()}

        def check_sum() -> Check:
            gap = (by_neuron.sum(2) + b_out - (mlp[1] - mlp[0])).abs().max().item()
            name = "neurons and b_out sum to the shift of the MLPs' rows"
            return Check.at_most(name, gap, seen.allowed(1e-4, half=0.2))

        return Record(values, tensors, [check_sum])


def _most_active(
    model: HookedModel, text: EvalText, at: Int[Tensor, "2 top"]
) -> list[tuple[list[int], Tensor]]:
    layers = sorted(set(at[0].tolist()))
    sites = [NEURON_SITE.replace("*", str(layer)) for layer in layers]
    largest = torch.full((at.shape[1], model.cfg.d_vocab), -torch.inf)
    of_row = text.tokens.shape[1] * model.cfg.d_mlp * len(layers)
    index = torch.arange(len(text.tokens), device=text.tokens.device)
    for there in index.split(max(1, ACTIVATIONS_AT_ONCE // of_row)):
        mask, tokens = text.attention_mask[there], text.tokens[there]
        acts = capture_activations(model, tokens, sites, attention_mask=mask)
        ids = tokens[mask].cpu()
        for i, (layer, index) in enumerate(at.T.tolist()):
            site = NEURON_SITE.replace("*", str(layer))
            x = acts[site][mask.to(acts[site].device)][:, index].float().cpu()
            largest[i].scatter_reduce_(0, ids, x, "amax")
    found = []
    for row in largest:
        best = row.topk(min(TOP_TOKENS, int((row > -torch.inf).sum())))
        found.append((best.indices.tolist(), best.values))
    return found


@torch.no_grad()
def neuron_end(model: HookedModel, acts: dict[str, Tensor], words: Words) -> NeuronEnd:
    """Return the neurons, from activations of `NEURON_SITE` and the norm's scale at one position.

    write_j = <W_out[j], q>, with q of `logit_reader`, minus its mean for a LayerNorm
    """
    reader = logit_reader(model, words)
    if is_centered(model.ln_final):
        reader = reader - reader.mean()
    layers = [block.mlp for block in model.blocks]
    posts = [acts[NEURON_SITE.replace("*", str(layer))] for layer in range(len(layers))]
    biases = [getattr(mlp, "b_out", None) for mlp in layers]
    return NeuronEnd(
        torch.stack([exact(post) for post in posts]),
        torch.stack([exact(mlp.W_out) @ reader for mlp in layers]),
        torch.stack([reader.new_zeros(()) if b is None else exact(b) @ reader for b in biases]),
        1 / exact(acts["ln_final.hook_scale"])[:, 0],
    )


def neuron_shift(
    before: NeuronEnd, after: NeuronEnd
) -> tuple[
    Float[Tensor, "layer batch neuron"],
    Float[Tensor, "layer batch neuron"],
    Float[Tensor, "layer batch"],
]:
    """Return the shift by neuron, its part by the neuron's activation, and the shift by b_out.

    The rest is by the write over the scale, e = w s. Each factor gets its Shapley value.

    row = a1 e1 - a0 e0 = (a1 - a0) (e0 + e1) / 2 + (e1 - e0) (a0 + a1) / 2
    """
    e0, e1 = (end.write[:, None] * end.inverse_scale[None, :, None] for end in (before, after))
    a0, a1 = before.activation, after.activation
    b0, b1 = (end.bias[:, None] * end.inverse_scale for end in (before, after))
    return a1 * e1 - a0 * e0, (a1 - a0) * (e0 + e1) / 2, b1 - b0
