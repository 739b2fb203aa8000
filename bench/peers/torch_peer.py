"""PyTorch on the CPU: for each operator the backward that its autograd runs."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from bench.clock import timed
from bench.peers import TORCH, Array, Call, CannotRunError, HereSide, Inputs, OutputType

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]


class TorchPeer:
    """aten's backward functions, and torch.nn.GRU."""

    name = TORCH

    def __init__(self, threads: int) -> None:
        if torch is not None:
            torch.set_num_threads(threads)

    def version(self) -> str:
        if torch is None:
            raise CannotRunError("PyTorch is not installed: make .venv/ready gets it")
        return str(torch.__version__)

    def prepare(
        self, operator: str, inputs: Inputs, attributes: Mapping[str, Any], outputs: Sequence[OutputType]
    ) -> tuple[HereSide, list[Array | None]]:
        self.version()
        if operator not in FORMS:
            raise CannotRunError(f"PyTorch has nothing like {operator} in Python")
        call = FORMS[operator](**inputs, **attributes)
        result = call()
        results = list(result) if isinstance(result, tuple) else [result]
        if operator == "gru_grad":
            results = _onnx_gradients(*results)
        elif operator == "gru_training":
            states, last = results
            results = [states[:, None], last, None]
        if not attributes.get("linear_before_reset", 1):
            results = [None] * len(results)  # another function: torch resets after its product only
        return HereSide(call), [None if t is None else _to_numpy(t) for t in results]

    def close(self) -> None:
        pass


def _to_torch(array: Array) -> Any:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _to_numpy(tensor: Any) -> Array:
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def gather_grad(shape: Array, indices: Array, dY: Array, axis: int) -> Call:
    """index_select's backward, or embedding's where it applies and is the faster one."""
    where, gradient, dims = _to_torch(indices), _to_torch(dY), shape.tolist()

    def index_add() -> Any:
        return torch.zeros(dims, dtype=gradient.dtype).index_add_(axis, where, gradient)

    def embedding() -> Any:
        return torch.ops.aten.embedding_dense_backward(gradient, where, dims[0], -1, False)

    if axis != 0:
        return index_add
    return min(index_add, embedding, key=lambda form: statistics.median(timed(form, 15)))


def gather_elements_grad(dY: Array, shape: Array, indices: Array, axis: int) -> Call:
    where, gradient, dims = _to_torch(indices), _to_torch(dY), shape.tolist()
    return lambda: torch.zeros(dims, dtype=gradient.dtype).scatter_add_(axis, where, gradient)


def slice_grad(dY: Array, shape: Array, starts: Array, ends: Array, axes: Array, steps: Array) -> Call:
    """slice's backward; where x[::-1] is meant, which torch spells flip, that of flip."""
    gradient, dims, chosen = _to_torch(dY), shape.tolist(), axes.tolist()
    if (steps == -1).all() and dY.shape == tuple(dims):
        return lambda: torch.flip(gradient, chosen)
    if len(chosen) > 1:
        raise CannotRunError("PyTorch slices one axis at a time")
    start, end, step = int(starts[0]), int(ends[0]), int(steps[0])
    return lambda: torch.ops.aten.slice_backward(gradient, dims, chosen[0], start, end, step)


def _gates_in_torch_order(array: Array, axis: int) -> Array:
    """torch has r, z, h where ONNX has z, r, h."""
    z, r, h = np.split(array, 3, axis=axis)
    return np.concatenate([r, z, h], axis=axis)


def _gru(X: Array, W: Array, R: Array, B: Array, Ht0: Array, hidden_size: int) -> tuple[Any, Any, Any]:
    gru = torch.nn.GRU(X.shape[2], hidden_size, dtype=_to_torch(X).dtype).train()
    Wb, Rb = np.split(B[0], 2)
    with torch.no_grad():
        for parameter, value in (
            (gru.weight_ih_l0, W[0]),
            (gru.weight_hh_l0, R[0]),
            (gru.bias_ih_l0, Wb),
            (gru.bias_hh_l0, Rb),
        ):
            parameter.copy_(_to_torch(_gates_in_torch_order(value, 0)))
    return gru, _to_torch(X).clone().requires_grad_(), _to_torch(Ht0).clone().requires_grad_()


def gru_training(
    X: Array, W: Array, R: Array, B: Array, SL: None, Ht0: Array, hidden_size: int, linear_before_reset: int
) -> Call:
    """The forward pass that keeps what a backward pass needs."""
    gru, x, first = _gru(X, W, R, B, Ht0, hidden_size)
    return lambda: gru(x, first)


def gru_grad(
    X: Array,
    W: Array,
    R: Array,
    B: Array,
    SL: None,
    Ht0: Array,
    HAll: Array,
    ZRH: Array,
    dHAll: Array,
    dHFinal: Array,
    hidden_size: int,
    linear_before_reset: int,
) -> Call:
    """The backward pass alone, over a graph that one forward pass has left."""
    gru, x, first = _gru(X, W, R, B, Ht0, hidden_size)
    results = gru(x, first)
    leaves = (x, first, gru.weight_ih_l0, gru.weight_hh_l0, gru.bias_ih_l0, gru.bias_hh_l0)
    gradients = (_to_torch(dHAll[:, 0]), _to_torch(dHFinal))
    return lambda: torch.autograd.grad(results, leaves, gradients, retain_graph=True)


def _onnx_gradients(dx: Any, dfirst: Any, dw: Any, dr: Any, dwb: Any, drb: Any) -> list[Any]:
    def gates(tensor: Any) -> Any:
        r, z, h = tensor.chunk(3)
        return torch.cat([z, r, h])[None]

    return [dx, gates(dw), gates(dr), torch.cat([gates(dwb), gates(drb)], 1), dfirst]


def layer_normalization_grad(Y_grad: Array, X: Array, scale: Array, mean: Array, inv_std_var: Array, axis: int) -> Call:
    given = [_to_torch(a) for a in (Y_grad, X)]
    statistics, weight = [_to_torch(a) for a in (mean, inv_std_var)], _to_torch(scale)
    if X.dtype == np.float64:
        statistics = [s.double() for s in statistics]
    elif X.dtype.itemsize == 2:
        raise CannotRunError("PyTorch wants statistics of half numbers, which it computes itself, in their own type")
    backward, dims = torch.ops.aten.native_layer_norm_backward, list(scale.shape)
    return lambda: backward(*given, dims, *statistics, weight, weight, [True, True, True])


def batch_normalization_grad(
    dY: Array, X: Array, scale: Array, mean: Array | None, inv_std: Array | None, epsilon: float
) -> Call:
    """With statistics from the forward pass, which it always has."""
    over = tuple(k for k in range(X.ndim) if k != 1)
    x = X.astype(np.float64)
    found = x.mean(over), 1 / np.sqrt(x.var(over) + epsilon)
    kind = np.float64 if X.dtype == np.float64 else np.float32
    measured = [_to_torch(a.astype(kind)) for a in (found if mean is None or inv_std is None else (mean, inv_std))]
    backward, given = torch.ops.aten.native_batch_norm_backward, [_to_torch(a) for a in (dY, X, scale)]
    return lambda: backward(*given, None, None, *measured, True, epsilon, [True, True, True])


def permuted_mat_mul(
    A: Array,
    B: Array,
    bias: Array | None,
    alpha: float = 1.0,
    permA: list[int] | None = None,
    permB: list[int] | None = None,
) -> Call:
    """As torch is used: views of permuted tensors, and a factor that is one more operation."""
    a, b = (t if perm is None else t.permute(perm) for t, perm in ((_to_torch(A), permA), (_to_torch(B), permB)))
    if bias is not None:
        added = _to_torch(bias)
        return lambda: torch.addmm(added, a, b)
    return (lambda: torch.matmul(a, b)) if alpha == 1 else (lambda: torch.matmul(a, b) * alpha)


FORMS = {
    "permuted_mat_mul": permuted_mat_mul,
    "layer_normalization_grad": layer_normalization_grad,
    "batch_normalization_grad": batch_normalization_grad,
    "gather_grad": gather_grad,
    "gather_elements_grad": gather_elements_grad,
    "slice_grad": slice_grad,
    "gru_training": gru_training,
    "gru_grad": gru_grad,
}
