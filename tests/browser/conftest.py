"""A JupyterLab, a headless Chromium, and what a reader does with them (`make test-browser`)."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
CELL_MS = 120_000
READY = """() => {
  const context = globalThis.jupyterapp?.shell.currentWidget?.sessionContext;
  const kernel = context?.session?.kernel;
  return context?.isReady && kernel?.connectionStatus === 'connected' && kernel.status === 'idle';
}"""
CONTRASTS = """() => {
  const numbers = c => { const n = c.match(/[\\d.]+/g).map(Number);
    const rgb = n.slice(0, 3).map(x => c.startsWith('color(') ? x * 255 : x);
    return [rgb, n.length > 3 ? n[3] : 1]; };
  const over = (top, a, low) => top.map((x, i) => x * a + low[i] * (1 - a));
  const light = rgb => { const l = rgb.map(x => x / 255).map(
      x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * l[0] + 0.7152 * l[1] + 0.0722 * l[2]; };
  const below = el => { if (!el) return [255, 255, 255];
    const [rgb, a] = numbers(getComputedStyle(el).backgroundColor);
    return a >= 1 ? rgb : over(rgb, a, below(el.parentElement)); };
  const pen = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
  const filtered = (rgb, el) => { const { filter } = getComputedStyle(el);
    if (filter === 'none') return rgb;
    Object.assign(pen, { filter, fillStyle: `rgb(${rgb.map(Math.round)})` }).fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3); };
  const opacity = el => el ? getComputedStyle(el).opacity * opacity(el.parentElement) : 1;
  const found = [];
  for (const root of document.querySelectorAll(ROOTS)) {
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const node = walker.currentNode, el = node.parentElement, text = node.textContent.trim();
      if (!text || !el.getClientRects().length || el.closest('style,script')) continue;
      const low = below(el), [rgb, a] = numbers(getComputedStyle(el).color);
      const pair = [over(rgb, a * opacity(el), low), low].map(c => light(filtered(c, el)))
        .sort((x, y) => y - x);
      found.push([text.slice(0, 40), (pair[0] + 0.05) / (pair[1] + 0.05)]);
    }
  }
  return found;
}"""


def contrasts(page, roots: str) -> dict[str, float]:
    """The lowest contrast (WCAG 2.2) of every text that a browser shows below some selectors."""
    found: dict[str, float] = {}
    for text, ratio in page.evaluate(CONTRASTS.replace("ROOTS", json.dumps(roots))):
        found[text] = min(ratio, found.get(text, ratio))
    return found


@pytest.fixture(scope="session")
def legible():
    """A function that fails for text with less contrast than 3 : 1 (WCAG 2.2, large text)."""

    def check(page, roots: str) -> None:
        found = contrasts(page, roots)
        assert found, f"nothing is shown in {roots}"
        pale = {text: round(ratio, 2) for text, ratio in found.items() if ratio < 3.0}
        assert not pale, f"hard to read: {pale}"

    return check


@pytest.fixture(scope="session")
def chromium() -> Iterator:
    """A headless Chromium; the test is skipped if playwright or Chromium is missing."""
    pytest.importorskip("playwright", reason="needs the extra browser; run `make test-browser`")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("there is no chromium on PATH; install it (Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, headless=True, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def pictures(tmp_path_factory) -> Path:
    """Return the directory of screenshots: the one in RLHF_LAB_PICTURES, or a temporary one."""
    named = os.environ.get("RLHF_LAB_PICTURES")
    place = Path(named) if named else tmp_path_factory.mktemp("pictures")
    place.mkdir(parents=True, exist_ok=True)
    return place


@pytest.fixture(scope="session")
def jupyter(chromium, tmp_path_factory) -> Iterator[tuple[str, Path]]:
    """The address of a running JupyterLab with a token, and the directory that it serves."""
    place = tmp_path_factory.mktemp("jupyter")
    served = shutil.copytree(ROOT / "notebooks", place / "notebooks")
    for name, settings in SETTINGS.items():
        path = place / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))
    port, token = free_port(), secrets.token_hex(8)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1"]
    command += [f"--port={port}", f"--IdentityProvider.token={token}", "--allow-root"]
    command += [f"--ServerApp.root_dir={served}", "--LabApp.expose_app_in_browser=True"]
    with (place / "jupyter.log").open("w") as log:
        server = subprocess.Popen(command, env=quiet(place), stdout=log, stderr=log)
        try:
            wait_for(f"http://127.0.0.1:{port}/api?token={token}", server, place / "jupyter.log")
            yield f"http://127.0.0.1:{port}/lab/tree/NAME?reset&token={token}", served
        finally:
            server.terminate()
            server.wait(30)


def quiet(place: Path) -> dict[str, str]:
    """An environment in which JupyterLab touches nothing outside a directory."""
    own = {
        "RLHF_LAB_PROGRESS": place / "progress.json",
        "JUPYTERLAB_SETTINGS_DIR": place / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": place / "workspaces",
        "JUPYTER_CONFIG_DIR": place / "config",
        "JUPYTER_RUNTIME_DIR": place / "runtime",
        "IPYTHONDIR": place / "ipython",
    }
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return os.environ | {name: str(path) for name, path in own.items()} | offline


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def wait_for(address: str, server: subprocess.Popen, log: Path) -> None:
    """Return once the server answers; fails with its log if it ends or takes a minute."""
    for _ in range(240):
        assert server.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(address, timeout=1).close()
            return
        except OSError:
            time.sleep(0.25)
    raise AssertionError(log.read_text())


class Notebook:
    """A notebook that is open in JupyterLab, and what a reader does with it."""

    def __init__(self, page) -> None:
        self.page = page

    def cell(self, holding: str):
        """The first code cell whose source holds a text."""
        editor = self.page.locator(".jp-InputArea-editor", has_text=holding)
        return self.page.locator(".jp-Notebook .jp-CodeCell").filter(has=editor).first

    def source(self, holding: str) -> str:
        """Return the text of a cell."""
        return "\n".join(self.cell(holding).locator(".cm-line").all_text_contents())

    def write(self, holding: str, source: str) -> None:
        """Replace a cell's source as a reader would, by keyboard."""
        self.cell(holding).locator(".cm-content").click()
        self.page.keyboard.press("Control+a")
        self.page.keyboard.insert_text(source)

    def start(self, cell) -> None:
        """Select a cell and press Ctrl+Enter, again if JupyterLab was not listening yet."""
        prompt = cell.locator(".jp-InputArea-prompt")
        before = prompt.inner_text()
        for attempt in range(300):
            if attempt % 30 == 0:
                prompt.click()
                self.page.keyboard.press("Control+Enter")
            if prompt.inner_text() != before:
                return
            self.page.wait_for_timeout(100)
        raise AssertionError(f"the cell does not start; its prompt is still {before}")

    def run(self, holding: str) -> str:
        """Run one cell, wait until it is done, and return its output with plain spaces."""
        cell = self.cell(holding)
        self.start(cell)
        self.page.wait_for_function(
            "el => /\\[\\d+\\]/.test(el.innerText)",
            arg=cell.locator(".jp-InputArea-prompt").element_handle(),
            timeout=CELL_MS,
        )
        output = self.cell(holding).locator(".jp-OutputArea-output")
        return "\n".join(output.all_inner_texts()).replace("\xa0", " ")

    def theme(self, name: str) -> None:
        """Switch between "JupyterLab Light" and "JupyterLab Dark"."""
        change = "theme => jupyterapp.commands.execute('apputils:change-theme', { theme })"
        self.page.evaluate(change, name)
        light = str("Light" in name).lower()
        self.page.wait_for_selector(f'body[data-jp-theme-light="{light}"]', state="attached")
        self.page.wait_for_selector("#jupyterlab-splash", state="detached")

    def picture(self, path: Path, holding: str) -> None:
        """A screenshot with a cell in the middle."""
        self.cell(holding).evaluate("el => el.scrollIntoView({ block: 'center' })")
        self.page.screenshot(path=path)


@pytest.fixture
def open_notebook(jupyter, chromium):
    """A function that opens a copy of a served notebook, with a kernel that is ready."""
    address, served = jupyter
    context = chromium.new_context(viewport={"width": 1280, "height": 1000})

    def opened(name: str) -> Notebook:
        page, folder = context.new_page(), secrets.token_hex(4)
        (served / folder).mkdir()
        copied = shutil.copy(served / name, served / folder)
        page.goto(address.replace("NAME", f"{folder}/{Path(copied).name}"))
        page.wait_for_function(READY, timeout=CELL_MS)
        return Notebook(page)

    yield opened
    for page in context.pages:
        page.evaluate("jupyterapp.serviceManager.sessions.shutdownAll()")
    context.close()
