"""Faults to plant in the crosscoder, written before looking whether its checks tell."""

from tests.probes.planting import Fault

STORE, CODER = "diffing.activation_store", "diffing.crosscoder"
RECORD, SPLICE = "diffing.crosscoder_record", "diffing.splicing"


def fault(name: str, where: str, old: str, new: str, run: str = "record") -> Fault:
    """A fault that shows in a record, or only where a crosscoder is fitted with it."""
    return Fault(name, "Crosscoder", where, old, new, run)


FAULTS = (
    fault(
        "models exchanged in the store",
        f"{STORE}:ActivationStore._as_rows",
        "for name in self.models], 1)",
        "for name in self.models[::-1]], 1)",
        "fit",
    ),
    fault(
        "models not scaled",
        f"{CODER}:fit_crosscoder",
        "rows.double().square().mean((0, 2)).sqrt()",
        "torch.ones(len(store.models))",
        "fit",
    ),
    fault(
        "no threshold after training",
        f"{CODER}:fit_crosscoder",
        "coder.threshold.copy_(",
        "coder.threshold.copy_(0 * ",
        "fit",
    ),
    fault(
        "places of the tokens one on",
        f"{STORE}:ActivationStore.add",
        "torch.stack([x.cpu() for x in places], 1).int()[of]",
        "torch.stack([x.cpu() for x in places], 1).int()[of].roll(1, 0)",
        "fit",
    ),
    fault("relative norm of the base", f"{RECORD}:relative_norms", "norms[:, 1]", "norms[:, 0]"),
    fault(
        "betas of the error alone",
        f"{RECORD}:latent_scaling",
        "betas = (left + squares[:, None] * own)",
        "betas = left",
    ),
    fault(
        "betas along the base's decoder",
        f"{RECORD}:latent_scaling",
        "tuned = coder.W_dec[:, 1].double()",
        "tuned = coder.W_dec[:, 0].double()",
    ),
    fault(
        "betas of the models exchanged",
        f"{RECORD}:record_crosscoder",
        "nu_base=nu[:, 0]",
        "nu_base=nu[:, 1]",
    ),
    fault(
        "top tokens of the row before",
        f"{RECORD}:record_crosscoder",
        "rows[:, None].expand_as(f)",
        "(rows[:, None] - 1).expand_as(f)",
    ),
    fault(
        "the tokens on which a latent fires least",
        f"{RECORD}:record_crosscoder",
        "both[0].topk(min(TOP, len(both[0])), dim=0)",
        "both[0].topk(min(TOP, len(both[0])), dim=0, largest=False)",
    ),
    fault(
        "share of the base's texts",
        f"{RECORD}:record_crosscoder",
        "by_tuned[places.texts[rows]]",
        "~by_tuned[places.texts[rows]]",
    ),
    fault(
        "decoders of the models exchanged",
        f"{RECORD}:record_crosscoder",
        "decoder=coder.W_dec.detach().clone()",
        "decoder=coder.W_dec.detach().flip(1)",
    ),
    fault(
        "nothing spliced in",
        f"{SPLICE}:with_activation",
        "return torch.where(there, instead.to(activation), activation)",
        "return activation",
    ),
    fault(
        "the crosscoder itself as its control",
        f"{RECORD}:record_crosscoder",
        "relative_norms(control)[control_alive(control, store, 0)]",
        "relative_norms(coder)",
    ),
    fault(
        "frequency of the tokens on which it is silent",
        f"{RECORD}:record_crosscoder",
        "fires += (f > 0).sum(0)",
        "fires += (f == 0).sum(0)",
    ),
)
