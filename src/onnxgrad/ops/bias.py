"""BiasGrad: the gradient of a bias, on GPUs."""

from onnxgrad.op import op
from onnxgrad.schema import OWN, Dim, Known
from onnxgrad.tensor_types import Array, T, accumulator


def _shape_rule(dY: Known) -> tuple[Dim, ...] | None:
    if dY.dims is not None and len(dY.dims) == 0:
        raise ValueError("dY is a single number, expected at least one dimension")
    return None if dY.dims is None else dY.dims[-1:]


@op("BiasGrad", domain=OWN, outputs="dB", shape=_shape_rule)
def bias_grad(dY: T) -> T:
    """Gradient of a vector that was added along the last axis: the sum over all others.

    float16 and bfloat16 are added up in float32 and rounded once. onnxruntime has ReduceSum for it, which takes several
    times as long on a GPU.
    """
    rows = dY.reshape(-1, dY.shape[-1]) if dY.size else dY.reshape(0, dY.shape[-1])
    total: Array = rows.sum(0, dtype=accumulator(dY.dtype))
    return total.astype(dY.dtype)
