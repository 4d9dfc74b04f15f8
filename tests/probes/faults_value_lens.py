"""Faults of ValueLens's newer parts: V of the policy, tuned lens, and the choice of a penalty."""

from tests.probes.planting import Fault

READ = "value_readings:read_translated"
POLICY = "value_lens_probe:ValueLens._against_the_policy"
SAMPLED = "value_lens_probe:ValueLens._sampled"

VALUE_FAULTS = tuple(
    Fault(name, "ValueLens", where, old, new)
    for name, where, old, new in (
        (
            "V16 continuations of the rows before",
            SAMPLED,
            "for row in rows]",
            "for row in (at - 1 for at in rows)]",
        ),
        (
            "V17 prefixes without their first token",
            SAMPLED,
            ".tolist() for row",
            "[1:].tolist() for row",
        ),
        (
            "V18 error of one continuation, not of the mean",
            "policy_value:policy_values",
            "rewards.std(1) / continuations**0.5",
            "rewards.std(1)",
        ),
        (
            "V19 the grammar's value for the policy's",
            POLICY,
            '"v_policy": found.mean',
            '"v_policy": of_grammar[:, pos].double()',
        ),
        (
            "V20 continuations of the reference",
            SAMPLED,
            "seen.ctx.policy,\n",
            "type(seen.ctx.policy)(seen.ctx.reference, seen.ctx.policy.value_head),\n",
        ),
        (
            "V21 sampled without the run's settings",
            SAMPLED,
            "SamplingSpec.from_args(args, tokenizer)",
            "SamplingSpec(args.gen_len)",
        ),
        (
            "V22 translator fitted to held-out texts too",
            READ,
            "(residuals[at, :cut], residuals[-1, :cut], mask[:cut])",
            "(residuals[at], residuals[-1], mask)",
        ),
        (
            "V23 sites of the tuned lens in reverse",
            READ,
            '"tuned_sites": list(translators)',
            '"tuned_sites": list(translators)[::-1]',
        ),
        (
            "V24 translator without its intercept",
            "tuned_lens:Affine.__call__",
            " + self.bias[..., None, :].to(x)",
            "",
        ),
        (
            "V25 penalty judged on the fitted texts",
            "tuned_lens:ridge_errors",
            "(slice(fit), slice(fit, None))",
            "(slice(fit), slice(fit))",
        ),
        ("V26 the worst penalty", "tuned_lens:best_ridge", "argmin", "argmax"),
        ("V27 lenses at the position before", POLICY, "x[rows, pos]", "x[rows, pos - 1]"),
        (
            "V28 head at the position behind",
            POLICY,
            '["values"][rows, pos]',
            '["values"][rows, pos + 1]',
        ),
        (
            "V29 labels of the estimates turned by one",
            POLICY,
            '"estimates": list(estimates)',
            '"estimates": [*estimates][1:] + [*estimates][:1]',
        ),
        (
            "V30 the noise without its square",
            "policy_value:reliability",
            "standard_error.square()",
            "standard_error",
        ),
        (
            "V31 rows of the prefixes one too low",
            POLICY,
            '"prefix_rows": rows',
            '"prefix_rows": [row - 1 for row in rows]',
        ),
        (
            "V32 the grammar's value one position early",
            POLICY,
            "of_grammar[:, pos].where",
            "of_grammar[:, pos - 1].where",
        ),
        (
            "V33 R2 of raw and tuned swapped",
            READ,
            'f"{name}_r2"',
            '{"raw": "tuned", "tuned": "raw"}[name] + "_r2"',
        ),
        (
            "V34 head's correlation with another text's value",
            "value_readings:read_target",
            "correlation_with(own, value, mask",
            "correlation_with(own.roll(1, 0), value, mask",
        ),
        (
            "V35 tuned lens stored of other rows",
            "value_lens_probe:ValueLens.observe",
            "states[site][: self.keep]",
            "states[site][1 : self.keep + 1]",
        ),
        (
            "V36 one reward for all continuations",
            "policy_value:policy_values",
            "rewards.mean(1)",
            "rewards[:, 0]",
        ),
        (
            "V37 interval of the correlation upside down",
            "value_readings:read_target",
            '"head_correlation", found)',
            '"head_correlation", type(found)(found.value, found.high, found.low, 1))',
        ),
    )
)
