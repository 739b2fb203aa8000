"""All ways to grow, found by importing them, and the graph of a seed."""

from tests.random_graphs import control_flow, elementwise, indexing, norms, products, recurrent, shapes
from tests.random_graphs.growth import random_case

FAMILIES = [elementwise, shapes, products, norms, indexing, recurrent, control_flow]
__all__ = ["FAMILIES", "random_case"]
