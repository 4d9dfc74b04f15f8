"""Checkpoint metadata: what a checkpoint stores as JSON next to its tensors.

`flatten_state` splits a state_dict of any class into JSON and named tensors.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlhf_lab.errors import ConfigError

if TYPE_CHECKING:
    from rlhf_lab.training.trainer import RLHFTrainer

CONTAINERS = {"list": list, "tuple": tuple, "dict": dict, "Counter": Counter}
STATEFUL = ("optimizer", "scheduler", "kl_controller")


def flatten_state(state: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return `state` as JSON; add each tensor in it to `tensors`, under its path from `name`.

    Raises:
        ConfigError: If a value is not a number, a text, None, a tensor or a container of these.
    """
    kind = type(state).__name__
    if state is None or type(state) in (bool, int, float, str):
        return state
    if isinstance(state, Tensor):
        tensors[name] = state
        return {"Tensor": name}
    if CONTAINERS.get(kind) is not type(state):
        raise ConfigError(
            f"{name} is a {kind}, which a checkpoint cannot store. Define state_dict() and "
            "load_state_dict() with numbers, texts, lists, dicts and tensors only."
        )
    items = state.items() if isinstance(state, dict) else enumerate(state)
    values = [[key, flatten_state(value, f"{name}.{key}", tensors)] for key, value in items]
    return {kind: values if isinstance(state, dict) else [value for _, value in values]}


def unflatten_state(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that `flatten_state` made JSON and tensors of."""
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "Tensor":
        return tensors[content]
    if kind in ("list", "tuple"):
        return CONTAINERS[kind](unflatten_state(value, tensors) for value in content)
    return CONTAINERS[kind]({key: unflatten_state(value, tensors) for key, value in content})


def get_state(component: Any) -> dict[str, Any]:
    """Return `state_dict()`, or the attributes of a KL controller that does not define it."""
    return component.state_dict() if hasattr(component, "state_dict") else dict(vars(component))


def load_state(component: Any, state: dict[str, Any]) -> None:
    """Restore what `get_state` returned."""
    if hasattr(component, "load_state_dict"):
        component.load_state_dict(state)
    else:
        vars(component).update(state)


def make_training_state(trainer: "RLHFTrainer") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the state of optimizer, scheduler and KL controller, as JSON and tensors."""
    tree, tensors = {}, {}
    for name in STATEFUL:
        component = getattr(trainer, name)
        state = flatten_state(get_state(component), name, tensors)
        tree[name] = {"class": type(component).__qualname__, "state": state}
    return tree, tensors


def make_metadata(trainer: "RLHFTrainer", name: str, phase: int) -> dict[str, Any]:
    """Return the metadata of the checkpoint `name`, made after `phase` learning phases."""
    return {
        "run": trainer.recorder.run_id,
        "name": name,
        "phase": phase,
        "args": trainer.args.to_dict(),
        "best": trainer.recorder.best,
        "reward_moments": dataclasses.asdict(trainer.rewards.moments),
        "reference_phase": trainer.reference_phase,
    }
