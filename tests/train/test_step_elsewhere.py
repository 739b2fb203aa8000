"""Files of export_step() in the other onnxruntimes at hand: Node's, and the browser's in Chromium and in Node."""

import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from tests.torch_export import export
from tests.train.test_step_file import Digits, Reader, images, texts
from tests.train.two_layers import mlp

import onnxgrad
from onnxgrad import Trainer, losses, optim, schedules

ROOT = Path(__file__).parents[2]
NPM = ROOT / "build" / "npm"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (NPM / "node_modules").is_dir(), reason="`make build/npm/ready` has not found npm"),
]


@pytest.mark.parametrize("runtime", ["onnxruntime-node", "onnxruntime-web"])
@pytest.mark.parametrize("module, batches", [(Digits, images), (Reader, texts)], ids=["images", "texts"])
def test_in_node(runtime, module, batches, tmp_path):
    torch.manual_seed(0)
    export(module(), torch.from_numpy(batches(0)["x"]), path := tmp_path / "model.onnx", dynamo=False)
    trainer = Trainer(
        path, losses.CrossEntropy("y"), optim.AdamW(lr=0.01), schedule=schedules.Cosine(50, warmup=5), clip_norm=1.0
    )
    onnxgrad.export_step(trainer, tmp_path / "step.onnx")
    given = [batches(k) for k in range(50)]
    described = [{name: [a.ravel().tolist(), list(a.shape)] for name, a in batch.items()} for batch in given]
    (tmp_path / "run.json").write_text(json.dumps({"batches": described}))
    ran = subprocess.run(
        ["node", ROOT / "tests" / "npm" / "run.mjs", runtime, tmp_path],
        capture_output=True, text=True, cwd=NPM, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert np.allclose(found["losses"], [trainer.step(batch) for batch in given], rtol=2e-5)
    assert np.isclose(found["loss"], trainer.evaluate(given[:1])["loss"], rtol=1e-3)
    x, options = given[0]["x"], ["CPUExecutionProvider"]
    trainer.export(tmp_path / "trained.onnx")
    mine, theirs = (
        onnxruntime.InferenceSession(tmp_path / name, providers=options).run(None, {"x": x})[0]
        for name in ("trained.onnx", "trained-step.model.onnx")
    )
    assert np.allclose(mine, theirs, rtol=1e-3, atol=1e-3)


def test_the_code_shown_for_node(tmp_path):
    shown = re.search(r"```js\n(.*?)```", (ROOT / "docs" / "anywhere.md").read_text(), re.S)[1]
    (tmp_path / "node_modules").symlink_to(NPM / "node_modules")
    (tmp_path / "page.mjs").write_text(shown)
    shutil.copy(ROOT / "examples" / "web" / "training-step.mjs", tmp_path)
    model = mlp()
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 4
    for tensor in model.graph.initializer:
        if tensor.name == "fc0.weight":
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor)[:, :4].copy(), tensor.name))
    onnxgrad.export_step(model, tmp_path / "step.onnx", losses.CrossEntropy("logits"), optim.AdamW(lr=0.05))
    ran = subprocess.run(["node", "page.mjs"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ran.returncode == 0, ran.stderr
    first, last = (float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", ran.stdout))
    assert last < first / 4


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def page_at(tmp_path_factory):
    """The address of the page, served as any web server would."""
    folder = tmp_path_factory.mktemp("web")
    runtime = NPM / "node_modules" / "onnxruntime-web" / "dist"
    command = [sys.executable, "examples/web/make.py", "--out", folder, "--runtime", runtime]
    made = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert made.returncode == 0, made.stderr
    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def number(page, name):
    return float(page.text_content(f"#{name}").replace(",", "").replace("%", ""))


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_the_page_trains_classifies_and_gives_the_model(page_at, tmp_path):
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 900})
        said, asked = [], []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(page_at)
        page.wait_for_selector("#train:not([disabled])", timeout=60_000)
        assert number(page, "accuracy") < 40  # of ten classes, by random weights
        page.click("#train")
        page.wait_for_function("parseFloat(document.querySelector('#accuracy').textContent) > 95", timeout=120_000)
        page.click("#train")
        page.wait_for_timeout(1000)
        steps, loss = number(page, "steps"), number(page, "loss")
        assert loss < 1 and number(page, "speed") > 0
        page.wait_for_timeout(500)
        assert number(page, "steps") == steps  # it pauses
        draw_a_line(page)
        page.wait_for_selector("#bars .best")
        assert page.inner_text("#bars .best").split()[0] == "1"
        page.click("#labels [data-label='1']")
        assert page.text_content("#own") == "(1 of yours)"
        with page.expect_download() as download:
            page.click("#download")
        download.value.save_as(tmp_path / "trained.onnx")
        page.click("#reset")
        page.wait_for_function("document.querySelector('#steps').textContent === '0'", timeout=30_000)
        browser.close()
    assert said == [] and all(url.startswith((page_at, "blob:", "data:")) for url in asked)
    from sklearn.datasets import load_digits

    digits = load_digits()
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"x": (digits.data / 16).astype(np.float32).reshape(-1, 1, 8, 8)})
    assert (logits.argmax(1) == digits.target).mean() > 0.95


def draw_a_line(page):
    box = page.locator("#pad").bounding_box()
    x, y, size = box["x"], box["y"], box["width"]
    page.mouse.move(x + size / 2, y + 0.15 * size)
    page.mouse.down()
    page.mouse.move(x + size / 2, y + 0.85 * size, steps=10)
    page.mouse.up()
