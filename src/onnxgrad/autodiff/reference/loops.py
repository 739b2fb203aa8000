"""Scan and Loop for onnx.reference, whose own go along the first axis only, and take no scalars from a step."""

from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun


class Scan(OpRun):
    """With all axes and directions."""

    op_domain = ""

    def need_context(self) -> bool:
        """A step reads values of the graphs around it."""
        return True

    def _run(
        self, *inputs: Any, context: Any = None, num_scan_inputs: int = 0, scan_input_axes: Any = None,
        scan_input_directions: Any = None, scan_output_axes: Any = None, scan_output_directions: Any = None,
        body: Any = None, attributes: Any = None, **bindings: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        first, names = len(inputs) - num_scan_inputs, body.input_names
        states = list(inputs[:first])
        scanned = [
            _turned(np.moveaxis(x, axis, 0), backward)
            for x, axis, backward in zip(
                inputs[first:], scan_input_axes or [0] * num_scan_inputs,
                scan_input_directions or [0] * num_scan_inputs, strict=True,
            )
        ]  # fmt: skip
        given: list[list[Any]] = [[] for _ in body.output_names[first:]]
        for slices in zip(*scanned, strict=True):
            feeds = {**(context or {}), **dict(zip(names, (*states, *slices), strict=True))}
            results = self._run_body(feeds, **bindings)  # type: ignore[attr-defined]
            states = results[:first]
            for all_of_it, result in zip(given, results[first:], strict=True):
                all_of_it.append(result)
        axes, directions = scan_output_axes or [0] * len(given), scan_output_directions or [0] * len(given)
        stacked = [
            np.moveaxis(_turned(np.stack(results), backward), 0, axis)
            for results, axis, backward in zip(given, axes, directions, strict=True)
        ]
        return (*states, *stacked)


def _turned(x: Any, backward: int) -> Any:
    return x[::-1] if backward else x


class Loop(OpRun):
    """With results of every shape, and without steps."""

    op_domain = ""

    def need_context(self) -> bool:
        """A step reads values of the graphs around it."""
        return True

    def _run(
        self, M: Any, cond: Any = None, *initial: Any, context: Any = None, body: Any = None, attributes: Any = None,
        **bindings: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        states, step = list(initial), 0
        given: list[list[Any]] = [[] for _ in body.output_names[1 + len(states) :]]
        go = np.array(True) if cond is None else cond
        while go and (M is None or step < M):
            inputs = (np.array(step, np.int64), go, *states)
            feeds = {**(context or {}), **dict(zip(body.input_names, inputs, strict=True))}
            go, *results = self._run_body(feeds, **bindings)  # type: ignore[attr-defined]
            states, step = results[: len(states)], step + 1
            for all_of_it, result in zip(given, results[len(states) :], strict=True):
                all_of_it.append(result)
        return (*states, *(np.stack(results) if results else np.zeros(0) for results in given))
