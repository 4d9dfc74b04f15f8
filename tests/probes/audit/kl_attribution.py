"""Checks of KLAttribution's record: the KL moved along one component or one group by its name."""

import re
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.models import effective_weights, merged_copy
from rlhf_lab.models.hooked_model import HookedModel, without_hooks
from rlhf_lab.models.padding import pad_rows
from rlhf_lab.models.reference import model_where_exact
from rlhf_lab.probes.probe import Check, Observation, Record
from rlhf_lab.probes.text_rows import TextRows
from tests.probes.audit.anew import (
    as_float64,
    component_names,
    log_probs_by_hand,
    relative_gap,
    unpadded_row,
)
from tests.probes.audit.intervals import check_widths

TEXTS_ALONE, HEADS_SILENT, ROWS_TOGETHER = 2, 8, 8
STEP = 0.02
"""Of a central difference: a share of the way between the models."""


@torch.no_grad()
def bind_kl_attribution(seen: Observation, record: Record, rows: TextRows) -> list[Check]:
    """Hold stored rows and names to the KL of models that are moved along what a name stands for.

    Args:
        rows: the sequences that were looked at.
    """
    stored, values = record.tensors, record.values
    rng = np.random.default_rng(seen.ctx.phase)
    output = as_float64(stored["output"])
    means = relative_gap(values["output"], output.mean(1))
    means = max(means, relative_gap(values["kl"], as_float64(stored["kl"]).mean()))
    sums = relative_gap(as_float64(stored["by_position"]).sum(1), output.mean(1))
    checks = [
        Check.at_most("stored means are those of the stored rows", means, 1e-4),
        Check.at_most("positions sum to the rows", sums, 1e-4),
        _integral("output", stored["output"][:-1], stored["output_nodes"]),
    ]
    if "output_low" in values:
        x, ends = output.T.numpy(), (values["output_low"], values["output_high"])
        mask = np.ones(x.shape, dtype=bool)
        checks.append(check_widths("the KL by output", ends, x, mask))
    models = [model_where_exact(m) for m in (seen.ctx.reference, seen.ctx.policy.base_model)]
    texts = [unpadded_row(rows, row) for row in range(min(TEXTS_ALONE, len(rows.tokens)))]
    at = [_states(rows, row) for row in range(len(texts))]
    checks.append(_positions(record, models, rows, seen.allowed(1e-3, half=0.1)))
    with without_hooks(*models):
        checks += _outputs(record, models, texts, at, rng, seen.allowed(1e-3, half=0.1))
    if "weights" in values:
        checks += _weights(record, models, rows, rng, seen.allowed(1e-2, half=0.3))
    return checks


def _states(rows: TextRows, row: int) -> Int[Tensor, " state"]:
    """The states of one row that count, by their place among its tokens."""
    return rows.states[row][rows.written[row]].nonzero()[:, 0].cpu()


def _positions(
    record: Record, models: Sequence[HookedModel], rows: TextRows, allowed: float
) -> Check:
    """Whether all components sum, at each place, to the mean KL of rows that are run alone."""
    found = torch.zeros(record.tensors["by_position"].shape[1], dtype=torch.float64)
    for some in torch.arange(len(rows.tokens)).split(ROWS_TOGETHER):
        kl = kl_at_states(models[1], models[0], rows, some.tolist())
        found[: kl.shape[1]] += kl.sum(0) / len(rows.tokens)
    missed = relative_gap(as_float64(record.tensors["by_position"]).sum(0), found, least=0.01)
    return Check.at_most("components sum at each position to the KL there", missed, allowed)


def _integral(what: str, rows: Tensor, nodes: Tensor) -> Check:
    """Whether stored rows are what the stored nodes integrate to."""
    weights = torch.from_numpy(np.polynomial.legendre.leggauss(len(nodes))[1] / 2)
    found = (as_float64(nodes) * weights[:, None, None]).sum(0)
    missed = relative_gap(rows, found, least=0.01)
    return Check.at_most(f"{what}: rows are the integral of their nodes", missed, 1e-4)


def _place(node: int, n: int) -> float:
    return float(np.polynomial.legendre.leggauss(n)[0][node] + 1) / 2


def _outputs(
    record: Record,
    models: Sequence[HookedModel],
    texts: Sequence[Int[Tensor, " _"]],
    at: Sequence[Int[Tensor, " _"]],
    rng: np.random.Generator,
    allowed: float,
) -> list[Check]:
    """The KL, the read-out's share, and slopes along some components, of a few rows."""
    values, nodes = record.values, as_float64(record.tensors["output_nodes"])
    kls, of_read_out, misses, size = [], [], [], 0.01
    names = values["components"][:-1]
    heads = [at for at, name in enumerate(names) if re.fullmatch(r"L\d+H\d+", name)]
    silent = {heads[at] for at in rng.permutation(len(heads))[HEADS_SILENT:].tolist()}
    order = [at for at in range(len(names)) if at not in silent]
    node = int(rng.integers(len(nodes)))
    for row, (text, states) in enumerate(zip(texts, at, strict=True)):
        last = [_last_residual(model, text)[states] for model in models]
        reference = log_probs_by_hand(models[0], last[0])
        kl = lambda h, reference=reference: _kl(log_probs_by_hand(models[1], h), reference)
        kls.append(kl(last[1]))
        of_read_out.append(kl(last[0]))
        middle = last[0] + _place(node, len(nodes)) * (last[1] - last[0])
        size = max(size, nodes[node, :, row].abs().max().item())
        for component in order:
            name = values["components"][component]
            writes = [component_anew(model, text, name)[states] for model in models]
            step = STEP * (writes[1] - writes[0])
            slope = (kl(middle + step) - kl(middle - step)) / (2 * STEP)
            misses.append(abs(slope - nodes[node, component, row].item()))
    stored = record.tensors
    n = len(texts)
    whole = relative_gap(stored["kl"][:n], kls, least=0.01)
    read = relative_gap(stored["output"][-1, :n], of_read_out, least=0.01)
    named = values["components"] != [*component_names(models[0]), "read-out"]
    return [
        Check.at_most("the KL is that of fresh forwards", whole, allowed),
        Check.at_most("the read-out's share is its KL on the reference's stream", read, allowed),
        Check.at_most("a component's node is the KL's slope along it", max(misses) / size, allowed),
        Check.at_most("components are named in their order", float(named), 0),
    ]


def component_anew(
    model: HookedModel, text: Int[Tensor, " seq"], name: str
) -> Float[Tensor, "seq d_model"]:
    """What the component of a name writes, from a forward; a head's is lost when it is silent."""
    if name.endswith("embed"):
        return _site(model, text, f"hook_{name}")
    layer, head, part = re.fullmatch(r"L(\d+)(?:H(\d+))?(?: (\w+))?", name).groups()
    if part == "b_O":
        return as_float64(model.blocks[int(layer)].attn.b_O).expand(len(text), -1)
    if part == "mlp":
        return _site(model, text, f"blocks.{layer}.hook_mlp_out")

    def silence(z: Tensor, hook: object) -> Tensor:
        z = z.clone()
        z[:, :, int(head)] = 0
        return z

    site = f"blocks.{layer}.hook_attn_out"
    without = _site(model, text, site, (f"blocks.{layer}.attn.hook_z", silence))
    return _site(model, text, site) - without


def _site(
    model: HookedModel, text: Int[Tensor, " seq"], site: str, *hooks: tuple
) -> Float[Tensor, "seq d_model"]:
    kept: list[Tensor] = []
    keep = lambda activation, hook: kept.append(as_float64(activation)[0])
    tokens = text[None].to(next(model.parameters()).device)
    with model.hooks(fwd_hooks=[*hooks, (site, keep)]):
        model(tokens, attention_mask=torch.ones_like(tokens))
    return kept[0].expand(len(text), -1)


def _last_residual(model: HookedModel, text: Int[Tensor, " seq"]) -> Float[Tensor, "seq d_model"]:
    return _site(model, text, f"blocks.{model.cfg.n_layers - 1}.hook_resid_post")


def _kl(logs: Float[Tensor, "state d_vocab"], reference: Float[Tensor, "state d_vocab"]) -> float:
    return (logs.exp() * (logs - reference)).sum().item()


def _weights(
    record: Record,
    models: Sequence[HookedModel],
    rows: TextRows,
    rng: np.random.Generator,
    allowed: float,
) -> list[Check]:
    """A central difference of the KL of a few sequences along one group's change, by its name."""
    stored, values = record.tensors, record.values
    nodes = as_float64(stored["weight_nodes"])
    counts = torch.tensor(values["weight_parts"], dtype=torch.float64)
    means = relative_gap(values["weights"], as_float64(stored["weights"]).sum(1) / counts.sum())
    node = int(rng.integers(len(nodes)))
    name = values["groups"][int(rng.integers(len(values["groups"])))]
    before, after = (effective_weights(model) for model in models)
    place = _place(node, len(nodes))
    middle = {key: before[key] + place * (after[key] - before[key]) for key in before}
    along = {key: after[key] - before[key] for key in before}
    moved, first = merged_copy(models[0]).requires_grad_(True), range(values["weight_parts"][0])
    for key, parameter in moved.named_parameters():
        parameter.copy_(middle[key])
    with torch.enable_grad():
        kl_at_states(moved, models[0], rows, first).sum().backward()
    fine, expected = "pos_embed" in values["groups"], []
    gradients = {
        key: as_float64(p.grad) for key, p in moved.named_parameters() if p.grad is not None
    }
    for group in values["groups"]:
        shares = {k: share_of_group(group, k, along[k], moved, fine) for k in gradients}
        expected.append(sum((gradients[k] * as_float64(x)).sum() for k, x in shares.items()))
    size = max(nodes[node, :, 0].abs().max().item(), 0.01)
    miss = (torch.stack(expected) - nodes[node, :, 0]).abs().max().item() / size
    found = []
    for sign in (1, -1):
        for key, parameter in moved.named_parameters():
            share = share_of_group(name, key, along[key], moved, fine)
            parameter.copy_(middle[key] + sign * STEP * share)
        found.append(kl_at_states(moved, models[0], rows, first).sum().item())
    slope = (found[0] - found[1]) / (2 * STEP)
    at = values["groups"].index(name)
    miss = max(miss, abs(slope - nodes[node, at, 0].item()) / size)
    return [
        Check.at_most("stored means by weights are those of the rows", means, 1e-4),
        _integral("weights", stored["weights"], stored["weight_nodes"]),
        Check.at_most("a group's node is the KL's slope along its change", miss, allowed),
    ]


def kl_at_states(
    model: HookedModel, reference: HookedModel, rows: TextRows, some: Sequence[int]
) -> Float[Tensor, "row place"]:
    """The KL at the states of some rows, each from its own first token on; 0 elsewhere."""
    device = next(model.parameters()).device
    tokens, _ = pad_rows([unpadded_row(rows, row).tolist() for row in some], device)
    counts = torch.zeros(tokens.shape, dtype=torch.bool)
    for count, row in zip(counts, some, strict=True):
        count[_states(rows, row)] = True
    logs = []
    for each in (model, reference):
        with without_hooks(each):
            logits = each(tokens, attention_mask=torch.ones_like(tokens))
        logs.append(logits.cpu().double().log_softmax(-1))
    return ((logs[0].exp() * (logs[0] - logs[1])).sum(-1)).masked_fill(~counts, 0.0)


def share_of_group(
    group: str,
    weight: str,
    change: Float[Tensor, "..."],
    model: HookedModel,
    fine: bool,
) -> Float[Tensor, "..."]:
    """The part of a weight's change that the name of a group stands for."""
    nothing = torch.zeros_like(change)
    if not group.startswith("L"):
        top = weight.split(".")[0]
        return change if group == ("embed" if top == "pos_embed" and not fine else top) else nothing
    layer, shared, head, part = re.fullmatch(r"L(\d+)(?:(H|KV)(\d+))?(?: (\w+))?", group).groups()
    if not weight.startswith(f"blocks.{layer}."):
        return nothing
    module, own = weight.split(".")[2], weight.split(".")[-1].lstrip("_")
    in_mlp = module in ("mlp", "ln2")
    if part == "mlp" or part == "attn":
        return change if in_mlp == (part == "mlp") else nothing
    if in_mlp:
        return nothing
    by_head = own in ("W_Q", "b_Q", "W_O", "W_K", "W_V", "b_K", "b_V")
    if part is not None:
        of_part = (own == "b_O") if part == "b_O" else (not by_head and own != "b_O")
        return change if of_part else nothing
    is_key = own in ("W_K", "W_V", "b_K", "b_V")
    grouped = is_key and len(change) != model.cfg.n_heads
    if not by_head or grouped != (shared == "KV"):
        return nothing
    nothing[int(head)] = change[int(head)]
    return nothing
