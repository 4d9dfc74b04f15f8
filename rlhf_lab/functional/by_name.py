"""Dispatch by name: look up a function, and match arguments to parameters by name."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["call_by_name", "check_order", "look_up"]


def look_up(
    choice: str | Callable[..., Any], table: Mapping[str, Callable[..., Any]], field: str
) -> Callable[..., Any]:
    """Give the function that a table has under a name; a function stands for itself.

    1. Return `choice` if it can be called.
    2. Otherwise return the table's entry.

    Raises ValueError naming `field` and the names that the table has.
    """
    if callable(choice):
        return choice
    if choice not in table:
        names = ", ".join(repr(name) for name in table)
        raise ValueError(f"{field} is {choice!r}; give one of {names}, or a function of your own.")
    return table[choice]


def call_by_name(
    function: Callable[..., Any],
    available: Mapping[str, Any],
    field: str,
    in_order: Sequence[str] = (),
) -> Any:
    """Call a function with those of the available values that its parameters name.

    1. A function that takes `*args`, and needs nothing else, gets the values that `in_order` names.
    2. Otherwise leave out what is None (it was not given, and the function's own default counts),
       and what a `functools.partial` has already bound.
    3. Refuse if a parameter without a default is left without a value.
    4. Call the function with what it has a parameter for (everything, if it takes `**kwargs`).

    Raises ValueError naming `field`, the function, and the parameter.
    """
    parameters = inspect.signature(function).parameters.values()
    kinds = {p.kind for p in parameters}
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = [p.name for p in named if p.default is p.empty]
    if inspect.Parameter.VAR_POSITIONAL in kinds and not needed:
        return function(*(available[name] for name in in_order))
    bound = getattr(function, "keywords", {})
    given = {name: x for name, x in available.items() if x is not None and name not in bound}
    missing = [name for name in needed if name not in given]
    if missing:
        raise ValueError(
            f"{field}: {getattr(function, '__name__', function)} has a parameter {missing[0]!r} "
            f"that nothing was given for; available: {', '.join(given)}."
        )
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds
    wanted = given if takes_all else {p.name for p in named}
    return function(**{name: x for name, x in given.items() if name in wanted})


def check_order(function: Callable[..., Any], names: Sequence[str], field: str) -> None:
    """Refuse a function that takes other arguments than these, or takes them in another order.

    1. See if the function can be called with that many positional arguments.
    2. See that no parameter which has one of these names would be given another's argument.

    Functions without a readable signature (torch's own) pass. Raises ValueError naming `field`, the
    function, and what it is called with.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        return
    called = f"{field} is called with ({', '.join(names)})"
    takes = f"{getattr(function, '__name__', function)}({', '.join(signature.parameters)})"
    try:
        given = signature.bind(*names).arguments
    except TypeError:
        raise ValueError(
            f"{called}, which {takes} does not take; give a function of these, in this order."
        ) from None
    for parameter, value in given.items():
        misplaced = parameter in names or value in signature.parameters
        if parameter != value and misplaced:
            raise ValueError(
                f"{called}, but {takes} has {parameter!r} where {value!r} stands; "
                "give a function of these, in this order."
            )
