"""NeuronRank: which MLP neurons move a logit difference away from the reference's."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.diffing.neurons import (
    NEURON_GROUPS,
    NEURON_SITE,
    NeuronShift,
    neuron_end,
    neuron_groups,
    neuron_shift,
    refuse_no_neurons,
)
from rlhf_lab.functional import bootstrap_means
from rlhf_lab.models.hooked_model import HookedModel, without_hooks
from rlhf_lab.models.reference import model_where_exact
from rlhf_lab.models.residual_parts import SITES, validate_additive
from rlhf_lab.models.tokenization import single_token
from rlhf_lab.probes.eval_text import EvalText
from rlhf_lab.probes.logit_shift import Attribution, attribute_logits
from rlhf_lab.probes.probe import (
    RESAMPLES,
    Check,
    Observation,
    Record,
    decimals,
    interval_fields,
)
from rlhf_lab.probes.word_pair import WordPairProbe
from rlhf_lab.training.capture import capture_activations

TOP_NEURONS, TOP_TOKENS = 20, 3
ACTIVATIONS_AT_ONCE = 20_000_000


class NeuronRank(WordPairProbe):
    """Each neuron's share in the shift of the logit difference of two words, behind one position.

    A neuron adds its activation times its write: W_out along the difference of the two columns of
    the unembedding, through the final norm's gain and scale, as in LogitShift. Its contribution to
    the shift is split by what changed, the activation or the write; the neurons of a layer and its
    b_out sum to LogitShift's row of that MLP. Four groups, by the signs of the write and of the
    shift of the activation, say whether many neurons pull one way. The neurons that contribute most
    are listed with the tokens of the eval text at which they are most active.

    A neuron is charged with its own output alone, also with what earlier parts sent it; hooks on
    the models have no part in any of this.

    Checks: the neurons of each layer sum to LogitShift's row, in both models.

    Args:
        word, other: single tokens of the tokenizer.
        pos: the position before the word, in each text; from its end when negative.
        n: sequences to look at.
    """

    name = "neuron_rank"
    every = 10

    def check_model(self, model: HookedModel) -> None:
        """Refuse a model whose logits are no sum over single neurons."""
        validate_additive(model, self.name)
        refuse_no_neurons(model, self.name)
        super().check_model(model)

    @torch.no_grad()
    def observe(self, seen: Observation) -> Record:
        """Take both models' neurons at the position, and subtract."""
        models = [model_where_exact(m) for m in (seen.ctx.reference, seen.ctx.policy.base_model)]
        tokenizer = seen.ctx.policy.base_model.tokenizer
        words = tuple(single_token(tokenizer, word) for word in (self.word, self.other))
        text = seen.text.first(self.n)
        with without_hooks(*models):
            acts = [_acts_at(model, text, self.pos) for model in models]
            before, after = (neuron_end(m, own, words) for m, own in zip(models, acts, strict=True))
            rows = [attribute_logits(m, own, *words) for m, own in zip(models, acts, strict=True)]
            shift = neuron_shift(before, after)
            contribution = shift.rows.mean(1)
            top = contribution.abs().flatten().topk(min(TOP_NEURONS, contribution.numel())).indices
            at = torch.stack([top // contribution.shape[1], top % contribution.shape[1]])
            heard = _most_active(models[1], text, at)
        moved = (after.activation - before.activation).mean(1)
        scale = [end.inverse_scale.mean() for end in (before, after)]
        write = torch.stack([before.write * scale[0], after.write * scale[1]])
        groups = neuron_groups(write[0], moved)
        by_text = shift.rows[at[0], :, at[1]]
        found = bootstrap_means(by_text.T, resamples=RESAMPLES)
        mlp = [_mlp_rows(each) for each in rows]
        fields = {
            "layer": at[0],
            "index": at[1],
            "contribution": contribution[at[0], at[1]],
            "by_activation": shift.by_activation.mean(1)[at[0], at[1]],
            "activation": before.activation.mean(1)[at[0], at[1]],
            "activation_shift": moved[at[0], at[1]],
            "write": write.mean(0)[at[0], at[1]],
        }
        values = {
            "n": len(text.tokens),
            "neurons": [f"L{layer}N{index}" for layer, index in at.T.tolist()],
            **{name: decimals(x) for name, x in fields.items() if name not in ("layer", "index")},
            **interval_fields("contribution", found, 6),
            "group": [
                NEURON_GROUPS[g] if g >= 0 else "unmoved" for g in groups[at[0], at[1]].tolist()
            ],
            "tokens": [[tokenizer.decode([i]) for i in ids] for ids, _ in heard],
            "token_activations": [decimals(x) for _, x in heard],
            "groups": list(NEURON_GROUPS),
            "group_contribution": [
                round(contribution[groups == g].sum().item(), 6) for g in range(4)
            ],
            "group_size": [int((groups == g).sum()) for g in range(4)],
            "mlp": decimals((mlp[1] - mlp[0]).mean(1)),
            "b_out": decimals(shift.bias.mean(1)),
        }
        tensors = {
            "contribution": contribution,
            "by_activation": shift.by_activation.mean(1),
            "activation_shift": moved,
            "write": write,
            "by_text": by_text,
        }
        tensors = {f"neuron_{name}": x.float().cpu() for name, x in tensors.items()}
        checks = _sums(before, after, shift, mlp, seen.allowed(1e-4, half=0.2))
        return Record(values, tensors, checks)


def _sums(before: Any, after: Any, shift: NeuronShift, mlp: list[Tensor], allowed: float) -> list:
    """Neurons and b_out of each layer against LogitShift's rows of the MLPs."""
    checks, whole = [], []
    for who, end in (("the reference's", before), ("the policy's", after)):
        neurons = torch.einsum("lbn,ln->lb", end.activation, end.write) + end.bias[:, None]
        whole.append(neurons * end.inverse_scale)
        missed = (whole[-1] - mlp[len(whole) - 1]).abs().max().item()
        checks.append(Check.at_most(f"{who} neurons sum to its MLPs' rows", missed, allowed))
    missed = (shift.rows.sum(2) + shift.bias - (mlp[1] - mlp[0])).abs().max().item()
    return [*checks, Check.at_most("neurons sum to the shift of the MLPs' rows", missed, allowed)]


def _mlp_rows(found: Attribution) -> Float[Tensor, "layer batch"]:
    """The rows of the MLPs, in the order of the layers."""
    return found.rows[[i for i, name in enumerate(found.components) if name.endswith(" mlp")]]


def _batches(model: HookedModel, text: EvalText, layers: int) -> list[Tensor]:
    """Numbers of rows, so many at a time that their activations fit into memory."""
    of_row = text.tokens.shape[1] * model.cfg.d_mlp * layers
    return list(torch.arange(len(text.tokens)).split(max(1, ACTIVATIONS_AT_ONCE // of_row)))


def _acts_at(model: HookedModel, text: EvalText, pos: int) -> dict[str, Tensor]:
    """Activations at one position of each text."""
    sites, columns, parts = (*SITES, NEURON_SITE), text.columns(pos), []
    for rows in _batches(model, text, model.cfg.n_layers):
        there = rows.to(text.tokens.device)
        mask = text.attention_mask[there]
        acts = capture_activations(model, text.tokens[there], sites, attention_mask=mask)
        parts.append(
            {
                site: act[torch.arange(len(act), device=act.device), columns[there].to(act.device)]
                for site, act in acts.items()
            }
        )
    return {site: torch.cat([part[site] for part in parts]) for site in parts[0]}


def _most_active(
    model: HookedModel, text: EvalText, at: Int[Tensor, "2 top"]
) -> list[tuple[list[int], Tensor]]:
    """Of each neuron, the tokens with the largest activation at any place, and that activation."""
    layers = sorted(set(at[0].tolist()))
    sites = [NEURON_SITE.replace("*", str(layer)) for layer in layers]
    largest = torch.full((at.shape[1], model.cfg.d_vocab), -torch.inf)
    for rows in _batches(model, text, len(layers)):
        there = rows.to(text.tokens.device)
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
