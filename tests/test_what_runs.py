"""Readable code runs: a run calls the documented functions and the exercises."""

import ast
import contextlib
import dataclasses
import functools
import inspect
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import rlhf_lab
from rlhf_lab.config import RLHFArgs
from rlhf_lab.course.exercise import all_exercises
from rlhf_lab.functional import calc_kl_penalty
from rlhf_lab.probes import LogitShift, attach, default_suite
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.views.probe_pictures import PICTURE_ROWS, Snapshot
from tools.prose import page, quoted, resolve, rows

pytestmark = pytest.mark.usefixtures("no_type_checks")
PACKAGE = str(Path(rlhf_lab.__file__).parent)
SMALL = dict(preset="reel", total_phases=2, warmup_steps=1, batch_size=8, num_minibatches=2)
RUN = SMALL | dict(clip_coef=0.01, ent_coef=0.01, gen_len=6)
WHERE = {quoted(row[0])[0]: quoted(row[2]) for row in rows(page("metrics"), 3)}
OF_ENGINES = {"engine_kl_per_token", "effective_sample_fraction"}  # in test_rollout_engine.py
FUNCTIONS = sorted({n for metric in WHERE.keys() - OF_ENGINES for n in WHERE[metric]})
WHOLE = dict(gen_len=26, batch_size=32)  # whole reviews, which have a true reward
EQUAL_PAIRS = WHOLE | dict(samples_per_prompt=2, dynamic_sampling=1, reward_fn="count:the")
STOPS = dict(ratio_threshold=1.0001, batches_per_learning_phase=4, gen_len=26)
SUMS = dict(preset="sums", gen_len=32, batch_size=64, base_lr=1e-3)  # no metric is 0 then
OTHER_SETTINGS = {  # and the factor of the edit
    "functional.calc_policy_objective": (dict(policy_loss="cispo"), 3.0),
    "functional.calc_sampled_kl_penalty": (dict(kl_estimator="k3"), 3.0),
    "functional.mean_ratio": (STOPS, 0.5),
    "functional.kl_estimate": (dict(target_kl=1.0), 1e6),
    "training.rollout.summarize": (EQUAL_PAIRS, 3.0),
    "training.kl_control.reference_stats": (dict(reset_reference_every=1), 3.0),
    "training.kl_control.kl_to_initial": (dict(reset_reference_every=1), 3.0),
    "organism.sums.text_metrics": (SUMS, 0.5),
    "training.report.compute_cost": ({}, 1e4),  # no two runs take the same time
}


def scaled(result: Any, factor: float) -> Any:
    """Return all numbers of a result times a factor."""
    if isinstance(result, Tensor):
        return result * factor if result.is_floating_point() else result
    if isinstance(result, int | float) and not isinstance(result, bool):
        return type(result)(result * factor)
    if isinstance(result, dict):
        return {name: scaled(value, factor) for name, value in result.items()}
    if dataclasses.is_dataclass(result):
        fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
        return dataclasses.replace(result, **{k: scaled(v, factor) for k, v in fields.items()})
    return result


@contextlib.contextmanager
def edited(function: Callable[..., Any], change: Callable[[Any], Any]) -> Iterator[None]:
    """Change the result of a function for all its callers, as an edit of its source would."""
    function = inspect.unwrap(function)
    kept = function.__code__, function.__defaults__, function.__kwdefaults__
    original = types.FunctionType(function.__code__, function.__globals__, "original", kept[1])
    original.__kwdefaults__ = function.__kwdefaults__
    function.__globals__["_changed_result"] = lambda *a, **k: change(original(*a, **k))
    instead = lambda *a, **k: _changed_result(*a, **k)  # noqa: F821
    function.__code__, function.__defaults__, function.__kwdefaults__ = instead.__code__, None, None
    try:
        yield
    finally:
        function.__code__, function.__defaults__, function.__kwdefaults__ = kept
        del function.__globals__["_changed_result"]


def last_report(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of the last phase of a small run."""
    trainer = RLHFTrainer(RLHFArgs(**RUN | settings), out=tempfile.mkdtemp() + "/run")
    trainer.run_phase()
    report = trainer.run_phase().to_dict()
    trainer.recorder.break_off(KeyboardInterrupt())
    return report | report.pop("cost")


@functools.cache
def unedited_report(settings: str) -> dict[str, Any]:
    return last_report(ast.literal_eval(settings))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:phase")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_edit_of_a_function_changes_its_metric(name):
    settings, factor = OTHER_SETTINGS.get(name, ({}, 3.0))
    before = unedited_report(repr(settings))
    with edited(resolve(name), lambda result: scaled(result, factor)):
        after = last_report(settings)
    metrics = [metric for metric in WHERE.keys() - OF_ENGINES if name in WHERE[metric]]
    still = [m for m in metrics if after[m] == pytest.approx(before[m], rel=0.05, abs=1e-9)]
    assert metrics and not still


READABLE = set(
    "Attention.forward Attention.attend MLP.forward log_probs token_logprobs kl_per_token "
    "calc_kl_penalty entropy_per_token calc_entropy_bonus TransformerWithValueHead.states "
    "HookedTransformer.forward compute_gae".split()
)


def read_called_codes(run: Callable[[], Any]) -> set[types.CodeType]:
    """Return the code of all functions that a call runs."""
    called = set()

    def note(frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call":
            called.add(frame.f_code)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return called


def called_by(run: Callable[[], Any]) -> set[str]:
    return {code.co_qualname for code in read_called_codes(run)}


def count_opened(run: Callable[[], Any]) -> tuple[int, int]:
    """Return how many functions of the package, outside of the models, and files a reader opens."""
    opened = {
        (code.co_filename, code.co_firstlineno)
        for code in read_called_codes(run)
        if code.co_filename.startswith(PACKAGE)
        if not code.co_filename.startswith(f"{PACKAGE}/models/")
        if not code.co_name.startswith("<")  # comprehensions and lambdas
    }
    return len(opened), len({file for file, _ in opened})


@pytest.mark.slow
def test_path_from_train_to_the_loss_is_short(tmp_path):
    stack: list[str] = []

    def kl_penalty(kl, kl_coef, mask):
        frames = traceback.extract_stack()[:-1]
        stack[:] = [frame.name for frame in frames if frame.filename.startswith(PACKAGE)]
        return calc_kl_penalty(kl, kl_coef, mask)

    args = RLHFArgs(preset="reel", total_phases=1, batch_size=8)
    trainer = RLHFTrainer(args)
    rollout = trainer.rollout_phase()
    functions, files = count_opened(lambda: trainer.learning_phase(rollout))
    assert functions <= 45 and files <= 18
    functions, files = count_opened(lambda: RLHFTrainer(args, out=tmp_path / "run").train())
    assert functions <= 275 and files <= 65
    RLHFTrainer(args, out=tmp_path / "stack", kl_penalty=kl_penalty).train()
    assert stack == [
        *("train", "__iter__", "run_phase", "learning_phase", "learning_phase"),
        *("objective_terms", "kl_penalty"),
    ]


def test_path_from_a_record_to_a_drawing_is_short():
    at = Snapshot({"phase": 1, "kl": [0.5], "sequences": {"exact": 8, "estimated": 8}})
    (row,) = (row for row in PICTURE_ROWS if (row.probe, row.kind) == ("KLByPosition", "bars"))
    functions, files = count_opened(lambda: row.draw(at).fragment)
    assert functions <= 23 and files <= 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 10, "temperature": 0.7, "samples_per_prompt": 2, "advantages": "grpo"},
        {"prompts": "prompts.txt", "normalize_reward": True, "kl_in": "reward"},
        {"value_head": "separate", "activation_checkpointing": True, "micro_batch_size": 2},
    ],
    ids=["plain", "groups of truncated samples", "unequal prompts", "critic in parts"],
)
def test_phase_calls_the_readable_functions(monkeypatch, tmp_path, settings):
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("this movie was\nthis film wow , it was so\n")
    trainer = RLHFTrainer(RLHFArgs(**SMALL | settings | dict(gen_len=6)))
    trainer.run_phase()
    called = called_by(trainer.run_phase)  # the second phase
    # a KL in the reward replaces the penalty, and a critic the values
    elsewhere = {"calc_kl_penalty"} if "kl_in" in settings else set()
    elsewhere |= {"TransformerWithValueHead.states"} if "value_head" in settings else set()
    assert READABLE - called == elsewhere


NOT_IN_A_RUN = set(  # exercises about finished runs, two models, exact optima, tuning and LoRA
    "my_reward get_logprobs kl_of_later_states whole_objective sample_without_cache logit_lens "
    "ablate_heads patch_heads recovered_fraction policy_gradient_objective gradient_cosine "
    "soft_backup mean_backup best_at_budget seed_interval seed_claim alarm graft "
    "paired_permutation_test control_labels my_claim truncate_delta tilt_slopes excess_kl "
    "distinct_n promoted_mass sample_preferences bradley_terry_loss calibration_bins "
    "best_of_n_weights implicit_rewards dpo_loss LoRALinear.initial_factors LoRALinear.delta "
    "LoRALinear.forward ppo look exact_match column_probability pass_at_k_estimate best_policy "
    "informative_fraction model_solve_probability".split()
)


@pytest.mark.slow
def test_runs_call_each_exercise(tmp_path):
    settings = dict(normalize_reward=True, kl_controller="adaptive")

    def probed_run() -> None:
        trainer = RLHFTrainer(RLHFArgs(**SMALL | settings), out=tmp_path / "run")
        suite = default_suite(trainer)
        suite.probes.append(LogitShift("loved", "hated"))
        attach(trainer, suite)
        trainer.train()

    called = called_by(probed_run)
    called |= called_by(lambda: last_report({"advantages": "one_step"}))
    for groups in ("rloo", "grpo"):
        fields = {"advantages": groups, "samples_per_prompt": 2}
        called |= called_by(lambda fields=fields: last_report(fields))
    exercises = all_exercises()
    written = {getattr(e.reference, name).__qualname__ for e in exercises for name in e.methods}
    written |= {e.reference.__qualname__ for e in exercises if not e.methods}
    assert written - called == NOT_IN_A_RUN
