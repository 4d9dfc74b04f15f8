"""Stored numbers of all probes in five runs, which each fault of probes in `faults.txt` changes.

Each test runs one phase of a policy that noise has moved away from its reference.

A commit that changes numbers on purpose rewrites `records.json` with
`python -m tests.probes.test_records`, and explains why.
"""

import hashlib
import json
import math
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_lab import probes as module
from rlhf_lab.config import RLHFArgs
from rlhf_lab.probes import Record, ReelTruth, Suite, attach
from rlhf_lab.probes.probe import Observation
from rlhf_lab.training import RLHFTrainer
from tests.small_runs import SMALL
from tests.training.test_safety_net import machine

STORED = Path(__file__).with_name("records.json")
SETTINGS = SMALL | {"device": "cpu", "reward_fn": "sentiment", "gen_len": 26}  # stored numbers
SETTINGS |= {"temperature": 0.9, "top_k": 20, "base_lr": 3e-3, "head_lr": 1e-2, "ent_coef": 0.01}
SETTINGS |= {"normalize_reward": True, "total_phases": 3}
VERDICT = ReelTruth().grammar.slot("VERB") - 1
OF_STEPS = ("RunHealth", "StepInfluence", "StepLedger")  # after steps of the optimizer
UNEQUAL = {"stop_tokens": "and"}  # rows of unequal length
# settings of each run, and the options of its probes
RUNS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "plain": (UNEQUAL, {
        "AttentionDrift": {"pos": VERDICT}, "Direction": {}, "FrozenProbe": {"pos": VERDICT},
        "HackWatch": {"n": 6}, "KLByPosition": {"n": 6}, "LogitShift": {"pos": VERDICT, "n": 16},
        "NeuronRank": {"n": 6}, "RunHealth": {},
        "StepInfluence": {"pos": VERDICT, "n": 4, "fine": False}, "StepLedger": {},
        "TextHeatmap": {}, "ValueLens": {}, "WeightDelta": {},
    }),
    "padded": ({}, {
        "AttentionDrift": {"text": "rollout"}, "Direction": {}, "FrozenProbe": {"pos": 5},
        "KLByPosition": {"n": 6}, "LogitShift": {"n": 16}, "NeuronRank": {"n": 6},
        "StepInfluence": {"n": 4, "fine": False}, "StepLedger": {}, "TextHeatmap": {},
        "ValueLens": {"text": "rollout"},
    }),
    "lora": ({"lora_rank": 2}, {"StepLedger": {}, "WeightDelta": {}}),
    "critic": ({"value_head": "separate"}, {
        "ValueLens": {"text": "rollout"}, "StepLedger": {}, "RunHealth": {},
    }),
    "clipped": (UNEQUAL | {"max_grad_norm": 0.05}, {"StepInfluence": {"pos": VERDICT, "n": 4}}),
}  # fmt: skip


def look(run: str, name: str, directory: Path) -> Record:
    """Run a phase until the probe has a record, and return it."""
    settings, options = RUNS[run]
    components = {"prompts": ["this movie", "this", "this film really"]} if run == "padded" else {}
    trainer = RLHFTrainer(RLHFArgs(**SETTINGS | settings), out=directory, **components)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in filter(lambda weight: weight.requires_grad, trainer.policy.parameters()):
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    records: list[Record] = []
    probe = getattr(module, name)(**options[name])
    observe, probe.every = probe.observe, 1

    def observe_once(seen: Observation) -> None:
        records.append(observe(seen))
        raise KeyboardInterrupt  # what follows does not change the record

    probe.observe = observe_once
    tokens, positive = ReelTruth().reviews(60, seed=5)
    mask = torch.ones_like(tokens).bool()
    if run == "padded":
        mask = torch.arange(tokens.shape[1]) < 14 + torch.arange(60)[:, None] * 7 % 16
    attached = attach(trainer, Suite(probe, eval_tokens=tokens, eval_mask=mask, labels=positive))
    with warnings.catch_warnings(), suppress(KeyboardInterrupt):
        warnings.simplefilter("ignore")
        trainer.run_phase()
    assert attached.notes == [], attached.notes
    (record,) = records
    return record


def fingerprint(record: Record) -> dict[str, list]:
    """Return count, size, a weighted mean of the numbers, and a digest of the texts, by field."""
    fields = record.values | {f"tensor {name}": x.tolist() for name, x in record.tensors.items()}
    return {name: _measure(value) for name, value in fields.items()}


def _measure(value: Any) -> list:
    numbers, texts = [], []
    for leaf in _leaves(value):
        (texts if isinstance(leaf, str) else numbers).append(leaf)
    x = torch.tensor([7.7 if n is None or not math.isfinite(n) else n for n in numbers])
    x = x.double().asinh()  # one large number must not hide the others
    weights = 1.5 + torch.arange(len(x)).double().sin()
    size, mean = (float(z.sum()) / max(1, len(x)) for z in (x.abs(), weights * x))
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:8] if texts else ""
    return [len(x), size, mean, digest]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def differences(found: dict[str, list], stored: dict[str, list], tolerance: float) -> list[str]:
    """Return the names of fields that differ."""
    names = found.keys() ^ stored.keys()
    for name in found.keys() & stored.keys():
        (n, size, mean, text), (m, old_size, old_mean, old_text) = found[name], stored[name]
        apart = max(abs(size - old_size), abs(mean - old_mean))
        if tolerance > 1e-3 and ("accuracy" in name or name.endswith(("_low", "_high"))):
            apart /= 150  # few rows: rounding changes draws and decisions
        if n != m or text != old_text or apart > tolerance * old_size + tolerance**2:
            names |= {name}
    return sorted(names)


@pytest.mark.parametrize(
    ("run", "probe"),
    [
        pytest.param(run, name, marks=[pytest.mark.slow] * (name in OF_STEPS))
        for run in RUNS
        for name in RUNS[run][1]
    ],
)
def test_records_have_the_stored_numbers(run, probe, tmp_path, no_type_checks):
    stored = json.loads(STORED.read_text())
    tolerance = 1e-4 if machine() == stored["machine"] else 2e-3
    record = look(run, probe, tmp_path / "run")
    failed = [check.name for check in record.checks if not check.ok]
    assert all(name.endswith("before learning") for name in failed)  # noise took its place
    assert differences(fingerprint(record), stored[run][probe], tolerance) == []


if __name__ == "__main__":
    torch.set_num_threads(1)
    table: dict[str, Any] = {"machine": machine()}
    for run in RUNS:
        table[run] = {
            name: fingerprint(look(run, name, Path(tempfile.mkdtemp()) / "run"))
            for name in RUNS[run][1]
        }
    lines = [
        f"  {json.dumps(run)}: {{\n"
        + ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in records.items())
        + "\n  }"
        for run, records in table.items()
    ]
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
