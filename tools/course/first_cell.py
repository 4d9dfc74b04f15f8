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
elif importlib.util.find_spec("rlhf_lab") is None:  # Colab, Kaggle and other machines without it
    %pip install --quiet rlhf_lab=={version}
    importlib.invalidate_caches()
    if importlib.util.find_spec("rlhf_lab") is None:
        raise RuntimeError("rlhf_lab was not installed: on Kaggle, switch Internet on in Settings.")
"""
COLAB = "https://colab.research.google.com"
KAGGLE = "https://kaggle.com"


def first_cell() -> str:
    """The first cell's source: one thread, and the package of the notebook's own version.

    It works unchanged in a clone, beside an installed package, and where there is none yet.
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
