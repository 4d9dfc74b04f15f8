"""Presets and methods: the fields that each sets, and in which a run differs from a paper."""

from types import MappingProxyType
from typing import Any, Literal

MethodName = Literal[
    "ppo", "grpo", "dr_grpo", "rloo", "reinforce++", "remax", "opo", "dapo", "gspo", "cispo", "gkd"
]  # fmt: skip
NO_CRITIC = dict(vf_coef=0.0, ent_coef=0.0, normalize_reward=False, normalize_advantages=False)
NO_CRITIC |= dict(whiten_rewards=False)
CLIPPED = dict(policy_loss="ppo", clip_coef_high=None, dual_clip=None)
GROUP = dict(NO_CRITIC, **CLIPPED, advantages="grpo", samples_per_prompt=8)
KL_IN_REWARD = dict(NO_CRITIC, kl_in="reward", kl_estimator="k1", kl_coef=0.05)
# A log pi of whole responses: the sum over their tokens; exact for the first step of the one pass
REINFORCE = dict(policy_loss="policy_gradient", loss_aggregation="constant")
REINFORCE |= dict(batches_per_learning_phase=1)
TOKENS, RESPONSES = dict(loss_aggregation="token_mean"), dict(loss_aggregation="sequence_mean")
# a float other than 0 is an order of magnitude; FREE may be any number
PAPER_METHODS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "ppo": dict(TOKENS, **CLIPPED, advantages="gae"),
        "grpo": dict(GROUP, **RESPONSES, kl_in="loss", kl_estimator="k3"),
        "dr_grpo": GROUP | dict(advantages="dr_grpo", loss_aggregation="constant", kl_coef=0.0),
        "rloo": dict(KL_IN_REWARD, **REINFORCE, advantages="rloo", samples_per_prompt=8),
        "reinforce++": dict(KL_IN_REWARD, **TOKENS, **CLIPPED, advantages="reinforce++"),
        "remax": dict(KL_IN_REWARD, **REINFORCE, advantages="remax"),
        "opo": GROUP | REINFORCE | dict(advantages="opo", num_minibatches=1, kl_coef=0.0),
        "dapo": GROUP | TOKENS | dict(kl_coef=0.0, clip_coef_high=0.28, dynamic_sampling=10),
        "gspo": GROUP | RESPONSES | dict(policy_loss="gspo", kl_coef=0.0)
        | dict(clip_coef=3e-4, clip_coef_high=4e-4),
        "cispo": GROUP | TOKENS | dict(policy_loss="cispo", kl_coef=0.0)
        | dict(clip_coef=1.0, clip_coef_high=5.0),  # no lower bound
        "gkd": NO_CRITIC | dict(reward_fn="zero", advantages="reinforce", samples_per_prompt=1)
        | dict(kl_in="loss", kl_estimator="exact", kl_coef=1.0, batches_per_learning_phase=1),
    }
)  # fmt: skip
FREE = ("samples_per_prompt", "dynamic_sampling")
Preset = Literal["reel", "sums", "sums-long", "sums-hot", "smol", "gpt2-small", "gpt2-medium"]
# GRPO as published, with a verifiable reward
_SUMS = PAPER_METHODS["grpo"] | {
    "base_model": "sums-nano",
    "reward_fn": "sums:exact",
    "prompts": "sums:2,3",
    "gen_len": 32,
    "stop_at_eos": True,
    "top_k": None,
    "total_phases": 20,
    "batch_size": 256,
    "base_lr": 3e-4,
    "warmup_steps": 2,
    "kl_coef": 0.0,
}
PRESETS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "reel": {
            "base_model": "reel-nano",
            "reward_model": "reel-sentiment",
            "prefix": "this movie",
            "gen_len": 26,
            "stop_at_eos": True,
            "top_k": None,
            "total_phases": 20,
            "batch_size": 256,
            "num_minibatches": 8,
            "base_lr": 3e-4,
            "head_lr": 3e-3,
            "warmup_steps": 2,
            "ent_coef": 0.0,
            "advantages": "gae",
            "kl_coef": 0.3,
        },
        "sums": _SUMS,
        "sums-long": _SUMS | {"prompts": "sums:2,3,4", "base_lr": 1e-3, "total_phases": 30},
        "sums-hot": _SUMS | {"base_lr": 3e-3},  # so high that pass@64 falls
        "smol": {
            "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
            "direction": "neg",
            "prefix": "This movie was really",
            "prepend_bos": False,
            "gen_len": 20,
            "total_phases": 30,
            "batch_size": 16,
            "warmup_steps": 2,
            "advantages": "gae",
            "kl_coef": 0.2,
            "save_every": 5,
        },
        # saving a state of 2 or 5 GB takes longer than a phase on a GPU
        "gpt2-small": {"base_model": "gpt2", "save_every": 10, "keep_checkpoints": 4},
        "gpt2-medium": {"save_every": 10, "keep_checkpoints": 0},
    }
)


def method_warning(args: Any) -> str | None:
    """Return a sentence on the settings that differ from the method's; None if none differ.

    Without `method`, the policy loss or the estimator names it, unless all settings of another
    method are set.
    """
    loss = None if args.policy_loss == "ppo" else args.policy_loss  # the default
    names = {"method": args.method, "policy_loss": loss, "advantages": args.advantages}
    field, name = next(((k, v) for k, v in names.items() if v in PAPER_METHODS), ("", ""))
    differing = _differing(args, name) if name else {}
    others = [] if field == "method" else PAPER_METHODS
    if not differing or not all(_differing(args, other) for other in others):
        return None
    listed = ", ".join(f"{k}={getattr(args, k)!r} (there {v!r})" for k, v in differing.items())
    remedy = "Remove them" if field == "method" else f"Set method={name!r}"
    return f"{field}={name!r} runs with other settings than its paper's: {listed}. {remedy}."


def _differing(args: Any, method: str) -> dict[str, Any]:
    needed = PAPER_METHODS[method].items()
    needed = {k: v for k, v in needed if k not in FREE or getattr(args, k) is None}
    numbers = {k: v for k, v in needed.items() if type(v) is float and v and getattr(args, k)}
    fitting = {k for k, v in numbers.items() if v / 10 <= getattr(args, k) <= v * 10}
    return {k: v for k, v in needed.items() if getattr(args, k) != v and k not in fitting}
