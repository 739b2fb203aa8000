"""AllReduceSum: what one process gives goes into the result of each, so that its gradient is the sum of theirs."""

from onnxgrad.rules import op, vjp
from onnxgrad.schema import OWN

vjp(
    "AllReduceSum",
    domain=OWN,
    data=lambda g, n: op.AllReduceSum(g, group=n.group),
)
