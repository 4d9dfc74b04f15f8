"""The maker of the record of blind tuning: the preset's four fields on every hidden reward."""

import json
import sys
from pathlib import Path
from typing import Any

from rlhf_lab.course.tuned_run import (
    FRESH_REVIEWS,
    HIDDEN,
    PRESET_FIELDS,
    REVIEWS,
    TUNING_SETTINGS,
    tuned_figures,
)

RECORD = Path("rlhf_lab", "course", "records", "blind_tuning.json")
PRESET_SEEDS = (1, 2, 3)


def preset_record() -> dict[str, Any]:
    """Train with the preset's fields once per reward and seed; figures rounded to 5 digits."""
    runs = {
        name: [
            {
                what: None if found is None else round(found, 5)
                for what, found in tuned_figures(name, PRESET_FIELDS, seed).items()
            }
            for seed in PRESET_SEEDS
        ]
        for name in HIDDEN
    }
    return {
        "made_by": "python -m tools.course.blind_presets",
        "settings": {**TUNING_SETTINGS, **PRESET_FIELDS},
        "budget": REVIEWS,
        "fresh_reviews": FRESH_REVIEWS,
        "seeds": PRESET_SEEDS,
        "runs": runs,
    }


def make_presets(path: Path) -> None:
    """Write the record."""
    path.write_text(json.dumps(preset_record(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(make_presets(RECORD))
