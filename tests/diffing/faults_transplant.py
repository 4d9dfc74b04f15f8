"""Faults of transplants, written down before looking whether their checks tell."""

from tests.probes.planting import Fault

TRANSPLANT, WRITER = "diffing.transplant:transplant", "diffing.transplant:Writer"
TRANSPLANT_FAULTS = (
    Fault(
        "labels of two groups swapped",
        "Transplant",
        TRANSPLANT,
        "list(groups.names)",
        "[*groups.names[:1], groups.names[2], groups.names[1], *groups.names[3:]]",
    ),
    Fault(
        "a bias left out of a group",
        "Transplant",
        TRANSPLANT,
        "for part in groups.parts[g]]",
        "for part in groups.parts[g] if part[0] != 'unembed.W_U']",
    ),
    Fault(
        "other noise in each coalition",
        "Transplant",
        f"{WRITER}.write",
        "manual_seed(self.seed)",
        "manual_seed(self.seed + int(1e6 * weights['unembed.W_U'].sum().item()))",
    ),
    Fault(
        "base and tuned exchanged",
        "Transplant",
        TRANSPLANT,
        "taken_from(after, before, parts)",
        "taken_from(before, after, parts)",
    ),
    Fault(
        "weights of Shapley without the order's size",
        "Transplant",
        "diffing.transplant:_shapley_shares",
        "math.factorial(n_groups - others - 1)",
        "math.factorial(n_groups - others)",
    ),
    Fault(
        "weights left from the coalition before",
        "Transplant",
        TRANSPLANT,
        "parts = [part for g in chosen.nonzero()[:, 0]",
        "parts = [part for g in chosen.nonzero()[:1, 0]",
    ),
    Fault(
        "samples of a coalition shifted by one",
        "Transplant",
        TRANSPLANT,
        "torch.stack(rewards)",
        "torch.stack(rewards).roll(1, 0)",
    ),
    Fault(
        "put in by the last group's place",
        "Transplant",
        "diffing.transplant:Transplant.put_in",
        "self.place([g])",
        "self.place([len(self.groups) - 1 - g])",
    ),
    Fault(
        "taken out as put in",
        "Transplant",
        "diffing.transplant:Transplant.taken_out",
        "[h for h in every if h != g]",
        "[g]",
    ),
    Fault(
        "KL from itself",
        "Transplant",
        f"{WRITER}.kl_from_base",
        "self.base, samples",
        "model, samples",
    ),
)
