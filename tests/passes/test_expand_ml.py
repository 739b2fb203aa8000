"""Operators of ai.onnx.ml, written with standard ones: what onnxruntime computes, with gradients, and back again."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from tests.checks import raises

import onnxgrad
from onnxgrad import losses, optim

RNG = np.random.default_rng(0)
X = RNG.standard_normal((6, 3)).astype(np.float32)
FLOAT, DOUBLE, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.INT64


def model(op_type, outputs=1, kind=FLOAT, shape=("N", 3), nodes=(), **attributes):
    """One node of a name, and nodes after it."""
    names = [f"y{k}" for k in range(outputs)]
    labels = onnx.TensorProto.STRING if "classlabels_strings" in attributes else INT64
    node = helper.make_node(op_type, ["x"], names, name="it", domain="ai.onnx.ml", **attributes)
    graph = helper.make_graph(
        [node, *nodes],
        "g",
        [helper.make_tensor_value_info("x", kind, shape)],
        [
            *([helper.make_tensor_value_info("y0", labels, ["N"])] if outputs > 1 else []),
            helper.make_tensor_value_info(names[-1], FLOAT, ["N", None]),
        ],
    )
    imports = [helper.make_opsetid("ai.onnx.ml", 1), helper.make_opsetid("", 18)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def run(proto, x, **more):
    session = onnxruntime.InferenceSession(proto.SerializeToString(), onnxgrad.register())
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, {"x": x, **more}), strict=True))


def numbers(*shape):
    return RNG.standard_normal(shape).astype(np.float32).ravel().tolist()


SUPPORTS = RNG.standard_normal((5, 3)).astype(np.float32)
SVM = {"support_vectors": SUPPORTS.ravel().tolist(), "kernel_params": [0.3, 0.2, 3.0]}
ROW = numbers(3)
CASES = {
    "regressor": ("LinearRegressor", 1, {"coefficients": numbers(3), "intercepts": [0.5]}),
    "regressor of several": ("LinearRegressor", 1, {"coefficients": numbers(2, 3), "targets": 2}),
    "regressor, softmax": (
        "LinearRegressor", 1, {"coefficients": numbers(2, 3), "targets": 2, "post_transform": "SOFTMAX"},
    ),
    "regressor, one is not transformed": (
        "LinearRegressor", 1, {"coefficients": numbers(3), "intercepts": [0.5], "post_transform": "LOGISTIC"},
    ),
    **{
        f"classifier, {how}": (
            "LinearClassifier", 2,
            {"coefficients": numbers(3, 3), "intercepts": numbers(3), "classlabels_ints": [5, 6, 9],
             "post_transform": how},
        )
        for how in ("NONE", "LOGISTIC", "SOFTMAX")
    },
    **{
        f"classifier of two, {how}": (
            "LinearClassifier", 2,
            {"coefficients": [*(-k for k in ROW), *ROW], "intercepts": [-0.2, 0.2], "classlabels_ints": [5, 6],
             "post_transform": how},
        )
        for how in ("NONE", "LOGISTIC", "SOFTMAX")
    },
    **{
        f"classifier of one row, {how}": (
            "LinearClassifier", 2,
            {"coefficients": ROW, "intercepts": [0.2], "classlabels_strings": ["no", "yes"], "post_transform": how},
        )
        for how in ("NONE", "LOGISTIC")
    },
    "scaler": ("Scaler", 1, {"offset": numbers(3), "scale": numbers(3)}),
    "scaler of one number": ("Scaler", 1, {"offset": [0.5], "scale": [2.0]}),
    **{f"normalizer {norm}": ("Normalizer", 1, {"norm": norm}) for norm in ("MAX", "L1", "L2")},
    "imputer": ("Imputer", 1, {"imputed_value_floats": numbers(3), "replaced_value_float": float("nan")}),
    "imputer of one number": ("Imputer", 1, {"imputed_value_floats": [4.0], "replaced_value_float": float(X[1, 1])}),
    **{
        f"regressor, {kernel}": (
            "SVMRegressor", 1,
            {"coefficients": numbers(5), "rho": [0.3], "n_supports": 5, "kernel_type": kernel, **SVM},
        )
        for kernel in ("LINEAR", "RBF", "POLY", "SIGMOID")
    },
    "regressor without vectors": (
        "SVMRegressor", 1,
        {"coefficients": numbers(3), "rho": [0.3], "kernel_type": "LINEAR", "kernel_params": [0.0] * 3},
    ),
    **{
        f"classes {per_class}, {kernel}": (
            "SVMClassifier", 2,
            {"coefficients": numbers(len(per_class) - 1, 5), "rho": numbers(len(per_class) * (len(per_class) - 1) // 2),
             "vectors_per_class": per_class, "classlabels_ints": [3, 4, 8][: len(per_class)], "kernel_type": kernel,
             **SVM},
        )
        for per_class in ([2, 3], [2, 1, 2])
        for kernel in ("RBF", "LINEAR")
    },
    "probabilities of two classes": (
        "SVMClassifier", 2,
        {"coefficients": numbers(5), "rho": [0.2], "vectors_per_class": [2, 3], "classlabels_ints": [0, 1],
         "kernel_type": "RBF", "prob_a": [-1.3], "prob_b": [0.2], **SVM},
    ),
}  # fmt: skip


OTHER_TYPES = ["scaler", "classifier, SOFTMAX", "classes [2, 3], RBF", "normalizer L2"]


@pytest.mark.parametrize(
    "case, kind", [*((c, FLOAT) for c in CASES), *((c, k) for c in OTHER_TYPES for k in (DOUBLE, INT64))], ids=str
)
def test_the_same_numbers_and_a_gradient(case, kind):
    op_type, outputs, attributes = CASES[case]
    proto = model(op_type, outputs, kind, **attributes)
    x = (X * (3 if kind == INT64 else 1)).astype(helper.tensor_dtype_to_np_dtype(kind))
    if "nan" in str(attributes):
        x[2, 1] = np.nan
    if op_type == "Normalizer":
        x[4] = 0
    theirs = run(proto, x)
    last = f"y{outputs - 1}"
    if kind == INT64 and op_type == "Normalizer":
        return  # nothing has a gradient
    with_gradient = onnxgrad.gradient(proto, None if kind == INT64 else "x", last)
    mine = run(with_gradient, x, **{f"{last}_grad": np.ones_like(theirs[last])})
    for name, array in theirs.items():
        assert mine[name].dtype == array.dtype
        if array.dtype.kind == "f":
            np.testing.assert_allclose(mine[name], array, rtol=2e-5, atol=2e-6)
        else:
            assert (mine[name] == array).all()
    gradients = [array for name, array in mine.items() if name not in theirs]
    assert gradients and all(np.isfinite(array).all() for array in gradients)


@pytest.mark.parametrize("case", CASES)
def test_gradients_against_differences(case):
    op_type, outputs, attributes = CASES[case]
    proto = model(op_type, outputs, **attributes)
    last = f"y{outputs - 1}"
    x = X.copy()
    x[1, 1] += "one number" in case  # which an imputer would replace: there is a step
    found = onnxgrad.check_gradient(proto, {"x": x}, "x", last)
    assert found.worst < 1e-6, found
    if op_type not in ("Normalizer", "Imputer"):
        found = onnxgrad.check_gradient(proto, {"x": X}, ["*"], last)
        assert found.worst < 1e-6, found


@pytest.mark.parametrize("case", [c for c in CASES if CASES[c][0] not in ("Normalizer", "Imputer")])
def test_trained_weights_come_back_as_attributes(case, tmp_path):
    op_type, outputs, attributes = CASES[case]
    proto = model(op_type, outputs, **attributes)
    last = f"y{outputs - 1}"
    trainer = onnxgrad.Trainer(proto, losses.MSE(last), optim.SGD(lr=0.05), ["*"])
    wanted = run(proto, X)[last]
    batch = {"x": X, "target": wanted + RNG.standard_normal(wanted.shape).astype(np.float32)}
    before = trainer.step(batch)
    assert trainer.evaluate([batch])["loss"] < before
    trainer.export(tmp_path / "trained.onnx")
    exported = onnx.load(tmp_path / "trained.onnx")
    assert [node.op_type for node in exported.graph.node] == [op_type]
    assert [a.name for a in exported.graph.node[0].attribute] == [a.name for a in proto.graph.node[0].attribute]
    theirs = run(exported, X)[last]
    assert np.mean((theirs - batch["target"]) ** 2) == pytest.approx(trainer.evaluate([batch])["loss"], rel=1e-4)


def test_names_of_weights():
    """Nodes without a name, or with the same, have weights of their own; these can be chosen by name."""
    proto = model("Scaler", offset=[1.0], scale=[2.0])
    for name, source, result in (("", "y0", "z"), ("it", "z", "u")):
        proto.graph.node.append(
            helper.make_node("Scaler", [source], [result], name=name, domain="ai.onnx.ml", offset=[0.5], scale=[3.0])
        )
    proto.graph.output[0].name = "u"
    trainer = onnxgrad.Trainer(proto, losses.MSE("u"), optim.SGD(lr=0.1), ["*"])
    assert list(trainer.parameters) == [
        "it.offset", "it.scale", "Scaler_1.offset", "Scaler_1.scale", "Scaler_2.offset", "Scaler_2.scale"
    ]  # fmt: skip
    assert list(onnxgrad.Trainer(proto, losses.MSE("u"), optim.SGD(lr=0.1), "it.scale").parameters) == ["it.scale"]


@pytest.mark.parametrize("case", ["LinearClassifier", "SVMClassifier"])
def test_one_example_alone(case):
    name = {"LinearClassifier": "classifier, SOFTMAX", "SVMClassifier": "classes [2, 1, 2], RBF"}[case]
    op_type, outputs, attributes = CASES[name]
    proto = model(op_type, outputs, shape=(3,), **attributes)
    theirs = run(proto, X[0])["y1"]
    with_gradient = onnxgrad.gradient(proto, "x", "y1")
    mine = run(with_gradient, X[0], y1_grad=np.ones_like(theirs))
    np.testing.assert_allclose(mine["y1"], theirs, rtol=1e-5)
    assert mine["x_grad"].shape == (3,)


CODES = np.array([[0, 1], [1, 1], [0, 0]])
ENCODERS = {
    "LabelEncoder": (INT64, {"keys_int64s": [0, 1], "values_floats": [0.5, 2.0]}),
    "OneHotEncoder": (INT64, {"cats_int64s": [0, 1]}),
    "Binarizer": (FLOAT, {"threshold": 0.5}),
    "FeatureVectorizer": (INT64, {"inputdimensions": [2]}),
}


@pytest.mark.parametrize("op_type", ENCODERS)
def test_what_is_after_an_encoder_is_trained(op_type):
    kind, attributes = ENCODERS[op_type]
    columns = 1 if op_type == "OneHotEncoder" else 2
    x = CODES[:, 2 - columns :].squeeze().astype(helper.tensor_dtype_to_np_dtype(kind))
    shape = ("N",) if x.ndim == 1 else ("N", 2)
    proto = model(op_type, kind=kind, shape=shape, nodes=[helper.make_node("MatMul", ["y0", "w"], ["z"])], **attributes)
    proto.opset_import[0].version = 2
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((2, 1), np.float32), "w"))
    proto.graph.output[0].name = "z"
    trainer = onnxgrad.Trainer(proto, losses.MSE("z"), optim.SGD(lr=0.1))
    expected = np.mean(run(proto, x)["z"] ** 2)
    assert trainer.step({"x": x, "target": np.zeros((3, 1), np.float32)}) == pytest.approx(expected)
    assert list(trainer.parameters) == ["w"] and trainer.gradients["w"].any()


def test_texts_cannot_be_given():
    proto = model("LabelEncoder", kind=onnx.TensorProto.STRING, keys_strings=["a", "b"], values_floats=[0.5, 2.0])
    proto.opset_import[0].version = 2
    proto.graph.node.append(helper.make_node("Mul", ["y0", "w"], ["z"]))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(3, np.float32), "w"))
    proto.graph.output[0].name = "z"
    sentence = (
        "the model's input 'x' is a tensor(string), which no batch can hold: train the part of the model behind its "
    )
    with raises(TypeError, f"{sentence}encoding, which onnxgrad.cut takes, and put both together with onnxgrad.join"):
        onnxgrad.Trainer(proto, losses.MSE("z"), optim.SGD(lr=0.1), "w")
    rest = onnxgrad.cut(proto, ["z"], ["y0"])
    trainer = onnxgrad.Trainer(rest, losses.MSE("z"), optim.SGD(lr=0.1), "w")
    assert trainer.step({"y0": np.full((2, 3), 2, np.float32), "target": np.zeros((2, 3), np.float32)}) == 4


def test_what_has_no_gradient():
    trees = {
        "nodes_treeids": [0, 0, 0], "nodes_nodeids": [0, 1, 2], "nodes_featureids": [0, 0, 0],
        "nodes_values": [0.5, 0.0, 0.0], "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"], "nodes_truenodeids": [1, 0, 0],
        "nodes_falsenodeids": [2, 0, 0], "target_treeids": [0, 0], "target_nodeids": [1, 2], "target_ids": [0, 0],
        "target_weights": [1.0, 2.0], "n_targets": 1,
    }  # fmt: skip
    of_trees = (
        "trees are constant between their thresholds and have no gradient: train them where they came from; what is "
        "after them can be trained here"
    )
    with raises(ValueError, f"Trainer: TreeEnsembleRegressor (node 'it'): {of_trees}"):
        onnxgrad.Trainer(model("TreeEnsembleRegressor", **trees), losses.MSE("y0"), optim.SGD(lr=0.1))
    after = model("TreeEnsembleRegressor", **trees, nodes=[helper.make_node("Mul", ["y0", "w"], ["z"])])
    after.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(1, np.float32), "w"))
    after.graph.output[0].name = "z"
    batch = {"x": X, "target": np.zeros((6, 1), np.float32)}
    assert onnxgrad.Trainer(after, losses.MSE("z"), optim.SGD(lr=0.1), "w").step(batch) > 0
    with raises(ValueError, "gradient: 'z' does not depend on 'x' in a way that has a gradient"):
        onnxgrad.gradient(after, "x", "z")
    op_type, outputs, attributes = CASES["classes [2, 1, 2], RBF"]
    sentence = (
        "Trainer: SVMClassifier (node 'it') couples the probabilities of 3 classes by an iteration that has no "
        "gradient: convert the model without probabilities, SVC(probability=False), and train its scores"
    )
    with raises(ValueError, sentence):
        coupled = model(op_type, outputs, **attributes, prob_a=[1.0] * 3, prob_b=[0.0] * 3)
        onnxgrad.Trainer(coupled, losses.MSE("y1"), optim.SGD(lr=0.1))
    sentence = "has the post_transform PROBIT, expected NONE, LOGISTIC or SOFTMAX to train it"
    with raises(ValueError, f"gradient: LinearRegressor (node 'it') {sentence}"):
        onnxgrad.gradient(model("LinearRegressor", coefficients=numbers(2, 3), targets=2, post_transform="PROBIT"), "x")
    with raises(
        ValueError, "gradient: SVMRegressor (node 'it') is of one class and gives a sign, which has no gradient"
    ):
        onnxgrad.gradient(model("SVMRegressor", coefficients=numbers(3), rho=[0.3], one_class=1), "x")


def test_maps_stay_in_the_exported_file(tmp_path):
    """ZipMap makes a sequence of maps: losses and metrics see the tensor before it, under the output's name."""
    _, _, attributes = CASES["classifier, SOFTMAX"]
    zip_map = helper.make_node("ZipMap", ["y1"], ["maps"], domain="ai.onnx.ml", classlabels_int64s=[5, 6, 9])
    proto = model("LinearClassifier", 2, nodes=[zip_map], **attributes)
    proto.graph.output[1].CopyFrom(
        helper.make_value_info(
            "maps",
            helper.make_sequence_type_proto(
                helper.make_map_type_proto(INT64, helper.make_tensor_type_proto(FLOAT, None))
            ),
        )
    )
    onnx.save(proto, tmp_path / "maps.onnx")
    batch = {"x": X, "target": RNG.integers(0, 3, 6)}
    for source in (proto, tmp_path / "maps.onnx"):
        trainer = onnxgrad.Trainer(source, losses.CrossEntropy("maps"), optim.SGD(lr=0.1))
        trainer.step(batch)
        trainer.export(tmp_path / "trained.onnx")
        exported = onnx.load(tmp_path / "trained.onnx")
        assert exported.graph.output == proto.graph.output
        found = run(exported, X)["maps"]
        of_target = [np.log(row[[5, 6, 9][t]]) for row, t in zip(found, batch["target"], strict=True)]
        assert -np.mean(of_target) == pytest.approx(trainer.evaluate([batch])["loss"], rel=1e-5)
    proto.graph.input[0].type.CopyFrom(proto.graph.output[1].type)
    with raises(ValueError, "gradient: the input 'x' is a map, expected a tensor: encode it before the model"):
        onnxgrad.gradient(proto)
