"""A fault: one shipped bug, written as the function that stands in for the right one, and what must catch it."""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verifier.core.stage import Stage
from verifier.errors import ContractError
from verifier.mesh import Mesh


class Side(enum.Enum):
    """Process in which the bug lives."""

    TRAINER = "trainer"
    ENGINE = "engine"
    """Every worker of the engine."""
    DRIVER = "driver"
    """The engine's process that schedules requests and collects what the workers return."""
    CONTROLLER = "controller"
    """The controller of a training run."""


@dataclass(slots=True)
class FireCounter:
    """Number of times that the injected code ran in this process. A trial in which it never ran proves nothing."""

    count: int = 0
    mark: Path | None = None
    """File that appears when the code runs for the first time, so that it is known of a process that died too."""
    state: dict[str, Any] = field(default_factory=dict)
    """Values that a fault keeps from one call to the next; empty again when the fault is healed."""
    healing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Calls that undo what the fault left behind; the last one added comes first."""

    def __call__(self) -> None:
        """Count one run of the injected code."""
        self.count += 1
        if self.count == 1 and self.mark is not None:
            self.mark.touch()


class Call:
    """One call of a function that a fault stands in for. The arguments are attributes, by the function's own names."""

    def __init__(self, function: Callable[..., Any], bound: inspect.BoundArguments, fire: FireCounter) -> None:
        self._function, self._bound = function, bound
        self.fire, self.state = fire, fire.state

    def __getattr__(self, name: str) -> Any:
        """Return an argument, or its default."""
        parameter = self._bound.signature.parameters.get(name)
        if parameter is None:
            raise AttributeError(name)
        return self._bound.arguments.get(name, parameter.default)

    def original(self, **changed: Any) -> Any:
        """Call the function itself, with the same arguments but for those given."""
        bound = inspect.BoundArguments(self._bound.signature, {**self._bound.arguments, **changed})
        return self._function(*bound.args, **bound.kwargs)

    def faulty(self, **changed: Any) -> Any:
        """Call the function itself with wrong arguments, and count it."""
        self.fire()
        return self.original(**changed)

    def wrong(self, value: Any) -> Any:
        """Return a wrong value, and count it."""
        self.fire()
        return value

    def undo(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function when the fault is healed; the last one given is called first."""
        self.fire.healing.callback(function, *args)


Body = Callable[[Call], Any]
"""Replacement of a function."""
Register = Callable[[Callable[..., Any]], "Fault"]
"""Decorator that makes a fault of a function."""
TRAINING = "train"
"""Engine of a fault of a training run; its trials are short runs of `verifier train`."""
SAMPLES = ("algorithm=grpo", "data.rollouts=null")
"""Knobs of a training run whose engine samples."""
HF_SAMPLES = (*SAMPLES, "engine.kind=hf", "data.batch_size=4")
NO_ENGINE = "none"
"""Engine of a fault that is caught before anything is exported: its trials load, score, replay and train only."""


@contextlib.contextmanager
def replaced(target: str, body: Body, fire: FireCounter | None = None) -> Iterator[None]:
    """Let a function of a `Call` stand in for ``package.module:Owner.name(parameters)`` until exit, even on an error.

    Raises:
        ContractError: the target is gone or has other parameters: the fault would patch nothing, or something else.
    """
    path, _, parameters = target.removesuffix(")").partition("(")
    module, _, names = path.partition(":")
    *parents, name = names.split(".")
    owner: Any = importlib.import_module(module)
    for parent in parents:
        owner = getattr(owner, parent, None)
    if owner is None or not hasattr(owner, name):
        raise ContractError(f"`{path}` is not there in this version: the fault cannot be injected")
    raw, inherited = inspect.getattr_static(owner, name), name not in vars(owner)
    unbound = isinstance(raw, staticmethod | classmethod)
    function = raw.__func__ if unbound else getattr(owner, name)
    signature, counter = inspect.signature(function), fire or FireCounter()
    found = ", ".join(signature.parameters)
    if found != parameters:
        raise ContractError(f"`{path}` has parameters ({found}), the fault was written for ({parameters})")

    def faulty(*args: Any, **kwargs: Any) -> Any:
        return body(Call(function, signature.bind(*args, **kwargs), counter))

    if inspect.isclass(raw) and hasattr(raw, "__dataclass_fields__"):
        vars(faulty)["__dataclass_fields__"] = raw.__dataclass_fields__  # callers ask which fields a version has
    setattr(owner, name, type(raw)(faulty) if unbound else faulty)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One row of the catalogue."""

    id: str
    """Mechanism of the bug, kebab-case."""
    stage: Stage
    """Stage in which the bug sits, and so the first bad stage that every report on it must name."""
    reproduces: str
    """Repository and issue, pull request or commit of the bug that shipped."""
    summary: str
    """One sentence: what goes wrong, at the size that it had in life."""
    caught_by: tuple[str, ...]
    """Codes of the checks that must be violated."""
    side: Side = Side.TRAINER
    model: str = "tiny:qwen3-moe"
    mesh: Mesh = field(default_factory=Mesh)
    """Smallest mesh on which the bug shows."""
    engine: str = "hf"
    dtype: str = "float32"
    update: str = "step"
    cycles: int = 2
    engine_tp: int = 1
    engine_pp: int = 1
    engine_ep: int = 1
    fixes: tuple[str, ...] = ()
    """Ids of the upstream fixes without which the clean run does not hold."""
    lora_rank: int = 0
    """Rank of the adapter that is trained and synced while the base is frozen; 0 trains the whole model."""
    training: tuple[str, ...] = ()
    """Knobs of the training run, key=value, besides model and mesh; see `verifier.faults.training_trial`."""
    saved_on: Mesh | None = None
    """Mesh of the run before a resume, where it is another, or where the bug sits in another stage than checkpoint."""
    in_derivation: bool = False
    """Inject it where the layout of a model without a row is derived too, as a bug of a load that shipped is."""
    gpus: int = 0
    """GPUs that the bug needs. Above 0, its trial is a test of `tests/h100`."""
    replacements: list[tuple[str, Body]] = field(default_factory=list, compare=False, repr=False)
    """Targets and what stands in for each while the fault is injected."""

    @property
    def resumes(self) -> bool:
        """True if its runs are those that go on from a checkpoint."""
        return self.stage is Stage.CHECKPOINT or self.saved_on is not None

    def also(self, target: str) -> Callable[[Body], Body]:
        """Replace a further target by the decorated function."""

        def add(body: Body) -> Body:
            self.replacements.append((target, body))
            return body

        return add

    @contextlib.contextmanager
    def inject(self, fire: FireCounter) -> Iterator[None]:
        """Patch the real code path, and heal it on exit, even on an error.

        Raises:
            ContractError: a target is gone or has other parameters than the fault was written for.
        """
        with contextlib.ExitStack() as stack:
            for target, body in self.replacements:
                stack.enter_context(replaced(target, body, fire))
            stack.callback(fire.state.clear)
            stack.enter_context(fire.healing)
            yield


FOLDER = Path(__file__).parent
"""Folder of the rollouts and prompts of faults."""
CATALOG: dict[str, Fault] = {}
"""Every registered fault by id; `verifier.faults.catalog` imports the files that register them."""


def fault(reproduces: str, *targets: str, **row: Any) -> Register:
    """Register the decorated function, which stands in for each target (see `replaced`) while the fault is injected.

    Its name, with dashes, is the fault's id, and the first line of its docstring the summary. It calls `Call.fire`
    where the wrong thing happens. The row has other fields of `Fault`.

    Raises:
        ValueError: the id is taken, or the function has no docstring.
    """

    def register(body: Body) -> Fault:
        name = body.__name__.replace("_", "-")
        if not body.__doc__:
            raise ValueError(f"fault `{name}` has no summary: write the docstring first")
        if name in CATALOG:
            raise ValueError(f"fault id `{name}` is taken")
        summary = inspect.cleandoc(body.__doc__).splitlines()[0]
        replacements = [(target, body) for target in targets]
        CATALOG[name] = Fault(id=name, reproduces=reproduces, summary=summary, replacements=replacements, **row)
        return CATALOG[name]

    return register


in_training = functools.partial(fault, engine=TRAINING, model="tiny:add")
"""Decorator like `fault` for bugs of training runs, of the smallest model."""


def kind(*targets: str, **common: Any) -> Callable[[Callable[..., Any]], Callable[..., Register]]:
    """Make a decorator like `fault` for bugs of one kind, which share targets and some fields.

    The function that this decorates is the body of all of them. It is called with the one function in which they
    differ, and the `Call`.
    """

    def register(body: Callable[..., Any], reproduces: str, **row: Any) -> Register:
        add = fault(reproduces, *targets, **common | row)
        return lambda part: add(functools.wraps(part)(functools.partial(body, part)))

    return lambda body: functools.partial(register, body)


@contextlib.contextmanager
def held(owner: Any, **values: Any) -> Iterator[None]:
    """Give attributes other values for a while."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def tensors_named(chunks: Any, ending: str) -> Iterator[Any]:
    """Parameters and buffers of these model chunks whose names end so."""
    for chunk in chunks:
        for name, tensor in itertools.chain(chunk.named_parameters(), chunk.named_buffers()):
            if name.endswith(ending):
                yield tensor
