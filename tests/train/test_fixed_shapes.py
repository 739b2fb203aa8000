"""Dimensions of a graph become numbers."""

import onnx

from onnxgrad.train.fixed_shapes import fix_shapes


def test_names_and_expressions_of_names_become_numbers():
    model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["" : 20]>
    g (float[batch, s, 4] x, float[?, 2] z, float[4, 4] w) => (float[batch, s] y)
    <float[batch, s, 4] a, float[m, other, z_dim_0] b> {
        a = Exp(x)
        b = Exp(a)
        y = Neg(b)
    }""")
    model.graph.value_info[1].type.tensor_type.shape.dim[0].dim_param = "2*batch + (s - 1)//2"
    fix_shapes(model.graph, {"x": (8, 5, 4), "z": (3, 2)})
    found = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in (*model.graph.input, *model.graph.value_info, *model.graph.output)
    }
    assert found == {
        "x": [8, 5, 4], "z": [3, 2], "w": [4, 4], "a": [8, 5, 4], "b": [18, "other", 3], "y": [8, 5],
    }  # fmt: skip
