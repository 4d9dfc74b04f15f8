"""Readable code runs: a run calls the documented functions and the exercises."""

import inspect
import sys
import tempfile
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlhf_lab
from rlhf_lab.config import RLHFArgs
from rlhf_lab.course.exercise import all_exercises
from rlhf_lab.functional import calc_kl_penalty
from rlhf_lab.probes import LogitShift, attach, default_suite
from rlhf_lab.training import RLHFTrainer
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
OTHER_SETTINGS = [  # runs that together call every function of the page
    *({}, dict(kl_estimator="k3", target_kl=1.0), dict(policy_loss="cispo"), STOPS, EQUAL_PAIRS),
    *(dict(reset_reference_every=1), SUMS),
]


def run_two_phases(settings: dict[str, Any]) -> None:
    trainer = RLHFTrainer(RLHFArgs(**RUN | settings), out=tempfile.mkdtemp() + "/run")
    for _ in range(2):
        trainer.run_phase()
    trainer.recorder.break_off(KeyboardInterrupt())


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:phase")
def test_runs_call_each_function_of_the_metrics_page():
    runs = (read_called_codes(lambda x=x: run_two_phases(x)) for x in OTHER_SETTINGS)
    called = set().union(*runs)
    functions = {name: inspect.unwrap(resolve(name)).__code__ for name in FUNCTIONS}
    assert len(functions) > 20 and not [n for n, code in functions.items() if code not in called]


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
    called |= called_by(lambda: run_two_phases({"advantages": "one_step"}))
    for groups in ("rloo", "grpo"):
        fields = {"advantages": groups, "samples_per_prompt": 2}
        called |= called_by(lambda fields=fields: run_two_phases(fields))
    exercises = all_exercises()
    written = {getattr(e.reference, name).__qualname__ for e in exercises for name in e.methods}
    written |= {e.reference.__qualname__ for e in exercises if not e.methods}
    assert written - called == NOT_IN_A_RUN
