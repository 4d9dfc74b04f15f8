"""Starts several processes of one run, as torchrun does, from one that has imported everything."""

import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

PATIENCE = 180
"""Seconds for processes that share a busy machine; a hang is told by the faulthandler in each."""
PRELUDE = """
import faulthandler, json, os, sys
from pathlib import Path
faulthandler.dump_traceback_later(150, exit=True)
import torch
torch.set_num_threads(1)
from rlhf_lab.config import RLHFArgs
from rlhf_lab.training import RLHFTrainer
place = Path(sys.argv[1])
rank = int(os.environ.get("RANK", "0"))
def tell(**found):
    (place / f"told-{rank}.json").write_text(json.dumps(found))
"""


class Ended(NamedTuple):
    """How a process ended: its exit status, what it told, and what it printed."""

    status: int
    told: dict[str, Any]
    error: str


Ranks = Callable[..., list[Ended]]


@pytest.fixture
def ranks(warm_python, tmp_path) -> Ranks:
    """Runs the same code in n processes that can meet; without a launcher where n is 1, unless one
    `is_launched`.

    They meet in a store of this process's, as in that of torchrun, which outlives each of them; or
    in the main process's, as without torchrun. `nodes`: as many machines are said to be there.
    """

    def run(
        n: int,
        code: str,
        name: str | None = None,
        is_torchrun: bool = True,
        nodes: int = 1,
        is_launched: bool | None = None,
    ) -> list[Ended]:
        place = tmp_path / (name or f"of-{n}")
        place.mkdir(exist_ok=True)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
        if not is_torchrun:
            del store
        with ExitStack() as stack:
            started = []
            for rank in range(n):
                files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
                env = warm_python.environment
                if n > 1 if is_launched is None else is_launched:
                    env = env | {
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank % (n // nodes)),
                        "WORLD_SIZE": str(n),
                        "LOCAL_WORLD_SIZE": str(n // nodes),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(port),
                        "TORCHELASTIC_USE_AGENT_STORE": str(is_torchrun),
                    }
                numbers = tuple(file.fileno() for file in files)
                asked = ["-c", PRELUDE + code, str(place)]
                started.append((warm_python.start(asked, numbers, env=env), files[2]))
            ended = []
            for rank, (process, errors) in enumerate(started):
                status = process.wait(PATIENCE)
                errors.seek(0)
                told = place / f"told-{rank}.json"
                found = json.loads(told.read_text()) if told.exists() else {}
                ended.append(Ended(status, found, errors.read().decode()))
            return ended

    return run
