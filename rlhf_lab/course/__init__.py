"""The course: `check` a function that you wrote, `hint`, and `progress`."""

from rlhf_lab.course.api import CheckNotPassed, check, hint, progress
from rlhf_lab.course.claims import Claim, show_claims
from rlhf_lab.course.copying import new_run
from rlhf_lab.course.predictions import Predictions
from rlhf_lab.course.seed_figures import SeedFigures, stored_figures
from rlhf_lab.course.tables import show_intervals, show_table
