"""The commands about runs and texts: output, files, exit status, and rejected input."""

import contextlib
import io
import json
import os
import re
import shutil

import pytest
import torch

from rlhf_lab.__main__ import COMMANDS, parse
from rlhf_lab.config import GROUPS, RLHFArgs
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.probes import Run
from rlhf_lab.sampling import SamplingSpec, sample, tokenize_prompts
from tests.bad_input.command_outcome import accepted, rejected
from tests.cli.conftest import SMALL
from tools.prose import page, quoted


def read_help(*arguments: str) -> str:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit, match="0"):
        parse([*arguments, "--help"])
    out.seek(0)
    return out.read()


def test_docs_and_help_list_all_commands():
    table = page("running").split("| to | commands |")[1].split("\n\n")[0]
    assert sorted(quoted(table)) == sorted(COMMANDS)
    assert re.findall(r"• (\S+)", read_help()) == list(COMMANDS)
    assert all(f"usage: rlhf_lab {name} " in read_help(name) for name in COMMANDS)


def test_read_help_train_shows_the_preset_defaults():
    text = read_help("train", "--preset", "smol")
    unwrapped = re.sub(r"[\s│]+", " ", text)
    for name, value in RLHFArgs(preset="smol").to_dict().items():
        option = unwrapped.split(f" --{name.replace('_', '-')}", 1)[1]
        assert re.search(r"\(default: (.*?)\)", option)[1].strip("'") == str(value), name
    assert all(f"─ {title} options ─" in text for title in GROUPS)


def test_help_starts_without_torch(cold_python):
    code = "import atexit, sys; from rlhf_lab.__main__ import main; "
    code += "atexit.register(lambda: print('torch' in sys.modules)); "
    done = cold_python(["-c", code + "main(['sample', 'x', '--colour'])"])
    assert (done.returncode, done.stdout) == (2, "False\n") and "--colour" in done.stderr


def test_train_prints_and_writes_its_numbers(finished):
    done, out = finished
    lines = done.out.splitlines()
    assert [x.split(" | ")[0] for x in lines if x.startswith("phase ")] == ["phase 0", "phase 1"]
    assert "samples of phase 0, before learning:" in lines and lines[-1] == f"written to {out}"
    info = json.loads((out / "run.json").read_text())
    for name in ("mean_reward", "true_reward", "grammatical_fraction", "kl_per_sequence"):
        assert f"{name} {info['final'][name]:.3f}" in done.out


def test_resume_extends_a_run_with_numbered_phases(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished[1], run)
    done = accepted(["resume", run, "--total-phases", "3", "--kl-coef", "0"])
    lines = done.out.splitlines()
    assert f"continuing {run} at phase 2" in lines
    (line,) = [line for line in lines if line.startswith("phase ")]
    metrics = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    assert [m["phase"] for m in metrics] == [0, 1, 2] and metrics[2]["kl_coef"] == 0
    assert line.startswith(f"phase 2 | reward {metrics[2]['mean_reward']:.4g} ")


@pytest.mark.slow
def test_sample_prints_the_samples_of_its_seed_up_to_eos():
    policy = TransformerWithValueHead(load_model("reel-nano"))
    prompts = tokenize_prompts(policy.base_model.tokenizer, ["this movie"] * 4, True)

    def expected(seed: int, stop_at_eos: bool = True) -> list[str]:
        spec = SamplingSpec(28, stop_at_eos=stop_at_eos)
        noise = torch.Generator().manual_seed(seed)
        return sample(policy, prompts, spec, noise).texts(policy.base_model.tokenizer)

    command = ["sample", "reel-nano", "-n", "4", "--prompt", "this movie", "--gen-len", "28"]
    for seed in (0, 3):
        assert accepted([*command, "--seed", seed]).out.splitlines() == expected(seed)
    assert expected(0) != expected(3) and expected(0) != expected(0, stop_at_eos=False)


@pytest.mark.parametrize(
    ("options", "text"),
    [([], "this movie"), (["--checkpoint", "best"], "this movie"),
     (["--checkpoint", "0", "--prompt", "this film"], "this film")],
)  # fmt: skip
def test_sample_of_a_run_prints_rewards(finished, options, text):
    done = accepted(["sample", finished[1], "-n", "3", *options])
    assert len(re.findall(rf"^ +[01]\.\d{{3}} +{text}", done.out, re.MULTILINE)) == 3


def test_score_prints_reward_tab_text():
    done = accepted(["score", "this movie wow", "i hated it"])
    positive = [line.split("\t") for line in done.out.splitlines()]
    assert [text for _, text in positive] == ["this movie wow", "i hated it"]
    assert "unknown" not in done.err and "cut" not in done.err
    lossy = accepted(["score", "this zebra movie", "this " * 62, "this " * 63]).err
    assert "reel-sentiment does not read: 1" in lossy and "texts cut to 64 tokens: 1" in lossy
    negative = accepted(["score", "i hated it", "--direction", "neg"]).out.split("\t")[0]
    assert float(positive[1][0]) + float(negative) == pytest.approx(1, abs=2e-4)
    done = accepted(["score", "--reward-fn", "true_reward", "no review"])
    assert done.out == "0.0000\tno review\n"
    two = accepted(["score", "--reward-fn", "count:a,count:b", "aab", "--reward-weights", "2", "1"])
    assert two.out == "5.0000\tcount:a 2.0000\tcount:b 1.0000\taab\n"
    assert accepted(["score", "--reward-fn", "count:a", "--prompt", "aa", "ab"]).out[:2] == "3."


DAMAGE = {
    "probes/suite.json": ("{bad", "suite.json is unreadable"),
    "probes/checks.jsonl": ('{"phase": 0, "probe": "x"}\n', "checks.jsonl has unexpected contents"),
    "probes/notes.jsonl": ('{"phase": 0}\n', "notes.jsonl has unexpected contents"),
}


@pytest.mark.slow
def test_probes_are_recorded_resumed_and_read(tmp_path):
    run, few = tmp_path / "run", "--total-phases 1 --warmup-steps 0 --batch-size 64".split()
    done = accepted(["train", *SMALL, *few, "--record", "0", "--out", run])
    assert "8 probes recorded" in done.out
    done = accepted(["resume", run, "--total-phases", "2"])
    n = len(Run(run).checks())
    assert f"8 probes recorded; {n} of {n} identity checks hold" in done.out
    assert all(2 in Run(run).phases(name) for name in ("value_lens", "direction_sentiment"))
    for file, (text, words) in DAMAGE.items():
        whole = (run / file).read_text() if (run / file).exists() else ""
        (run / file).write_text(text)
        rejected(["report", run], f"run/{file}", words)
        (run / file).write_text(whole)


def test_a_closed_pipe_ends_quietly(warm_python):
    reader, writer = os.pipe()
    os.close(reader)
    command = ["-m", "rlhf_lab", "score", "--reward-fn", "zero", "a"]
    with open(os.devnull) as nothing, open(os.devnull, "w") as errors:
        process = warm_python.start(command, (nothing.fileno(), writer, errors.fileno()))
    os.close(writer)
    assert process.wait() == 0
