"""Faults of ValueAttribution, written down before it was looked whether they are told."""

from tests.probes.planting import Fault

OBSERVE = "value_attribution_probe:ValueAttribution.observe"
ROWS = "value_attribution:secant_value_rows"
PARTS = "value_attribution_probe:normalized_parts"
FIGURES = "value_attribution_probe:_figures"

ATTRIBUTION_FAULTS = tuple(
    Fault(name, "ValueAttribution", where, old, new)
    for name, where, old, new in (
        (
            "A1 names of the parts turned by one",
            OBSERVE,
            '"components": names',
            '"components": names[1:] + names[:1]',
        ),
        (
            "A2 the slope at the state for the secant",
            ROWS,
            "rise / torch.where(moved, step, 1.0)",
            "(here > 0).to(here)",
        ),
        (
            "A3 texts turned by one",
            OBSERVE,
            "value_head, kept, kept",
            "value_head, kept.roll(1, 1), kept",
        ),
        ("A4 the norm's scale left out", PARTS, ' / exact(acts["ln_final.hook_scale"])', ""),
        (
            "A5 the first text for the mean state",
            OBSERVE,
            "kept.mean(1)",
            "kept[:, 0]",
        ),
        ("A6 states of the position before", PARTS, "act[:n, pos]", "act[:n, pos - 1]"),
        (
            "A7 variance for standard deviation",
            "value_attribution_probe:_deviation",
            ".clamp(min=0).sqrt()",
            "",
        ),
        ("A8 dead where once off", FIGURES, "on.any(0)", "on.all(0)"),
        ("A9 half-way at the end", ROWS, "(here + there) / 2 > 0", "here > 0"),
        ("A10 the norm's mean left in", PARTS, "if is_centered(model.ln_final)", "if False"),
        ("A11 rows without the sign of the last layer", ROWS, "slope * out)", "slope * out.abs())"),
        (
            "A12 stored rows of other texts",
            FIGURES,
            "whole[..., mask] = x",
            "whole[..., mask] = x.roll(1, -1)",
        ),
        (
            "A13 positions stored one early",
            OBSERVE,
            '"positions": slots',
            '"positions": [pos - 1 for pos in slots]',
        ),
        ("A14 the state's own part, not its deviation", ROWS, "parts - origin[:, None]", "parts"),
        (
            "A15 spread of another slot",
            FIGURES,
            "each.value) for each in spreads",
            "each.value) for each in spreads[::-1]",
        ),
    )
)
