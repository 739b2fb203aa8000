"""Finds the operators that onnxruntime-training 1.19.2 knows and stock onnxruntime does not.

    .venv-peer/bin/python tests/data/make_ort_training_operators.py .venv/bin/python

The names come from the strings of its library, and from a list of short ones, which compilers hide in code. Whether an
operator is known, a session tells. The result is ort_training_operators.txt, one name a line.
"""

import re
import subprocess
import sys
from pathlib import Path

import onnxruntime
from onnx import TensorProto, helper

FILE = Path(__file__).with_suffix("").with_name("ort_training_operators.txt")
DOMAINS = {"com.microsoft": 1, "": 17}
SHORT = ["All", "DivGrad", "Group", "GRUGrad", "LSTMGrad", "Recv", "ReluGrad", "Scale", "Send", "TanhGrad", "View"]


def is_known(operator: str) -> bool:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    for domain in DOMAINS:
        node = helper.make_node(operator, ["x"], ["y"], domain=domain)
        x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
        graph = helper.make_graph([node], "g", [x], [y])
        opsets = [helper.make_opsetid(d, v) for d, v in DOMAINS.items()]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
        try:
            onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            if not re.search("is not a registered function/op|No Op registered", str(error)):
                return True
        else:
            return True
    return False


def main() -> None:
    if sys.argv[1] == "--known":
        print(*filter(is_known, sys.stdin.read().split()))
        return
    (library,) = Path(onnxruntime.__file__).parent.glob("capi/onnxruntime_pybind11_state*.so")
    # Where one string is the end of another there is only the longer one.
    found = re.findall(rb"(?=([A-Z][A-Za-z0-9]{2,40}(?:_[A-Za-z0-9]{1,4})?)\0)", library.read_bytes())
    names = sorted({name.decode() for name in found} | set(SHORT))
    known = list(filter(is_known, names))
    stock = subprocess.run(
        [sys.argv[1], __file__, "--known"], input=" ".join(known), capture_output=True, text=True, check=True
    )
    only_there = sorted(set(known) - set(stock.stdout.split()))
    FILE.write_text("\n".join(only_there) + "\n")
    print(len(names), "strings,", len(known), "operators,", len(only_there), "of them only there")


if __name__ == "__main__":
    main()
