"""differentiable(): runs a Plan under torch.autograd."""

from collections.abc import Mapping
from typing import Any

import torch

from onnxgrad.torch.network import Plan


def differentiable(plan: Plan, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The results of a plan, by name; torch.autograd knows how to differentiate them."""
    found = _Forward.apply(plan, *(tensors[name] for name in plan.inputs))
    return dict(zip(plan.results, found, strict=True))


class _Forward(torch.autograd.Function):
    """Keeps what the plan's gradients read: activations, and inputs as far as they matter."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = dict(zip(plan.inputs, tensors, strict=True))
        found = plan.forward(given)
        ctx.plan = plan
        ctx.save_for_backward(*(given[n] for n in _read(plan)), *(found[n] for n in plan.kept))
        ctx.mark_non_differentiable(*(found[n] for n in plan.results if n not in plan.seeds))
        return tuple(found[n] for n in plan.results)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        plan: Plan = ctx.plan
        saved, count = ctx.saved_tensors, len(_read(plan))
        of_results = dict(zip(plan.results, cotangents, strict=True))
        gradients = _Backward.apply(plan, saved[count:], *saved[:count], *(of_results[name] for name in plan.seeds))
        found = dict(zip(plan.gradients, gradients, strict=True))
        return None, *(found.get(name) for name in plan.inputs)


class _Backward(torch.autograd.Function):
    """The gradients of a plan; its own are those of their network, which runs forward once more."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, kept: tuple[torch.Tensor, ...], *tensors: torch.Tensor) -> Any:
        ctx.plan = plan
        ctx.save_for_backward(*tensors)
        given = dict(zip(_inputs(plan), tensors, strict=True)) | dict(zip(plan.kept, kept, strict=True))
        return tuple(plan.backward(given).values())

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        plan: Plan = ctx.plan
        names, tensors = _inputs(plan), ctx.saved_tensors
        asked = {n for n, is_asked in zip(names, ctx.needs_input_grad[2:], strict=True) if is_asked}
        network = plan.network_of_gradient()
        second = network.plan([n for n in network.inputs if n in asked], plan.device)
        if not second.gradients:
            return None, None, *(None for _ in names)
        given = dict(zip(names, tensors, strict=True))
        kept = second.forward(given)
        of_gradients = dict(zip(network.results, cotangents, strict=True))
        gradients = _Backward.apply(
            second, tuple(kept[n] for n in second.kept),
            *(given[n] for n in _read(second)), *(of_gradients[n] for n in second.seeds),
        )  # fmt: skip
        found = dict(zip(second.gradients, gradients, strict=True))
        return None, None, *(found.get(name) for name in names)


def _read(plan: Plan) -> list[str]:
    """The inputs that gradients depend on."""
    return [name for name in plan.inputs if name in plan.read]


def _inputs(plan: Plan) -> list[str]:
    """What _Backward takes besides what was kept: inputs, and a cotangent for each output that has one."""
    return [*_read(plan), *plan.seeds.values()]
