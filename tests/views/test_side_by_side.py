import json
import re

import pytest

from rlhf_lab.config import RLHFArgs
from rlhf_lab.probes import KLByPosition, Run, attach
from rlhf_lab.probes.store import NOTES
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.views.answers import answer_questions
from rlhf_lab.views.report import runs_page

pytestmark = pytest.mark.slow

SMALL = dict(preset="reel", reward_fn="true_reward", total_phases=2, batch_size=8, warmup_steps=0)
T_TWO_OF_TWO = 12.7062  # 97.5 % quantile of Student's t with one degree of freedom


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Two seeds, and a run with another kl_coef and without probes."""
    place, settings = tmp_path_factory.mktemp("runs"), [{"seed": 1}, {"seed": 2}, {"kl_coef": 0.9}]
    for i, changes in enumerate(settings):
        trainer = RLHFTrainer(RLHFArgs(**SMALL, num_minibatches=2, **changes), out=place / str(i))
        if "seed" in changes:
            attach(trainer, KLByPosition(name="mine"))
        trainer.train()
        trainer.run.append(NOTES, [{"phase": i, "probe": "lens", "note": "is slow"}])
        info = json.loads((place / str(i) / "run.json").read_text())
        info["final"]["mean_reward"] = 0.2 + 0.2 * i  # so that the mean is known by hand
        (place / str(i) / "run.json").write_text(json.dumps(info))
    return [place / str(i) for i in range(3)]


def test_seeds_have_mean_and_t_interval(paths):
    page = runs_page([Run(path) for path in paths[:2]])
    reach = T_TWO_OF_TWO * 0.1  # the standard error of 0.2 and 0.4
    row = re.search("mean reward</td>(.*?)</tr>", page)[1]
    cells = re.findall("<td>(.*?)</td>", row)
    assert cells == ["0.2", "0.4", f"0.3 [{0.3 - reach:.3g}, {0.3 + reach:.3g}]"]
    last = [Run(path).metrics()[-1]["explained_variance"] for path in paths[:2]]
    row = re.search("explained variance</td>(.*?)</tr>", page)[1]
    assert re.findall("<td>(.*?)</td>", row)[:2] == [f"{x:.4g}" for x in last]
    assert '<a href="#headline">Does another seed agree?</a> The first table' in page
    assert re.findall("<li>phase (.): lens: is slow</li>", page) == ["0", "1"]
    assert page.count("<title>1 0, phase 0: ") == page.count("<title>2 1, phase 0: ") >= 5


def test_answers_find_probes_by_class_and_name_the_next_seed(paths):
    found = {question: answer for question, answer, _ in answer_questions(Run(paths[1]))}
    assert "nats per sequence in phase 1." in found["Where is the KL?"]
    assert found["When did it change?"] == "This run's probes do not record this."
    assert found["Does another seed agree?"].endswith("settings with another seed: --seed 3.")


def test_runs_that_differ_in_more_than_the_seed_have_no_mean(paths):
    page = runs_page([Run(path) for path in paths])
    row = re.search(">kl_coef</td>(.*?)</tr>", page)[1]
    assert re.findall("<td>(.*?)</td>", row) == ["0.3", "0.3", "0.9"] and "t interval" not in page
