"""LogitShift: a logit difference by component of a model, and its shift by component and cause."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.diffing.contrast import Contrast, make_contrast
from rlhf_lab.diffing.logit_shift import ends_of, logit_reader, split_shift
from rlhf_lab.models import has_hooks
from rlhf_lab.models.device import where_exact
from rlhf_lab.models.hooked_model import HookedModel, is_centered, model_where_exact
from rlhf_lab.models.residual_parts import SITES, residual_components, validate_additive
from rlhf_lab.models.tokenization import single_token  # noqa: F401 (lessons import it from here)
from rlhf_lab.probes.probe import Check, Observation, Record, decimals
from rlhf_lab.probes.word_pair import WordPairProbe


@dataclass(frozen=True)
class Attribution:
    """A logit difference as a sum over the parts of the model.

    Args:
        components: embed, pos_embed, each head (L0H1), each attention bias (L0 b_O), each MLP
            (L0 mlp), and the two constants: norm bias and b_U.
        rows: what each component adds.
        logit_difference: what the model's own logits say; the rows sum to it.
    """

    components: list[str]
    rows: Float[Tensor, "component batch"]
    logit_difference: Float[Tensor, " batch"]

    @property
    def error(self) -> float:
        """The largest difference between the sum of the rows and the model's logits."""
        return (self.rows.sum(0) - self.logit_difference).abs().max().item()


@torch.no_grad()
def attribute_logits(
    model: HookedModel, acts: dict[str, Tensor], word: int | Contrast, other: int | None = None
) -> Attribution:
    """Split logit(word) - logit(other) at one position exactly over the model's components.

    1. Take the vectors that sum to the last residual.
    2. Apply the norm to each vector, which is linear once its scale is known: subtract the vector's
       mean (not for RMSNorm), divide by the forward pass's scale, and multiply by the gain.
    3. Project on u = W_U[:, word] - W_U[:, other].
    4. Append two constants as the last rows: "norm bias", the norm's bias along u (or 0), and
       "b_U", the difference of b_U.
    5. Take the logit difference from `acts["logits"]`, so that you can test whether the rows sum to
       it.

    If the norm is trained, its gain and bias are part of the answer. Attributions that assume they
    were folded away are wrong after the first optimizer step.

    Args:
        acts: at `SITES`, at one position: `[batch ...]`.
        word, other: ids of tokens; or a weighted contrast of words.

    row_c = <g * (c - mean c) / sigma, u>;  constants <b, u> and b_U[word] - b_U[other]
    (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits", extended by the norm)
    """
    names, parts = residual_components(model, acts)
    norm, unembed = model.ln_final, model.unembed
    contrast = make_contrast(model, word if other is None else (word, other))
    u = contrast.of(unembed.W_U)
    if model.cfg.normalization_type in ("LN", "LNPre"):
        parts = parts - parts.mean(-1, keepdim=True)
    gain = norm.w.double() if hasattr(norm, "w") else torch.ones_like(u)
    rows = parts @ (gain * u) / acts["ln_final.hook_scale"].double()[:, 0]
    norm_bias = (norm.b.double() @ u) if hasattr(norm, "b") else torch.zeros_like(u[0])
    b_u = contrast.of(unembed.b_U)
    constants = torch.stack([norm_bias, b_u])[:, None].expand(-1, rows.shape[1])
    difference = contrast.of(acts["logits"])
    return Attribution([*names, "norm bias", "b_U"], torch.cat([rows, constants]), difference)


class LogitShift(WordPairProbe):
    """Shift of a logit difference of words since the reference, by component and cause.

    Causes: a component's own weights, its inheritance from earlier components, the final norm's
    scale, and the unembedding (see `split_shift`).
    With hooks on the policy, their effect is one more component, and there is no split by cause.

    Checks: each model's rows sum to its logit difference; the rows of the shift sum to the
    measured shift; the causes sum to the rows.

    Args:
        word, other: single tokens; or weights by word as `word`, {"good": 1, "bad": -1}.
        pos: the position before the word, in each text; from its end when negative.
        n: number of sequences.
    """

    name = "logit_shift"
    question = "Which components make one word more likely than another?"
    caveat = "Rows are direct effects on the logits: later components can undo or repeat them."
    sites = (*SITES, "ln_final.hook_normalized")

    def check_model(self, model: HookedModel) -> None:
        """Raise ConfigError if the model's logits are not a sum over its components."""
        validate_additive(model)
        super().check_model(model)

    def observe(self, seen: Observation) -> Record:
        """Attribute both models' logit differences, and subtract them."""
        model, reference = seen.ctx.policy.base_model, seen.ctx.reference
        words = self.contrast(model)
        models = model_where_exact(reference), model_where_exact(model)
        acts = tuple(
            {site: where_exact(act[: self.n]) for site, act in each.items()}
            for each in (seen.reference_acts, seen.acts)
        )
        before, now = (attribute_logits(m, x, words) for m, x in zip(models, acts, strict=True))
        if has_hooks(model):  # a row more: what hooks changed after the components
            hidden = acts[1]["ln_final.hook_normalized"].double()
            rest = hidden @ logit_reader(models[1], words) - now.rows[:-2].sum(0)
            names, rows = [*now.components, "hooks"], torch.cat([now.rows, rest[None]])
            before = replace(before, rows=torch.cat([before.rows, 0 * rest[None]]))
            now = replace(now, components=names, rows=rows)
        shift = now.rows - before.rows
        measured = now.logit_difference - before.logit_difference
        values = {
            "components": now.components,
            "shift": decimals(shift.mean(1)),
            "policy": decimals(now.rows.mean(1)),
            "reference": decimals(before.rows.mean(1)),
            "measured_shift": round(measured.mean().item(), 6),
        }
        causes = {}
        if not has_hooks(model):
            text = seen.text.first(self.n)
            tokens = text.tokens.to(next(models[0].parameters()).device)
            ends = ends_of(models, acts, tokens, text.columns(self.pos), words)
            causes = split_shift(*ends, is_centered(model.ln_final))._asdict()
            values |= {name: decimals(rows.mean(1)) for name, rows in causes.items()}
        tensors = {"shift": shift, "measured": measured, "reference": before.rows} | causes
        gaps = {
            "the policy's rows sum to its logit difference": lambda: now.error,
            "the reference's rows sum to its logit difference": lambda: before.error,
            "the rows of the shift sum to the measured shift": lambda: _gap(shift.sum(0), measured),
        }
        if causes:
            of_causes = lambda: _gap(sum(causes.values()), shift)
            gaps["the causes sum to the rows of the shift"] = of_causes
        allowed = seen.allowed(1e-4, half=0.2)  # a logit of 8 is rounded by up to 0.03 in bf16
        checks = [lambda n=n, f=f: Check.at_most(n, f(), allowed) for n, f in gaps.items()]
        return Record(values, {name: x.float() for name, x in tensors.items()}, checks)


def _gap(found: Tensor, expected: Tensor) -> float:
    return (found - expected).abs().max().item()
