"""ValueLens: value by layer through head, tuned lens and linear readers; value of the policy."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithCritic
from rlhf_lab.probes.policy_value import (
    PolicyValues,
    TextReward,
    correlation_with,
    policy_values,
    reliability,
)
from rlhf_lab.probes.probe import (
    RESAMPLES,
    Check,
    Observation,
    Record,
    decimals,
    interval_fields,
)
from rlhf_lab.probes.text_rows import TextProbe
from rlhf_lab.probes.tuned_lens import Affine
from rlhf_lab.probes.value_lens import RESIDUAL_SITES, value_lens
from rlhf_lab.probes.value_readings import ReadTarget, read_target, read_translated
from rlhf_lab.sampling_spec import SamplingSpec
from rlhf_lab.training.capture import capture_activations, text_at
from rlhf_lab.training.random_streams import phase_generator

FEWEST_SEQUENCES = 6
"""Below them nothing is fitted: two thirds fit, and a quarter of those choose the penalty."""


class ValueLens(TextProbe):
    """Value by layer: the head's raw and tuned lens, and regressions on the exact value.

    The head is applied to the residual of each layer (raw lens), and to an affine map of it fitted
    to give the last layer's (tuned lens); both are compared with the model's own value on held-out
    texts. Ridge regressions predict the target: the grammar's exact value for eval text of Reel,
    elsewhere, with `text="rollout"`, the phase's returns, all positions pooled. The layers are the
    policy's, or those of a separate critic.

    After some prefixes of held-out eval texts, the policy's value is estimated by continuations,
    with standard errors, and compared with head, lenses and grammar.

    Checks: the last layer's lens is the model's own value.

    Args:
        text: "eval" for exact values on Reel, "rollout" for returns.
        keep: sequences whose lens is stored token by token.
        ridge: penalty of all fits, as a fraction of the mean variance of the activations; chosen on
            held-out texts when None, separately for regressions and translators.
        prefixes: number of prefixes to continue.
        continuations: of each prefix.
        prefix_end: last position of the prefixes; when None, the second connector on Reel, and else
            the middle.
        reward: of whole texts; the grammar's reward on Reel when None.

    Raises:
        ConfigError: If the text is unknown, or a number is out of range.
    """

    name = "value_lens"
    question = "At which layer can the value of a text be read?"
    caveat = "A high R2 shows that a layer contains the value, not that the model uses it."
    exact_reward = True
    sites = (*RESIDUAL_SITES, "values")
    every = 5

    def __init__(
        self,
        text: str = "eval",
        keep: int = 4,
        ridge: float | None = None,
        prefixes: int = 16,
        continuations: int = 16,
        prefix_end: int | None = None,
        reward: TextReward | None = None,
        every: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(text, every, name)
        if prefixes < 0 or (prefixes and continuations < 2):
            raise ConfigError(
                f"prefixes={prefixes} and continuations={continuations} of {self.name} must be at "
                "least 0 and 2; one continuation has no standard error."
            )
        self.keep, self.ridge = keep, ridge
        self.prefixes, self.continuations = prefixes, continuations
        self.prefix_end, self.reward = prefix_end, reward

    def observe(self, seen: Observation) -> Record:
        states = self._states(seen)
        residuals, own = torch.stack(list(states.values())), seen.acts["values"]
        _, real = self._text(seen)
        lens = value_lens(seen.ctx.policy, residuals[:, : self.keep])
        lens = F.zero_masked(lens, real[: self.keep].expand_as(lens))
        gap = F.zero_masked(lens[-1] - own[: self.keep], real[: self.keep]).abs().max().item()
        allowed = seen.allowed(1e-5, half=5e-3)
        scale = max(1.0, own.abs().max().item())
        checks = [Check.at_most("the last layer's lens is the value", gap / scale, allowed)]
        record = Record({"sites": list(states)}, {"lens": lens.float()}, checks)
        target, on_eval = _target(seen, self.text), self.text == "eval"
        counts = slice(None) if on_eval else slice(seen.prefix_len - 1, -1)
        x, value = residuals[:, :, counts], own[:, counts]
        if target is not None:
            record = _with(record, *read_target(x, value, target, self.ridge, not on_eval))
        translators = {}
        if len(own) >= FEWEST_SEQUENCES:
            mask = real if on_eval else seen.ctx.rollout.samples.mask
            read = read_translated(seen.ctx.policy, list(states), x, value, mask, self.ridge)
            translators, *found = read
            record = _with(record, *found)
        if translators:
            shown = [each(states[site][: self.keep]) for site, each in translators.items()]
            lens = value_lens(seen.ctx.policy, torch.stack(shown))
            lens = F.zero_masked(lens, real[: self.keep].expand_as(lens))
            record = _with(record, {}, {"lens_tuned": lens.float()})
        reward = seen.truth.reward if self.reward is None and seen.truth else self.reward
        if on_eval and self.prefixes and reward is not None:
            found = self._against_the_policy(seen, states, translators, reward)
            record = _with(record, *found)
        return record

    def _states(self, seen: Observation) -> dict[str, Float[Tensor, "batch seq d_model"]]:
        sites = [site for site in seen.acts if site != "values"]
        policy = seen.ctx.policy
        if not isinstance(policy, TransformerWithCritic):
            return {site: seen.acts[site] for site in sites}
        tokens, mask = self._text(seen)
        return capture_activations(policy.critic, tokens, sites, attention_mask=mask)

    def _text(
        self, seen: Observation
    ) -> tuple[Int[Tensor, "batch seq"], Bool[Tensor, "batch seq"]]:
        if self.text == "rollout":
            return text_at(seen.ctx)
        return seen.text.tokens, seen.text.attention_mask

    def _against_the_policy(
        self,
        seen: Observation,
        states: dict[str, Float[Tensor, "batch seq d_model"]],
        translators: dict[str, Affine],
        reward: TextReward,
    ) -> tuple[dict, dict]:
        tokens, policy = seen.text.tokens, seen.ctx.policy
        pos = self._position(seen)
        first = 2 * len(tokens) // 3
        held_out = range(first, len(tokens))
        real = seen.text.attention_mask[:, pos]
        rows = [row for row in held_out if bool(real[row])][: self.prefixes]
        if not rows:
            raise ConfigError(
                f"prefix_end={pos} of {self.name} is padding in every held-out text; give a later "
                "position, or longer texts."
            )
        found = self._sampled(seen, rows, pos, reward)
        there = {f"raw {site}": x[rows, pos] for site, x in states.items()}
        there |= {f"tuned {s}": each(states[s][rows, pos]) for s, each in translators.items()}
        read = value_lens(policy, torch.stack(list(there.values()))[:, None])[:, 0]
        estimates = {"head": seen.acts["values"][rows, pos], **dict(zip(there, read, strict=True))}
        if seen.truth is not None:
            of_grammar, mask = seen.truth.values(tokens[rows])
            estimates["grammar"] = of_grammar[:, pos].where(mask[:, pos], torch.nan)
        columns = torch.stack([x.cpu().double() for x in estimates.values()], 1)
        value = found.mean[:, None].expand_as(columns)
        interval = correlation_with(columns, value, columns.isfinite(), resamples=RESAMPLES)
        values = {
            "prefix_rows": rows,
            "prefix_pos": pos,
            "continuations": self.continuations,
            "estimates": list(estimates),
            "correlation": decimals(interval.value, 4),
            "correlation_against": "V of the policy",
            "reliability": round(reliability(found), 4),
            **interval_fields("correlation", interval),
        }
        tensors = {"v_policy": found.mean, "v_policy_se": found.standard_error}
        return values, tensors | {"estimates": columns}

    def _position(self, seen: Observation) -> int:
        seq = seen.text.tokens.shape[1]
        given = self.prefix_end
        if given is None:
            given = seq // 2 if seen.truth is None else seen.truth.grammar.slot("CONN", 1)
        pos = given + seq if given < 0 else given
        if not 0 <= pos < seq - 1:
            raise ConfigError(
                f"prefix_end={self.prefix_end} of {self.name} leaves nothing to continue in texts "
                f"of {seq} tokens; choose from 0 to {seq - 2}."
            )
        return pos

    def _sampled(
        self, seen: Observation, rows: list[int], pos: int, reward: TextReward
    ) -> PolicyValues:
        tokens, real, args = seen.text.tokens, seen.text.attention_mask, seen.args
        tokenizer = seen.ctx.policy.base_model.tokenizer
        spec = replace(SamplingSpec.from_args(args, tokenizer), gen_len=tokens.shape[1] - 1 - pos)
        return policy_values(
            seen.ctx.policy,
            [tokens[row, : pos + 1][real[row, : pos + 1]].tolist() for row in rows],
            spec,
            lambda samples: reward(samples.texts(tokenizer)),
            self.continuations,
            phase_generator(args.seed, seen.ctx.phase, "continuations", 0),
        )


def _with(record: Record, values: dict, tensors: dict[str, Tensor]) -> Record:
    return replace(record, values=record.values | values, tensors=record.tensors | tensors)


def _target(seen: Observation, text: str) -> ReadTarget | None:
    if text == "rollout":
        rollout = seen.ctx.rollout
        against = "returns of the policy's samples"
        return ReadTarget(rollout.returns, rollout.samples.mask, ["all"], against)
    if seen.truth is None:
        return None
    tokens = seen.text.tokens
    values, mask = seen.truth.values(tokens)
    names = seen.truth.slot_names(tokens.shape[1])
    return ReadTarget(values, mask & seen.text.attention_mask, names, "V of the grammar")
