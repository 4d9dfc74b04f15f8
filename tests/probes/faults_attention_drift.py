# ruff: noqa: E501 (a fault is a row of a table)
"""Faults of AttentionDrift and of the split behind it, written before the checks were run on them."""

from tests.probes.planting import Fault

OBSERVE = "attention_drift:AttentionDrift.observe"
SPLIT = "diffing.attention:attention_split"

ATTENTION_FAULTS = (
    Fault(
        "A1 keys of the causes rolled by one",
        "AttentionDrift",
        OBSERVE,
        '"bhk,bkg->hgb", cause, to_keys',
        '"bhk,bkg->hgb", cause.roll(1, -1), to_keys',
    ),
    Fault(
        "A2 heads of a layer in reverse",
        "AttentionDrift",
        OBSERVE,
        "parts.append([torch",
        "split = [cause.flip(1) for cause in split]; written = written.flip(0); parts.append([torch",
    ),
    Fault(
        "A3 layers in reverse, with their own parts",
        "AttentionDrift",
        OBSERVE,
        "for layer in range(model.cfg.n_layers):",
        "for layer in reversed(range(model.cfg.n_layers)):",
    ),
    Fault(
        "A4 values and W_O exchanged",
        "AttentionDrift",
        OBSERVE,
        "enumerate(AttentionSplit._fields)",
        'enumerate(("qk", "wo", "ov"))',
    ),
    Fault(
        "A5 pattern's change without the mean taken off",
        "AttentionDrift",
        SPLIT,
        "(mean - (between * mean).sum(-1, keepdim=True))",
        "mean",
    ),
    Fault(
        "A6 one order of factors for all: pattern first",
        "AttentionDrift",
        SPLIT,
        "mean = (v[0][0] + v[1][1]) / 3 + (v[0][1] + v[1][0]) / 6",
        "mean, early, late = v[0][0], cache1.pattern / 2, cache1.pattern / 2",
    ),
    Fault(
        "A7 position one too early",
        "AttentionDrift",
        OBSERVE,
        "rows, at = self.rows(seen)",
        "rows, at = self.rows(seen); at = at - 1",
    ),
    Fault(
        "A8 the two words exchanged",
        "AttentionDrift",
        OBSERVE,
        "for text in (self.word, self.other))",
        "for text in (self.other, self.word))",
    ),
    Fault(
        "A9 the reader at the reference's scale alone",
        "AttentionDrift",
        OBSERVE,
        "reader = own_reader(scales,",
        "reader = own_reader([scales[0], scales[0]],",
    ),
    Fault(
        "A10 distances with query and key exchanged",
        "AttentionDrift",
        "attention_drift:_by_place",
        '"bhqk,bqkg,bqp->hpg", moved',
        '"bhqk,bqkg,bqp->hpg", moved.mT',
    ),
    Fault(
        "A11 distances of the first row alone",
        "AttentionDrift",
        "attention_drift:_by_place",
        "moved = pattern_distance(*patterns)",
        "moved = pattern_distance(*patterns)[:1].expand_as(patterns[0])",
    ),
    Fault(
        "A12 distances without the half",
        "AttentionDrift",
        "diffing.attention:pattern_distance",
        ".abs() / 2",
        ".abs()",
    ),
    Fault(
        "A13 rows of the causes in reverse",
        "AttentionDrift",
        OBSERVE,
        "both = capture(reference), capture(model)",
        "both = [{site: act.flip(0) for site, act in acts.items()} for acts in (capture(reference), capture(model))]",
    ),
    Fault(
        "A14 slots named one too early",
        "AttentionDrift",
        "attention_places:slot_places",
        "list(slots), list(slots)",
        "list(slots[1:]) + ['x'], list(slots[1:]) + ['x']",
    ),
    Fault(
        "A15 padding not taken off the positions",
        "AttentionDrift",
        "attention_places:slot_places",
        "own = rows.own_positions",
        "own = rows.attention_mask.new_ones(rows.tokens.shape).cumsum(1) - 1 + 0 * rows.own_positions",
        "padded",
    ),
    Fault(
        "A16 grouped heads read the values of the wrong group",
        "AttentionDrift",
        "diffing.attention:value_of_each_head",
        "value.repeat_interleave(n_heads // value.shape[2], dim=2)",
        "value.repeat(1, 1, n_heads // value.shape[2], 1)",
        "grouped",
    ),
    Fault(
        "A17 adapters left out of W_O",
        "AttentionDrift",
        "attention_drift:_layer",
        "exact(model.blocks[layer].attn.W_O) for model in models",
        "exact(models[0].blocks[layer].attn.W_O) for model in models",
    ),
    Fault(
        "A18 distances back one too near",
        "AttentionDrift",
        "attention_places:distance_places",
        "torch.bucketize(back,",
        "torch.bucketize((back - 1).clamp(min=0),",
        "grouped",
    ),
)
