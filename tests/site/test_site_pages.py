"""Public names and docstrings as the site shows them."""

import importlib
import inspect

from tools.site.docstrings import readable_signature, to_rst
from tools.site.public import public_names, rooms, text_after

PACKAGES = ("compat", "config", "course", "functional", "models", "organism", "probes", "rewards")
PACKAGES += ("training", "tuning", "views")


def test_the_rooms_are_the_packages_and_what_they_export_is_documented():
    assert {f"rlhf_lab.{name}" for name in PACKAGES} < set(rooms())
    for room in rooms():
        module = importlib.import_module(room)
        found = {public.name for public in public_names(room)}
        if hasattr(module, "__all__"):
            assert found == set(module.__all__), room
        for public in public_names(room):
            value = public.value
            if inspect.isclass(value) or inspect.isfunction(value):
                assert value.__module__ == public.home, public
                assert inspect.getdoc(value), public
            else:
                assert text_after(public.home, public.name), f"{public.path} says nothing of itself"


def test_a_docstring_becomes_markup_with_links():
    assert to_rst("see `masked_mean`, `x` of *args|b and pi_") == (
        "see :py:obj:`masked_mean <rlhf_lab.functional.masked_mean>`, "
        "``x`` of \\*args\\|b and pi\\_"
    )
    assert to_rst("`length` of `RLHFTrainer.on`", {"length"}) == "``length`` of ``RLHFTrainer.on``"
    assert to_rst("`masked_mean()` ``raw *`` :py:obj:`y`") == (
        ":py:obj:`masked_mean() <rlhf_lab.functional.masked_mean>` ``raw *`` :py:obj:`y`"
    )
    two = "Raises:\n    ConfigError, LoadError: see\n        there.\n    RunError: x\n"
    assert to_rst(two) == (
        "Raises:\n    ConfigError: see\n        there.\n    LoadError: see\n        there.\n"
        "    RunError: x\n"
    )


def test_signatures_are_shown_as_they_are_written():
    said = (
        "(x: ~collections.abc.Callable[[...], ~torch.Tensor] = <function a>, y: dict = <factory>)"
    )
    assert readable_signature(said) == "(x: Callable[[...], Tensor] = a, y: dict = ...)"
    assert readable_signature("(f=<function A.<locals>.g at 0x7f>)") == "(f=g)"
    assert readable_signature("(x: Float[Tensor, 'batch gen'] = 1.0)") == (
        "(x: Float[Tensor, 'batch gen'] = 1.0)"
    )
