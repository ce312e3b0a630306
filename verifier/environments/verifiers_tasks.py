"""Task sets and environments of the package verifiers, which is optional: loaded by name, with their prompts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from verifier.errors import UsageError


def load_package() -> Any:
    """The package's module `verifiers.v1`.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import verifiers.v1 as vf
    except ImportError as absent:
        raise UsageError(
            f"the package verifiers 0.4.0 is not installed ({absent}): install ci/locks/environments.txt"
        ) from absent
    return vf


def load_environment(name: str, options: Mapping[str, Any]) -> Any:
    """The environment of a task set, whose one agent is the model that trains.

    Args:
        name: of the task set, an importable module.
        options: of its config, such as {"taskset": {...}}.

    Raises:
        UsageError: it cannot be made, has several agents, or has tools.
    """
    vf = load_package()
    # The package imports a harness as a module of its own folder.
    sys.modules[f"verifiers.v1.harnesses.{HARNESS}"] = harness_module()
    raw: dict[str, Any] = {**options, "taskset": {**options.get("taskset", {}), "id": name}}
    try:
        kind = vf.env_config_type(name, str(raw.get("id", "")))
        agents = [key for key, item in kind.model_fields.items() if isinstance(item.default, vf.AgentConfig)]
        if len(agents) == 1:
            # Its default is a sandbox of a service; no program runs in this one.
            raw[agents[0]] = {"runtime": {"type": "subprocess"}, **raw.get(agents[0], {}), "harness": {"id": HARNESS}}
        made = vf.load_environment(vf.resolve_env_config(raw))
        served = made.taskset.toolsets(made.taskset.config), made.taskset.task_type().toolsets(made.taskset.config.task)
    except Exception as error:  # a user's code may raise anything
        words = " ".join(str(error).split())[:300]
        raise UsageError(f"`verifiers:{name}` cannot be made: {type(error).__name__}: {words}") from error
    if len(agents) != 1:
        raise UsageError(
            f"`verifiers:{name}` has the agents {', '.join(agents)}: only one can be the model that trains"
        )
    if any(served):
        raise UsageError(f"`verifiers:{name}` serves tools over MCP: turns are text so far, take one without tools")
    return made


def prompts_of(
    name: str, options: Mapping[str, Any]
) -> Iterator[tuple[str, list[tuple[str, str]], str | None, dict[str, Any]]]:
    """Id, opening messages, answer and further columns of each task of a task set, in order.

    Raises:
        UsageError: see `load_environment`; a task has no prompt, or one that is no text.
    """
    taskset = load_environment(name, options).taskset
    for number, task in enumerate(taskset):
        data = task.data
        prompt = [("user", data.prompt)] if isinstance(data.prompt, str) else [
            (item.role, item.content) for item in data.prompt or ()
        ]  # fmt: skip
        if not prompt or not all(isinstance(text, str) for _, text in prompt):
            raise UsageError(f"task {number} of `verifiers:{name}` has no prompt of text: an episode opens with one")
        before = [("system", data.system_prompt)] if data.system_prompt else []
        answer = getattr(data, "answer", None)
        about = {"name": name, "options": dict(options), "task": number}
        yield f"{name}/{number}", [*before, *prompt], None if answer is None else str(answer), {"verifiers": about}


HARNESS = "verifier_turns"
"""Name under which the package finds it."""


@cache
def harness_module() -> ModuleType:
    """Module that has the harness, as the package imports one."""
    import httpx
    from verifiers.v1.configs.harness import HarnessConfig
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harness import Harness
    from verifiers.v1.runtimes import ProgramResult
    from verifiers.v1.types import SystemMessage, UserMessage

    class TurnConfig(HarnessConfig):
        pass

    class TurnHarness(Harness[TurnConfig]):
        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages = [UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or ())
            if system:
                messages.insert(0, SystemMessage(content=system))
            body = {"model": ctx.model, "messages": [message_to_wire(item) for item in messages]}
            async with httpx.AsyncClient(timeout=None, trust_env=False) as web:  # noqa: S113 - the model takes its time
                said = await web.post(
                    f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}
                )
            return ProgramResult(exit_code=0 if said.is_success else 1, stdout="", stderr=said.text)

    made = ModuleType(f"verifiers.v1.harnesses.{HARNESS}")
    made.__spec__ = ModuleSpec(made.__name__, None)
    made.__dict__.update(__all__=["TurnHarness"], TurnHarness=TurnHarness)
    return made
