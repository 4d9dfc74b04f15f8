"""Losses on pairs of responses, one of which was preferred."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_lab.functional.masks import at_least_float32


def bradley_terry_loss(
    chosen: Float[Tensor, " batch"],
    rejected: Float[Tensor, " batch"],
    margin: float | Float[Tensor, " batch"] = 0.0,
) -> Float[Tensor, ""]:
    """Train a reward model to score the chosen response above the rejected one; to be minimised.

    1. Take the difference of the two rewards, less the margin.
    2. Take minus the log-sigmoid of it, the surprise at the preference that was given.
    3. Average over the pairs.

    loss = -mean log sigmoid(r_chosen - r_rejected - margin)
    (Bradley and Terry 1952; Ouyang et al. 2022, arXiv 2203.02155, equation 1; margin: Touvron et
    al. 2023, arXiv 2307.09288, equation 2)
    """
    return -logsigmoid(at_least_float32(chosen) - at_least_float32(rejected) - margin).mean()


def dpo_loss(
    policy_chosen: Float[Tensor, " batch"],
    policy_rejected: Float[Tensor, " batch"],
    ref_chosen: Float[Tensor, " batch"],
    ref_rejected: Float[Tensor, " batch"],
    beta: float,
    label_smoothing: float = 0.0,
    kind: Literal["sigmoid", "ipo"] = "sigmoid",
) -> Float[Tensor, ""]:
    """Train the policy on preferences directly, without a reward model; to be minimised.

    1. h = how much more the policy prefers the chosen response than the reference does, from
       log-probabilities summed over each response (see `sequence_sum`).
    2. "sigmoid": minus log-sigmoid of beta * h, with a share `label_smoothing` of the pairs taken
       to be labelled the wrong way round.
    3. "ipo": the squared distance of h from 1 / (2 beta).
    4. Average over the pairs.

    Raises ValueError unless beta > 0 and 0 <= label_smoothing < 0.5, and for label_smoothing with
    "ipo", where it has no meaning.

    h = (log pi(c) - log pi(r)) - (log pi_ref(c) - log pi_ref(r))
    DPO: -mean log sigmoid(beta h)   (Rafailov et al. 2023, arXiv 2305.18290, equation 7)
    cDPO: -mean [(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)]   (Mitchell 2023)
    IPO: mean (h - 1 / (2 beta))^2   (Azar et al. 2023, arXiv 2310.12036, equation 17)
    """
    if not beta > 0:
        raise ValueError(f"beta is {beta}; give a number above 0, such as 0.1.")
    if not 0 <= label_smoothing < 0.5 or (kind == "ipo" and label_smoothing):
        raise ValueError(
            f"label_smoothing is {label_smoothing} with kind {kind!r}; give a number from 0 to "
            "below 0.5 for 'sigmoid', and 0 for 'ipo'."
        )
    policy_log_ratio = at_least_float32(policy_chosen) - at_least_float32(policy_rejected)
    ref_log_ratio = at_least_float32(ref_chosen) - at_least_float32(ref_rejected)
    h = policy_log_ratio - ref_log_ratio
    if kind == "ipo":
        return (h - 1 / (2 * beta)).square().mean()
    if kind == "sigmoid":
        right, wrong = logsigmoid(beta * h), logsigmoid(-beta * h)
        return -((1 - label_smoothing) * right + label_smoothing * wrong).mean()
    raise ValueError(f"kind is {kind!r}; give 'sigmoid' or 'ipo'.")
