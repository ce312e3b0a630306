"""Records: a class per kind, described and constrained; what JSON cannot say is spelled; the schema is published."""

import ast
import math

import msgspec
import pytest

from tests.meta.sources import ROOT
from tests.meta.trace_schema import rendered
from tests.snapshots.check_traces import clean
from verifier.core.record import ArrayRecord, Record, TensorRecord, kind_of, real
from verifier.core.schema import KINDS, decode, encode
from verifier.stages.load.records import SourceTensor
from verifier.stages.train.records import StepReport

DIGEST = "vd1:" + "0" * 32


def test_the_published_schema_is_current():
    """`python -m tests.meta.trace_schema > docs/trace-schema.json` writes it anew."""
    assert (ROOT / "docs" / "trace-schema.json").read_text() == rendered()


@pytest.mark.parametrize("tag", sorted(KINDS))
def test_a_kind_belongs_to_its_stage_and_takes_what_a_later_version_adds(tag):
    kind = KINDS[tag]
    assert (kind_of(kind), tag.partition("/")[0]) == (tag, kind.stage.label)
    config = kind.__struct_config__
    assert (config.frozen, config.forbid_unknown_fields, config.omit_defaults, config.tag_field) == (
        True, False, True, "kind",
    )  # fmt: skip
    assert kind.__doc__
    assert kind.__doc__ != Record.__doc__


@pytest.mark.parametrize("item", {type(item): item for item in clean()}.values(), ids=lambda item: type(item).__name__)
def test_a_record_comes_back_from_its_line(item):
    if isinstance(item, ArrayRecord):
        item = msgspec.structs.replace(item, array="trainer-0000-000001")
    assert decode(encode(item)) == item


@pytest.mark.parametrize("value", [0.0, -1.5, 1e-300, math.nan, math.inf, -math.inf])
def test_a_number_that_json_does_not_have_comes_back(value):
    found = float(decode(encode(StepReport(name="step", loss=real(value), num_tokens=1, grad_norm=1.0))).loss)
    assert found == value or (math.isnan(found) and math.isnan(value))


@pytest.mark.parametrize("absent", ["digest", "dtype", "shape"])
def test_no_tensor_is_recorded_without_its_digest_dtype_and_shape(absent):
    fields = {"name": "a", "digest": DIGEST, "dtype": "float32", "shape": (2,)}
    assert issubclass(SourceTensor, TensorRecord)
    with pytest.raises(TypeError, match=absent):
        SourceTensor(**{key: value for key, value in fields.items() if key != absent})


def test_every_field_is_described_or_says_it_by_its_name():
    """Fields of one word, or of a type that has its own description, speak for themselves."""
    bare = []
    for path in sorted((ROOT / "verifier" / "core").glob("record*.py")):
        for item in ast.walk(ast.parse(path.read_text())):
            if isinstance(item, ast.ClassDef) and not ast.get_docstring(item):
                bare.append(f"{path.name}: {item.name}")
    assert [name for name in bare if not name.endswith("_Tagged")] == []
