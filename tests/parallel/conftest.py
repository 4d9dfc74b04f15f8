"""Starts the processes of a run, as torchrun does, from one that has imported everything."""

import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

PATIENCE = 180  # seconds for processes on a busy machine; each reports its stack when it hangs
PRELUDE = """
import faulthandler, json, os, sys
from pathlib import Path
faulthandler.dump_traceback_later(150, exit=True)
import torch
torch.set_num_threads(1)
folder, rank = Path(sys.argv[1]), int(os.environ.get("RANK", "0"))
def report(**values):
    (folder / f"report-{rank}.json").write_text(json.dumps(values))
"""


class Ended(NamedTuple):
    """Exit status of a process, the values that it reported, and its standard error."""

    status: int
    values: dict[str, Any]
    error: str


@pytest.fixture(scope="session")
def launch(warm_python) -> Callable[..., list[Ended]]:
    """Runs the same code in n processes, which meet in a store of this process."""

    def run(folder: Path, n: int, code: str, is_launched: bool = True) -> list[Ended]:
        folder.mkdir(exist_ok=True)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        group = {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        group["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        with ExitStack() as stack:
            processes = []
            for rank in range(n):
                files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
                ranks = group | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                env = warm_python.environment | (ranks if is_launched else {})
                arguments = ["-c", PRELUDE + code, str(folder)]
                numbers = tuple(file.fileno() for file in files)
                processes.append((warm_python.start(arguments, numbers, env=env), files[2]))
            ended = []
            for rank, (process, errors) in enumerate(processes):
                status = process.wait(PATIENCE)
                errors.seek(0)
                path = folder / f"report-{rank}.json"
                values = json.loads(path.read_text()) if path.exists() else {}
                ended.append(Ended(status, values, errors.read().decode()))
            return ended

    return run
