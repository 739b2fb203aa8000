"""onnxgrad train: data, event files for TensorBoard, and the sentences for what cannot be trained."""

import struct
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.checks import raises
from tests.cli.test_train import BASE, arrays, events, folder, run

from onnxgrad.cli import specs
from onnxgrad.cli.run_log import RunLog, read_log
from onnxgrad.cli.tensorboard import crc32c
from onnxgrad.train.progress import Progress, clock, figure, waiting
from onnxgrad.train.trainer import Record

__all__ = ["folder"]
FILES = ".csv, .tsv, .jsonl, .npz, .parquet or .txt"


def test_parquet_gives_the_numbers_of_npz(folder):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {name: list(a) for name, a in arrays().items()}
    parquet.write_table(pyarrow.table({**columns, "comment": ["none"] * len(columns["x"])}), "train.parquet")
    printed = run(*BASE, "-o", "a.onnx", "--data", "train.parquet", "--val", "train.parquet").stderr
    assert printed.startswith("train.parquet: not used: 'comment'\n")
    run(*BASE, "-o", "b.onnx", "--val", "train.npz")
    assert events("a.jsonl", "step") == events("b.jsonl", "step")
    assert events("a.jsonl", "epoch") == events("b.jsonl", "epoch")


def records(path):
    """The contents of a file of records, whose checksums are checked."""
    data, at, found = path.read_bytes(), 0, []

    def masked(part):
        value = crc32c(part)
        return (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF

    while at < len(data):
        length, of_length = struct.unpack_from("<QI", data, at)
        content = data[at + 12 : at + 12 + length]
        (of_content,) = struct.unpack_from("<I", data, at + 12 + length)
        assert of_length == masked(data[at : at + 8]) and of_content == masked(content)
        found.append(content)
        at += 16 + length
    return found


def test_event_files_are_whole_records(folder):
    assert crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C
    run(*BASE, "--epochs", 2, "--val", "0.25", "-o", "trained.onnx", "--tensorboard", "runs/one")
    (path,) = (folder / "runs" / "one").iterdir()
    found = records(path)
    assert b"brain.Event:2" in found[0] and len(found) == 1 + 14 + 2
    assert sum(b"train/loss" in r and b"train/lr" in r and b"train/gradient_norm" in r for r in found) == 14
    assert sum(b"validation/loss" in r for r in found) == 2


def test_tensorboard_reads_them_and_a_resumed_run_has_every_step_once(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    given = (*BASE, "--val", "0.25", "--metric", "accuracy", "-o", "trained.onnx", "--tensorboard", "board")
    run(*given, "--epochs", 2, "--checkpoint", "two.safetensors")
    run(*given, "--epochs", 4, "--resume", "two.safetensors")
    run(*given, "--epochs", 3, "--resume", "two.safetensors")  # once more from there
    assert len(list((folder / "board").iterdir())) == 3
    board = accumulator.EventAccumulator("board").Reload()
    assert sorted(board.Tags()["scalars"]) == [
        "train/epoch_loss", "train/gradient_norm", "train/loss", "train/lr", "validation/accuracy", "validation/loss"
    ]  # fmt: skip
    steps = events("trained.jsonl", "step")
    shown = board.Scalars("train/loss")
    assert [s.step for s in shown] == [e["step"] for e in steps] == list(range(1, 22))
    np.testing.assert_array_equal([s.value for s in shown], np.float32([e["loss"] for e in steps]))
    measured = [e["validation"]["accuracy"] for e in events("trained.jsonl", "epoch")]
    np.testing.assert_array_equal([s.value for s in board.Scalars("validation/accuracy")], np.float32(measured))


OUT = ("-o", "out.onnx")


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (
            ("--loss", "cross-entropi:logits"),
            "--loss 'cross-entropi:logits': 'cross-entropi' is neither a loss nor an "
            "output of the model; did you mean 'cross-entropy'?",
        ),
        (("--loss", "mse:logit"), "--loss 'mse:logit': 'logit' is not an output of the model; did you mean 'logits'?"),
        (
            ("--loss", "mse:y:weight=x"),
            "--loss 'mse:y:weight=x': 'y' is not an output of the model; available: 'logits'",
        ),
        (("--loss", "mse:logits:weight=x"), "--loss 'mse:logits:weight=x': weight is 'x', expected a number"),
        (
            ("--loss", "mse:logits:wieght=1"),
            "--loss 'mse:logits:wieght=1': mse has no setting 'wieght'; did you mean 'weight'?",
        ),
        (
            ("--loss", "mse:logits:reduction=all"),
            "--loss 'mse:logits:reduction=all': reduction is 'all', expected one of 'mean', 'sum'",
        ),
        (
            ("--loss", "cross-entropy:logits:probabilities=yes"),
            "--loss 'cross-entropy:logits:probabilities=yes': probabilities is 'yes', expected true or false",
        ),
        (
            ("--loss", "cross-entropy:logits:ignore-index=1.5"),
            "--loss 'cross-entropy:logits:ignore-index=1.5': ignore-index is '1.5', expected a whole number",
        ),
        (("--loss", "logits"), "--loss 'logits' is an output of the model: it must be the only loss"),
        (
            ("--loss", "mse:logits:target=z"),
            "--data: 'train.npz' lacks 'z', an input of the model or the loss; available: 'x', 'target'",
        ),
        (("--optimizer", "adamm"), "--optimizer 'adamm': 'adamm' does not exist; did you mean 'adam'?"),
        (
            ("--optimizer", "adam:betas=0.9"),
            "--optimizer 'adam:betas=0.9': betas is '0.9', expected 2 numbers with a comma between them",
        ),
        (
            ("--optimizer", "adam:betas=1,1"),
            "--optimizer 'adam:betas=1,1': betas are (1.0, 1.0), expected two numbers of at least 0 and under 1",
        ),
        (
            ("--optimizer", "adam:fast"),
            "--optimizer 'adam:fast': 'fast' is not a setting, expected name=value as in adam:name=value",
        ),
        (("--momentum", "0.9"), "--momentum is for sgd, rmsprop: adamw has no such setting"),
        (
            ("--group", "*.bias"),
            "--group '*.bias' sets nothing, expected a pattern of names as in '*.bias:weight-decay=0'",
        ),
        (("--group", "*.bios:lr=0"), "AdamW: groups has '*.bios', which no parameter's name matches"),
        (("--schedule", "cosinus"), "--schedule 'cosinus': 'cosinus' does not exist; did you mean 'cosine'?"),
        (("--schedule", "step", "--warmup", "3"), "--warmup is for constant, linear, cosine: step has no such setting"),
        (
            ("--schedule", "step:every=0"),
            "--schedule 'step:every=0': every is 0, expected a number of updates, at least 1",
        ),
        (
            ("--metric", "accuracy"),
            "--metric needs validation examples: name a file or a share with --val",
        ),
        (
            ("--metric", "acuracy", "--val", "0.5"),
            "--metric 'acuracy': 'acuracy' does not exist; did you mean 'accuracy'?",
        ),
        (("--metric", "mae", "--val", "0.5"), "--val: MAE: 'target' has shape [8], but 'logits' has [8, 3]"),
        (
            ("--metric", "mae:logits:target=z", "--val", "0.5"),
            "--metric 'mae:logits:target=z': its target 'z' is not an input of the model or the loss; "
            "available: 'x', 'target'",
        ),
        (
            ("--metric", "accuracy:name=loss", "--val", "0.5"),
            "--metric 'accuracy:name=loss': 'loss' is the name of another number: choose one with name=",
        ),
        (
            ("--keep-best",),
            "--keep-best needs validation examples: name a file or a share with --val",
        ),
        (("--val", "1.5"), "--val is 1.5, expected a file or a share between 0 and 1 of the examples to hold out"),
        (("--val", "0.001"), "--val 0.001 of 72 examples is 0, expected at least one, and one to train on"),
        (("--val", "none.npz"), "--val: 'none.npz' does not exist, expected a file (" + FILES + ") or a folder"),
        (("--data", "none.npz"), "--data: 'none.npz' does not exist, expected a file (" + FILES + ") or a folder"),
        (("--data", "model.onnx"), "--data: 'model.onnx' ends in '.onnx', expected " + FILES),
        (("--data", "text.npz"), "--data: 'text.npz' cannot be read as .npz (it has another format)"),
        (("--data", "none.of.npz"), "--data: there are no arrays, expected one for each input and target"),
        (("--data", "latin.csv"), "--data: 'latin.csv' is not text in UTF-8 (invalid start byte at byte 2)"),
        (
            ("--data", "seven.csv"),
            "--data: 'seven.csv' has 7 columns for 'x', which takes 6: 'a', 'b', 'c', 'd', 'e', 'f', 'g'; "
            "--columns x=a,… selects some",
        ),
        (
            ("--data", "text.txt"),
            "--data: 'text.txt' is text, which needs a model and its tokenizer.json, which --tokenizer names",
        ),
        (
            ("--data", "typo.npz"),
            "--data: 'typo.npz' lacks 'target', an input of the model or the loss; did you mean 'targets'?",
        ),
        (("--data", "wide.npz"), "--data: the batch's x has shape [8, 7], expected ['N', 6]"),
        (("--data", "real.npz"), "--data: the batch's target holds float64, expected int64"),
        (("--data", "uneven.npz"), "--data: the arrays have different numbers of examples (x: 4, target: 3)"),
        (
            ("--data", "classes.npz"),
            "--data: 'target' has the class 3 in example 5, expected 0 to 2; ignore-index=3 leaves it out",
        ),
        (
            ("--val", "negative.npz", "--loss", "cross-entropy:logits:ignore-index=9"),
            "--val: 'target' has the class -1 in example 7, expected 0 to 2; ignore-index=-1 leaves it out",
        ),
        (("--data", "empty.npz"), "--data: 'empty.npz' has no examples"),
        (("--val", "wide.npz"), "--val: the batch's x has shape [8, 7], expected ['N', 6]"),
        (
            ("--trainable", "fc2.*"),
            "Trainer: trainable names 'fc2.*', which is not an initializer of the model",
        ),
        (("--freeze", "*"), "Trainer: freeze leaves nothing to train"),
        (
            ("--batch-size", "100", "--drop-last"),
            "72 examples in batches of 100 make no update: lower --batch-size, --accumulate or leave out --drop-last",
        ),
        (("--resume", "none"), "--resume: 'none' does not exist, expected a checkpoint"),
        (("--resume", "train.npz"), "'train.npz' is not a checkpoint"),
        (("--plot", "plot.jpg"), "'plot.jpg' ends in '.jpg', expected .svg or .png for a plot"),
        (("--metrics", "train.npz"), "--metrics and --data are both 'train.npz', expected files of their own"),
        (
            ("--val", "typo.npz", "--checkpoint", "typo.npz"),
            "--checkpoint and --val are both 'typo.npz', expected files of their own",
        ),
        (("--plot", "out.onnx"), "--plot and --output are both 'out.onnx', expected files of their own"),
        (("--checkpoint", "none/c"), "the folder 'none' to write 'c' into does not exist"),
    ],
)
def test_refusals_are_one_sentence_before_anything_runs(folder, arguments, sentence):
    x = arrays()["x"]
    Path("text.npz").write_text("no")
    Path("text.txt").write_text("no")
    np.savez("none.of.npz")
    Path("latin.csv").write_bytes("größe,target\n1,0\n".encode("latin-1"))
    Path("seven.csv").write_text("a,b,c,d,e,f,g,target\n1,2,3,4,5,6,7,0\n")
    np.savez("typo.npz", x=x, targets=arrays()["target"])
    np.savez("wide.npz", x=np.zeros((9, 7), np.float32), target=np.zeros(9, np.int64))
    np.savez("real.npz", x=x, target=arrays()["target"] / 2)
    np.savez("uneven.npz", x=x[:4], target=np.zeros(3, np.int64))
    for name, example, value in (("classes", 5, 3), ("negative", 7, -1)):
        target = arrays()["target"]
        target[example] = value
        np.savez(f"{name}.npz", x=x, target=target)
    np.savez("empty.npz", x=x[:0], target=np.zeros(0, np.int64))
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    printed = run(*BASE, *OUT, *arguments, code=2).output
    assert printed.startswith(f"onnxgrad: {sentence}") and printed.count("\n") == 1, printed
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_models_and_places_that_are_refused(folder):
    assert run("train", "none.onnx", *BASE[2:], *OUT, code=2).output == (
        "onnxgrad: train: the file 'none.onnx' does not exist, expected an ONNX model\n"
    )
    (folder / "taken").mkdir()
    assert run(*BASE, "-o", "taken", code=2).output == (
        "onnxgrad: 'taken' is a folder, expected the name of a file to write\n"
    )
    for nowhere in (".", ""):
        assert run(*BASE, "-o", nowhere, code=2).output == (
            "onnxgrad: '.' is a folder, expected the name of a file to write\n"
        )
    assert run(*BASE, *OUT, "--plot", "/dev/null", code=2).output == (
        "onnxgrad: '/dev/null' is a device or a pipe, expected the name of a file to write\n"
    )
    assert "'--epochs': 'many' is not a valid whole number." in run(*BASE, *OUT, "--epochs", "many", code=2).output
    assert "'--lr': 'fast' is not a valid number." in run(*BASE, *OUT, "--lr", "fast", code=2).output
    assert "Error: Missing --loss. Example:\n\n  onnxgrad train model.onnx" in run(*BASE[:4], *OUT, code=2).output
    assert "Error: Missing MODEL, --output, --data, --loss. Example:" in run("train", code=2).output
    Path("run.toml").write_text('model = "model.onnx"\nloss = "mse:logits"\n')
    assert "Error: Missing --output, --data. Example:" in run("train", "--config", "run.toml", code=2).output
    two = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N"]) for n in ("y", "z")]
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["y"]), helper.make_node("Neg", ["y"], ["z"])], "two",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N"])], two,
        [numpy_helper.from_array(np.ones(1, np.float32), "w")],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), "two.onnx")
    given = ("train", "two.onnx", "--data", "train.npz", *OUT)
    assert run(*given, "--loss", "mse", code=2).output == (
        "onnxgrad: --loss 'mse' names no output, as in mse:y; the model has 'y', 'z'\n"
    )
    assert "the output 'y' has shape" in run(*given, "--loss", "y", code=2).output


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder that not even root can write into")
@pytest.mark.parametrize("option", ["-o", "--checkpoint", "--metrics", "--plot", "--tensorboard"])
def test_folders_that_cannot_be_written_are_found_before_training(folder, option):
    name = {"-o": "--output"}.get(option, option)
    place = "/proc/self/x.svg" if option != "--tensorboard" else "/proc/self/runs"
    printed = run(*BASE, *OUT, option, place, code=2).output
    assert printed.startswith(f"onnxgrad: {name}: nothing can be written into '/proc/self' (")
    assert not list(folder.glob("out*"))


def test_classes_to_leave_out_and_a_device_that_is_not_there(folder):
    data = arrays()
    data["target"][::7] = -100
    np.savez("masked.npz", **data)
    loss = ("--loss", "cross-entropy:logits:ignore-index=-100")
    given = ("train", "model.onnx", "--data", "masked.npz", *loss, *OUT, "--val", "masked.npz", "--metric", "accuracy")
    run(*given)
    assert 0 <= events("out.jsonl", "epoch")[0]["validation"]["accuracy"] <= 1
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        refused = run(*given, "--device", "cuda", code=2).output
        assert refused.startswith("onnxgrad: Trainer: device is 'cuda', but") and refused.endswith(
            ": use the device 'cpu'\n"
        )


def test_texts_with_colons_in_names_and_every_kind():
    loss = specs.loss(["mse:out:0:target=a:weight=0.5"], ["out:0"])
    assert (loss.prediction, loss.target, loss.share) == ("out:0", "a", 0.5)
    assert specs.loss(["loss:0"], ["loss:0"]) == "loss:0"
    assert len(specs.loss(["l1", "huber:y:delta=2"], ["y"]).parts) == 2
    weighted = specs.loss(["cross-entropy:y:class-weights=1,2:ignore_index=0"], ["y"])
    assert weighted.weights == (1.0, 2.0) and weighted.ignore_index == 0
    assert specs.loss(["bce-with-logits:y:pos-weight=3"], ["y"]).pos_weight == 3.0
    assert specs.loss(["bce-with-logits:y:pos-weight=3,4"], ["y"]).pos_weight == (3.0, 4.0)
    for kind in specs.OPTIMIZERS:
        assert specs.optimizer(kind, {"lr": 0.5, "momentum": None}, []).lr == 0.5
    for kind in specs.SCHEDULES:
        assert 0 < specs.schedule(kind, None, 90)(0) <= 1
    assert specs.schedule("step", None, 90).every == 30 and specs.schedule("linear", 0.1, 90).warmup == 9
    found = specs.metrics_by_name(["accuracy", "accuracy:y:top=2", "mse:y:name=second"], weighted, ["y"], ["target"])
    assert list(found) == ["accuracy", "accuracy:y:top=2", "second"] and found["accuracy"].ignore_index == 0


def test_a_log_that_was_cut_off(tmp_path):
    path = tmp_path / "run.jsonl"
    with RunLog(path) as log:
        log.write({"event": "step", "step": 1, "loss": 1.0})
        log.write({"event": "epoch", "epoch": 1, "step": 1, "validation": {"loss": float("nan")}})
    path.write_text(path.read_text() + '{"event": "st')
    assert [e["event"] for e in read_log(path)] == ["step", "epoch"]
    assert read_log(path)[1]["validation"] == {"loss": None}
    path.write_text("nothing")
    with raises(ValueError, f"{str(path)!r} is not the log of a run: line 1 is not an event"):
        read_log(path)


def test_progress_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr("onnxgrad.train.progress.PATIENCE", -1)
    with Progress(quiet=False) as progress:
        progress.start_epoch(1, 2, 10, 3)
        progress.advance(0.5, 1e-3)
        progress.end_epoch(Record(1, 4, 0.25, 75.0, {"loss": 20000.0}, 123_456_789))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("epoch 1/2: 4/10  loss 0.5000  lr 1.00e-03  ") and lines[0].endswith(" left")
    assert lines[1] == "epoch 1/2: loss 0.2500  validation:  loss 2.000e+04  1:15  peak memory 123 MB"
    with Progress(quiet=True) as progress:
        progress.start_epoch(1, 1, None)
        progress.advance(0.5, 1e-3)
        progress.end_epoch(Record(1, 1, 0.5, 1.0, {}))
    assert capsys.readouterr().err == ""
    assert [clock(s) for s in (3.21, 75, 3725)] == ["3.2 s", "1:15", "1:02:05"]
    assert [figure(x) for x in (0.0, 0.5, 1e-5, 12345.0)] == ["0.0000", "0.5000", "1.000e-05", "1.234e+04"]


def test_a_bar_that_stands_still_says_what_it_waits_for(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("onnxgrad.train.progress.NOTICED", 0.05)
    with Progress(quiet=False) as progress:
        progress.start_epoch(1, 1, 10)
        progress.tell_of_kernel("onnxgrad.cpu.conv._backward-2", (), False)
        time.sleep(0.2)
        assert "compiling kernels for this machine, once: 1 backward" in capsys.readouterr().err
        progress.advance(0.5, 1e-3)
        time.sleep(0.2)
        assert "compiling" not in capsys.readouterr().err.rpartition("epoch 1/1")[2]
        with progress.doing("validating"):
            time.sleep(0.4)
        assert "validating …" in capsys.readouterr().err
    with waiting("writing a.onnx", quiet=False):
        time.sleep(0.1)
    assert "writing a.onnx" in capsys.readouterr().err
    with waiting("writing a.onnx", quiet=True):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_the_time_left_does_not_count_the_first_step(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("onnxgrad.train.progress.time.monotonic", lambda: now[0])
    monkeypatch.setattr("onnxgrad.train.progress.PATIENCE", -1)
    with Progress(quiet=False) as progress:
        progress.start_epoch(1, 1, 12)
        for seconds in (60, 61, 62):
            now[0] = seconds
            progress.advance(0.5, 1e-3)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("0.0167 batches/s  11:00 left") and lines[2].endswith("1 batches/s  9.0 s left")


def test_without_a_terminal_it_says_so_in_a_line_if_it_takes_very_long(capsys, monkeypatch):
    monkeypatch.setattr("onnxgrad.train.progress.PATIENCE", 0.05)
    with Progress(quiet=False) as progress:
        progress.start_epoch(2, 3, 10)
        with progress.doing("validating"):
            time.sleep(0.2)
    assert capsys.readouterr().err == "epoch 2/3: validating\n"
    with Progress(quiet=True) as progress, progress.doing("validating"):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_losses_of_probabilities_and_of_inner_values(folder):
    model = onnx.load("model.onnx")
    model.graph.node.append(onnx.helper.make_node("Sigmoid", ["logits"], ["p"], name="/p"))
    model.graph.output[0].name = "p"
    onnx.save(model, "model.onnx")
    x = arrays()["x"]
    np.savez("train.npz", x=x, target=(x[:, :3] > 0).astype(np.float32))
    base = ("train", "model.onnx", "--data", "train.npz", "--batch-size", "8", "--val", "train.npz", "--plot", "none")
    base = (*base, "--lr", "0.05", "--epochs", "3", "--metric", "binary-accuracy", "-o", "out.onnx", "--overwrite")
    found = []
    for loss in ("bce:p", "bce-with-logits:p", "bce-with-logits:logits"):
        result = run(*base, "--loss", loss)
        assert ("'p' comes from Sigmoid" in result.output) == (loss == "bce-with-logits:p")
        found.append(events("out.jsonl", "epoch")[-1]["validation"])
        assert found[-1]["binary-accuracy"] > 0.7
    assert found[0]["binary-accuracy"] == found[1]["binary-accuracy"] == found[2]["binary-accuracy"]
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-4)
    assert found[1] == found[2]
    run(*base, "--loss", "bce-with-logits:logits", "--freeze", "fc0.*")
