"""Packages of the wheel: rlhf_lab, and the lessons, which are next to it in a clone."""

from setuptools import find_packages, setup

LESSONS = {f"rlhf_lab.course.{name}": name for name in ("notebooks", "solutions")}

setup(packages=[*find_packages(include=["rlhf_lab*"]), *LESSONS], package_dir=LESSONS)
