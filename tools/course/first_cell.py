"""The first code cell of each lesson, which sets it up."""

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


def first_cell() -> str:
    """Return the first cell's source: set one thread, and find the package.

    The cell works unchanged in a clone and with an installed package; without the package, the
    error contains the two commands that install it. rlhf_lab is not registered on PyPI, so the
    cell installs nothing by that name.
    """
    return SOURCE.format(version=__version__).strip()
