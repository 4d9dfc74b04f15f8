"""Wrong answers as learners write them are rejected and named by slips and relations."""

import contextlib

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from rlhf_lab import functional as F
from rlhf_lab.course.registry import find_exercise
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.value_head import VALUE_HOOK
from tests.course.answers import verdict_on


def _penalty(kl, kl_coef, mask=None, denominator=None):
    return kl_coef * kl.mean()


def _blanked_penalty(kl, kl_coef, mask=None, denominator=None):
    return kl_coef * F.zero_masked(kl, mask).mean()


def _multiplied_penalty(kl, kl_coef, mask=None, denominator=None):
    mask = torch.ones_like(kl) if mask is None else mask
    return kl_coef * (kl * mask).sum() / (denominator or mask.sum())


def _standardized(reward, eps=1e-5):
    return (reward - reward.mean()) / (reward.std() + eps)


def _tokens_at_their_position(logits, tokens, prefix_len=None, temperature=1.0):
    start = prefix_len or 1
    logprobs = (logits / temperature).log_softmax(-1)[:, start:]
    return logprobs.gather(-1, tokens[:, start:, None])[..., 0]


def _value_loss(factor):
    def loss(values, returns, vf_coef, mask=None, old_values=None, clip=None, denominator=None):
        return factor(vf_coef) * ((values - returns) ** 2).mean()

    return loss


def _masked_mean(x, mask, denominator):
    return F.masked_mean(x, mask, denominator=denominator)


def _smaller_product(ratio, clipped, advantages):
    return torch.minimum(ratio * advantages, clipped * advantages)


def _smaller_ratio(ratio, clipped, advantages):
    return torch.minimum(ratio, clipped) * advantages


def _surrogate(whiten, smaller=_smaller_product, mean=lambda x, mask, denominator: x.mean()):
    def surrogate(
        logprobs,
        old_logprobs,
        advantages,
        clip_coef,
        mask=None,
        normalize=True,
        denominator=None,
        eps=1e-8,
    ):
        if normalize:
            advantages = whiten(advantages, mask)
        ratio = (logprobs - old_logprobs).exp()
        clipped = ratio.clip(1 - clip_coef, 1 + clip_coef)
        return mean(smaller(ratio, clipped, advantages), mask, denominator)

    return surrogate


def _logprobs(logits, tokens, prefix_len=None, temperature=1.0):
    start = (prefix_len or 1) - 1
    logprobs = (logits / temperature).softmax(-1).log()
    return logprobs[:, start:-1].gather(-1, tokens[:, start + 1 :, None])[..., 0]


def _entropy(logprobs):
    return Categorical(logits=logprobs).entropy()


def _kl(logprobs, ref_logprobs):
    return torch.nn.functional.kl_div(ref_logprobs, logprobs.exp(), reduction="none").sum(-1)


def _kl_of_logs(logprobs, ref_logprobs):
    logs = ref_logprobs, logprobs
    return torch.nn.functional.kl_div(*logs, reduction="none", log_target=True).sum(-1)


def _kl_of_distributions(logprobs, ref_logprobs):
    return kl_divergence(Categorical(logits=logprobs), Categorical(logits=ref_logprobs))


def _in_place(x, mask=None):
    if mask is not None:
        x[~mask] = 0.0
    return x.sum(-1)


def _written_into_a_copy(z, donor, heads, positions):
    patched = z.clone()
    patched[:, :, heads][:, positions] = donor[:, :, heads][:, positions]
    return patched


def _detached_logprobs(logprobs, advantages, mask=None):
    logprobs = F.zero_masked(F.at_least_float32(logprobs), mask).detach()
    return F.masked_mean(F.zero_masked(F.at_least_float32(advantages), mask) * logprobs, mask)


def _mean_of_zeros(z, heads, positions, to="zero"):
    ablated = z.clone()
    ablated[:, positions, heads] = 0.0
    if to == "mean":
        ablated[:, positions, heads] = ablated[:, positions, heads].mean(0)
    return ablated


def _global_noise(logprobs, noise):
    return torch.multinomial(logprobs.exp(), 1)[:, 0]


class _Detaching(TransformerWithValueHead):
    """A hook that returns its activation without a gradient."""

    @contextlib.contextmanager
    def value_hook(self):
        values = []

        def read(activation, hook):
            values.append(self.value_head(activation)[..., 0])
            return activation.detach()

        with self.base_model.hooks(fwd_hooks=[(VALUE_HOOK, read)]):
            yield values


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "written", "words"),
    [
        ("calc_kl_penalty", _penalty, "the mask is not used"),
        ("calc_value_function_loss", _value_loss(lambda c: c), "the factor 1/2 is missing"),
        ("calc_value_function_loss", _value_loss(lambda c: 0.5), "the coefficient is missing"),
        (
            "calc_value_function_loss",
            _value_loss(lambda c: 1),
            "the coefficient and the factor 1/2 are missing",
        ),
        (
            "calc_clipped_surrogate_objective",
            _surrogate(lambda x, mask: (x - x.mean()) / (x.std() + 1e-8)),
            "the mask is not used",
        ),
        ("calc_clipped_surrogate_objective", _surrogate(F.whiten), "divides by all entries"),
        ("calc_kl_penalty", _blanked_penalty, "divides by all entries"),
        (
            "calc_clipped_surrogate_objective",
            _surrogate(F.whiten, _smaller_ratio, _masked_mean),
            "this takes the smaller ratio",
        ),
        ("calc_kl_penalty", _multiplied_penalty, "this multiplies by the mask"),
        ("normalize_reward", _standardized, "a batch of one reward returns nan"),
        ("get_logprobs", _tokens_at_their_position, "off by one"),
        (
            "calc_clipped_surrogate_objective",
            _surrogate(lambda x, mask: x),
            "the advantages are not whitened",
        ),
        ("get_logprobs", _logprobs, "the logarithm of a softmax"),
        ("entropy_per_token", _entropy, "takes the log-softmax again"),
        ("kl_per_token", _kl, "so its gradient is nan"),
        ("kl_per_token", _kl_of_logs, "the last step is missing"),
        ("kl_per_token", _kl_of_distributions, "takes the log-softmax again"),
        ("sequence_sum", _in_place, "this changes x in place"),
        (
            "patch_heads",
            _written_into_a_copy,
            "nothing is overwritten: if the first index is a list",
        ),
        ("policy_gradient_objective", _detached_logprobs, "no gradient reaches logprobs"),
        ("ablate_heads", _mean_of_zeros, "this always writes 0"),
        ("draw_token", _global_noise, "use the noise argument"),
        ("TransformerWithValueHead", _Detaching, "the hook returns something"),
    ],
)
def test_check_rejects_and_names_wrong_answers(name: str, written, words: str) -> None:
    verdict = verdict_on(find_exercise(name), written)
    assert verdict.state == "differs"
    assert verdict.slip is not None and words in verdict.slip
