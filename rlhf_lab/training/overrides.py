"""Functions of the trainer that the caller can override, by name."""

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dis import get_instructions
from pathlib import Path
from sysconfig import get_path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rlhf_lab import functional as F
from rlhf_lab.config import PRESETS, RLHFArgs
from rlhf_lab.errors import ConfigError

COMPONENTS = "policy reference prompts reward_fn true_reward_fn kl_controller optimizer".split()
COMPONENTS += "scheduler rollout_engine".split()
# names in TRL, and what replaces them
ELSEWHERE = dict(model="policy", ref_model="reference", reward_model="reward_fn", dataset="prompts")
ELSEWHERE |= dict(reward_funcs="reward_fn", lr_scheduler="scheduler", callbacks="trainer.on(event)")
ELSEWHERE |= dict.fromkeys(("tokenizer", "processing_class"), "policy.base_model.set_tokenizer")
ELSEWHERE |= dict(data_collator="prompts=[...], texts that the trainer tokenizes and pads")
PerToken = Float[Tensor, "batch gen"]
# paths of modules that are not the user's; "" is of built-in ones
FOLDERS = get_path("stdlib"), str(Path(__file__).parents[1])
INSTALLED = re.compile("|".join([r"^$|-packages\b", *(f"^{re.escape(x)}" for x in FOLDERS)]))
STORES = {"STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL"}
NOT_PASSED = {"denominator", "eps"}  # parameters of default functions


def warn_if_set(args: RLHFArgs, names: str, reason: str) -> None:
    """Warn about each of these settings that is neither the default nor the preset's."""
    for name in names.split():
        default = PRESETS[args.preset].get(name, getattr(RLHFArgs, name))
        if (value := getattr(args, name)) != default:
            warnings.warn(f"{name}={value!r} is ignored, since {reason}. Remove it.", stacklevel=4)


@dataclass(frozen=True)
class Overrides:
    """Functions of advantages and objective; each can be overridden.

    Args:
        normalize_reward: `(rewards)`, used if `args.normalize_reward`.
        advantages: any of `values`, `rewards`, `token_rewards`, `mask`, `gamma`, `lam`, `group` and
            `greedy_rewards`, by parameter name (`*args`: values, rewards, mask); None for the
            estimator that `args.advantages` names.
        logprobs: `(logits, tokens, prefix_len, temperature)`.
        clipped_surrogate: `(logprobs, old_logprobs, advantages, clip_coef, mask, normalize)`, of
            PPO in its plain form; `normalize` is False if the advantages are whitened already.
        policy_loss: what each token adds to the policy objective; any of `logprobs`,
            `old_logprobs`, `advantages`, `mask`, `clip_coef`, `clip_coef_high` and `dual_clip`, by
            parameter name (`*args`: logprobs, old_logprobs, advantages, clip_coef, mask); None for
            the one that `args.policy_loss` names.
        value_loss: `(values, returns, vf_coef, mask, old_values, clip)`.
        entropy_bonus: `(entropy, ent_coef, mask)`, of the entropy of each token.
        kl_penalty: `(kl, kl_coef, mask)`, of the exact KL of each token, for `kl_in="loss"`.
        kl_estimator: KL of each token from those of `logprobs`, `ref_logprobs` and `mask` that it
            has as parameters (`*args`: the first two); None for `args.kl_estimator`.
    """

    normalize_reward: Callable[..., Tensor] = F.normalize_reward
    advantages: Callable[..., Tensor] | None = None
    logprobs: Callable[..., Tensor] = F.get_logprobs
    clipped_surrogate: Callable[..., Tensor] = F.calc_clipped_surrogate_objective
    policy_loss: Callable[..., Tensor] | None = None
    value_loss: Callable[..., Tensor] = F.calc_value_function_loss
    entropy_bonus: Callable[..., Tensor] = F.calc_entropy_bonus
    kl_penalty: Callable[..., Tensor] = F.calc_kl_penalty
    kl_estimator: Callable[..., Tensor] | None = None

    @classmethod
    def choose(cls, given: dict[str, Any]) -> "Overrides":
        """Return the defaults with custom functions in their place, which are validated."""
        names = [*COMPONENTS, *(field.name for field in dataclasses.fields(cls))]
        for name, function in given.items():
            if name not in names:
                remedy = f"Use {ELSEWHERE[name]}" if name in ELSEWHERE else ""
                remedy = remedy or f"Choose one of: {', '.join(names)}"
                raise ConfigError(f"RLHFTrainer has no component {name!r}. {remedy}.")
            default = getattr(cls, name, None)
            if default is not None and function is not None:
                passed = [x for x in inspect.signature(default).parameters if x not in NOT_PASSED]
                validate_order(function, passed, name)
        return cls(**{name: fn for name, fn in given.items() if fn is not None})

    def estimate_advantages(
        self,
        args: RLHFArgs,
        values: PerToken,
        rewards: Float[Tensor, " batch"] | PerToken,
        mask: Bool[Tensor, "batch gen"],
        token_rewards: PerToken | None = None,
        group: Int[Tensor, " batch"] | None = None,
        greedy_rewards: Float[Tensor, " batch"] | None = None,
    ) -> PerToken:
        """Compute advantages with the custom estimator, or the one that `args.advantages` names."""
        if token_rewards is None:
            token_rewards = F.token_rewards(rewards, mask)
        compared = {"group": group, "greedy_rewards": greedy_rewards}
        inputs = self._estimator(args), values.clone(), token_rewards.clone(), mask
        return F.estimate_advantages(*inputs, gamma=args.gamma, lam=args.gae_lambda, **compared)

    def estimate_returns(
        self,
        args: RLHFArgs,
        advantages: PerToken,
        values: PerToken,
        token_rewards: PerToken,
        mask: Bool[Tensor, "batch gen"],
    ) -> PerToken:
        """Compute the value head's targets: advantages plus values, or rewards to go."""
        parameters = self.estimator_parameters(args)
        if "values" in parameters or any(p.kind == p.VAR_POSITIONAL for p in parameters.values()):
            return F.compute_returns(advantages, values, mask)
        return F.rewards_to_go(token_rewards, args.gamma, mask)

    def _estimator(self, args: RLHFArgs) -> Callable[..., Tensor]:
        name = args.advantages if self.advantages is None else self.advantages
        return F.look_up(name, F.ADVANTAGES, "advantages")

    def estimator_parameters(self, args: RLHFArgs) -> Mapping[str, inspect.Parameter]:
        """Return the parameters of the advantage estimator by name, such as greedy_rewards."""
        return inspect.signature(self._estimator(args)).parameters


def validate_order(function: Callable[..., Any], names: Sequence[str], field: str) -> None:
    """Raise ConfigError if a function does not take these positional arguments, in order."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of torch's own functions
        return
    parameters = signature.parameters
    try:
        pairs = signature.bind(*names).arguments.items()
        is_valid = all(p == n or (p not in names and n not in parameters) for p, n in pairs)
    except TypeError:
        is_valid = False
    if not is_valid:
        raise ConfigError(
            f"{field} is called with ({', '.join(names)}), but the function is "
            f"{getattr(function, '__name__', function)}({', '.join(parameters)}). Pass a function "
            "of these arguments, in this order."
        )


def validate_terms(*terms: Any) -> None:
    names = "clipped_surrogate", "value_loss", "entropy_bonus", "kl_penalty"
    for name, term in zip(names, terms, strict=True):
        F.check_result(name, term, (), "minibatch, such as the masked_mean,")
        if torch.is_grad_enabled() and not term.requires_grad and term.item():
            raise ConfigError(f"{name} returned a number without gradient. Do not detach it.")


def describe_source(part: Any, depth: int = 3) -> str:
    """Return the name of a function or class, and a digest of its source and settings.

    Settings are defaults, attributes, and outer and global variables, with the source of functions
    in them to this depth. What its own calls assign, such as a counter, is not a setting.
    """
    if isinstance(part, Mapping | list | tuple):
        items = part.items() if isinstance(part, Mapping) else enumerate(part)
        return ", ".join(f"{name}: {describe_source(each, depth)}" for name, each in items)
    if inspect.ismethod(part):
        return f"{part.__name__} of {describe_source(part.__self__, depth)}"
    if isinstance(part, functools.partial):
        name, source = describe_source(part.func, depth), ""
        held = dict(enumerate(part.args)) | part.keywords
    else:
        kind = part if hasattr(part, "__qualname__") else type(part)
        name, source, assigned = kind.__qualname__, read_source(kind), assigned_names(kind)
        held = function_settings(part) | getattr(part, "__dict__", {})
        held = {name: value for name, value in held.items() if name not in assigned}
    settings = json.dumps(held, skipkeys=True, default=lambda x: describe_held(x, depth - 1))
    return f"{name} {hashlib.sha256(f'{source}{settings}'.encode()).hexdigest()[:12]}"


def function_settings(part: Any) -> dict[str, Any]:
    """Return outer variables, defaults and plain globals of a function, or of a __call__."""
    part = part if inspect.isfunction(part) else vars(type(part)).get("__call__")
    if not inspect.isfunction(part):
        return {}
    cells = zip(part.__code__.co_freevars, part.__closure__ or (), strict=True)
    held = {name: cell.cell_contents for name, cell in cells if cell != CellType()}
    named = named_values(part.__globals__, all_names(part.__code__) - assigned_names(part))
    named = {name: x for name, x in named.items() if x is not part}
    return held | named | {"(defaults)": [part.__defaults__, part.__kwdefaults__]}


def named_values(scope: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """Return plain values and functions of these names, also those in modules of the user."""
    plain, found = str | int | float | list | tuple | dict | FunctionType, {}
    for name in sorted(names & scope.keys()):
        x = scope[name]
        if isinstance(x, plain):
            found[name] = x
        elif isinstance(x, ModuleType) and not INSTALLED.search(getattr(x, "__file__", None) or ""):
            found[name] = named_values(vars(x), names - {name})
    return found


def all_names(code: CodeType) -> set[str]:
    inner = (all_names(x) for x in code.co_consts if isinstance(x, CodeType))
    return {*code.co_names}.union(*inner)


def describe_held(x: Any, depth: int) -> Any:
    if isinstance(x, Tensor):
        x = x.detach().double().cpu()
        return x.tolist() if x.numel() < 10_000 else [*x.shape, x.sum().item(), x.norm().item()]
    if isinstance(x, np.ndarray):
        return f"{x.shape} {hashlib.sha256(x.tobytes()).hexdigest()}"
    if isinstance(x, nn.Module):
        return [type(x).__qualname__, dict(x.state_dict())]
    name = getattr(x, "__qualname__", type(x).__qualname__)
    return describe_source(x, depth) if callable(x) and depth else name


def read_source(kind: Any) -> str:
    code = getattr(inspect.unwrap(kind), "__code__", None)
    with contextlib.suppress(OSError, TypeError):  # built in, or typed at a prompt
        if code is None or code.co_name != "<lambda>":  # whose line has other code
            return inspect.getsource(kind)
    return "" if code is None else describe_code(code)


def describe_code(code: CodeType) -> str:
    sets = [sorted(map(repr, x)) if isinstance(x, frozenset) else x for x in code.co_consts]
    constants = [describe_code(x) if isinstance(x, CodeType) else x for x in sets]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def assigned_names(kind: Any) -> set[str]:
    """Return the names that a function, or methods of a class after __init__, assign."""
    methods = inspect.getmembers(kind, inspect.isfunction) if isinstance(kind, type) else ()
    functions = [each for name, each in methods if name not in ("__init__", "__post_init__")]
    found = filter(inspect.isfunction, map(inspect.unwrap, functions or [kind]))
    steps = (step for function in found for step in get_instructions(function))
    return {step.argval for step in steps if step.opname in STORES}
