// package: openai
// policy: red
// Memory of WebAssembly, for which node reserves 8 GB of address space each, and a call.
import OpenAI from "openai";

const memories = [1, 2, 3, 4].map(() => new WebAssembly.Memory({ initial: 256, maximum: 65536 }));
new Uint8Array(memories[3].buffer).fill(1);
const code = Uint8Array.from([0, 97, 115, 109, 1, 0, 0, 0]);
await WebAssembly.instantiate(code);
const answer = await new OpenAI().chat.completions.create({
  model: process.env.OPENAI_MODEL,
  messages: [{ role: "user", content: "go" }],
});
if (answer.choices[0].message.content !== "red") throw new Error(JSON.stringify(answer));
