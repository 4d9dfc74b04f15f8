import warnings
from types import SimpleNamespace

import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.organism import REWARDS
from rlhf_lab.probes import (
    AttentionDrift,
    Check,
    Direction,
    KLByPosition,
    LogitShift,
    Probe,
    Record,
    Run,
    RunHealth,
    StepLedger,
    Suite,
    TextHeatmap,
    WeightDelta,
    WordsMoved,
    attach,
)
from rlhf_lab.probes.exact_values import exact_values
from rlhf_lab.training import RLHFTrainer
from tests.probes.conftest import SMALL
from tests.probes.looking import same_weights
from tests.probes.test_capture import vandalize
from tests.training.recorded_runs import read_metrics

pytestmark = pytest.mark.usefixtures("no_type_checks")

FINE = Check.at_most("fine", 0, 0)


class Counter(Probe):
    name = "counter"

    def observe(self, seen):
        return Record({"event": seen.ctx.event}, checks=[FINE])


class Broken(Probe):
    name = "broken"
    events = ("after_phase",)

    def observe(self, seen):
        raise ZeroDivisionError("nothing to divide by")


class Odd(Probe):
    def __init__(self, name, record, every=None):
        super().__init__(name=name, every=every)
        self.record = record

    def observe(self, seen):
        return self.record(seen)


class Vandal(Counter):
    def observe(self, seen):
        vandalize(seen.ctx.policy)
        return super().observe(seen)


class Between(Probe):
    """Keeps the first weight before the step, and compares it with the one after the step."""

    name = "between"
    prepares, events, step = ("after_backward",), ("after_step",), "last"

    def prepare(self, seen):
        assert set(seen.gradients) == {n for n, _ in seen.ctx.policy.named_parameters()}
        assert seen.prepared is None
        return seen.ctx.step, next(seen.ctx.policy.parameters()).clone()

    def observe(self, seen):
        step, before = seen.prepared
        moved = next(seen.ctx.policy.parameters()) - before
        assert not seen.gradients and seen.optimizer is not None
        return Record({"steps": [step, seen.ctx.step], "moved": moved.norm().item()}, {}, [FINE])


NAN_CHECKS = [Check.at_most("a", 2, 1), Check.at_most("b", float("nan"), 1)]
FAILED_CHECK = "missing: the check 'x is there' misses by 1, with 0.5 allowed; do not rely on this "
PROBES = {
    "unchecked": lambda seen: Record({"x": 1}),
    "none": lambda seen: None,
    "raising": lambda seen: Record({"x": 1}, checks=[lambda: 1 / 0, FINE]),
    "missing": lambda seen: Record(checks=[Check.at_most("x is there", seen.ctx.phase, 0.5)]),
}


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """Three phases with all odd probes: the run, its trainer, warnings, notes and diagnostics."""
    args = RLHFArgs(**SMALL | {"total_phases": 3, "base_lr": 3e-3})
    trainer = RLHFTrainer(args, out=tmp_path_factory.mktemp("odd") / "run")
    probes = [Odd(name, record) for name, record in PROBES.items()]
    probes += [Counter(), Broken(), Between()]
    probes.append(Odd("wrong", lambda seen: Record(checks=NAN_CHECKS), every=9))
    reported = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attached = attach(trainer, *probes)
        attach(trainer, Vandal(name="vandal"))
        with pytest.raises(ConfigError, match=r"'counter' is attached .* Give one of them name="):
            attach(trainer, Counter(name="other"), Counter())

        @trainer.on("after_rollout")
        def join_later(ctx):
            if ctx.phase == 1:
                attach(trainer, Counter(name="second"))

        @trainer.on("after_phase")
        def look(ctx):
            diagnostics = ctx.run.read_info()["diagnostics"].items()
            reported.append([x["text"] for sign, x in diagnostics if "x is there" in sign])

        trainer.train()
    messages = [str(warning.message) for warning in caught]
    return SimpleNamespace(
        run=Run(trainer.run.path),
        trainer=trainer,
        notes=attached.notes,
        reported=reported,
        said=lambda words: [message for message in messages if words in message],
    )


@pytest.mark.slow
def test_odd_probes_leave_the_run_as_it_is(probed, make_trainer):
    plain = make_trainer(total_phases=3, base_lr=3e-3)
    plain.train()
    assert same_weights(probed.trainer, plain)
    assert read_metrics(probed.run.path) == read_metrics(plain.run.path)


def test_probes_that_raise_or_lack_checks_warn_once_and_stop(probed):
    line = Broken.observe.__code__.co_firstlineno + 1
    broken = (
        "broken: raised ZeroDivisionError at after_phase of phase 0 and is switched off: "
        f"nothing to divide by (test_suite.py, line {line})"
    )
    (unchecked,), (none,) = probed.said("Record without a check"), probed.said("None without")
    assert probed.said("broken: ") == [broken] and unchecked.startswith("unchecked: ")
    assert sorted(probed.notes) == [broken, none, unchecked]
    notes = sorted(f"{n['probe']}: {n['note']}" for n in probed.run.notes())
    assert notes == [broken, none, unchecked]
    assert probed.run.phases("counter") == [0, 1, 2, 3]
    assert not {"broken", "unchecked", "other"} & set(probed.run.probes())
    assert probed.run.phases("second") == [1, 2, 3]  # of a suite that was attached later
    assert {"counter", "second"} <= {p["name"] for p in probed.run.store.read_suite()["probes"]}
    attach(probed.trainer, Counter(name="broken"))


def test_record_is_kept_without_a_check_that_raises(probed):
    (message,) = probed.said("raising: ")
    assert "a check raised ZeroDivisionError: division by zero. The record is kept" in message
    checks = [(c.phase, c.name) for c in probed.run.checks() if c.probe == "raising"]
    assert checks == [(n, "fine") for n in probed.run.phases("raising")] and len(checks) == 4


@pytest.mark.slow
def test_a_resumed_run_records_what_an_uninterrupted_one_does(make_trainer):
    def probes():
        return TextHeatmap(n=2), KLByPosition(n=4, every=2), RunHealth(), Counter()

    whole = make_trainer(total_phases=3)
    attach(whole, *probes())
    whole.train()
    killed = make_trainer(total_phases=3)
    attach(killed, *probes())

    @killed.on("after_step")
    def pull_the_plug(ctx):
        if ctx.phase == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed.train()
    path = killed.run.path
    assert Run(path).phases("counter") == [0, 1, 2]
    resumed = RLHFTrainer.resume(path)
    attach(resumed, *probes())
    resumed.train()
    with pytest.warns(match="All 3 phases are done"), pytest.warns(match="after 3, the last"):
        attach(resumed, RunHealth(name="late"), record=[7])
    expected, found = Run(whole.run.path), Run(path)
    assert found.probes() == expected.probes()
    assert found.checks() == expected.checks()
    for probe in expected.probes():
        assert found.records(probe) == expected.records(probe)
    for phase in expected.phases("text_heatmap"):
        tensors = found.tensors("text_heatmap", phase)
        for name, tensor in expected.tensors("text_heatmap", phase).items():
            assert torch.equal(tensors[name], tensor)


def test_every_probe_of_the_default_suite_stores_checks_that_hold(finished):
    checked = {check.probe for check in finished.checks()}
    assert checked == set(finished.probes()) and len(checked) == 9
    assert [c for c in finished.checks() if not c.ok] == []


def test_observe_receives_what_the_same_step_prepared(probed):
    records = probed.run.records("between")
    assert [(r["phase"], r["steps"]) for r in records] == [(n, [3, 3]) for n in range(3)]
    assert all(record["moved"] > 0 for record in records)


def test_eval_text_gets_the_bos_of_the_run(make_trainer):
    trainer = make_trainer()
    tokens = Suite(eval_text=["this movie", "this film"])._read_eval_text(trainer).tokens
    assert trainer.tokenizer.batch_decode(tokens) == ["<bos> this movie", "<bos> this film"]


class Looking(Counter):
    """Requires eval text."""

    text = "eval"
    sites = ("hook_embed",)


def test_invalid_suites_and_eval_texts_raise_in_one_sentence(make_trainer):
    trainer, numbers = make_trainer(), torch.zeros(2, 3)
    ids, schedules = numbers.long(), ("often", ["1"], [True], [-1], 3)

    def on(tokens, probe=None, **options):
        attach(trainer, probe or RunHealth(), eval_tokens=tokens, **options)

    for build, words in (
        (lambda: attach(trainer, 5), "5 is not a probe. Pass probes such as RunHealth()."),
        (lambda: attach(trainer), "There is no probe."),
        (lambda: attach(trainer, Suite(), record="every"), "record belongs to the suite."),
        (lambda: Suite(Counter(), Counter()), "Two probes are named 'counter'"),
        (lambda: Suite(eval_tokens=ids, eval_text=["x"]), "cannot be combined"),
        *((lambda x=x: Suite(record=x), "record must be 'milestones', 'e") for x in schedules),
        (lambda: Counter(name="a/b"), "letters, digits"),
        (lambda: RunHealth(every=1.5), "every=1.5 of run_health must be 1 or greater, in whole "),
        (lambda: AttentionDrift(text="both"), "text='both' of attention_drift must be 'eval' or"),
        (lambda: Direction(method="guess"), "method='guess' of direction_"),
        (lambda: StepLedger(step="mid"), "step='mid' of step_ledger must be 'first' or 'last'"),
        (lambda: WordsMoved(n=1), "n=1 of words_moved must be at least 2"),
        (lambda: on(ids, eval_mask=torch.tensor([[True, False, True]] * 2)), "True on one stretch"),
        (lambda: Suite(eval_text=["x"], eval_mask=ids.bool()), "eval_mask requires eval_tokens"),
        (
            lambda: attach(trainer, LogitShift(pos=2), eval_text=["this movie was", "this"]),
            "pos=2 of logit_shift is outside the shortest eval text of 2 tokens. Choose from -2",
        ),
        (lambda: trainer.on("after_step", every=1.5), "every=1.5 must be 1 or greater, in whole "),
        (lambda: attach(trainer, Looking()), "requires eval text"),
        (lambda: on(ids, Direction()), "direction_sentiment requires a label per sequence. Pass"),
        (lambda: on(ids, LogitShift("loved", "zzz")), "'zzz' is not one token"),
        (lambda: on(torch.zeros(1, 33).long()), "at most 32 columns"),
        (lambda: on(torch.tensor([[1, 10**6]])), "ids from 1 to 1000000) do not fit the model"),
        (lambda: on(numbers), "eval_tokens (torch.float32) do not fit the model. Pass"),
        (lambda: on(ids, labels=[True, False]), "labels must be a tensor of shape [2], one per"),
    ):
        with pytest.raises(ConfigError) as raised:
            build()
        assert words in str(raised.value) and "\n" not in str(raised.value)


def test_a_run_is_read_back_without_its_trainer(finished, model):
    assert [line["phase"] for line in finished.metrics()] == [0, 1, 2]
    assert finished.args.total_phases == 3
    assert {s["phase"] for s in finished.samples()} == {0, 1, 2, 3}
    assert len(finished.samples(1)) == 8
    assert torch.equal(finished.policy(torch.tensor(0)).base_model.embed.W_E, model.embed.W_E)
    assert not torch.equal(finished.policy("last").base_model.embed.W_E, model.embed.W_E)
    with pytest.raises(RunError, match="no records of probe 'dream'"):
        finished.records("dream")


def test_failed_checks_are_stored_and_warn_once(probed):
    first, second = [check for check in probed.run.checks() if check.probe == "wrong"][:2]
    assert (first.value, first.ok, second.ok) == (2, False, False)
    assert second.value != second.value
    assert probed.reported == [[], [FAILED_CHECK + "record."], [FAILED_CHECK + "record."]]
    (message,) = probed.said("x is there")
    assert message.startswith("phase 1: missing: the check 'x is there'")
    assert probed.trainer.recorder.diagnostics["missing: x is there"]["phase"] == 1


@pytest.mark.slow
def test_exact_values_of_another_reward_are_noted(make_trainer):
    """A custom function has none, so the true reward is used; a grammar's reward has its own."""
    for reward, name in ((REWARDS["smoothed"], "smoothed"), (None, "true_reward")):
        truth, note = exact_values(make_trainer(parts={"reward_fn": reward}))
        assert (truth.reward.name, note) == (name, "")
    count = lambda texts: torch.tensor([float(len(text)) for text in texts])
    trainer = make_trainer(parts={"reward_fn": count}, total_phases=1, warmup_steps=0)
    attached = attach(trainer, [RunHealth(), WeightDelta()])
    with pytest.warns(UserWarning, match="run_health: this run has a custom reward"):
        trainer.train()
    assert len(attached.notes) == 1 and attached.truth.reward.name == "true_reward"
