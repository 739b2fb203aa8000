"""Gradients of If, Scan and Loop: against differences in float64, against PyTorch unrolled, and in training."""

from itertools import product

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tests.gradients import EXACT, check_model, parsed

import onnxgrad
from onnxgrad.rules.engine import NoRuleError
from onnxgrad.train import losses, optim
from onnxgrad.train.trainer import Trainer

RNG = np.random.default_rng(3)


def numbers(*shape):
    return RNG.standard_normal(shape)


# If


BRANCHES = """g (bool flag, float[N,2] x, float[N,2] z, float[2] w) => (float[N,2] y, float[N,2] other) {
    h = Exp(x)
    y, other = If (flag) <
        then_branch = t () => (float[N,2] p, float[N,2] p2) { a = Mul(h, z) b = Sin(a) p = Mul(b, w) p2 = Neg(x) },
        else_branch = e () => (float[N,2] q, float[N,2] q2) { q = Identity(h) q2 = Mul(q, q) }
    >
}"""


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("of, wrt", [("y", "xzw"), ("other", "x"), (["y", "other"], "xzw")], ids=str)
def test_both_branches_and_what_they_read_from_outside(flag, of, wrt):
    feeds = {"flag": np.array(flag), "x": numbers(3, 2), "z": numbers(3, 2), "w": numbers(2)}
    check_model(parsed(BRANCHES), feeds, list(wrt), of)


@pytest.mark.parametrize("flag", [True, False])
def test_branches_of_different_shapes(flag):
    model = parsed("""g (bool flag, float[3,4] x) => (float y) {
        axes = Constant<value_ints: ints = [1]>()
        b = If (flag) <
            then_branch = t () => (float[3] p) { p = ReduceSum<keepdims = 0>(x, axes) },
            else_branch = e () => (float[3,4] q) { q = Mul(x, x) }
        >
        s = Sin(b)
        y = ReduceSum<keepdims = 0>(s)
    }""")
    check_model(model, {"flag": np.array(flag), "x": numbers(3, 4)}, ["x"], twice=not flag)


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_an_if_in_an_if(outer, inner):
    model = parsed("""g (bool outer, bool inner, float[3] x, float[3] z) => (float[3] y) {
        y = If (outer) <
            then_branch = t () => (float[3] p) {
                a = Sin(x)
                p = If (inner) <
                    then_branch = tt () => (float[3] pp) { b = Mul(a, z) pp = Mul(b, x) },
                    else_branch = te () => (float[3] pq) { pq = Exp(a) }
                >
            },
            else_branch = e () => (float[3] q) { q = Mul(x, z) }
        >
    }""")
    feeds = {"outer": np.array(outer), "inner": np.array(inner), "x": numbers(3), "z": numbers(3)}
    check_model(model, feeds, ["x", "z"])


def with_weights_in_branches():
    """Each branch has a weight, both by the name w; attributes are in order of their names, else_branch first."""

    def branch(name, shape):
        info = [helper.make_tensor_value_info(f"{name}_result", TensorProto.FLOAT, ["N", 4])]
        weight = numpy_helper.from_array(
            (np.random.default_rng(len(name)).standard_normal(shape)).astype(np.float32), "w"
        )
        nodes = [helper.make_node("MatMul", ["x", "w"], [f"{name}_product"])]
        nodes += [helper.make_node("Tanh", [f"{name}_product"], [f"{name}_result"])]
        return helper.make_graph(nodes, name, [], info, [weight])

    inputs = [helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
              helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3])]  # fmt: skip
    node = helper.make_node(
        "If", ["flag"], ["y"], then_branch=branch("then", (3, 4)), else_branch=branch("other", (3, 4))
    )
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])]
    graph = helper.make_graph([node], "g", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize("flag", [True, False])
def test_weights_that_branches_declare_are_parameters(flag):
    model, feeds = with_weights_in_branches(), {"flag": np.array(flag), "x": numbers(5, 3)}
    made = onnxgrad.gradient(model)
    assert [o.name for o in made.graph.output] == ["y", "w_grad", "w__grad"]
    assert onnxgrad.check_gradient(model, feeds).worst < EXACT
    assert onnxgrad.check_gradient(model, feeds, ["x", "w", "w_"]).worst < EXACT


def test_a_model_with_an_if_trains(tmp_path):
    """As in PyTorch: the weights of the branch that is taken, and no others, change."""
    model = with_weights_in_branches()
    trainer = Trainer(model, losses.MSE("y"), optim.SGD(lr=0.5))
    mine = {n: torch.tensor(np.array(a), requires_grad=True) for n, a in trainer.parameters.items()}
    assert sorted(mine) == ["w", "w_"]
    optimizer = torch.optim.SGD(mine.values(), lr=0.5)
    for k in range(6):
        x, target = (RNG.standard_normal((5, n)).astype(np.float32) for n in (3, 4))
        loss = torch.nn.functional.mse_loss(
            torch.tanh(torch.tensor(x) @ mine["w" if k % 2 else "w_"]), torch.tensor(target)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        got = trainer.step({"flag": np.array(k % 2 == 0), "x": x, "target": target})
        assert got == pytest.approx(loss.item(), rel=1e-5)
    for name, tensor in mine.items():
        np.testing.assert_allclose(trainer.parameters[name], tensor.detach().numpy(), rtol=1e-5, atol=1e-6)
    trainer.export(tmp_path / "trained.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    for flag, name in ((True, "w_"), (False, "w")):
        (y,) = session.run(None, {"flag": np.array(flag), "x": x})
        np.testing.assert_allclose(y, np.tanh(x @ mine[name].detach().numpy()), rtol=1e-5, atol=1e-6)


def test_a_draw_in_a_branch_is_refused():
    model = parsed("""g (bool flag, float[3] x) => (float[3] y) {
        y = If (flag) <
            then_branch = t () => (float[3] p) { r = RandomNormalLike(x) p = Mul(r, x) },
            else_branch = e () => (float[3] q) { q = Identity(x) }
        >
    }""")
    with pytest.raises(ValueError, match=r"gradient of If \(node 'If_0'\): RandomNormalLike .* draw other numbers"):
        onnxgrad.gradient(model, "x")


def test_an_operator_without_a_rule_in_a_branch_is_named():
    model = parsed("""g (bool flag, float[3] x) => (float[3] y) {
        y = If (flag) <
            then_branch = t () => (float[3] p) { p = my.Own(x) },
            else_branch = e () => (float[3] q) { q = Identity(x) }
        >
    }""")
    model.opset_import.append(helper.make_opsetid("my", 1))
    with pytest.raises(NoRuleError, match=r"my\.Own \(node .*\) has no gradient rule"):
        onnxgrad.gradient(model, "x")


# Scan


RNN = """g (float[B,3] h0, float[T,B,2] xs, float[2,3] wx, float[3,3] wh, float[3] b) =>
        (float[B,3] hT, float[T,B,3] hs) {
    hT, hs = Scan <num_scan_inputs = 1, body = step (float[B,3] h, float[B,2] x) => (float[B,3] h1, float[B,3] out) {
        a = MatMul(x, wx)
        r = MatMul(h, wh)
        s = Add(a, r)
        t = Add(s, b)
        h1 = Tanh(t)
        out = Identity(h1)
    }> (h0, xs)
}"""
RNN_FEEDS = {"h0": numbers(2, 3), "xs": numbers(5, 2, 2), "wx": numbers(2, 3), "wh": numbers(3, 3), "b": numbers(3)}


@pytest.mark.parametrize("of", [["hT"], ["hs"], ["hT", "hs"]], ids=str)
def test_an_rnn_as_in_pytorch(of):
    got, seeds = check_model(parsed(RNN), RNN_FEEDS, list(RNN_FEEDS), of)
    given = {n: torch.tensor(a, requires_grad=True) for n, a in RNN_FEEDS.items()}
    h, hs = given["h0"], []
    for x in given["xs"]:
        h = torch.tanh(x @ given["wx"] + h @ given["wh"] + given["b"])
        hs.append(h)
    results = {"hT": h, "hs": torch.stack(hs)}
    sum((results[n] * torch.tensor(seeds[f"{n}_grad"])).sum() for n in of).backward()
    for name, tensor in given.items():
        np.testing.assert_allclose(got[f"{name}_grad"], tensor.grad.numpy(), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("directions", [(0, 0, 0), (1, 0, 1), (0, 1, 1), (1, 1, 0)], ids=str)
@pytest.mark.parametrize("axes", [(0, 0, 0), (1, -1, 1), (0, 1, -1)], ids=str)
def test_states_axes_and_directions(axes, directions):
    """Two states, one of them an integer that steps count with, two scanned inputs and two scanned outputs."""
    shapes = [[2, 3], [2, 3]]
    for shape, axis in zip(shapes, axes, strict=False):
        shape.insert(axis % 3, 4)
    model = parsed(f"""g (float[2,3] s0, float{shapes[0]} a, float{shapes[1]} b, float[3] w) =>
            (float[2,3] s, int64 k, float[?,?,?] u, float[?,?] v) {{
        k0 = Constant<value = int64 {{1}}>()
        s, k, u, v = Scan <num_scan_inputs = 2, scan_input_axes = [{axes[0]}, {axes[1]}],
            scan_input_directions = [{directions[0]}, {directions[1]}], scan_output_axes = [{axes[2]}, 0],
            scan_output_directions = [{directions[2]}, 0],
            body = step (float[2,3] si, int64 ki, float[2,3] x, float[2,3] y) =>
                (float[2,3] so, int64 ko, float[2,3] uo, float[2] vo) {{
            one = Constant<value = int64 {{1}}>()
            ko = Add(ki, one)
            f = CastLike(ki, si)
            p = Mul(si, x)
            q = Mul(y, w)
            r = Add(p, q)
            rf = Div(r, f)
            so = Sin(rf)
            uo = Mul(x, so)
            last = Constant<value_ints: ints = [1]>()
            vo = ReduceSum<keepdims = 0>(y, last)
        }}> (s0, k0, a, b)
    }}""")
    feeds = {"s0": numbers(2, 3), "a": numbers(*shapes[0]), "b": numbers(*shapes[1]), "w": numbers(3)}
    check_model(model, feeds, list(feeds), ["s", "u", "v"])


def test_types_inside_a_step_need_not_be_declared():
    model = parsed(RNN)
    body = model.graph.node[0].attribute[1].g
    assert body.name == "step"
    for info in (*body.input, *body.output):
        info.ClearField("type")
    got, _ = check_model(model, RNN_FEEDS, list(RNN_FEEDS))
    declared, _ = check_model(parsed(RNN), RNN_FEEDS, list(RNN_FEEDS))
    for name, array in declared.items():
        np.testing.assert_array_equal(got[name], array)


def test_a_step_that_needs_nothing_of_the_forward():
    model = parsed("""g (float[2] s0, float[T,2] xs) => (float[2] s) {
        s = Scan <num_scan_inputs = 1, body = step (float[2] a, float[2] x) => (float[2] b) { b = Add(a, x) }> (s0, xs)
    }""")
    feeds = {"s0": numbers(2), "xs": numbers(4, 2)}
    made = onnxgrad.gradient(model, ["s0", "xs"])
    assert len(made.graph.node[0].output) == 1  # no states are kept
    assert onnxgrad.check_gradient(model, feeds, ["s0", "xs"]).worst < EXACT


def test_if_and_scan_in_a_scan():
    """The inner ones read what the outer step computed, and what is outside of both."""
    model = parsed("""g (float[2] s0, float[T,U,2] xs, float[2] w) => (float[2] s, float[T,2] ys) {
        zero = Constant<value = float {0.0}>()
        s, ys = Scan <num_scan_inputs = 1, body = outer (float[2] a, float[U,2] rows) => (float[2] a1, float[2] y) {
            aw = Mul(a, w)
            total = ReduceSum<keepdims = 0>(rows)
            positive = Greater(total, zero)
            c = If (positive) <
                then_branch = t () => (float[2] p) { ps = Sin(aw) p = Mul(ps, w) },
                else_branch = e () => (float[2] q) { q = Mul(a, total) }
            >
            d = Scan <num_scan_inputs = 1, body = inner (float[2] i, float[2] row) => (float[2] i1) {
                m = Mul(i, w)
                n = Mul(row, aw)
                o = Add(m, n)
                i1 = Sin(o)
            }> (c, rows)
            a1 = Tanh(d)
            y = Mul(a1, a)
        }> (s0, xs)
    }""")
    check_model(model, {"s0": numbers(2), "xs": numbers(4, 3, 2), "w": numbers(2)}, ["s0", "xs", "w"])


# Loop


LOOP = """g (int64 n, bool go, float[B,3] h0, float[3] w, float most) => (float[B,3] h, float[T,B,3] ys) {
    h, ys = Loop (n, go, h0) <body = step (int64 k, bool more, float[B,3] a) => (bool on, float[B,3] b, float[B,3] y) {
        size = ReduceSum<keepdims = 0>(a)
        on = Less(size, most)
        m = Mul(a, w)
        number = CastLike(k, a)
        s = Add(m, number)
        b = Sin(s)
        y = Mul(b, a)
    }>
}"""


@pytest.mark.parametrize("most", [100.0, 0.5])  # so that it stops by the number of steps, or by the condition
@pytest.mark.parametrize("count, go", [(5, True), (1, True), (0, True), (5, False)])
@pytest.mark.parametrize("of", [["h"], ["ys"], ["h", "ys"]], ids=str)
def test_a_loop_by_number_and_by_condition(count, go, most, of):
    feeds = {"n": np.array(count), "go": np.array(go), "h0": numbers(2, 3), "w": numbers(3), "most": np.array(most)}
    got, seeds = check_model(parsed(LOOP), feeds, ["h0", "w"], of, twice=bool(count and go))
    given = {n: torch.tensor(feeds[n], requires_grad=True) for n in ("h0", "w")}
    h, ys = given["h0"], [torch.zeros(0, 2, 3, dtype=torch.float64)]
    for k in range(count if go else 0):
        before, h = h, torch.sin(h * given["w"] + k)
        ys.append((h * before)[None])
        if before.sum() >= most:
            break
    results = {"h": h, "ys": torch.cat(ys)}
    wanted = {n: torch.tensor(seeds[f"{n}_grad"]) for n in of}  # without steps, onnxruntime's ys is 0 x 0 x 3
    total = sum((results[n].reshape(g.shape) * g).sum() for n, g in wanted.items()) + 0 * given["h0"].sum()
    grads = torch.autograd.grad(total, list(given.values()), allow_unused=True)
    for (name, tensor), grad in zip(given.items(), grads, strict=True):
        expected = torch.zeros_like(tensor) if grad is None else grad
        np.testing.assert_allclose(got[f"{name}_grad"], expected.numpy(), rtol=2e-4, atol=2e-5)


def test_a_loop_without_states():
    model = parsed("""g (int64 n, float[2,3] x, float[3] w) => (float[T,2,3] ys) {
        ys = Loop (n) <body = step (int64 k, bool go) => (bool on, float[2,3] y) {
            on = Identity(go)
            number = CastLike(k, x)
            a = Mul(x, w)
            b = Add(a, number)
            y = Sin(b)
        }>
    }""")
    model.graph.node[0].input.append("")
    check_model(model, {"n": np.array(3), "x": numbers(2, 3), "w": numbers(3)}, ["x", "w"])


def test_a_loop_in_a_branch_in_a_scan():
    model = parsed("""g (int64 n, float[2] s0, float[T,2] xs, float[2] w) => (float[2] s) {
        zero = Constant<value = float {0.0}>()
        go = Constant<value = int64 {1}>()
        yes = Cast<to = 9>(go)
        s = Scan <num_scan_inputs = 1, body = outer (float[2] a, float[2] x) => (float[2] a1) {
            total = ReduceSum<keepdims = 0>(x)
            positive = Greater(total, zero)
            c = If (positive) <
                then_branch = t () => (float[2] p) {
                    p = Loop (n, yes, a) <body = inner (int64 k, bool more, float[2] i) => (bool on, float[2] i1) {
                        on = Identity(more)
                        m = Mul(i, w)
                        o = Add(m, x)
                        i1 = Tanh(o)
                    }>
                },
                else_branch = e () => (float[2] q) { q = Mul(a, w) }
            >
            a1 = Add(c, x)
        }> (s0, xs)
    }""")
    check_model(model, {"n": np.array(3), "s0": numbers(2), "xs": numbers(4, 2), "w": numbers(2)}, ["s0", "xs", "w"])


# Loops whose states change their shape, or are sequences


GROWING = {
    "a cache": """h, cache = Loop (n, , x, x) <body = step (int64 k, bool go, float[B,3] a, float[S,3] c) =>
            (bool on, float[B,3] b, float[R,3] d) {
            on = Identity(go)
            t = Transpose<perm = [1, 0]>(c)
            scores = MatMul(a, t)
            p = Softmax(scores)
            m = MatMul(p, c)
            s = Mul(m, w)
            b = Tanh(s)
            d = Concat<axis = 0>(c, b)
        }>
        y = Concat<axis = 0>(h, cache)""",
    "slices as well": """h, ys = Loop (n, , x) <body = step (int64 k, bool go, float[S,3] a) =>
            (bool on, float[R,3] b, float[3] y) {
            on = Identity(go)
            m = Mul(a, w)
            s = Sin(m)
            b = Concat<axis = 0>(s, a)
            rows = Constant<value_ints: ints = [0]>()
            y = ReduceSum<keepdims = 0>(s, rows)
        }>
        y = Concat<axis = 0>(h, ys)""",
    "shrinking by a number of its own": """one = Constant<value = int64 {1}>()
        rows = Tile(x, repeats)
        y, left = Loop (n, , rows, w) <body = step (int64 k, bool go, float[S,3] a, float[3] u) =>
            (bool on, float[R,3] b, float[3] v) {
            on = Identity(go)
            start = Unsqueeze(one, axis)
            size = Shape<start = 0, end = 1>(a)
            part = Slice(a, start, size)
            v = Sin(u)
            b = Mul(part, v)
        }>""",
    "a sequence": """none = SequenceEmpty()
        s, last = Loop (n, , none, x) <body = step (int64 k, bool go, seq(float[B,3]) q, float[B,3] a) =>
            (bool on, seq(float[B,3]) r, float[B,3] b) {
            on = Identity(go)
            m = Mul(a, w)
            b = Sin(m)
            r = SequenceInsert(q, b)
        }>
        y = ConcatFromSequence<axis = 0>(s)""",
    "a sequence that steps read": """first = Mul(x, w)
        parts = SequenceConstruct(x, first)
        s = Loop (n, , parts) <body = step (int64 k, bool go, seq(float[B,3]) q) => (bool on, seq(float[B,3]) r) {
            on = Identity(go)
            a = SequenceAt(q, k)
            last = Constant<value = int64 {-1}>()
            b = SequenceAt(q, last)
            c = Mul(a, b)
            r = SequenceInsert(q, c)
        }>
        y = ConcatFromSequence<axis = 0>(s)""",
    "a sequence of other shapes than at the beginning": """parts = SequenceConstruct(x)
        s = Loop (n, , parts) <body = step (int64 k, bool go, seq(float[]) q) => (bool on, seq(float[]) r) {
            on = Identity(go)
            a = SequenceAt(q, k)
            b = Mul(a, w)
            c = Sin(b)
            d = Concat<axis = 0>(c, a)
            r = SequenceInsert(q, d)
        }>
        y = ConcatFromSequence<axis = 0>(s)""",
    "a scan that reads a sequence": """square = Mul(x, x)
        parts = SequenceConstruct(x, square)
        numbers = Constant<value_ints: ints = [1, 0, 1]>()
        columns = Transpose<perm = [1, 0]>(x)
        h, ys = Scan <num_scan_inputs = 2, scan_input_axes = [0, 0], scan_input_directions = [0, 1],
                      scan_output_axes = [1], body = step (float[B,3] a, int64 k, float[B] c) =>
                (float[B,3] b, float[B] d) {
            e = SequenceAt(parts, k)
            f = Mul(a, e)
            b = Sin(f)
            last = Constant<value_ints: ints = [1]>()
            r = ReduceSum<keepdims = 0>(b, last)
            d = Mul(r, c)
        }> (x, numbers, columns)
        m = Mul(h, w)
        y = Concat<axis = 0>(m, ys)""",
    "a sequence from outside": """parts = SplitToSequence(x, one_row)
        y = Loop (n, , w) <body = step (int64 k, bool go, float[3] a) => (bool on, float[P,3] b) {
            on = Identity(go)
            zero = Constant<value = int64 {0}>()
            c = SequenceAt(parts, zero)
            number = CastLike(k, c)
            d = Mul(c, number)
            e = Sin(a)
            b = Add(d, e)
        }>""",
    "a branch that reads a sequence": """parts = SplitToSequence(x, one_row)
        y = Loop (n, , w) <body = step (int64 k, bool go, float[3] a) => (bool on, float[P,3] b) {
            on = Identity(go)
            zero = Constant<value = int64 {0}>()
            first = Equal(k, zero)
            c = If (first) <
                then_branch = t () => (float[P,3] p) { p = SequenceAt(parts, zero) },
                else_branch = e () => (float[P,3] q) { v = SequenceAt(parts, zero)  q = Mul(v, a) }
            >
            b = Mul(c, a)
        }>""",
    "branches that give sequences": """zero = Constant<value = int64 {0}>()
        many = Greater(n, zero)
        parts = If (many) <
            then_branch = t () => (seq(float[P,3]) p) { p = SplitToSequence(x, one_row) },
            else_branch = e () => (seq(float[P,3]) q) { v = Mul(x, w)  q = SequenceConstruct(v, x) }
        >
        m = Mul(x, w)
        more = SequenceInsert(parts, m)
        y = ConcatFromSequence<axis = 0>(more)""",
    "branches that give optionals": """zero = Constant<value = int64 {0}>()
        many = Greater(n, zero)
        maybe = If (many) <
            then_branch = t () => (optional(float[P,3]) p) { v = Mul(x, w)  p = Optional(v) },
            else_branch = e () => (optional(float[P,3]) q) { q = Optional<type = float[P,3]>() }
        >
        there = OptionalHasElement(maybe)
        y = If (there) <
            then_branch = tt () => (float[P,3] r) { a = OptionalGetElement(maybe)  r = Mul(a, x) },
            else_branch = ee () => (float[P,3] s) { s = Mul(w, x) }
        >""",
}  # fmt: skip


MAY_TAKE_NONE = [
    "a cache",
    "a sequence that steps read",
    "branches that give sequences",
    "branches that give optionals",
]


@pytest.mark.parametrize("name, count", [*product(GROWING, [3, 1]), *product(MAY_TAKE_NONE, [0])])
def test_states_that_change_their_shape_and_sequences(name, count):
    model = parsed(f"""g (int64 n, float[B,3] x, float[3] w) => (float[T,U] y) {{
        one_row = Constant<value = int64 {{1}}>()
        axis = Constant<value_ints: ints = [0]>()
        repeats = Constant<value_ints: ints = [3, 1]>()
        {GROWING[name]}
    }}""")
    check_model(model, {"n": np.array(count), "x": numbers(2, 3), "w": numbers(3)}, ["x", "w"])


# What depends on what


INDEPENDENT = """g (int64 n, bool flag, float[3] x, float[3] z, float[T,3] xs) =>
        (float[3] a, float[3] b, float[3] c, float[3] d, float[T,3] e) {
    a, b = Loop (n, , x, z) <body = l (int64 k, bool go, float[3] p, float[3] q) => (bool on, float[3] r, float[3] s) {
        on = Identity(go)
        r = Sin(p)
        s = Mul(q, q)
    }>
    c, unused = If (flag) <
        then_branch = t () => (float[3] tc, float[3] tu) { tc = Sin(x)  tu = Mul(x, z) },
        else_branch = f () => (float[3] fc, float[3] fu) { fc = Exp(x)  fu = Exp(z) }
    >
    d, e = Scan <num_scan_inputs = 1, body = s (float[3] h, float[3] x1) => (float[3] h1, float[3] y1) {
        h1 = Mul(h, x)
        y1 = Mul(x1, z)
    }> (z, xs)
}"""


@pytest.mark.parametrize(
    "of, wrt, others", [("a", "x", "z"), ("b", "z", "x"), ("c", "x", "z"), ("d", "xz", []), ("e", ["z", "xs"], "x")]
)
def test_an_output_that_does_not_depend_on_a_value_gets_no_gradient_from_it(of, wrt, others):
    feeds = {"n": np.array(3), "flag": np.array(True), "x": numbers(3), "z": numbers(3), "xs": numbers(4, 3)}
    check_model(parsed(INDEPENDENT), feeds, list(wrt), [of])
    for other in others:
        with pytest.raises(ValueError, match=f"'{of}' does not depend on '{other}' in a way that has a gradient"):
            onnxgrad.gradient(parsed(INDEPENDENT), other, of)


# Training


def test_an_rnn_trains_as_its_unrolled_twin():
    """As a Scan, and as a Loop that reads each step's input by its number."""
    steps = 5
    shapes = {"wx": (2, 6), "wh": (6, 6), "b": (6,)}
    weights = {n: (RNG.standard_normal(s) / 2).astype(np.float32) for n, s in shapes.items()}
    body = "a = MatMul(x, wx) r = MatMul(h, wh) s = Add(a, r) t = Add(s, b) next = Tanh(t)"
    scan = f"""g (float[B,6] h0, float[{steps},B,2] xs) => (float[B,6] y) {{
        y = Scan <num_scan_inputs = 1, body = step (float[B,6] h, float[B,2] x) => (float[B,6] next) {{
            {body}
        }}> (h0, xs)
    }}"""
    loop = f"""g (float[B,6] h0, float[{steps},B,2] xs) => (float[B,6] y) {{
        n = Constant<value = int64 {{{steps}}}>()
        y = Loop (n, , h0) <body = step (int64 k, bool more, float[B,6] h) => (bool on, float[B,6] next) {{
            on = Identity(more)
            x = Gather(xs, k)
            {body}
        }}>
    }}"""
    unrolled = "\n".join(
        f"i{k} = Constant<value = int64 {{{k}}}>() x{k} = Gather(xs, i{k}) a{k} = MatMul(x{k}, wx) "
        f"r{k} = MatMul(h{k}, wh) s{k} = Add(a{k}, r{k}) t{k} = Add(s{k}, b) "
        f"{'y' if k == steps - 1 else f'h{k + 1}'} = Tanh(t{k})"
        for k in range(steps)
    )
    twin = f"g (float[B,6] h0, float[{steps},B,2] xs) => (float[B,6] y) {{ {unrolled} }}"
    trainers = []
    for text in (scan, loop, twin):
        model = parsed(text)
        model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in weights.items())
        trainers.append(Trainer(model, losses.MSE("y"), optim.Adam(lr=0.02)))
    assert all(sorted(t.parameters) == sorted(weights) for t in trainers)
    found = []
    xs = RNG.standard_normal((steps, 4, 2)).astype(np.float32)
    batch = {"h0": np.zeros((4, 6), np.float32), "xs": xs, "target": np.tile(np.sin(xs.sum(0)), 3)}
    for _ in range(20):
        *mine, other = (t.step(batch) for t in trainers)
        assert mine == pytest.approx([other, other], rel=1e-4)
        found.append(other)
    assert found[-1] < found[0] / 2


def trains_as(text, weights, loss, batches, twin):
    """The losses of a model with these weights are those of PyTorch, where control flow is Python's."""
    model = parsed(text)
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in weights.items())
    trainer = Trainer(model, loss, optim.Adam(lr=0.02))
    assert sorted(trainer.parameters) == sorted(weights)
    mine = {n: torch.tensor(a, requires_grad=True) for n, a in weights.items()}
    optimizer = torch.optim.Adam(mine.values(), lr=0.02)
    found = []
    for batch in batches:
        for tensor in mine.values():  # as Trainer's: what a step does not reach has a gradient of zero
            tensor.grad = torch.zeros_like(tensor)
        expected = twin(mine, {n: torch.tensor(a) for n, a in batch.items()})
        expected.backward()
        optimizer.step()
        found.append(trainer.step(batch))
        assert found[-1] == pytest.approx(expected.item(), rel=1e-5)
    assert found[-1] < found[0]


def weights_of(**shapes):
    rng = np.random.default_rng(11)
    return {n: (rng.standard_normal(shape) / 2).astype(np.float32) for n, shape in shapes.items()}


def test_a_language_model_with_a_cache_that_grows():
    """A Loop over as many tokens as there are, which looks back at all that came before."""
    text = """g (int64[B,T] tokens) => (float[R,11] logits) {
        batch = Shape<start = 0, end = 1>(tokens)
        length = Shape<start = 1, end = 2>(tokens)
        n = Squeeze(length)
        width = Constant<value_ints: ints = [6]>()
        size = Concat<axis = 0>(batch, width)
        h0 = ConstantOfShape(size)
        one = Constant<value_ints: ints = [1]>()
        first = Unsqueeze(h0, one)
        h, cache, hs = Loop (n, , h0, first) <body = step (int64 k, bool go, float[B,6] a, float[B,S,6] c) =>
            (bool on, float[B,6] b, float[B,R,6] d, float[B,6] out) {
            on = Identity(go)
            token = Gather<axis = 1>(tokens, k)
            e = Gather(table, token)
            q = MatMul(a, wq)
            last = Constant<value_ints: ints = [2]>()
            column = Unsqueeze(q, last)
            scores = MatMul(c, column)
            p = Softmax<axis = 1>(scores)
            weighted = Mul(c, p)
            seen = ReduceSum<keepdims = 0>(weighted, one)
            r = MatMul(seen, wr)
            s = Add(e, r)
            b = Tanh(s)
            row = Unsqueeze(b, one)
            d = Concat<axis = 1>(c, row)
            out = Identity(b)
        }>
        flat = Constant<value_ints: ints = [-1, 6]>()
        rows = Reshape(hs, flat)
        logits = MatMul(rows, head)
    }"""

    def twin(w, batch):
        tokens = batch["tokens"]
        h = torch.zeros(len(tokens), 6)
        cache, hs = [h], []
        for k in range(tokens.shape[1]):
            c = torch.stack(cache, 1)
            p = torch.softmax(c @ (h @ w["wq"])[:, :, None], 1)
            h = torch.tanh(w["table"][tokens[:, k]] + (c * p).sum(1) @ w["wr"])
            cache.append(h)
            hs.append(h)
        return torch.nn.functional.cross_entropy(torch.cat(hs) @ w["head"], batch["target"])

    rng = np.random.default_rng(0)
    batches = []
    for k in range(8):
        tokens = (rng.integers(0, 11, (3, 1)) + np.arange(4 + k % 3 + 1)) % 11
        batches.append({"tokens": tokens[:, :-1], "target": tokens[:, 1:].T.ravel()})
    weights = weights_of(table=(11, 6), wq=(6, 6), wr=(6, 6), head=(6, 11))
    trains_as(text, weights, losses.CrossEntropy("logits"), batches, twin)


def test_a_tree_of_ifs():
    """Two decisions, each about what the first layers computed; every leaf has weights of its own."""

    def leaf(k):
        return f"m{k} = MatMul(h, leaf{k})  y{k} = Tanh(m{k})"

    def decision(name, condition, left, right, result):
        return f"""{name}_sum = ReduceSum<keepdims = 0>({condition})
            {name}_yes = Greater({name}_sum, zero)
            {result} = If ({name}_yes) <
                then_branch = {name}_t () => (float[B,2] {left[1]}) {{ {left[0]} }},
                else_branch = {name}_e () => (float[B,2] {right[1]}) {{ {right[0]} }}
            >"""

    left = decision("left", "h", (leaf(0), "y0"), (leaf(1), "y1"), "yl")
    right = decision("right", "h", (leaf(2), "y2"), (leaf(3), "y3"), "yr")
    text = f"""g (float[B,3] x) => (float[B,2] y) {{
        zero = Constant<value = float {{0.0}}>()
        a = MatMul(x, w)
        h = Sin(a)
        {decision("root", "x", (left, "yl"), (right, "yr"), "y")}
    }}"""

    def twin(w, batch):
        h = torch.sin(batch["x"] @ w["w"])
        k = (0 if batch["x"].sum() > 0 else 2) + (0 if h.sum() > 0 else 1)
        taken.add(k)
        return torch.nn.functional.mse_loss(torch.tanh(h @ w[f"leaf{k}"]), batch["target"])

    taken = set()
    rng = np.random.default_rng(1)
    xs = rng.standard_normal((16, 5, 3)).astype(np.float32)
    batches = [{"x": x, "target": np.tanh(x[:, :2])} for _ in range(2) for x in xs]
    weights = weights_of(w=(3, 6), leaf0=(6, 2), leaf1=(6, 2), leaf2=(6, 2), leaf3=(6, 2))
    trains_as(text, weights, losses.MSE("y"), [*batches, batches[0]], twin)
    assert taken == {0, 1, 2, 3}


def test_a_beam_of_scans():
    """A Scan over beams of a Scan over steps, whose results are weighed against each other."""
    text = """g (float[K,B,4] beams, float[T,B,3] xs) => (float[B,4] y) {
        ends, scores = Scan <num_scan_inputs = 1, body = beam (float[B,4] h0) => (float[B,4] end, float[B,1] score) {
            end = Scan <num_scan_inputs = 1, body = step (float[B,4] h, float[B,3] x) => (float[B,4] h1) {
                a = MatMul(x, wx)
                r = MatMul(h, wh)
                s = Add(a, r)
                h1 = Tanh(s)
            }> (h0, xs)
            score = MatMul(end, ws)
        }> (beams)
        p = Softmax<axis = 0>(scores)
        m = Mul(p, ends)
        first = Constant<value_ints: ints = [0]>()
        y = ReduceSum<keepdims = 0>(m, first)
    }"""

    def twin(w, batch):
        ends = []
        for beam in batch["beams"]:
            h = beam
            for x in batch["xs"]:
                h = torch.tanh(x @ w["wx"] + h @ w["wh"])
            ends.append(h)
        ends = torch.stack(ends)
        y = (torch.softmax(ends @ w["ws"], 0) * ends).sum(0)
        return torch.nn.functional.mse_loss(y, batch["target"])

    rng = np.random.default_rng(2)
    batch = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in (("beams", (3, 2, 4)), ("xs", (5, 2, 3)))}
    batch["target"] = np.tanh(batch["beams"][0] / 2)
    weights = weights_of(wx=(3, 4), wh=(4, 4), ws=(4, 1))
    trains_as(text, weights, losses.MSE("y"), [batch] * 12, twin)
