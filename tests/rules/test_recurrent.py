"""GRU, LSTM and RNN: their gradients, and that the operator a node becomes gives what the node gave."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from tests.gradients import check_rule, evaluate, feeds_for_seeds, model_of_node

import onnxgrad

pytestmark = pytest.mark.slow  # long to compile; the operators themselves are tested daily

S, N, WIDTH, H = 3, 2, 3, 2
GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}
OUTPUTS = {"GRU": 2, "LSTM": 3, "RNN": 2}
OWN = {
    "GRU": [{"linear_before_reset": 0}, {"linear_before_reset": 1}],
    "LSTM": [{"input_forget": 0}, {"input_forget": 1}],
    "RNN": [{}],
}  # attributes that one of them alone has
LENGTHS = np.array([2, 3], np.int32)


def inputs_of(name, direction="forward", layout=0, lengths=True, without=(), scale=0.6, seed=0):
    """X, W, R, B, sequence_lens, initial_h and whatever else there is, of moderate size."""
    rng = np.random.default_rng(seed)
    D, G = 2 if direction == "bidirectional" else 1, GATES[name]
    shapes = {"X": (S, N, WIDTH), "W": (D, G * H, WIDTH), "R": (D, G * H, H), "B": (D, 2 * G * H), "lengths": (N,)}
    shapes |= dict.fromkeys(["initial_h", "initial_c"][: OUTPUTS[name] - 1], (D, N, H))
    shapes |= {"P": (D, 3 * H)} if name == "LSTM" else {}
    arrays = {n: rng.standard_normal(shape) * scale for n, shape in shapes.items()}
    if layout:
        arrays = {n: a.swapaxes(0, 1) if n[:1] in "Xi" else a for n, a in arrays.items()}
    arrays["lengths"] = LENGTHS
    absent = {*without, *(() if lengths else ("lengths",))}
    return [None if n in absent else a for n, a in arrays.items()]


def settings(name, **more):
    return {"hidden_size": H, **more}


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("name", GATES)
def test_directions_and_layouts(name, direction, layout):
    for own in OWN[name] if direction == "forward" else OWN[name][-1:]:
        check_rule(
            name, *inputs_of(name, direction, layout), outputs=OUTPUTS[name], twice=False,
            **settings(name, direction=direction, layout=layout, **own),
        )  # fmt: skip


@pytest.mark.parametrize("without", [("B",), ("lengths", "initial_h"), ("B", "lengths", "initial_h", "initial_c", "P")])
@pytest.mark.parametrize("name", GATES)
def test_absent_inputs(name, without):
    check_rule(name, *inputs_of(name, without=without), outputs=OUTPUTS[name], twice=False, **settings(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", GATES)
def test_some_outputs_and_some_inputs(name):
    check_rule(name, *inputs_of(name), outputs=OUTPUTS[name], of=[1], twice=False, **settings(name))
    check_rule(name, *inputs_of(name), outputs=OUTPUTS[name], wrt=[1], fixed=[2, 3], twice=False, **settings(name))
    check_rule(name, *inputs_of(name), outputs=1, wrt=[0], twice=False, **settings(name))


ACTIVATIONS = {
    "GRU": [
        {"activations": ["HardSigmoid", "LeakyRelu"], "activation_alpha": [0.3, 0.1], "activation_beta": [0.4]},
        {"activations": ["Sigmoid", "Tanh", "Softsign", "Elu"], "direction": "bidirectional"},
    ],
    "LSTM": [
        {"activations": ["HardSigmoid", "LeakyRelu", "Softsign"], "activation_alpha": [0.3, 0.1]},
        {"activations": ["Sigmoid", "Tanh", "Tanh", "Softsign", "Elu", "Affine"], "direction": "bidirectional"},
    ],
    "RNN": [
        {"activations": ["LeakyRelu"], "activation_alpha": [0.1]},
        {"activations": ["Affine", "Softsign"], "activation_alpha": [0.6], "direction": "bidirectional"},
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attributes"), [(n, a) for n, cases in ACTIVATIONS.items() for a in cases])
def test_activations(name, attributes):
    given = inputs_of(name, attributes.get("direction", "forward"))
    check_rule(name, *given, outputs=OUTPUTS[name], twice=False, **settings(name, **attributes))


@pytest.mark.slow
@pytest.mark.parametrize("name", GATES)
def test_clip(name):
    check_rule(name, *inputs_of(name), outputs=OUTPUTS[name], twice=False, **settings(name, clip=0.5))


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("name", GATES)
def test_the_states_stay_what_onnxruntime_computes(name, direction):
    for own in [*OWN[name], {"clip": 0.5}, *(a for a in ACTIVATIONS[name] if "direction" not in a)]:
        D = 2 if direction == "bidirectional" else 1
        per_direction = {k: D * v if isinstance(v, list) else v for k, v in own.items()}
        attributes = settings(name, direction=direction, **per_direction)
        given = inputs_of(name, direction)
        model, feeds = model_of_node(name, given, OUTPUTS[name], attributes=attributes, dtype=np.float32)
        expected = run(model, feeds)
        once = onnxgrad.gradient(model, "in_0", [o.name for o in model.graph.output])
        assert [node.op_type for node in once.graph.node].count(name) == (name == "RNN")
        assert [o.name for o in once.graph.output[: OUTPUTS[name]]] == [o.name for o in model.graph.output]
        seeds = {f"out_{k}_grad": np.ones_like(e) for k, e in enumerate(expected)}
        for options in (onnxruntime.SessionOptions(), onnxgrad.register()):
            for got, wanted in zip(run(once, feeds | seeds, options), expected, strict=False):
                np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
        wide, feeds = model_of_node(name, given, OUTPUTS[name], attributes=attributes)
        for got, wanted in zip(evaluate(wide, feeds), expected, strict=True):  # what differences are taken of
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def run(model, feeds, options=None):
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()})


# How torch orders the gates, in terms of ONNX's: z r h, i o f c, and one.
TORCH_ORDER = {"GRU": (1, 0, 2), "LSTM": (0, 3, 1, 2), "RNN": (0,)}


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("name", GATES)
def test_as_torch(name, bidirectional):
    """Two layers, weights as initializers, against the module of torch that is the same."""
    D = 1 + bidirectional
    module = getattr(torch.nn, name)(WIDTH, H, num_layers=2, bidirectional=bidirectional, dtype=torch.float64)
    attributes = {"hidden_size": H, "direction": "bidirectional" if bidirectional else "forward"}
    if name == "GRU":
        attributes["linear_before_reset"] = 1
    order = np.concatenate([np.arange(H) + k * H for k in TORCH_ORDER[name]])
    parameters = {n: p.detach().numpy() for n, p in module.named_parameters()}
    nodes, initializers = [], {"shape": np.array([S, N, D * H])}
    for layer in range(2):
        suffixes = [f"_l{layer}{s}" for s in ("", "_reverse")[:D]]
        initializers[f"W{layer}"] = np.stack([parameters[f"weight_ih{s}"][order] for s in suffixes])
        initializers[f"R{layer}"] = np.stack([parameters[f"weight_hh{s}"][order] for s in suffixes])
        initializers[f"B{layer}"] = np.stack(
            [np.concatenate([parameters[f"bias_{k}{s}"][order] for k in ("ih", "hh")]) for s in suffixes]
        )
        nodes += [
            helper.make_node(name, [f"x{layer}", *(f"{p}{layer}" for p in "WRB")], [f"Y{layer}"], **attributes),
            helper.make_node("Transpose", [f"Y{layer}"], [f"T{layer}"], perm=[0, 2, 1, 3]),
            helper.make_node("Reshape", [f"T{layer}", "shape"], [f"x{layer + 1}"]),
        ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, name, [value("x0", 11, ["S", N, WIDTH])], [value("x2", 11, None)],
        [onnx.numpy_helper.from_array(a, n) for n, a in initializers.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    names = [n for n in initializers if n != "shape"]
    rng = np.random.default_rng(1)
    X, g = rng.standard_normal((S, N, WIDTH)), rng.standard_normal((S, N, D * H))
    Y, dX, *found = evaluate(onnxgrad.gradient(model, ["x0", *names]), {"x0": X, "x2_grad": g})

    x = torch.tensor(X, requires_grad=True)
    y, _ = module(x)
    (y * torch.tensor(g)).sum().backward()
    np.testing.assert_allclose(Y, y.detach(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(dX, x.grad, rtol=1e-9, atol=1e-12)
    back = np.argsort(order)
    for gradient, array in zip(names, found, strict=True):
        kind, layer = gradient
        for d, suffix in enumerate(("", "_reverse")[:D]):
            wanted = {"W": ["weight_ih"], "R": ["weight_hh"], "B": ["bias_ih", "bias_hh"]}[kind]
            for part, parameter in zip(np.split(array[d], len(wanted)), wanted, strict=True):
                theirs = dict(module.named_parameters())[f"{parameter}_l{layer}{suffix}"].grad
                np.testing.assert_allclose(part[back], theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", GATES)
def test_what_has_no_gradient_is_refused(name):
    model, _ = model_of_node(name, inputs_of(name), OUTPUTS[name], attributes=settings(name))
    with pytest.raises(ValueError, match="holds int32, which has no gradient"):
        onnxgrad.gradient(model, "in_4", "out_0")
    wrong, _ = model_of_node(name, inputs_of(name), OUTPUTS[name], attributes=settings(name, activations=["Gelu"] * 3))
    with pytest.raises(ValueError, match="activations"):
        onnxgrad.gradient(wrong, "in_0", "out_0")


@pytest.mark.slow
@pytest.mark.parametrize("name", GATES)
def test_twice(name):
    """Written out step by step, which takes a known number of them."""
    for kind in ({"direction": "bidirectional", **OWN[name][-1]}, {"direction": "reverse", "clip": 0.5}):
        given = inputs_of(name, kind["direction"], without=() if "clip" in kind else ("lengths",))
        model, feeds = model_of_node(name, given, OUTPUTS[name], attributes=settings(name, **kind))
        wrt = [n for n in feeds if n != "in_4"]
        once = onnxgrad.gradient(model, wrt, [o.name for o in model.graph.output])
        seeds = feeds_for_seeds(once, model, feeds)
        again = [o.name for o in once.graph.output[OUTPUTS[name] :]]
        checked = onnxgrad.check_gradient(once, {**feeds, **seeds}, [*wrt, *seeds], again, directions=1)
        assert checked.worst < 1e-6, checked


@pytest.mark.slow
@pytest.mark.parametrize("name", GATES)
def test_twice_of_any_activation(name):
    for attributes in ACTIVATIONS[name]:
        given = inputs_of(name, attributes.get("direction", "forward"), without=("B", "initial_h", "P"))
        model, feeds = model_of_node(name, given, 1, attributes=settings(name, **attributes))
        once = onnxgrad.gradient(model, ["in_0", "in_2"], "out_0")
        seeds = feeds_for_seeds(once, model, feeds)
        checked = onnxgrad.check_gradient(once, {**feeds, **seeds}, ["in_0", "in_2"], "in_2_grad", directions=1)
        assert checked.worst < 1e-6, checked


@pytest.mark.parametrize("name", GATES)
def test_twice_needs_to_know_the_number_of_steps(name):
    model, _ = model_of_node(name, inputs_of(name), 1, attributes=settings(name), static=False)
    once = onnxgrad.gradient(model, "in_0", "out_0")
    with pytest.raises(ValueError, match=rf"gradient of {name}Grad \(node .*\): .* the number of steps must be known"):
        onnxgrad.gradient(once, "in_0", "in_0_grad")


def test_a_later_node_that_computes_the_same_is_not_used_before_it_is_there():
    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node("GRU", ["X", "W", "R"], ["Y"], layout=1, hidden_size=H),
        helper.make_node("Transpose", ["X"], ["T"], perm=[1, 0, 2]),
        helper.make_node("Shape", ["T"], ["shape"]),
    ]
    X, W, R = (a.astype(np.float32) for a in inputs_of("GRU", layout=1)[:3])
    given = [value(n, 1, a.shape) for n, a in {"X": X, "W": W, "R": R}.items()]
    graph = helper.make_graph(nodes, "g", given, [value("Y", 1, None), value("shape", 7, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    once = onnxgrad.gradient(model, "W", "Y")
    onnx.checker.check_model(once, full_check=True)
