"""Linear layers and their cross entropies as one operator: the same losses, and no logits in the step."""

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tests.models.architectures import Picked, config, transformers
from tests.torch_export import export

from onnxgrad.graph.files import load
from onnxgrad.passes import fuse_linear_loss
from onnxgrad.passes.prepare import prepare
from onnxgrad.train import losses, optim
from onnxgrad.train.graphs import Selection, step_graph
from onnxgrad.train.trainer import Trainer

FUSED = "LinearCrossEntropy"
CLASSES, DEPTH = 96, 8


@pytest.fixture
def few(monkeypatch):
    """So few classes are worth it, so that models are small."""
    monkeypatch.setattr(fuse_linear_loss, "FEWEST", CLASSES)


def embedding_model(tail, weights=(), kind=TensorProto.FLOAT, outputs=("logits",)):
    """Words [N, S] to hidden numbers by an embedding and a layer, then `tail`: a list of nodes."""
    rng = np.random.default_rng(0)
    initializers = [
        numpy_helper.from_array(rng.standard_normal((CLASSES, DEPTH)).astype(np.float32), "words"),
        numpy_helper.from_array(rng.standard_normal((DEPTH, DEPTH)).astype(np.float32), "layer"),
        *(numpy_helper.from_array(array, name) for name, array in weights),
    ]
    nodes = [
        helper.make_node("Gather", ["words", "x"], ["embedded"]),
        helper.make_node("MatMul", ["embedded", "layer"], ["before"]),
        helper.make_node("Tanh", ["before"], ["hidden"]),
        *tail,
    ]
    made = [helper.make_tensor_value_info(name, kind, None) for name in outputs]
    words = helper.make_tensor_value_info("x", TensorProto.INT64, ["N", 5])
    graph = helper.make_graph(nodes, "g", [words], made, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=8)


TIED = [
    helper.make_node("Transpose", ["words"], ["turned"], perm=[1, 0]),
    helper.make_node("MatMul", ["hidden", "turned"], ["logits"]),
]
BIAS = ("bias", np.linspace(-1, 1, CLASSES, dtype=np.float32))
OWN_WEIGHTS = ("out", np.random.default_rng(1).standard_normal((DEPTH, CLASSES)).astype(np.float32))


def steps(model, loss, count=3, length=5, **how):
    rng = np.random.default_rng(0)
    trainer = Trainer(model, loss, optim.SGD(0.1), **how)
    return [
        float(trainer.step({"x": rng.integers(0, CLASSES, (4, 5)), "target": rng.integers(0, CLASSES, (4, length))}))
        for _ in range(count)
    ]


def op_types(model, loss, **how):
    return [
        node.op_type for node in step_graph(prepare(load(model, "test"), "test"), loss, Selection(), **how).model.graph
    ]


def check_same(model, loss, monkeypatch, tolerance=1e-5, **how):
    """Trains with the operator and without."""
    assert FUSED in op_types(model, loss)
    with_it = steps(model, loss, **how)
    monkeypatch.setattr(fuse_linear_loss, "FEWEST", CLASSES + 1)
    assert FUSED not in op_types(model, loss)
    np.testing.assert_allclose(with_it, steps(model, loss, **how), rtol=tolerance)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_weights_that_the_embedding_has_too(few, monkeypatch, reduction):
    loss = losses.CrossEntropy("logits", axis=-1, ignore_index=7, reduction=reduction)
    check_same(embedding_model(TIED), 0.1 * loss, monkeypatch)


def test_the_step_has_no_logits_and_no_other_nodes(few):
    made = step_graph(prepare(load(embedding_model(TIED), "test"), "test"), losses.CrossEntropy("logits", axis=-1))
    assert all(v.shape is None or CLASSES not in v.shape[1:] for node in made.model.graph for v in node.outputs)
    assert [n.op_type for n in made.model.graph].count(FUSED) == 1
    assert "Mul" not in [n.op_type for n in made.model.graph if "loss" in str(n.name)]


def test_bias_class_weights_and_a_softmax_that_nobody_reads(few, monkeypatch):
    tail = [
        helper.make_node("MatMul", ["hidden", "out"], ["product"]),
        helper.make_node("Add", ["bias", "product"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["logits"], axis=-1),
    ]
    weights = np.linspace(0.5, 2, CLASSES).tolist()
    check_same(
        embedding_model(tail, [OWN_WEIGHTS, BIAS]), losses.CrossEntropy("logits", axis=-1, weights=weights), monkeypatch
    )


def test_a_gemm_of_rows(few, monkeypatch):
    tail = [
        helper.make_node("Constant", [], ["rows"], value_ints=[-1, DEPTH]),
        helper.make_node("Reshape", ["hidden", "rows"], ["flat"]),
        helper.make_node("Gemm", ["flat", "words", "bias"], ["scores"], transB=1),
        helper.make_node("Constant", [], ["shape"], value_ints=[-1, 5, CLASSES]),
        helper.make_node("Reshape", ["scores", "shape"], ["logits"]),
    ]
    check_same(embedding_model(tail, [BIAS]), losses.CrossEntropy("logits", axis=-1), monkeypatch)


def test_logits_but_for_the_last_are_those_of_rows_but_for_the_last(few, monkeypatch):
    tail = [
        *TIED[:1],
        helper.make_node("MatMul", ["hidden", "turned"], ["all"]),
        *(
            helper.make_node("Constant", [], [name], value_ints=[k])
            for name, k in (("from", 0), ("to", -1), ("axis", 1))
        ),
        helper.make_node("Slice", ["all", "from", "to", "axis"], ["logits"]),
    ]
    check_same(embedding_model(tail), losses.CrossEntropy("logits", axis=-1), monkeypatch, length=4)


def test_logits_that_the_step_needs_otherwise_stay(few):
    again = losses.CrossEntropy("logits", axis=-1) + losses.Custom(
        "logits", lambda y, t: (y * y).builder.node("ReduceMean", [y * y], {"keepdims": 0})[0], target="other"
    )
    smooth = losses.CrossEntropy("logits", axis=-1, label_smoothing=0.1)
    for loss in (again, smooth):
        assert FUSED not in op_types(embedding_model(TIED), loss)


def test_a_bias_that_all_classes_share_stays(few):
    rows = helper.make_node("Constant", [], ["rows"], value_ints=[-1, DEPTH])
    flat = helper.make_node("Reshape", ["hidden", "rows"], ["flat"])
    product = helper.make_node("Gemm", ["flat", "words", "one"], ["logits"], transB=1)
    model = embedding_model([rows, flat, product], [("one", np.ones(1, np.float32))])
    assert FUSED not in op_types(model, losses.CrossEntropy("logits"))


def test_few_classes_stay_as_they_are():
    assert FUSED not in op_types(embedding_model(TIED), losses.CrossEntropy("logits", axis=-1))


def test_frozen_weights(few, monkeypatch):
    loss = losses.CrossEntropy("logits", axis=-1)
    check_same(embedding_model(TIED), loss, monkeypatch, freeze="words")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_types_on_a_gpu(few, precision):
    """W comes as it is, in float32; the scale of fp16 goes into the operator, and no product follows it."""
    loss = losses.CrossEntropy("logits", axis=-1)
    made = step_graph(prepare(load(embedding_model(TIED), "test"), "test"), loss, precision=precision)
    (node,) = [n for n in made.model.graph if n.op_type == FUSED]
    half = ir.DataType.BFLOAT16 if precision == "bf16" else ir.DataType.FLOAT16
    assert [None if v is None else v.dtype for v in node.inputs[:3]] == [half, ir.DataType.FLOAT, ir.DataType.INT64]
    assert [v.dtype for v in node.outputs[:3]] == [ir.DataType.FLOAT, half, ir.DataType.FLOAT]
    assert (len(node.inputs) > 5 and node.inputs[5] is not None) == (precision == "fp16")
    assert not any(user.op_type == "Mul" for v in node.outputs[1:] for user, _ in v.uses())


def test_half_precision_on_the_cpu(few, monkeypatch):
    check_same(embedding_model(TIED), losses.CrossEntropy("logits", axis=-1), monkeypatch, 2e-3, precision="bf16")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dynamo"), [("GPT2", True), ("Bert", True), ("Bert", False)])
def test_language_models(kind, dynamo, tmp_path, monkeypatch):
    words = 8209
    if kind == "GPT2":
        how = config("GPT2", vocab_size=words, n_embd=32, n_layer=1, n_head=2, n_positions=32)
        network = transformers.GPT2LMHeadModel(how)
    else:
        how = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        network = transformers.BertForMaskedLM(config("Bert", vocab_size=words, max_position_embeddings=32, **how))
    path = tmp_path / "model.onnx"
    torch.manual_seed(0)
    x = torch.randint(0, words, (2, 12))
    export(Picked(network, lambda result: result.logits, ("input_ids",)), x, path, dynamo=dynamo)
    loss = losses.CrossEntropy("y", axis=-1, ignore_index=-100)
    found = []
    for fewest in (8192, words + 1):
        monkeypatch.setattr(fuse_linear_loss, "FEWEST", fewest)
        assert (FUSED in op_types(str(path), loss)) == (fewest < words)
        trainer, rng = Trainer(str(path), loss, optim.AdamW(1e-3)), np.random.default_rng(0)
        given = [(rng.integers(0, words, (2, 12)), rng.integers(0, words, (2, 12))) for _ in range(5)]
        found.append([float(trainer.step({"x": a, "target": np.where(b % 3, b, -100)})) for a, b in given])
    np.testing.assert_allclose(*found, rtol=1e-5)
