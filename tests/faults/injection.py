"""Every fault of one side injected and healed in this process: ``python -m tests.faults.injection trainer``."""

from __future__ import annotations

import importlib
import inspect
import sys

from verifier.errors import ContractError
from verifier.faults.catalog import CATALOG
from verifier.faults.fault import FireCounter, Side


def found(target):
    """The object at a target, and whether its owner has it itself."""
    module, _, path = target.partition("(")[0].partition(":")
    owner = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return inspect.getattr_static(owner, name), name in vars(owner)


def refuses_other_parameters(fault):
    """Whether the fault is refused where the target's parameters are not those that it was written for."""
    target, body = fault.replacements[-1]
    fault.replacements[-1] = (target.replace("(", "(moved, "), body)
    try:
        with fault.inject(FireCounter()):
            return False
    except ContractError:
        return True
    finally:
        fault.replacements[-1] = (target, body)


def wrong(fault):
    """What injecting and healing a fault did otherwise than it must; empty if nothing."""
    before = [found(target) for target, _ in fault.replacements]
    fire = FireCounter()
    for _ in range(2):
        try:
            with fault.inject(fire):
                during = [found(target) for target, _ in fault.replacements]
                fire.state["kept"] = True
                raise KeyError
        except KeyError:
            pass
        if any(now is then for (now, _), (then, _) in zip(during, before, strict=True)):
            return "a target was not replaced"
        if fire.state:
            return "its state outlives it"
        if any(now != then for now, then in zip(before, map(found, [t for t, _ in fault.replacements]), strict=True)):
            return "a target is not what it was"
    if not refuses_other_parameters(fault):
        return "it is injected into a function with other parameters"
    return "a refused injection left something" if before != [found(t) for t, _ in fault.replacements] else ""


def main(side):
    """Print how many faults were injected, and what is wrong, a line each."""
    if side == "trainer":
        from verifier.platform import install_for

        install_for("cpu")
    chosen = [fault for fault in CATALOG.values() if (fault.side is Side.TRAINER) == (side == "trainer")]
    problems = [f"{fault.id}: {problem}" for fault in chosen if (problem := wrong(fault))]
    print(f"{len(chosen)} faults", *problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
