"""onnxgrad train: what it writes, how it goes on after Ctrl-C, and how it refuses."""

import importlib.util
import json
import re
import shlex
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import numpy_helper
from tests.checks import same_bits
from tests.train.two_layers import SIZES, mlp, weights

from onnxgrad import cli
from onnxgrad.cli.run_log import RunLog
from onnxgrad.sources.source import Arrays
from onnxgrad.train import losses, optim, schedules
from onnxgrad.train import trainer as trainer_module
from onnxgrad.train.batches import Batches
from onnxgrad.train.trainer import Trainer

EXAMPLES = 72


def arrays(count=EXAMPLES, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, SIZES[0])).astype(np.float32)
    return {"x": x, "target": (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0.5)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to work in, with a model and examples."""
    onnx.save(mlp(dropout=0.2), tmp_path / "model.onnx")
    np.savez(tmp_path / "train.npz", **arrays())
    monkeypatch.chdir(tmp_path)
    return tmp_path


BASE = ("train", "model.onnx", "--data", "train.npz", "--loss", "cross-entropy:logits", "--batch-size", "8")


def run(*arguments, code=0):
    """What the command did; its exit code is checked."""
    result = CliRunner().invoke(cli.main, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result


def events(path, name):
    """The log's events of a name, without times and memory."""
    found = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [{k: v for k, v in e.items() if k not in ("seconds", "peak_memory")} for e in found if e["event"] == name]


def initializers(path):
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def test_it_trains_as_the_trainer_does_and_says_what_it_wrote(folder):
    result = run(*BASE, "--epochs", 3, "--lr", "1e-2", "--schedule", "cosine", "--warmup", "0.1", "--val", "0.25",
                 "--metric", "accuracy", "--seed", 3, "-o", "trained.onnx")  # fmt: skip
    left, aside = Arrays(arrays()).split(0.25, seed=3)
    assert len(left) == 54 and len(aside) == 18
    how = {"schedule": schedules.Cosine(21, warmup=2), "seed": 3}
    trainer = Trainer("model.onnx", losses.CrossEntropy("logits"), optim.AdamW(lr=1e-2), **how)
    right = {"accuracy": lambda outputs, batch: (outputs["logits"].argmax(1) == batch["target"]).mean()}
    records = trainer.fit(Batches(left, 8, seed=3), 3, validation=Batches(aside, 8, shuffle=False), metrics=right,
                          quiet=True)  # fmt: skip
    told = events("trained.jsonl", "epoch")
    assert [(e["epoch"], e["step"], e["loss"], e["validation"]) for e in told] == [
        (r.epoch, r.steps, r.loss, r.validation) for r in records
    ]
    assert [e["step"] for e in events("trained.jsonl", "step")] == list(range(1, 22))
    trained = initializers("trained.onnx")
    assert all(same_bits(a, trained[name]) for name, a in trainer.parameters.items())
    session = onnxruntime.InferenceSession("trained.onnx", providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == ["x"] and [o.name for o in session.get_outputs()] == ["logits"]
    best = min(records, key=lambda r: r.validation["loss"])
    numbers = [f"{x:.4f}" for x in (best.loss, *best.validation.values())]
    row = " +".join([str(best.epoch), "best", str(best.steps), *numbers])
    assert re.search(row, result.stdout)
    assert {"trained.onnx", "trained.safetensors", "trained.jsonl", "trained.svg"} <= set(result.stdout.split())
    assert "training 163 numbers in 4 parameters of model.onnx on 54 examples\nepoch 1/3: loss " in result.stderr
    assert sorted(p.name for p in folder.iterdir()) == [
        "model.onnx", "train.npz", "trained.jsonl", "trained.onnx", "trained.safetensors", "trained.svg"
    ]  # fmt: skip


def test_recompute_changes_no_number_and_the_table_has_the_peak_memory(folder):
    plain, mine = (run(*BASE, *how, "-o", f"{k}.onnx") for k, how in enumerate(((), ("--recompute", "/tanh"))))
    assert events("0.jsonl", "step") == events("1.jsonl", "step")
    for result in (plain, mine):
        assert re.search(r"time +peak memory *\n", result.stdout) and re.search(r" s +[0-9.]+ [MG]B *\n", result.stdout)
        assert "  peak memory " in result.stderr
    refused = run(*BASE, "--recompute", "nothing", "-o", "2.onnx", code=2)
    assert refused.stderr.startswith("onnxgrad: Trainer: recompute names 'nothing', which matches no node or scope")


def test_the_plot_has_the_curves(folder):
    run(*BASE, "--epochs", 2, "--val", "train.npz", "--metric", "accuracy", "-o", "trained.onnx", "--quiet")
    svg = "{http://www.w3.org/2000/svg}"
    root = ET.parse("trained.svg").getroot()
    texts = [t.text for t in root.iter(f"{svg}text")]
    assert {"loss", "accuracy", "training", "validation loss", "validation accuracy", "updates"} <= set(texts)
    assert len(list(root.iter(f"{svg}circle"))) == 4  # two epochs, measured twice
    curves = [p.get("d") for p in root.iter(f"{svg}path") if p.get("fill") == "none"]
    assert [d.count("L") + 1 for d in curves] == [18, 18, 2, 2]


def test_a_plot_as_png(folder):
    png = (*BASE, "-o", "other.onnx", "--plot", "other.png", "--quiet")
    if not importlib.util.find_spec("cairosvg"):
        refused = "onnxgrad: a .png plot needs cairosvg: pip install cairosvg, or name an .svg file\n"
        assert run(*png, code=2).output == refused
        return
    run(*png)
    assert Path("other.png").read_bytes().startswith(b"\x89PNG") and not Path("other.svg").exists()


def test_quiet_prints_nothing(folder):
    result = run(*BASE, "-o", "trained.onnx", "--quiet", "--metrics", "none", "--plot", "none")
    assert result.output == "" and not list(folder.glob("*.jsonl")) and not list(folder.glob("*.svg"))


SETTINGS = shlex.split(
    "--epochs 3 --val 0.25 --metric accuracy --schedule one-cycle --lr 0.02 --seed 4 --tensorboard board"
)


@pytest.mark.parametrize(
    "more", [(), ("--accumulate", "2", "--optimizer", "sgd", "--momentum", "0.9")], ids=["adamw", "sgd"]
)
@pytest.mark.parametrize("at", [5, 7, 16])  # within an epoch, and at the end of one
def test_ctrl_c_and_the_command_that_it_prints_give_the_numbers_of_an_uninterrupted_run(folder, monkeypatch, at, more):
    run(*BASE, *SETTINGS, *more, "-o", "whole.onnx")
    step, count = Trainer.step, []

    def interrupted(self, batch):
        count.append(1)
        if len(count) == at:
            signal.raise_signal(signal.SIGINT)
        return step(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        result = run(*BASE, *SETTINGS, *more, "-o", "parts.onnx", code=130)
    assert len(count) == at and not Path("parts.onnx").exists() and Path("parts.svg").exists()
    told, _, again = result.stderr.splitlines()[-1].partition("; to resume: ")
    assert re.fullmatch(r"onnxgrad: stopped by SIGINT after step \d+; the state is in 'parts.safetensors'", told)
    words = shlex.split(again)
    assert words[0] == "onnxgrad" and words[-2:] != ["--resume", "whole.safetensors"]
    refused = run(*BASE, *SETTINGS, *more, "-o", "parts.onnx", code=2).stderr
    assert refused == (
        "onnxgrad: 'parts.safetensors' belongs to an unfinished run: continue it with --resume parts.safetensors, or "
        "start over with --overwrite\n"
    )
    finished = run(*words[1:])
    assert finished.stdout.split("trained in")[0].count("\n") == 7  # the table has the epochs before as well
    for name in ("epoch", "step"):
        assert events("parts.jsonl", name) == events("whole.jsonl", name)
    assert len(events("parts.jsonl", "start")) == 2 and len(events("parts.jsonl", "end")) == 1
    assert Path("parts.onnx").read_bytes() == Path("whole.onnx").read_bytes()


def test_a_signal_to_a_process(folder):
    script = Path(sys.executable).with_name("onnxgrad")
    command = [script, *BASE, "--epochs", "100000", "-o", "trained.onnx", "--plot", "none"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        log = folder / "trained.jsonl"
        while not log.exists() or log.read_text().count('"epoch"') < 20:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and stdout == ""
    assert "; to resume: onnxgrad train model.onnx --output trained.onnx --data train.npz" in stderr.splitlines()[-1]
    assert "--resume trained.safetensors" in stderr.splitlines()[-1] and "Traceback" not in stderr
    assert sorted(p.name for p in folder.iterdir()) == [
        "model.onnx", "train.npz", "trained.jsonl", "trained.safetensors"
    ]  # fmt: skip


def test_killed_outright_it_goes_on_from_the_last_checkpoint(folder):
    given = (*BASE, "--epochs", 40, "--save-every", 20, "--plot", "none", "--no-shuffle")
    script = Path(sys.executable).with_name("onnxgrad")
    process = subprocess.Popen([script, *map(str, given), "-o", "parts.onnx", "--quiet"])
    try:
        deadline = time.monotonic() + 60
        while not (folder / "parts.safetensors").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    assert not Path("parts.onnx").exists()
    run(*given, "-o", "parts.onnx", "--resume", "parts.safetensors")
    run(*given, "-o", "whole.onnx")
    assert 0 < events("parts.jsonl", "start")[1]["step"] < 360
    assert events("parts.jsonl", "step") == events("whole.jsonl", "step")
    assert Path("parts.onnx").read_bytes() == Path("whole.onnx").read_bytes()


def test_resuming_with_more_epochs_and_with_other_batches(folder):
    run(*BASE, "--epochs", 3, "-o", "whole.onnx", "--quiet")
    run(*BASE, "--epochs", 1, "-o", "parts.onnx", "--quiet")
    again = (*BASE, "--epochs", 3, "-o", "parts.onnx", "--resume", "parts.safetensors")
    refused = run(*again, "--batch-size", 9, code=2).stderr
    assert refused == "onnxgrad: --resume: the run had --batch-size 8, now it is 9, which changes its batches\n"
    refused = run(*again, "--drop-last", code=2).stderr
    assert "the run had --drop-last not set, now it is set, which" in refused
    run(*again)
    assert events("parts.jsonl", "step") == events("whole.jsonl", "step")
    run(*again)  # nothing is left to do but to write the model
    assert Path("parts.onnx").read_bytes() == Path("whole.onnx").read_bytes()
    refused = run(*again, "--optimizer", "sgd", code=2).stderr
    assert refused == "onnxgrad: 'parts.safetensors' was written with the optimizer AdamW, not SGD\n"


def test_settings_from_a_file_and_the_command_line_wins(folder):
    Path("run.toml").write_text(
        'model = "model.onnx"\ndata = "train.npz"\nloss = ["cross-entropy:logits:label-smoothing=0.1"]\nepochs = 5\n'
        'batch-size = 8\nval = 0.25\nmetric = "accuracy"\nlr = 1e-2\noptimizer = "sgd"\nquiet = true\n'
        'output = "a.onnx"\n'
    )
    assert run("train", "--config", "run.toml", "--epochs", 2, "-o", "b.onnx").output == ""
    start = events("b.jsonl", "start")[0]["options"]
    assert (
        start["epochs"] == 2 and start["output"] == "b.onnx" and start["optimizer"] == "sgd" and start["val"] == "0.25"
    )
    assert start["loss"] == ["cross-entropy:logits:label-smoothing=0.1"] and not Path("a.onnx").exists()
    run(*BASE, "--epochs", 2, "--val", "0.25", "--lr", "0.01", "--optimizer", "sgd", "--metric", "accuracy",
        "--loss", "cross-entropy:logits", "-o", "c.onnx")  # fmt: skip
    twice = ("--loss", "cross-entropy:logits") * 2
    run("train", "--config", "run.toml", *twice, "--epochs", 2, "-o", "d.onnx")
    assert events("d.jsonl", "step") == events("c.jsonl", "step")


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("learning-rate = 1\n", "'run.toml' has 'learning-rate', which is not a setting"),
        ("batchsize = 1\n", "'run.toml' has 'batchsize', which is not a setting; did you mean 'batch-size'?"),
        ("config = 1\n", "'run.toml' has 'config', which is not a setting"),
        ("quiet = 1\n", "'quiet' in 'run.toml' is 1, expected true or false"),
        ("lr = true\n", "'lr' in 'run.toml' is True, expected text or a number"),
        ("lr = [1, 2]\n", "'lr' in 'run.toml' is a list, expected one value"),
        ("loss = { mse = 1 }\n", "'loss' in 'run.toml' is {'mse': 1}, expected text or a number"),
        ("lr = \n", "'run.toml' is not TOML: "),
    ],
)
def test_files_of_settings_that_are_refused(folder, text, sentence):
    Path("run.toml").write_text(text)
    printed = run(*BASE, "-o", "out.onnx", "--config", "run.toml", code=2).stderr
    assert printed.startswith(f"onnxgrad: --config: {sentence}") and printed.count("\n") == 1
    assert run("train", "--config", "none.toml", code=2).stderr == "onnxgrad: --config: 'none.toml' does not exist\n"


def test_frozen_parameters_groups_and_weighted_losses(folder):
    run(*BASE, "--freeze", "fc0.*", "-o", "frozen.onnx", "--quiet")
    run(*BASE, "--trainable", "fc1.weight", "--trainable", "fc1.b*", "-o", "chosen.onnx", "--quiet")
    frozen, chosen = initializers("frozen.onnx"), initializers("chosen.onnx")
    for name, before in weights().items():
        assert same_bits(frozen[name], before) == name.startswith("fc0")
        assert same_bits(frozen[name], chosen[name])
    run(*BASE, "--loss", "cross-entropy:logits:weight=0.5", "--optimizer", "adamw:betas=0.8,0.9", "--weight-decay", 0.1,
        "--group", "*.bias:lr=0:weight-decay=0", "--no-shuffle", "--clip-norm", 0.5, "--clip-value", 0.1,
        "-o", "group.onnx", "--quiet")  # fmt: skip
    one = losses.CrossEntropy("logits")
    trainer = Trainer(
        "model.onnx", one + 0.5 * one,
        optim.AdamW(betas=(0.8, 0.9), weight_decay=0.1, groups={"*.bias": {"lr": 0.0, "weight_decay": 0.0}}),
        clip_norm=0.5, clip_value=0.1,
    )  # fmt: skip
    trainer.fit(Batches(arrays(), 8, shuffle=False), quiet=True)
    assert all(same_bits(a, initializers("group.onnx")[name]) for name, a in trainer.parameters.items())
    assert all(same_bits(trainer.parameters[n], weights()[n]) for n in ("fc0.bias", "fc1.bias"))


def own_loss():
    """Writes a model with a loss among its outputs."""
    model = onnx.parser.parse_model("""
<ir_version: 9, opset_import: ["" : 20]>
graph (float[N, 6] x, float[N, 1] z) => (float cost, float[N, 1] y) {
    y = MatMul(x, w)
    d = Sub(y, z)
    dd = Mul(d, d)
    cost = ReduceMean <keepdims: int = 0> (dd)
}
""")
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((6, 1), np.float32), "w"))
    onnx.save(model, "own.onnx")


def test_a_model_that_outputs_its_loss(folder):
    own_loss()
    x = arrays()["x"]
    np.savez("own.npz", x=x, z=x[:, :1] * 2)
    given = (
        "train",
        "own.onnx",
        "--data",
        "own.npz",
        "--epochs",
        40,
        "--optimizer",
        "sgd",
        "--lr",
        0.1,
        "--val",
        "own.npz",
    )
    run(*given, "--loss", "cost", "--metric", "mae:y:target=z", "-o", "a.onnx", "--quiet")
    assert abs(initializers("a.onnx")["w"][0, 0] - 2) < 1e-2
    assert events("a.jsonl", "epoch")[-1]["validation"]["mae"] < 1e-2
    run(*given, "--loss", "mse:y:target=z", "-o", "b.onnx", "--quiet")
    np.testing.assert_allclose(initializers("b.onnx")["w"], initializers("a.onnx")["w"], atol=1e-5)


def test_keep_best_writes_the_model_of_the_best_epoch(folder):
    np.savez("val.npz", **{**arrays(40, seed=1), "target": np.random.default_rng(5).integers(0, 3, 40)})  # noise
    given = (*BASE, "--val", "val.npz", "--optimizer", "sgd", "--lr", 0.5)
    run(*given, "--epochs", 6, "--keep-best", "-o", "best.onnx")
    losses_of = [e["validation"]["loss"] for e in events("best.jsonl", "epoch")]
    best = int(np.argmin(losses_of)) + 1
    assert best < 6, losses_of
    run(*given, "--epochs", best, "-o", "same.onnx")
    assert Path("best.onnx").read_bytes() == Path("same.onnx").read_bytes()
    assert Path("best.best.safetensors").exists()


def test_a_loss_that_is_not_finite_leaves_the_last_good_state(folder):
    result = run(*BASE, "--optimizer", "sgd", "--lr", 1e38, "--epochs", 9, "-o", "trained.onnx", code=1)
    assert re.match(
        r"onnxgrad: step \d+: .*; the state before it is in 'trained.safetensors'\n",
        result.stderr.split("examples\n")[-1],
    )
    assert not Path("trained.onnx").exists() and Path("trained.safetensors").exists()


def test_a_model_that_cannot_be_written_costs_nothing(folder, monkeypatch):
    Path("trained.onnx").write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr("onnx_ir.save", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        result = run(*BASE, "-o", "trained.onnx", code=1)
    assert (
        "the model could not be written: trained.onnx: No space left on device; the checkpoint has the" in result.stderr
    )
    assert Path("trained.onnx").read_text() == "mine"
    run(*shlex.split(result.stderr.splitlines()[-1].partition("trained weights: ")[2])[1:])
    assert len(initializers("trained.onnx")) >= 4


def test_a_log_that_cannot_be_written_stops_the_run_with_a_sentence(folder, monkeypatch):
    def on_a_full_disk(self, event):
        if event["event"] == "epoch":
            self._file.close()
            self._file = open("/dev/full", "a", buffering=1)  # noqa: PTH123, SIM115
        return write(self, event)

    write = RunLog.write
    monkeypatch.setattr(RunLog, "write", on_a_full_disk)
    result = run(*BASE, "-o", "trained.onnx", "--quiet", code=1)
    assert result.stderr.startswith("onnxgrad: trained.jsonl: No space left on device") and "None" not in result.stderr


def test_a_model_that_onnx_refuses_is_not_written(folder, monkeypatch):
    Path("trained.onnx").write_text("mine")
    spoilt = ir.AttrInt64("spoilt", 1)
    monkeypatch.setattr(trainer_module, "put_back", lambda m, arrays: m.graph[0].attributes.add(spoilt))
    result = run(*BASE, "-o", "trained.onnx", code=1)
    assert "'trained.onnx' is not written, because onnx refuses the model that it would hold: " in result.stderr
    assert "the checkpoint has the trained weights: onnxgrad train model.onnx" in result.stderr
    assert Path("trained.onnx").read_text() == "mine"


def test_written_lists_the_file_of_the_weights(folder):
    onnx.save(mlp(), "apart.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    printed = run("train", "apart.onnx", *BASE[2:], "-o", "trained.onnx").stdout
    assert re.search(r"trained model +trained.onnx .*\n its weights +trained.onnx.data .*\n checkpoint ", printed)


def test_help_loads_little():
    # The help of train names the kinds of losses, whose module loads onnx_ir.
    for arguments, unwanted in ((["--help"], {"onnx_ir"}), (["train", "--help"], set())):
        code = f"import sys; from onnxgrad.cli import main; main({arguments}, standalone_mode=False)\n" \
               f"assert not {unwanted | {'onnxruntime', 'numba', 'torch'}} & set(sys.modules)"  # fmt: skip
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
