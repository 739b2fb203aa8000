"""The report in a real browser: what it draws, what a mouse does to it, in any light and width, without a network."""

import re
import shutil

import numpy as np
import pytest
from tests.cli.test_train import BASE, folder, run  # noqa: F401

from onnxgrad.cli.reporting.page import write_report
from onnxgrad.cli.reporting.picture import picture
from onnxgrad.cli.run_log import RunLog

pytestmark = pytest.mark.slow
sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NAMES = ["<script>alert(1)</script>", "dog & cat", "</script>"]
PICTURE = picture(np.eye(8))


def events(updates=300, epoch=100):
    """The log of a run that was resumed after 150 updates."""
    parameters = {f"layer.{k}.{kind}": [8, 8] for k in range(12) for kind in ("weight", "bias")}
    options = {"model": "<title><script>alert(2)<b>.onnx", "loss": ["cross-entropy:logits"], "lr": 1e-3}
    start = {"event": "start", "step": 0, "options": options, "parameters": parameters, "versions": {"onnx": "1"}}
    found = [start]
    for step in range(1, updates + 1):
        loss = 3 / step + 0.1 * (step % 7) / 7
        found.append({"event": "step", "epoch": 1, "step": step, "loss": loss, "lr": 1e-3, "gradient_norm": 1 / step})
        if step % 3 == 0:
            norms = [None if step == 150 and k == 5 else (k + 1) / step for k in range(len(parameters))]
            found.append({"event": "gradients", "step": step, "norms": norms})
        if step % epoch == 0:
            measured = {"loss": loss, "accuracy": 1 - 1 / step}
            found.append({"event": "epoch", "epoch": step // epoch, "step": step, "loss": loss, "seconds": 2.0,
                          "validation": measured, "peak_memory": 10**8})  # fmt: skip
        if step == 150:
            found.append({"event": "stopped", "step": step, "why": "stopped by SIGINT after step 150"})
            found.append({**start, "step": step})
    bars = [[NAMES[0], 0.9, False], [NAMES[1], 0.1, True]]
    outcomes = [{"of": "logits", "truth": NAMES[1], "predicted": NAMES[0], "bars": bars}]
    image = {"name": "image", "shape": [1, 8, 8], "picture": PICTURE}
    inputs = [image, {"name": "text", "shape": [3], "text": "<b>bold</b>"}]
    rows = [{"index": k, "loss": 9.0 - k if k else None, "inputs": inputs, "outcomes": outcomes} for k in range(24)]
    confusion = [{"of": "logits", "right": 5, "total": 6, "names": NAMES, "matrix": [[3, 0, 0], [1, 2, 0], [0, 0, 0]]}]
    examples = {"examples": 60, "of": "--data", "worst": rows, "confusion": confusion}
    found.append({"event": "end", "step": updates, "model_bytes": 2048})
    found.append({"event": "examples", "step": updates, **examples})
    return found


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "run.html"
    write_report(path, RunLog(None, events()))
    return path


@pytest.fixture
def opened(browser, report):
    """Opens a page in a window of some kind; at the end nothing has been said or asked for."""
    problems, pages = [], []

    def open_page(width=1200, path=report, **how):
        page = browser.new_page(viewport={"width": width, "height": 900}, **how)
        pages.append(page)
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append("a dialog"))
        page.on("request", lambda asked: asked.url.startswith(("file:", "data:")) or problems.append(asked.url))
        page.goto(path.as_uri())
        page.wait_for_selector("#curves .curve" if path == report else "#settings")
        return page

    yield open_page
    for page in pages:
        page.close()
    assert problems == []


def ticks(page, chart=0):
    """The updates below a chart."""
    texts = page.locator("#curves .chart").nth(chart).locator("text.x").all_text_contents()
    return [int(text.replace(",", "")) for text in texts]


def until(page, expression):
    """Waits without wait_for_function(), which evaluates text in the page where that is not true at once."""
    for _ in range(200):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"{expression} was not true within 10 s")


def lightness(colour):
    """Of a colour as the browser computes it, 0 to 255."""
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


def test_it_draws_curves_norms_examples_and_tables(opened):
    page = opened()
    assert page.title() == "<title><script>alert(2)<b>.onnx – onnxgrad"
    assert page.locator("h1").inner_text() == "<title><script>alert(2)<b>.onnx"
    assert page.locator(".state").inner_text() == "finished"
    assert page.locator("#curves h3").all_text_contents() == ["loss", "accuracy", "learning rate", "gradient norm"]
    assert page.locator("#curves .chart").first.locator(".curve").count() == 3
    assert page.locator("#curves .chart").first.locator("circle").count() == 3
    assert page.locator("#curves .mark").count() == 4  # where it was resumed
    ways = page.locator("#curves .curve").evaluate_all("all => all.map((p) => p.getAttribute('d').split('L').length)")
    assert ways == [300, 300, 3, 3, 300, 300]
    assert page.locator("#norms .names button").all_text_contents() == [f"layer.{k}" for k in range(12)]
    size = page.locator("#norms canvas").evaluate("c => [c.width, c.height]")
    assert size == [100, 12]
    colours = page.locator("#norms canvas").evaluate(
        "c => [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data].filter((_, k) => k % 4 === 0)"
    )
    assert len(set(colours)) > 20 and colours[2 * 100 + 49] == 220  # red: not finite
    assert page.locator("#worst .example").count() == 24
    first = page.locator("#worst .example").first.inner_text()
    assert "row 0" in first and "not finite" in first and "<b>bold</b>" in first and NAMES[0] in first
    assert page.locator("#worst img").first.evaluate("i => i.naturalWidth") == 8
    heading = page.locator("#confusion thead th").all_text_contents()
    assert heading == ["", *NAMES] and page.locator("#confusion tbody td").nth(3).inner_text() == "1"
    assert page.locator("#epochs tbody tr").count() == 3 and "2.05 kB" in page.locator("#sizes").inner_text()
    assert "cross-entropy:logits" in page.locator("#settings").inner_text()
    assert page.locator("script").count() == 2  # its own


def test_dragging_zooms_into_all_charts_and_a_double_click_shows_the_whole_run(opened):
    page = opened()
    whole = ticks(page)
    box = page.locator("#curves .plot").first.bounding_box()
    assert whole[-1] == 300 and not page.locator("#curves .reset").first.is_visible()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 90)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 90)
    assert page.locator(".brush").count() == 1
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 90)
    page.mouse.up()
    assert page.locator(".brush").count() == 0
    for chart in range(4):
        assert all(100 < x < 190 for x in ticks(page, chart))
    assert page.locator("#norms canvas").evaluate("c => c.width") < 30
    page.mouse.dblclick(box["x"] + box["width"] * 0.5, box["y"] + 90)
    assert ticks(page) == whole and page.locator("#norms canvas").evaluate("c => c.width") == 100
    page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + 90)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 90, steps=3)
    page.mouse.up()
    page.locator("#curves .reset").first.click()
    assert ticks(page) == whole


def test_the_mouse_reads_numbers_and_the_legend_hides_curves(opened):
    page = opened()
    plot = page.locator("#curves .plot").first
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    tip = page.locator("#curves .tip").first
    assert tip.is_visible() and re.search(r"update 1\d\d\neach update [\d.]+\ntraining [\d.]+", tip.inner_text())
    page.mouse.move(box["x"], box["y"] - 40)
    assert not tip.is_visible()
    page.locator("#curves .key").first.click()
    assert plot.locator(".curve").count() == 2
    highest = plot.locator("svg text").first.text_content()
    page.locator("#curves .chart").first.get_by_text("log").click()
    assert plot.locator("svg text").first.text_content() != highest


def test_norms_as_lines_of_chosen_layers_or_parameters(opened):
    page = opened()
    page.locator("#norms").get_by_text("lines", exact=True).click()
    assert page.locator("#norms .curve").count() == 5
    page.locator("#norms .names button").nth(1).click()
    assert page.locator("#norms .curve").count() == 6
    page.locator("#norms").get_by_text("parameters", exact=True).click()
    assert page.locator("#norms .names button").count() == 24
    page.locator("#norms").get_by_text("heat map", exact=True).click()
    assert page.locator("#norms .curve").count() == 0
    page.locator("#norms .names button").nth(3).click()  # the lines of this one alone
    assert page.locator("#norms .curve").count() == 1 and page.locator("#norms input[value=lines]").is_checked()
    box = page.locator("#norms canvas").bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + 5)
    assert "layer.0.weight 0.3333" in page.locator("#norms .heat .tip").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 800, 1400])
def test_any_width_and_light(opened, width, scheme):
    page = opened(width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    style = "getComputedStyle(document.body)"
    back, ink = page.evaluate(f"[{style}.backgroundColor, {style}.color]")
    assert abs(lightness(back) - lightness(ink)) > 150 and (lightness(back) > 128) == (scheme == "light")
    lefts = page.locator("#curves .chart").evaluate_all("c => c.map((x) => x.getBoundingClientRect().left)")
    assert len(set(lefts)) == (1 if width <= 720 else 2)
    page.set_viewport_size({"width": 500, "height": 900})
    until(page, "document.querySelector('#curves svg').viewBox.baseVal.width < 500")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_it_prints_in_black_on_white(opened):
    page = opened(color_scheme="dark")
    page.emulate_media(media="print")
    assert lightness(page.evaluate("getComputedStyle(document.body).backgroundColor")) == 255
    assert page.pdf()[:5] == b"%PDF-"


def test_runs_that_have_little_to_show(opened, folder):  # noqa: F811
    for number, kept in enumerate((1, 2, 3)):
        write_report(folder / f"{number}.html", RunLog(None, events()[:kept]))
        page = opened(path=folder / f"{number}.html")
        assert page.locator(".state").inner_text() == "not finished: it is still running, or was killed"
        assert page.locator("#curves .chart").count() == (0 if kept == 1 else 3)


def test_the_report_of_a_real_run(opened, folder):  # noqa: F811
    run(*BASE, "--epochs", 3, "--val", "0.25", "--metric", "accuracy", "-o", "a.onnx", "--report", "a.html")
    page = opened(path=folder / "a.html")
    assert page.locator("#worst .example").count() == 18 and page.locator("#confusion tbody tr").count() == 3
    assert page.locator("#norms canvas").evaluate("c => [c.width, c.height]") == [21, 2]
