# ruff: noqa: E501 (a fault is a row of a table)
"""Faults of LensDivergence and of the lenses behind it, written before the checks were run on them."""

from tests.probes.planting import Fault

KIND, OBSERVE = "LensDivergence", "lens_divergence:LensDivergence.observe"
STREAMS, MAPS, BY_LAYER = (
    f"lens_divergence:{name}" for name in ("both_streams", "fit_translators", "_by_layer")
)
LENS = "diffing.lens:lens_divergence"

LENS_DIVERGENCE_FAULTS = (
    Fault(
        "D1 the KL of the other direction",
        KIND,
        LENS,
        "log_probs(logit_lens(model, own[None])), log_probs(logit_lens(reference, other[None]))",
        "log_probs(logit_lens(reference, other[None])), log_probs(logit_lens(model, own[None]))",
    ),
    Fault(
        "D2 one read-out for both",
        KIND,
        LENS,
        "logit_lens(reference, other[None])",
        "logit_lens(model, other[None])",
        "padded",
    ),
    Fault(
        "D3 no final norm",
        KIND,
        "diffing.lens:logit_lens",
        "unembed_residuals(model, rows)",
        "model.unembed(rows)",
    ),
    Fault(
        "D4 two layers exchanged",
        KIND,
        STREAMS,
        "kept.append(torch.stack(list(acts.values())))",
        "kept.append(torch.stack(list(acts.values()))[[1, 0, *range(2, len(acts))]])",
    ),
    Fault(
        "D5 the residual in the middle of a block",
        KIND,
        STREAMS,
        '"blocks.*.hook_resid_pre"',
        '"blocks.*.hook_resid_mid"',
    ),
    Fault(
        "D6 rows of the policy in reverse",
        KIND,
        OBSERVE,
        "raw = lens_divergence(model, reference, own, other, rows.states)",
        "raw = lens_divergence(model, reference, own, other, rows.states).flip(1)",
    ),
    Fault(
        "D7 states one too late",
        KIND,
        OBSERVE,
        "rows = text_rows(seen, self.text, self.n)",
        "rows = text_rows(seen, self.text, self.n); rows = rows._replace(states=rows.states.roll(1, 1) & rows.written)",
    ),
    Fault(
        "D8 left padding kept",
        KIND,
        OBSERVE,
        'rotate_padding(x, mask[-len(x) :], "right")',
        "x",
        "padded",
    ),
    Fault(
        "D9 translators fitted on the texts that are read",
        KIND,
        OBSERVE,
        "fit_translators(other[:, :cut], rows.written[:cut])",
        "fit_translators(other[:, cut:], rows.written[cut:])",
    ),
    Fault(
        "D10 translators of the policy",
        KIND,
        OBSERVE,
        "fit_translators(other[:, :cut]",
        "fit_translators(own[:, :cut]",
    ),
    Fault(
        "D11 translators of the layers in reverse",
        KIND,
        OBSERVE,
        "zip(maps, h[:-1, cut:], strict=True)",
        "zip(maps[::-1], h[:-1, cut:], strict=True)",
    ),
    Fault(
        "D12 another penalty than is stored",
        KIND,
        MAPS,
        "return [fit_translator(*each, ridge) for each in fit], fields",
        "return [fit_translator(*each, 1.0) for each in fit], fields",
    ),
    Fault(
        "D13 what is left at another penalty",
        KIND,
        MAPS,
        "PENALTIES.index(ridge)",
        "-1",
    ),
    Fault(
        "D14 means over all places in place of states",
        KIND,
        BY_LAYER,
        "states.sum(1)",
        "torch.ones_like(states).sum(1)",
    ),
    Fault(
        "D15 layers named from the end",
        KIND,
        "lens_divergence:layer_names",
        "range(model.cfg.n_layers)",
        "reversed(range(model.cfg.n_layers))",
    ),
    Fault(
        "D16 slots one too early",
        KIND,
        OBSERVE,
        "slot_names(rows.tokens.shape[1] + 1)[1:]",
        "slot_names(rows.tokens.shape[1])",
    ),
    Fault(
        "D17 padding read as text",
        KIND,
        STREAMS,
        "attention_mask=part.attention_mask",
        "attention_mask=None",
        "padded",
    ),
    Fault(
        "D18 half of the rows counted",
        KIND,
        OBSERVE,
        '"held_out": len(raw[0]) - cut',
        '"held_out": cut',
    ),
)
