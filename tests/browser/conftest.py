"""A headless Chromium, and the contrast of the texts that it shows (`make test-browser`)."""

import json
import shutil
from collections.abc import Iterator

import pytest

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
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


@pytest.fixture(scope="session")
def legible():
    """A function that fails for text with less contrast than 3 : 1 (WCAG 2.2, large text)."""

    def check(page, roots: str) -> None:
        found = page.evaluate(CONTRASTS.replace("ROOTS", json.dumps(roots)))
        assert found, f"nothing is shown in {roots}"
        pale = {text: round(ratio, 2) for text, ratio in found if ratio < 3.0}
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
