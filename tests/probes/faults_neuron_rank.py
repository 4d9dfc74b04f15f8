"""Faults of NeuronRank and its split."""

from tests.probes.planting import Fault

OBSERVE = "neuron_rank:NeuronRank.observe"
END, SHIFT, GROUPS = (
    f"neuron_rank:{name}" for name in ("neuron_end", "neuron_shift", "neuron_groups")
)


def _fault(name: str, where: str, old: str, new: str, run: str = "padded") -> Fault:
    return Fault(name, "NeuronRank", where, old, new, run)


NEURON_FAULTS = (
    _fault("N1 the mean of the reader not taken off", END, "reader - reader.mean()", "reader + 1"),
    _fault("N2 the final norm's scale left out", END, "1 / exact(acts[", "0 * exact(acts["),
    _fault("N3 b_out forgotten", END, "if b is None else", "if True else"),
    _fault("N4 layers exchanged", END, "range(len(layers))]", "reversed(range(len(layers)))]"),
    _fault(
        "N5 two neurons exchanged",
        END,
        "[exact(post) for post in posts]",
        "[exact(post).roll(1, -1) for post in posts]",
    ),
    _fault(
        "N6 the reference's write for both",
        SHIFT,
        "inverse_scale[None, :, None] for end in (before, after)",
        "inverse_scale[None, :, None] for end in (before, before)",
    ),
    _fault("N8 before less after", SHIFT, "a1 * e1 - a0 * e0", "a0 * e0 - a1 * e1"),
    _fault(
        "N9 one position too early",
        OBSERVE,
        "_acts_at(model, text, self.pos)",
        "_acts_at(model, text, self.pos - 1)",
    ),
    _fault(
        "N10 words the other way round",
        OBSERVE,
        "(self.word, self.other))",
        "(self.other, self.word))",
    ),
    _fault("N11 ranked by sign", OBSERVE, "contribution.abs().flatten()", "contribution.flatten()"),
    _fault(
        "N12 names by the number of layers",
        OBSERVE,
        "top % contribution.shape[1]",
        "top % contribution.shape[0]",
    ),
    _fault(
        "N13 ranked by the share of the activation",
        OBSERVE,
        "contribution.abs().flatten()",
        "by_activation.mean(1).abs().flatten()",
    ),
    _fault(
        "N14 the policy's activation in place of the reference's",
        OBSERVE,
        "before.activation.mean(1)[at[0], at[1]]",
        "after.activation.mean(1)[at[0], at[1]]",
    ),
    _fault(
        "N15 groups by the contribution's sign",
        OBSERVE,
        "neuron_groups(write[0], moved)",
        "neuron_groups(contribution, moved)",
    ),
    _fault(
        "N16 groups up and down exchanged",
        GROUPS,
        "torch.where(raises, moved < 0, moved > 0)",
        "torch.where(raises, moved > 0, moved < 0)",
    ),
    _fault(
        "N17 writes of both models exchanged",
        OBSERVE,
        "[before.write * scale[0], after.write * scale[1]]",
        "[after.write * scale[1], before.write * scale[0]]",
    ),
    _fault(
        "N18 tokens of the neuron's least activation",
        "neuron_rank:_most_active",
        "row.topk(",
        "(-row.nan_to_num(neginf=torch.inf)).topk(",
    ),
    _fault(
        "N19 tokens that come next",
        "neuron_rank:_most_active",
        "ids = tokens[mask].cpu()",
        "ids = tokens.roll(-1, 1)[mask].cpu()",
    ),
    _fault(
        "N20 tokens in the reference",
        OBSERVE,
        "_most_active(models[1], text, at)",
        "_most_active(models[0], text, at)",
    ),
    _fault(
        "N21 padding among the tokens",
        "neuron_rank:_most_active",
        "mask, tokens = text.attention_mask[there], text.tokens[there]",
        "mask, tokens = torch.ones_like(text.attention_mask[there]), text.tokens[there]",
        "grouped",
    ),
    _fault(
        "N22 rows of the texts in another order",
        OBSERVE,
        "by_neuron[at[0], :, at[1]]",
        "by_neuron[at[0], :, at[1]].flip(1)",
    ),
    _fault(
        "N23 the MLPs' rows of the policy alone",
        OBSERVE,
        "(mlp[1] - mlp[0]).mean(1)",
        "mlp[1].mean(1)",
    ),
    _fault(
        "N24 columns of an earlier row",
        OBSERVE,
        "moved[at[0], at[1]]",
        "moved[at[0], at[1]].roll(1)",
    ),
    _fault("N25 spelled one id on", OBSERVE, "tokenizer.decode([i])", "tokenizer.decode([i + 1])"),
    _fault(
        "N26 the gain of the norm left out",
        END,
        "logit_reader(model, words)",
        "exact(model.unembed.W_U[:, words[0]] - model.unembed.W_U[:, words[1]])",
    ),
    _fault(
        "N7 all of the shift at the new write",
        SHIFT,
        "(a1 - a0) * (e0 + e1) / 2",
        "(a1 - a0) * e1",
    ),
)
