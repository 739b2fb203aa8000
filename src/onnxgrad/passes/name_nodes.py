"""name_nodes(): a name for every node, since the names of gradient nodes begin with those of the model's."""

from onnxgrad.passes.draft import Draft


def name_nodes(draft: Draft) -> None:
    """Names nodes without a name by their operator and position."""
    nodes = [node for graph in (draft.graph, *draft.graph.subgraphs()) for node in graph]
    taken = {node.name for node in nodes if node.name}
    for k, node in enumerate(nodes):
        if not node.name:
            name = f"{node.op_type}_{k}"
            while name in taken:
                name += "_"
            taken.add(name)
            node.name = name
