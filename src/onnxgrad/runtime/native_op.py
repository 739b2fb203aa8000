"""What onnxruntime asks of an operator, answered in native code: thousands of questions for every session.

No Python takes part but for `create`, so that no signal's handler can raise in the middle of an answer.
"""

from typing import Any

from numba import types

from onnxgrad.cpu.core.c_calls import invoke
from onnxgrad.cpu.core.jit import c_function, int64
from onnxgrad.runtime.compute import failure, stack_words, structure_at, words_at
from onnxgrad.runtime.layout import ANSWER, OPERATOR, offset_of

_word = types.int64


def _reader(member: str) -> Any:
    """A C function of an operator's address that returns a member of it."""
    position = offset_of(OPERATOR, member) // 8
    return c_function(_word(_word))(lambda op_address: words_at(op_address)[position])


def _table_reader(member: str) -> Any:
    """The same for a member of each input or output."""
    position = offset_of(OPERATOR, member) // 8
    return c_function(_word(_word, _word))(lambda op_address, index: words_at(op_address)[position + index])


def _create(op_address: int, api_address: int, info: int, kernel_address: int) -> Any:
    """CreateKernelV2: asks Python for the kernel of a node; 0, or a status."""
    answer_address = stack_words(2)
    answer = structure_at(answer_address, ANSWER, 0)
    answer.result, answer.status = 0, 0
    invoke(structure_at(op_address, OPERATOR, 0).create, (op_address, api_address, info, answer_address))
    words_at(kernel_address)[0] = answer.result
    return int64(0) if answer.result != 0 else failure(api_address, answer)


_zero = _reader("zero")
ANSWERS = {
    "GetName": _reader("name"),
    "GetExecutionProviderType": _reader("provider"),
    "GetInputType": _table_reader("input_type"),
    "GetInputTypeCount": _reader("inputs"),
    "GetOutputType": _table_reader("output_type"),
    "GetOutputTypeCount": _reader("outputs"),
    "GetInputCharacteristic": _table_reader("input_optional"),
    "GetOutputCharacteristic": _table_reader("output_optional"),
    "GetInputMemoryType": _table_reader("input_memory"),
    "GetVariadicInputMinArity": _zero,
    "GetVariadicInputHomogeneity": _zero,
    "GetVariadicOutputMinArity": _zero,
    "GetVariadicOutputHomogeneity": _zero,
    "GetStartVersion": _reader("first_version"),
    "GetEndVersion": _reader("last_version"),
    "CreateKernelV2": c_function(_word(_word, _word, _word, _word))(_create),
}
