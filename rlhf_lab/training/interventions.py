"""Interventions: changes of activations for a whole run, which are part of its record."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.hooked_transformer import HookPoint
from rlhf_lab.training.callbacks import function_name
from rlhf_lab.training.capture import resolve_sites

Stage = Literal["rollout", "learning"]
STAGES = get_args(Stage)


class Where(NamedTuple):
    """Second argument of an intervention."""

    phase: int  # number of learning phases that are done
    event: Stage  # "learning" in a learning phase, otherwise "rollout" (also in an evaluation)
    site: str  # name of the hook point


InterventionFn = Callable[[Tensor, Where], Tensor | None]


class Interventions:
    """Interventions of one policy, registered as permanent hooks; the reference has none."""

    def __init__(
        self, policy: TransformerWithValueHead, progress: Callable[[], tuple[int, Stage]]
    ) -> None:
        for other in getattr(policy, "interventions", ()):
            raise ConfigError(
                f"policy has the intervention {other['name']!r} of another trainer. Load another."
            )
        self.policy, self.progress = policy, progress
        self.records: list[dict[str, Any]] = []  # name, site and stages of each, as in run.json
        policy.interventions = self.records  # of the trainer that was made last
        policy.last_start = getattr(policy, "last_start", [None])  # of any trainer, in a list
        self.last_start = policy.last_start[0]  # since a graph depends on the policy's attributes

    def add(
        self,
        site: str,
        fn: InterventionFn,
        during: Stage | tuple[Stage, ...] = STAGES,
        name: str | None = None,
    ) -> None:
        """Change an activation with `fn(activation, where)` from now on.

        Args:
            fn: returns the new activation, or changes it in place.
            name: by which a resumed run requires the function; the function's name if None.

        Raises:
            ConfigError: If site or stage is unknown, the site is an output, or the name is taken.
        """
        name = function_name(fn) if name is None else name
        during = (during,) if isinstance(during, str) else during
        if not during or not set(during) <= set(STAGES):
            raise ConfigError(f"during={during!r} must name {' or '.join(STAGES)}, or both.")
        if any(name == other["name"] for other in self.records):
            raise ConfigError(f"name={name!r} is taken by another intervention. Choose another.")
        points = self.policy.hook_dict
        sites = resolve_sites(self.policy, [site])
        if not set(sites) <= points.keys():
            raise ConfigError(f"site={site!r} is an output. Choose a hook point of the model.")

        def intervene(activation: Tensor, hook: HookPoint) -> Tensor | None:
            phase, stage = self.progress()
            if stage not in during:
                return None
            shape, dtype = activation.shape, activation.dtype
            result = fn(activation, Where(phase, stage, hook.name))
            new = activation if result is None else result
            fits = isinstance(new, Tensor) and (new.shape, new.dtype) == (shape, dtype)
            if not fits or new.isnan().any():  # infinity is allowed: attention scores contain it
                raise ConfigError(
                    f"The intervention {name!r} must return an activation of shape "
                    f"{tuple(shape)} and {dtype} without nan."
                )
            return result

        for each in sites:
            # permanent: reset_hooks() in a callback does not remove it
            points[each].add_hook(intervene, is_permanent=True)
        self.records.append({"name": name, "site": site, "during": list(during)})

    def restore(
        self, records: list[dict[str, Any]], given: Mapping[str, InterventionFn] | None, run: Any
    ) -> None:
        """Add the interventions of a recorded run, with a function for each name."""
        given, names = dict(given or {}), [record["name"] for record in records]
        for name in set(given) - set(names):
            raise ConfigError(f"{run} has no intervention {name!r}. Choose from {names}.")
        for record in records:
            name = record["name"]
            if name not in given:
                raise ConfigError(
                    f"{run} was trained with the intervention {name!r}, whose function is not "
                    f"stored. Pass interventions={{{name!r}: fn}}."
                )
            self.add(record["site"], given[name], tuple(record["during"]), name)
