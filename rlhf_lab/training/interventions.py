"""Interventions: changes of activations that hold for a whole run and are part of its record."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.transformer_lens import HookPoint
from rlhf_lab.training.capture import resolve_sites
from rlhf_lab.training.listener_output import name_of

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
            ConfigError: an unknown site or event, an output as site, or a name that is taken.
        """
        name = name or name_of(fn)
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
            return fn(activation, Where(self.phase(), self._event, hook.name))

        for each in sites:
            # Permanent, so that a listener's reset_hooks() does not take it off in silence.
            points[each].add_hook(act, is_permanent=True)
        self.records.append({"name": name, "site": site, "during": list(during)})

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
