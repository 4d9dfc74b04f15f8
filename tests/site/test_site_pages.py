"""Public names and docstrings as the site shows them."""

import inspect

from tools.site.public import public_names, rooms, text_after

PACKAGES = ("compat", "config", "course", "functional", "models", "organism", "probes", "rewards")
PACKAGES += ("training", "tuning", "views")


def test_the_rooms_are_the_packages_and_what_they_export_is_documented():
    assert {f"rlhf_lab.{name}" for name in PACKAGES} < set(rooms())
    for room in rooms():
        for public in public_names(room):
            value = public.value
            if inspect.isclass(value) or inspect.isfunction(value):
                assert value.__module__ == public.home, public
                assert inspect.getdoc(value), public
            else:
                assert text_after(public.home, public.name), f"{public.path} says nothing of itself"
