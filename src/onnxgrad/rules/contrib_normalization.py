"""Normalizations of onnxruntime's own: they skip the mean, or add a residual first."""

from onnx import TypeProto, defs, helper
from onnx.defs import OpSchema

from onnxgrad.graph.broadcast import sum_to_shape
from onnxgrad.graph.cast import in_type, wide_type
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import vjp
from onnxgrad.rules.normalization import Layer, gradients_of_layer, statistics
from onnxgrad.schema import MICROSOFT

FLOATS = [f"tensor({t})" for t in ("float16", "bfloat16", "float", "double")]


def _register(name: str, domain: str, inputs: str, outputs: str, full: set[str], **attributes: float) -> None:
    """Tells onnx of an operator of onnxruntime: nothing can be inferred behind one that onnx does not know.

    Inputs and outputs in `full` have the shape of the first input; the others are statistics: its last axes are 1.
    A question mark is behind names that may be left out.
    """
    if defs.has(name, domain):
        return

    def formal(text: str, variable: str) -> OpSchema.FormalParameter:
        option = OpSchema.FormalParameterOption
        return OpSchema.FormalParameter(
            text.rstrip("?"), variable, param_option=option.Optional if text.endswith("?") else option.Single
        )

    def infer(context: object) -> None:
        given = context.get_input_type(0)  # type: ignore[attr-defined]
        if given is None:
            return
        for k, output in enumerate(outputs.split()[: context.get_num_outputs()]):  # type: ignore[attr-defined]
            inferred = TypeProto()
            inferred.CopyFrom(given)
            if output.rstrip("?") not in full:
                axis = context.get_attribute("axis")  # type: ignore[attr-defined]
                _make_statistic(inferred, -1 if axis is None else helper.get_attribute_value(axis))
            context.set_output_type(k, inferred)  # type: ignore[attr-defined]

    schema = OpSchema(
        name,
        domain,
        1,
        "",
        inputs=[formal(i, "T") for i in inputs.split()],
        outputs=[formal(o, "T" if o.rstrip("?") in full else "U") for o in outputs.split()],
        type_constraints=[("T", FLOATS, ""), ("U", FLOATS, "")],
        attributes=[OpSchema.Attribute(k, helper.make_attribute(k, v)) for k, v in attributes.items()],
    )
    schema.set_type_and_shape_inference_function(infer)
    defs.register_schema(schema)


def _make_statistic(inferred: TypeProto, axis: int) -> None:
    """The type of a mean or deviation of what has the type given: float32 at least."""
    tensor = inferred.tensor_type
    if tensor.elem_type:
        tensor.elem_type = 1
    if tensor.HasField("shape"):
        dims = list(tensor.shape.dim)
        for dim in dims[axis if axis < 0 else axis - len(dims) :]:
            dim.Clear()
            dim.dim_value = 1


_register("SimplifiedLayerNormalization", "", "X scale", "Y inv_std_var?", {"Y"}, axis=-1, epsilon=1e-5, stash_type=1)
RESIDUAL = "output mean? inv_std_var? input_skip_bias_sum?"
FULL = {"output", "input_skip_bias_sum"}
_register("SkipLayerNormalization", MICROSOFT, "input skip gamma beta? bias?", RESIDUAL, FULL, epsilon=1e-5)
_register("SkipSimplifiedLayerNormalization", MICROSOFT, "input skip gamma bias?", RESIDUAL, FULL, epsilon=1e-5)


def _simplified(n: NodeView) -> Layer:
    kept = n.stash_type == wide_type(n.X).value
    return Layer(n, n.scale, mean=None, inv=n.inv_std_var if kept else None, centred=False)


vjp(
    "SimplifiedLayerNormalization",
    outputs=("Y", "inv_std_var"),
    X=lambda g, n: _simplified(n).of_input(g, None, n.grad(1)),
    scale=lambda g, n: _simplified(n).of_scale(g),
)


class Residual:
    """What the gradients of a normalization of input + skip + bias share."""

    def __init__(self, n: NodeView, *, centred: bool) -> None:
        self.n = n
        total = n.input + n.skip
        total = total if n.bias is None else total + n.bias
        axes = [n.input.rank - 1]
        mean, inv = statistics(in_type(total, wide_type(total)), axes, n.epsilon, centred=centred)
        self._given = total, n.gamma, mean, inv, -1

    def of_layer(self, g: Tensor) -> tuple[Tensor, ...]:
        """The gradients of the sum, of the scale and of the bias."""
        found = gradients_of_layer(g, *self._given)
        if found is None:
            raise ValueError("gamma has more than one dimension, which onnxruntime does not allow")
        return found

    def of_sum(self, g: Tensor | None) -> Tensor | None:
        """The gradient of the sum, which is an output too."""
        n, outer = self.n, self.n.grad(3)
        for k in (1, 2):
            if n.grad(k) is not None:
                raise ValueError(
                    "the gradient of mean or inv_std_var is not written, since onnxruntime may leave them unset"
                )
        if g is None:
            return outer
        inner = in_type(self.of_layer(g)[0], n.input.dtype)
        return inner if outer is None else inner + outer

    def of_part(self, g: Tensor | None, part: Tensor) -> Tensor | None:
        """The gradient of a term of the sum, which may have been broadcast."""
        total = self.of_sum(g)
        return None if total is None else sum_to_shape(total, part)

    def of_gamma(self, g: Tensor | None) -> Tensor | None:
        """The gradient of the scale."""
        return None if g is None else in_type(self.of_layer(g)[1], self.n.gamma.dtype)

    def of_beta(self, g: Tensor | None) -> Tensor | None:
        """The gradient of what is added to the result."""
        return None if g is None else in_type(self.of_layer(g)[2], self.n.beta.dtype)


def _skip(n: NodeView) -> Residual:
    return Residual(n, centred=True)


def _skip_simplified(n: NodeView) -> Residual:
    return Residual(n, centred=False)


vjp(
    "SkipLayerNormalization",
    domain=MICROSOFT,
    outputs=tuple(RESIDUAL.replace("?", "").split()),
    input=lambda g, n: _skip(n).of_sum(g),
    skip=lambda g, n: _skip(n).of_part(g, n.skip),
    gamma=lambda g, n: _skip(n).of_gamma(g),
    beta=lambda g, n: _skip(n).of_beta(g),
    bias=lambda g, n: _skip(n).of_part(g, n.bias),
)
vjp(
    "SkipSimplifiedLayerNormalization",
    domain=MICROSOFT,
    outputs=tuple(RESIDUAL.replace("?", "").split()),
    input=lambda g, n: _skip_simplified(n).of_sum(g),
    skip=lambda g, n: _skip_simplified(n).of_part(g, n.skip),
    gamma=lambda g, n: _skip_simplified(n).of_gamma(g),
    bias=lambda g, n: _skip_simplified(n).of_part(g, n.bias),
)
