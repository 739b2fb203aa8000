"""take_place(): one value in the place of another."""

import onnx_ir as ir


def take_place(new: ir.Value, old: ir.Value) -> None:
    """Lets `new` go where `old` went, with its name, and its type and shape as far as they are known."""
    new.type = old.type or new.type
    new.shape = new.shape if old.shape is None else old.shape
    new.name, old.name = old.name, f"{old.name}_replaced"
    old.replace_all_uses_with(new, replace_graph_outputs=True)
