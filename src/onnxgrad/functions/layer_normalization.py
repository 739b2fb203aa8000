"""LayerNormalizationGrad and SimplifiedLayerNormalizationGrad as ONNX functions."""

from collections.abc import Callable

from onnxgrad.functions.body import Body, Value


def layer_normalization_grad(
    o: Body, Y_grad: Value, X: Value, scale: Value, mean: Value | None, inv_std_var: Value, axis: int
) -> list[Value]:
    # There are as many rows as statistics, and as many columns as scales. All but the last axis ask for them: nodes of
    # one model share a function, whose branch for two axes has to be valid for a vector, too.
    grid = o.dims(*(o.Reshape(o.Size(v), [1]) for v in (inv_std_var, scale)))
    is_last = axis == -1
    over = [-1] if is_last else [1]

    def compute(work: Callable[[Value], Value]) -> list[Value]:
        def as_grid(x: Value) -> Value:
            return o.Reshape(x, grid, allowzero=1)

        def of_rows(statistic: Value) -> Value:
            typed = o.CastLike(work(statistic), x)
            return typed if is_last else o.Reshape(typed, [-1, 1])

        g, x, by = (work(v) for v in (Y_grad, X, scale))
        if not is_last:
            g, x, by = as_grid(g), as_grid(x), o.Reshape(by, [-1])
        inv = of_rows(inv_std_var)
        xhat = (x if mean is None else x - of_rows(mean)) * inv
        scaled = g * by
        inner = scaled - xhat * o.ReduceMean(scaled * xhat, over, keepdims=1)
        if mean is not None:
            inner = inner - o.ReduceMean(scaled, over, keepdims=1)
        parts = (g * xhat,) if mean is None else (g * xhat, g)
        sums = [o.ReduceSum(as_grid(part), [0], keepdims=0) for part in parts]
        return [
            inner * inv if is_last else o.Reshape(inner * inv, o.Shape(X), allowzero=1),
            *(o.Reshape(total, o.Shape(scale), allowzero=1) for total in sums),
        ]

    return o.in_work_type(X, compute)


def simplified_layer_normalization_grad(
    o: Body, Y_grad: Value, X: Value, scale: Value, inv_std_var: Value, axis: int
) -> list[Value]:
    return layer_normalization_grad(o, Y_grad, X, scale, None, inv_std_var, axis)
