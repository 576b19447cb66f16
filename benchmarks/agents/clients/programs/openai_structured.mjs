// package: openai
// policy: {"color": "red"}
// policy: {"color": "red"}
// policy: <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>
// policy: the sum is 3
// parse() of chat completions and of responses with a schema of zod, and a tool that the package runs.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI();
const model = process.env.OPENAI_MODEL;
const Found = z.object({ color: z.enum(["red", "blue"]) });
const messages = [{ role: "user", content: "go" }];

function same(found, expected) {
  if (JSON.stringify(found) !== JSON.stringify(expected)) throw new Error(JSON.stringify(found));
}

const chat = await client.chat.completions.parse({
  model, messages, response_format: zodResponseFormat(Found, "found"),
});
same(chat.choices[0].message.parsed, { color: "red" });
const response = await client.responses.parse({
  model, input: "go", text: { format: zodTextFormat(Found, "found") },
});
same(response.output_parsed, { color: "red" });
const add = {
  type: "function",
  function: {
    name: "add",
    parameters: { type: "object", properties: { a: { type: "number" }, b: { type: "number" } } },
    parse: JSON.parse,
    function: ({ a, b }) => String(a + b),
  },
};
const runner = client.chat.completions.runTools({ model, messages, tools: [add], stream: true });
same(await runner.finalContent(), "the sum is 3");
