"""From a small master to its two notebooks."""

import ast
import inspect
from pathlib import Path

import nbformat
import pytest

from rlhf_lab import __version__
from rlhf_lab import functional as F
from rlhf_lab.course.registry import all_exercises, find_exercise
from rlhf_lab.errors import LoadError
from tools.course import builder, gate
from tools.course.stub import emptied, solution_source, stub_source

MASTER = """# %% [markdown]
# # A toy lesson

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

PLAIN = """# %%
import sys
from pathlib import Path

from rlhf_lab.course import Predictions

predictions = Predictions()
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


def sources(path: Path) -> list[str]:
    """The code cells of a notebook."""
    cells = nbformat.read(path, as_version=4).cells
    return [cell.source for cell in cells if cell.cell_type == "code"]


def test_the_learner_gets_a_stub_a_check_and_an_open_prediction(root: Path) -> None:
    notebook = builder.learner_notebook(root / "solutions" / "99_toy.py")
    nbformat.validate(notebook)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert code[1].startswith(
        "from rlhf_lab.functional.masks import at_least_float32, check_same_shape\n"
    )
    assert 'old_logprobs: Float[Tensor, "batch gen"]' in code[1]
    assert "Take the exponential." in code[1]
    assert code[1].endswith('    """\n    raise NotImplementedError')
    assert ".exp()" not in code[1]
    assert code[2] == "check(policy_ratio)"
    assert code[3] == 'guess = predictions.guess(..., among=["up", "down"])'
    heading = notebook.cells[2].source
    assert "`policy_ratio`" in heading and "●○○○○" in heading and "5 minutes" in heading
    assert not any(cell.get("outputs") for cell in notebook.cells)


def test_the_first_cell_is_that_of_all_lessons_with_the_packages_version(root: Path) -> None:
    master = root / "solutions" / "99_toy.py"
    master.write_text(MASTER.replace("# %%\nfrom", "# %%\n# first cell\n\n# %%\nfrom", 1))
    for notebook in (builder.learner_notebook(master), builder.solution_notebook(master)):
        assert [cell.cell_type for cell in notebook.cells[:3]] == ["markdown", "code", "code"]
        assert f"rlhf_lab-{__version__}-py3-none-any.whl" in notebook.cells[1].source
        assert notebook.cells[0].source == "# A toy lesson"


def test_the_solution_has_the_packages_source_and_the_prediction(root: Path) -> None:
    notebook = builder.solution_notebook(root / "solutions" / "99_toy.py")
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert inspect.getsource(inspect.unwrap(F.policy_ratio)).strip() in code[1]
    assert code[3] == 'guess = predictions.guess("up", among=["up", "down"])'


@pytest.mark.kernel
def test_what_a_cell_prints_and_shows_stays_in_its_order(root: Path) -> None:
    """A stored page is read like a live one: a line below the table that it speaks of."""
    printed = """
# %%
from IPython.display import display

print("one")
print("two")
display({"a": 1})
print("three")
"""
    master = root / "solutions" / "99_toy.py"
    master.write_text(PLAIN + printed, encoding="utf-8")
    builder.build_lesson(master, root)
    cells = nbformat.read(master.with_suffix(".ipynb"), as_version=4).cells
    outputs = [o.get("text") or o.data["text/plain"] for o in cells[-1].outputs]
    assert outputs == ["one\ntwo\n", "{'a': 1}", "three\n"]


@pytest.mark.kernel
def test_building_executes_once_and_building_again_changes_nothing(root: Path) -> None:
    master = root / "solutions" / "99_toy.py"
    master.write_text(PLAIN)
    built = builder.build_lesson(master, root)
    paths = [root / "notebooks" / "99_toy.ipynb", root / "solutions" / "99_toy.ipynb"]
    assert built.executed and list(built.changed) == paths
    before = [path.read_bytes() for path in paths]

    outputs = nbformat.read(paths[1], as_version=4).cells[-1].outputs
    shown = [output.get("text") or output.data["text/plain"] for output in outputs]
    assert shown == ["seen up\n./place\n", "<object at 0x...>"]
    assert "execution_count" not in outputs[0] and outputs[1].execution_count is None

    assert builder.build_lesson(master, root) == builder.Built("99_toy", (), False)
    again = builder.build_lesson(master, root, again=True)
    assert again == builder.Built("99_toy", (), True)
    assert [path.read_bytes() for path in paths] == before
    assert gate.lesson_problems(root) == []

    master.write_text(f"# %% [markdown]\n# A text.\n\n{PLAIN}")
    assert builder.build_lesson(master, root) == builder.Built("99_toy", tuple(paths), False)
    kept = nbformat.read(paths[1], as_version=4)
    assert kept.cells[0].source == "A text." and kept.cells[-1].outputs == outputs
    assert gate.lesson_problems(root) == []

    paths[0].write_text(paths[0].read_text().replace("...", "0"))
    (root / "notebooks" / "98_gone.ipynb").write_text("{}")
    problems = gate.lesson_problems(root)
    assert any("98_gone.ipynb has no master" in problem for problem in problems)
    assert any("the notebook differs from its master" in problem for problem in problems)


def test_a_lesson_without_notebooks_is_reported(root: Path) -> None:
    problems = gate.lesson_problems(root)
    assert problems == ["99_toy: notebooks/99_toy.ipynb is missing; run `make course`"]


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
    ):
        master.write_text(f"# %%\n{cell}\n")
        with pytest.raises(LoadError, match="give the line a cell of its own"):
            builder.learner_notebook(master)


def test_a_folder_without_masters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="has no lesson"):
        builder.masters(tmp_path)


def test_a_stub_without_steps_has_the_first_paragraph_of_the_docstring_alone() -> None:
    exercise = find_exercise("recovered_fraction")
    whole, stub = solution_source(exercise, set()), stub_source(exercise, set())
    assert "1. Average each" in whole and "f = (mean patched" in whole
    assert "1. Average each" not in stub and "f = (mean patched" not in stub
    namespace: dict = {}
    exec(stub, namespace)
    first = (
        "Compute how much of an effect a patch recovers: 0 none of it, 1 all; with its interval."
    )
    assert namespace["recovered_fraction"].__doc__ == first


def test_a_docstring_of_several_lines_is_cut_at_its_first_blank_line() -> None:
    source = 'def f():\n    """One\n    sentence.\n\n    1. A step.\n    """\n    return 1'
    kept = 'def f():\n    """One\n    sentence."""\n    raise NotImplementedError'
    assert emptied(source, step_free=True) == kept
    assert "1. A step." in emptied(source)


def test_every_exercise_makes_a_stub_that_is_unsolved_and_a_solution_that_runs() -> None:
    for name in ("kl_per_token", "get_logprobs", "ReplayMemory", "TransformerWithValueHead"):
        exercise = find_exercise(name)
        assert gate.ships_unsolved(stub_source(exercise, set()), exercise)
        assert not gate.ships_unsolved(solution_source(exercise, set()), exercise)
        namespace: dict = {}
        exec(solution_source(exercise, set()), namespace)
        assert namespace[name].__name__ == name
        exec(stub_source(exercise, set()), namespace)


def test_private_helpers_are_imported_for_the_solution_only() -> None:
    exercise = find_exercise("get_logprobs")
    assert "_ListIndexAsTuple" in solution_source(exercise, set())
    assert "_ListIndexAsTuple" not in stub_source(exercise, set())


def test_names_that_are_bound_already_are_not_imported_again() -> None:
    exercise = find_exercise("calc_kl_penalty")
    bound = {"Bool", "Float", "Tensor", "Denominator", "masked_mean"}
    assert "import" not in stub_source(exercise, bound)


def test_of_a_class_only_the_learners_methods_are_emptied() -> None:
    first = 'class A:\n    def f(self):\n        """One."""\n        return 1\n\n'
    second = '    def g(self):\n        """Two."""\n'
    source = first + second + "        return 2\n"
    assert emptied(source, ("g",)) == first + second + "        raise NotImplementedError"


@pytest.mark.parametrize(
    ("choices", "among"),
    [
        ("0.0, 0.3 or 3.0", ", among=[0.0, 0.3, 3.0]"),
        ("a number from 0 to 6", ", among=range(0, 7)"),
        ("in words", ""),
    ],
)
def test_the_choices_of_a_prediction_become_arguments(choices: str, among: str) -> None:
    source = builder.with_guesses(f"n = 6  # predict: {choices}", Path("99_toy.py"), solved=False)
    assert source == f"n = predictions.guess(...{among})"


@pytest.mark.parametrize(
    "source",
    [
        'a = (\n    "x"  # predict: "x" or "y"\n)',
        'a = "x"  #  predict: "x" or "y"',
        'a = "x"  # predict: x or y',
        'a = "x"  # predict: a letter',
    ],
)
def test_a_prediction_that_would_ship_filled_in_is_refused(source: str) -> None:
    """The formatter had wrapped one, and the learner was given its answer."""
    with pytest.raises(LoadError, match="99_toy"):
        builder.with_guesses(source, Path("99_toy.py"), solved=False)


def test_a_stub_promises_nothing_for_arguments_that_the_check_does_not_try() -> None:
    for exercise in all_exercises():
        stub = stub_source(exercise, set())
        own = ast.parse(stub).body[-1]
        if exercise.methods:
            own = next(node for node in own.body if getattr(node, "name", "") in exercise.methods)
        told = ast.get_docstring(own)
        assert ("Raises" in told) == exercise.errors_tried, exercise.name
        assert "empty result" not in told, exercise.name
    assert "\n\n    mean = sum_i" in stub_source(find_exercise("masked_mean"), set())
