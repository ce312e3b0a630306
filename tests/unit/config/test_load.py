"""One config from YAML, key=value and flags: precedence, types, and everything that is refused."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.config import EngineOptions, GoldenConfig, NoiseConfig, RoundtripConfig
from verifier.config.load import load, resolved
from verifier.errors import UsageError
from verifier.mesh import Mesh
from verifier.platform.upstream_fixes import FIXES

TRACE = "trace=t"


def written(folder: Path, text: str) -> Path:
    file = folder / "run.yaml"
    file.write_text(text)
    return file


def test_all_ways_lead_to_the_same_config(tmp_path):
    same = RoundtripConfig(
        model="tiny:qwen3-moe", trace=Path("t"), mesh=Mesh(tp=2, ep=4, dp=2), dtype="bfloat16", cycles=2,
        engine=EngineOptions(tp=2, cuda_graphs=True), timeout_s=60.0,
    )  # fmt: skip
    values = {
        "model": "tiny:qwen3-moe", "trace": Path("t"), "mesh.tp": 2, "mesh.ep": 4, "dtype": "bf16", "cycles": 2,
        "engine.tp": 2, "engine.cuda_graphs": True, "timeout_s": 60.0,
    }  # fmt: skip
    nested = """
        {model: tiny:qwen3-moe, trace: t, mesh: {tp: 2, ep: 4}, dtype: bf16, cycles: 2,
         engine: {tp: "${mesh.tp}", cuda_graphs: on}, timeout_s: 60}
    """
    dotted = "\n".join(f"{key}: {value}" for key, value in values.items())
    assert load(RoundtripConfig, flags=values)[0] == same
    assert load(RoundtripConfig, overrides=[f"{key}={value}" for key, value in values.items()])[0] == same
    assert load(RoundtripConfig, file=written(tmp_path, nested))[0] == same
    assert load(RoundtripConfig, file=written(tmp_path, dotted))[0] == same
    assert type(load(RoundtripConfig, file=written(tmp_path, nested))[0].timeout_s) is float


def test_what_the_command_line_says_beats_the_file_and_the_file_beats_the_default(tmp_path):
    file = written(tmp_path, "{model: m, trace: t, seed: 5, cycles: 5, mesh: {tp: 4, pp: 2}}")
    config, owners = load(RoundtripConfig, file=file, overrides=["cycles=6"], flags={"mesh.tp": 2})
    assert (config.seed, config.cycles, config.mesh) == (5, 6, Mesh(tp=2, pp=2))
    assert config.update == "step"
    assert owners == {
        "model": str(file), "trace": str(file), "seed": str(file), "cycles": "cycles=6", "mesh.tp": "--tp",
        "mesh.pp": str(file),
    }  # fmt: skip


@given(
    st.builds(
        RoundtripConfig,
        model=st.text("abc:${}#'\"- 0", min_size=1).filter(str.strip),
        trace=st.just(Path("t")),
        mesh=st.builds(Mesh, tp=st.integers(1, 8), pp=st.just(2), first_stage_layers=st.none() | st.integers(1, 3)),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        engine=st.builds(EngineOptions, tp=st.integers(1, 4), sleep_level=st.sampled_from([0, 1, 2])),
        transport=st.sampled_from([None, "gloo"]),
        seed=st.integers(0, 4_000_000_000),
        fixes=st.lists(st.sampled_from(["all", *FIXES]), max_size=2).map(tuple),
    )
)
def test_what_print_config_shows_is_read_as_the_same_config(tmp_path_factory, config):
    if "$" in config.model or config.model == "null":
        return  # an interpolation
    given = dict.fromkeys(("trace", "mesh.dp", "dtype"), "--flag")
    file = written(tmp_path_factory.mktemp("config"), resolved(config, given))
    assert load(RoundtripConfig, file=file)[0] == config


@pytest.mark.parametrize("text", ["0123", "1e3", "null text", "a: b", "[1]", "x=y", "yes"])
def test_text_is_taken_as_it_is(text):
    assert load(NoiseConfig, overrides=["model=m", "record=true", f"why={text}"])[0].why == text


def test_lists_are_one_item_or_many():
    for text in ("fixes=miles-975,all", "fixes=[miles-975, all]"):
        assert load(GoldenConfig, overrides=["model=m", text, TRACE])[0].to_dict()["fixes"] == ["miles-975", "all"]
    assert load(GoldenConfig, overrides=["model=m", "fixes=all", TRACE])[0].fixes == ("all",)
    assert load(GoldenConfig, flags={"model": "m", "fixes": ["all"], "trace": Path("t")})[0].fixes == ("all",)


REFUSED = {
    "mesh.tq=2": "there is no knob `mesh.tq`: did you mean `mesh.tp`",
    "sleep_level=2": "there is no knob `sleep_level`: did you mean `engine.sleep_level`",
    "engine_tp=2": "there is no knob `engine_tp`: did you mean `engine.tp`",
    "zzz=1": "there is no knob `zzz`: `--print-config` lists them",
    "engine=vllm": (
        "`engine` is a group of knobs: give one of engine.kind, engine.tp, engine.pp, engine.ep, "
        "engine.cuda_graphs, engine.sleep_level, engine.quantization, engine.lora_rank"
    ),
    "mesh.tp.x=1": "there is no knob `mesh.tp.x`: did you mean `mesh.tp`",
    "mesh.tp": "`mesh.tp` is neither an option nor key=value, such as model=...",
    "=1": "there is no knob ``: `--print-config` lists them",
    "mesh.tp=two": "mesh.tp is `two`, it must be a whole number",
    "mesh.tp=1.5": "mesh.tp is `1.5`, it must be a whole number",
    "mesh.tp=null": "mesh.tp is `null`, it must be a whole number",
    "mesh.tp=${mesh.nothing}": "mesh.tp=${mesh.nothing}: Interpolation key 'mesh.nothing' not found",
    "mesh.tp=${": "mesh.tp is `${`, it must be a whole number",
    "mesh.tp=0": "mesh.tp is 0, it must be at least 1",
    "timeout_s=soon": "timeout_s is `soon`, it must be a number",
    "engine.cuda_graphs=perhaps": "engine.cuda_graphs is `perhaps`, it must be true or false",
    "engine.sleep_level=3": "engine.sleep_level is `3`, it must be one of 0, 1, 2",
    "dtype=fp16": "dtype is `fp16`, it must be one of fp32, bf16",
    "trace=null": "trace is `null`, it must be a path",
    "fixes=miles-976": "--fix is `miles-976`, and there is no such fix: did you mean `miles-975`?",
    "model=n": "model=m and model=n set the same knob: leave one of the two out",
}


@pytest.mark.parametrize("text", REFUSED)
def test_an_override_is_refused_in_one_sentence(text):
    with pytest.raises(UsageError, match=f"^{re.escape(REFUSED[text])}$"):
        load(RoundtripConfig, overrides=["model=m", text])


def test_a_flag_and_a_key_for_one_knob_are_refused():
    with pytest.raises(UsageError, match=r"^--engine-tp and engine.tp=2 set the same knob: leave one of the two out$"):
        load(RoundtripConfig, overrides=["engine.tp=2"], flags={"model": "m", "engine.tp": 2})


def test_a_required_knob_is_named_by_all_its_names():
    with pytest.raises(UsageError, match=r"^missing option '--model': give it, or model=..., or `model` in --config$"):
        load(GoldenConfig)


FILES = {
    "mesh: {tq: 2}": "there is no knob `mesh.tq` in {file}: did you mean `mesh.tp`",
    "tp: 2": "there is no knob `tp` in {file}: did you mean `mesh.tp`",
    "engine: hf": (
        "`engine` in {file} is a group of knobs: give one of engine.kind, engine.tp, engine.pp, engine.ep, "
        "engine.cuda_graphs, engine.sleep_level, engine.quantization, engine.lora_rank"
    ),
    "mesh: {tp: two}": "mesh.tp is `two` in {file}, it must be a whole number",
    "mesh: {tp: yes}": "mesh.tp is `True` in {file}, it must be a whole number",
    "mesh: {tp: [2]}": "mesh.tp is `[2]` in {file}, it must be a whole number",
    "mesh: {tp: {a: 2}}": "mesh.tp is `{'a': 2}` in {file}, it must be a whole number",
    "model: 0123": "model is `83` in {file}, it must be text: put it into quotes",
    "fixes: {a: b}": "fixes is `{'a': 'b'}` in {file}, it must be a list of texts",
    "seed: 1\nseed: 2": "--config `{file}` line 2 is no YAML: found duplicate key seed",
    "{mesh: {tp: 2}, mesh.tp: 2}": "`mesh.tp` is given twice in {file}: leave one of the two out",
    "mesh: [": "--config `{file}` line 1 is no YAML: expected the node content, but found '<stream end>'",
    "- 1": "--config `{file}` is no mapping of keys to values",
    "\x00": "--config `{file}` is no YAML: special characters are not allowed",
    "[" * 5000: "--config `{file}` cannot be read: ",
}


@pytest.mark.parametrize("text", FILES, ids=lambda text: text[:20].encode("unicode_escape").decode())
def test_a_file_is_refused_in_one_sentence(text, tmp_path):
    file = written(tmp_path, text)
    sentence = re.escape(FILES[text].replace("{file}", str(file)))
    with pytest.raises(UsageError, match=f"^{sentence}" + ("" if sentence.endswith(r"\ ") else "$")):
        load(RoundtripConfig, file=file, flags={} if "model" in text else {"model": "m"})


def test_a_file_that_is_none_is_refused(tmp_path):
    with pytest.raises(UsageError, match="is no file"):
        load(GoldenConfig, file=tmp_path)
    with pytest.raises(UsageError, match="is no file"):
        load(GoldenConfig, file=Path("/dev/zero"))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x80")
    with pytest.raises(UsageError, match=r"cannot be read|is no YAML"):
        load(GoldenConfig, file=tmp_path / "binary.yaml")


def test_an_empty_file_gives_nothing(tmp_path):
    assert load(NoiseConfig, file=written(tmp_path, "# nothing\n"), flags={"model": "m"})[0] == NoiseConfig(model="m")
