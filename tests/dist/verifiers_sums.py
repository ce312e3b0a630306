"""A task set of the package verifiers with an environment of several turns: sums, and a user who says what is wrong."""

import verifiers.v1 as vf

__all__ = ["SumEnvironment", "Sums"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def turns(self, task, trace) -> float:
        return float(trace.num_turns)

    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        return float(trace.messages[-1].content == task.answer)


class SumConfig(vf.TasksetConfig):
    largest: int = 9


class Sums(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for left in range(1, self.config.largest + 1):
            for right in range(1, self.config.largest + 1):
                data = SumData(prompt=f"{left}+{right}=", system_prompt="####", answer=str(left + right))
                yield SumTask(data, self.config.task)


class SumEnvironmentConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class SumEnvironment(vf.Env[SumEnvironmentConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as talk:
            said = await talk.turn()
            for wrong in range(1, 4):
                if said.terminated or said.last_reply == task.data.answer:
                    break
                said = await talk.turn(f"-{wrong}")
