"""Sums over a loop that go through the machine's vectors."""

from typing import Any

from llvmlite import ir

from onnxgrad.cpu.core.jit import machine_code


@machine_code
def add_in_any_order(typing_context: Any, total: Any, term: Any) -> Any:
    """total + term, where a loop may keep several totals and add them up at its end.

    The compiler chooses how many, once for each kernel: the same loop over as many terms gives the same bits.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.fadd(values[0], values[1], flags=("reassoc", "contract"))

    return total(total, total), generate
