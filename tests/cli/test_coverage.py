"""Every operator of ONNX has its place: gradients pass, there is nothing to differentiate, or it is missing."""

from onnx import FunctionProto, defs

from onnxgrad.cli.coverage import CONVERTED, MISSING, NOTHING, SMOOTH, standings, written_with_others
from onnxgrad.rules import RULES


def test_every_operator_of_onnx_has_its_place():
    """A new one needs a rule, no_gradient(), or a writer."""
    found = standings()
    assert [key for key, kind in found.items() if kind == MISSING] == []
    assert set(found.values()) == {SMOOTH, NOTHING}
    assert found.keys() >= {(s.domain, s.name) for s in defs.get_all_schemas() if s.domain in ("", "ai.onnx.ml")}


def test_definitions_consist_of_operators_that_have_a_place():
    found = standings()
    for schema in defs.get_all_schemas():
        if ((schema.domain, schema.name) in written_with_others()) and schema.has_function:
            body = FunctionProto()
            body.ParseFromString(schema.get_function_with_opset_version(schema.function_opset_versions[-1]))
            assert {("", node.op_type) for node in body.node} <= found.keys(), schema.name


def test_converted_operators_are_gone_from_opset_18():
    for old, new in CONVERTED.items():
        assert defs.get_schema(old, max_inclusive_version=18).deprecated
        assert ("", old) not in RULES and ("", new) in RULES


def test_rules_and_writers_exclude_each_other():
    assert not RULES.keys() & written_with_others().keys()
