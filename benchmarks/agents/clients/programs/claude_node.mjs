// package: @anthropic-ai/sdk
// policy: <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>
// policy: the sum is 3
// A streamed call of a tool, and the answer to its result.
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic();
const messages = [{ role: "user", content: "go" }];
const tools = [{ name: "add", input_schema: { type: "object", properties: { a: { type: "number" } } } }];
const how = { model: process.env.OPENAI_MODEL, max_tokens: 500, tools };
const called = await client.messages.stream({ ...how, messages }).finalMessage();
const use = called.content.find((block) => block.type === "tool_use");
messages.push({ role: "assistant", content: called.content });
messages.push({
  role: "user",
  content: [{ type: "tool_result", tool_use_id: use.id, content: String(use.input.a + use.input.b) }],
});
const last = await client.messages.create({ ...how, messages });
if (last.content[0].text !== "the sum is 3") throw new Error(JSON.stringify(last));
