"""Interventions: changes of activations that hold for a whole run and are part of its record."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.hooked_transformer import HookPoint
from rlhf_lab.training.callback_output import function_name
from rlhf_lab.training.callbacks import validate_callable
from rlhf_lab.training.capture import resolve_sites

Stage = Literal["rollout", "learning"]
STAGES = get_args(Stage)


class Where(NamedTuple):
    """What an intervention is told beside the activation.

    Args:
        phase: the learning phases that are done.
        event: "rollout" while the policy writes and is compared with the reference (also in an
            evaluation, or for a capture), "learning" while it learns.
        site: the hook point.
    """

    phase: int
    event: Stage
    site: str


InterventionFn = Callable[[Tensor, Where], Tensor | None]


def _refuse_unlike(changed: Any, shape: torch.Size, dtype: torch.dtype, name: str) -> None:
    """Refuse what an intervention made of an activation unless it is one of numbers, and alike.

    Infinity is allowed, as attention scores hold it.
    """
    if not isinstance(changed, Tensor):
        found = f"{changed!r:.40}"
    elif changed.shape != shape or changed.dtype != dtype:
        found = f"{tuple(changed.shape)} of {changed.dtype}"
    elif changed.isnan().any():
        found = "nan"
    else:
        return
    raise ConfigError(
        f"the intervention {name!r} returned {found}; return an activation like the one that it "
        f"was given, {tuple(shape)} of {dtype} without nan."
    )


class Interventions:
    """The interventions of one policy, which act as permanent hooks on it.

    Args:
        policy: whose activations are changed; the reference is left as it is.
        phase: says which phase it is.

    Attributes:
        records: name, site and events of each, as in run.json.
    """

    def __init__(self, policy: TransformerWithValueHead, phase: Callable[[], int]) -> None:
        self.policy, self.phase = policy, phase
        self.records: list[dict[str, Any]] = []
        self._event: Stage = "rollout"

    def add(
        self,
        site: str,
        fn: InterventionFn,
        during: tuple[Stage, ...] = STAGES,
        name: str | None = None,
    ) -> None:
        """Let `fn(activation, where)` change an activation from now on.

        Args:
            fn: returns the new activation, or changes it in place.
            name: what a resumed run asks for it by; the function's own when None.

        Raises:
            ConfigError: no function, an unknown site or event, an output as site, or a name that is
                empty or taken.
        """
        validate_callable(fn, "intervene", ("activation", "where"))
        name = function_name(fn) if name is None else name
        if not name:
            raise ConfigError("name='' is empty; a resumed run asks for the intervention by it.")
        if not during or not set(during) <= set(STAGES):
            raise ConfigError(f"during={during!r} must name {' or '.join(STAGES)}, or both.")
        if any(name == other["name"] for other in self.records):
            raise ConfigError(f"name={name!r} is that of another intervention; choose another.")
        points = self.policy.hook_dict
        sites = resolve_sites(self.policy, [site])
        if not set(sites) <= points.keys():
            raise ConfigError(f"site={site!r} is an output; choose a hook point of the model.")

        def act(activation: Tensor, hook: HookPoint) -> Tensor | None:
            if self._event not in during:
                return None
            shape, dtype = activation.shape, activation.dtype
            returned = fn(activation, Where(self.phase(), self._event, hook.name))
            _refuse_unlike(activation if returned is None else returned, shape, dtype, name)
            return returned

        for each in sites:
            # Permanent, so that a listener's reset_hooks() does not take it off in silence.
            points[each].add_hook(act, is_permanent=True)
        self.records.append({"name": name, "site": site, "during": list(during)})

    @staticmethod
    def refuse_late(has_begun: bool, site: str) -> None:
        """Refuse, with a ConfigError, an intervention in a run that has begun without it."""
        if has_begun:
            raise ConfigError(
                f"the run has begun without the intervention at site={site!r}; "
                "call intervene before the first phase."
            )

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """What runs in here is learning; everything else counts as rollout."""
        before, self._event = self._event, "learning"
        try:
            yield
        finally:
            self._event = before

    def put_back(
        self, records: list[dict[str, Any]], given: Mapping[str, InterventionFn] | None, run: Any
    ) -> None:
        """Add the interventions of a recorded run again, with a function for each name.

        Raises:
            ConfigError: a function is missing, or one is given that the run does not have.
        """
        given, names = dict(given or {}), [record["name"] for record in records]
        for name in names:
            if name not in given:
                raise ConfigError(
                    f"{run} was trained with the intervention {name!r}, whose function is not "
                    f"stored; hand it in with interventions={{{name!r}: fn}}."
                )
        for name in given:
            if name not in names:
                raise ConfigError(
                    f"{run} has no intervention {name!r}; there are {', '.join(names) or 'none'}."
                )
        for record in records:
            name = record["name"]
            self.add(record["site"], given[name], tuple(record["during"]), name)
