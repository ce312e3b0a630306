"""Harness for the package verifiers: one call of the model for each turn, in this process."""

from __future__ import annotations

from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

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
