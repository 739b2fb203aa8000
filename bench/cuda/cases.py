"""The work: inputs on the GPU, what onnxgrad and torch do with them, and the time that moving the bytes takes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import onnxgrad

BANDWIDTH = 4.3e12  # bytes a second, read and written: what a copy reaches on an H200


@dataclass
class Case:
    """One piece of work; `most_ms` is what it may take, `not_slower` makes torch's time that limit."""

    group: str
    work: str
    dtype: str
    sides: dict[str, Callable[[], Any]]
    bytes_moved: int = 0
    most_ms: float | None = None
    times_floor: float | None = None
    not_slower: bool = False
    checks: dict[str, Any] = field(default_factory=dict)

    @property
    def floor_ms(self) -> float:
        return self.bytes_moved / BANDWIDTH * 1e3


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _indices(kind: str, size: int, count: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    if kind == "uniform":
        return torch.randint(0, size, (count,), device="cuda", generator=generator)
    if kind == "zipf":
        share = 1 / torch.arange(1, size + 1, device="cuda", dtype=torch.float64)
        ranks = torch.multinomial(share, count, replacement=True, generator=generator)
        return torch.randperm(size, device="cuda", generator=generator)[ranks]
    return torch.full((count,), size // 3, device="cuda")


def gather() -> Iterator[Case]:
    for count, limits in ((131_072, (0.26, 0.20)), (8_192, (0.12, 0.09))):
        for kind in ("uniform", "zipf", "single"):
            for (name, dtype), most in zip(DTYPES.items(), limits, strict=True):
                shape, indices = [50257, 768], _indices(kind, 50257, count)
                dY = torch.randn(count, 768, device="cuda", dtype=dtype)
                yield Case(
                    "gather",
                    f"GatherGrad [50257, 768], {count} {kind}",
                    name,
                    {
                        "onnxgrad": lambda s=shape, i=indices, d=dY: onnxgrad.gather_grad(s, i, d, check=False),
                        "checked": lambda s=shape, i=indices, d=dY: onnxgrad.gather_grad(s, i, d),
                        "torch": lambda i=indices, d=dY: torch.ops.aten.embedding_dense_backward(
                            d, i, 50257, -1, False
                        ),
                    },
                    dY.nbytes + 50257 * 768 * dY.element_size() + indices.nbytes,
                    most_ms=most,
                )
    for shape, count, axis in (([64, 4096, 512], 1024, 1), ([4096, 16384], 4096, 1)):
        for name, dtype in DTYPES.items():
            indices = _indices("uniform", shape[axis], count)
            dY = torch.randn(*shape[:axis], count, *shape[axis + 1 :], device="cuda", dtype=dtype)
            dX = torch.empty(shape, device="cuda", dtype=dtype)
            yield Case(
                "gather",
                f"GatherGrad {shape}, axis {axis}, {count} indices",
                name,
                {
                    "onnxgrad": lambda s=shape, i=indices, d=dY, a=axis: onnxgrad.gather_grad(s, i, d, a, check=False),
                    "checked": lambda s=shape, i=indices, d=dY, a=axis: onnxgrad.gather_grad(s, i, d, a),
                    "torch": lambda x=dX, i=indices, d=dY, a=axis: x.zero_().index_add_(a, i, d),
                },
                dY.nbytes + dX.nbytes + indices.nbytes,
                times_floor=2.0,
            )


def slices() -> Iterator[Case]:
    shape = [8192, 16384]
    for words, where, arguments in (
        ("every 2nd column", (slice(None), slice(None, None, 2)), ([0], [16384], [1], [2])),
        ("half the rows", (slice(0, 4096),), ([0], [4096], [0], [1])),
        ("reversed both ways", None, ([-1, -1], [-(2**31), -(2**31)], [0, 1], [-1, -1])),
    ):
        for name, dtype in DTYPES.items():
            x = torch.empty(shape, device="cuda", dtype=dtype)
            dY = torch.randn(shape if where is None else x[where].shape, device="cuda", dtype=dtype)

            def by_torch(x: Any = x, d: Any = dY, w: Any = where) -> Any:
                if w is None:
                    return d.flip(0, 1)
                x.zero_()
                x[w] = d
                return x

            yield Case(
                "slice",
                f"SliceGrad {shape}, {words}",
                name,
                {
                    "onnxgrad": lambda d=dY, a=arguments: onnxgrad.slice_grad(d, shape, *a, check=False),
                    "checked": lambda d=dY, a=arguments: onnxgrad.slice_grad(d, shape, *a),
                    "torch": by_torch,
                },
                dY.nbytes + x.nbytes,
                times_floor=1.2,
            )


def gather_elements() -> Iterator[Case]:
    n = 8192
    for axis, atomic, limit in ((0, 1.2, 3.73), (1, 0.7, 0.93)):
        for name, dtype in DTYPES.items():
            indices = torch.randint(0, n, (n, n), device="cuda")
            dY = torch.randn(n, n, device="cuda", dtype=dtype)
            x = torch.empty(n, n, device="cuda", dtype=dtype)
            moved = dY.nbytes + indices.nbytes + x.nbytes
            for deterministic, most in ((True, limit), (False, atomic)):
                options = {"axis": axis, "deterministic": deterministic}
                yield Case(
                    "gather_elements",
                    f"GatherElementsGrad [8192, 8192], axis {axis}, {'deterministic' if deterministic else 'atomic'}",
                    name,
                    {
                        "onnxgrad": lambda d=dY, i=indices, o=options: onnxgrad.gather_elements_grad(
                            d, [n, n], i, **o, check=False
                        ),
                        "checked": lambda d=dY, i=indices, o=options: onnxgrad.gather_elements_grad(d, [n, n], i, **o),
                        "torch": lambda x=x, d=dY, i=indices, a=axis: x.zero_().scatter_add_(a, i, d),
                    },
                    moved,
                    most_ms=most if name == "float32" else None,
                )


def gru() -> Iterator[Case]:
    for S, N, inputs, H in ((128, 64, 512, 512), (256, 128, 1024, 1024)):
        torch.manual_seed(0)
        net = torch.nn.GRU(inputs, H, device="cuda")
        X = torch.randn(S, N, inputs, device="cuda", requires_grad=True)
        order = [1, 0, 2]  # torch has r, z, n where ONNX has z, r, h
        with torch.no_grad():
            W, R, B1, B2 = (
                torch.cat([p.chunk(3)[k] for k in order])
                for p in (net.weight_ih_l0, net.weight_hh_l0, net.bias_ih_l0, net.bias_hh_l0)
            )
        args = (X.detach(), W[None], R[None], torch.cat([B1, B2])[None])
        states, _ = net(X)
        dH = torch.randn_like(states)
        HAll, _, ZRH = onnxgrad.gru_training(*args, linear_before_reset=1)
        back = (*args, None, None, HAll, ZRH, dH[:, None].contiguous())
        parameters = [X, *net.parameters()]
        size = f"S{S} N{N} I{inputs} H{H}"
        yield Case(
            "gru",
            f"GRUTraining {size}",
            "float32",
            {
                "onnxgrad": lambda a=args: onnxgrad.gru_training(*a, linear_before_reset=1, check=False),
                "torch": lambda n=net, x=X: n(x),
            },
            not_slower=True,
            checks={"HAll": (HAll[:, 0], states)},
        )
        yield Case(
            "gru",
            f"GRUGrad {size}",
            "float32",
            {
                "onnxgrad": lambda b=back: onnxgrad.gru_grad(*b, linear_before_reset=1, check=False),
                "torch": lambda s=states, g=dH, p=parameters: torch.autograd.grad(s, p, g, retain_graph=True),
            },
            not_slower=True,
            checks={
                "dX": (
                    onnxgrad.gru_grad(*back, linear_before_reset=1, outputs="dX")[0],
                    torch.autograd.grad(states, X, dH, retain_graph=True)[0],
                )
            },
        )


GROUPS = {"gather": gather, "slice": slices, "gather_elements": gather_elements, "gru": gru}
