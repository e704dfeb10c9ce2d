// Calls by Vercel's AI SDK: `node ai_sdk_calls.mjs URL MODEL`, in a folder with its packages.
import assert from "node:assert";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const options = { apiKey: "none", baseURL: `${url}/v1` };
const compatible = createOpenAICompatible({ name: "megakv", supportsStructuredOutputs: true, ...options });
for (const served of [compatible(model), createAnthropic(options)(model)]) {
  const asked = { model: served, maxRetries: 0, maxOutputTokens: 100 };
  const said = await generateText({ ...asked, maxOutputTokens: 8, prompt: "aa ab" });
  const messages = [{ role: "user", content: "aa ab" }, ...said.response.messages, { role: "user", content: "ac" }];
  await generateText({ ...asked, maxOutputTokens: 4, messages });
  const stream = streamText({ ...asked, maxOutputTokens: 8, prompt: "aa ab" });
  let text = "";
  for await (const part of stream.textStream) text += part;
  assert.equal(text, await stream.text);
  const inputSchema = z.object({ deep: z.boolean() });
  const tools = { look: tool({ description: "Looks.", inputSchema, execute: async () => "none" }) };
  const called = await generateText({ ...asked, tools, toolChoice: { type: "tool", toolName: "look" }, prompt: "aa" });
  assert.equal(called.toolCalls[0].toolName, "look");
  await generateText({ ...asked, maxOutputTokens: 4, messages: [{ role: "user", content: "aa" }, ...called.response.messages] });
}
const found = await generateObject({
  model: compatible(model), maxRetries: 0, maxOutputTokens: 60, schema: z.object({ deep: z.boolean() }), prompt: "aa",
});
assert.equal(typeof found.object.deep, "boolean");
