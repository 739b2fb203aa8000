"""TrainedModel: the original model of a trainer, and the graphs made from it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import onnx_ir as ir

from onnxgrad.cpu.core.memory import give_back
from onnxgrad.graph.files import expect_weights, load
from onnxgrad.passes.draft import Draft, without_garbage_collection
from onnxgrad.passes.free_batch import fixed_batch
from onnxgrad.passes.prepare import RESTORE, prepare_for_training
from onnxgrad.train.batch_dimension import with_free_batch
from onnxgrad.train.frozen_weights import read_weights
from onnxgrad.train.graphs import EvaluationGraph, Selection, StepGraph, evaluation_graph, step_graph
from onnxgrad.train.losses import Total

CALLER = "Trainer"


class StepOptions(NamedTuple):
    """What step_graph() is told."""

    loss: Total | str
    selection: Selection
    group: int | None
    own_products: bool
    on_cpu: bool
    precision: str
    recompute: bool | str | Sequence[str]


class TrainedModel:
    """Makes the graphs of a step and of an evaluation, and makes them anew for batches of any size.

    `fixed` is the only size of batches that the graphs take, None if they take any.
    """

    step: StepGraph
    evaluation: EvaluationGraph
    remarks: list[str]  # about how this model is trained

    def __init__(self, source: Any, options: StepOptions) -> None:
        self._source = Path(source).absolute() if isinstance(source, (str, Path)) else source
        self.options = options
        self.fixed: int | None = None
        self.may_be_freed = False
        self._freed_from: int | None = None  # the size of batches that the file has

    @property
    def path(self) -> Path | None:
        """The file of the model, if it came from one."""
        return self._source if isinstance(self._source, Path) else None

    def _load(self) -> ir.Model:
        """The original model."""
        model = load(self._source, CALLER)
        expect_weights(model, CALLER)
        return model

    def prepare(self, splits_batches: bool) -> Draft:
        """The model that graphs are made from; for batches of any size if ranks split them."""
        prepared = prepare_for_training(self._load(), CALLER)
        self.fixed = fixed_batch(prepared.graph)
        self.may_be_freed = self.fixed is not None
        # Nobody wants to train on single examples. Others may want just the size that the model has: it is faster.
        return self._freed(prepared) if self.fixed == 1 or splits_batches else prepared

    def make_graphs(self, prepared: Draft) -> None:
        """Makes both graphs; the remarks are those of the draft and of the passes on it."""
        inference = prepared.clone()
        self.step = step_graph(prepared, *self.options)
        self.evaluation = evaluation_graph(inference, self.options.loss, self.step, self.options.on_cpu)
        read_weights(self.step.model, self.evaluation.model)
        self.remarks = prepared.remarks

    def free_batch(self) -> bool:
        """Makes both graphs anew, for batches of any size; false if that is impossible, which a remark then says."""
        remarks = self.remarks
        with without_garbage_collection():
            prepared = self._freed(prepare_for_training(self._load(), CALLER))
            remarks.append(prepared.remarks[-1])
            if self.fixed is None:
                self.make_graphs(prepared)
                self.remarks = remarks  # without those that are there already
        give_back()
        return self.fixed is None

    def _freed(self, prepared: Draft) -> Draft:
        """The model for batches of any size, if examples do not depend on their batch; its last remark says so."""
        if self.fixed is None:
            return prepared
        size, self.may_be_freed = self.fixed, False
        freed = with_free_batch(prepared, size, self._load)
        if freed is None:
            prepared.remarks.append(
                f"the model was exported for batches of {size}, and depends on that: batches of other sizes are refused"
            )
            return prepared
        self.fixed, self._freed_from = None, size
        freed.remarks.append(
            f"the model was exported for batches of {size}, but nothing in it depends on that: it takes any size"
        )
        return freed

    def plain_graphs(self) -> tuple[StepGraph, EvaluationGraph]:
        """The graphs of a step and an evaluation as they are for any device, with none of ours in particular."""
        with without_garbage_collection():
            prepared = prepare_for_training(self._load(), CALLER)
            if self._freed_from is not None:
                prepared = with_free_batch(prepared, self._freed_from, self._load) or prepared
            inference = prepared.clone()
            step = step_graph(prepared, self.options.loss, self.options.selection)
            return step, evaluation_graph(inference, self.options.loss, step)

    def restored(self) -> ir.Model:
        """The original model, each of its weights an initializer under the name that its author knows."""
        return Draft(self._load(), CALLER).run(RESTORE).model  # type: ignore[no-any-return]
