// package: @openai/agents
// policy: <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>
// policy: {"total": 3}
// An agent with a tool and a type of output.
import { Agent, run, setTracingDisabled, tool } from "@openai/agents";
import { z } from "zod";

setTracingDisabled(true);
const add = tool({
  name: "add",
  description: "Add two numbers.",
  parameters: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => String(a + b),
});
const agent = new Agent({
  name: "a",
  model: process.env.OPENAI_MODEL,
  tools: [add],
  outputType: z.object({ total: z.number() }),
});
const result = await run(agent, "1 and 2");
if (result.finalOutput.total !== 3) throw new Error(JSON.stringify(result.finalOutput));
