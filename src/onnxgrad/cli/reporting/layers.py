"""Parameters and the norms of their gradients, for each of them and by layer."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from onnxgrad.cli.run_log import Event, RunLog
from onnxgrad.train.trainer import Trainer

MOST_RECORDED = 200  # times in a run: more columns do not show
LAST_WORD = re.compile(r"(.+)_[A-Za-z]+")  # conv1_weight is of conv1; val_12 is a layer of its own


class NormRecorder:
    """Gives an event with the norms of the gradients of some parameters, after every so many updates."""

    def __init__(self, trainer: Trainer, parameters: Iterable[str], updates: int) -> None:
        self._trainer, self._parameters, self._every = trainer, list(parameters), -(-updates // MOST_RECORDED)

    def after(self, event: Event) -> Event | None:
        """The event that follows another one, if any; with several processes, all of them ask."""
        if event["event"] != "step" or event["step"] % self._every:
            return None
        norms = self._trainer.gradient_norms()
        rounded = [float(f"{norms[name]:.4g}") for name in self._parameters]
        # On a GPU the next step has begun by now, and the norms are those of its gradients.
        return {"event": "gradients", "step": self._trainer.steps, "norms": rounded}


def layer_of(parameter: str) -> str:
    """The name of a parameter without its last part, as in encoder.0.weight and conv1_weight."""
    for sign in "./":
        layer, found, last = parameter.rpartition(sign)
        if found and layer and last:
            return layer
    match = LAST_WORD.fullmatch(parameter)
    return match[1] if match else parameter


def sizes_by_layer(shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The number of numbers in each layer, in the order of the parameters."""
    found: dict[str, int] = {}
    for name, shape in shapes.items():
        found[layer_of(name)] = found.get(layer_of(name), 0) + math.prod(shape)
    return found


def recorded_norms(log: RunLog, parameters: Sequence[str]) -> tuple[list[int], list[list[float | None]]]:
    """The updates, and a row of norms for each parameter; None where one is not finite."""
    columns = {e["step"]: e["norms"] for e in log.of("gradients") if len(e["norms"]) == len(parameters)}
    steps = sorted(columns)
    return steps, [[columns[step][k] for step in steps] for k in range(len(parameters))]


def norms_by_layer(parameters: Sequence[str], rows: Sequence[Sequence[float | None]]) -> dict[str, list[float | None]]:
    """The norms of all gradients of a layer together."""
    members: dict[str, list[Sequence[float | None]]] = {}
    for name, row in zip(parameters, rows, strict=True):
        members.setdefault(layer_of(name), []).append(row)
    return {layer: [_together(norms) for norms in zip(*rows, strict=True)] for layer, rows in members.items()}


def _together(norms: Sequence[float | None]) -> float | None:
    known = [n for n in norms if n is not None]
    return float(f"{math.hypot(*known):.4g}") if len(known) == len(norms) else None
