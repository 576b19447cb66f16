// package: @langchain/openai
// policy: red
// policy: red
// policy: red
// policy: {"color": "red"}
// A batch, and structured output.
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";

const model = new ChatOpenAI({
  model: process.env.OPENAI_MODEL,
  configuration: { baseURL: process.env.OPENAI_BASE_URL },
});

function same(found, expected) {
  if (JSON.stringify(found) !== JSON.stringify(expected)) throw new Error(JSON.stringify(found));
}

same((await model.batch(["a", "b", "c"])).map((answer) => answer.content), ["red", "red", "red"]);
const schema = z.object({ color: z.enum(["red", "blue"]) });
const typed = model.withStructuredOutput(schema, { method: "jsonSchema" });
same(await typed.invoke("go"), { color: "red" });
