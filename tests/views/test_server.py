import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from html import unescape

import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.diffing import compare
from rlhf_lab.errors import ConfigError
from rlhf_lab.probes import ReelTruth, Run
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.checkpoint import load_checkpoint, save_checkpoint
from rlhf_lab.views.interventions import Jobs, PatchRequest, stored_interventions
from rlhf_lab.views.report import runs_page
from rlhf_lab.views.server import PageServer
from tests.views.page_blocks import read_header

TRAIN = dict(preset="reel", reward_fn="zero", batch_size=8, num_minibatches=2, warmup_steps=0)
HOST = "127.0.0.1:PORT"
HOSTILE = {  # request line and headers; PORT and TOKEN are filled in
    "no token": ("GET / HTTP/1.1", [HOST]),
    "longer token": ("GET /TOKENx/ HTTP/1.1", [HOST]),
    "token of letters beyond ASCII": ("GET /t\xf6ken/ HTTP/1.1", [HOST]),
    "parent directory": ("GET /TOKEN/../../etc/passwd HTTP/1.1", [HOST]),
    "other host": ("GET /TOKEN/ HTTP/1.1", ["evil.example"]),
    "other port": ("GET /TOKEN/ HTTP/1.1", ["127.0.0.1:1"]),
    "no host": ("GET /TOKEN/ HTTP/1.1", []),
    "two hosts": ("GET /TOKEN/ HTTP/1.1", [HOST, HOST]),
    "same site": ("GET /TOKEN/ HTTP/1.1", [HOST, "Sec-Fetch-Site: same-site"]),
    "POST": ("POST /TOKEN/ HTTP/1.1", [HOST, "Content-Length: 2"]),
}
JSON_TYPE, ORIGIN = "Content-Type: application/json", "Origin: http://127.0.0.1:PORT"
POST = "POST /TOKEN/jobs HTTP/1.1"
PATCH = {"base": "0", "tuned": "last", "up": "loved", "down": "hated"}
BAD_POSTS = {  # the body is PATCH or a changed one
    "no origin": ([HOST, JSON_TYPE], PATCH),
    "other origin": ([HOST, JSON_TYPE, "Origin: https://evil.example"], PATCH),
    "type of a form": ([HOST, ORIGIN, "Content-Type: text/plain"], PATCH),
    "too long": ([HOST, ORIGIN, JSON_TYPE], PATCH | {"up": "x" * 5000}),
    "unknown field": ([HOST, ORIGIN, JSON_TYPE], PATCH | {"out": "/etc/passwd"}),
    "missing field": ([HOST, ORIGIN, JSON_TYPE], {"base": "0"}),
    "unknown checkpoint": ([HOST, ORIGIN, JSON_TYPE], PATCH | {"base": "../../x"}),
    "option as word": ([HOST, ORIGIN, JSON_TYPE], PATCH | {"up": "--out"}),
    "control character": ([HOST, ORIGIN, JSON_TYPE], PATCH | {"up": "a\0"}),
    "length that is true": ([HOST, ORIGIN, JSON_TYPE], PATCH | {"length": True}),
    "deep list": ([HOST, ORIGIN, JSON_TYPE], None),
}
SECURE = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A trainer whose run has no phase yet, and a server of its page."""
    out = tmp_path_factory.mktemp("run") / "a"
    trainer = RLHFTrainer(RLHFArgs(**TRAIN, total_phases=2), out=out)
    trainer.start()
    server = PageServer([trainer.run.path])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield trainer, server
    server.shutdown()
    server.server_close()


def respond(server, line, headers, body="{}"):
    """Send these lines without changes, and return status, headers and content."""
    fill = lambda text: text.replace("PORT", str(server.server_port)).replace("TOKEN", server.token)
    named = [x if ": " in x else f"Host: {x}" for x in headers]
    request = "\r\n".join(map(fill, [line, *named, ""]))
    request += "\r\n" + body
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as client:
        client.sendall(request.encode("latin-1"))
        response = http.client.HTTPResponse(client)
        response.begin()
        sent = {name.lower(): value for name, value in response.getheaders()}
        return response.status, sent, response.read().decode()


@pytest.mark.parametrize("name", BAD_POSTS)
def test_server_rejects_posts(started, name):
    headers, fields = BAD_POSTS[name]
    body = "[" * 4000 if fields is None else json.dumps(fields)
    headers = [*headers, f"Content-Length: {len(body)}"]
    status, sent, _ = respond(started[1], POST, headers, body)
    assert 400 <= status < 500 and sent.items() >= SECURE.items()
    assert not (started[0].run.path / "interventions").exists()


@pytest.fixture
def run(tmp_path):
    trainer = RLHFTrainer(RLHFArgs(**TRAIN, total_phases=1), out=tmp_path / "run")
    trainer.train()
    return Run(trainer.run.path)


@pytest.mark.slow
@pytest.mark.process
def test_job_is_stored_once_and_shown(run):
    jobs, request = Jobs(run, seconds=900), PATCH | {"tuned": "last", "length": 7}
    assert jobs.post(request) == {"status": "running"}
    with pytest.raises(ConfigError, match="A job is running"):
        jobs.post(request)
    while jobs.state["status"] == "running":
        time.sleep(0.05)
    assert jobs.state["status"] == "done", jobs.state
    (result,) = stored_interventions(run)
    assert result["request"] == request
    tokens = ReelTruth().reviews(32, 0)[0][:, :7]
    models = [run.policy(which) for which in (0, "last")]
    expected = compare(*models, tokens, ("loved", "hated"), -1, ("split", "patching"), (), ())
    assert result["shift"] == pytest.approx(expected.to_dict()["shift"], abs=1e-6)
    torch.testing.assert_close(result["effects"], expected.to_dict()["effects"], atol=1e-6, rtol=0)
    page = runs_page([run])
    assert f"patched in: {result['effects']['patched in'][2][0]:.9g} [" in page
    assert "loved - hated: " in page and jobs.post(request)["status"] == "done"
    assert ", checkpoint 0 to last (phase 1)" in page
    path = run.path / "checkpoints" / "last.safetensors"
    tensors, metadata = load_checkpoint(path)
    save_checkpoint(path, tensors, metadata | {"phase": 2})  # another one, later
    draft, out = run.path / "draft.json", run.path / "out.json"
    draft.write_text(json.dumps(result))  # of the 'last' of phase 1
    jobs._process = subprocess.Popen(["true"], stderr=subprocess.PIPE, text=True)
    jobs._wait(PatchRequest(**request), 1, draft, out)
    assert "saved another 'last'" in jobs.state["error"][0] and not out.exists()
    assert jobs.post(request)["status"] == "running"
    jobs.post({"cancel": True})
    while jobs._process is not None:
        time.sleep(0.02)


@pytest.mark.process
def test_closed_server_kills_its_job(started):
    server = PageServer([started[0].run.path])
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    server.jobs["jobs"]._process = child
    server.server_close()
    assert child.wait(20) < 0


@pytest.mark.slow
@pytest.mark.process
def test_job_is_canceled_and_limited(run):
    for jobs, status in ((Jobs(run), "canceled"), (Jobs(run, seconds=0.2), "failed")):
        jobs.post(PATCH)
        child = jobs._process
        if status == "canceled":
            jobs.post({"cancel": True})
        while jobs._process is not None:
            time.sleep(0.02)
        assert jobs.state["status"] == status and child.poll() is not None
        assert list((run.path / "interventions").iterdir()) == []


def test_damaged_interventions_are_left_out(started):
    run = Run(started[0].run.path)
    folder = run.path / "interventions"
    folder.mkdir()
    for i, text in enumerate(("{", "[]", '{"request": 1}')):
        (folder / f"patch-{i}.json").write_text(text)
    assert stored_interventions(run) == []
    shutil.rmtree(folder)


def test_trainer_view_is_a_frame_without_rights(started, monkeypatch):
    trainer, _ = started
    frame = trainer.view()._repr_html_()
    (page,) = re.findall('srcdoc="(.*?)"', frame, re.DOTALL)
    assert 'sandbox="allow-scripts"' in frame and "<script" not in frame
    assert read_header(unescape(page))["version"] == ""
    monkeypatch.setattr("rlhf_lab.views.report.LARGEST_FRAME", 1000)
    assert "srcdoc" not in trainer.view().fragment and (trainer.run.path / "report.html").is_file()


@pytest.mark.slow
def test_page_grows_with_the_run(started):
    trainer, server = started
    get = lambda name: respond(server, f"GET /TOKEN/{name} HTTP/1.1", ["localhost:PORT"])
    status, headers, page = get("")
    assert status == 200 and headers.items() >= SECURE.items()
    assert "No phase is done yet." in page and "connect-src 'self'" in page
    assert " · 0 of 2 phases" in page
    version = json.loads(get("state.json")[2])["version"]
    assert version == read_header(page)["version"]
    trainer.train()
    assert json.loads(get("state.json")[2])["version"] != version
    page = get("")[2]
    assert read_header(page)["phases"] == [0, 1, 2] and "finished · 2 of 2 phases" in page
    metrics = trainer.run.path / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + "[1]\n")
    with pytest.warns(UserWarning, match="not updated: .*metrics.jsonl"):
        assert get("")[2] == page  # damaged: the last good page


@pytest.mark.parametrize("name", HOSTILE)
def test_server_rejects_hostile_requests(started, name):
    line, headers = HOSTILE[name]
    status, sent, content = respond(started[1], line, headers)
    assert 400 <= status < 600 and content in ("", str(status))
    assert sent.items() >= SECURE.items() and "access-control-allow-origin" not in sent
