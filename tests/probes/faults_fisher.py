# ruff: noqa: E501 (a fault is a row of a table)
"""Faults of the Fisher probe and of the quadratic form, written before the checks were run on them."""

from tests.probes.planting import Fault

OBSERVE = "fisher:Fisher.observe"
QUADRATIC = "diffing.fisher:fisher_quadratic"

FISHER_FAULTS = (
    Fault("F1 without the half", "Fisher", QUADRATIC, ".sum(-1) / 2", ".sum(-1)"),
    Fault(
        "F2 second moment in place of the variance", "Fisher", QUADRATIC, "(moved - mean)", "moved"
    ),
    Fault(
        "F3 uniform in place of the model's own distribution",
        "Fisher",
        QUADRATIC,
        "logits.softmax(-1)",
        "(0 * logits).softmax(-1)",
    ),
    Fault("F4 states forgotten", "Fisher", QUADRATIC, "if states is not None", "if False"),
    Fault(
        "F5 blocks in reverse",
        "Fisher",
        OBSERVE,
        "for name in groups.names]",
        "for name in reversed(groups.names)]",
    ),
    Fault(
        "F6 shares one too early",
        "Fisher",
        OBSERVE,
        "for a in SHARES])",
        "for a in (0.003, *SHARES[:-1])])",
    ),
    Fault(
        "F7 blocks' KL at a tenth",
        "Fisher",
        OBSERVE,
        "kl_of_step(line, rows, change, 1.0)",
        "kl_of_step(line, rows, change, 0.1)",
    ),
    Fault(
        "F8 quadratic form and KL exchanged",
        "Fisher",
        OBSERVE,
        '{"quad": quad, "kl": kl, "quad_whole"',
        '{"quad": kl, "kl": quad, "quad_whole"',
    ),
    Fault(
        "F9 rows in reverse",
        "Fisher",
        OBSERVE,
        "rows = text_rows(seen, self.text, self.n)",
        "rows = text_rows(seen, self.text, self.n); rows = rows._replace(tokens=rows.tokens.flip(0), states=rows.states.flip(0), attention_mask=rows.attention_mask.flip(0))",
    ),
    Fault(
        "F10 adapters forgotten",
        "Fisher",
        "diffing.weight_line:WeightLine.__init__",
        "self.after[name] - self.before[name]",
        "0.5 * (self.after[name] - self.before[name])",
    ),
    Fault(
        "F11 padding read as text",
        "Fisher",
        "fisher:_quadratic",
        "rows.states, rows.attention_mask",
        "rows.states",
        "padded",
    ),
)
