# ruff: noqa: E501 (a fault is a row of a table)
"""Faults of KLAttribution and of the splits behind it, written before the checks were run on them."""

from tests.probes.planting import Fault

OBSERVE = "kl_attribution:KLAttribution.observe"
BY_OUTPUT, BY_WEIGHTS = (
    f"diffing.kl_attribution:{name}" for name in ("kl_by_output", "kl_by_weights")
)

KL_FAULTS = (
    Fault(
        "B1 rows of two components exchanged",
        "KLAttribution",
        BY_OUTPUT,
        "h0, change = parts0.sum(0), parts1 - parts0",
        "h0, change = parts0.sum(0), (parts1 - parts0)[[0, 1, 3, 2, *range(4, len(parts0))]]",
    ),
    Fault(
        "B2 two nodes in place of eight",
        "KLAttribution",
        BY_OUTPUT,
        "at, weights = quadrature(nodes)",
        "at, weights = quadrature(2)",
    ),
    Fault(
        "B3 the path under the reference's read-out",
        "KLAttribution",
        BY_OUTPUT,
        "kl_per_token(log_probs(read_out1(h)[None]), reference).sum(), h",
        "kl_per_token(log_probs(read_out0(h)[None]), reference).sum(), h",
        "padded",
    ),
    Fault(
        "B4 the KL of the other direction",
        "KLAttribution",
        OBSERVE,
        "_by_output(reference, model, rows,",
        "_by_output(model, reference, rows,",
    ),
    Fault(
        "B5 states one too late",
        "KLAttribution",
        OBSERVE,
        "rows = text_rows(seen, self.text, self.n)",
        "rows = text_rows(seen, self.text, self.n); rows = rows._replace(states=rows.states.roll(1, 1) & rows.written)",
    ),
    Fault(
        "B6 positions of the text in reverse",
        "KLAttribution",
        "kl_attribution:_by_output",
        "both.append(vectors)",
        "both.append(vectors if each is models[0] else vectors.flip(1))",
    ),
    Fault(
        "B7 rows in another order than the text's",
        "KLAttribution",
        "kl_attribution:_by_output",
        "place = torch.cat(where)",
        "place = torch.cat(where).flip(0)",
    ),
    Fault(
        "B8 the read-out's share left with the last component",
        "KLAttribution",
        OBSERVE,
        "gained = torch.cat([output.rows, output.read_out[None]])",
        "gained = torch.cat([output.rows[:-1], output.rows[-1:] + output.read_out, 0 * output.read_out[None]])",
        "padded",
    ),
    Fault(
        "B9 groups in reverse",
        "KLAttribution",
        BY_WEIGHTS,
        "for name in groups.names]",
        "for name in reversed(groups.names)]",
    ),
    Fault(
        "B10 weights of the nodes not applied",
        "KLAttribution",
        BY_WEIGHTS,
        "torch.tensor(weights, dtype=torch.float64)",
        "torch.full((nodes,), 1 / nodes, dtype=torch.float64)",
    ),
    Fault(
        "B11 two nodes for the weights",
        "KLAttribution",
        OBSERVE,
        "rows.attention_mask, self.nodes",
        "rows.attention_mask, 2",
        "grouped",
    ),
    Fault(
        "B12 every head gets its whole layer's share",
        "KLAttribution",
        "diffing.kl_attribution:_sum_of",
        "moved[weight][... if head is None else head].sum()",
        "moved[weight].sum() / (1 if head is None else len(moved[weight]))",
    ),
    Fault(
        "B13 the gradient at the reference alone",
        "KLAttribution",
        BY_WEIGHTS,
        "line.at(node)",
        "line.at(0.1 * node)",
    ),
    Fault(
        "B14 adapters forgotten on the way",
        "KLAttribution",
        "diffing.weight_line:WeightLine.__init__",
        "weights_of_both(model0, model1)",
        "weights_of_both(model0, model0)",
        "lora",
    ),
    Fault(
        "B15 padding read as text",
        "KLAttribution",
        BY_WEIGHTS,
        "torch.ones_like(states) if attention_mask is None else attention_mask.to(line.text_device)",
        "torch.ones_like(states)",
        "padded",
    ),
    Fault(
        "B16 means over tokens, not over sequences",
        "KLAttribution",
        "kl_attribution:_weights_found",
        "sizes = [len(part)",
        "sizes = [2 * len(part)",
    ),
    Fault(
        "B17 positions counted with the padding",
        "KLAttribution",
        "kl_attribution:_by_position",
        "rows.own_positions.clamp(min=0)",
        "torch.arange(gained.shape[2])",
        "padded",
    ),
    Fault(
        "B18 components of the deltas of another layer",
        "KLAttribution",
        "kl_attribution:_by_output",
        "return names, OutputKL(",
        "names = [name.replace('L0', 'Lx').replace('L1', 'L0').replace('Lx', 'L1') for name in names]; return names, OutputKL(",
    ),
)
