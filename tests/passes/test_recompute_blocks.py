"""recompute_blocks(): the bits of a step that keeps everything, and only what joins the regions is kept."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from tests.checks import same_bits
from tests.train.distributed import rank_programs

from onnxgrad.train import losses, optim
from onnxgrad.train.trainer import Trainer

ROOT = Path(__file__).parents[2]
LAYER = """
    n{k} = LayerNormalization (x{k}, g, z)
    q{k} = MatMul (n{k}, q_{k})
    v{k} = MatMul (n{k}, v_{k})
    t{k} = Transpose <perm = [0, 2, 1]> (n{k})
    s{k} = MatMul (q{k}, t{k})
    p{k} = Softmax (s{k})
    a{k} = MatMul (p{k}, v{k})
    d{k} = Dropout (a{k}, ratio)
    y{k} = Add (x{k}, d{k})
    u{k} = MatMul (y{k}, u_{k})
    h{k} = Tanh (u{k})
    w{k} = MatMul (h{k}, w_{k})
    x{next} = Add (y{k}, w{k})
"""


def transformer(layers, width=8, length=6):
    """Attention and two linear layers with a way around each, so many times; nodes are named by layer."""
    body = "".join(LAYER.format(k=k, next=k + 1) for k in range(layers))
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 20]> net (int64[N, {length}] ids) => (float[N, 5] logits) {{'
        f"x0 = Gather (table, ids)\n {body} over = Constant <value_ints = [1]> ()\n"
        f"m = ReduceMean <keepdims = 0> (x{layers}, over)\n logits = MatMul (m, head) }}"
    )
    for node in model.graph.node:
        k = "".join(c for c in node.output[0] if c.isdigit())
        at = int(k) - (node.op_type == "Add" and node.output[0][0] == "x") if k else None
        node.name = f"/{node.output[0]}" if at is None or node.op_type == "Gather" else f"/layers.{at}/{node.output[0]}"
    random = np.random.default_rng(0)
    shapes = {"table": (20, width), "head": (width, 5)}
    for k in range(layers):
        shapes |= {f"{n}_{k}": (width, width) for n in "qv"} | {
            f"u_{k}": (width, 4 * width),
            f"w_{k}": (4 * width, width),
        }
    weights = {name: random.standard_normal(s).astype(np.float32) / np.sqrt(width) for name, s in shapes.items()}
    weights |= {"g": np.ones(width, np.float32), "z": np.zeros(width, np.float32), "ratio": np.float32(0.25)}
    model.graph.initializer.extend(numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items())
    return model


def batch(seed, examples=4, length=6):
    random = np.random.default_rng(seed)
    return {"ids": random.integers(0, 20, (examples, length)), "target": random.integers(0, 5, examples)}


def trainer(model, **how):
    return Trainer(model, losses.CrossEntropy("logits"), optim.AdamW(lr=0.01), seed=3, **how)


def kept(mine):
    """Numbers of one example that the forward pass computes and the backward pass reads."""
    graph = mine._model.step.model.graph
    (end,) = (v for v in graph.outputs if v.name == mine._model.step.loss)
    forward, pending = set(), [end.producer()]
    while pending:
        node = pending.pop()
        if node is not None and node not in forward:
            forward.add(node)
            pending += [v.producer() for v in node.inputs if v is not None]
    read = {v for n in graph if n not in forward for v in n.inputs if v is not None and v.producer() in forward}
    return sum(int(np.prod([d for d in v.shape.dims if isinstance(d, int)])) for v in read if v.shape is not None)


@pytest.mark.parametrize("how", ["blocks", "/layers.*", ["/layers.[0-2]", "/layers.3/[pq]3"]], ids=str)
def test_the_same_bits_with_less_kept(how):
    """With Dropout, which drops the same again."""
    plain, mine = trainer(transformer(6)), trainer(transformer(6), recompute=how)
    for k in range(4):
        assert mine.step(batch(k)) == plain.step(batch(k))
    for name, array in plain.parameters.items():
        assert same_bits(mine.parameters[name], array), name
    assert kept(mine) < (0.5 if how == "blocks" else 0.7) * kept(plain)
    assert mine.remarks == plain.remarks


def test_blocks_begin_where_one_tensor_joins_them():
    mine = trainer(transformer(6), recompute="blocks")
    delayed = [n for n in mine._model.step.model.graph if n.op_type == "Where" and "_again" in str(n.name)]
    assert {n.inputs[1].name for n in delayed} >= {f"x{k}" for k in range(1, 5)}


def test_modules_as_torch_export_writes_them():
    model = transformer(3)
    for k, node in enumerate(model.graph.node):
        scopes = ["", "layers", node.name.split("/")[1], "x"] if node.name.count("/") > 1 else ["", "x"]
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str(scopes))
        node.name = f"node_{k}"
    mine = trainer(model, recompute="layers.*")
    assert kept(mine) == kept(trainer(transformer(3), recompute="/layers.*")) < 0.5 * kept(trainer(model))


def test_nodes_by_their_names_are_apart():
    """Each attention, which has the name of its Softmax, waits for the gradient of its own layer."""
    mine, plain = trainer(transformer(3), recompute="*/p[0-9]"), trainer(transformer(3))
    assert mine.step(batch(0)) == plain.step(batch(0))
    again = [n for n in mine._model.step.model.graph if str(n.name).endswith("_again") and "/p" in str(n.name)]
    attention = [n for n in again if n.op_type in ("FlashAttention", "Softmax")]
    assert len(attention) == 3 and len({n.inputs[0].producer().inputs[0] for n in attention}) == 3
    assert kept(mine) <= kept(plain)  # where attention is not one node, the scores in place of their Softmax


BRANCHES = """
<ir_version: 9, opset_import: ["" : 17]>
branches (float[N, 8] x) => (float[N, 5] logits) {
    y = MatMul (x, w)
    a0 = MatMul (y, a)
    b0 = MatMul (y, b)
    a1 = Tanh (a0)
    b1 = Tanh (b0)
    a2 = Sigmoid (a1)
    b2 = Sigmoid (b1)
    m = Mul (a2, b2)
    logits = MatMul (m, head)
}
"""


def test_regions_beside_each_other_do_not_wait_for_each_other():
    """The copies of one branch may wait for the gradient of the other, but not both."""
    model, random = onnx.parser.parse_model(BRANCHES), np.random.default_rng(0)
    for name, shape in {"w": (8, 8), "a": (8, 8), "b": (8, 8), "head": (8, 5)}.items():
        model.graph.initializer.append(numpy_helper.from_array(random.random(shape, np.float32), name))
    for node in model.graph.node:
        node.name = f"/{node.output[0][0]}/{node.output[0]}"
    given = {"x": random.random((4, 8), np.float32), "target": np.arange(4)}
    plain, mine = trainer(model), trainer(model, recompute=["/a", "/b"])
    assert [mine.step(given) for _ in range(3)] == [plain.step(given) for _ in range(3)]
    again = {str(n.name) for n in mine._model.step.model.graph}
    assert {"/a/a1_again", "/b/b1_again"} <= again


@pytest.mark.slow
@pytest.mark.parametrize("how", ["/relu", ["/conv", "/bn", "/relu", "/dropout*"]], ids=str)
def test_batch_statistics_are_measured_once(how):
    plain, mine = (rank_programs.trainer("adam", **given) for given in ({}, {"recompute": how}))
    for given in list(rank_programs.batches(rank_programs.IGNORING))[:5]:
        assert mine.step(given) == plain.step(given)
    for name, array in plain.statistics.items():
        assert same_bits(mine.statistics[name], array), name
    assert any(str(n.name).endswith("_again") for n in mine._model.step.model.graph)


def test_what_cannot_be():
    with pytest.raises(ValueError) as caught:
        trainer(transformer(1), recompute="/layer.0")
    told = "Trainer: recompute names '/layer.0', which matches no node or scope of the model"
    assert str(caught.value).startswith(told)
    with pytest.raises(TypeError) as refused:
        trainer(transformer(1), recompute=2)
    assert str(refused.value) == "Trainer: recompute is 2, expected True, 'blocks' or patterns of names"
    told = "recompute changes nothing: the model has no blocks that a single tensor joins; name its nodes or scopes"
    one = Trainer(rank_programs.with_loss(), "loss", optim.SGD(), recompute="blocks")
    assert one.remarks == [told]
    told = "recompute changes nothing: the gradients read nothing of the nodes that it names"
    assert trainer(transformer(1), recompute="/logits").remarks == [told]


PROGRAM = """
import sys, onnx
from pathlib import Path
from tests.passes.test_recompute_blocks import batch, trainer, transformer

mine = trainer(transformer(12, 64, 64), recompute=sys.argv[1] or False)
mine.step(batch(0, 4, 64))  # loads kernels
before = mine.peak_memory
mine.step(batch(0, 64, 64))
print(mine.peak_memory - before)
"""


@pytest.mark.slow
def test_memory_of_twelve_layers():
    plain, mine = (
        int(subprocess.run([sys.executable, "-c", PROGRAM, how], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)
        for how in ("", "blocks")
    )
    assert mine < 0.4 * plain
