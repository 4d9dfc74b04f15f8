"""Closed form of the unembedding's rows in StepInfluence: what every token's logits would do."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.probes.probe import Check, Observation
from rlhf_lab.probes.step_influence import ByWeight
from rlhf_lab.probes.step_shares import with_weights
from rlhf_lab.training.capture import capture_activations
from tests.probes.audit.anew import as_float64, relative_gap
from tests.probes.audit.step_ledger import whitened

ROW_ROUNDING = {"fp32": 1e-3, "tf32": 0.05, "bf16": 0.2}
W_U, B_U = "base_model.unembed.W_U", "base_model.unembed.b_U"
ReadOutRows = Float[Tensor, "minibatch gen"]


def check_read_out(
    seen: Observation,
    stored: Float[Tensor, "term minibatch gen"],
    of_group: ReadOutRows,
    p: ByWeight,
    mask: Bool[Tensor, "minibatch gen"],
) -> list[Check]:
    """Hold the unembedding's rows to their closed form, element by element and term by term.

    Where the unembedding moves by p, the logits move by y = (h p_W + p_b) / T, and

    surrogate  A r 1[not clipped] (y_a - ybar) / N,   ybar = sum_v pi_v y_v
    entropy    -ent_coef sum_v pi_v log(pi_v) (y_v - ybar) / N
    KL         -kl_coef sum_v pi_v log(pi_v / ref_v) (y_v - ybar) / N
    value      0

    Terms that the run computes otherwise, by another loss or an estimated KL, are left out.
    """
    checks = [
        Check.at_most(
            "terms of the read-out sum to its rows",
            relative_gap(of_group, stored.sum(0), mask, 1e-12),
            1e-4,
        )
    ]
    terms, scale = _closed_form(seen, p, mask)
    size = max(stored.abs().max().item(), 0.1 * scale, 1e-12)
    for number, (name, found, known) in enumerate(terms):
        if found is None:
            continue
        miss = (stored[number] - found).abs()[known]
        worst = miss.max().item() / size if miss.numel() else 0.0
        title = f"the read-out's rows of the {name} are those of a closed form"
        checks.append(Check.at_most(title, worst, ROW_ROUNDING[seen.args.rounding]))
    return checks


def _closed_form(
    seen: Observation, p: ByWeight, mask: Bool[Tensor, "minibatch gen"]
) -> tuple[list[tuple[str, ReadOutRows | None, Bool[Tensor, "minibatch gen"]]], float]:
    """Of each term its name, its rows where they are known, and for which tokens.

    Then the largest change of a logit over the number of tokens: rows far below it are rounding.
    """
    args, n = seen.args, mask.sum()
    logits, ref_logits, y = _states(seen, p, mask.shape[1])
    logs, ref_logs = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    chances = logs.exp()
    away = y - (chances * y).sum(-1, keepdim=True)
    surrogate, known = _surrogate(seen, logs, away, mask)
    entropy = -args.ent_coef * (chances * logs * away).sum(-1) * mask / n
    kl = -seen.ctx.kl_coef * (chances * (logs - ref_logs) * away).sum(-1) * mask / n
    if args.kl_in == "reward":
        kl = torch.zeros_like(kl)
    elif args.kl_estimator != "exact":
        kl = None
    terms = [
        ("surrogate", surrogate, known),
        ("value loss", torch.zeros_like(entropy), mask),
        ("entropy", entropy, mask),
        ("KL", kl, mask),
    ]
    return terms, (away.abs().max() / n).item()


def _surrogate(
    seen: Observation,
    logs: Float[Tensor, "minibatch gen d_vocab"],
    away: Float[Tensor, "minibatch gen d_vocab"],
    mask: Bool[Tensor, "minibatch gen"],
) -> tuple[ReadOutRows | None, Bool[Tensor, "minibatch gen"]]:
    args, minibatch = seen.args, seen.ctx.minibatch
    own = args.policy_loss, args.loss_aggregation, args.clip_coef_high, args.dual_clip
    if own != ("ppo", "token_mean", None, None) or args.max_log_ratio or minibatch.support:
        return None, mask
    written = minibatch.tokens[:, minibatch.prefix_len :].cpu()[..., None]
    ratio = (logs.gather(-1, written)[..., 0] - as_float64(minibatch.logprobs)).exp()
    advantages = whitened(as_float64(minibatch.advantages), minibatch, args, mask)
    limited = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef) * advantages
    counts = ratio * advantages <= limited
    sure = ((ratio - 1).abs() - args.clip_coef).abs() > 1e-4
    rows = advantages * ratio * counts * away.gather(-1, written)[..., 0] * mask / mask.sum()
    return rows, mask & sure


def _states(
    seen: Observation, p: ByWeight, gen_len: int
) -> tuple[Tensor, Tensor, Float[Tensor, "minibatch gen d_vocab"]]:
    """Logits of both models before the step, and by how much the policy's move along p."""
    minibatch, before, temperature = seen.ctx.minibatch, seen.prepared, seen.args.temperature
    texts = minibatch.tokens, minibatch.attention_mask

    def capture(model: object, *sites: str) -> list[Tensor]:
        found = capture_activations(model, texts[0], sites, attention_mask=texts[1])
        return [as_float64(found[site])[:, -gen_len - 1 : -1] for site in sites]

    def unembedding(model: HookedModel) -> tuple[Tensor, Tensor]:
        """Return the input and the output of the unembedding."""
        normalized, logits = capture(model, "ln_final.hook_normalized", "logits")
        w, b = (getattr(model.ln_final, name, None) for name in "wb")
        scaled = normalized if w is None else normalized * as_float64(w)
        return scaled if b is None else scaled + as_float64(b), logits

    policy = with_weights(seen.ctx.policy, before.params, lambda x: unembedding(x.base_model))
    (ref,) = capture(seen.ctx.reference, "logits")
    y = policy[0] @ as_float64(p[W_U]) + as_float64(p.get(B_U, 0.0))
    return policy[1] / temperature, ref / temperature, y / temperature
