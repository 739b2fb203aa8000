"""Models and data for other runtimes, laid out as onnx's own backend tests are: `python -m tests.backend_cases FOLDER`.

FOLDER/<case>/model.onnx calls an operator once and carries it as an ONNX function, for runtimes that do not have it.
FOLDER/<case>/test_data_set_0 has its inputs and outputs: what the definition gives in float64, rounded once.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from tests.checks import expect, result_dtypes
from tests.node_cases import NodeCase, all_cases
from tests.runtime.nodes import element_type, feeds_of, model_of

from onnxgrad import add_functions


def write(case: NodeCase, folder: Path) -> None:
    """Writes the folder of one case."""
    inputs = case.make_inputs()
    results = expected_outputs(case, inputs)
    model = model_of(case.op, inputs, case.attributes, case.outputs, name=str(case))
    feeds = feeds_of(case.op, inputs)
    for values, arrays in ((model.graph.input, feeds), (model.graph.output, results)):
        for value in values:
            array = arrays[value.name]
            value.CopyFrom(helper.make_tensor_value_info(value.name, element_type(array.dtype), array.shape))
    data = folder / str(case) / "test_data_set_0"
    data.mkdir(parents=True, exist_ok=True)
    onnx.save(add_functions(model), data.parent / "model.onnx")
    for kind, arrays in (("input", feeds), ("output", results)):
        for position, (name, array) in enumerate(arrays.items()):
            onnx.save_tensor(numpy_helper.from_array(array, name), data / f"{kind}_{position}.pb")


def expected_outputs(case: NodeCase, inputs: Sequence[Any]) -> dict[str, np.ndarray]:
    """What the definition gives, under the outputs' names."""
    expected, _ = expect(case.op, *inputs, **case.attributes)
    dtypes = result_dtypes(case.op, tuple(inputs), case.attributes)
    entries = zip(case.op.outputs, expected, dtypes, strict=True)
    every = {o.name: np.asarray(value).astype(dtype) for o, value, dtype in entries}
    return {name: every[name] for name in case.outputs or every}


def main() -> int:
    """Writes every case into the folder named."""
    if len(sys.argv) != 2:
        print("usage: python -m tests.backend_cases FOLDER", file=sys.stderr)
        return 2
    folder = Path(sys.argv[1])
    for case in all_cases():
        write(case, folder)
    print(f"{len(all_cases())} cases in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
