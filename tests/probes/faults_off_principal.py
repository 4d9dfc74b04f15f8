# ruff: noqa: E501 (a fault is a row of a table)
"""Faults of OffPrincipal and of the shares behind it, written before the checks were run on them."""

from tests.probes.planting import Fault

KIND, OBSERVE = "OffPrincipal", "off_principal:OffPrincipal.observe"
CHANGES, AT_RANDOM = (f"off_principal:OffPrincipal.{name}" for name in ("_changes", "_at_random"))
PRINCIPAL = "diffing.principal"

OFF_PRINCIPAL_FAULTS = (
    Fault(
        "O1 the spaces of the policy, not of the reference",
        KIND,
        CHANGES,
        "principal_spaces(base, self.k)",
        "principal_spaces(exact(others[name]), self.k)",
    ),
    Fault(
        "O2 the last singular vectors",
        KIND,
        f"{PRINCIPAL}:principal_spaces",
        "[1][:, :k]",
        "[1][:, -k:]",
    ),
    Fault(
        "O3 one singular vector too few",
        KIND,
        f"{PRINCIPAL}:principal_spaces",
        "[1][:, :k]",
        "[1][:, :k - 1]",
    ),
    Fault(
        "O4 the energy without its square",
        KIND,
        f"{PRINCIPAL}:energy_blocks",
        "return torch.stack(parts).reshape(2, 2) / delta.square().sum()",
        "return (torch.stack(parts).sqrt() / torch.stack(parts).sqrt().sum()).reshape(2, 2)",
    ),
    Fault(
        "O5 left and right exchanged",
        KIND,
        f"{PRINCIPAL}:energy_blocks",
        ".reshape(2, 2)",
        ".reshape(2, 2).T",
    ),
    Fault(
        "O6 the labels of the matrices rolled",
        KIND,
        CHANGES,
        "for name, matrix in matrices(before).items():",
        "for name, matrix in zip([*matrices(before)][1:] + [*matrices(before)][:1], matrices(before).values()):",
    ),
    Fault(
        "O7 QK and OV exchanged",
        KIND,
        f"{PRINCIPAL}:head_products",
        'found[f"L{layer}H{head} OV"]',
        'found[f"L{layer}H{head} QK" if False else f"L{layer}H{len(W[\'W_Q\']) - 1 - head} OV"]',
    ),
    Fault(
        "O8 the first key head for all",
        KIND,
        f"{PRINCIPAL}:head_products",
        'shared = head * len(W["W_K"]) // len(W["W_Q"])',
        "shared = 0",
        "grouped",
    ),
    Fault(
        "O9 chance of one side",
        KIND,
        f"{PRINCIPAL}:chance_share",
        "min(k, rows, cols) ** 2 / (rows * cols)",
        "min(k, rows) / rows",
    ),
    Fault(
        "O10 random frames that are not orthonormal",
        KIND,
        f"{PRINCIPAL}:_frame",
        "return torch.linalg.qr(noise)[0]",
        "return noise / side**0.5",
    ),
    Fault(
        "O11 random changes of one factor alone",
        KIND,
        f"{PRINCIPAL}:random_factor_shares",
        "tall = torch.cat([first, before.first], 1)",
        "tall = torch.cat([0 * first, before.first], 1)",
    ),
    Fault(
        "O12 draws of the heads by the formula of matrices",
        KIND,
        AT_RANDOM,
        "if change.factors is None:",
        "if True:",
    ),
    Fault(
        "O13 a wider range than the draws'",
        KIND,
        "off_principal:_chance",
        '"low": shares.min().item()',
        '"low": 0.5 * shares.min().item()',
    ),
    Fault(
        "O14 the whole by norms in place of energies",
        KIND,
        "off_principal:rows_together",
        'row["norm"] ** 2 * row[key]',
        'row["norm"] * row[key]',
    ),
    Fault(
        "O15 adapters forgotten",
        KIND,
        CHANGES,
        "exact(others[name]) - base",
        "0.5 * (exact(others[name]) - base)",
    ),
    Fault(
        "O16 heads stacked in place of side by side",
        KIND,
        f"{PRINCIPAL}:matrices",
        "as_matrix(name, weights[name])",
        "as_matrix(name, weights[name]) if weights[name].ndim < 3 else weights[name].flatten(0, 1)",
    ),
)
