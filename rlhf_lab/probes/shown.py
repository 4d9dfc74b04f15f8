"""Activations, gradients and lengths as a probe is shown them."""

from collections.abc import Sequence

from torch import Tensor

from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.probes.eval_text import EvalText
from rlhf_lab.probes.probe import Probe
from rlhf_lab.training import Context
from rlhf_lab.training.capture import capture_activations, resolve_sites, text_at

Acts = dict[str, Tensor]


def gradients_at(ctx: Context) -> dict[str, Tensor]:
    """The policy's gradients by name, between the backward pass and the step; else none."""
    if ctx.event != "after_backward":
        return {}
    weights = ctx.policy.named_parameters()
    return {name: weight.grad for name, weight in weights if weight.grad is not None}


def prompt_length(ctx: Context, longest: int) -> int:
    """Prompt tokens of the phase's sequences, padding included; the longest prompt's without any.

    A batch need not have the longest of all prompts.
    """
    if hasattr(ctx, "rollout"):
        return ctx.rollout.samples.prefix_len
    return ctx.samples.prefix_len if hasattr(ctx, "samples") else longest


class SharedActs:
    """Activations that several probes are shown, of one forward each.

    Those of the reference on the eval text change when it is reset, and are captured once for each.

    Args:
        text: the eval text, if there is one.
    """

    def __init__(self, text: EvalText | None) -> None:
        self.text = text
        self._reference: HookedModel | None = None
        self._of_reference: Acts = {}

    def of_policy(self, ctx: Context, probes: Sequence[Probe], text: str) -> Acts:
        """The policy's activations at all sites that these probes want, on their text."""
        sites = [site for probe in probes for site in probe.sites]
        if not sites:
            return {}
        if text == "rollout":
            tokens, mask = text_at(ctx)
        else:
            tokens, mask = self.text.tokens, self.text.attention_mask
        return capture_activations(ctx.policy, tokens, sites, attention_mask=mask)

    def of_reference(self, ctx: Context, probes: Sequence[Probe]) -> Acts:
        """The reference's activations at all sites that these probes want, on the eval text."""
        if self._reference is not ctx.reference:
            self._reference, self._of_reference = ctx.reference, {}
        sites = [site for probe in probes for site in probe.sites if site != "values"]
        wanted = resolve_sites(ctx.reference, sites) if sites else []
        missing = [site for site in wanted if site not in self._of_reference]
        if missing:
            self._of_reference |= capture_activations(
                ctx.reference, self.text.tokens, missing, attention_mask=self.text.attention_mask
            )
        return self._of_reference

    def at(self, acts: Acts, model: HookedModel, probe: Probe) -> Acts:
        """A probe's sites, as far as they are there, at its position or at all of them."""
        sites = resolve_sites(model, probe.sites)
        there = {site: acts[site] for site in sites if site in acts}
        if probe.pos is None:
            return there
        if probe.text == "rollout":
            return {site: act[:, probe.pos] for site, act in there.items()}
        return {site: self.text.at(act, probe.pos) for site, act in there.items()}
