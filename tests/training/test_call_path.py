"""The path from `train` to the loss: how many frames, functions and files a reader opens."""

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlhf_lab
from rlhf_lab import functional as F
from rlhf_lab.config import RLHFArgs
from rlhf_lab.training import RLHFTrainer

PACKAGE = Path(rlhf_lab.__file__).parent
MODELS = str(PACKAGE / "models")  # the model itself is not counted
ARGS = RLHFArgs(preset="reel", total_phases=1, batch_size=8)

pytestmark = pytest.mark.usefixtures("no_type_checks")


def called(run: Callable[[], Any]) -> set[tuple[str, int]]:
    """Return file and first line of each function of the package that a call runs.

    Comprehensions and lambdas are not functions that a reader opens.
    """
    functions = set()

    def profile(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        file = code.co_filename
        if event == "call" and file.startswith(str(PACKAGE)) and not file.startswith(MODELS):
            if not code.co_name.startswith("<"):
                functions.add((file, code.co_firstlineno))

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return functions


def n_files(functions: set[tuple[str, int]]) -> int:
    return len({file for file, _ in functions})


@pytest.mark.slow
def test_learning_phase_and_train_run_few_functions(tmp_path):
    trainer = RLHFTrainer(ARGS)
    rollout = trainer.rollout_phase()
    learning = called(lambda: trainer.learning_phase(rollout))
    assert len(learning) <= 45 and n_files(learning) <= 18
    whole = called(lambda: RLHFTrainer(ARGS, out=tmp_path / "run").train())
    assert len(whole) <= 275 and n_files(whole) <= 65


@pytest.mark.slow
def test_stack_from_train_to_kl_formula_is_short(tmp_path):
    stack: list[str] = []

    def kl_penalty(kl, kl_coef, mask):
        frames = traceback.extract_stack()[:-1]
        stack[:] = [frame.name for frame in frames if frame.filename.startswith(str(PACKAGE))]
        return F.calc_kl_penalty(kl, kl_coef, mask)

    RLHFTrainer(ARGS, out=tmp_path / "run", kl_penalty=kl_penalty).train()
    assert stack == [
        *("train", "__iter__", "run_phase", "learning_phase", "learning_phase"),
        *("objective_terms", "kl_penalty"),
    ]
