"""Dimensions that are named by expressions of others, `8*batch`: what shape inference calls them."""

import ast
import operator
from collections.abc import Mapping

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}


def evaluated(text: str, sizes: Mapping[str, int]) -> int | None:
    """The size of a dimension, given those of others; None if it does not follow from them."""
    if text in sizes:
        return sizes[text]

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return int(OPERATIONS[type(node.op)](value(node.left), value(node.right)))
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name) and node.id in sizes:
            return sizes[node.id]
        raise ValueError

    try:
        return value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def names_in(text: str) -> list[str]:
    """The names that an expression is made of; one that is none is a name itself."""
    try:
        return [node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name)]
    except SyntaxError:
        return [text]
