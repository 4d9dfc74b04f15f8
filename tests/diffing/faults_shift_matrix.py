"""Faults of the sender x receiver matrix, written down before looking whether its checks tell."""

from tests.probes.planting import Fault

MATRIX, PRODUCTS = "diffing.shift_matrix:shift_matrix", "diffing.shift_matrix:_products"
READ, LINE = "diffing.shift_matrix:Readings.forward", "diffing.shift_matrix:Line.__init__"
SHIFT_MATRIX_FAULTS = (
    Fault(
        "first rows swapped",
        "ShiftMatrix",
        MATRIX,
        "weight * rows",
        "weight * rows[[1, 0, *range(2, len(rows))]]",
    ),
    Fault(
        "receivers in reverse",
        "ShiftMatrix",
        PRODUCTS,
        "(moved @ reader)",
        "(moved.flip(0) @ reader)",
    ),
    Fault(
        "read-out without the scale",
        "ShiftMatrix",
        PRODUCTS,
        "(whole @ turned) * scale",
        "(whole @ turned)",
    ),
    Fault("two nodes", "ShiftMatrix", MATRIX, "quadrature(nodes)", "quadrature(2)"),
    Fault("one position early", "ShiftMatrix", LINE, "tokens.shape[1] + 1]", "tokens.shape[1]]"),
    Fault(
        "words swapped",
        "ShiftMatrix",
        LINE,
        "Readings(self.weights.model, ids)",
        "Readings(self.weights.model, ids[::-1])",
    ),
    Fault("gain left out", "ShiftMatrix", READ, "gain * u", "u"),
    Fault("norm's bias left out", "ShiftMatrix", READ, "norm.b.double() @ u", "0"),
    Fault("no centering", "ShiftMatrix", READ, "if is_centered(norm)", "if False"),
    Fault(
        "the whole change in every row",
        "ShiftMatrix",
        MATRIX,
        "restrict(between.delta, groups, name)",
        "between.delta",
    ),
    Fault("shift the wrong way round", "ShiftMatrix", MATRIX, "last - first", "first - last"),
    Fault(
        "tuned weights at every node", "ShiftMatrix", MATRIX, "between.at(node)", "between.at(1.0)"
    ),
    Fault(
        "rows of the text permuted",
        "ShiftMatrix",
        MATRIX,
        "line.columns, values, shift",
        "line.columns, values.roll(1, -1), shift",
    ),
)
