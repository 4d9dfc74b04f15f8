"""Activations and gradients that probes observe; probes share forward passes."""

from collections.abc import Sequence

from torch import Tensor

from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.probes.eval_text import EvalText, gather_columns
from rlhf_lab.probes.probe import Probe
from rlhf_lab.training import Context
from rlhf_lab.training.capture import capture_activations, resolve_sites, text_at

Acts = dict[str, Tensor]


def gradients_at(ctx: Context) -> dict[str, Tensor]:
    """Return the policy's gradients by name, at after_backward only."""
    if ctx.event != "after_backward":
        return {}
    weights = ctx.policy.named_parameters()
    return {name: weight.grad for name, weight in weights if weight.grad is not None}


def prompt_length(ctx: Context, longest: int) -> int:
    """Return the prompt tokens of the phase's sequences with padding, or of the longest prompt."""
    if hasattr(ctx, "rollout"):
        return ctx.rollout.samples.prefix_len
    return ctx.samples.prefix_len if hasattr(ctx, "samples") else longest


class SharedActs:
    """Activations of all probes; those of the reference on eval text are captured once."""

    def __init__(self, text: EvalText | None) -> None:
        self.text = text
        self._reference: HookedModel | None = None
        self._of_reference: Acts = {}
        self._rows = 0

    def capture(self, ctx: Context, probes: Sequence[Probe], text: str) -> tuple[Acts, Acts]:
        """Return activations of the policy and, on eval text, the reference at all sites."""
        sites = [site for probe in probes for site in probe.sites]
        if not sites:
            return {}, {}
        if text == "rollout":
            tokens, mask = text_at(ctx)
            return capture_activations(ctx.policy, tokens, sites, attention_mask=mask), {}
        rows = max(p.n or len(self.text.tokens) for p in probes)
        if self._reference is not ctx.reference or rows > self._rows:
            self._reference, self._of_reference, self._rows = ctx.reference, {}, rows
        in_both = [site for site in sites if site != "values"]
        resolved = resolve_sites(ctx.reference, in_both) if in_both else []
        missing = [site for site in resolved if site not in self._of_reference]
        text, most = self.text.first(rows), self.text.first(self._rows)
        if missing:
            self._of_reference |= capture_activations(
                ctx.reference, most.tokens, missing, attention_mask=most.attention_mask
            )
        mask = text.attention_mask
        acts = capture_activations(ctx.policy, text.tokens, sites, attention_mask=mask)
        return acts, self._of_reference

    def at(self, acts: Acts, model: HookedModel, probe: Probe) -> Acts:
        """Return a probe's sites among the activations, at its position or at all positions."""
        sites = resolve_sites(model, probe.sites)
        found = {site: acts[site][: probe.n] for site in sites if site in acts}
        if probe.pos is None:
            return found
        if probe.text == "rollout":
            return {site: act[:, probe.pos] for site, act in found.items()}
        columns = self.text.columns(probe.pos)
        return {site: gather_columns(act, columns[: len(act)]) for site, act in found.items()}
