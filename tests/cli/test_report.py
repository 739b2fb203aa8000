"""The report of a run: numbers against PyTorch, NumPy and scikit-learn, and what is left of runs that stop."""

import base64
import io
import json
import re
import shlex
import signal
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from PIL import Image
from sklearn.metrics import confusion_matrix
from tests.checks import raises
from tests.cli.test_train import BASE, arrays, events, folder, own_loss, run
from torch.nn import functional as F  # noqa: N812, its usual name

from onnxgrad.cli.reporting.confusion import Confusion
from onnxgrad.cli.reporting.describe import described_input, described_outcome
from onnxgrad.cli.reporting.example_loss import ExampleLoss
from onnxgrad.cli.reporting.layers import layer_of, norms_by_layer, sizes_by_layer
from onnxgrad.cli.reporting.names import Names, Tokens, class_names
from onnxgrad.cli.reporting.page import page
from onnxgrad.cli.reporting.picture import picture, pictures
from onnxgrad.cli.reporting.worst import WorstExamples
from onnxgrad.cli.run_log import RunLog, read_log
from onnxgrad.sources.source import Arrays
from onnxgrad.train import losses, optim
from onnxgrad.train.trainer import Trainer

__all__ = ["folder"]
NAMELESS = Names((), Tokens(Path("none.json")))


def shown(path):
    """The contents of a page."""
    text = Path(path).read_text() if isinstance(path, (str, Path)) else page(path)
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


def test_the_worst_examples_the_confusion_matrix_and_the_rows_are_right(folder):
    held = ("--val", "0.5", "--seed", 3, "--metric", "accuracy")
    printed = run(*BASE, *held, "--epochs", 2, "-o", "trained.onnx", "--report", "run.html")
    assert re.search(r"report +run.html +[0-9.]+ kB", printed.stdout)
    _, held_out = Arrays({**arrays(), "row": np.arange(72)}).split(0.5, seed=3)
    aside = held_out.arrays
    session = onnxruntime.InferenceSession("trained.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"x": aside["x"]})
    each = F.cross_entropy(torch.tensor(logits), torch.tensor(aside["target"]), reduction="none").numpy()
    found = shown("run.html")
    worst = np.argsort(-each)[:24]
    assert [one["index"] for one in found["examples"]["worst"]] == aside["row"][worst].tolist()
    np.testing.assert_allclose([one["loss"] for one in found["examples"]["worst"]], each[worst], rtol=1e-5)
    best = [one["outcomes"][0]["predicted"] for one in found["examples"]["worst"]]
    assert best == [str(k) for k in logits[worst].argmax(1)]
    bars = found["examples"]["worst"][0]["outcomes"][0]["bars"]
    chances = torch.softmax(torch.tensor(logits[worst[0]]), 0)
    assert all(abs(share - chances[int(name)]) < 1e-4 for name, share, _ in bars)
    assert [name for name, _, right in bars if right] == [str(aside["target"][worst[0]])]
    (matrix,) = found["examples"]["confusion"]
    assert matrix["matrix"] == confusion_matrix(aside["target"], logits.argmax(1), labels=range(3)).tolist()
    assert matrix["names"] == ["0", "1", "2"] and matrix["total"] == 36 and found["examples"]["of"] == "--data"


def test_the_report_has_curves_sizes_settings_and_can_be_made_from_the_log(folder):
    run(*BASE, "--epochs", 3, "--val", "train.npz", "--metric", "accuracy", "-o", "a.onnx", "--report", "a.html")
    found = shown("a.html")
    assert [p["title"] for p in found["panels"]] == ["loss", "accuracy", "learning rate", "gradient norm"]
    steps, epochs = events("a.jsonl", "step"), events("a.jsonl", "epoch")
    each, _, validation = found["panels"][0]["curves"]
    assert each["x"] == [e["step"] for e in steps] and validation["x"] == [9, 18, 27]
    np.testing.assert_allclose(each["y"], [e["loss"] for e in steps], rtol=1e-4)
    np.testing.assert_allclose(found["panels"][3]["curves"][0]["y"], [e["gradient_norm"] for e in steps], rtol=1e-4)
    assert found["sizes"]["layers"] == [["fc0", 112], ["fc1", 51]]
    facts = dict(found["sizes"]["facts"])
    assert facts["model after"] == f"{Path('a.onnx').stat().st_size / 1000:.3g} kB"
    assert facts["examples, training"] == facts["examples, validation"] == "72"
    settings = dict(found["settings"])
    assert settings["loss"] == "cross-entropy:logits" and settings["batch-size"] == "8" and "resume" not in settings
    assert dict(found["machine"])["onnxruntime"] == onnxruntime.__version__
    assert found["state"] == {"kind": "finished", "text": "finished"} and len(found["epochs"]["rows"]) == len(epochs)
    assert found["examples"]["of"] == "--val" and found["title"] == "model.onnx"
    assert run("report", "a.jsonl", "-o", "b.html").output == "b.html\n"
    assert Path("a.html").read_bytes() == Path("b.html").read_bytes()


def test_norms_are_those_of_the_gradients(folder):
    run(*BASE, "--no-shuffle", "--clip-norm", 0.1, "-o", "a.onnx", "--val", "train.npz", "--report", "a.html")
    norms, steps = events("a.jsonl", "gradients"), events("a.jsonl", "step")
    assert [e["step"] for e in norms] == list(range(1, 10))
    for one, step in zip(norms, steps, strict=True):
        assert abs(np.linalg.norm(one["norms"]) / step["gradient_norm"] - 1) < 1e-3
    trainer = Trainer("model.onnx", losses.CrossEntropy("logits"), optim.AdamW())
    trainer.step({name: a[:8] for name, a in arrays().items()})
    names = list(events("a.jsonl", "start")[0]["parameters"])
    assert names == ["fc0.weight", "fc0.bias", "fc1.weight", "fc1.bias"]
    assert list(trainer.gradient_norms()) == list(trainer.parameters)
    for name, norm in zip(names, norms[0]["norms"], strict=True):
        assert abs(trainer.gradient_norms()[name] / np.linalg.norm(trainer.gradients[name]) - 1) < 1e-6
        assert abs(norm / np.linalg.norm(trainer.gradients[name]) - 1) < 1e-3
    kinds = shown("a.html")["norms"]["kinds"]
    assert kinds["layers"]["names"] == ["fc0", "fc1"] and kinds["parameters"]["names"] == names
    assert abs(kinds["layers"]["rows"][1][0] / np.hypot(*norms[0]["norms"][2:]) - 1) < 1e-3


def test_a_long_run_records_at_most_200_times(folder):
    run(*BASE, "--epochs", 30, "--quiet", "--val", "train.npz", "-o", "a.onnx", "--report", "a.html")
    assert [e["step"] for e in events("a.jsonl", "gradients")] == list(range(2, 271, 2))
    run(*BASE, "--quiet", "-o", "b.onnx")
    assert events("b.jsonl", "gradients") == events("b.jsonl", "examples") == []
    run("report", "b.jsonl")
    found = shown("b.html")
    assert found["norms"]["problem"].startswith("Not recorded: onnxgrad train logs the norms")
    assert found["examples"]["problem"].startswith("Not recorded: onnxgrad train looks for these")


def test_layers_are_named_by_their_parameters():
    names = ["encoder.0.weight", "encoder.0.bias", "conv1_weight", "conv1_bias", "onnx::MatMul_12", "val_7", "w",
             "/head/weight", ".odd"]  # fmt: skip
    layers = ["encoder.0", "encoder.0", "conv1", "conv1", "onnx::MatMul_12", "val_7", "w", "/head", ".odd"]
    assert [layer_of(name) for name in names] == layers
    assert sizes_by_layer({"a.weight": [3, 4], "b": [], "a.bias": [4]}) == {"a": 16, "b": 1}
    rows = {"a.weight": [3.0, None], "a.bias": [4.0, 1.0], "b": [0.0, 2.0]}
    assert norms_by_layer(list(rows), list(rows.values())) == {"a": [5.0, None], "b": [0.0, 2.0]}


RNG = np.random.default_rng(0)
LOGITS = RNG.standard_normal((6, 4)).astype(np.float32)
PIXELS = RNG.standard_normal((6, 4, 3, 3)).astype(np.float32)
CLASSES, MAP = RNG.integers(0, 4, 6), RNG.integers(0, 4, (6, 3, 3))
SOFT = torch.softmax(torch.tensor(RNG.standard_normal((6, 4))), 1).float().numpy()


def softmax(x):
    return torch.softmax(torch.tensor(x), 1).numpy()


@pytest.mark.parametrize(
    "loss, prediction, target, torch_loss",
    [
        (losses.CrossEntropy("y"), LOGITS, CLASSES, F.cross_entropy),
        (losses.CrossEntropy("y", label_smoothing=0.2), LOGITS, CLASSES,
         lambda x, t: F.cross_entropy(x, t, label_smoothing=0.2)),
        (losses.CrossEntropy("y"), PIXELS, MAP, F.cross_entropy),
        (losses.CrossEntropy("y", axis=-1), np.moveaxis(PIXELS, 1, -1), MAP,
         lambda x, t: F.cross_entropy(x.moveaxis(-1, 1), t)),
        (losses.CrossEntropy("y", ignore_index=1), PIXELS, MAP,
         lambda x, t: F.cross_entropy(x, t, ignore_index=1)),
        (losses.CrossEntropy("y", probabilities=True), LOGITS, SOFT, F.cross_entropy),
        (losses.CrossEntropy("y"), softmax(LOGITS), CLASSES,
         lambda p, t: F.nll_loss(torch.log(p), t)),  # what Softmax made
        (losses.NLL("y", log_prediction=False), softmax(LOGITS), CLASSES,
         lambda p, t: F.nll_loss(torch.log(p), t)),
        (losses.BCEWithLogits("y"), LOGITS, SOFT, F.binary_cross_entropy_with_logits),
        (losses.BCE("y"), SOFT, softmax(-LOGITS), F.binary_cross_entropy),
        (losses.MSE("y"), LOGITS, SOFT, F.mse_loss),
        (losses.MSE("y"), LOGITS.astype(np.float64), SOFT, F.mse_loss),
        (losses.MSE("y"), LOGITS.astype(np.float16), SOFT, F.mse_loss),
        (losses.Huber("y", delta=0.5), LOGITS, SOFT, lambda x, t: F.huber_loss(x, t, delta=0.5)),
        (losses.KLDiv("y"), np.log(SOFT), softmax(LOGITS), lambda x, t: F.kl_div(x, t, reduction="batchmean")),
        (2 * losses.L1("y") + losses.MSE("y"), LOGITS, SOFT,
         lambda x, t: 2 * F.l1_loss(x, t) + F.mse_loss(x, t)),
    ],
)  # fmt: skip
def test_the_loss_of_every_example_is_pytorchs(loss, prediction, target, torch_loss):
    found = ExampleLoss(loss.parts, [])({"y": prediction}, {"target": target})
    given = torch.tensor(prediction if prediction.dtype == np.float64 else prediction.astype(np.float32))
    wanted = torch.tensor(target).to(given.dtype) if target.dtype.kind == "f" else torch.tensor(target)
    right = [float(torch_loss(given[k : k + 1], wanted[k : k + 1])) for k in range(len(prediction))]
    np.testing.assert_allclose(found, right, rtol=2e-5, atol=1e-6)


def test_what_sigmoid_made():
    loss, chances = losses.BCEWithLogits("y"), torch.sigmoid(torch.tensor(LOGITS))
    found = ExampleLoss([loss], ["y"])({"y": chances.numpy()}, {"target": SOFT})
    right = F.binary_cross_entropy(chances, torch.tensor(SOFT), reduction="none").mean(1)
    np.testing.assert_allclose(found, right, rtol=1e-4)


def test_pictures_are_png_files_of_the_same_pixels():
    rng = np.random.default_rng(0)

    def decoded(source):
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(source.removeprefix("data:image/png;base64,")))))

    grey = rng.integers(0, 256, (9, 12), dtype=np.uint8)
    assert np.array_equal(decoded(picture(grey)), grey)
    assert np.array_equal(decoded(picture(grey[None] / np.float32(255))), grey)
    colour = rng.integers(0, 256, (10, 9, 3), dtype=np.uint8)
    assert np.array_equal(decoded(picture(colour)), colour)
    assert np.array_equal(decoded(picture(np.moveaxis(colour, -1, 0))), colour)
    wide = np.repeat(np.repeat(rng.integers(-5, 6, (60, 80)), 4, 0), 4, 1).astype(np.float64)
    assert np.array_equal(decoded(picture(wide)), np.round((wide[1::4, 1::4] + 5) * 25.5).clip(0, 255).astype(np.uint8))
    for not_one in (np.zeros(64), np.zeros((20, 5)), np.zeros((2, 9, 9)), np.zeros((1, 3, 3, 3)), np.array(["a"] * 9)):
        assert picture(not_one) is None
    masks = pictures({"truth": np.full((8, 8), 2), "predicted": np.ones((8, 8))})
    assert decoded(masks["truth"]).min() == 255 and decoded(masks["predicted"]).max() == 0


@pytest.mark.parametrize(
    "key, text",
    [
        ("names", "{0: '<script>', 1: 'dog', 2: 'cat'}"),
        ("id2label", '{"0": "<script>", "1": "dog", "2": "cat"}'),
        ("classes", '["<script>", "dog", "cat"]'),
        ("labels", "<script>, dog,cat"),
    ],
)
def test_classes_have_the_names_of_the_models_metadata(folder, key, text):
    model = onnx.load("model.onnx")
    helper.set_model_props(model, {key: text})
    onnx.save(model, "model.onnx")
    assert class_names(Path("model.onnx")) == ["<script>", "dog", "cat"]


def test_tokens_are_text_if_the_tokenizer_lies_beside_the_model(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: k for k, word in enumerate(["[PAD]", "a", "dog", "cat", "sat", "ran", "<b>"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary))
    made.add_special_tokens(["[PAD]"])
    made.save(str(tmp_path / "tokenizer.json"))
    names = Names((), Tokens(tmp_path / "tokenizer.json"))
    ids, target = np.array([1, 2, 4, 0]), np.array([2, 4, 6, -100])
    assert described_input("input_ids", ids, names)["text"] == "a dog sat"
    assert "text" not in described_input("attention_mask", ids, names)
    loss, scores = losses.CrossEntropy("y", axis=-1, ignore_index=-100), np.zeros((4, 7), np.float32)
    scores[[0, 1, 2], [2, 4, 3]] = 5
    shown = described_outcome(loss, scores, target, names, False)
    assert (shown["truth"], shown["predicted"], shown["note"]) == ("<b>", "cat", "1 of 3 wrong; worst at 2")
    assert names.of(0, in_sequence=True) == "[PAD]" and names.of(2) == "2" and names.of(99, in_sequence=True) == "99"
    ignored = described_outcome(loss, scores, np.full(4, -100), names, False)
    assert ignored == {"of": "y", "note": "no target counts"}
    assert Names(("x", "y"), Tokens(tmp_path / "none.json")).of(1, in_sequence=True) == "y"


@pytest.mark.parametrize("given, predicted", [(0.3, "0"), (0.8, "1")])
def test_labels_and_numbers(tmp_path, given, predicted):
    names, one = Names((), Tokens(tmp_path / "tokenizer.json")), np.array([given], np.float32)
    shown = described_outcome(losses.BCE("y"), one, np.array([1.0]), names, False)
    assert (shown["truth"], shown["predicted"], shown["bars"]) == ("1", predicted, [["1", round(given, 4), True]])
    logit = np.log(one / (1 - one))
    assert described_outcome(losses.BCEWithLogits("y"), logit, np.array([1.0]), names, False)["bars"] == shown["bars"]
    assert described_outcome(losses.BCEWithLogits("y"), one, np.array([1.0]), names, True)["bars"] == shown["bars"]
    several = described_outcome(losses.BCE("y"), np.array([0.9, 0.2, 0.4]), np.array([1, 1, 0]), names, False)
    assert several["note"] == "1 of 3 wrong" and several["bars"] == [
        ["1", 0.2, True],
        ["2", 0.4, False],
        ["0", 0.9, True],
    ]
    numbers = described_outcome(losses.MSE("y"), np.array([1.5, np.nan]), np.array([2.0, 1e-9]), names, False)
    assert numbers == {"of": "y", "truth": "2.0000, 1.000e-09", "predicted": "1.5000, nan"}
    images = described_outcome(losses.MSE("y"), np.zeros((1, 8, 8)), np.ones((1, 8, 8)), names, False)
    assert sorted(images["pictures"]) == ["predicted", "truth"]


def test_a_classifier_of_many_classes_shows_what_it_confuses_most():
    rng = np.random.default_rng(0)
    scores, target = rng.standard_normal((400, 60)), rng.integers(0, 60, 400)
    counted = Confusion(losses.CrossEntropy("y", ignore_index=7), False)
    for part in range(0, 400, 100):
        counted.add(scores[part : part + 100], target[part : part + 100])
    matrix = confusion_matrix(target[target != 7], scores.argmax(1)[target != 7], labels=range(60))
    found = counted.shown(NAMELESS)
    assert found["right"] == np.trace(matrix) and found["total"] == matrix.sum() and found["classes"] == 60
    for truth, predicted, times in found["pairs"]:
        assert matrix[int(truth), int(predicted)] == times and truth != predicted
    np.fill_diagonal(matrix, 0)
    assert [times for *_, times in found["pairs"]] == np.sort(matrix.reshape(-1))[::-1][:20].tolist()


def test_texts_cannot_end_the_script_that_they_are_in(folder):
    model = onnx.load("model.onnx")
    helper.set_model_props(model, {"classes": '["</script><script>alert(1)</script>", "&", "<!--"]'})
    onnx.save(model, "<script>.onnx")
    run("train", "<script>.onnx", *BASE[2:], "--val", "train.npz", "-o", "a.onnx", "--report", "a.html")
    text = Path("a.html").read_text()
    assert text.count("</script>") == 2 and "<!--" not in text and "<title>&lt;script&gt;.onnx" in text
    found = shown("a.html")
    names = ["</script><script>alert(1)</script>", "&", "<!--"]
    assert found["examples"]["confusion"][0]["names"] == names and found["title"] == "<script>.onnx"
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")


def test_a_run_that_is_interrupted_and_goes_on(folder, monkeypatch):
    step, count = Trainer.step, []

    def interrupted(self, batch):
        count.append(1)
        if len(count) == 5:
            signal.raise_signal(signal.SIGINT)
        return step(self, batch)

    given = (*BASE, "--epochs", 2, "--val", "0.25", "--report", "a.html")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        again = run(*given, "-o", "a.onnx", code=130).stderr.partition("; to resume: ")[2]
    found = shown("a.html")
    assert found["state"]["text"] == "stopped by SIGINT after step 5; the state is in 'a.safetensors'"
    assert found["tiles"][0][0] == "training loss" and len(found["norms"]["steps"]) == 5
    assert found["examples"]["problem"].startswith("Not recorded")
    run(*shlex.split(again)[1:])
    found = shown("a.html")
    assert found["state"]["kind"] == "finished" and found["marks"] == [[5, "resumed"]]
    assert found["norms"]["steps"] == list(range(1, 15)) and len(found["examples"]["worst"]) == 18
    run(*given, "-o", "b.onnx", "--overwrite")
    assert shown("a.html")["norms"] == found["norms"] and shown("a.html")["examples"] == found["examples"]


def test_a_run_that_stops_because_its_loss_is_not_finite(folder):
    run(*BASE, "--optimizer", "sgd", "--lr", 1e38, "--epochs", 9, "-o", "a.onnx", "--report", "a.html", code=1)
    state = shown("a.html")["state"]
    assert state["kind"] == "stopped" and re.match(r"step \d+: .* not finite; .*'a.safetensors'", state["text"])


def test_a_log_of_a_run_that_was_killed_and_events_that_are_not_finite():
    start = {"event": "start", "step": 0, "options": {"model": "a/b.onnx", "lr": 0.1, "quiet": False}}
    step = {"event": "step", "epoch": 1, "step": 1, "loss": None, "lr": 0.1, "gradient_norm": None}
    log = RunLog(None, [start, step])
    found = shown(log)
    assert found["state"]["kind"] == "unfinished" and found["title"] == "b.onnx"
    assert found["settings"] == [["model", "a/b.onnx"], ["lr", "0.1"]]
    assert [p["title"] for p in found["panels"]] == ["learning rate"]
    assert shown(RunLog(None, [start]))["panels"] == []
    of_script = shown(RunLog(None, [step | {"loss": 0.5}]))
    assert of_script["state"] == {"kind": "logged", "text": "1 updates, as they were logged"}
    assert of_script["title"] == "a run" and of_script["panels"][0]["title"] == "loss"


@pytest.mark.parametrize(
    "given, sentence",
    [
        ((), "No examples to validate with: --val names a file, or the share of --data to hold out."),
        (
            ("--val", "own.npz", "--loss", "cost"),
            "The model computes its loss itself, for whole batches: ",
        ),
    ],
)
def test_a_page_without_examples_says_why(folder, given, sentence):
    own_loss()
    np.savez("own.npz", x=arrays()["x"], z=arrays()["x"][:, :1])
    given = given if "--loss" in given else (*given, "--loss", "mse:y:target=z")
    run("train", "own.onnx", "--data", "own.npz", *given, "-o", "a.onnx", "--report", "a.html")
    assert shown("a.html")["examples"]["problem"].startswith(sentence)


def test_examples_that_do_not_come_first(folder):
    worst = WorstExamples([losses.CrossEntropy("logits")], Path("model.onnx"), NAMELESS, 0, 1, 8)
    batch = {name: a[:8] for name, a in arrays().items()}
    assert worst({"logits": np.zeros((3, 8), np.float32)}, batch) == 0 and worst.kept == []
    assert worst.problem.startswith("'logits' does not have the examples along its first dimension")


def test_what_is_refused(folder):
    for name, sentence in {
        "run.pdf": "'run.pdf' ends in '.pdf', expected .html for a report",
        "none/run.html": "the folder 'none' to write 'run.html' into does not exist",
    }.items():
        assert run(*BASE, "-o", "a.onnx", "--report", name, code=2).stderr == f"onnxgrad: {sentence}\n"
    both = run(*BASE, "-o", "a.onnx", "--report", "a.html", "--plot", "a.html", code=2).stderr
    assert both == "onnxgrad: --report and --plot are both 'a.html', expected files of their own\n"
    Path("empty.jsonl").touch()
    for arguments, sentence in {
        ("none.jsonl",): "report: 'none.jsonl' does not exist, expected the log of a run",
        (".",): "report: '.' is a folder, expected the log of a run",
        ("empty.jsonl",): "report: 'empty.jsonl' is empty, expected the log of a run",
        ("train.npz",): "'train.npz' is not the log of a run: line 1 is not an event",
        ("empty.jsonl", "-o", "a.txt"): "'a.txt' ends in '.txt', expected .html for a report",
    }.items():
        assert run("report", *arguments, code=2).stderr == f"onnxgrad: {sentence}\n"


def test_a_report_that_cannot_be_written_costs_nothing_else(folder, monkeypatch):
    monkeypatch.setattr("onnxgrad.cli.run.write_report", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    printed = run(*BASE, "-o", "a.onnx", "--report", "a.html")
    assert "onnxgrad: the report could not be written: No space left\n" in printed.stderr
    assert Path("a.onnx").exists() and Path("a.svg").exists() and read_log(Path("a.jsonl"))[-1]["event"] == "examples"
    with raises(ValueError, "'a.onnx' is not the log of a run: line 1 is not an event"):
        read_log(Path("a.onnx"))
