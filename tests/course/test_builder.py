"""From a small master to its two notebooks."""

from pathlib import Path

import nbformat
import pytest

from rlhf_lab.errors import LoadError
from tools.course import builder, gate
from tools.course.__main__ import main

MASTER = """# %% [markdown]
# # 99 A toy lesson

# %%
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.course import check

# %%
from rlhf_lab.functional import policy_ratio  # exercise

# %%
guess = "up"  # predict: "up" or "down"

# %%
print(policy_ratio.__name__, guess)
"""

PLAIN = """# %% [markdown]
# # 99 A toy lesson
#
# By the end of this lesson, you will be able to build one. Allow about {minutes} minutes.

# %%
import sys
from pathlib import Path
from types import SimpleNamespace

predictions = SimpleNamespace(guess=lambda value, among: value)  # instead of a slow import
guess = "up"  # predict: "up" or "down"

# %%
print("seen", guess)
print("a warning", file=sys.stderr)
print(Path.cwd() / "place")
object()
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one small lesson."""
    (tmp_path / "solutions").mkdir()
    (tmp_path / "solutions" / "99_toy.py").write_text(MASTER)
    return tmp_path


@pytest.mark.kernel
def test_building_executes_once_and_building_again_changes_nothing(root: Path) -> None:
    master = root / "solutions" / "99_toy.py"
    master.write_text(PLAIN)
    built = builder.build_lesson(master, root)
    paths = [root / "notebooks" / "99_toy.ipynb", root / "solutions" / "99_toy.ipynb"]
    assert built == (paths, True)
    before = [path.read_bytes() for path in paths]

    outputs = nbformat.read(paths[1], as_version=4).cells[-1].outputs
    shown = [output.get("text") or output.data["text/plain"] for output in outputs]
    assert shown == ["seen up\n./place\n", "<object at 0x...>"]
    assert "execution_count" not in outputs[0] and outputs[1].execution_count is None

    assert builder.build_lesson(master, root) == ([], False)
    assert builder.build_lesson(master, root, again=True) == ([], True)
    assert [path.read_bytes() for path in paths] == before
    assert gate.lesson_problems(root) == []

    master.write_text(PLAIN.replace("A toy lesson", "A text"))
    assert builder.build_lesson(master, root) == (paths, False)
    kept = nbformat.read(paths[1], as_version=4)
    assert kept.cells[0].source.startswith("# 99 A text\n") and kept.cells[-1].outputs == outputs
    assert gate.lesson_problems(root) == []

    paths[0].write_text(paths[0].read_text().replace("...", "0"))
    (root / "notebooks" / "98_gone.ipynb").write_text("{}")
    problems = gate.lesson_problems(root)
    assert any("98_gone.ipynb has no master" in problem for problem in problems)
    assert any("the notebook differs from its master" in problem for problem in problems)


@pytest.mark.kernel
def test_a_cell_that_fails_is_told_in_one_sentence(root: Path) -> None:
    master = root / "solutions" / "99_toy.py"
    master.write_text("# %%\nraise RuntimeError('the cell broke')\n")
    with pytest.raises(LoadError, match="99_toy does not run: RuntimeError: the cell broke"):
        builder.build_lesson(master, root)


def test_an_exercise_line_with_company_is_refused(root: Path) -> None:
    master = root / "solutions" / "99_toy.py"
    for cell in (
        "import torch\nfrom rlhf_lab.functional import policy_ratio  # exercise",
        "from rlhf_lab.functional import policy_ratio, kl_per_token  # exercise",
        "import torch\nfrom rlhf_lab.functional import policy_ratio  # given",
    ):
        master.write_text(f"# %%\n{cell}\n")
        with pytest.raises(LoadError, match="Put this line into a separate cell"):
            builder.learner_notebook(master)


@pytest.mark.parametrize(
    "source",
    [
        'a = (\n    "x"  # predict: "x" or "y"\n)',
        'a = "x"  #  predict: "x" or "y"',
        'a = "x"  # predict: x or y',
        'a = "x"  # predict: a letter',
    ],
)
def test_a_prediction_that_would_ship_filled_in_raises(source: str) -> None:
    with pytest.raises(LoadError, match="99_toy"):
        builder.with_guesses(source, Path("99_toy.py"), solved=False)


def test_build_raises_on_unknown_lesson_or_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["build", "--root", str(tmp_path)]) == 2
    assert "has no lesson" in capsys.readouterr().err
    (tmp_path / "solutions").mkdir()
    (tmp_path / "solutions" / "01_one.py").write_text("# %%\n1\n")
    assert main(["build", "two", "--root", str(tmp_path)]) == 2
    assert "lesson 'two' is unknown; choose from one." in capsys.readouterr().err
