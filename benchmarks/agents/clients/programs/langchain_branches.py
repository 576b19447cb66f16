# package: langchain-openai
# policy: red
"""Parallel branches and `batch`, as threads that share a session."""

import os

from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableParallel
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model=os.environ["OPENAI_MODEL"])
ask = {name: ChatPromptTemplate.from_template(f"{name} of {{it}}") | model for name in "abc"}
answers = RunnableParallel(ask).invoke({"it": "x"})
assert {key: answer.content for key, answer in answers.items()} == dict.fromkeys("abc", "red")
assert [answer.content for answer in model.batch(list("wxyz"))] == ["red"] * 4
assert "".join(chunk.content for chunk in model.stream("go")) == "red"
