// package: ai
// policy: {"color": "red"}
// policy: {"color": "red"}
// policy: <tool_call>\n{"name": "json", "arguments": {"color": "red"}}\n</tool_call>
// policy: <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>
// policy: the sum is 3
// policy: <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>
// policy: the sum is 3
// policy: the text
// Objects over three APIs, a tool over responses and over messages, and a stream.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, generateObject, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const openai = createOpenAI();
const anthropic = createAnthropic({ baseURL: `${process.env.ANTHROPIC_BASE_URL}/v1` });
const name = process.env.OPENAI_MODEL;
const schema = z.object({ color: z.enum(["red", "blue"]) });
const tools = {
  add: tool({
    description: "Add two numbers.",
    inputSchema: z.object({ a: z.number(), b: z.number() }),
    execute: async ({ a, b }) => a + b,
  }),
};

function same(found, expected) {
  if (JSON.stringify(found) !== JSON.stringify(expected)) throw new Error(JSON.stringify(found));
}

for (const model of [openai(name), openai.chat(name), anthropic(name)])
  same((await generateObject({ model, schema, prompt: "go" })).object, { color: "red" });
for (const model of [openai(name), anthropic(name)]) {
  const found = await generateText({ model, tools, prompt: "go", stopWhen: stepCountIs(3) });
  same([found.steps[0].toolResults[0].output, found.text], [3, "the sum is 3"]);
}
let text = "";
for await (const part of streamText({ model: openai(name), prompt: "go" }).textStream) text += part;
same(text, "the text");
