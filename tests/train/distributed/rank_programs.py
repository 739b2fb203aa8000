"""What processes do for test_ranks.py, under mpiexec or torchrun: `rank_programs NAME FOLDER`.

Each program leaves what it found in FOLDER, one file for each rank.
"""

import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

import onnxgrad
from onnxgrad.rules import op
from onnxgrad.train import losses, metrics, optim, schedules
from onnxgrad.train.batches import Batches, LocalBatch
from onnxgrad.train.callbacks import Callback, EarlyStopping, KeepBest
from onnxgrad.train.trainer import Trainer

EXAMPLES = 58  # in batches of 8: seven whole ones, and a last one of two, so that some of 4 ranks have none
CHANNELS = 3


def convnet(producer=""):
    """Convolution, BatchNormalization, Dropout, a layer; batches of images [N, 2, 6, 6]."""
    rng = np.random.default_rng(1)

    def weight(*shape):
        return (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    initializers = {
        "conv.weight": weight(CHANNELS, 2, 3, 3),
        "bn.scale": np.linspace(0.5, 1.5, CHANNELS, dtype=np.float32),
        "bn.bias": np.linspace(-0.1, 0.1, CHANNELS, dtype=np.float32),
        "bn.mean": np.zeros(CHANNELS, np.float32),
        "bn.var": np.ones(CHANNELS, np.float32),
        "ratio": np.float32(0.25),
        "fc.weight": weight(4, CHANNELS * 16),
        "fc.bias": np.zeros(4, np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "conv.weight"], ["c"], name="/conv"),
        helper.make_node(
            "BatchNormalization", ["c", "bn.scale", "bn.bias", "bn.mean", "bn.var"], ["b"], name="/bn", momentum=0.8
        ),
        helper.make_node("Relu", ["b"], ["r"], name="/relu"),
        helper.make_node("Flatten", ["r"], ["f"], name="/flatten"),
        helper.make_node("Dropout", ["f", "ratio"], ["d"], name="/dropout"),
        helper.make_node("Gemm", ["d", "fc.weight", "fc.bias"], ["logits"], name="/fc", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "convnet",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 2, 6, 6])],
        [helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["N", 4])],
        [numpy_helper.from_array(a, name) for name, a in initializers.items()],
    )
    opset = [helper.make_opsetid("", 20)]
    return helper.make_model(graph, opset_imports=opset, ir_version=9, producer_name=producer)


def images(count=EXAMPLES):
    rng = np.random.default_rng(2)
    x = rng.standard_normal((count, 2, 6, 6)).astype(np.float32) + 0.5
    target = (x[:, 0].mean((1, 2)) > 0.5).astype(np.int64) + 2 * (x[:, 1, 0, 0] > 0.5)
    # Ranks have all, some or none of the targets that count.
    return {
        "x": x,
        "target": np.where(np.arange(count) % 3 < 2, target, -100),
        "soft": rng.random((count, 4), np.float32),
    }


IGNORING = losses.CrossEntropy("logits", ignore_index=-100)
WEIGHING = losses.CrossEntropy("logits", ignore_index=-100, weights=[1, 2, 0.5, 3], label_smoothing=0.1)
MIXED = WEIGHING + 0.3 * losses.MSE("logits", "soft") + 0.01 * losses.L1("logits", "soft", reduction="sum")
SETTINGS = {
    "adam": (IGNORING, optim.AdamW(lr=5e-3), {"clip_norm": 0.5, "schedule": schedules.Cosine(60, warmup=5)}),
    "mixed": (MIXED, optim.SGD(lr=0.02, momentum=0.9), {"clip_value": 0.2}),
    "accumulate": (WEIGHING, optim.RMSprop(lr=1e-3), {"accumulate": 3}),
    "lamb": (IGNORING, optim.Lamb(lr=5e-3, groups={"*.bias": {"weight_decay": 0.0}}), {"clip_norm": 1.0}),
    "adagrad": (IGNORING, optim.Adagrad(lr=1e-2, initial_accumulator_value=0.1), {}),
}


def batches(loss, count=EXAMPLES):
    names = {"x", *(part.target for part in loss.parts)}
    return Batches({name: a for name, a in images(count).items() if name in names}, 8, seed=2)


def trainer(name, **how):
    loss, optimizer, settings = SETTINGS[name]
    producer = "pytorch" if name == "lamb" else ""  # whose running variance is that of a sample
    return Trainer(convnet(producer), loss, optimizer, **{"seed": 5, **settings, **how})


def accuracy(outputs, batch):
    return np.mean(outputs["logits"].argmax(1) == batch["target"])


def state_of(mine):
    """All that a checkpoint of it holds, on the first rank."""
    return {name: np.array(a) for name, a in mine._state.arrays().items()}


def curve(name, epochs=7, **how):
    """Losses of every step, of the epochs, what validation found, and the state after it."""
    mine = trainer(name, **how)
    loss = SETTINGS[name][0]
    each = []
    validation = Batches({**batches(loss).arrays}, 5, seed=2)
    told = mine.fit(
        batches(loss), epochs, validation=validation, metrics={"accuracy": accuracy}, quiet=True, log=each.append
    )
    return {
        "steps": [e["loss"] for e in each if e["event"] == "step"],
        "norms": [e["gradient_norm"] for e in each if e["event"] == "step"],
        "epochs": [r.loss for r in told],
        "validation": [r.validation for r in told],
        "state": state_of(mine),
    }


EPOCHS = {"adam": 7}  # 56 steps; the others make fewer


def curves(world, folder):
    """Every setting, with the optimizer's state on all ranks and shared among them; and a run that is stopped."""
    found = {}
    for name in SETTINGS:
        for shard in (False, True):
            how = {"communicator": world.communicator, "shard_optimizer": shard}
            found[name, shard] = curve(name, EPOCHS.get(name, 2), **how)
    found["stopped"] = stopped(world, folder)
    return found


class Signalling(Batches):
    """The third batch of the second epoch brings a signal along, for one rank only."""

    rank = 0

    def slices(self, rank, size, first=0):
        for k, one in enumerate(super().slices(rank, size, first)):
            if self.epoch == 2 and k == 2 and rank == self.rank:
                os.kill(os.getpid(), signal.SIGTERM)
            yield one


def signalled(rank):
    found = Signalling(batches(WEIGHING).arrays, 8, seed=2)
    found.rank = rank
    return found


def stopped(world, folder):
    """Between two of the micro-batches of an update."""
    mine = trainer("accumulate", communicator=world.communicator, shard_optimizer=True)
    try:
        mine.fit(signalled(world.size - 1), 3, quiet=True, checkpoint=folder / "stopped.safetensors")
    except KeyboardInterrupt as stop:
        return str(stop), mine.steps
    raise AssertionError("nobody stopped")


def problems(world, folder):
    """What goes on where another number of ranks has stopped, and what is refused, with the same words on all ranks."""
    found = {"again": curve("adam", EPOCHS["adam"], communicator=world.communicator)}
    mine = trainer("accumulate", communicator=world.communicator)
    mine.restore(folder / "stopped.safetensors")
    mine.fit(batches(WEIGHING), 3, quiet=True)
    found["resumed"] = state_of(mine)
    found["trained"] = {name: np.array(a) for name, a in mine.parameters.items()}
    found["refused"] = {}
    for name, problem in PROBLEMS.items():
        try:
            problem(world, folder)
        except Exception as error:
            found["refused"][name] = f"{type(error).__name__}: {error}"
    return found


PROBLEMS = {}


def problem(function):
    PROBLEMS[function.__name__] = function
    return function


def good():
    return next(iter(batches(IGNORING)))


@problem
def a_bad_batch_on_one_rank(world, folder):
    bad = {**good(), "x": np.zeros((8, 2, 6, 5), np.float32)}
    trainer("adam", communicator=world.communicator).step(bad if world.rank == 1 else good())


@problem
def a_bad_batch_on_all_ranks(world, folder):
    trainer("adam", communicator=world.communicator).step({"x": good()["x"]})


@problem
def an_iterator_that_raises(world, folder):
    def failing():
        yield good()
        if world.rank == 1:
            raise OSError("the disk is gone")
        yield good()

    trainer("adam", communicator=world.communicator).fit(failing(), quiet=True)


@problem
def fewer_batches_on_one_rank(world, folder):
    given = [good()] * (2 if world.rank == 1 else 3)
    trainer("adam", communicator=world.communicator).fit(given, quiet=True)


@problem
def drift(world, folder):
    mine = trainer("adam", communicator=world.communicator)
    if world.rank == 1:
        mine.parameters["fc.bias"][2] += 1e-3
    mine.fit([good()], quiet=True)


@problem
def other_settings(world, folder):
    trainer("adam", communicator=world.communicator, seed=world.rank)


@problem
def a_loss_that_is_not_finite(world, folder):
    bad = good()
    bad["x"][-1] = np.nan  # one rank's
    trainer("lamb", communicator=world.communicator).fit(
        [good(), bad], quiet=True, checkpoint=folder / "nan.safetensors"
    )


@problem
def no_batches(world, folder):
    trainer("adam", communicator=world.communicator).fit([], quiet=True)


@problem
def no_folder(world, folder):
    trainer("adam", communicator=world.communicator).fit(
        [good()], quiet=True, checkpoint=Path("/no/folder/run.safetensors")
    )


@problem
def nothing_to_restore(world, folder):
    trainer("adam", communicator=world.communicator).restore(Path("/no/folder/run.safetensors"))


@problem
def a_metric_that_raises(world, folder):
    def metric(outputs, batch):
        if world.rank == 1:
            raise ZeroDivisionError("nothing to divide by")
        return 1.0

    trainer("adam", communicator=world.communicator).evaluate(batches(IGNORING), {"metric": metric})


@problem
def a_fixed_batch(world, folder):
    model = convnet()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 8
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 8
    # What an example gives depends on the others: nothing can be freed.
    (last,) = (n for n in model.graph.node if model.graph.output[0].name in n.output)
    last.output[0] = "apart"
    model.graph.initializer.append(numpy_helper.from_array(np.array([0]), "over_the_batch"))
    model.graph.node.append(helper.make_node("ReduceMean", ["apart", "over_the_batch"], ["mean"], keepdims=1))
    model.graph.node.append(helper.make_node("Sub", ["apart", "mean"], [model.graph.output[0].name]))
    Trainer(model, IGNORING, optim.SGD(), communicator=world.communicator).step(good())


@problem
def no_communicator(world, folder):
    trainer("adam", communicator="everybody")


def with_loss():
    """A model whose second output is its loss, the mean of squares, in float64."""
    return onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 20]>
    regression (double[N, 3] x, double[N, 2] wanted) => (double[N, 2] y, double loss)
    <double[3, 2] w = {1, 2, 3, 4, 5, 6}> {
        y = MatMul(x, w)
        error = Sub(y, wanted)
        square = Mul(error, error)
        loss = ReduceMean <keepdims = 0> (square)
    }""")


def own_loss(**how):
    """Losses of a model that has its loss itself, and of a formula of one's own."""
    rng = np.random.default_rng(3)
    given = [{"x": rng.standard_normal((n, 3)), "wanted": rng.standard_normal((n, 2))} for n in (5, 4, 1)]
    mine = Trainer(with_loss(), "loss", optim.SGD(lr=0.1), **how)
    found = [mine.step(batch) for batch in given]
    formula = losses.Custom("y", lambda y, target: op.ReduceMean(op.Abs(y - target), keepdims=0))
    mine = Trainer(with_loss(), formula, optim.SGD(lr=0.1), **how)
    return [*found, *(mine.step({**batch, "target": batch["wanted"] * 2}) for batch in given)]


def parts_and_again(world, folder):
    """Batches that ranks have cut themselves, losses of one's own, and a run once more."""
    mine = trainer("adam", communicator=world.communicator)
    for whole in batches(IGNORING):
        where = slice(0, 1) if world.rank == 0 else slice(1, None)  # as uneven as can be
        mine.step(LocalBatch({name: a[where] for name, a in whole.items()}))
    again = curve("adam", EPOCHS["adam"], communicator=world.communicator)
    found = {"own_loss": own_loss(communicator=world.communicator), "by_itself": own_loss(communicator=world.alone)}
    return {"parts": state_of(mine), "again": again, **found}


MEASURED = {
    name: kind("logits", ignore_index=-100)
    for name, kind in {
        "f1": metrics.F1, "precision": metrics.Precision, "recall": metrics.Recall, "accuracy": metrics.Accuracy,
        "auc": metrics.AUC, "iou": metrics.MeanIoU, "perplexity": metrics.Perplexity, "matrix": metrics.ConfusionMatrix,
    }.items()
}  # fmt: skip
MEASURED["mine"] = accuracy


class Ending(Callback):
    """One rank wants to end after some updates."""

    def __init__(self, rank):
        self.rank = rank

    def on_step(self, trainer, record):
        assert trainer.steps == record["step"]
        return f"rank {self.rank} has had enough" if record["step"] == 11 and trainer.ranks.rank == self.rank else None


def watched(folder, **how):
    """Averages, all metrics over uneven batches, early stopping, the best epoch, rates, and a resumed run."""
    validation = Batches(batches(IGNORING).arrays, 5, shuffle=False)

    def fitted(mine, epochs=12):
        watching = [EarlyStopping(2, "f1", 0.1), KeepBest(folder / "best.safetensors", "auc")]
        return mine.fit(batches(IGNORING), epochs, validation=validation, metrics=MEASURED, quiet=True,
                        callbacks=watching, checkpoint=folder / "watched.safetensors")  # fmt: skip

    mine = trainer("adam", ema=0.9, layer_decay=0.8, **how)
    before = state_of(mine)
    rates = mine.find_lr(batches(IGNORING), steps=20)
    assert all(np.array_equal(before[name], a) for name, a in state_of(mine).items())
    found = {"rates": rates.losses, "validation": [r.validation for r in fitted(mine)]}
    found["averages"] = {name: np.array(a) for name, a in mine.averages.items()}
    found["kept"] = mine.evaluate(validation, MEASURED)
    first, second = (trainer("adam", ema=0.9, layer_decay=0.8, **how) for _ in range(2))
    rest = [r.validation for r in fitted(first, 2)]
    second.restore(folder / "watched.safetensors")
    found["resumed"] = rest + [r.validation for r in fitted(second)]
    mine.export(folder / "watched.onnx")
    ended = trainer("adam", **how)
    ended.fit(batches(IGNORING), 3, quiet=True, callbacks=[Ending(ended.ranks.size - 1)])
    found["ended"] = ended.steps
    return found


def watching(world, folder):
    """With the state of the optimizer, and so the average, on all ranks and in shards."""
    how = {"communicator": world.communicator}
    return {shard: watched(folder, shard_optimizer=shard, **how) for shard in (False, True)}


def raising(world, folder):
    """An error of one rank's own, while the other waits for it in a step."""
    mine = trainer("adam", communicator=world.communicator)
    mine.step(good())
    if world.rank == 1:
        raise ZeroDivisionError("nothing to divide by")
    mine.step(good())


def leaving(world, folder, who=1):
    """A rank that ends without an error while the others go on."""
    mine = trainer("adam", communicator=world.communicator, shard_optimizer=True)
    mine.step(good())
    if world.rank == who:
        sys.exit()
    mine.save(folder / "left.safetensors") if who else mine.step(good())


def first_leaving(world, folder):
    leaving(world, folder, 0)


def endless(world, folder):
    """Trains until somebody ends it."""
    mine = trainer("adam", communicator=world.communicator)
    (folder / f"process-{world.rank}").write_text(str(os.getpid()))

    def forever():
        while True:
            yield good()

    def at_work(event):
        if event["step"] == 3:
            print("at work", flush=True)

    mine.fit(forever(), quiet=True, checkpoint=folder / "run.safetensors", log=at_work)


PROGRAMS = {
    f.__name__: f for f in (curves, problems, parts_and_again, watching, raising, leaving, first_leaving, endless)
}


class World(NamedTuple):
    """All processes, and this one."""

    communicator: Any
    rank: int
    size: int
    alone: Any  # a communicator of this process alone


def of_mpi():
    from mpi4py import MPI

    return World(MPI.COMM_WORLD, MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, MPI.COMM_SELF)


def of_torch():
    from torch import distributed

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    alone = distributed.new_group([rank], use_local_synchronization=True)
    return World(distributed.group.WORLD, rank, distributed.get_world_size(), alone)


def main():
    onnxgrad.set_num_threads(1)
    name, folder = sys.argv[1], Path(sys.argv[2])
    world = of_torch() if "TORCHELASTIC_RUN_ID" in os.environ else of_mpi()
    found = PROGRAMS[name](world, folder)
    (folder / f"{name}-{world.rank}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
