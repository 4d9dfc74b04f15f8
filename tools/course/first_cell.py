"""First code cell of each lesson: set one thread, and find the package in a clone or installed.

rlhf_lab is not registered on PyPI, so the cell does not install anything by that name.
"""

from rlhf_lab import __version__

MARK = "# first cell"  # a cell of a master that is replaced by the cell below
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
FIRST_CELL = SOURCE.format(version=__version__).strip()
