# package: crewai
# policy: Thought: I know it\nFinal Answer: red
"""A crew of one agent."""

import os

from crewai import LLM, Agent, Crew, Task

model = LLM(
    model=f"openai/{os.environ['OPENAI_MODEL']}",
    base_url=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
agent = Agent(role="a", goal="answer", backstory="none", llm=model)
task = Task(description="name a color", expected_output="a color", agent=agent)
assert "red" in Crew(agents=[agent], tasks=[task]).kickoff().raw
