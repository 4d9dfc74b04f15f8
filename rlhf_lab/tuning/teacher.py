"""The reference of a run, which is the teacher in on-policy distillation."""

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead, load_model, make_reference
from rlhf_lab.models.build import freeze
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.rewards.model import validate_language_model


def load_reference(args: RLHFArgs, policy: TransformerWithValueHead) -> HookedModel:
    """Load the frozen reference of a run: `reference_model`, or the policy at its start.

    With `method="gkd"`, the reference is a teacher, and the policy is the student. The objective is
    minus the exact KL per token, in nats, over the whole vocabulary, on the student's own samples:

        -E[y ~ student] mean_t KL(student(. | x, y_<t) || teacher(. | x, y_<t))

    The mean is over the tokens of the batch up to the first stop token. The samples are constants,
    so no gradient flows through sampling. The two models may differ in size and architecture.

    Source: on-policy GKD with the reverse KL (lambda = 1; beta = 1 in TRL's GKDTrainer), Agarwal et
    al. 2023, arXiv 2306.13649

    Raises:
        ConfigError: If `method` is gkd without a `reference_model`.
        LoadError: If `reference_model` cannot be loaded.
    """
    if args.reference_model is not None:
        validate_language_model(args.reference_model)
        return freeze(load_model(args.reference_model, device=policy.device), args.reference_device)
    if args.method == "gkd":
        raise ConfigError("method='gkd' requires a teacher. Set reference_model or reference=...")
    return make_reference(policy.base_model, args.reference_device)


def validate_vocabulary(policy: HookedModel, reference: HookedModel) -> None:
    """Raise ConfigError if the reference has other tokens or token ids than the policy."""
    sizes = policy.cfg.d_vocab, reference.cfg.d_vocab
    tokens = [model.tokenizer and model.tokenizer.get_vocab() for model in (policy, reference)]
    if sizes[0] != sizes[1] or (all(tokens) and tokens[0] != tokens[1]):
        raise ConfigError(
            f"reference has other tokens than the policy (vocabularies of {sizes[1]} and "
            f"{sizes[0]}), so the KL is not defined. Use a reference with the same tokenizer."
        )
