# ruff: noqa: E501 (a fault is a row of a table)
"""Faults that are planted in the probes, one line each, to see whether a record's checks tell."""

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import NamedTuple


class Fault(NamedTuple):
    """One changed line of a probe.

    Args:
        name: what is wrong.
        probe: the kind whose record is wrong.
        where: the function, as module:qualified.name below rlhf_lab.probes.
        old, new: the text that is replaced, once.
        run: which of the runs of the test shows it.
    """

    name: str
    probe: str
    where: str
    old: str
    new: str
    run: str = "plain"


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Run with the function changed: its code is exchanged, so that all who call it are served."""
    module_name, _, path = fault.where.partition(":")
    module = import_module(f"rlhf_lab.probes.{module_name}")
    found = module
    for part in path.split("."):
        found = inspect.getattr_static(found, part)
    function = inspect.unwrap(getattr(found, "fget", None) or getattr(found, "__func__", found))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(fault.old) >= 1, f"{fault.name}: {fault.where} has no {fault.old!r}"
    changed = source[source.index("def ") :].replace(fault.old, fault.new, 1)
    names: dict[str, object] = {}
    exec(compile(changed, fault.name, "exec"), vars(module), names)
    whole = function.__code__
    function.__code__ = names[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = whole


OBSERVE_HEATMAP = "text_heatmap:TextHeatmap.observe"
NUMBERS = "text_heatmap:TextHeatmap._numbers"
OBSERVE_KL = "kl_by_position:KLByPosition.observe"
OBSERVE_LENS = "value_lens:ValueLens.observe"
OBSERVE_DIRECTION = "direction_probe:Direction.observe"
OBSERVE_SHIFT = "logit_shift_probe:LogitShift.observe"
OBSERVE_LEDGER = "step_ledger:StepLedger.observe"
OBSERVE_HEALTH = "run_health:RunHealth.observe"
LEDGER = "step_ledger:ledger_entries"

# The 42 faults of the review, by its labels.
REVIEWED = (
    Fault(
        "T1 value column = returns",
        "TextHeatmap",
        NUMBERS,
        '"value": rollout.samples.values',
        '"value": rollout.returns',
    ),
    Fault(
        "T2 prefix_len off by one",
        "TextHeatmap",
        OBSERVE_HEATMAP,
        '"prefix_len": samples.prefix_len',
        '"prefix_len": samples.prefix_len - 1',
    ),
    Fault(
        "T3 exact truth one state early",
        "TextHeatmap",
        "text_heatmap:_truth",
        "samples.prefix_len)",
        "samples.prefix_len - 1)\n    values, advantages, defined = values[:, :-1], advantages[:, :-1], defined[:, :-1]",
    ),
    Fault(
        "T4 log_ratio forgets the reference's temperature",
        "TextHeatmap",
        "text_heatmap:sampled_log_ratio",
        "logits / observation.args.temperature",
        "logits",
    ),
    Fault(
        "T5 advantage column negated",
        "TextHeatmap",
        NUMBERS,
        '"advantage": rollout.advantages',
        '"advantage": -rollout.advantages',
    ),
    Fault(
        "R1 beta_eff forgets sigma_A",
        "RunHealth",
        "run_health:effective_beta",
        "beta *= advantage_std",
        "beta *= 1",
    ),
    Fault(
        "R2 sigma_A without mask, halved",
        "RunHealth",
        OBSERVE_HEALTH,
        "F.masked_std(rollout.advantages, whitened).item()",
        "rollout.advantages.std().item() / 2",
    ),
    Fault(
        "R3 optimum at 1 / beta",
        "RunHealth",
        "run_health:_optimum",
        "truth.optimum(beta)",
        "truth.optimum(1 / beta)",
    ),
    Fault(
        "K1 estimator's states off by one",
        "KLByPosition",
        "kl_by_position:_both_logits",
        "samples.prefix_len - 1, -1",
        "samples.prefix_len, None",
    ),
    Fault(
        "K2 policy and reference swapped in k1 to k3",
        "KLByPosition",
        OBSERVE_KL,
        "estimates_by_position(logprobs, ref_logprobs,",
        "estimates_by_position(ref_logprobs, logprobs,",
    ),
    Fault(
        "K3 slot names off by one",
        "KLByPosition",
        "kl_by_position:_truth",
        "slot_names(seq)[prefix_len:]",
        "slot_names(seq)[prefix_len - 1 : -1]",
    ),
    Fault(
        "K4 stored KL rolled by one position",
        "KLByPosition",
        OBSERVE_KL,
        '"kl": decimals(by_position)',
        '"kl": decimals(by_position.roll(1))',
    ),
    Fault(
        "K5 information rolled by one",
        "KLByPosition",
        "kl_by_position:_truth",
        "information[prefix_len:], 9",
        "information[prefix_len:].roll(1), 9",
    ),
    Fault(
        "V1 reference's residuals for the policy's",
        "ValueLens",
        "value_lens:ValueLens._states",
        "{site: seen.acts[site] for site in sites}",
        "{site: seen.reference_acts[site] for site in sites}",
    ),
    Fault(
        "V2 site labels in another order than rows",
        "ValueLens",
        OBSERVE_LENS,
        '{"sites": sites}',
        '{"sites": sites[::-1]}',
    ),
    Fault(
        "V3 R2 on the fitted rows",
        "ValueLens",
        "value_lens:held_out_fits",
        "(slice(cut), slice(cut, None))",
        "(slice(cut), slice(cut))",
    ),
    Fault(
        "V4 exact value one position late",
        "ValueLens",
        "value_lens:_target",
        "return *seen.truth.values(tokens),",
        "found, mask = seen.truth.values(tokens)\n    return found.roll(1, 1), mask,",
    ),
    Fault(
        "V5 lens of early layers in reverse order",
        "ValueLens",
        OBSERVE_LENS,
        '{"lens": lens.float()}',
        '{"lens": torch.cat([lens[:-1].flip(0), lens[-1:]]).float()}',
    ),
    Fault(
        "D1 layer l's row is layer l + 1",
        "Direction",
        OBSERVE_DIRECTION,
        "for site in seen.acts]",
        "for site in [*seen.acts][1:] + [*seen.acts][-1:]]",
    ),
    Fault(
        "D2 held rows in the fit",
        "Direction",
        OBSERVE_DIRECTION,
        "fitted = fit_each_site(ours.x, ours.labels",
        "fitted = fit_each_site(x, labels",
    ),
    Fault(
        "D3 threshold at a class mean",
        "Direction",
        "direction:fit_direction",
        "(positive + negative) / 2 * direction",
        "positive * direction",
    ),
    Fault(
        "D4 direction replaced by noise",
        "Direction",
        "direction:fit_direction",
        "    direction = direction / direction.norm",
        "    direction = torch.randn(direction.shape, generator=torch.Generator().manual_seed(1)).double()\n    direction = direction / direction.norm",
    ),
    Fault(
        "D5 projection on the policy's axis, called the reference's",
        "Direction",
        OBSERVE_DIRECTION,
        "project(held, first.direction)",
        "project(held, fitted.direction)",
    ),
    Fault(
        "L1 b_O dropped",
        "LogitShift",
        "logit_shift:residual_components",
        "block.attn.b_O.double().expand_as(parts[0])",
        "torch.zeros_like(parts[0])",
    ),
    Fault(
        "L2 final scale dropped",
        "LogitShift",
        "logit_shift:attribute_logits",
        ' / acts["ln_final.hook_scale"].double()[:, 0]',
        "",
    ),
    Fault(
        "L3 heads of a layer in reverse",
        "LogitShift",
        "logit_shift:residual_components",
        "parts += list(heads)",
        "parts += list(heads)[::-1]",
    ),
    Fault(
        "L4 position of the word itself",
        "LogitShift",
        "attachment:_at_sites",
        "act[:, pos]",
        "act[:, pos + 1]",
    ),
    Fault(
        "L5 words swapped",
        "LogitShift",
        OBSERVE_SHIFT,
        "for text in (self.word, self.other)",
        "for text in (self.other, self.word)",
    ),
    Fault(
        "L6 mlp and b_O rows swapped",
        "LogitShift",
        "logit_shift:residual_components",
        'names += [f"L{layer} b_O", f"L{layer} mlp"]',
        'names += [f"L{layer} mlp", f"L{layer} b_O"]',
    ),
    Fault(
        "W1 spectrum ascending",
        "WeightDelta",
        "weight_delta:spectrum",
        ".sqrt().flip(0), vectors.flip(1)",
        ".sqrt(), vectors",
    ),
    Fault(
        "W2 policy compared with itself",
        "WeightDelta",
        "weight_delta:WeightDelta.observe",
        "dict(reference.named_parameters())",
        "effective_weights(model)",
    ),
    Fault(
        "W3 stable rank from s",
        "WeightDelta",
        "weight_delta:describe_spectrum",
        "(total / energy[0]).item()",
        "(s.sum() / s[0]).item()",
    ),
    Fault(
        "W4 adapters ignored in a LoRA run",
        "WeightDelta",
        "weight_delta:WeightDelta.observe",
        "effective_weights(model).items()",
        "((n, before[n]) for n in effective_weights(model))",
        "lora",
    ),
    Fault(
        "W5 overlap with the wrong singular side",
        "WeightDelta",
        "weight_delta:describe_delta",
        "wide = delta.shape[1] >= delta.shape[0]",
        "wide = delta.shape[1] > delta.shape[0]",
    ),
    Fault("S1 mask forgotten", "StepLedger", LEDGER, "F.zero_masked(column, mask)", "column"),
    Fault(
        "S2 clipped column, wrong sign",
        "StepLedger",
        "step_ledger:_surrogate",
        "(clipped < ratio * whitened)",
        "(clipped > ratio * whitened)",
    ),
    Fault(
        "S3 max for min in the surrogate's shares",
        "StepLedger",
        "step_ledger:_surrogate",
        "surrogate_shares(logprobs, minibatch, args)",
        "torch.maximum(clipped, ratio * whitened) / minibatch.mask.sum()",
    ),
    Fault(
        "S4 value column = old values",
        "StepLedger",
        LEDGER,
        '"value": out.values',
        '"value": minibatch.values',
    ),
    Fault(
        "S5 whitened column = raw advantages",
        "StepLedger",
        "step_ledger:_surrogate",
        '"whitened": whitened',
        '"whitened": advantages',
    ),
    Fault(
        "S6 prefix_len + 1",
        "StepLedger",
        OBSERVE_LEDGER,
        '"prefix_len": minibatch.prefix_len',
        '"prefix_len": minibatch.prefix_len + 1',
    ),
    Fault(
        "S7 shares given to other rows",
        "StepLedger",
        LEDGER,
        'entries["share"] = entries["surrogate"]',
        'entries["share"] = entries["surrogate"].roll(1, 0)',
    ),
    Fault(
        "S8 entropy's sign",
        "StepLedger",
        LEDGER,
        "args.ent_coef * entries",
        "-args.ent_coef * entries",
    ),
)

# Others, written down before it was looked whether a check tells.
OTHERS = (
    Fault(
        "H1 kl column = k1 of the samples",
        "TextHeatmap",
        NUMBERS,
        '"kl": rollout.kl',
        '"kl": sampled_log_ratio(rollout, n, seen)',
    ),
    Fault(
        "H2 entropy in bits",
        "TextHeatmap",
        NUMBERS,
        '"entropy": rollout.entropy',
        '"entropy": rollout.entropy / 0.6931',
    ),
    Fault(
        "H3 the last samples' numbers",
        "TextHeatmap",
        NUMBERS,
        "everything[name][:n]",
        "everything[name][-n:]",
    ),
    Fault(
        "H4 tokens of other samples",
        "TextHeatmap",
        OBSERVE_HEATMAP,
        "for row in samples.tokens[:n]]",
        "for row in samples.tokens[-n:]]",
    ),
    Fault(
        "H5 processed rewards for raw ones",
        "TextHeatmap",
        OBSERVE_HEATMAP,
        "decimals(rollout.raw_rewards[:n])",
        "decimals(rollout.rewards[:n])",
    ),
    Fault(
        "H6 mask one token short",
        "TextHeatmap",
        OBSERVE_HEATMAP,
        '{"mask": samples.mask[:n]}',
        '{"mask": samples.mask[:n].roll(-1, 1)}',
    ),
    Fault(
        "H7 log_ratio with the wrong sign",
        "TextHeatmap",
        "text_heatmap:sampled_log_ratio",
        "return samples.logprobs[:rows] - ",
        "return -samples.logprobs[:rows] + ",
    ),
    Fault(
        "H8 return column = advantages",
        "TextHeatmap",
        NUMBERS,
        '"return": rollout.returns',
        '"return": rollout.advantages',
    ),
    Fault(
        "H9 true advantage and value swapped",
        "TextHeatmap",
        "text_heatmap:_truth",
        '{"true_value": values, "true_advantage": advantages,',
        '{"true_value": advantages, "true_advantage": values,',
    ),
    Fault(
        "H10 truth's mask all True",
        "TextHeatmap",
        "text_heatmap:_truth",
        '"truth_mask": defined}',
        '"truth_mask": torch.ones_like(defined)}',
    ),
    Fault(
        "H11 a blank lost in spelling",
        "TextHeatmap",
        "text_heatmap:spell_tokens",
        "text[len(before) :] if",
        "text[len(before) :].strip() if",
    ),
    Fault(
        "R4 standard deviation of processed rewards",
        "RunHealth",
        OBSERVE_HEALTH,
        "advantage_std, report.reward_std,",
        "advantage_std, rollout.rewards.std().item(),",
    ),
    Fault(
        "R5 advantage_std of whitened advantages",
        "RunHealth",
        OBSERVE_HEALTH,
        "values |= {",
        "advantage_std = 1.0\n    values |= {",
    ),
    Fault(
        "R6 KL per token under KL per sequence",
        "RunHealth",
        OBSERVE_HEALTH,
        "values |= {",
        'values["kl_per_sequence"] = report.kl_per_token\n    values |= {',
    ),
    Fault(
        "R7 gold reward for the reward",
        "RunHealth",
        OBSERVE_HEALTH,
        "values |= {",
        'values["reward_std"] = report.mean_reward\n    values |= {',
    ),
    Fault(
        "R8 optimum's KL and reward swapped",
        "RunHealth",
        "run_health:_optimum",
        '"optimal_reward": point.reward, "optimal_kl_per_sequence": point.kl_per_sequence',
        '"optimal_reward": point.kl_per_sequence, "optimal_kl_per_sequence": point.reward',
    ),
    Fault(
        "R9 kl_coef squared",
        "RunHealth",
        "run_health:effective_beta",
        "beta = kl_coef",
        "beta = kl_coef * kl_coef",
    ),
    Fault(
        "R10 grad norm is the clip fraction",
        "RunHealth",
        OBSERVE_HEALTH,
        "values |= {",
        'values["grad_norm"] = report.clip_fraction\n    values |= {',
    ),
    Fault(
        "R11 explained variance from 1 - ratio of stds",
        "RunHealth",
        OBSERVE_HEALTH,
        "values |= {",
        'values["explained_variance"] = 1 - (1 - report.explained_variance) ** 0.5\n    values |= {',
    ),
    Fault(
        "K6 mean over all rows, mask forgotten",
        "KLByPosition",
        OBSERVE_KL,
        "F.masked_mean(kl, mask, dim=0)",
        "kl.mean(0)",
    ),
    Fault(
        "K7 k2 under k3's name",
        "KLByPosition",
        OBSERVE_KL,
        "zip(KINDS, means, strict=True)",
        'zip(("k1", "k3", "k2"), means, strict=True)',
    ),
    Fault(
        "K8 biased variance",
        "KLByPosition",
        "kl_by_position:estimates_by_position",
        "F.masked_var(e, mask, dim=0)",
        "F.masked_var(e, mask, dim=0, unbiased=False)",
    ),
    Fault(
        "K9 temperature forgotten",
        "KLByPosition",
        "kl_by_position:_both_logits",
        ".float() / temperature",
        ".float()",
    ),
    Fault(
        "K10 reference's logits of other rows",
        "KLByPosition",
        "kl_by_position:_both_logits",
        "rollout.ref_residuals[:n]",
        "rollout.ref_residuals[:n].roll(1, 0)",
    ),
    Fault(
        "K11 tokens counted over all rows",
        "KLByPosition",
        OBSERVE_KL,
        "mask.sum(0).tolist()}",
        "[len(mask)] * mask.shape[1]}",
    ),
    Fault(
        "K12 estimators without the mask",
        "KLByPosition",
        OBSERVE_KL,
        "mask[:n])\n",
        "torch.ones_like(mask[:n]))\n",
    ),
    Fault(
        "K13 information of the whole review, cut at the front",
        "KLByPosition",
        "kl_by_position:_truth",
        "information[prefix_len:], 9",
        "information[: seq - prefix_len], 9",
    ),
    Fault(
        "V6 lens without the norm",
        "ValueLens",
        "value_lens:value_lens",
        "normalize_residual(policy.base_model, residuals)",
        "residuals",
    ),
    Fault(
        "V7 norm's mean left in",
        "ValueLens",
        "value_lens:normalize_residual",
        'in ("LN", "LNPre")',
        "in ()",
    ),
    Fault(
        "V8 lens of other rows",
        "ValueLens",
        OBSERVE_LENS,
        "residuals[:, : self.keep])",
        "residuals[:, : self.keep].roll(1, 1))",
    ),
    Fault(
        "V9 intercept forgotten",
        "ValueLens",
        "value_lens:held_out_fits",
        "[..., 0] + intercept[..., None]",
        "[..., 0]",
    ),
    Fault(
        "V10 R2 against 0 in place of the mean",
        "ValueLens",
        "value_lens:r_squared",
        "total = ((y - mean)",
        "total = ((y - 0 * mean)",
    ),
    Fault(
        "V11 slot names off by one",
        "ValueLens",
        "value_lens:_target",
        "slot_names(tokens.shape[1])",
        "slot_names(tokens.shape[1] + 1)[1:]",
    ),
    Fault(
        "V12 head's R2 with y and prediction swapped",
        "ValueLens",
        OBSERVE_LENS,
        "r_squared(model_values.T, target.T, mask.T)",
        "r_squared(target.T, model_values.T, mask.T)",
    ),
    Fault(
        "V13 layers of R2 in reverse",
        "ValueLens",
        OBSERVE_LENS,
        '"r2": decimals(r2, 4)',
        '"r2": decimals(r2.flip(0), 4)',
    ),
    Fault(
        "V14 every reader penalised as by 1",
        "ValueLens",
        "value_lens:fit_ridge",
        "(ridge * variance)",
        "variance",
    ),
    Fault(
        "V15 the policy's residuals for the critic's",
        "ValueLens",
        "value_lens:ValueLens._states",
        "capture_activations(policy.critic,",
        "capture_activations(policy.base_model,",
        "critic",
    ),
    Fault(
        "D6 accuracy on the fitted rows",
        "Direction",
        "direction_probe:_accuracy",
        "project(split.held, fitted.direction)\n    return decimals(accuracy(along, fitted.threshold, split.held_labels), 4)",
        "project(split.x, fitted.direction)\n    return decimals(accuracy(along, fitted.threshold, split.labels), 4)",
    ),
    Fault(
        "D7 AUC of the other class", "Direction", "direction_probe:auc", "(gap > 0)", "(gap < 0)"
    ),
    Fault(
        "D8 cosine of the axis with itself",
        "Direction",
        OBSERVE_DIRECTION,
        "(fitted.direction * first.direction)",
        "(fitted.direction * fitted.direction)",
    ),
    Fault(
        "D9 positive and negative swapped",
        "Direction",
        OBSERVE_DIRECTION,
        '"positive_projection": decimals(moved[..., positive]',
        '"positive_projection": decimals(moved[..., ~positive]',
    ),
    Fault(
        "D10 shuffled control sees its held labels",
        "Direction",
        "direction_probe:_controls",
        "shuffled = fit_each_site(x, control.labels, method)",
        "shuffled = fit_each_site(control.held, control.held_labels, method)",
    ),
    Fault(
        "D11 Bayes' rule of the fitted rows",
        "Direction",
        "direction_probe:_against_bayes",
        "belief[cut:] > 0.5",
        "belief[: len(labels)] > 0.5",
    ),
    Fault(
        "D12 axis of the reference's activations",
        "Direction",
        OBSERVE_DIRECTION,
        "for acts in (seen.acts, seen.reference_acts)",
        "for acts in (seen.reference_acts, seen.reference_acts)",
    ),
    Fault(
        "D13 positions rolled by one",
        "Direction",
        OBSERVE_DIRECTION,
        '"accuracy": _accuracy(ours, fitted)',
        '"accuracy": [row[1:] + row[:1] for row in _accuracy(ours, fitted)]',
    ),
    Fault(
        "D14 informed everywhere",
        "Direction",
        "direction_probe:_against_bayes",
        '"informed": informed.tolist()',
        '"informed": [True] * len(informed)',
    ),
    Fault(
        "L7 centring forgotten",
        "LogitShift",
        "logit_shift:attribute_logits",
        'in ("LN", "LNPre")',
        "in ()",
    ),
    Fault("L8 gain forgotten", "LogitShift", "logit_shift:attribute_logits", "gain * u", "u"),
    Fault(
        "L9 norm bias and b_U swapped",
        "LogitShift",
        "logit_shift:attribute_logits",
        '"norm bias", "b_U"]',
        '"b_U", "norm bias"]',
    ),
    Fault(
        "L10 shift = reference - policy",
        "LogitShift",
        OBSERVE_SHIFT,
        "shift = now.rows - before.rows\n    measured = now.logit_difference - before.logit_difference",
        "shift = before.rows - now.rows\n    measured = before.logit_difference - now.logit_difference",
    ),
    Fault(
        "L11 the policy's rows under the reference's name",
        "LogitShift",
        OBSERVE_SHIFT,
        '"reference": decimals(before.rows.mean(1))',
        '"reference": decimals(now.rows.mean(1))',
    ),
    Fault(
        "L12 rows of layer 0 and 1 swapped",
        "LogitShift",
        "logit_shift:residual_components",
        "for layer, block in enumerate(model.blocks):",
        "for layer, block in zip(range(len(model.blocks))[::-1], list(model.blocks)[::-1]):",
    ),
    Fault(
        "L13 heads named from 1",
        "LogitShift",
        "logit_shift:residual_components",
        '[f"L{layer}H{head}" for head',
        '[f"L{layer}H{head + 1}" for head',
    ),
    Fault(
        "L14 embedding and positions swapped",
        "LogitShift",
        "logit_shift:residual_components",
        'names.append("pos_embed")',
        'names[:] = ["pos_embed", "embed"]',
    ),
    Fault(
        "L15 median for the mean",
        "LogitShift",
        OBSERVE_SHIFT,
        '"shift": decimals(shift.mean(1))',
        '"shift": decimals(shift.median(1).values)',
    ),
    Fault(
        "W6 k90 at 99 %",
        "WeightDelta",
        "weight_delta:describe_spectrum",
        "ENERGY * total",
        "0.99 * total",
    ),
    Fault(
        "W7 relative to the new weight",
        "WeightDelta",
        "weight_delta:describe_delta",
        "before.double().norm()",
        "delta.norm()",
    ),
    Fault(
        "W8 changed for unchanged",
        "WeightDelta",
        "weight_delta:unchanged_fraction",
        "(before == after).double()",
        "(before != after).double()",
    ),
    Fault(
        "W9 names rolled by one",
        "WeightDelta",
        "weight_delta:WeightDelta.observe",
        '{"total_norm": total, "rows": rows}',
        '{"total_norm": total, "rows": [row | {"name": other["name"]} for row, other in zip(rows, rows[1:] + rows[:1])]}',
    ),
    Fault(
        "W10 total is the largest",
        "WeightDelta",
        "weight_delta:WeightDelta.observe",
        'sum(row["norm"] ** 2 for row in rows) ** 0.5',
        'max(row["norm"] for row in rows)',
    ),
    Fault(
        "W11 heads below each other",
        "WeightDelta",
        "weight_delta:as_matrix",
        '"head d_model d_head -> d_model (head d_head)"',
        '"head d_model d_head -> (head d_model) d_head"',
    ),
    Fault(
        "W12 overlap with one word only",
        "WeightDelta",
        "weight_delta:WeightDelta.observe",
        "unembedding[:, word] - unembedding[:, other]",
        "unembedding[:, word]",
    ),
    Fault(
        "W13 energy on the wrong side",
        "WeightDelta",
        "weight_delta:describe_delta",
        "(delta @ unit).square()",
        "(delta @ unit).abs()",
    ),
    Fault(
        "W14 weights of half the parameters",
        "WeightDelta",
        "weight_delta:WeightDelta.observe",
        "effective_weights(model).items()",
        "list(effective_weights(model).items())[::2]",
    ),
    Fault(
        "S9 ratio inverted",
        "StepLedger",
        "step_ledger:_surrogate",
        "F.policy_ratio(logprobs, minibatch.logprobs)",
        "F.policy_ratio(minibatch.logprobs, logprobs)",
    ),
    Fault(
        "S10 value loss without the half",
        "StepLedger",
        "step_ledger:_value_losses",
        "0.5 * args.vf_coef",
        "args.vf_coef",
    ),
    Fault(
        "S11 tokens of other rows",
        "StepLedger",
        OBSERVE_LEDGER,
        "for row in minibatch.tokens]",
        "for row in minibatch.tokens.flip(0)]",
    ),
    Fault(
        "S12 old and new log-probs swapped",
        "StepLedger",
        "step_ledger:_surrogate",
        '"old_logprob": minibatch.logprobs,\n        "logprob": logprobs',
        '"old_logprob": logprobs,\n        "logprob": minibatch.logprobs',
    ),
    Fault(
        "S13 KL of the wrong order",
        "StepLedger",
        "step_ledger:_penalized_kl",
        "F.kl_per_token(out.logits, out.ref_logits)",
        "F.kl_per_token(out.ref_logits, out.logits)",
    ),
    Fault(
        "S14 mask inverted",
        "StepLedger",
        OBSERVE_LEDGER,
        '{"mask": minibatch.mask}',
        '{"mask": ~minibatch.mask}',
    ),
    Fault(
        "S15 mean over all positions",
        "StepLedger",
        LEDGER,
        "bonus / mask.sum()",
        "bonus / mask.numel()",
    ),
    Fault(
        "S16 return column = advantages",
        "StepLedger",
        LEDGER,
        '"return": minibatch.returns',
        '"return": minibatch.advantages',
    ),
    Fault(
        "S17 entropy column in bits, the term as it was",
        "StepLedger",
        LEDGER,
        "return {name: F.zero_masked(column, mask) for name, column in entries.items()}",
        'entries["entropy"] = entries["entropy"] / 0.6931\n    return {name: F.zero_masked(column, mask) for name, column in entries.items()}',
    ),
    Fault(
        "S18 kl_penalty without its weight",
        "StepLedger",
        "step_ledger:_sums",
        '"kl_penalty": kl_coef * sums["kl"] / n',
        '"kl_penalty": sums["kl"] / n',
    ),
    Fault(
        "D15 frozen reader with the policy's threshold",
        "Direction",
        OBSERVE_DIRECTION,
        '"accuracy_frozen": _accuracy(ours, first)',
        '"accuracy_frozen": _accuracy(ours, fitted)',
    ),
    Fault(
        "D16 floor from one half twice",
        "Direction",
        "direction_probe:_by_halves",
        "for start in (0, 1)]",
        "for start in (0, 0)]",
    ),
    Fault(
        "D17 control judged on true labels",
        "Direction",
        "direction_probe:_controls",
        "_accuracy(control, shuffled)",
        "_accuracy(split, Fitted(-shuffled.direction, -shuffled.threshold))",
    ),
    Fault(
        "D18 nothing ablated",
        "Direction",
        "direction_probe:_by_halves",
        "ablate(acts, axis)",
        "acts",
    ),
    Fault(
        "D19 held rows not erased",
        "Direction",
        "direction_probe:_by_halves",
        "other, erase(held)",
        "other, held",
    ),
    Fault(
        "D20 discriminant of the fitted rows",
        "Direction",
        OBSERVE_DIRECTION,
        '"accuracy_lda": _accuracy(ours,',
        '"accuracy_lda": _accuracy(ours._replace(held=ours.x, held_labels=ours.labels),',
    ),
    Fault(
        "L16 own and inherited swapped",
        "LogitShift",
        OBSERVE_SHIFT,
        "causes = split_shift(*ends, is_centered(model.ln_final))._asdict()",
        "causes = split_shift(*ends, is_centered(model.ln_final))._asdict()\n        causes |= {'own_weights': causes['inherited'], 'inherited': causes['own_weights']}",
    ),
    Fault(
        "L17 weights at the wrong corners",
        "LogitShift",
        "shift_split:split_shift",
        "by_weights = (after.fed - before.parts) + (after.parts - before.fed)",
        "by_weights = (before.fed - before.parts) + (after.parts - after.fed)",
    ),
    Fault(
        "L18 early and late swapped",
        "LogitShift",
        "shift_split:split_shift",
        "early, late = s0 / 3 + s1 / 6, s1 / 3 + s0 / 6",
        "late, early = s0 / 3 + s1 / 6, s1 / 3 + s0 / 6",
    ),
    Fault(
        "L19 the norm's gain left out of the reader",
        "LogitShift",
        "shift_split:_end",
        "gain * u, torch",
        "u, torch",
    ),
    Fault(
        "L20 blocks that are fed their own streams",
        "LogitShift",
        "shift_split:ends_of",
        "reversed(streams)",
        "streams",
    ),
    Fault(
        "L21 constants in the wrong order",
        "LogitShift",
        "shift_split:_end",
        "torch.stack([bias, b_u])",
        "torch.stack([b_u, bias])",
    ),
    Fault(
        "L22 the scale's share with thirds alone",
        "LogitShift",
        "shift_split:split_shift",
        "(x[0][1] + x[1][0]) / 6)",
        "(x[0][1] + x[1][0]) / 3)",
    ),
    Fault(
        "L23 only attention is fed",
        "LogitShift",
        "shift_split:_there",
        "BLOCK_INPUTS[: 1 + has_middle]",
        "BLOCK_INPUTS[:1]",
    ),
)
