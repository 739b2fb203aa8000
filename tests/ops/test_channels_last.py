"""Images whose channels come last against PyTorch, definition and ONNX function; on the CPU, the definition alone."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tests.checks import (
    BFLOAT16,
    DEVICE,
    FLOATS,
    PRECISION,
    Expected,
    as_tuple,
    call,
    check,
    in_float64,
    raises,
    result_dtypes,
    with_storage,
)
from tests.expected import exact, pools, products
from tests.functions.models import FLOATS as IN_ONNXRUNTIME
from tests.functions.models import check_functions
from tests.node_cases import NodeCase, without
from tests.ops import test_batch_normalization
from torch.nn import functional

from onnxgrad.ops.batch_normalization import batch_norm_internal, batch_normalization_grad
from onnxgrad.ops.channels_last import (
    nhwc_batch_norm,
    nhwc_batch_norm_grad,
    nhwc_conv_grad,
    nhwc_convolution,
    nhwc_max_pool,
    nhwc_max_pool_grad,
)

F64 = np.float64
# Of X, of W, pads, strides, dilations and group.
CONVOLUTIONS = {
    "three by three": ((2, 5, 7, 6), (9, 6, 3, 3), [1, 1, 1, 1], [1, 1], [1, 1], 1),
    "three by three, back": ((2, 5, 7, 8), (16, 8, 3, 3), [1, 1, 1, 1], [1, 1], [1, 1], 1),
    "no pads and two, back": ((1, 5, 4, 16), (8, 16, 3, 3), [0, 2, 0, 2], [1, 1], [1, 1], 1),
    "many outputs, back": ((1, 3, 4, 8), (72, 8, 3, 3), [1, 1, 1, 1], [1, 1], [1, 1], 1),
    "pads on one side": ((2, 5, 7, 8), (8, 8, 3, 3), [0, 1, 2, 1], [1, 1], [1, 1], 1),
    "three pads": ((2, 5, 7, 8), (8, 8, 3, 3), [3, 3, 3, 3], [1, 1], [1, 1], 1),
    "dilations": ((2, 5, 7, 8), (8, 8, 3, 3), [2, 2, 2, 2], [1, 1], [2, 2], 1),
    "three by three with a stride": ((2, 5, 7, 8), (8, 8, 3, 3), [1, 1, 1, 1], [2, 2], [1, 1], 1),
    "pointwise": ((2, 5, 7, 6), (9, 6, 1, 1), [0, 0, 0, 0], [1, 1], [1, 1], 1),
    "pointwise with a stride": ((2, 5, 7, 6), (9, 6, 1, 1), [0, 0, 0, 0], [2, 2], [1, 1], 1),
    "pads on one side, groups": ((2, 6, 7, 6), (8, 3, 3, 2), [1, 0, 0, 2], [2, 1], [1, 2], 2),
    "depthwise": ((1, 6, 7, 6), (6, 1, 3, 3), [1, 1, 1, 1], [2, 2], [1, 1], 6),
}
POOLS = {
    "three by three": ((2, 9, 11, 5), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "many channels": ((2, 8, 7, 70), {"kernel_shape": [2, 2], "strides": [2, 2]}),
    "dilations": ((1, 9, 8, 3), {"kernel_shape": [2, 3], "dilations": [3, 2], "pads": [1, 0, 0, 1]}),
    "a large window": ((1, 7, 9, 3), {"kernel_shape": [5, 4], "strides": [2, 2], "pads": [2, 2, 2, 1]}),
    "one window more": ((1, 6, 8, 3), {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
}
IMAGES = [(3, 4, 5, 7), (2, 17, 19, 70), (1, 1, 2, 130), (0, 3, 4, 5)]


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The kernel against the definition; there is none for the CPU."""
    return op.definition(*args, **kwargs) if DEVICE == "cpu" else check(op, *args, **kwargs)


def convolution(case: str, dtype: Any = np.float32) -> tuple[list[np.ndarray], dict[str, Any]]:
    """dY, X, W and B, and the attributes."""
    x, w, pads, strides, dilations, group = CONVOLUTIONS[case]
    rng = np.random.default_rng(0)
    X, W, B = (rng.standard_normal(shape).astype(dtype) for shape in (x, w, w[:1]))
    how = {"pads": pads, "strides": strides, "dilations": dilations, "group": group}
    dY = rng.standard_normal(nhwc_convolution.definition(X, W, **how).shape).astype(dtype)
    return [dY, X, W, B], how


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.tensor(array.astype(F64), requires_grad=True)


def close(actual: np.ndarray, wanted: torch.Tensor, dtype: Any) -> None:
    scale = float(wanted.detach().abs().max()) if wanted.numel() else 1
    unit = float(PRECISION[np.dtype(dtype)].stored or PRECISION[np.dtype(dtype)].unit)
    np.testing.assert_allclose(actual.astype(F64), wanted.detach().numpy(), rtol=0, atol=64 * unit * scale)


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=str)
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution_as_in_torch(case, dtype):
    (dY, X, W, B), how = convolution(case, dtype)
    x, w, b = tensor(X), tensor(W), tensor(B)
    top, left, bottom, right = how["pads"]
    image = functional.pad(x.permute(0, 3, 1, 2), (left, right, top, bottom))
    settings = {"stride": how["strides"], "dilation": how["dilations"], "groups": how["group"]}
    y = functional.conv2d(image, w, b, **settings).permute(0, 2, 3, 1)
    y.backward(torch.tensor(dY.astype(F64)))
    close(run(nhwc_convolution, X, W, B, **how), y, dtype)
    run(nhwc_convolution, X, W, **how)
    for got, source in zip(run(nhwc_conv_grad, dY, X, W, **how), (x, w, b), strict=True):
        close(got, source.grad, dtype)


@pytest.mark.parametrize("outputs", [["dX"], ["dW"], ["dB"]], ids=str)
@pytest.mark.parametrize("case", ["three by three", "pointwise", "pads on one side, groups"])
def test_some_gradients_of_a_convolution(case, outputs):
    (dY, X, W, _), how = convolution(case)
    run(nhwc_conv_grad, dY, X, W, **how, outputs=outputs)


@pytest.mark.skipif(DEVICE == "cpu", reason="speaks of CUDA alone")
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=str)
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_gradients_that_are_convolutions_of_their_own(case, dtype):
    """Of half types, where cuDNN is faster that way."""
    from onnxgrad.cuda import channels_last

    (dY, X, W, _), how = convolution(case, dtype)
    with mock.patch.object(channels_last, "_flipped", wraps=channels_last._flipped) as flipped:
        call(nhwc_conv_grad, dY, X, W, **how, outputs=["dX"])
        assert flipped.called == (case.endswith("back") and dtype == BFLOAT16)


def test_convolution_of_nothing():
    X, W = np.ones((0, 4, 4, 3), np.float32), np.ones((5, 3, 3, 3), np.float32)
    assert run(nhwc_convolution, X, W).shape == (0, 2, 2, 5)
    dX, dW, dB = run(nhwc_conv_grad, np.ones((0, 2, 2, 5), np.float32), X, W)
    assert dX.shape == X.shape and not dW.any() and not dB.any()


def normalization(shape: tuple[int, ...], dtype: Any = np.float32, added: bool = True, parameter: Any = np.float32):
    """Inputs of NhwcBatchNorm, and a gradient."""
    rng = np.random.default_rng(0)
    X, Z, dY = ((rng.standard_normal(shape) + 0.5).astype(dtype) for _ in range(3))
    scale, B, mean, variance = (rng.uniform(0.5, 2, shape[3]).astype(parameter) for _ in range(4))
    return [X, scale, B, mean, variance, Z if added else None], dY


@pytest.mark.parametrize("activation", ["", "Relu"])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=str)
@pytest.mark.parametrize("shape", IMAGES[:3], ids=str)
def test_normalization_as_in_torch(shape, dtype, added, activation):
    inputs, dY = normalization(shape, dtype, added)
    X, scale, B, mean, variance, Z = inputs
    x, s, b, z = tensor(X), tensor(scale), tensor(B), tensor(X if Z is None else Z)
    running = [torch.tensor(mean.astype(F64)), torch.tensor(variance.astype(F64))]
    y = functional.batch_norm(x.permute(0, 3, 1, 2), *running, s, b, True, 0.25, 0.01).permute(0, 2, 3, 1)
    y = y if Z is None else y + z
    y = functional.relu(y) if activation else y
    how = {"epsilon": 0.01, "momentum": 0.75, "activation": activation, "sample_variance": 1}
    Y, *statistics, saved_mean, inv_std = run(nhwc_batch_norm, *inputs, **how)
    close(Y, y, dtype)
    for got, wanted in zip(statistics, running, strict=True):
        close(got, wanted, np.float32)
    masked = np.where(Y > 0, dY, 0) if activation else dY  # where a number near 0 rounds to, decides its sign
    y.backward(torch.tensor(masked.astype(F64)))
    given = [dY, X, scale, saved_mean, inv_std, *(([Y] if added else [None, B]) if activation else [])]
    dX, dscale, dB, dZ = run(nhwc_batch_norm_grad, *given)
    for got, source in ((dscale, s), (dB, b)):
        close(got, source.grad, np.float32 if dtype == np.float32 else dtype)
    close(dX, x.grad, dtype)
    if added:
        close(dZ, z.grad, dtype)
        half = (dY / 2).astype(dtype)
        parts = [half, *given[1:], *[None] * (7 - len(given)), (dY.astype(F64) - half.astype(F64)).astype(dtype)]
        close(run(nhwc_batch_norm_grad, *parts)[0], x.grad, dtype)
        run(nhwc_batch_norm_grad, *parts, outputs=["dX", "dB"])
    for name in ("dX", "dscale", "dZ"):
        run(nhwc_batch_norm_grad, *given, outputs=[name])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_normalization_of_every_type(dtype):
    inputs, dY = normalization((3, 4, 5, 7), dtype, parameter=dtype)
    Y, *_, mean, inv_std = run(nhwc_batch_norm, *inputs, activation="Relu")
    run(nhwc_batch_norm_grad, dY, inputs[0], inputs[1], mean, inv_std, Y)


def test_normalization_of_nothing():
    inputs, _ = normalization(IMAGES[3])
    Y, *statistics = call(nhwc_batch_norm, *inputs) if DEVICE != "cpu" else nhwc_batch_norm.definition(*inputs)
    assert Y.shape == IMAGES[3] and all(s.shape == (5,) for s in statistics)


def test_a_mean_far_from_zero_costs_no_digits():
    (X, *others, _), _ = normalization((4, 5, 6, 7))
    far = X + np.float32(4096)
    near = (far.astype(F64) - 4096).astype(np.float32)
    ones = [run(nhwc_batch_norm, x, *others)[0] for x in (far, near)]
    np.testing.assert_allclose(*ones, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=str)
@pytest.mark.parametrize("case", POOLS)
def test_pool_as_in_torch(case, dtype):
    shape, how = POOLS[case]
    rng = np.random.default_rng(0)
    X = rng.permutation(np.arange(np.prod(shape)) % 251).reshape(shape).astype(dtype)  # which bfloat16 holds
    Y = run(nhwc_max_pool, X, **how)
    dY = rng.standard_normal(Y.shape).astype(dtype)
    dX = run(nhwc_max_pool_grad, dY, X, **how)
    x = tensor(X)
    top, left, bottom, right = how.get("pads", [0] * 4)
    image = functional.pad(x.permute(0, 3, 1, 2), (left, right, top, bottom), value=-np.inf)
    settings = [how.get("strides", 1), 0, how.get("dilations", 1), bool(how.get("ceil_mode", 0))]
    y = functional.max_pool2d(image, how["kernel_shape"], *settings).permute(0, 2, 3, 1)
    y.backward(torch.tensor(dY.astype(F64)))
    np.testing.assert_array_equal(Y.astype(F64), y.detach().numpy())
    close(dX, x.grad, dtype)


def test_refused():
    (dY, X, W, B), how = convolution("three by three")
    with raises(ValueError, "NhwcConvolution: X has shape [5, 7, 6], expected [images, rows, columns, channels]"):
        nhwc_convolution.definition(X[0], W)
    with raises(ValueError, "NhwcConvolution: B has shape [4], expected [9]"):
        nhwc_convolution.definition(X, W, B[:4])
    with raises(
        ValueError, "NhwcConvGrad: dY has shape [1, 5, 7, 9], expected [2, 5, 7, 9], that of NhwcConvolution of X and W"
    ):
        nhwc_conv_grad.definition(dY[:1], X, W, **how)
    inputs, _ = normalization((3, 4, 5, 7))
    with raises(ValueError, "NhwcBatchNorm: activation is 'Tanh', expected one of '', 'Relu'"):
        nhwc_batch_norm.definition(*inputs, activation="Tanh")
    with raises(ValueError, "NhwcBatchNorm: Z has shape [1, 4, 5, 7], expected [3, 4, 5, 7], as X has"):
        nhwc_batch_norm.definition(*inputs[:5], inputs[5][:1])
    with raises(ValueError, "NhwcBatchNorm: B has shape [3], expected [7], one number for each channel of X"):
        nhwc_batch_norm.definition(*inputs[:2], inputs[2][:3], *inputs[3:])
    with raises(ValueError, "NhwcMaxPool: kernel_shape is [3], expected 2 numbers"):
        nhwc_max_pool.definition(X, kernel_shape=[3])


@pytest.mark.skipif(DEVICE != "cpu", reason="speaks of the CPU alone")
def test_there_is_no_kernel_for_the_cpu():
    (_, X, W, _), _ = convolution("pointwise")
    with raises(TypeError, "NhwcConvolution: has no kernel for the CPU, expected arrays on a GPU"):
        nhwc_convolution(X, W)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("case", ["three by three", "pointwise", "depthwise"])
def test_functions_of_convolutions(case, dtype):
    (dY, X, W, B), how = convolution(case, dtype)
    check_functions(nhwc_convolution, ((X, W, B), how), ((X, W, None), how))
    check_functions(nhwc_conv_grad, ((dY, X, W), how))


@pytest.mark.parametrize("dtype", IN_ONNXRUNTIME)
def test_functions_of_normalization(dtype):
    (*inputs, Z), dY = normalization((3, 4, 5, 7), dtype, parameter=dtype)
    ways = ((*inputs, Z), {"activation": "Relu"}), ((*inputs, None), {"sample_variance": 1}), ((*inputs, None), {})
    check_functions(nhwc_batch_norm, *ways)
    Y, *_, mean, inv_std = nhwc_batch_norm.definition(*inputs, Z, activation="Relu")
    given = dY, inputs[0], inputs[1], mean, inv_std
    check_functions(nhwc_batch_norm_grad, ((*given, Y, None, None), {}), ((*given, None, None, None), {}))
    check_functions(nhwc_batch_norm_grad, ((*given, None, inputs[2], None), {}), ((*given, Y, None, dY), {}))


@pytest.mark.parametrize("case", POOLS)
def test_functions_of_pools(case):
    shape, how = POOLS[case]
    X = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    check_functions(nhwc_max_pool, ((X,), how))
    check_functions(nhwc_max_pool_grad, ((nhwc_max_pool.definition(X, **how), X), how))


def _first(array: Any) -> Any:
    return np.ascontiguousarray(np.asarray(array).transpose(0, 3, 1, 2))


def expected(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """As for images whose channels come first."""
    if op is nhwc_convolution and len(args) > 2 and args[2] is not None:
        found, (bound,) = products(op, args, kwargs)
        stored = PRECISION[result_dtypes(op, args, kwargs)[0]].stored
        return found, (bound + stored * np.abs(found[0] - in_float64(args[2])),)
    if op in (nhwc_convolution, nhwc_conv_grad):
        return products(op, args, kwargs)
    if op is nhwc_max_pool:
        return exact(op, args, kwargs)
    if op is nhwc_max_pool_grad:
        return pools(op, args, kwargs)
    found = as_tuple(op.definition(*(None if a is None else in_float64(np.asarray(a)) for a in args), **kwargs))
    precision = PRECISION[result_dtypes(op, args, kwargs)[0]]
    if op is nhwc_batch_norm:
        X, scale, B, mean, variance, *rest = args
        how = {k: v for k, v in kwargs.items() if k in ("epsilon", "momentum")}
        degrees = max(X.size // max(1, scale.size) - 1, 1)
        _, (off, *others) = test_batch_normalization.expected(
            batch_norm_internal, (_first(X), scale, B, mean, variance), how
        )
        # What is normalized is rounded with what is added to it.
        added = np.abs(in_float64(np.asarray(rest[0]))) if rest and rest[0] is not None else np.zeros(X.shape)
        bounds = [off.transpose(0, 2, 3, 1) + (precision.stored + 4 * precision.unit) * added, *others]
        if kwargs.get("sample_variance"):
            bounds[2] = bounds[2] * (1 + 1 / degrees)
    else:
        _, X, scale, mean, inv_std, *_ = args
        g = op.definition(*args, outputs=["dZ"])[3]
        _, (off, *others) = test_batch_normalization.expected(
            batch_normalization_grad, (_first(g), _first(X), scale, mean, inv_std), {}
        )
        # dX is made of g as it is stored.
        g = np.abs(g.astype(F64))
        factor = np.abs(in_float64(np.asarray(scale)) * in_float64(np.asarray(inv_std)))
        bounds = [off.transpose(0, 2, 3, 1) + precision.stored * g * factor, *others, with_storage(precision, g, 0 * g)]
    return found, tuple(None if f is None else b for f, b in zip(found, bounds, strict=True))


def node_cases() -> Iterator[NodeCase]:
    """Small calls for every runtime to run."""
    for dtype in FLOATS:
        parameters = {"type": str(dtype)}
        for biased in (True, False):

            def conv(dtype=dtype, biased=biased):
                (_, X, W, B), _ = convolution("three by three", dtype)
                return [X, W, B if biased else None]

            how = convolution("three by three")[1]
            yield NodeCase(nhwc_convolution, {**parameters, "bias": without([] if biased else ["B"])}, conv, how)

        def conv_grad(dtype=dtype):
            return convolution("three by three", dtype)[0][:3]

        yield NodeCase(nhwc_conv_grad, parameters, conv_grad, how)
        for added in (True, False):

            def norm(dtype=dtype, added=added):
                return normalization((3, 4, 5, 7), dtype, added, parameter=dtype)[0]

            def norm_grad(dtype=dtype, masked=added):
                inputs, dY = normalization((3, 4, 5, 7), dtype, parameter=dtype)
                Y, *_, mean, inv_std = nhwc_batch_norm.definition(*inputs, activation="Relu")
                return [
                    dY,
                    inputs[0],
                    inputs[1],
                    mean,
                    inv_std,
                    *([Y, None, dY] if masked else [None, inputs[2], None]),
                ]

            how = {"epsilon": 2.0**-7, "momentum": 0.75, "activation": "Relu" if added else ""}
            yield NodeCase(nhwc_batch_norm, {**parameters, "added": without([] if added else ["Z"])}, norm, how)
            yield NodeCase(
                nhwc_batch_norm_grad, {**parameters, "masked": without(["B"] if added else ["Y", "dY2"])}, norm_grad
            )
        shape, how = POOLS["three by three"]

        def pool(dtype=dtype, shape=shape):
            return [np.random.default_rng(0).standard_normal(shape).astype(dtype)]

        def pool_grad(dtype=dtype, shape=shape, how=how):
            X = np.random.default_rng(0).standard_normal(shape).astype(dtype)
            return [nhwc_max_pool.definition(X, **how), X]

        yield NodeCase(nhwc_max_pool, parameters, pool, how)
        yield NodeCase(nhwc_max_pool_grad, parameters, pool_grad, how)
