"""Ways to grow: RNN, GRU and LSTM, in their directions, with and without what is optional."""

import numpy as np
from tests.random_graphs.growth import Graph, way

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


@way(weight=2)
def recurrent(g: Graph) -> None:
    name = g.of_rank(3)
    op_type = g.one_of(list(GATES))
    gates, hidden = GATES[op_type], g.between(1, 3)
    direction = g.one_of(["forward", "reverse", "bidirectional"])
    directions = 2 if direction == "bidirectional" else 1
    steps, batch, size = g.shape(name)
    w = g.weight(directions, gates * hidden, size)
    r = g.weight(directions, gates * hidden, hidden, scale=0.4)
    b = g.weight(directions, 2 * gates * hidden) if g.chance(0.7) else ""
    lengths = g.tensor(g.rng.integers(1, steps + 1, batch).astype(np.int32)) if g.chance(0.3) else ""
    start = [g.weight(directions, batch, hidden) if g.chance(0.5) else ""]
    settings: dict[str, object] = {}
    if op_type == "LSTM":
        start.append(g.weight(directions, batch, hidden) if g.chance(0.5) else "")
        start.append(g.weight(directions, 3 * hidden) if g.chance(0.3) else "")
    if op_type == "GRU":
        settings["linear_before_reset"] = g.between(0, 1)
    inputs = [name, w, r, b, lengths, *start]
    while not inputs[-1]:
        inputs.pop()
    results = g.add(op_type, inputs, 3 if op_type == "LSTM" else 2, hidden_size=hidden, direction=direction, **settings)
    axes, attribute = g.listed("axes", [1], 13)
    if directions == 1 and g.chance(0.7):
        g.add("Squeeze", [results[0], *axes], **attribute)
