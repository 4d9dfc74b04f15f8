"""The top of each lesson: badges below its title, and the cell that sets it up."""

import tomllib
from pathlib import Path

from rlhf_lab import __version__

MARK = "# first cell"
"""A master's code cell that is this line alone becomes the cell below."""
SOURCE = """\
import importlib.util
import os
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", message="IProgress not found")  # bars without ipywidgets
warnings.filterwarnings("ignore", message="Using a non-tuple sequence")  # how eindex picks entries
os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small are not faster with more threads
if Path("../rlhf_lab/__init__.py").is_file():
    sys.path.insert(0, str(Path("..").resolve()))  # a clone, installed or not
elif importlib.util.find_spec("rlhf_lab") is None:
    raise ModuleNotFoundError(
        "rlhf_lab is not installed. Run `pip install -e .` in a clone of rlhf_lab, or "
        "`pip install path/to/rlhf_lab-{version}-py3-none-any.whl`. Then restart the kernel."
    )
"""
COLAB = "https://colab.research.google.com"
KAGGLE = "https://kaggle.com"


def first_cell() -> str:
    """Return the first cell's source: set one thread, and find the package.

    The cell works unchanged in a clone and with an installed package; without the package, the
    error contains the two commands that install it. rlhf_lab is not registered on PyPI, so the
    cell installs nothing by that name.
    """
    return SOURCE.format(version=__version__).strip()


def badges(root: Path, lesson: str) -> str:
    """Links that open the unsolved lesson in Colab and in Kaggle, as Markdown badges.

    Their address is `Repository` in [project.urls] of pyproject.toml, on GitHub; without it there
    are none.
    """
    path = root / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"] if path.is_file() else {}
    repository = project.get("urls", {}).get("Repository", "").removesuffix("/")
    if not repository:
        return ""
    file = f"{repository}/blob/main/notebooks/{lesson}.ipynb"
    in_colab = f"{COLAB}/github/{file.removeprefix('https://github.com/')}"
    return (
        f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]({in_colab}) "
        f"[![Open in Kaggle]({KAGGLE}/static/images/open-in-kaggle.svg)]"
        f"({KAGGLE}/kernels/welcome?src={file})"
    )
