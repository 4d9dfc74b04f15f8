"""Runs over seeds: what is trained, what is read again, what is refused, what is said of them."""

import json
import math

import numpy as np
import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.probes import (
    Check,
    KLByPosition,
    LogitShift,
    Probe,
    Record,
    Run,
    RunHealth,
    Runs,
    Spread,
    Suite,
    runs,
    spread,
)
from rlhf_lab.probes import seeds as module
from rlhf_lab.training import RLHFTrainer
from tests.probes import conftest

pytestmark = pytest.mark.usefixtures("no_type_checks")

SMALL = conftest.SMALL | {"reward_fn": "sentiment"}
ARGS = RLHFArgs(**(SMALL | {"seed": 3}))


class Parts(Probe):
    name = "parts"
    events = ("after_score",)

    def observe(self, seen):
        seed, phase = seen.ctx.args.seed, seen.ctx.phase
        values = {"a": seed + phase, "b": {"c": [1, 2.5 * seed]}, "word": "x", "nan": None}
        return Record(values | {"flag": True}, checks=[Check.at_most("fine", 0, 0)])


@pytest.fixture
def trained(monkeypatch):
    """The seeds that are trained, in order, with the phases each has done before."""
    seen = []
    iterate = RLHFTrainer.__iter__

    def noted(self):
        seen.append((self.args.seed, self.phase))
        return iterate(self)

    monkeypatch.setattr(RLHFTrainer, "__iter__", noted)
    return seen


def ask(out, probes=(), seeds=2, args=ARGS, **more):
    return runs(args, probes, seeds, out, show_progress=False, **more)


def test_mean_and_range_by_hand():
    found = Spread((0.5, 0.25, 0.75))
    assert (found.mean, found.low, found.high) == (0.5, 0.25, 0.75)
    assert str(found) == "0.5 (0.25 to 0.75, 3 seeds)" and str(Spread((2.0,))).endswith("1 seed)")
    missing = spread._spreads([{"a": 0.5}, {"a": None}])["a"]
    assert all(math.isnan(x) for x in (missing.mean, missing.low, missing.high))


@pytest.mark.slow
def test_each_seed_is_the_run_that_it_would_be_alone(tmp_path, trained, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    found = ask("~/many", [Parts(), RunHealth()])
    assert [path.name for path in tmp_path.iterdir()] == ["many"]
    assert isinstance(found, Runs) and found.seeds == [3, 4] and trained == [(3, 0), (4, 0)]
    alone = RLHFTrainer(RLHFArgs(**(SMALL | {"seed": 4})), out=tmp_path / "alone")
    alone.train()
    one, other = Run(tmp_path / "alone").policy(), found[1].policy()
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    rewards = [run.metrics()[-1]["mean_reward"] for run in found]
    spread = found.metrics()["mean_reward"]
    assert spread.values == tuple(rewards) and len(set(rewards)) == 2
    assert spread.mean == pytest.approx(sum(rewards) / 2) and spread.low == min(rewards)
    assert found.metrics(0)["mean_reward"].values != spread.values
    finals = tuple(run.info["final"]["mean_reward"] for run in found)
    assert found.final()["mean_reward"].values == finals
    record = found.record("parts", 1)
    assert record["a"].values == (4.0, 5.0) and record["b.c.1"].values == (7.5, 10.0)
    assert not {"word", "nan", "flag"} & record.keys()
    for read in (lambda: found.record("parts", 9), lambda: found[0].samples(9)):
        with pytest.raises(RunError, match=r"phase=9 has no (parts|samples) in .*, only 0, 1"):
            read()
    assert found[0].samples(-1) == found[0].samples(2)


@pytest.mark.slow
def test_finished_runs_are_read_and_more_seeds_are_added(tmp_path, trained, capsys):
    first = ask(tmp_path, seeds=1)
    stamp = (tmp_path / "seed_3" / "metrics.jsonl").stat().st_mtime_ns
    both = ask(tmp_path, seeds=2)
    assert trained == [(3, 0), (4, 0)] and both.seeds == [3, 4]
    assert (tmp_path / "seed_3" / "metrics.jsonl").stat().st_mtime_ns == stamp
    assert ask(tmp_path, seeds=1).metrics() == first.metrics() and len(trained) == 2
    named = ask(tmp_path, seeds=np.array([4, 6]))
    assert trained[2:] == [(6, 0)] and named.seeds == [4, 6]
    assert named[0].metrics() == both[1].metrics()
    capsys.readouterr()
    runs(ARGS, (), [3, 7], tmp_path)
    assert "seed 7" in (bar := capsys.readouterr().out) and "seed 3" not in bar and "100%" in bar
    runs(ARGS, (), [3, 7], tmp_path)
    assert capsys.readouterr().out.strip() == ""


@pytest.mark.slow
def test_a_run_that_was_interrupted_goes_on_with_its_probes(tmp_path, trained):
    class Stops(Parts):
        def observe(self, seen):
            if seen.ctx.phase == 1 and not (tmp_path / "went").exists():
                (tmp_path / "went").touch()
                raise KeyboardInterrupt
            return super().observe(seen)

    with pytest.raises(KeyboardInterrupt):
        ask(tmp_path / "many", [Stops()], seeds=1)
    found = ask(tmp_path / "many", [Stops()], seeds=1)
    assert trained == [(3, 0), (3, 1)]
    assert found[0].phases("parts") == [0, 1]
    whole = ask(tmp_path / "whole", [Parts()], seeds=1)
    assert found.metrics()["mean_reward"] == whole.metrics()["mean_reward"]
    assert 0 < whole.metrics()["mean_reward"].mean < 1


@pytest.mark.slow
def test_a_directory_of_other_runs_is_refused_in_one_sentence(tmp_path, trained):
    ask(tmp_path, [Parts()], seeds=1)
    longer = RLHFArgs(**(SMALL | {"total_phases": 3, "seed": 3}))
    for words, settings in {
        r"has runs with args\.total_phases=2, not 3": {"args": longer},
        "contains a seed twice": {"seeds": [4, 3, 4]},
        "suite": {"probes": [Parts(every=2)]},
        r"suite\.probes\.1": {"probes": [Parts(), RunHealth()]},
        r"parts\.reward_fn=None, not ": {"reward_fn": lambda texts: torch.zeros(len(texts))},
    }.items():
        with pytest.raises(ConfigError, match=words) as caught:
            ask(tmp_path, **({"probes": [Parts()], "seeds": 1} | settings))
        assert "\n" not in str(caught.value)
    # another first seed is no other setting
    assert ask(tmp_path, [Parts()], 1, RLHFArgs(**(SMALL | {"seed": 3}))).seeds == [3]
    with pytest.raises(ConfigError, match="holds a run. Choose a directory"):
        ask(tmp_path / "seed_3")
    assert trained == [(3, 0)]


def test_what_a_probe_was_made_with_is_part_of_the_question(tmp_path, monkeypatch):
    settings = lambda n: module._common_settings(ARGS, [KLByPosition(n=n)], {})
    assert settings(4) == settings(4) and settings(4) != settings(8)
    words = lambda x: module._common_settings(ARGS, [LogitShift({"loved": x, "hated": -1.0})], {})
    assert words(1.0) == words(1.0) and words(1.0) != words(0.5)
    suite = lambda x, y=None: module._common_settings(ARGS, Suite(eval_tokens=x, labels=y), {})
    tokens, label = torch.tensor([[0, 5, 6]]), torch.tensor([True])
    options = [{}, {"record": "every"}, {"eval_text": ["a"]}, {"eval_tokens": tokens}]
    options += [{"eval_tokens": tokens, "eval_mask": tokens > 0}]
    assert len({str(module._common_settings(ARGS, Suite(**x), {})) for x in options}) == 5
    assert suite(tokens) == suite(tokens.clone()) != suite(tokens + 1)
    assert suite(tokens, label) == suite(tokens, label.clone()) != suite(tokens, ~label)
    edited = type("Parts", (Parts,), {"observe": lambda self, seen: Record({})})
    same = [module._common_settings(ARGS, [kind()], {}) for kind in (Parts, Parts, edited)]
    assert same[0] == same[1] != same[2]
    monkeypatch.chdir(tmp_path)
    args = RLHFArgs(**SMALL | {"base_model": "base", "reward_fn": "json_schema:schema.json"})
    seen = [module._common_settings(args, [], {})]
    (tmp_path / "base").mkdir()
    for file in ("base/model.safetensors", "schema.json", "schema.json"):
        (tmp_path / file).write_text(f"{len(seen)}")
        seen.append(module._common_settings(args, [], {}))
    assert len({str(x) for x in seen}) == 4 and not seen[0]["parts"]


INVALID = [({part: object()}, f"^{part} cannot be shared") for part in module.OF_ONE_RUN]
INVALID += [({"seeds": x}, f"seeds={n} ") for x, n in ((0, 0), (-1, -1), ([], 0))]
INVALID += [({"probes": ["RunHealth"]}, "is not a probe")]


@pytest.mark.parametrize(("changes", "message"), INVALID)
def test_runs_raises_on_invalid_input_and_writes_nothing(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        ask(tmp_path / "none", **changes)
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_without_a_directory_the_same_call_finds_its_runs_again(tmp_path, monkeypatch, trained):
    monkeypatch.chdir(tmp_path)
    quick = RLHFArgs(**(SMALL | {"total_phases": 1, "warmup_steps": 0, "seed": 3}))
    of_trainer = lambda trainer: Suite(RunHealth(name=f"of_{trainer.args.seed}"))
    for _ in range(2):
        found = runs(quick, of_trainer, seeds=1, show_progress=False)
    assert found[0].probes() == ["of_3"]
    assert trained == [(3, 0)]
    (place,) = (tmp_path / "runs").iterdir()
    assert place.name.startswith("reel-seeds-")
    common = json.loads((place / module.COMMON).read_text())
    assert "seed" not in common["args"] and common["args"]["total_phases"] == 1
    reward = lambda texts: torch.full((len(texts),), 0.25)
    found = runs(quick, seeds=1, show_progress=False, reward_fn=reward)
    assert len(list((tmp_path / "runs").iterdir())) == 2
    assert found.metrics()["mean_reward"].values == (0.25,)
    assert found[0].info["custom_components"] == ["reward_fn"]
