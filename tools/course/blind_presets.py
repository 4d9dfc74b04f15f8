"""Record of blind tuning: the fields of the preset on every hidden reward, over seeds."""

from rlhf_lab.course.blind_tuning import (
    FRESH_REVIEWS,
    HIDDEN,
    PRESET_FIELDS,
    REVIEWS,
    TUNING_SETTINGS,
    tuned_figures,
)
from tools.course.stored_parts import SEEDS, make_record


def preset_runs() -> dict[str, list[dict[str, float | None]]]:
    """Train with the fields of the preset, once per reward and seed."""
    return {name: [tuned_figures(name, PRESET_FIELDS, seed) for seed in SEEDS] for name in HIDDEN}


if __name__ == "__main__":
    make_record(
        "blind_tuning",
        "blind_presets",
        {"runs": preset_runs},
        settings={**TUNING_SETTINGS, **PRESET_FIELDS},
        budget=REVIEWS,
        fresh_reviews=FRESH_REVIEWS,
        seeds=SEEDS,
    )
