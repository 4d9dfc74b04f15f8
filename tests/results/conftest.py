"""Records whose figures are known, for the page and the command."""

import pytest

from benchmarks.results.records import asked, bundled_digest
from benchmarks.results.settings import all_rows

MACHINE = {
    "processor": "Abacus 3000",
    "system": "Linux",
    "python": "3.11.7",
    "torch": "2.13.0",
    "transformer_lens": "3.9.0",
}


@pytest.fixture
def row_named():
    """Gives the row of a part and a name."""

    def find(part, name):
        return next(row for row in all_rows() if (row.part, row.name) == (part, name))

    return find


@pytest.fixture
def record_of():
    """Makes a record of a row, with figures of one's own."""

    def make(row, seed, **figures):
        record = {**asked(row, seed), "machine": MACHINE, **figures}
        if record["weights"] is not None:
            assert record["weights"] == bundled_digest()
            record["weights"] = "0123456789ab"
        return record

    return make


@pytest.fixture
def method_record(row_named, record_of):
    """Makes the record of a method's run."""

    def make(name, seed, gold, best, kl=1.0, share=1.0):
        final = {
            "gold_reward": gold,
            "grammatical_fraction": share,
            "kl_per_sequence": kl,
            "kl_coef": 0.3,
        }
        initial = {"gold": 0.4, "grammatical": 0.8}
        row = row_named("methods", name)
        return record_of(row, seed, initial=initial, final=final, best_gold=best)

    return make
