"""Packed or hooked: the decision how a run goes through its models, and the proof behind it."""

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.models.critic import TransformerWithCritic
from rlhf_lab.models.device import float32_products, product_dtype
from rlhf_lab.models.fast.known import why_not_passed, why_unknown
from rlhf_lab.models.fast.proof import prove
from rlhf_lab.models.hooks import has_hooks, is_hooked
from rlhf_lab.models.transformer_lens import HookedTransformer, has_own_forward
from rlhf_lab.models.value_head import TransformerWithValueHead
from rlhf_lab.samples import Samples

OWN = {kind: kind.forward for kind in (TransformerWithValueHead, TransformerWithCritic)}
"""The forwards of the package's policies, as they were when it was imported."""


@dataclass
class Forward:
    """How a run goes through its models: as hooked modules or packed, and in which precision.

    Args:
        mode: "hooked" runs the modules and the readable functions, and nothing else; "packed" the
            packed form, or refuses; "auto" the packed form where it is known to be right and passes
            every hook, and the modules elsewhere, with one sentence that says why.
        dtype: of the matrix products; the models' own when None.
        tf32: let CUDA multiply float32 matrices in TF32, within `products`.
        recompute: keep only what goes from block to block for the backward pass, and run each
            block again there.
        fault: what a proof found wrong with the packed form; from then on the modules run.
        gap: the largest difference that the last proof found, in nats for log-probabilities; None
            where the modules ran, or nothing was proved yet.
        proved: whether there was a proof; the first is the longest.
        said: the sentences that were said already.
        units: what each block is to be run within, where its weights are put together for it only.
    """

    mode: Literal["auto", "hooked", "packed"] = "auto"
    dtype: torch.dtype | None = None
    tf32: bool = field(default=False, kw_only=True)
    recompute: bool = False
    fault: str | None = None
    gap: float | None = None
    proved: bool = False
    said: set[str] = field(default_factory=set, repr=False)
    units: Mapping[nn.Module, nn.Module] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_args(cls, args: RLHFArgs) -> "Forward":
        """How a run with these settings goes through its models."""
        precision, recompute = args.precision, args.activation_checkpointing
        return cls(args.forward, product_dtype(precision), recompute, tf32=precision == "tf32")

    def products(self) -> AbstractContextManager[None]:
        """Within, matrices are multiplied in TF32 if that is asked for; else as before."""
        return float32_products("tf32") if self.tf32 else nullcontext()

    def packs(self, *models: nn.Module, also: str | None = None) -> bool:
        """Whether all of these, policies or bare transformers, run packed as they are now.

        Args:
            also: another reason not to, of what they are to run on.

        Raises:
            ConfigError: mode="packed", and one of them does not.
        """
        why = self.why_hooked(*models) or also
        if why is None:
            return True
        if self.mode == "packed":
            raise ConfigError(f"forward='packed' cannot run these models: {why}; set it to 'auto'.")
        if self.mode == "auto" and why not in self.said:
            self.said.add(why)
            warnings.warn(f"the hooked modules run, not the packed form: {why}.", stacklevel=2)
        return False

    def prove(
        self,
        policy: TransformerWithValueHead,
        reference: HookedTransformer,
        samples: Samples,
        temperature: float,
    ) -> bool:
        """Whether the packed form, where it runs, is the modules', on two rows of these samples.

        Where it differs beyond rounding, the modules run from now on, with one warning that names
        the first part that differs, and the samples are to be made again: they are not what the
        policy would have written. Call it once per phase, with the hooks that sampling had.

        Raises:
            RunError: it differs, and mode="packed".
        """
        self.gap, model = None, transformer_of(policy)
        if model is None or not self.packs(model, reference):
            return True
        plain = why_not_read(policy) is None
        reader = policy
        if not plain:
            reader = TransformerWithValueHead(model, nn.Identity())
            reader.value_head = policy.value_head  # as it is: its dtype may not be the model's
        proof = prove(
            reader,
            reference,
            samples,
            temperature,
            self.dtype,
            not self.proved,
            own_values=plain,
            tf32=self.tf32,
        )
        self.gap, self.proved = proof.gap, True
        if proof.fault is None:
            return True
        self.fault = f"the packed form differs from them by {proof.gap:.2g}, first in {proof.fault}"
        self.said.add(self.fault)
        if self.mode == "packed":
            raise RunError(f"forward='packed' is not right here: {self.fault}; set it to 'auto'.")
        warnings.warn(f"the hooked modules run from now on: {self.fault}.", stacklevel=2)
        return False

    def reads_fast(self, model: HookedTransformer) -> bool:
        """Whether logits may be read out of last residuals without the modules.

        So it is in mode "auto" where a hook within the blocks sends these to the modules, but the
        model is known and nothing is hooked on the final norm or the unembedding.
        """
        if self.mode == "hooked" or self.fault is not None or why_unknown(model) is not None:
            return False
        return not (has_hooks(model.ln_final) or has_hooks(model.unembed))

    def why_hooked(self, *models: nn.Module) -> str | None:
        """Why the hooked modules must run for these models, in words; None if they need not."""
        if self.mode == "hooked":
            return "forward='hooked'"
        if self.fault is not None:
            return self.fault
        for model in models:
            if not isinstance(model, HookedTransformer):
                why = why_not_read(model)
                if why is not None:
                    return why
                model = model.base_model
            why = why_unknown(model) or why_not_passed(model)
            if why is not None:
                return why
        return None


def why_not_read(policy: nn.Module) -> str | None:
    """Why the packed form cannot stand for this policy's forward, its transformer apart."""
    if type(policy) is not TransformerWithValueHead:
        return f"the packed form does not know a policy that is a {type(policy).__name__}"
    if not is_plain(policy):
        return "the policy has a forward of its own"
    if is_hooked(policy) or has_hooks(policy.value_head):
        return "a hook is on the policy or its value head, which the packed form does not pass"
    return None


def is_plain(policy: nn.Module) -> bool:
    """Whether the policy's forward is the package's own, and not one that a learner wrote."""
    return "forward" not in vars(policy) and OWN.get(type(policy)) is type(policy).forward


def transformer_of(policy: nn.Module) -> HookedTransformer | None:
    """The transformer whose logits are the policy's; None where a forward or hook makes others."""
    if isinstance(policy, HookedTransformer):
        return policy
    plain = is_plain(policy) and not (is_hooked(policy) or has_own_forward(policy.base_model))
    return policy.base_model if plain else None
