"""Record of blind tuning: the fields of the preset on every hidden reward, over seeds."""

from rlhf_lab.course.blind_tuning import (
    FRESH_REVIEWS,
    HIDDEN,
    PRESET_FIELDS,
    REVIEWS,
    TUNING_SETTINGS,
    tuned_figures,
)
from tools.course.stored_parts import SEEDS, make_record, over_seeds

if __name__ == "__main__":
    run = lambda name, seed: tuned_figures(name, PRESET_FIELDS, seed)
    make_record(
        "blind_tuning",
        "blind_presets",
        {"runs": lambda: over_seeds(run, *HIDDEN)},
        settings={**TUNING_SETTINGS, **PRESET_FIELDS},
        budget=REVIEWS,
        fresh_reviews=FRESH_REVIEWS,
        seeds=SEEDS,
    )
