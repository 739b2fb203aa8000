"""Ways to grow: products of matrices, convolutions, pools and what else images go through."""

import numpy as np
from tests.random_graphs.growth import Graph, UnsuitableError, way

AUTO = ["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"]


@way(weight=4)
def matmul(g: Graph) -> None:
    name = g.some(lambda x: 0 < x.dim() < 5)
    shape = g.shape(name)
    if g.chance(0.3) and len(shape) > 1:
        order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
        g.add("MatMul", [name, g.node("Transpose", [name], perm=order)])
    elif g.chance(0.3):
        g.add("MatMul", [name, g.some(lambda x: x.dim() > 1 and x.shape[-2] == shape[-1])])
    elif g.chance(0.2):
        g.add("MatMul", [g.weight(g.between(1, 4), shape[-2] if len(shape) > 1 else shape[-1]), name])
    else:
        g.add("MatMul", [name, g.weight(*([shape[-1]] if g.chance(0.15) else [shape[-1], g.between(1, 5)]))])


@way(weight=3)
def gemm(g: Graph) -> None:
    name = g.of_rank(2)
    rows, columns = g.shape(name)
    turned, width = g.chance(0.3), g.between(1, 5)
    inner, outer = (rows, columns) if turned else (columns, rows)
    turned_weight = g.chance(0.5)
    weight = g.weight(*([width, inner] if turned_weight else [inner, width]))
    bias = [g.weight(*g.one_of([[width], [outer, width], [outer, 1], [1]]))] if g.chance(0.7) or g.opset < 11 else []
    settings = {"alpha": 0.5, "beta": 1.5} if g.chance(0.4) else {}
    g.add("Gemm", [name, weight, *bias], transA=int(turned), transB=int(turned_weight), **settings)


@way(since=12, weight=1.5)
def einsum(g: Graph) -> None:
    name = g.of_rank(2, 3)
    shape = g.shape(name)
    if len(shape) == 2:
        a, b = shape
        text, others = g.one_of(
            [("ij,jk->ik", [(b, 2)]), ("ij->ji", []), ("ij,ij->i", [(a, b)]), ("ij,kj->ik", [(3, b)]), ("ij->", []),
             ("ij,jk,kl->il", [(b, 2), (2, 3)]), ("ij,j->ij", [(b,)])]
        )  # fmt: skip
    else:
        a, b, c = shape
        text, others = g.one_of(
            [("bij,bjk->bik", [(a, c, 2)]), ("bij,jk->bik", [(c, 3)]), ("bij->bj", []), ("...ij->...ji", []),
             ("bij,bkj->bik", [(a, 2, c)]), ("bij,bij->b", [(a, b, c)]), ("aij,bij->ab", [(2, b, c)])]
        )  # fmt: skip
    g.add("Einsum", [name, *[g.weight(*s) for s in others]], equation=text)


@way(since=11, weight=0.6)
def det(g: Graph) -> None:
    name = g.some(lambda x: x.dim() > 1 and x.shape[-1] == x.shape[-2] and x.shape[-1] < 5)
    g.add("Det", [name])


def image(g: Graph, *ranks: int) -> str:
    """A value as images are, of three or four dimensions, reshaped if there is none."""
    wanted = ranks or (3, 4)
    try:
        return g.some(lambda x: x.dim() in wanted and min(x.shape[2:]) > 1 and x.shape[1] > 1)
    except UnsuitableError:
        name = g.some(lambda x: x.numel() >= 12)
        total = g.values[name].numel()
        for shape in ((1, 2, 3, total // 6), (1, 2, 2, total // 4), (1, 2, total // 2)):
            if np.prod(shape) == total and len(shape) in wanted and min(shape[1:]) > 1:
                return str(g.add("Reshape", [name, g.ints(*shape)]))
        raise


@way(weight=3)
def conv(g: Graph) -> None:
    name = image(g)
    _, channels, *sizes = g.shape(name)
    groups = g.one_of([1, 1, 1, channels, *([2] if channels % 2 == 0 else [])])
    kernel = [g.between(1, min(3, d)) for d in sizes]
    settings = _steps(g, kernel, sizes)
    made = groups * g.between(1, 2)
    weight = g.weight(made, channels // groups, *kernel)
    bias = [g.weight(made)] if g.chance(0.6) else []
    shape = {"kernel_shape": kernel} if g.chance(0.7) else {}
    g.add("Conv", [name, weight, *bias], group=groups, **shape, **settings)


def _steps(g: Graph, kernel: list[int], sizes: list[int], dilate: bool = True) -> dict[str, object]:
    """Strides, dilations, and pads or auto_pad."""
    found: dict[str, object] = {}
    if g.chance(0.4):
        found["strides"] = [g.between(1, 2) for _ in kernel]
    auto = g.one_of(AUTO) if g.chance(0.35) else "NOTSET"
    if auto != "NOTSET":
        return {**found, "auto_pad": auto}
    dilations = [g.between(1, 2) if (k - 1) * 2 + 1 <= d else 1 for k, d in zip(kernel, sizes, strict=True)]
    if dilate and g.chance(0.3):
        found["dilations"] = dilations
    if g.chance(0.6):
        found["pads"] = [g.between(0, k - 1) for k in kernel] * 2
    return found


@way(weight=1.2)
def conv_transpose(g: Graph) -> None:
    name = image(g)
    _, channels, *sizes = g.shape(name)
    groups = g.one_of([1, 1, *([2] if channels % 2 == 0 else [])])
    kernel = [g.between(1, 3) for _ in sizes]
    strides = [g.between(1, 2) for _ in sizes]
    settings: dict[str, object] = {"strides": strides}
    if g.chance(0.5):
        settings["pads"] = [min(1, k - 1) for k in kernel] * 2
    if g.chance(0.3):
        settings["output_padding"] = [s - 1 for s in strides]
    made = g.between(1, 2)
    weight = g.weight(channels, made, *kernel)
    bias = [g.weight(made * groups)] if g.chance(0.5) else []
    g.add("ConvTranspose", [name, weight, *bias], group=groups, kernel_shape=kernel, **settings)


@way(weight=2)
def pool(g: Graph) -> None:
    name = image(g)
    sizes = g.shape(name)[2:]
    kernel = [g.between(1, min(3, d)) for d in sizes]
    op_type = g.one_of(["AveragePool", "MaxPool", "LpPool"])
    settings = _steps(g, kernel, list(sizes), dilate=op_type == "MaxPool" and g.opset >= 10)
    if op_type == "AveragePool" and g.chance(0.5):
        settings["count_include_pad"] = 1
    if op_type == "MaxPool":
        g.without_ties(name, tuple(range(2, len(sizes) + 2)))
    if op_type == "LpPool":
        settings["p"] = 2
        name = g.positive(name)
    g.add(op_type, [name], kernel_shape=kernel, **settings)


@way(weight=1)
def global_pool(g: Graph) -> None:
    name = image(g)
    op_type = g.one_of(["GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"])
    if op_type == "GlobalMaxPool":
        g.without_ties(name, tuple(range(2, len(g.shape(name)))))
    g.add(op_type, [name])


@way(weight=1.5)
def resize(g: Graph) -> None:
    name = image(g, 4)
    mode = g.one_of(["nearest", "linear", *(["cubic"] if g.opset >= 11 else [])])
    factor = g.one_of([1, 2]), 2
    scales = g.tensor(np.array([1, 1, *factor], np.float32))
    if g.opset < 9:
        if mode == "linear":
            raise UnsuitableError  # onnx 7 calls it bilinear
        g.add("Upsample", [name], mode=mode, scales=[1.0, 1.0, *map(float, factor)])
        return
    if g.opset < 11:
        if mode == "linear":
            raise UnsuitableError  # whose coordinates, asymmetric, PyTorch has not
        g.add("Upsample" if g.opset == 9 else "Resize", [name, scales], mode=mode)
        return
    settings: dict[str, object] = {"mode": mode}
    if mode == "nearest":
        settings |= {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    else:
        settings |= {"coordinate_transformation_mode": g.one_of(["half_pixel", "align_corners"])}
        settings |= {"cubic_coeff_a": -0.75} if mode == "cubic" else {}
    if g.chance(0.5):
        g.add("Resize", [name, "" if g.opset > 12 else g.tensor(np.zeros(0, np.float32)), scales], **settings)
    else:
        n, c, h, w = g.shape(name)
        nothing = "" if g.opset > 12 else g.tensor(np.zeros(0, np.float32))
        g.add("Resize", [name, nothing, nothing, g.ints(n, c, h + g.between(0, 2), 2 * w)], **settings)


@way(since=16, weight=1)
def grid_sample(g: Graph) -> None:
    name = image(g, 4)
    points = g.inside(g.some(lambda x: x.numel() % (2 * g.shape(name)[0]) == 0 and x.numel() <= 24), 0.9)
    grid = g.node("Reshape", [points, g.ints(g.shape(name)[0], -1, 1, 2)])
    h, w = g.shape(name)[2:]
    corners = g.between(0, 1)
    for axis, size in ((0, w), (1, h)):  # away from the places of pixels, where interpolation has kinks
        at = (g.values[grid][..., axis] + 1) / 2
        places = at * (size - 1) if corners else at * size - 0.5
        if (
            float((places - places.round()).abs().min()) < 5e-3
            or float(places.min()) < 0
            or float(places.max()) > size - 1
        ):
            raise UnsuitableError
    mode = "linear" if g.opset >= 20 else "bilinear"
    g.add("GridSample", [name, grid], mode=mode, align_corners=corners, padding_mode=g.one_of(["zeros", "border"]))


@way(since=18, weight=0.6)
def col2im(g: Graph) -> None:
    name = g.some(lambda x: x.dim() == 3 and x.shape[1] % 4 == 0)
    blocks = g.shape(name)[2]
    g.add("Col2Im", [name, g.ints(2, blocks + 1), g.ints(2, 2)])


@way(since=20, weight=0.6)
def affine_grid(g: Graph) -> None:
    theta = g.weight(1, 2, 3)
    g.add("AffineGrid", [theta, g.ints(1, 1, 3, 4)], align_corners=g.between(0, 1))


@way(since=23, weight=1)
def attention(g: Graph) -> None:
    name = g.of_rank(3)
    batch, length, width = g.shape(name)
    heads = 2 if width % 2 == 0 and g.chance(0.6) else 1

    def split(value: str) -> str:
        split_shape = g.ints(batch, length, heads, width // heads)
        return str(g.node("Transpose", [g.node("Reshape", [value, split_shape])], perm=[0, 2, 1, 3]))

    q, k, v = (split(g.node("MatMul", [name, g.weight(width, width)])) for _ in range(3))
    mask = [g.weight(length, length)] if g.chance(0.4) else []
    settings = {} if mask else {"is_causal": g.between(0, 1)}
    if g.chance(0.3):
        settings["scale"] = 0.4
    g.add("Attention", [q, k, v, *mask], **settings)


@way(since=17, weight=0.7)
def dft(g: Graph) -> None:
    name = g.of_rank(2)
    last = g.listed("axes", [-1], 13)
    signal = g.node("Unsqueeze", [name, *last[0]], **last[1])
    settings = {"onesided": 1} if g.chance(0.4) else {"inverse": g.between(0, 1)}
    if g.opset >= 20:
        g.add("DFT", [signal, "", g.tensor(np.array(1))], **settings)
    else:
        g.add("DFT", [signal], axis=1, **settings)
